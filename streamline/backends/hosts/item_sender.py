"""The sending end, in a host, of a worker's channel to the consumer.

As with every channel, inputs are throttled and outputs never: there is room while there is credit, in items and bytes.
The size of the next items is unknown, so room is what the last ones' size allows: one for the first, then at most twice
as many as the last time, since a small item among large ones says little. Lists that leave no items count likewise; one
that is short because a batch needed no more says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from streamline.backends.ipc.exceptions import encode_failure
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import ItemsMessage, PackedItems, PackingError, ProgressMessage, WorkerEnded
from streamline.backends.ipc.state_codec import ColumnEncoder
from streamline.core.capacity import LIST_ITEMS, Capacity
from streamline.core.channel import Inbox, Sink
from streamline.core.flow import Chunk
from streamline.errors import TransportError

T = TypeVar("T")

MESSAGE_BYTES = 4 * 2**20
"""Bytes of items in one message; larger lists are split."""


class CreditCapacity(Capacity):
    """What one worker may have in flight to the consumer: as many items as its bytes are worth at the size of the last.

    Attributes:
      one_by_one: each item is sent before the next one is pulled, so that a crash doesn't lose it.
    """

    def __init__(self, items: int, size: int) -> None:
        super().__init__(items, size)
        self.one_by_one = False
        self._item_bytes = float(size)
        self._most = 1  # items of the next list
        self._part = math.inf  # items of a list that was cut short by what was asked for

    @property
    def room(self) -> int:
        if self.held:
            by_size = int((self.size - self.held_bytes) / self._item_bytes)
        else:
            by_size = max(1, int(self.size / self._item_bytes))
        return min(self.items - self.held, by_size, 1 if self.one_by_one else self._most)

    @property
    def room_at_once(self) -> int:
        return max(0, self.room)

    def items_of_message(self, most: int, room: int) -> int:
        """Return how many items fill a message; `most` are about to be pulled, of the `room` that there is."""
        self._part = most if most < room else math.inf
        return max(1, int(MESSAGE_BYTES / self._item_bytes))

    def note_pulled(self, items: int) -> None:
        """Admit twice as many the next time, at the most; a list that was cut short says nothing."""
        if items:
            self._most = max(2 * items, self._most if 2 * items >= self._part else self._most // 2)
        else:
            self._item_bytes = max(1.0, self._item_bytes / 2)
            self._most = min(2 * self._most, LIST_ITEMS)

    def add(self, items: int, size: int = 0) -> None:
        super().add(items, size)
        least = self._item_bytes if items < self._most // 4 else 1.0  # a short list says little
        self._item_bytes = max(least, size / items)


class OwnChannel(Generic[T]):
    """The last channel of a worker's chain: its items count there until the consumer has consumed them.

    Args:
      earlier: items in flight from an earlier host, which have never been in it.
    """

    def __init__(self, inbox: Inbox[T], earlier: int) -> None:
        self._inbox = inbox
        self._earlier = earlier
        self._pulled = InFlightBytes()  # from it, and in flight

    def note_pulled(self) -> None:
        """Take note of what has been pulled since the last time."""
        items, size = self._inbox.unreleased
        self._pulled.add(items - self._pulled.items, size - self._pulled.size)

    def free(self, items: int) -> None:
        """Let it have room for items that were consumed."""
        foreign = min(items, self._earlier)
        self._earlier -= foreign
        if items > foreign:
            self._inbox.free(items - foreign, self._pulled.take(items - foreign))


class ItemSender(Sink[T]):
    """What a driver sends a worker's items to.

    Args:
      worker: its number on the link.
      items: that may be in flight, of `size` bytes; one item is always admitted.
      held: items in flight from an earlier host, of `held_bytes` bytes.

    Attributes:
      on_edge: called before the first items, and before the end; None: nothing is.
    """

    def __init__(
        self, link: Link, states: ColumnEncoder, worker: int, items: int, size: int, held: int = 0, held_bytes: int = 0
    ) -> None:
        super().__init__(CreditCapacity(items, size))
        self.capacity: CreditCapacity
        self.capacity.held, self.capacity.held_bytes = held, held_bytes
        self.on_edge: Callable[[], object] | None = None
        self._begun = False
        self._link = link
        self._states = states
        self._worker = worker
        self._over = False
        self._own: OwnChannel[T] | None = None
        self._progress_acked = True  # no progress is in flight
        self._progress: Chunk[T] | None = None  # waits for that; the next one replaces it

    def keep(self, inbox: Inbox[T]) -> int:
        """Let items from `inbox`, the worker's own channel, count there until consumed: its bounds hold.

        Returns the items that may be in flight.
        """
        self._own = OwnChannel(inbox, self.capacity.held)
        self.capacity.limit_to(inbox.keep())
        return self.capacity.items

    def pull_size(self, room: int) -> tuple[int, int]:
        """Likewise; what fills a message is a list: large items are better sent while they are in the cache."""
        most, need = super().pull_size(room)
        full = self.capacity.items_of_message(most, room)
        return min(most, full), min(need, full)

    async def send(self, chunk: Chunk[T]) -> None:
        """Send a chunk, split into messages; waits only for bytes that don't fit.

        Raises:
          TransportError: an item can't be pickled; those before it have been sent.
        """
        start, count = 0, len(chunk.items)
        if not count:
            self._add_progress(chunk)
            return
        self.capacity.note_pulled(count)
        held: list[Any] = chunk.take_items()
        chunk = Chunk(held, chunk.states, chunk.progress)  # of the caller's, nothing is left
        if self._own is not None:
            self._own.note_pulled()
        while start < count:
            part = chunk.part(start, count - start) if start else chunk
            part, packed, failure = self._pack_part(part)
            stop = start + len(part.items)
            gone: list[Any] = [None] * (stop - start)
            held[start:stop] = gone  # a link needn't copy what it alone holds
            part = Chunk(gone, part.states, part.progress)
            if packed is not None:
                await self._wait_bytes(packed.nbytes)
                self._post(part, packed)
            if failure is not None:
                raise failure
            start = stop

    def finish(self) -> None:
        self._end(None)

    def fail(self, failure: BaseException) -> None:
        self._end(failure)

    def abandon(self) -> None:
        self._over, self._progress = True, None

    def credit(self, items: int, size: int) -> None:
        """Take credit for consumed items; 0 items: the progress has arrived."""
        if not items:
            self._progress_acked = True
            self._send_progress()
            return
        if self._own is not None:
            self._own.free(items)
        self.on_consumed(items, size)

    def _end(self, failure: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        progress, self._progress = self._progress, None
        if progress is not None:
            try:
                self._link.send(ProgressMessage(self._worker, self._states.dump(progress)))
            except Exception as error:
                failure = failure or error
        if self.on_edge is not None:
            self.on_edge()
        self._link.send(WorkerEnded(self._worker, None if failure is None else encode_failure(self._link, failure)))

    def _add_progress(self, chunk: Chunk[T]) -> None:
        """Send progress, or keep it until the last one has arrived."""
        self.capacity.note_pulled(0)
        self._edge()
        self._progress = None if self._over else chunk
        self._send_progress()

    def _send_progress(self) -> None:
        progress = self._progress
        if progress is None or not (self._progress_acked or self.capacity.one_by_one):
            return
        self._progress_acked, self._progress = False, None
        try:
            encoded = self._states.dump(progress)
        except Exception as error:
            self.fail(error)
        else:
            self._link.send(ProgressMessage(self._worker, encoded))

    def _pack_part(self, chunk: Chunk[T]) -> tuple[Chunk[T], PackedItems | None, BaseException | None]:
        """Return the first part of a chunk, packed into one message, or why its first item can't be sent."""
        while True:
            try:
                packed = self._link.pack(chunk.items)
            except PackingError as error:
                if not error.index:
                    return chunk, None, self._refusal(error)
                chunk = chunk.part(0, error.index)
                continue
            count = len(chunk.items)
            if packed.nbytes <= MESSAGE_BYTES or count <= 1:
                return chunk, packed, None
            chunk = chunk.part(0, max(1, count * MESSAGE_BYTES // packed.nbytes))
            del packed  # what may be given is packed once at a time

    def _post(self, chunk: Chunk[T], packed: PackedItems) -> None:
        count = len(chunk.items)
        self.sent += count
        self.capacity.add(count, packed.nbytes)
        self._progress = None  # these items' states are later
        self._edge()
        if not self._over:
            self._link.send(ItemsMessage(self._worker, packed, self._states.dump(chunk)))

    def _edge(self) -> None:
        if not self._begun:
            self._begun = True
            if self.on_edge is not None:
                self.on_edge()

    def _refusal(self, error: PackingError) -> TransportError:
        by = f"{self.filler} gives" if self.filler is not None else "the worker gives"
        refusal = TransportError(
            f"{by} an item that can't be pickled, so it can't leave the worker's process: {error.kind} "
            f"({error.__cause__}). Give plain data (arrays, numbers, strings, containers of them), or make the object "
            "after .merge(); Inline() and Threads() hand over any object"
        )
        refusal.__cause__ = error.__cause__
        return refusal
