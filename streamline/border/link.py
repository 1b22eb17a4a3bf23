"""A link joins a running to one of its hosts: two ends that send each other messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from streamline.border.messages import Message
from streamline.border.packed import Packed

__all__ = ["Link", "LinkClosed"]


class LinkClosed(Exception):  # noqa: N818 - no error where both ends know that it is over
    """The other end is gone: left, or dead."""


class Link(ABC):
    """One end. Its methods are called in its own event loop; `close`, `tell` and `push` may be called in any thread."""

    copies: ClassVar[bool]
    """Whether what crosses is copied; else both ends see the same objects."""

    host: str = ""
    """How messages call the host at whose end this is: "process 2"; "" at the other end."""

    @abstractmethod
    def pack(self, items: Sequence[Any]) -> Packed:
        """Return items as they cross.

        Raises:
          PackingError: one of them can't.
        """

    @abstractmethod
    def unpack(self, packed: Packed) -> list[Any]:
        """Return items that have crossed.

        Raises:
          What unpickling them raises.
        """

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message, in order; never waits, nor fails: where the other end is gone, it is dropped."""

    def tell(self, message: Message) -> None:
        """Send a message without items, from any thread. Here: for links whose `send` may be called in any thread."""
        self.send(message)

    def push(self) -> None:  # noqa: B027 - most have nothing to do
        """Write, from any thread, what `send` couldn't write at once: while a function holds the event loop, say, and
        `flush` can't."""

    @abstractmethod
    async def receive(self) -> Sequence[Message]:
        """Wait for messages and return them, in order. One task receives.

        Raises:
          LinkClosed: the other end is gone, and all that it sent was received.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Write, as long as the link lives, what `send` couldn't write at once: for a task of its own."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until all that was sent is written, or the other end is gone."""

    @abstractmethod
    def close(self) -> None:
        """Hang up; what wasn't written yet is dropped. Idempotent."""
