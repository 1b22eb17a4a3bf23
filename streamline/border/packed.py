"""Items on their way across a border."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Packed", "PackingError"]


class Packed(Protocol):
    """A list of items, packed by one end of a link for the other.

    Attributes:
      count: items.
      nbytes: of all of them; 0 where nothing is copied.
    """

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class PackingError(Exception):
    """An item that can't cross; the `__cause__` says why.

    Attributes:
      index: of the item in the list.
      kind: its type's name, or of that in it which can't.
    """

    def __init__(self, index: int, kind: str) -> None:
        super().__init__(index, kind)
        self.index = index
        self.kind = kind
