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
    """Which items of one worker end its part of a batch after the merge: with fewer, the consumer waits.

    Item `first` has place `at` in its batch of `size`, and each later one is `step` places further. With first=0, at=1,
    step=3 and size=4, items 0 and 1 have the places 1 and 4 (of the next batch, 0): item 0 ends a part.
    """

    first: int
    at: int
    step: int
    size: int

    def next_boundary(self, sent: int, most: int) -> tuple[int, int]:
        """Return how many items after the first `sent` to ask for, up to `most`, and how many end the first part."""
        at = (self.at + (sent - self.first) * self.step) % self.size
        batches = (at + most * self.step) // self.size
        up_to_first = -((at - self.size) // self.step)  # rounded up
        up_to_last = -((at - batches * self.size) // self.step)
        return up_to_last if batches else most, up_to_first


class Sink(ABC, Generic[T]):
    """Where items leave a task, and what bounds those that are not consumed yet.

    Attributes:
      capacity: what may be held in here, and by the receiver.
      filler: the meter of the stage that fills it; counts waits for room. None: not counted.
      sent: items sent in all.
      flush_points: items with which a list is handed on, even if user code is quick; None: every list is handed on.
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
        return self.capacity.room_at_once

    def pull_size(self, room: int) -> tuple[int, int]:
        """Return how long a list to pull, and how many of its items the consumer needs to go on."""
        most = min(room, self.capacity.longest)
        return (most, 1) if self.flush_points is None else self.flush_points.next_boundary(self.sent, most)

    async def wait_room(self) -> int:
        """Return the room once there is some; after it was full, once a quarter is free."""
        if room := self.room_at_once:
            return room
        capacity = self.capacity
        capacity.note_full(perf_counter())
        while not capacity.is_low or capacity.room < 1:
            await self._wait_room()
        capacity.note_room(perf_counter())
        return capacity.room

    @abstractmethod
    async def send(self, chunk: Chunk[T], /) -> None:
        """Hand on a chunk; waits only where a byte budget is set and an item doesn't fit."""

    @abstractmethod
    def finish(self) -> None:
        """End the channel. Only a flow that has finished may."""

    @abstractmethod
    def fail(self, failure: BaseException, /) -> None:
        """Fail the receiver, after it has taken what was sent."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the channel: what is left will not be read."""

    def on_consumed(self, items: int, size: int) -> None:
        """Free the room of `items` items of `size` bytes together, which the receiver has consumed."""
        self.capacity.free(items, size)
        if self._waiting is not None and self.capacity.is_low:
            self._waiting.set()
            self._waiting = None

    async def _wait_bytes(self, size: int) -> None:
        while not self.capacity.fits(size):
            await self._wait_room()

    async def _wait_room(self) -> None:
        """Wait until the receiver has consumed some items."""
        self._waiting = Rest()
        await self._wait_counted(self._waiting)

    async def _wait_counted(self, freed: Rest) -> None:
        slot = -id(self)  # unique: a stage may wait for room in several channels, and for an input
        if self.filler is not None:
            self.filler.wait_begins("wait_output", slot)
        try:
            await freed.wait()
        finally:
            if self.filler is not None:
                self.filler.wait_ends(slot)


class Feeder:
    """What fills a channel: a task, or what stands for one elsewhere. A subclass overrides what it needs."""

    def start(self) -> None:
        """Begin. Called once, with the first pull or before it."""

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
      gate: of the run that it belongs to, set by `join`.
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
        self.gate = session.gate
        if session.most_ahead is not None:
            self.capacity.limit_to(session.most_ahead)

    def resize(self, capacity: int) -> None:
        self.capacity.resize(capacity)
        self.on_consumed(0, 0)  # wakes a sender that now has room

    async def wait_room(self) -> int:
        room = await super().wait_room()
        if self.meter is not None:
            self.meter.note_held(self.capacity.held, self.capacity.items)
        return room

    def reserve(self, items: int, size: int = 0) -> None:
        """Count `items` as held, before they are posted."""
        self.capacity.add(items, size)
        self.sent += items
        if self.meter is not None:
            self.meter.note_held(self.capacity.held, self.capacity.items)

    def on_consumed(self, items: int, size: int) -> None:
        super().on_consumed(items, size)
        if self.meter is not None:
            self.meter.note_held(self.capacity.held, self.capacity.items)
        self.feeder.on_freed()

    async def send(self, chunk: Chunk[T]) -> None:
        capacity = self.capacity
        if capacity.size == math.inf:
            self.reserve(len(chunk.items))
            self.post(chunk)
            return
        one_by_one = not capacity.by_list and len(chunk.items) > 1
        parts = [chunk.part(index, 1) for index in range(len(chunk.items))] if one_by_one else [chunk]
        for part in parts:
            if sizes := list(map(nbytes, part.items)):
                await self._wait_bytes(sum(sizes))
                self.reserve(len(sizes), sum(sizes))
                self._packet().sizes.extend(sizes)
            self.post(part)

    def admit(self, item: T, states: States, size: int) -> None:
        """Hand on one item of `size` bytes, whatever the room: the caller keeps the bounds."""
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
        packet.after = chunk.progress  # replaces an earlier one
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
        self.open = None
        self.inbox.shut()

    async def _wait_room(self) -> None:
        await super()._wait_room()
        await self.gate.passage()

    def _packet(self) -> Packet[T]:
        if self.open is None:
            self.open = Packet()
        return self.open


class Inbox(Flow[T]):
    """The receiving end: a flow whose state travels with the items.

    Cancel-safe: a cancelled pull has taken nothing. A merge, which looks at several inboxes, uses `start`, `ready`,
    `take`, `exhausted` and `wait` in place of `pull`.
    """

    def __init__(self, channel: Channel[T], begin: State) -> None:
        super().__init__(begin)
        self._channel = channel
        self._news: Rest | None = None  # as long as the receiver waits
        self._packet: Packet[T] = Packet()
        self._position = self._unreleased = self._unreleased_bytes = 0
        self._shut = self._waiting = self._keeps = False
        self._started = self._begun = False  # `_started`: never again; `_begun`: the feeder runs
        self.on_ready: Callable[[], None] | None = None
        self.on_end: Callable[[bool], None] | None = None

    @property
    def capacity(self) -> int:
        """Items that may be here, or be in use."""
        return self._channel.capacity.items

    def keep(self) -> int:
        """Hold what was taken until `free` is called: a pull releases nothing. Return the capacity, which stays."""
        self._keeps = True
        self._channel.capacity.limit_to(self.capacity)
        return self.capacity

    def resize(self, capacity: int) -> None:
        """Hold so many items; what is above that leaves first."""
        self._channel.resize(capacity)

    def flush_at(self, points: FlushPoints) -> None:
        """Set the items that the sender needn't keep for longer lists."""
        self._channel.flush_points = points
        self._channel.feeder.on_flush_points()

    def start(self) -> None:
        """Start the feeder, if it isn't running yet."""
        if not self._started:
            self._started = self._begun = True
            self._channel.feeder.start()

    def notify(self) -> None:
        """Wake the receiver. Called by the sender."""
        if self._news is not None:
            self._news.set()
            self._news = None
        if self.on_ready is not None:
            self.on_ready()

    @property
    def ready(self) -> int:
        """Items that `take` would return now, if asked for that many.

        Half of the capacity at most, so that the sender has room while a list is consumed.
        """
        if not self._packet.items and self._channel.open is not None and self._packet.after is None:
            self._adopt(self._channel.open)
        return min((self._channel.capacity.items + 1) // 2, len(self._packet.items))

    @property
    def is_ready(self) -> bool:
        return self.ready > 0 or super().is_ready

    @property
    def nothing_pending(self) -> bool:
        """Whether there is no item, no progress and no end to take."""
        packet, channel = self._packet, self._channel
        news = packet.items or packet.after is not None or packet.failure is not None or channel.open is not None
        return not (news or channel.finished or self._shut)

    @property
    def starved(self) -> bool:
        """Whether a receiver waits here that has consumed all it took."""
        return self._waiting and not self._unreleased and self.nothing_pending

    @property
    def unreleased(self) -> tuple[int, int]:
        """Items that were taken and not consumed yet, and their bytes, if these are counted."""
        return self._unreleased, self._unreleased_bytes

    def take(self, limit: int) -> Chunk[T] | None:
        """Return up to `limit` items that are here, or progress; None if there is neither."""
        count = min(limit, self.ready)
        packet, first = self._packet, self._position
        items = packet.items[:count]
        del packet.items[:count]  # only the taker refers to them
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
        self._state_ref = chunk.end_reference  # a merge never pulls, and would keep the state where it began
        return chunk

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken and no more will come; if the sender has failed, raise that then."""
        if self.ready or self._packet.after is not None:
            return False
        if self._packet.failure is not None:
            raise self._packet.failure
        if self._shut:
            raise ClosedError("the stream was closed while it was being read")
        return self._channel.finished

    @property
    def failure(self) -> BaseException | None:
        """What the sender failed with, if that has arrived."""
        return self._packet.failure

    async def wait(self) -> None:
        """Wait until there is something to take, or the end, and items may move."""
        self._waiting = True
        try:
            self._channel.feeder.on_wait()
            await anyio.lowlevel.checkpoint_if_cancelled()  # asyncio can't cancel a wait whose event is always set
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
        await self._channel.gate.passage()

    def release(self) -> None:
        if self._unreleased and not self._keeps:
            self.free(self._unreleased, self._unreleased_bytes)

    def free(self, items: int, size: int) -> None:
        """Count so many of the items that were taken as consumed."""
        self._unreleased -= items
        self._unreleased_bytes -= size
        self._channel.on_consumed(items, size)

    def shut(self) -> None:
        """Close the receiving end, and drop what is buffered."""
        self._shut = not self._channel.finished
        self.notify()

    def cancel(self) -> None:
        """Ask the feeder to end; do not wait."""
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
        """Take from `packet` from now on; its sender appends to it no more."""
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
