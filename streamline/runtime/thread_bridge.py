"""Lists on their way from the event loop's thread to a plain loop's: how many may be out, and when they change hands.

A switch of threads costs as much as some 200 tiny items, and more where the two run on two cores: both want the
interpreter's lock. So the threads take turns where items take no time: lists are piled up until as many are out as may
be, and the loop is woken when none is left. Wherever anything takes its time, each list is handed over at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Generic, TypeVar

import anyio

from streamline.core.capacity import LONG_LIST_ITEMS
from streamline.core.counters import StageMeter
from streamline.core.flow import Chunk
from streamline.core.gate import resting

T = TypeVar("T")

QUICK_S = 0.001
"""A consumer that deals with a list in less time than this is quick enough for longer ones."""

STEADY_S = 0.02
"""So is one that takes this long for a list of a few items, up to `STEADY_ITEMS` of them out at once: in training with
steps of 5 ms, a batch then costs half of the time in both threads together (0.1 ms of 0.2), since one in four is
fetched."""

STEADY_ITEMS = 8

SLOW_ITEM_S = 1e-5
"""A list whose items took longer than this each is worth handing over at once: doing so costs some 50 µs."""

TINY_ITEM_S = 1e-6
"""A list whose items took less than this each may wait for others."""

PILE_S = 0.002
"""How long it waits at the most."""

FIRST_S = 0.25
"""How long to wait at most for a consumer that is handed its first list: once a stream."""


class ThreadBridge(Generic[T]):
    """What both threads know of the lists between them. Each counter has one writer, so no lock is needed.

    `depth` items may be out at once. It doubles when the consumer has dealt with a list in no time and finds no other,
    or with a short one in little time, and shrinks when it is slow: a slow consumer keeps few items waiting.

    Args:
      most: items that may be out at once.

    Attributes:
      queue: what the consumer takes from: lists, then a failure, or None at the end.
      taken_at: when the last list was taken.
    """

    def __init__(self, most: int) -> None:
        self.queue: SimpleQueue[Chunk[T] | BaseException | None] = SimpleQueue()
        self.taken_at = 0.0
        self._most = most
        self._depth = self._least = min(2, most)
        self._waiting = False
        self._sent = 0
        self._consumed = 0
        self._room: anyio.Event | None = None  # the loop's, as long as it waits
        self._woken: anyio.Event | None = None
        self._pile: list[Chunk[T]] = []
        self._due: asyncio.TimerHandle | None = None

    # In the consumer's thread -----------------------------------------------------------------------------------------

    def take(self, take: Callable[[], object], now: float) -> None:
        """Let `take` take from the queue; Ctrl-C comes out of it, or out of here after it."""
        consumed_s = now - self.taken_at
        if consumed_s > 2 * STEADY_S:
            self._depth = max(self._least, self._depth // 2)
        elif (consumed_s < QUICK_S and self.queue.empty()) or (consumed_s < STEADY_S and self._depth < STEADY_ITEMS):
            self._depth = min(2 * self._depth, self._most)
        self._waiting = True
        try:
            take()
        finally:
            self._waiting = False
        self.taken_at = perf_counter()

    def consumed(self, items: int, wake: Callable[[anyio.Event], None]) -> None:
        """Say that so many items have been handed out, or are just about to be. Idempotent.

        Args:
          items: from the first list on, those that were dropped included.
          wake: sets what the loop waits for, if it waits for that.
        """
        self._consumed = items
        room = self._room
        if room is None or room is self._woken or (self._takes_turns and not self.queue.empty()):
            return
        wake(room)
        self._woken = room

    # In the loop's thread ---------------------------------------------------------------------------------------------

    async def wait_room(self, meter: StageMeter | None) -> int:
        """Wait until there is room, and return how long a list may be; tell the meter of the stage whose items wait."""
        if self._free < 1:
            self.flush()
        while (room := self._free) < 1:
            event = self._room = anyio.Event()
            try:
                if self._free < 1:  # the other thread may just have made room
                    await _wait_metered(event, meter)
            finally:
                self._room = None
        return min(max(1, self._depth // 2), room, LONG_LIST_ITEMS)

    def put(self, chunk: Chunk[T], took_s: float) -> None:
        """Hand over a list that took so long, now or with those that come next."""
        items = len(chunk.items)
        self._sent += items
        self._pile.append(chunk)
        if not (self._takes_turns and took_s < TINY_ITEM_S * items):
            self.flush()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(PILE_S, self.flush)
        if took_s > SLOW_ITEM_S * items:
            self._wait_taken()

    def end(self, failure: BaseException | None) -> None:
        """Hand over what is left, then the failure; None: that was all."""
        self.flush()
        self.queue.put(failure)

    def flush(self) -> None:
        """Let the consumer have all lists."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for chunk in self._pile:
            self.queue.put(chunk)
        self._pile.clear()

    # In either --------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Keep no item that is on its way."""
        self._pile.clear()
        with suppress(Empty):
            while True:
                self.queue.get_nowait()

    @property
    def _takes_turns(self) -> bool:
        """Whether the consumer has been so quick that the two threads had better take turns."""
        return self._depth >= LONG_LIST_ITEMS

    @property
    def _free(self) -> int:
        return self._depth - (self._sent - self._consumed)

    def _wait_taken(self) -> None:
        """After a list that took long, let a consumer that waits for it run, until it has taken the list.

        A thread that is woken loses the race for the GIL against a loop that lets go of it for a microsecond now and
        then: after a slow sync map, 500 items were made before the first was handed out. For the first list of all it
        waits longer, and lets go of the core, too: where all cores are busy, a thread is woken late.
        """
        began, longest = perf_counter(), QUICK_S if self._consumed else FIRST_S
        while self._waiting and not self.queue.empty() and (waited := perf_counter() - began) < longest:
            sleep(0 if waited < QUICK_S else QUICK_S)


async def _wait_metered(event: anyio.Event, meter: StageMeter | None) -> None:
    if meter is not None:
        meter.wait_begins("wait_output")
    try:
        await resting(event.wait())
    finally:
        if meter is not None:
            meter.wait_ends()
