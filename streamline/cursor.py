"""Item by item through lists: the face of a flow that users see, and the state that goes with each item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import repeat, starmap
from typing import Generic, TypeVar

from streamline.errors import hide_frames
from streamline.flow import Chunk, Flow
from streamline.states import Reference, State

__all__ = ["AsyncCursor", "Cursor", "Hand", "Reader"]

T = TypeVar("T")


class Hand(Generic[T]):
    """A list that is handed out item by item. One object, so that going on to another list is one step: a signal's
    handler, or another thread, that asks for a state meanwhile finds either this list or that.

    An item that was taken is the taker's: nothing here refers to it any more.

    Attributes:
      rest: what was not taken yet.
      many: all but the last one, popped off `rest` without a line of Python. Whoever takes items takes them here, so
        that nobody else's is ever out of step.
      size: how many there were.
    """

    __slots__ = ("_after", "_before", "_earlier", "_passed", "_states", "many", "rest", "size")

    def __init__(self, chunk: Chunk[T], passed: int, before: Reference, earlier: Reference) -> None:
        self.rest = rest = deque(chunk.items)
        self.many: Iterator[T] = starmap(rest.popleft, repeat((), len(rest) - 1))
        self.size = len(rest)
        self._states, self._after = chunk.states, chunk.after
        self._passed, self._before, self._earlier = passed, before, earlier

    @property
    def count(self) -> int:
        """How many items have been taken, those of earlier lists included."""
        return self._passed + self.size - len(self.rest)

    @property
    def behind(self) -> Reference:
        """The state right behind the last item taken."""
        left = len(self.rest)
        if not left and self._after is not None:
            return Reference.to(self._after)
        return Reference(self._states, self.size - left - 1) if left < self.size else self._before

    @property
    def before(self) -> Reference:
        """The state right before the last item taken."""
        taken = self.size - len(self.rest)
        if taken > 1:
            return Reference(self._states, taken - 2)
        return self._before if taken else self._earlier

    def then(self, chunk: Chunk[T]) -> Hand[T]:
        """Return the list that comes next."""
        return Hand(chunk, self.count, self.behind, self.before)


class Cursor(Generic[T]):
    """A place in a flow: the list at hand, how much of it was taken, and the state that goes with it."""

    def __init__(self, begin: State) -> None:
        before = Reference.to(begin)
        self._hand: Hand[T] = Hand(Chunk((), ()), 0, before, before)

    @property
    def count(self) -> int:
        """How many items have been taken so far."""
        return self._hand.count

    @property
    def state(self) -> State:
        """The state right after the last item returned. It changes only while a pull is in progress."""
        return self.behind.get()

    @property
    def at_hand(self) -> int:
        """Items of the list at hand that were not returned yet."""
        return len(self._hand.rest)

    @property
    def behind(self) -> Reference:
        """The same as `state`, not made yet."""
        return self._hand.behind

    @property
    def before(self) -> Reference:
        """The state right before the last item returned; before any was, that of the beginning."""
        return self._hand.before

    def _begin_at(self, begin: State) -> None:
        """Say, while nothing is at hand, that the flow goes on from elsewhere than was said."""
        before = Reference.to(begin)
        self._hand = Hand(Chunk((), ()), self.count, before, before)

    def _load(self, chunk: Chunk[T]) -> None:
        """Go to the beginning of the next list."""
        self._hand = self._hand.then(chunk)

    def _forget(self) -> None:
        """Drop the items at hand; the state stays behind the last one returned."""
        hand = self._hand
        self._load(Chunk((), ()))
        deque(hand.many, 0)  # for whoever still takes from it
        hand.rest.clear()

    def _take_last(self) -> T:
        """Return the last item of the list."""
        return self._hand.rest.popleft()


class AsyncCursor(Cursor[T], ABC):
    """An async iterator over lists that a subclass pulls."""

    def __aiter__(self) -> AsyncCursor[T]:
        return self

    async def __anext__(self) -> T:
        for item in self._hand.many:
            return item
        try:
            return await self._anext_edge()
        except StopAsyncIteration:
            raise
        except Exception as error:
            hide_frames(error)
            raise

    async def _anext_edge(self) -> T:
        """Return the last item of the list, or pull another list first."""
        while not self._hand.rest:
            if (chunk := await self._pull()) is None:
                raise StopAsyncIteration
            self._load(chunk)
        for item in self._hand.many:
            return item
        item = self._take_last()
        self._dealt_with()
        return item

    def take_rest(self) -> list[T]:
        """Return the items of the list at hand, as if each had been asked for."""
        found = list(self._hand.many)
        if self._hand.rest:
            found.append(self._hand.rest.popleft())
            self._dealt_with()
        return found

    @abstractmethod
    async def _pull(self) -> Chunk[T] | None:
        """Return the next list; None at the end."""

    @abstractmethod
    def _dealt_with(self) -> None:
        """The last item of a list was handed out."""


class Reader(AsyncCursor[T]):
    """The items of a flow, one by one."""

    def __init__(self, flow: Flow[T]) -> None:
        super().__init__(flow.state)
        self._flow = flow

    async def _pull(self) -> Chunk[T] | None:
        return await self._flow.pull()

    def _dealt_with(self) -> None:
        self._flow.release()
