"""Reads several files in turn, item by item, so that neighbouring items come from different files.

A shard has up to k *slots*, each of which reads a file. They take turns; a slot whose file has ended takes, at its
turn, the next unopened file, and is removed when there is none. So the order depends on the files alone.

State: {"slots": [place, ...], "next": path or None}: the slots' places in the order of turns (after the end of a file:
`Format.begin(None)`), and the first unopened file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Lists
from streamline.core.state import At, Json, Reference, State, States, Tally, Tree, trimmed
from streamline.io.formats.base import Place

T = TypeVar("T")

Open = Callable[[Place], Lists[T]]
"""Opens a file at a place; the state after its last item, where that is known, is in no file."""


@dataclass(frozen=True)
class ShardPlace:
    """The place of a shard: its slots' in the order of turns, and those at which unopened files begin."""

    slots: tuple[Place, ...]
    waiting: tuple[Place, ...]

    def json(self) -> Json:
        """Return this as a source's own part of a state."""
        slots = [dict(place) for place in self.slots]
        return {"slots": slots, "next": self.waiting[0]["file"] if self.waiting else None}


async def in_turn(name: str, turns: ShardPlace, open: Open[T]) -> Lists[T]:
    """Yield the items of several files in turn, from `turns` on; `open` opens a file, which is closed here."""
    async with AsyncExitStack() as stack:
        order: deque[_FileSlot[T]] = deque(_FileSlot(name, place) for place in turns.slots)
        for slot in order:
            stack.push_async_callback(slot.aclose)
        waiting = deque(turns.waiting)
        while order:
            if order[0].ready:
                yield _round(name, order, waiting[0]["file"] if waiting else None)
            elif await order[0].fill(open):
                if not order[0].ready:  # something was skipped
                    states, following = [slot.reached for slot in order], waiting[0]["file"] if waiting else None
                    yield Chunk((), (), _InterleavedState(name, states, following, order[0].reached))
            elif waiting:
                order[0].take(waiting.popleft())
            else:
                order.popleft()


class _FileSlot(Generic[T]):
    """Reads one file after the other.

    Attributes:
      items, states: of the last list; those from number `at` on are not delivered yet.
      reached: the state after what was delivered.
    """

    __slots__ = ("_after", "_lists", "_name", "_place", "at", "items", "reached", "states")

    def __init__(self, name: str, place: Place) -> None:
        self._name = name
        self._lists: Lists[T] | None = None
        self.items: Sequence[T] = ()
        self.states: States = ()
        self._after: Reference | None = None
        self.at = 0
        self.take(place)

    @property
    def ready(self) -> int:
        """Items that can be delivered."""
        return len(self.items) - self.at

    def take(self, place: Place) -> None:
        self._place = place
        self.reached = Reference.to(At(self._name, dict(place)))

    async def fill(self, open: Open[T]) -> bool:
        """Read a list; return False at the end of the file. All items read before were delivered."""
        if self._lists is None:
            if self._place["file"] is None:
                return False
            self._lists = open(self._place)
        chunk = await anext(self._lists, None)
        if chunk is None:
            await self.aclose()
            self._place = {**self._place, "file": None}
            return False
        self.items, self.states, self.at = chunk.items, chunk.states, 0
        self._after = chunk.end_reference
        if not chunk.items:
            self.reached = self._after
        return True

    def deliver(self, count: int) -> Sequence[T]:
        start, self.at = self.at, self.at + count
        found = self.items if count == len(self.items) else self.items[start : self.at]
        if not self.ready:
            assert self._after is not None
            self.reached, self.items, self.states, self.at = self._after, (), (), 0
        else:
            self.reached = Reference(self.states, self.at - 1)
        return found

    async def aclose(self) -> None:
        lists, self._lists = self._lists, None
        if lists is not None:
            await lists.aclose()


def _round(name: str, order: deque[_FileSlot[T]], following: str | None) -> Chunk[T]:
    """Deliver as many whole rounds as are ready; or, if some slot has nothing, one item of each slot before it."""
    size = len(order)
    rounds = min(min(slot.ready for slot in order), max(1, LIST_ITEMS // size))
    giving = size if rounds else next(index for index, slot in enumerate(order) if not slot.ready)
    columns = [_SlotStates(slot.reached, slot.states if i < giving else (), slot.at) for i, slot in enumerate(order)]
    lists = [slot.deliver(rounds or 1) for slot in list(order)[:giving]]
    items = lists[0] if giving == 1 else list(chain.from_iterable(zip(*lists, strict=True)))
    if giving < size:
        order.rotate(-giving)
    return Chunk(items, _InterleavedStates(name, columns, following, 0))


@dataclass(frozen=True)
class _SlotStates:
    """The states of one slot: `before` the first item of a list, and after item i: `states[first + i]`."""

    before: Reference
    states: States
    first: int

    def state_after(self, count: int) -> Reference:
        """Return the state after `count` items of the list."""
        return Reference(self.states, self.first + count - 1) if count else self.before

    def cut(self, skipped: int, count: int) -> _SlotStates:
        """Return this without the first items' states."""
        states = trimmed(self.states, self.first + skipped, count) if self.states != () else ()
        return _SlotStates(Reference.to(self.state_after(skipped).get()), states, 0)


@dataclass(slots=True, eq=False)
class _InterleavedStates:
    """The states after items of a list: item i is number i // slots of slot i mod slots."""

    _name: str
    _columns: Sequence[_SlotStates]  # of each slot, in the order of turns at the list's first item
    _following: str | None  # the first unopened file
    _start: int  # items of the first round that are not in this list

    def __getitem__(self, index: int, /) -> State:
        full, last = divmod(index + self._start, len(self._columns))
        states = [column.state_after(full + (slot <= last)) for slot, column in enumerate(self._columns)]
        return _InterleavedState(self._name, [*states[last + 1 :], *states[: last + 1]], self._following, states[last])

    def trimmed(self, first: int, count: int) -> States:
        size = len(self._columns)
        skipped, start = divmod(first + self._start, size)
        full, rest = divmod(start + count, size)
        columns = [column.cut(skipped, full + (slot < rest)) for slot, column in enumerate(self._columns)]
        return _InterleavedStates(self._name, columns, self._following, start)


@dataclass(slots=True, eq=False)
class _InterleavedState(State):
    """The state of a shard after an item that the slot at state `_last` gave."""

    _name: str
    _slots: Sequence[Reference]
    _following: str | None  # the first unopened file
    _last: Reference

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without what only other items need."""
        slots = [Reference.to(slot.get()) for slot in self._slots]
        return _InterleavedState, (self._name, slots, self._following, Reference.to(self._last.get()))

    def json(self, until: State | None = None) -> Tree:
        slots = [slot.get().json()[self._name] for slot in self._slots]
        return {self._name: {"slots": slots, "next": self._following}}

    def tally(self, found: Tally) -> None:
        """A source adds nothing."""

    def where(self) -> str:
        return self._last.get().where()
