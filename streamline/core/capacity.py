"""How much may be between a sender and a receiver: pure arithmetic, without a loop, a clock or a queue.

Inputs are throttled, outputs never: a sender asks for room *before* it pulls. What the receiver has taken and not
consumed counts, too. After it was full, the sender continues when a quarter is free, so that lists are long.

If items take no time to make, more of them may be held: a list with its task switches costs as much as a hundred.
"""

from __future__ import annotations

import math

LIST_ITEMS = 256
"""Items in a list at most, and so between two checkpoints."""

LONG_LIST_ITEMS = 1024
"""Likewise, where items take no time: each list costs as much as making a hundred of these."""

QUICK_ITEM_S = 5e-7
"""An item that takes less than this takes no time: the longest list is then made in half the time between two
checkpoints."""


class Capacity:
    """Items, and their bytes, that may be held: of `items`, and of `size` bytes, but always one item.

    Args:
      by_list: lists have a bounded size, so `size` admits whole lists. Else items are pulled one by one.
      widest: items, if they take no time to make. None: the same.

    Attributes:
      held: items; `held_bytes` together.
      longest: items of one list.
    """

    def __init__(
        self, items: int, size: float | None = None, *, by_list: bool = False, widest: int | None = None
    ) -> None:
        self.items = self._usual = items
        self.size = math.inf if size is None else size
        self.by_list = by_list
        self._widest = items if widest is None else widest
        self._limit = math.inf
        self.held = self.held_bytes = 0
        self.longest = LIST_ITEMS
        self._added, self._since = 0, -math.inf  # since there was room

    # Asked by the sender ----------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Items that may be pulled now; under a byte budget one after the other: the next one's size is unknown."""
        room = self.items - self.held
        if self.size != math.inf:
            if self.held and self.held_bytes >= self.size:
                return min(room, 0)
            room = room if self.by_list else min(room, 1)
        return room

    @property
    def room_at_once(self) -> int:
        """The room, or 0 if the sender should wait: after a whole list, less than a quarter of one isn't enough."""
        room = self.room
        least = 1 if self.held < LIST_ITEMS or self.is_low else LIST_ITEMS // 4
        return room if room >= least else 0

    @property
    def is_low(self) -> bool:
        """Whether a sender that found no room may go on: a quarter is free."""
        return self.held <= self.items * 3 // 4

    def fits(self, size: int) -> bool:
        return not self.held or self.held_bytes + size <= self.size

    # Told by the sender -----------------------------------------------------------------------------------------------

    def add(self, items: int, size: int = 0) -> None:
        """Count items as held, before they are sent."""
        self.held += items
        self.held_bytes += size
        self._added += items

    def note_full(self, now: float) -> None:
        """Widen if the items that filled it since `note_room` were quick to make, else narrow."""
        if self._widest != self._usual:
            quick = now - self._since < QUICK_ITEM_S * self._added
            self.items, self.longest = (self._widest, LONG_LIST_ITEMS) if quick else (self._usual, LIST_ITEMS)

    def note_room(self, now: float) -> None:
        """Begin to time what fills it."""
        self._added, self._since = 0, now

    # Told by the receiver ---------------------------------------------------------------------------------------------

    def free(self, items: int, size: int = 0) -> None:
        self.held -= items
        self.held_bytes -= size

    def limit_to(self, most: int) -> None:
        """Hold at most `most` items. Before any is held."""
        self._limit = min(most, self._limit)
        self.items, self._usual, self._widest = (min(most, each) for each in (self.items, self._usual, self._widest))

    def resize(self, items: int) -> None:
        """Hold so many items, within the limit; while there are more, none are admitted."""
        self.items = self._usual = self._widest = int(min(items, self._limit))
