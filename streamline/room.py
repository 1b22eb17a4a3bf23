"""Room in a channel: how many items it may hold, how many bytes, and how many it holds.

Inputs are throttled, outputs never: a sender asks for room *before* it pulls. What was received counts until its
receiver has dealt with it.

A channel may be wider for items that take no time to make, and lists longer: a list and its switches of tasks cost as
much as making a hundred of these. What is made in half a microsecond takes little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import anyio

from streamline.flow import LIST_ITEMS, LONG_LIST_ITEMS
from streamline.gate import resting
from streamline.meters.channel_meter import ChannelMeter
from streamline.meters.stage_meter import StageMeter

__all__ = ["Room"]

ROOM = -1
"""The slot of a wait for room: a custom stage may wait for an input in another task of its own meanwhile."""

QUICK_ITEM_S = 5e-7
"""An item that takes less than this is made in no time: a list of the longest, in half of the time between two
checkpoints."""


class Room:
    """What bounds a channel.

    Args:
      capacity: items between the sender's hands and the receiver's, at least 1.
      capacity_bytes: likewise in bytes as `streamline.sizes` counts them; one item is always admitted. None: no bound.
      by_list: what is pulled comes in lists of bounded bytes, so that a list stands where an item stands in
        `capacity_bytes`. Else nobody knows how much the next list would hold, and items are pulled one by one.
      widest: the capacity for items that take no time to make. None: the same.

    Attributes:
      counts_bytes: whether there is a bound in bytes.
      held: items that are in here, or with the receiver; `held_bytes` together.
      meter: of this channel; None: nobody counts.
      filler: of the stage whose items wait for room here; None: nobody is told of waits.
      longest: items of a list that is to be pulled, at the most.
      on_freed: called when the receiver has dealt with items.
    """

    meter: ChannelMeter | None = None
    filler: StageMeter | None = None

    def __init__(
        self, capacity: int, capacity_bytes: int | None = None, *, by_list: bool = False, widest: int | None = None
    ) -> None:
        self.capacity = self._usual = capacity
        self._widest = capacity if widest is None else widest
        self.capacity_bytes = math.inf if capacity_bytes is None else capacity_bytes
        self.counts_bytes = capacity_bytes is not None
        self.by_list = by_list
        self.held = self.held_bytes = 0
        self.on_freed: Callable[[], None] | None = None
        self._waiting: anyio.Event | None = None
        self.longest = LIST_ITEMS
        self._come = 0  # items since there was room
        self._since = -math.inf

    def bound(self, most: int) -> None:
        """Hold `most` items at the most from now on; before anything is held."""
        self.capacity, self._usual, self._widest = (
            min(most, capacity) for capacity in (self.capacity, self._usual, self._widest)
        )

    @property
    def room(self) -> int:
        """Items that may be pulled now; under a byte budget one after the other: nobody knows how large the next is."""
        room = self.capacity - self.held
        if self.counts_bytes:
            free = not self.held or self.held_bytes < self.capacity_bytes
            room = min(room, (room if self.by_list else 1) if free else 0)
        return room

    @property
    def room_at_once(self) -> int:
        """The room, or 0 where `wait_room` waits: behind a whole list, a quarter of another one is worth a pull."""
        few = self.held < LIST_ITEMS or self.held <= self.capacity * 3 // 4
        return room if (room := self.room) >= (1 if few else LIST_ITEMS // 4) else 0

    async def wait_room(self) -> int:
        """Wait until there is room, and return it; behind a full channel, for a quarter of it: lists are to be long."""
        if room := self.room_at_once:
            return room
        if self._widest != self._usual:
            self._fit()
        while self.held > self.capacity * 3 // 4 or self.room < 1:
            await self._wait_freed()
        self._come, self._since = 0, perf_counter()
        return self.room

    def reserve(self, items: int) -> None:
        """Count `items` as held from now on, before they are posted."""
        self.held += items
        self._come += items
        meter = self.meter
        if meter is not None:
            meter.depth = self.held
            if self.held > meter.peak:
                meter.peak = self.held

    def freed(self, items: int, size: int) -> None:
        """Take note that the receiver has dealt with `items` items of `size` bytes together."""
        self.held -= items
        self.held_bytes -= size
        if self.meter is not None:
            self.meter.depth = self.held
        if self._waiting is not None and self.held <= self.capacity * 3 // 4:
            self._waiting.set()
            self._waiting = None
        if self.on_freed is not None:
            self.on_freed()

    def _fit(self) -> None:
        """Be as wide as suits the items that have filled it since there was room."""
        quick = perf_counter() - self._since < QUICK_ITEM_S * self._come
        self.capacity, self.longest = (self._widest, LONG_LIST_ITEMS) if quick else (self._usual, LIST_ITEMS)
        if self.meter is not None:
            self.meter.capacity = self.capacity

    async def _wait_freed(self) -> None:
        """Wait until the receiver has dealt with some items, and tell the filler's meter of it."""
        self._waiting = anyio.Event()
        if self.filler is not None:
            self.filler.wait_begins("wait_output", ROOM)
        try:
            await resting(self._waiting.wait())
        finally:
            if self.filler is not None:
                self.filler.wait_ends(ROOM)
