"""A link between two event loops of one process: objects are handed over, not copied.

A link joins a running to one of its hosts: two ends that send each other messages.

What is on its way, in lists, and dealt with item by item from the front.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import anyio

from streamline.backends.ipc.messages import Message, PackedItems
from streamline.core.threads import waker

__all__ = ["InFlightBytes", "Link", "LinkClosed", "PipeLink", "pipe"]


class LinkClosed(Exception):  # noqa: N818 - no error where both ends know that it is over
    """The other end is gone: left, or dead."""


class Link(ABC):
    """One end. Its methods are called in its own event loop; `close`, `tell` and `push` may be called in any thread."""

    copies: ClassVar[bool]
    """Whether what crosses is copied; else both ends see the same objects."""

    host: str = ""
    """How messages call the host at whose end this is: "process 2"; "" at the other end."""

    @abstractmethod
    def pack(self, items: Sequence[Any]) -> PackedItems:
        """Return items as they cross.

        Raises:
          PackingError: one of them can't.
        """

    @abstractmethod
    def unpack(self, packed: PackedItems) -> list[Any]:
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


class HandedOver(NamedTuple):
    """Items that are handed over as they are."""

    items: list[Any]

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.items)

    @property
    def nbytes(self) -> int:
        return 0


class PipeLink(Link):
    """One end of a pipe. Each end's queue has one reader, and is filled by the other end from its own thread."""

    copies: ClassVar[bool] = False

    def __init__(self, lock: threading.Lock) -> None:
        self.other: PipeLink = self
        self._lock = lock
        self._messages: deque[Message] = deque()
        self._closed = False
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._news: anyio.Event | None = None

    def pack(self, items: Sequence[Any]) -> PackedItems:
        return HandedOver(list(items))

    def unpack(self, packed: PackedItems) -> list[Any]:
        assert isinstance(packed, HandedOver)
        return packed.items

    def send(self, message: Message) -> None:
        other = self.other
        with self._lock:
            if self._closed or other._closed:
                return
            other._messages.append(message)
            other._notify()

    async def receive(self) -> Sequence[Message]:
        while True:
            with self._lock:
                if self._messages:
                    messages = list(self._messages)
                    self._messages.clear()
                    return messages
                if self._closed or self.other._closed:
                    raise LinkClosed
                self._wake, news = waker(), anyio.Event()
                self._news = news
            await news.wait()

    async def flush(self) -> None:
        """Nothing waits here to be written."""

    async def drain(self) -> None:
        """Nothing waits here to be written."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._messages.clear()
            self._notify()
            self.other._notify()

    def _notify(self) -> None:
        """Wake the reader of this end, under the lock."""
        news, self._news = self._news, None
        if news is not None and self._wake is not None:
            try:
                self._wake(news.set)
            except RuntimeError:
                return  # its event loop has ended: nobody reads here any more


def pipe() -> tuple[PipeLink, PipeLink]:
    """Return both ends of a new pipe."""
    lock = threading.Lock()
    near, far = PipeLink(lock), PipeLink(lock)
    near.other, far.other = far, near
    return near, far


class InFlightBytes:
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
