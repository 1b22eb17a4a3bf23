"""What a channel carries: a list that takes more items until it is received."""

from __future__ import annotations

from typing import Generic, TypeVar

from streamline.states import Joined, State

__all__ = ["Packet"]

T = TypeVar("T")


class Packet(Generic[T]):
    """A list on its way: open for appends until it is received."""

    __slots__ = ("after", "failure", "items", "sizes", "states")

    def __init__(self) -> None:
        self.items: list[T] = []
        self.sizes: list[int] = []  # in bytes, where there is a byte budget
        self.states = Joined()
        self.after: State | None = None
        self.failure: BaseException | None = None
