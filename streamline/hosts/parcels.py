"""What is on its way, in lists, and dealt with item by item from the front."""

from __future__ import annotations

from collections import deque

__all__ = ["Parcels"]


class Parcels:
    """Lists of items in order, and their bytes; an item weighs an equal part of its list.

    Attributes:
      items: that are held.
      size: their bytes.
    """

    def __init__(self) -> None:
        self.items = 0
        self.size = 0
        self._lists: deque[tuple[int, int]] = deque()

    def add(self, items: int, size: int) -> None:
        """Take note of a list of at least one item."""
        self.items += items
        self.size += size
        self._lists.append((items, size))

    def take(self, items: int) -> int:
        """Say that so many items, of those that are held, have been dealt with; return their bytes."""
        size = 0
        self.items -= items
        while items:
            count, nbytes = self._lists.popleft()
            if count > items:
                share = nbytes * items // count
                self._lists.appendleft((count - items, nbytes - share))
                count, nbytes = items, share
            items -= count
            size += nbytes
        self.size -= size
        return size
