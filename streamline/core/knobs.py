"""Knobs: what of a stage can be turned while it runs, and their values in one event loop.

A knob changes when things are done, and how many are in flight; never an item, their order, or a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias
from weakref import WeakSet

KnobKind: TypeAlias = Literal["concurrency", "threads", "prefetch", "reads", "hosts"]
"""What is turned: calls of an async function at once; threads; items that are kept ready; requests of a source; threads
or processes in which workers run."""

HOSTS = "hosts"
"""The name of the knob that is no stage's: it is turned between passes only."""

MOST_CALLS = 1024
"""Calls of one stage at once, all shards of a rank together, where nothing else bounds them: each may hold a socket,
and 1,024 is the usual limit of a process."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One number of one stage, the same in all shards.

    Attributes:
      written: the number in the plan.
      most: of one shard.
      items_each: how many more items may be in flight in a shard for each one more.
    """

    stage: str
    kind: KnobKind
    written: int
    most: int = MOST_CALLS
    items_each: int = 1


class Turnable(Protocol):
    """What runs with a knob."""

    def resize(self, value: int, /) -> None:
        """Run with this value from now on. In the event loop's thread; never waits, and cuts nothing off."""


class KnobValues:
    """The values of one run's knobs in one event loop, passed on to `followers`; `hosts`: None, or at most so many."""

    def __init__(self, values: Mapping[str, int] | None = None, hosts: int | None = None) -> None:
        self.hosts = hosts
        self._values = dict(values or {})
        self._running: dict[str, WeakSet[Turnable]] = {}
        self.followers: list[Callable[[Mapping[str, int]], None]] = []

    @property
    def values(self) -> dict[str, int]:
        return dict(self._values)

    def join(self, stage: str, running: Turnable) -> None:
        """Give a running stage its knob's value, now and whenever it changes."""
        self._running.setdefault(stage, WeakSet()).add(running)
        if stage in self._values:
            running.resize(self._values[stage])

    def set(self, values: Mapping[str, int]) -> None:
        """Change values. In the event loop's thread."""
        self._values.update(values)
        for stage, value in values.items():
            for running in list(self._running.get(stage, ())):
                running.resize(value)
        for follow in list(self.followers):
            follow(values)
