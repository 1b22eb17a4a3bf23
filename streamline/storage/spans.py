"""Which bytes of an object have been read, in whatever order. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["Spans"]


class Spans:
    """A set of bytes as disjoint spans that don't touch, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add bytes `start` to `stop`; what is there already stays once."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first span that ends at `start` or behind it
        last = bisect_right(self._starts, stop)  # behind the last one that begins at `stop` or before it
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def cover(self, size: int) -> bool:
        """Whether bytes 0 to `size` are all there."""
        return not size or (bool(self._stops) and self._starts[0] == 0 and self._stops[0] >= size)

    @property
    def from_start(self) -> bool:
        """Whether all that is there is one piece from byte 0 on."""
        return len(self._starts) == 1 and self._starts[0] == 0
