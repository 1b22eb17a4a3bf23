"""A link between the consumer's event loop and a host's: two ends that send each other messages.

`PipeLink` joins two event loops of one process and copies nothing. `InFlightBytes` counts items in flight.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import anyio

from streamline.backends.ipc.messages import Message, PackedItems
from streamline.core.place import Mapped, Place
from streamline.core.threads import threadsafe_call


class LinkClosed(Exception):  # noqa: N818 - no error where both ends know that it is over
    """The other end has hung up or died."""


class Link(ABC):
    """One end. Call its methods in its event loop; `close`, `send_threadsafe` and `push` in any thread."""

    copies: ClassVar[bool]
    """Whether items and states are copied; else both ends share the objects."""

    one_machine: bool = True
    """Whether both ends have the same clock."""

    place: Place | None = None
    """Lends memory for what this end sends; None: there is nothing to gain."""

    on_mapped: Mapped | None = None
    """Told of memory that the other end shares with this one, and will use again."""

    host: str = ""
    """Name in messages of the host that has this end: "process 2"; "" at the consumer's end."""

    @abstractmethod
    def pack(self, items: Sequence[Any]) -> PackedItems:
        """Return items packed for `send`; raise `PackingError` if one can't be sent."""

    @abstractmethod
    def unpack(self, packed: PackedItems) -> list[Any]:
        """Return received items; raises what unpickling them raises."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message, in order; never blocks or fails. Dropped if the other end is gone."""

    def send_threadsafe(self, message: Message) -> None:
        """Send a message without items, from any thread."""
        self.send(message)

    def push(self) -> None:  # noqa: B027 - most have nothing to do
        """Write, from any thread, what `send` queued: `flush` can't while a function holds the event loop."""

    @abstractmethod
    async def receive(self) -> Sequence[Message]:
        """Return the next messages, in order; `LinkClosed` once the other end is gone and all it sent was received.

        For one task.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Write what `send` queues, until the link closes: for a task of its own."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until all is written, or the other end is gone."""

    @abstractmethod
    def close(self) -> None:
        """Hang up, and drop what wasn't written. Idempotent."""


class HandedOver(NamedTuple):
    """Items that are not copied."""

    items: list[Any]

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.items)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def copied_bytes(self) -> int:
        return 0

    @property
    def slabs(self) -> tuple[int, int]:
        return 0, 0


class PipeLink(Link):
    """One end of a pipe. Each end's queue has one reader; the other end fills it from its own thread."""

    copies: ClassVar[bool] = False

    def __init__(self, lock: threading.Lock) -> None:
        self.other: PipeLink = self
        self._lock = lock
        self._messages: deque[Message] = deque()
        self._closed = False
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._arrived: anyio.Event | None = None

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
                self._wake, arrived = threadsafe_call(), anyio.Event()
                self._arrived = arrived
            await arrived.wait()

    async def flush(self) -> None:
        """Nothing to do: `send` writes at once."""

    async def drain(self) -> None:
        """Nothing to do: `send` writes at once."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._messages.clear()
            self._notify()
            self.other._notify()

    def _notify(self) -> None:
        """Wake the reader of this end, under the lock."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None and self._wake is not None:
            try:
                self._wake(arrived.set)
            except RuntimeError:
                return  # its event loop has ended


def pipe() -> tuple[PipeLink, PipeLink]:
    lock = threading.Lock()
    first, second = PipeLink(lock), PipeLink(lock)
    first.other, second.other = second, first
    return first, second


class InFlightBytes:
    """Counts lists of items in flight, and their bytes (`size`); items of a list count equally."""

    def __init__(self) -> None:
        self.items = 0
        self.size = 0
        self._lists: deque[tuple[int, int]] = deque()

    def add(self, items: int, size: int) -> None:
        """Add a list of at least one item."""
        self.items += items
        self.size += size
        self._lists.append((items, size))

    def take(self, items: int) -> int:
        """Remove the first `items` items; return their bytes."""
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
