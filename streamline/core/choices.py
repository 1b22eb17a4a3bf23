"""The log of a choosing flow, in segments that link forward only: what no state leads to any more is freed by itself.

A walk along the log goes from a mark to a later state of the same flow. Where a flow runs in another process that died,
and another was opened in its place, the log forks: states that came before may stand beyond the place at which the new
flow began. So each segment belongs to a *generation*, and a walk takes the branch that leads to its target's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeVar

S = TypeVar("S", bound="LogSegment")


class LogSegment(ABC):
    """Some consecutive choices of one flow.

    Attributes:
      name: of the stage that chooses; "" where the log never leaves its process.
      later: the next segment, once there is one.
      generation: restarts of the flow's process before these choices.
      branches: what began inside this segment, in a later generation: (where, first segment), oldest first.
    """

    __slots__ = ("__weakref__", "branches", "generation", "later", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.later: Any = None
        self.generation = 0
        self.branches: tuple[tuple[int, Any], ...] = ()

    def onward(self: S, target: LogSegment) -> tuple[int | None, S | None]:
        """Return where a walk to `target` leaves this segment (None: after its end), and the next one on the way."""
        for at, segment in reversed(self.branches):
            if segment.generation <= target.generation:
                return at, segment
        return None, self.later

    @abstractmethod
    def news(self, known: Any) -> tuple[Any, Any]:
        """Return what a copy elsewhere doesn't know yet (None: nothing), and what it has been known then.

        Args:
          known: as it was returned the last time; None: it knows nothing.
        """

    @abstractmethod
    def learn(self, news: Any, shift: int) -> None:
        """Take in what `news` has returned; the first time, this is a copy in which nothing is set but `LogSegment`'s.

        Args:
          shift: what this flow counts as 0, in the numbers of the first generation.
        """


class Log(LogSegment):
    """A segment of choices, numbered on from one to the next."""

    __slots__ = ("made", "planned", "start")

    later: Log | None

    def __init__(self, start: int, made: list[int], planned: int, name: str = "") -> None:
        super().__init__(name)
        self.start = start
        self.made = made
        self.planned = planned  # choices below this number were given at the opening, and stand until they are made

    def between(self, first: int, stop: int, target: Log | None = None) -> list[int]:
        """Return choices first ... stop - 1, all of this segment or later, on the way to `target`."""
        found: list[int] = []
        log: Log | None = self
        while log is not None and log.start < stop:
            until, onward = log.onward(target or self)
            end = stop if until is None else min(stop, until)
            found += log.made[max(0, first - log.start) : max(0, end - log.start)]
            log = onward
        return found

    def leads_to(self, target: Log) -> bool:
        """Whether `target` is of the same flow as this segment, or of one that was opened in its place."""
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
    """Where a choosing flow goes on if it is opened anew at a state.

    Attributes:
      name: of the stage.
      segment: that the state stands in.
      at: how far into it, as its walks count.
      shift: what the new flow will count as 0.
    """

    name: str
    segment: LogSegment
    at: int
    shift: int
