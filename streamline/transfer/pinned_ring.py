"""A ring of page-locked buffers: one is copied to the device while the next batch is written into another.

What lies in page-locked memory already is copied from there, and kept until that is done. The device is a `Copier`:
that of `cuda`, or in tests one whose copies end by a virtual clock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from streamline.core.tree import replaced
from streamline.errors import ClosedError
from streamline.transfer.base import Copies, Mover
from streamline.transfer.pinned_memory import PageLocker, PinnedMemory

ALIGN_BYTES = 256
"""Alignment of a batch's parts in a buffer: that of the device's own memory."""

LEAST_BYTES = 4096

QUEUED = 16
"""Batches of 64 items or more that wait in two channels before a transfer, where its loop is the slower part: with
memory for fewer, half of them are written to fresh pages and copied once more."""


class Done(Protocol):
    """A point in the order of a device's copies."""

    def wait(self) -> None:
        """Wait until the copies begun before it are done. Blocks."""


class Copier(PageLocker, Protocol):
    """Asynchronous copies to one device. But for `hand_over` and page-locking, called in one thread at a time."""

    def size(self, leaf: Any, where: str) -> int | None:
        """Return the bytes that a leaf takes in a buffer; 0: it needs none; None: it isn't moved.

        Raises:
          DataError: the device has no such array.
        """

    def address(self, leaf: Any) -> int | None:
        """Return where the bytes of a leaf begin that needs a buffer unless they are page-locked; None: it does."""

    def stage(self, leaf: Any, buffer: Any, start: int) -> Any:
        """Write a leaf into a buffer, from byte `start` on; return what `copy` is given. Done when it returns."""

    def copy(self, staged: Any) -> Any:
        """Begin to copy what was staged, or a leaf that takes no buffer; return what will hold it on the device."""

    def mark(self) -> Done:
        """Return the point after all copies begun so far."""

    def hand_over(self, done: Done, copied: Sequence[Any], batch: Any) -> Any:
        """Return the batch for this thread, whose later work on the device runs after `done`.

        Args:
          copied: what `copy` returned for this batch; its memory isn't reused before this thread's work is done.
        """


@dataclass
class _PinnedSlot:
    """A buffer, and the last copies out of it.

    Attributes:
      done: the point after them.
      read: their sources outside the buffer.
    """

    buffer: Any = None
    size: int = 0
    done: Done | None = None
    read: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Landing:
    """A batch in flight, as the channel carries it."""

    batch: Any
    copied: Sequence[Any]
    done: Done = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Of what is copied."""
        return sum(int(part.nbytes) for part in self.copied)


class RingMover(Mover):
    """Writes batches into buffers in turn, and starts copies out of them; or out of the `place` that lent their memory.

    A buffer is allocated when first needed, and again, at least twice as large, when a batch doesn't fit. It is written
    to only when the copies out of it are done.

    Args:
      slots: buffers: one for each batch that may be in flight, so that none waits for another one's copy.
    """

    hands_over = True

    def __init__(self, copier: Copier, slots: int) -> None:
        self._copies = Copies(pinned=True)
        self.details = self._copies.details
        self._copier = copier
        self.place = self._pinned = PinnedMemory(copier, QUEUED + slots + 2)  # that being written, and one on its way
        self.on_mapped = self._pinned.on_mapped
        self._slots = [_PinnedSlot() for _ in range(slots)]
        self._abandoned: list[Any] = []
        self._turn = 0
        self._lock = threading.Lock()  # a stream whose loop was ended is closed while a thread may be in here
        self._closed = False

    def move(self, batch: Any) -> _Landing:
        with self._lock:
            if self._closed:
                raise ClosedError("the stream is closed")
            starts: list[int | None] = []
            total = staged = direct = 0

            def measure(leaf: Any, where: str) -> Any:
                nonlocal total, staged, direct
                size = self._copier.size(leaf, where)
                if size and self._is_pinned(leaf, size):
                    direct, size = direct + size, 0
                starts.append(None if size is None else total if size else -1)
                total += -(-(size or 0) // ALIGN_BYTES) * ALIGN_BYTES
                staged += size or 0
                return leaf

            replaced(batch, measure)
            self._pinned.fit(total + direct)
            landing = self._copy(batch, starts, self._free(total))
            self._copies.copied_bytes += landing.nbytes
            self._copies.staged_bytes += staged
            return landing

    def arrived(self, moved: Any) -> Any:
        if not isinstance(moved, _Landing):
            return moved
        return self._copier.hand_over(moved.done, moved.copied, moved.batch)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            try:
                if self._abandoned:  # a point made now comes after their copies, too
                    with suppress(Exception):
                        self._copier.mark().wait()
                for slot in self._slots:
                    if slot.done is not None:
                        slot.done.wait()
            finally:  # a device that fails has no copies in progress
                self._pinned.close()
                self._slots.clear()
                self._abandoned.clear()

    def _is_pinned(self, leaf: Any, size: int) -> bool:
        address = self._copier.address(leaf)
        return address is not None and self._pinned.covers(address, size)

    def _free(self, size: int) -> _PinnedSlot:
        """Return the next slot, when the copies out of it are done, with room for `size` bytes."""
        slot = self._slots[self._turn]
        if slot.done is not None:
            began = perf_counter()
            slot.done.wait()
            self._copies.device_waited_s += perf_counter() - began
            slot.done = None
            slot.read.clear()
        if slot.size < size:
            slot.buffer, slot.size = None, 0  # the old one goes first
            enough = max(LEAST_BYTES, 1 << (size - 1).bit_length())
            slot.buffer, slot.size = self._copier.allocate(enough), enough
        self._turn = (self._turn + 1) % len(self._slots)
        return slot

    def _copy(self, batch: Any, starts: Sequence[int | None], slot: _PinnedSlot) -> _Landing:
        """Start to copy a batch; even after a failure, the slot's point comes after every copy begun."""
        copied: list[Any] = []
        places = iter(starts)

        def begin(leaf: Any, where: str) -> Any:
            start = next(places)
            if start is None:
                return leaf
            if start < 0:
                slot.read.append(leaf)
                staged = leaf
            else:
                staged = self._copier.stage(leaf, slot.buffer, start)
            copied.append(self._copier.copy(staged))
            return copied[-1]

        try:
            moved = replaced(batch, begin)
        except BaseException:
            copied.clear()  # the traceback must not keep the device's memory
            with suppress(Exception):  # the first failure is raised
                self._mark(slot)
            raise
        return _Landing(moved, copied, self._mark(slot))

    def _mark(self, slot: _PinnedSlot) -> Done:
        """Note and return the point after the copies out of a slot; if that fails, its buffer isn't used again."""
        try:
            slot.done = self._copier.mark()
        except BaseException:
            self._abandoned.append((slot.buffer, slot.read))  # when their copies are done is unknown
            slot.buffer, slot.size, slot.read = None, 0, []
            raise
        return slot.done
