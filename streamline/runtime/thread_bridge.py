"""Lists on their way from the event loop's thread to a plain loop's: how many may be out, and when they are handed
over.

A switch of threads costs as much as some 200 tiny items, and more on two cores, which compete for the interpreter's
lock. So if items take no time, the threads take turns: lists are piled up to the capacity, and the loop is woken when
none is left. Else what the driver sends before it yields is handed over together; or at once, if it was slow.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from streamline.core.capacity import LONG_LIST_ITEMS, Capacity
from streamline.core.channel import Sink
from streamline.core.figures import ChannelStats
from streamline.core.flow import Chunk
from streamline.core.gate import Rest
from streamline.core.pace import HANDOVER_S
from streamline.core.state import Joined
from streamline.core.tree import nbytes

T = TypeVar("T")

QUICK_S = 0.001
"""A consumer that deals with a list in less time than this is quick enough for longer ones."""

STEADY_S = 0.02
"""So is one that takes this long for a list of a few items, up to `STEADY_ITEMS` of them out at once: in training with
steps of 5 ms, a batch then takes 0.1 ms in both threads together in place of 0.2, since only one in four is fetched."""

STEADY_ITEMS = 8

SLOW_ITEM_S = 1e-5
"""A list whose items took longer than this each is worth handing over at once: doing so costs some 50 µs."""

TINY_ITEM_S = 1e-6
"""A list whose items took less than this each may wait for others."""

PILE_S = 0.002
"""How long such a list waits at most."""

HOLD_S = 0.02
"""How long the loop blocks at most, so that the consumer can take a list that was handed over."""


class ConsumerCapacity(Capacity):
    """Items that may be out at once: as many as suit the consumer's pace, or `ahead` if that is more.

    None at first, so that a consumer on its way to its first item needn't wait for the interpreter's lock. Then the
    pace doubles when the consumer is done with a list in no time and finds no other, or with a short one in little
    time, and is halved when it is slow: a slow consumer keeps few items waiting.

    Args:
      most: items that may be out, however quick the consumer is.
      ahead: items that may be out, however slow it is: what the last stages make ahead of it, after `read_ahead`.
      size: likewise in bytes; None: no bound.
    """

    def __init__(self, most: int, ahead: int = 1, size: float | None = None) -> None:
        super().__init__(0, size, by_list=True)
        self._most = most
        self._ahead = ahead
        self._least = 1
        self._pace = self._slowest = min(2, most)

    @property
    def is_quick(self) -> bool:
        """Whether the consumer is so quick that the two threads should take turns."""
        return self._pace >= LONG_LIST_ITEMS

    def begin(self) -> None:
        """Admit the first items."""
        self._fit()

    def read_ahead(self) -> None:
        """Admit what the last stages make ahead."""
        self._least = self._ahead
        self._fit()

    def note_consumed(self, seconds: float, *, finds_none: bool) -> None:
        """Adapt the pace to a consumer that took so long for the last list, and perhaps finds no other."""
        if seconds > 2 * STEADY_S:
            self._pace = max(self._slowest, self._pace // 2)
        elif (seconds < QUICK_S and finds_none) or (seconds < STEADY_S and self._pace < STEADY_ITEMS):
            self._pace = min(2 * self._pace, self._most)
        self._fit()

    def _fit(self) -> None:
        self.items = max(self._pace, self._least)
        self.longest = min(max(1, self.items // 2), LONG_LIST_ITEMS)  # so that there are two lists


class ThreadBridge(Sink[T]):
    """Where a driver in the event loop's thread sends what a plain loop in another one takes, by `consumer`.

    Each counter has one writer, so there is no lock. `on_finish` is called before the consumer gets the end.
    """

    capacity: ConsumerCapacity
    meter: ChannelStats | None = None  # of what is out; None: not counted

    def __init__(self, capacity: ConsumerCapacity, on_finish: Callable[[], None] = lambda: None) -> None:
        super().__init__(capacity)
        self.consumer = ConsumerEnd(self)
        self._on_finish = on_finish
        self._asked_at = -math.inf
        self._sizes: deque[tuple[int, int]] = deque()  # of each list, where bytes count: items sent up to it, its bytes
        self._pile: list[Chunk[T]] = []
        self._is_slow = False  # whether the last list's items took long
        self._due: asyncio.Handle | None = None

    @property
    def turns(self) -> int:  # type: ignore[override]
        """0 for a quick consumer: its loop yields when the capacity is used up."""
        return 0 if self.capacity.is_quick else 1

    @property
    def waiting(self) -> Rest | None:
        """The driver's wait for room, if it waits."""
        return self._waiting

    @property
    def room_at_once(self) -> int:
        self._settle()
        return super().room_at_once

    async def wait_room(self) -> int:
        """Wait until there is room, and return it; at first, briefly until the consumer asks for its first list."""
        if not self.capacity.items:
            due = asyncio.get_running_loop().call_later(HOLD_S, self._admit, self.capacity.begin)
            self._waiting = asked = Rest()
            try:
                if not self.capacity.items:  # else the consumer's thread has just asked
                    await asked.wait()
            finally:
                self._waiting = None
                due.cancel()
        return await super().wait_room()

    def pull_size(self, room: int) -> tuple[int, int]:
        self._asked_at = perf_counter()
        return super().pull_size(room)

    async def send(self, chunk: Chunk[T]) -> None:
        """Hand over a list, now or with the next ones; waits only for bytes that don't fit."""
        took_s, items = perf_counter() - self._asked_at, len(chunk.items)
        size = 0
        if self.capacity.size != math.inf:
            size = sum(map(nbytes, chunk.items))
            await self._wait_bytes(size)
            self._sizes.append((self.sent + items, size))
        if not self.sent:
            asyncio.get_running_loop().call_later(HOLD_S, self._admit, self.capacity.read_ahead)
        self.sent += items
        self.capacity.add(items, size)
        if self.meter is not None:
            self.meter.items += items
            self.meter.note_held(self.capacity.held, self.capacity.items)
        self._add_to_pile(chunk)
        self._is_slow = took_s > SLOW_ITEM_S * items
        takes_turns = self.capacity.is_quick and took_s < TINY_ITEM_S * items
        if took_s > HANDOVER_S and not takes_turns:
            self._hand_over()
        elif self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(PILE_S, self.flush) if takes_turns else loop.call_soon(self._hand_over)

    def finish(self) -> None:
        self._on_finish()
        self._end(None)

    def fail(self, failure: BaseException) -> None:
        self._end(failure)

    def abandon(self) -> None:
        self._pile.clear()
        self.flush()

    def flush(self) -> None:
        """Hand over the pile."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for chunk in self._pile:
            self.consumer.queue.put(chunk)
        self._pile.clear()

    def drop(self) -> None:
        """Drop all items on their way. In either thread."""
        self._pile.clear()
        with suppress(Empty):
            while True:
                self.consumer.queue.get_nowait()

    def _end(self, failure: BaseException | None) -> None:
        """Hand over the pile, then the failure, or None: the end."""
        self.flush()
        self.consumer.queue.put(failure)

    def _add_to_pile(self, chunk: Chunk[T]) -> None:
        """Append a chunk to the pile, and empty it; short lists are joined."""
        items = chunk.take_items()
        last = self._pile[-1] if self._pile else None
        if last is None or len(last.items) + len(items) > self.capacity.longest:
            self._pile.append(Chunk(items, chunk.states, chunk.progress))
            return
        states = Joined()
        for start, each, column in ((0, last.items, last.states), (len(last.items), items, chunk.states)):
            if each:
                states.add(start, column)
        self._pile[-1] = Chunk([*last.items, *items], states, chunk.progress)

    def _hand_over(self) -> None:
        """Hand over the pile; after slow items, let the consumer take it at once."""
        self.flush()
        if self._is_slow:
            self.consumer.let_take()

    def _admit(self, more: Callable[[], None]) -> None:
        """Give the driver room, although the consumer hasn't asked."""
        more()
        if self._waiting is not None:
            self._waiting.set()

    def _settle(self) -> bool:
        """Free what has been consumed; return whether there was anything."""
        consumed, size = self.consumer.consumed, 0
        items = consumed - (self.sent - self.capacity.held)
        while self._sizes and self._sizes[0][0] <= consumed:
            size += self._sizes.popleft()[1]
        self.capacity.free(items, size)
        return items > 0

    async def _wait_room(self) -> None:
        self.flush()
        self._waiting = waiting = Rest()
        try:
            if not self._settle():  # else the consumer's thread has just made room
                await self._wait_counted(waiting)
        finally:
            self._waiting = None


