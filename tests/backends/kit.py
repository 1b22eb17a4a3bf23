"""Backends of tests; a module of their own, since a host process that needs something of `tests.kit` needs none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import streamline as sl
from streamline.backends.base import Backend, Workers
from streamline.core.flow import Site
from streamline.plan.plan import Plan


class AnyThreads(sl.Threads):
    """Threads that take pipelines without `.shard`, too: random ones are of every kind."""

    def check(self, plan: Plan) -> None:
        """Refuse nothing."""


@dataclass(frozen=True)
class Changing:
    """Another backend at each opening, in turn."""

    backends: Sequence[Backend]
    turns: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", cycle(self.backends))

    def check(self, plan: Plan) -> None:
        """Every plan runs here."""

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        backend: Backend = next(self.turns)
        return backend.begin(plan, site, workers)
