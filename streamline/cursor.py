"""Item by item through lists: the face of a flow that users see, and the state that goes with each item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from streamline.flow import Chunk, Flow
from streamline.states import Reference, State

__all__ = ["AsyncCursor", "Cursor", "Reader"]

T = TypeVar("T")


class Cursor(Generic[T]):
    """A place in a flow: the list at hand, how much of it was taken, and the state that goes with it.

    An item that was taken is the taker's: nothing here refers to it any more.
    """

    def __init__(self, begin: State) -> None:
        self._before = self._earlier = Reference.to(begin)
        self._chunk: Chunk[T] = Chunk((), ())
        self._items: list[Any] = []
        self._taken = 0
        self._last = -1
        self._passed = 0

    @property
    def count(self) -> int:
        """How many items have been taken so far."""
        return self._passed + self._taken

    @property
    def state(self) -> State:
        """The state right after the last item returned. It changes only while a pull is in progress."""
        return self.behind.get()

    @property
    def at_hand(self) -> int:
        """Items of the list at hand that were not returned yet."""
        return self._last + 1 - self._taken

    @property
    def behind(self) -> Reference:
        """The same as `state`, not made yet."""
        if self._taken > self._last and self._chunk.after is not None:
            return Reference.to(self._chunk.after)
        return Reference(self._chunk.states, self._taken - 1) if self._taken else self._before

    @property
    def before(self) -> Reference:
        """The state right before the last item returned; before any was, that of the beginning."""
        if self._taken > 1:
            return Reference(self._chunk.states, self._taken - 2)
        return self._before if self._taken else self._earlier

    def _begin_at(self, begin: State) -> None:
        """Say, before anything is taken, that the flow begins elsewhere than was said."""
        self._before = self._earlier = Reference.to(begin)

    def _load(self, chunk: Chunk[T]) -> None:
        """Go to the beginning of the next list."""
        self._earlier = self.before
        self._before = self.behind
        self._passed += self._taken
        self._items = list(chunk.items)
        self._last = len(self._items) - 1
        self._taken = 0
        self._chunk = Chunk((), chunk.states, chunk.after)

    def _forget(self) -> None:
        """Drop the items at hand; the state stays behind the last one returned."""
        self._earlier = self.before
        self._before = self.behind
        self._passed += self._taken
        self._chunk = Chunk((), ())
        self._items = []
        self._taken = 0
        self._last = -1

    def _take_last(self) -> T:
        """Return the last item of the list."""
        self._taken += 1
        item: T = self._items.pop()
        return item


class AsyncCursor(Cursor[T], ABC):
    """An async iterator over lists that a subclass pulls."""

    def __aiter__(self) -> AsyncCursor[T]:
        return self

    async def __anext__(self) -> T:
        taken = self._taken
        if taken < self._last:
            self._taken = taken + 1
            item: T = self._items[taken]
            self._items[taken] = None
            return item
        return await self._anext_edge()

    async def _anext_edge(self) -> T:
        """Return the last item of the list, or pull another list first."""
        while self._taken > self._last:
            if (chunk := await self._pull()) is None:
                raise StopAsyncIteration
            self._load(chunk)
        if self._taken < self._last:
            return await self.__anext__()
        item = self._take_last()
        self._dealt_with()
        return item

    def take_rest(self) -> list[T]:
        """Return the items of the list at hand, as if each had been asked for."""
        found: list[T] = self._items[self._taken :]
        if found:
            self._taken = self._last + 1
            self._items = []
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