class ConsumerEnd(Generic[T]):
    """What a plain loop takes from `queue`, in its own thread: lists, then a failure, or None at the end."""

    def __init__(self, bridge: ThreadBridge[T]) -> None:
        self.queue: SimpleQueue[Chunk[T] | BaseException | None] = SimpleQueue()
        self.taken_at = 0.0
        self.consumed = 0
        self._bridge = bridge
        self._waits = False
        self._woken: Rest | None = None
        self._loop_waits = False
        self._taken: SimpleQueue[None] = SimpleQueue()

    def take(self, take: Callable[[], object], now: float, wake: Callable[[Rest], None]) -> None:
        """Call `take`, which takes from the queue in C: Ctrl-C loses nothing. `wake`: see `note_consumed`."""
        is_first = not self._bridge.capacity.items
        self._bridge.capacity.note_consumed(now - self.taken_at, finds_none=self.queue.empty())
        self._waits = True
        if is_first and (waiting := self._bridge.waiting) is not None:
            wake(waiting)
        try:
            take()
        finally:
            self._waits = False
            if self._loop_waits:
                self._taken.put(None)
        self.taken_at = perf_counter()

    def let_take(self) -> None:
        """Block the loop's thread until a consumer that waits for a list has taken it.

        A woken thread loses the race for the GIL against a loop that releases it for microseconds: after a slow sync
        map, 500 items were made before the first was handed out.
        """
        with suppress(Empty):
            while True:
                self._taken.get_nowait()  # from an earlier call
        self._loop_waits = True
        if self._waits and not self.queue.empty():
            with suppress(Empty):
                self._taken.get(timeout=HOLD_S)
        self._loop_waits = False

    def note_consumed(self, items: int, wake: Callable[[Rest], None]) -> None:
        """Count all `items` up to now as handed out, dropped ones included, right before they are. Idempotent.

        `wake` sets what the loop waits for, if it waits for room.
        """
        bridge = self._bridge
        if not self.consumed:
            bridge.capacity.read_ahead()
        self.consumed = items
        out, waiting = bridge.sent - items, bridge.waiting
        if bridge.meter is not None:
            bridge.meter.depth = out
        if waiting is None or waiting is self._woken or out > bridge.capacity.items * 3 // 4:
            return
        if bridge.capacity.is_quick and not self.queue.empty():
            return
        wake(waiting)
        self._woken = waiting
