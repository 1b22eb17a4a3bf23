"""Channels: bounded queues between two tasks, which carry lists of items with their states.

A channel differs from a queue in three ways:

- The list that waits in the buffer stays open: what is sent next is appended to it until it is received, so no item
  waits for a list to fill, and a slow receiver gets few long lists.
- Its capacity is counted in items (and bytes, if asked for), including those that the receiver has taken but not
  consumed yet. A sender asks for room *before* it pulls: inputs are throttled, outputs never.
- It ends in three distinct ways: `finish`, `fail`, and `abandon`, when its driver is cancelled.

So it isn't anyio's memory object stream, though that hands a list over in a third of the time: there, a list is as it
was sent, ends are alike, and nothing waits for one of several, as a merge does.

Where items take no time to make, capacity and lists grow: a list with its task switches costs as much as a hundred of
them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio.lowlevel

from streamline.core.capacity import Capacity
from streamline.core.flow import Chunk, Flow
from streamline.core.gate import Gate, Rest
from streamline.core.state import Joined, Shifted, State, States
from streamline.core.tree import nbytes
from streamline.errors import ClosedError

if TYPE_CHECKING:
    from streamline.core.figures import ChannelStats
    from streamline.core.meters import StageMeter
    from streamline.core.tasks import Session

T = TypeVar("T")


class FlushPoints(NamedTuple):
    """Which items of one worker end its part of a batch after the merge: with fewer, the consumer can't go on.

    Item `first` has place `at` in its batch of `size`, and each one after it is `step` places on.
    """

    first: int
    at: int
    step: int
    size: int

    def next_boundary(self, sent: int, most: int) -> tuple[int, int]:
        """Return how many items after the first `sent` to ask for, `most` at the most, and how many end a part."""
        at = (self.at + (sent - self.first) * self.step) % self.size
        batches = (at + most * self.step) // self.size
        up_to = [-((at - size) // self.step) for size in (batches * self.size, self.size)]
        return up_to[0] if batches else most, up_to[1]


class Sink(ABC, Generic[T]):
    """Where items leave a task, and what bounds those that were not consumed yet.

    Attributes:
      capacity: what may be held in here, and with the receiver.
      filler: the meter of the stage whose items wait for room here; None: waits aren't counted.
      sent: items sent in all.
      flush_points: where a list has to be handed on although user code may be quick; None: everywhere.
      turns: of the event loop until what was sent has been taken; 2: to a consumer after the merge.
    """

    filler: StageMeter | None = None
    sent = 0
    turns = 2
    flush_points: FlushPoints | None = None

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._waiting: Rest | None = None

    @property
    def room_at_once(self) -> int:
        """Items that may be pulled now; 0 where `wait_room` waits."""
        return self.capacity.room_at_once

    def pull_size(self, room: int) -> tuple[int, int]:
        """Return how long a list to pull, and how many of its items the consumer can't go on without."""
        most = min(room, self.capacity.longest)
        return (most, 1) if self.flush_points is None else self.flush_points.next_boundary(self.sent, most)

    async def wait_room(self) -> int:
        """Wait until there is room, and return it; after it was full, for a quarter of it: lists are to be long."""
        if room := self.room_at_once:
            return room
        capacity = self.capacity
        capacity.note_full(perf_counter())
        while not capacity.is_low or capacity.room < 1:
            await self._wait_freed()
        capacity.note_room(perf_counter())
        return capacity.room

    @abstractmethod
    async def send(self, chunk: Chunk[T], /) -> None:
        """Hand on a chunk; waits only for bytes."""

    @abstractmethod
    def finish(self) -> None:
        """Say that this was all. Only a flow that has finished may."""

    @abstractmethod
    def fail(self, failure: BaseException, /) -> None:
        """Let the receiver have what was sent, then the failure."""

    @abstractmethod
    def abandon(self) -> None:
        """What is left will not be read."""

    def freed(self, items: int, size: int) -> None:
        """Take note that the receiver has consumed `items` items of `size` bytes together."""
        self.capacity.free(items, size)
        if self._waiting is not None and self.capacity.is_low:
            self._waiting.set()
            self._waiting = None

    async def _wait_bytes(self, size: int) -> None:
        """Wait until an item of `size` bytes fits."""
        while not self.capacity.fits(size):
            await self._wait_freed()

    async def _wait_freed(self) -> None:
        """Wait until the receiver has consumed some items; the filler's meter counts it."""
        self._waiting = Rest()
        await self._wait_metered(self._waiting)

    async def _wait_metered(self, freed: Rest) -> None:
        slot = -id(self)  # no call's, nor another channel's: a stage may wait for room in several, and for an input
        if self.filler is not None:
            self.filler.wait_begins("wait_output", slot)
        try:
            await freed.wait()
        finally:
            if self.filler is not None:
                self.filler.wait_ends(slot)


