"""Workers as tasks of the stream's own event loop: the reference for every other backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streamline.core.channel import Inbox
from streamline.core.flow import Site
from streamline.core.state import Tree
from streamline.plan.plan import Plan
from streamline.plan.worker import open_worker
from streamline.sources.live import FedSource


@dataclass(frozen=True)
class Inline:
    """One task a worker, in the event loop that runs the stream."""

    def check(self, plan: Plan) -> None:
        """Every plan runs here."""

    def begin(self, plan: Plan, site: Site, workers: int) -> _InlineWorkers:
        return _InlineWorkers(plan)


@dataclass(frozen=True)
class _InlineWorkers:
    plan: Plan

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        plan = self.plan
        if feed is not None:
            plan = replace(plan, source=FedSource(name=plan.source.name, inbox=feed))
        return open_worker(plan, site, state)
