"""Where a worker's items leave its host: the sending end of a channel whose receiving end is at the other end.

As with every channel, inputs are throttled and outputs never: there is room while there is credit, in items and bytes.
How large the next items are is not known, so room is what the last ones' size allows, one for the first, and then twice
as many as the last time at the most: a small one among large ones says little. So it is with lists of which nothing is
left, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from streamline.backends.ipc.codec import StatesOut, failure_out
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import Ended, ItemsMessage, PackedItems, PackingError, ProgressMessage
from streamline.core.channel import Inbox
from streamline.core.counters import StageMeter, label
from streamline.core.flow import LIST_ITEMS, Chunk
from streamline.core.gate import resting
from streamline.errors import TransportError

__all__ = ["ItemSender"]


T = TypeVar("T")


ROOM = -1
"""The slot of a wait for room, as in `streamline.core.channel`."""


PARCEL_BYTES = 4 * 2**20
"""Items that are larger together cross one by one, or a few at a time."""


class ItemSender(Generic[T]):
    """What a driver fills.

    Args:
      states: how its states cross.
      worker: its number at this link.
      items: that may be on their way.
      size: bytes that may be on their way; one item is always admitted.
      held: items that are on their way already, of `held_size` bytes.

    Attributes:
      filler: the meter of the stage whose items wait for room here; None: nobody is told.
      one_by_one: each item is sent before the next is asked for, so that a death behind it doesn't take it along.
      on_edge: called before the first items are sent, and before the end is; None: nobody is.
    """

    def __init__(
        self, link: Link, states: StatesOut, worker: int, items: int, size: int, held: int = 0, held_size: int = 0
    ) -> None:
        self.filler: StageMeter | None = None
        self.longest = LIST_ITEMS
        self.one_by_one = False
        self.on_edge: Callable[[], object] | None = None
        self._begun = False
        self._link = link
        self._states = states
        self._worker = worker
        self._capacity = items
        self._size = size
        self._held = held
        self._held_bytes = held_size
        self._item_bytes = float(size)
        self._most = 1
        self._freed: anyio.Event | None = None
        self._over = False
        self._kept: Inbox[T] | None = None
        self._pulled = InFlightBytes()  # from there, and on their way
        self._foreign = held  # items on their way that aren't from there
        self._heard = True  # no progress is on its way
        self._progress: Chunk[T] | None = None  # waits for that; what comes next takes its place

    def keep(self, inbox: Inbox[T]) -> int:
        """Let what is pulled from `inbox`, the worker's own channel, count there until it has been dealt with.

        So its bounds hold, in items and bytes, and nothing is added to them. Returns the items that may be under way.
        """
        self._kept = inbox
        self._capacity = min(self._capacity, inbox.keep())
        return self._capacity

    @property
    def room(self) -> int:
        """Items that may be pulled now."""
        if not self._held:
            by_size = max(1, int(self._size / self._item_bytes))
        else:
            by_size = int((self._size - self._held_bytes) / self._item_bytes)
        return min(self._capacity - self._held, by_size, 1 if self.one_by_one else self._most)

    @property
    def room_at_once(self) -> int:
        """The room that is there without waiting, or 0."""
        return max(0, self.room)

    async def wait_room(self) -> int:
        """Wait until there is room, and return it; behind a full border, for a quarter of it: lists are to be long."""
        if room := self.room_at_once:
            return room
        while self._held > self._capacity * 3 // 4 or self.room < 1:
            await self._wait_freed()
        return self.room

    async def send(self, chunk: Chunk[T]) -> None:
        """Send a chunk, in parcels; waits only where the next one doesn't fit.

        Raises:
          TransportError: an item can't cross; those before it have been sent.
        """
        start, count = 0, len(chunk.items)
        if not count:
            self._come(chunk)
            return
        self._most = 2 * count
        if self._kept is not None:
            items, size = self._kept.unreleased
            self._pulled.add(items - self._pulled.items, size - self._pulled.size)
        while start < count:
            part = chunk.part(start, count - start) if start else chunk
            part, packed, failure = self._parcel(part)
            if packed is not None:
                await self._wait_bytes(packed.nbytes)
                self._post(part, packed)
            if failure is not None:
                raise failure
            start += len(part.items)

    def finish(self) -> None:
        """Say that this was all."""
        self._end(None)

    def fail(self, failure: BaseException) -> None:
        """Let the other end have what was sent, then the failure."""
        self._end(failure)

    def abandon(self) -> None:
        """Nobody is going to read: say nothing more."""
        self._over, self._progress = True, None

    def credit(self, items: int, size: int) -> None:
        """Take note that so many items have been dealt with at the other end; none: that progress has arrived."""
        if not items:
            self._heard = True
            self._go_on()
            return
        self._held -= items
        self._held_bytes -= size
        if self._kept is not None:
            self._free(self._kept, items)
        if self._freed is not None and (self._held <= self._capacity * 3 // 4 or not self._held):
            self._freed.set()
            self._freed = None

    def _free(self, inbox: Inbox[T], items: int) -> None:
        foreign = min(items, self._foreign)
        self._foreign -= foreign
        if items > foreign:
            inbox.free(items - foreign, self._pulled.take(items - foreign))

    def _end(self, failure: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        progress, self._progress = self._progress, None
        if progress is not None:
            try:
                self._link.send(ProgressMessage(self._worker, self._states.column(progress)))
            except Exception as error:
                failure = failure or error
        if self.on_edge is not None:
            self.on_edge()
        self._link.send(Ended(self._worker, None if failure is None else failure_out(self._link, failure)))

    def _come(self, chunk: Chunk[T]) -> None:
        """Tell of progress, or leave it until the last one has arrived."""
        self._item_bytes = max(1.0, self._item_bytes / 2)
        self._most = min(2 * self._most, LIST_ITEMS)
        self._edge()
        self._progress = None if self._over else chunk
        self._go_on()

    def _go_on(self) -> None:
        progress = self._progress
        if progress is None or not (self._heard or self.one_by_one):
            return
        self._heard, self._progress = False, None
        try:
            carried = self._states.column(progress)
        except Exception as error:
            self.fail(error)
        else:
            self._link.send(ProgressMessage(self._worker, carried))

    def _parcel(self, chunk: Chunk[T]) -> tuple[Chunk[T], PackedItems | None, BaseException | None]:
        """Return the first part of a chunk that crosses in one parcel, packed, or why its first item can't cross."""
        while True:
            try:
                packed = self._link.pack(chunk.items)
            except PackingError as error:
                if not error.index:
                    return chunk, None, self._refusal(error)
                chunk = chunk.part(0, error.index)
                continue
            count = len(chunk.items)
            if packed.nbytes <= PARCEL_BYTES or count <= 1:
                return chunk, packed, None
            chunk = chunk.part(0, max(1, count * PARCEL_BYTES // packed.nbytes))

    def _post(self, chunk: Chunk[T], packed: PackedItems) -> None:
        count = len(chunk.items)
        self._held += count
        self._held_bytes += packed.nbytes
        self._item_bytes = max(1.0, packed.nbytes / count)
        self._progress = None  # the states behind these are later
        self._edge()
        if not self._over:
            self._link.send(ItemsMessage(self._worker, packed, self._states.column(chunk)))

    def _edge(self) -> None:
        if not self._begun:
            self._begun = True
            if self.on_edge is not None:
                self.on_edge()

    async def _wait_bytes(self, size: int) -> None:
        while self._held and self._held_bytes + size > self._size:
            await self._wait_freed()

    async def _wait_freed(self) -> None:
        self._freed = anyio.Event()
        filler = self.filler
        if filler is not None:
            filler.wait_begins("wait_output", ROOM)
        try:
            await resting(self._freed.wait())
        finally:
            if filler is not None:
                filler.wait_ends(ROOM)

    def _refusal(self, error: PackingError) -> TransportError:
        by = f"{label(self.filler.name, self.filler.kind)} gives" if self.filler is not None else "the worker gives"
        refusal = TransportError(
            f"{by} an item that can't be pickled, so it can't leave the worker's process: {error.kind} "
            f"({error.__cause__}). Give plain data (arrays, numbers, strings, containers of them), or make the object "
            "behind .merge(); Inline() and Threads() hand over any object"
        )
        refusal.__cause__ = error.__cause__
        return refusal