class Feeder:
    """What fills a channel: a task, or what stands for one elsewhere. It is told what becomes of the channel.

    A subclass overrides what concerns it; the rest does nothing.
    """

    def start(self) -> None:
        """Begin: called once, with the first pull or before it."""

    def cancel(self) -> None:
        """Ask it to end; don't wait."""

    async def stop(self) -> None:
        """Ask it to end, and wait for that."""

    def on_wait(self) -> None:
        """The receiver begins to wait for items."""

    def on_freed(self) -> None:
        """The receiver has consumed items."""

    def on_flush_points(self) -> None:
        """The channel has new flush points."""

    def on_closed(self) -> None:
        """The inbox is closed: no item will be read any more."""


class Channel(Sink[T]):
    """The sending end; `inbox` is the receiving one.

    Args:
      begin: the state before the first item.

    Attributes:
      gate: of the run that it belongs to, once that is known.
      meter: of this channel; None: not counted.
    """

    meter: ChannelStats | None = None

    def __init__(self, begin: State, capacity: Capacity, feeder: Feeder | None = None) -> None:
        super().__init__(capacity)
        self.feeder = Feeder() if feeder is None else feeder
        self.finished = False
        self.gate = Gate()
        self.failed = False
        self.open: Packet[T] | None = None
        self.inbox = Inbox(self, begin)

    def join(self, session: Session) -> None:
        """Take note of the run that this channel belongs to; before anything is sent."""
        self.gate = session.gate
        if session.most_ahead is not None:
            self.capacity.limit_to(session.most_ahead)

    def resize(self, capacity: int) -> None:
        """Hold so many items from now on, as far as it may; while there are more, none are admitted."""
        self.capacity.resize(capacity)
        self.freed(0, 0)  # there may be room

    async def wait_room(self) -> int:
        room = await super().wait_room()
        if self.meter is not None:
            self.meter.capacity = self.capacity.items
        return room

    def reserve(self, items: int, size: int = 0) -> None:
        """Count `items` as held from now on, before they are posted."""
        self.capacity.add(items, size)
        self.sent += items
        meter, held = self.meter, self.capacity.held
        if meter is not None:
            meter.depth = held
            if held > meter.peak:
                meter.peak = held

    def freed(self, items: int, size: int) -> None:
        super().freed(items, size)
        if self.meter is not None:
            self.meter.depth = self.capacity.held
            self.meter.capacity = self.capacity.items
        self.feeder.on_freed()

    async def send(self, chunk: Chunk[T]) -> None:
        """Hand on a chunk; waits only where a byte budget is set and an item doesn't fit."""
        capacity = self.capacity
        if capacity.size == math.inf:
            self.reserve(len(chunk.items))
            self.post(chunk)
            return
        one_by_one = not capacity.by_list and len(chunk.items) > 1
        for part in [chunk.part(index, 1) for index in range(len(chunk.items))] if one_by_one else [chunk]:
            if sizes := list(map(nbytes, part.items)):
                await self._wait_bytes(sum(sizes))
                self.reserve(len(sizes), sum(sizes))
                self._packet().sizes.extend(sizes)
            self.post(part)

    def admit(self, item: T, states: States, size: int) -> None:
        """Hand on one item of `size` bytes at once, whatever the room: the caller keeps the bounds."""
        self.reserve(1, size)
        self._packet().sizes.append(size)
        self.post(Chunk([item], states))

    def post(self, chunk: Chunk[T]) -> None:
        """Hand on a chunk whose items have been reserved."""
        if not chunk.items and chunk.progress is None:
            return
        packet = self._packet()
        if chunk.items:
            packet.states.add(len(packet.items), chunk.states)
            packet.items.extend(chunk.items)
            if self.meter is not None:
                self.meter.items += len(chunk.items)
        packet.after = chunk.progress  # supersedes an earlier one: at most one progress is pending
        self.inbox.notify()

    def finish(self) -> None:
        self.finished = True
        self.inbox.notify()
        if self.inbox.on_end is not None:
            self.inbox.on_end(self.failed)

    def fail(self, failure: BaseException) -> None:
        self._packet().failure = failure
        self.failed = True
        self.finish()

    def abandon(self) -> None:
        """Close both ends: what is left will not be read."""
        self.open = None
        self.inbox.shut()

    async def _wait_freed(self) -> None:
        await super()._wait_freed()
        await self.gate.passage()

    def _packet(self) -> Packet[T]:
        if self.open is None:
            self.open = Packet()
        return self.open


