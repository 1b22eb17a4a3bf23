"""In which order the results of concurrent calls leave: what is admitted, what is due, and what is left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from streamline.core.error_policy import Failure
from streamline.core.flow import LIST_ITEMS, Chunk
from streamline.core.state import Shifted, State, States

__all__ = ["Delivery", "InOrder", "LeftOut", "Part"]


In = TypeVar("In")


Out = TypeVar("Out")


PENDING: Any = object()


class Part(Generic[In]):
    """Consecutive inputs that were admitted together.

    Attributes:
      first: the position of `items[0]` in the upstream, counted from where it was opened.
    """

    __slots__ = ("after", "first", "items", "results", "states")

    def __init__(self, chunk: Chunk[In], first: int) -> None:
        self.items = chunk.items
        self.states: States = chunk.states
        self.after: State | None = chunk.after
        self.first = first
        self.results: list[Any] = [PENDING] * len(chunk.items)


class LeftOut:
    """In the place of a result: the item failed, and the stream goes on without it."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Delivery(ABC, Generic[In, Out]):
    """In which order results leave, and with which states. No I/O, no waiting.

    Attributes:
      left_out: how many results, of those put and not taken yet, are none.
      on_left_out: called when one of them would have been taken, before the state behind it is.
    """

    left_out = 0
    on_left_out: Callable[[Failure], None]

    def _first_left_out(self, results: list[Any], start: int, stop: int) -> int:
        """Return the first place among `results[start:stop]` without a result; `stop` if all have one."""
        if self.left_out:
            for at in range(start, stop):
                if isinstance(results[at], LeftOut):
                    return at
        return stop

    def _leave_out(self, result: LeftOut) -> None:
        self.left_out -= 1
        self.on_left_out(result.failure)

    def room(self, position: int) -> int:
        """Return how many inputs from `position` on the order allows to admit; 0: only after further deliveries."""
        return LIST_ITEMS

    @abstractmethod
    def admit(self, chunk: Chunk[In], position: int) -> list[Part[In]]:
        """Take note of a chunk whose first item has `position`, and return what of it has to run."""

    @abstractmethod
    def put(self, part: Part[In], index: int, result: Out) -> bool:
        """Take the result of item `index` of `part`; say whether something has become due."""

    def released(self) -> list[Part[In]]:
        """Return what was held back at the admission and has to run now."""
        return []

    @property
    def stranded(self) -> bool:
        """Whether a resume counted on inputs that have not come."""
        return False

    @abstractmethod
    def take(self) -> Chunk[Out] | None:
        """Return what is due; None if nothing is."""

    @abstractmethod
    def due(self, part: Part[In], index: int) -> bool:
        """Say whether a failure of item `index` of `part` may be reported although others still run."""


class InOrder(Delivery[In, Out]):
    """Results leave in the order of their inputs, with their inputs' states."""

    def __init__(self) -> None:
        self._parts: deque[Part[In]] = deque()
        self._next = 0

    def admit(self, chunk: Chunk[In], position: int) -> list[Part[In]]:
        part = Part(chunk, position)
        self._parts.append(part)
        return [part]

    def put(self, part: Part[In], index: int, result: Out) -> bool:
        part.results[index] = result
        return index == self._next and part is self._parts[0]

    def take(self) -> Chunk[Out] | None:
        if not self._parts:
            return None
        part, start = self._parts[0], self._next
        results, stop, end = part.results, start, len(part.results)
        while stop < end and results[stop] is not PENDING:
            stop += 1
        if start < stop != (found := self._first_left_out(results, start, stop)):
            stop = found
            if start == stop:
                self._leave_out(results[start])
                return self._behind(part, start)
        self._next = stop
        if stop == end:
            self._parts.popleft()
            self._next = 0
        elif stop == start:
            return None
        return Chunk(results[start:stop], Shifted(part.states, start), part.after if stop == end else None)

    def _behind(self, part: Part[In], index: int) -> Chunk[Out]:
        """Go on behind an item that has no result."""
        self._next = index + 1
        if self._next == len(part.results):
            self._parts.popleft()
            self._next = 0
            if part.after is not None:
                return Chunk((), (), part.after)
        return Chunk((), (), part.states[index])

    def due(self, part: Part[In], index: int) -> bool:
        return bool(self._parts) and part is self._parts[0] and index == self._next
