"""A link between two event loops of one process: objects are handed over, not copied."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import anyio

from streamline.border.link import Link, LinkClosed
from streamline.border.messages import Message
from streamline.border.packed import Packed
from streamline.core.threads import waker

__all__ = ["PipeLink", "pipe"]


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

    def pack(self, items: Sequence[Any]) -> Packed:
        return HandedOver(list(items))

    def unpack(self, packed: Packed) -> list[Any]:
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
