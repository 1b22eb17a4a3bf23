"""The states behind items that are counted within a file: rows of a group, members of an archive."""

from __future__ import annotations

from streamline.core.state import At, State, States
from streamline.formats.base import Place

__all__ = ["Steps"]


class Steps:
    """A column: behind item i of a list, `place` with `key` set to `first` + i.

    Args:
      name: of the source.
      place: what all of them share.
      key: the part of a place that counts.
      first: what it is behind the list's first item.
      count: items in the list.
      last: the place behind the last item, where that is another one: the next group's, the next file's.
    """

    __slots__ = ("_count", "_first", "_key", "_last", "_name", "_place")

    def __init__(self, name: str, place: Place, key: str, first: int, count: int, last: Place | None = None) -> None:
        self._name = name
        self._place = place
        self._key = key
        self._first = first
        self._count = count
        self._last = last

    def __getitem__(self, index: int, /) -> State:
        if self._last is not None and index == self._count - 1:
            return At(self._name, self._last)
        return At(self._name, {**self._place, self._key: self._first + index})

    def trimmed(self, first: int, count: int) -> States:
        last = self._last if first + count == self._count else None
        return Steps(self._name, self._place, self._key, self._first + first, count, last)
