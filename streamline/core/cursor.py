"""Item by item through lists: the iterators that users see, and the state that goes with each item.

Ctrl-C may come between any two bytecodes, and an item must be returned to the loop and counted, or neither. The count
is the length of the list at hand, and one call in C both shortens it and returns the item: a step of a `for` loop over
an iterator in C, during which Python handles no signal. Python code that an item needs runs before that, perhaps twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat, starmap
from operator import call
from typing import Any, Generic, NoReturn, Self, TypeVar, cast
from weakref import ref

from streamline.core.flow import Chunk, Flow
from streamline.core.state import Reference, State
from streamline.core.tracebacks import hide_frames

T = TypeVar("T")


def pop_uninterrupted(iterator: Iterator[T]) -> T:
    """Return the next item of an iterator in C that has one; Ctrl-C comes before it is taken, or after it is returned.

    Python checks for signals when a function begins and after a call into C, such as `next(iterator)`, but not in a
    `for` statement over an iterator in C, nor when a function returns to one that is written in Python.
    """
    for item in iterator: return item  # fmt: skip # noqa: E701 # one line: a trace function may raise between two
    raise AssertionError("unreachable: it has an item")


class PartIterator(chain[T], Generic[T]):
    """An iterator whose items come out of C, part by part; a subclass fetches the parts in Python.

    An exception while it fetches doesn't end it: the next `next` fetches again. It doesn't refer to itself, so that it
    is freed at once when it is dropped.
    """

    _turns: list[Iterator[T] | None]
    _fetching: Iterator[Any]

    def __new__(cls, *_: object, **__: object) -> Self:
        turns = list[Iterator[Any] | None]([None])  # the last is next; None is the end
        made = cast(Self, cls.from_iterable(iter(turns.pop, None)))
        made._turns = turns
        fetch: Callable[[Any], NoReturn] = cls._fetch_trimmed
        made._fetching = map(fetch, map(call, repeat(ref(made))))
        turns.append(made._fetching)
        return made

    @abstractmethod
    def _fetch_part(self) -> NoReturn:
        """Fetch a part, and end in `_go_on`. May be interrupted anywhere, and is then called again."""

    def _fetch_trimmed(self) -> NoReturn:
        """Call `_fetch_part`, and hide our frames in tracebacks."""
        try:
            self._fetch_part()
        except (StopIteration, StopAsyncIteration):
            raise
        except Exception as error:
            hide_frames(error)
            raise

    def _go_on(self, part: Iterator[T] | None) -> NoReturn:
        """Continue with `part`, an iterator in C, before the next part is fetched; None: that was all."""
        self._turns[1:] = () if part is None else (self._fetching, part)
        raise StopIteration

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is at work, and can't be pickled or copied")


class CurrentChunk(Generic[T]):
    """A list that is handed out item by item. One object, so that the step to the next list is one assignment: a
    signal's handler, or another thread, that asks for a state finds either list whole.

    An item that was taken is the taker's: nothing here refers to it any more.

    Attributes:
      rest: what was not taken yet.
      many: pops all but the last item off `rest`, in C. All items are taken here, so that no other count can disagree.
      last: likewise the last one.
      size: how many there were.
      received: items of all lists up to this one, also of those that were dropped.
      coming: the next list, from when it is fetched until it is current; part of this object, so that it is replaced in
        the same step.
    """

    __slots__ = (
        "_after", "_before", "_earlier", "_passed", "_states", "coming", "last", "many", "received", "rest", "size",
    )  # fmt: skip

    def __init__(self, chunk: Chunk[T], passed: int, before: Reference, earlier: Reference, received: int = 0) -> None:
        self.rest = rest = deque(chunk.items)
        self.size = size = len(rest)
        self.many: Iterator[T] = starmap(rest.popleft, repeat((), size - 1))
        self.last: Iterator[T] = starmap(rest.popleft, repeat((), size and 1))
        self.received = received + size
        self.coming: list[Chunk[T] | BaseException | None] = []
        self._states, self._after = chunk.states, chunk.progress
        self._passed, self._before, self._earlier = passed, before, earlier

    @property
    def count(self) -> int:
        """How many items have been taken, those of earlier lists included."""
        return self._passed + self.size - len(self.rest)

    @property
    def state_after(self) -> Reference:
        """The state right after the last item taken."""
        left = len(self.rest)
        if not left and self._after is not None:
            return Reference.to(self._after)
        return Reference(self._states, self.size - left - 1) if left < self.size else self._before

    @property
    def state_before(self) -> Reference:
        """The state right before the last item taken."""
        taken = self.size - len(self.rest)
        if taken > 1:
            return Reference(self._states, taken - 2)
        return self._before if taken else self._earlier

    @property
    def state_ahead(self) -> Reference:
        """The state right after the next item."""
        at = self.size - len(self.rest)
        if at == self.size - 1 and self._after is not None:
            return Reference.to(self._after)
        return Reference(self._states, at)

    def then(self, chunk: Chunk[T]) -> CurrentChunk[T]:
        return CurrentChunk(chunk, self.count, self.state_after, self.state_before, self.received)

    def drop(self) -> None:
        """Empty both iterators, also for a caller that already has one."""
        deque(self.many, 0)
        deque(self.last, 0)
        self.rest.clear()


class Cursor(ABC, Generic[T]):
    """A position in a flow: the current list, how much of it was taken, and the state that goes with it."""

    def __init__(self, begin: State) -> None:
        before = Reference.to(begin)
        self._current: CurrentChunk[T] = CurrentChunk(Chunk((), ()), 0, before, before)

    @property
    def count(self) -> int:
        return self._current.count

    @property
    def state(self) -> State:
        """The state right after the last item returned. It changes only while a pull is in progress."""
        return self.state_after.get()

    @property
    def at_hand(self) -> int:
        """Items of the current list that were not returned yet."""
        return len(self._current.rest)

    @property
    def state_after(self) -> Reference:
        """A reference to `state`."""
        return self._current.state_after

    @property
    def state_before(self) -> Reference:
        """The state right before the last item returned; before any was, that of the beginning."""
        return self._current.state_before

    def _begin_at(self, begin: State) -> None:
        """Set the state of the beginning, while no list is at hand."""
        before = Reference.to(begin)
        self._current = CurrentChunk(Chunk((), ()), self.count, before, before, self._current.received)

    def _load(self, chunk: Chunk[T]) -> None:
        self._current = self._current.then(chunk)

    def _forget(self) -> None:
        """Drop the rest of the list; the state stays that of the last item returned."""
        current = self._current
        self._load(Chunk((), ()))
        current.drop()

    def _to_give(self) -> bool:
        return bool(self._current.rest)

    def _part_at_hand(self) -> Iterator[T]:
        """Return an iterator in C over the current list: all but its last item, or that one, after `_on_consumed`."""
        current = self._current
        if len(current.rest) > 1:
            return current.many
        self._prepare_last(current)
        self._on_consumed(current)
        return current.last

    def _prepare_last(self, current: CurrentChunk[T]) -> None:
        """Prepare an item before it is taken, where lists are of one. Idempotent; if it raises, none is taken."""

    @abstractmethod
    def _on_consumed(self, current: CurrentChunk[T]) -> None:
        """Called right before the last item of a list is taken. Idempotent."""


class AsyncCursor(Cursor[T]):
    """An async iterator over lists that a subclass pulls."""

    def __aiter__(self) -> AsyncCursor[T]:
        return self

    async def __anext__(self) -> T:
        for item in self._current.many:
            return item
        try:
            part = await self.part()
        except StopAsyncIteration:
            raise
        except Exception as error:
            hide_frames(error)
            raise
        return pop_uninterrupted(part)

    async def part(self) -> Iterator[T]:
        """Return what `_part_at_hand` does, after pulling a list, if there is none; `StopAsyncIteration` at the end."""
        while not self._to_give():
            if (chunk := await self._pull()) is None:
                raise StopAsyncIteration
            self._load(chunk)
        return self._part_at_hand()

    def take_rest(self) -> list[T]:
        """Return the rest of the current list, as if each item had been asked for."""
        found = list(self._current.many)
        if self._current.rest:
            found.extend(self._part_at_hand())
        return found

    @abstractmethod
    async def _pull(self) -> Chunk[T] | None:
        """Return the next list; None at the end."""


class FlowReader(AsyncCursor[T]):
    """The items of a flow, one by one."""

    def __init__(self, flow: Flow[T]) -> None:
        super().__init__(flow.state)
        self._flow = flow

    async def _pull(self) -> Chunk[T] | None:
        return await self._flow.pull()

    def _on_consumed(self, current: CurrentChunk[T]) -> None:
        self._flow.release()