class Inbox(Flow[T]):
    """The receiving end: a flow whose state travelled with the last item received.

    Cancel-safe: a cancelled pull has taken nothing. Its other face, for a merge that looks at several inboxes, is
    `start`, `ready`, `take`, `over` and `wait`.
    """

    def __init__(self, channel: Channel[T], begin: State) -> None:
        super().__init__(begin)
        self._channel = channel
        self._news: Rest | None = None  # as long as the receiver waits
        self._packet: Packet[T] = Packet()
        self._position = self._unreleased = self._unreleased_bytes = 0
        self._shut = self._waiting = self._keeps = False
        self._started = self._begun = False  # told to, for ever or never; and it was the feeder that was told
        self.on_ready: Callable[[], None] | None = None
        self.on_end: Callable[[bool], None] | None = None

    @property
    def capacity(self) -> int:
        """Items that may be here, or be in use."""
        return self._channel.capacity.items

    def keep(self) -> int:
        """Hold what was taken until `free` is called: asking for more says nothing. Return the capacity from now on."""
        self._keeps = True
        self._channel.capacity.limit_to(self.capacity)
        return self.capacity

    def resize(self, capacity: int) -> None:
        """Hold so many items from now on; those that there are too many of leave first."""
        self._channel.resize(capacity)

    def flush_at(self, points: FlushPoints) -> None:
        """Say which items the sender needn't keep for longer lists."""
        self._channel.flush_points = points
        self._channel.feeder.on_flush_points()

    def start(self) -> None:
        """Start the task that feeds this inbox, if it isn't running yet."""
        if not self._started:
            self._started = self._begun = True
            self._channel.feeder.start()

    def notify(self) -> None:
        """Called by the sender: there is something to see."""
        if self._news is not None:
            self._news.set()
            self._news = None
        if self.on_ready is not None:
            self.on_ready()

    @property
    def ready(self) -> int:
        """Items that `take` would return now, if it was asked for that many.

        Half of the capacity at the most, so that the sender has room while a list is consumed.
        """
        if not self._packet.items and self._channel.open is not None and self._packet.after is None:
            self._adopt(self._channel.open)
        return min((self._channel.capacity.items + 1) // 2, len(self._packet.items))

    @property
    def is_ready(self) -> bool:
        return self.ready > 0 or super().is_ready

    @property
    def nothing_pending(self) -> bool:
        """Whether there is nothing to see: no item, no progress, no end."""
        packet, channel = self._packet, self._channel
        news = packet.items or packet.after is not None or packet.failure is not None or channel.open is not None
        return not (news or channel.finished or self._shut)

    @property
    def starved(self) -> bool:
        """Whether a receiver waits here that has consumed all it took, and there is nothing to see."""
        return self._waiting and not self._unreleased and self.nothing_pending

    @property
    def unreleased(self) -> tuple[int, int]:
        """Items that were taken and not consumed yet, and their bytes, where they are counted."""
        return self._unreleased, self._unreleased_bytes

    def take(self, limit: int) -> Chunk[T] | None:
        """Return up to `limit` items that are here, or progress; None if there is neither."""
        count = min(limit, self.ready)
        packet, first = self._packet, self._position
        items = packet.items[:count]
        del packet.items[:count]  # what was taken is the taker's: nothing here refers to it any more
        after = None if packet.items else packet.after
        if not count and after is None:
            return None
        if after is not None:
            packet.after = None
        self._position += count
        self._unreleased += count
        if packet.sizes:
            self._unreleased_bytes += sum(packet.sizes[first : first + count])
        chunk = Chunk(items, Shifted(packet.states, first) if first else packet.states, after)
        self._state_ref = (
            chunk.end_reference
        )  # a merge takes and never pulls: the state where it began must not be kept for ever
        return chunk

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken and no more will come.

        Raises:
          What the sender failed with, once all before it was taken.
        """
        if self.ready or self._packet.after is not None:
            return False
        if self._packet.failure is not None:
            raise self._packet.failure
        if self._shut:
            raise ClosedError("the stream was closed while it was being read")
        return self._channel.finished

    @property
    def failure(self) -> BaseException | None:
        """What the sender failed with, as far as it has arrived."""
        return self._packet.failure

    async def wait(self) -> None:
        """Wait until there is something to take, or it is over, and items may move."""
        self._waiting = True
        try:
            self._channel.feeder.on_wait()
            await anyio.lowlevel.checkpoint_if_cancelled()  # asyncio can't cancel a wait whose event is set each turn
            while self.nothing_pending:
                news = self._news = Rest()
                await news.wait()
                self._channel.gate.turned_at = perf_counter()
        finally:
            self._waiting = False
            self._news = None
        if self._channel.gate.holding:
            await self.passage()

    async def passage(self) -> None:
        """Wait while items must not move."""
        await self._channel.gate.passage()

    def release(self) -> None:
        if self._unreleased and not self._keeps:
            self.free(self._unreleased, self._unreleased_bytes)

    def free(self, items: int, size: int) -> None:
        """Say that so many of the items that were taken have been consumed."""
        self._unreleased -= items
        self._unreleased_bytes -= size
        self._channel.freed(items, size)

    def shut(self) -> None:
        """Close the receiving end; what is buffered is dropped."""
        self._shut = not self._channel.finished
        self.notify()  # a waiting merge learns of it

    def cancel(self) -> None:
        """Ask the task that feeds this inbox to end; do not wait."""
        self._started = True
        if self._begun:
            self._channel.feeder.cancel()

    async def aclose(self) -> None:
        await super().aclose()
        self._started = True
        if self._begun:
            await self._channel.feeder.stop()
        self._channel.abandon()
        self._packet.items.clear()
        self._channel.feeder.on_closed()

    async def _next(self, limit: int) -> Chunk[T] | None:
        self.start()
        self.release()
        while (chunk := self.take(limit)) is None:
            if self.exhausted:
                return None
            if (reader := self.reader) is not None:
                reader.wait_begins("wait_input")
            try:
                await self.wait()
            finally:
                if reader is not None:
                    reader.wait_ends()
        return chunk

    def _adopt(self, packet: Packet[T]) -> None:
        """Make `packet` the one that is taken from; its sender appends to it no more."""
        self._packet = packet
        self._position = 0
        if packet is self._channel.open:
            self._channel.open = None


class Packet(Generic[T]):
    """A list on its way: open for appends until it is received."""

    __slots__ = ("after", "failure", "items", "sizes", "states")

    def __init__(self) -> None:
        self.items: list[T] = []
        self.sizes: list[int] = []  # in bytes, where there is a byte budget
        self.states = Joined()
        self.after: State | None = None
        self.failure: BaseException | None = None
