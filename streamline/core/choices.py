"""The log of a choosing flow, in segments that link forward only: garbage collection frees what no state refers to.

A walk along the log goes from a mark to a later state of the same flow. If the flow's process died and another flow was
opened in its place, the log forks, and older states may be after the place at which the new flow began. So each segment
has a *generation*, and a walk takes the branch that leads to its target's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeVar

S = TypeVar("S", bound="LogSegment")


class LogSegment(ABC):
    """Some consecutive choices of one flow.

    Attributes:
      name: of the stage that chooses; "" if the log never leaves its process.
      later: the next segment, if there is one.
      generation: restarts of the flow's process before these choices.
      branches: later generations that began inside this segment: (where, first segment), oldest first.
    """

    __slots__ = ("__weakref__", "branches", "generation", "later", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.later: Any = None
        self.generation = 0
        self.branches: tuple[tuple[int, Any], ...] = ()

    def onward(self: S, target: LogSegment) -> tuple[int | None, S | None]:
        """Return where a walk to `target` leaves this segment (None: at its end), and the next segment of the walk."""
        for at, segment in reversed(self.branches):
            if segment.generation <= target.generation:
                return at, segment
        return None, self.later

    @abstractmethod
    def news(self, known: Any) -> tuple[Any, Any]:
        """Return what a copy in another process lacks, if anything, and what it then has `known` (at first None)."""

    @abstractmethod
    def learn(self, news: Any, shift: int) -> None:
        """Add the `news` of the original to this copy; `shift`: what this flow counts as 0, in its numbers."""


class Log(LogSegment):
    """A segment of choices, numbered on from one to the next."""

    __slots__ = ("made", "planned", "start")

    later: Log | None

    def __init__(self, start: int, made: list[int], planned: int, name: str = "") -> None:
        super().__init__(name)
        self.start = start
        self.made = made
        self.planned = planned  # choices below this number are given by the state that it was opened at

    def between(self, first: int, stop: int, target: Log | None = None) -> list[int]:
        """Return choices first ... stop - 1, of this segment or later ones, on the way to `target`."""
        found: list[int] = []
        log: Log | None = self
        while log is not None and log.start < stop:
            until, onward = log.onward(target or self)
            end = stop if until is None else min(stop, until)
            found += log.made[max(0, first - log.start) : max(0, end - log.start)]
            log = onward
        return found

    def leads_to(self, target: Log) -> bool:
        """Whether a walk from this segment reaches `target`."""
        log: Log | None = self
        while log is not None and log is not target:
            log = log.onward(target)[1]
        return log is target

    def news(self, known: Any) -> tuple[Any, Any]:
        return (None, known) if known else ((self.start, self.made, self.planned), True)

    def learn(self, news: Any, shift: int) -> None:
        start, self.made, planned = news
        self.start, self.planned = start + shift, planned + shift


class Branch(NamedTuple):
    """Where a choosing flow begins if it is opened at a state: `at` so far into `segment`; it counts `shift` as 0."""

    name: str
    segment: LogSegment
    at: int
    shift: int
