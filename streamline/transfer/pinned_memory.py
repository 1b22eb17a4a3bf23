"""Page-locked memory in which a batch is written at once where the device reads it: no copy by the CPU in between.

Batches made in this process are written into blocks, which are allocated on demand, up to a bound, and lent through
the run's `Lender`. Batches of host processes arrive in slabs of shared memory: each is registered with the driver when
the first batch in it is copied, and unregistered before it is unmapped.

A block is lent for as long as a view of it lives, and a slab for as long at this end; a mover keeps what it copies from
until the copy is done. So nothing is overwritten that is still read, by the device or by a stage that keeps batches.
Where there is no room, or the driver refuses, a batch is written to ordinary memory, and staged.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from streamline.core.lazy_numpy import np
from streamline.core.place import Bytes, Memory

logger = logging.getLogger("streamline.transfer")

LEAST_LENT = 1 << 16
"""Bytes of the smallest block, and of what is looked for in such memory; staging less costs about as much as that."""

MOST_BYTES = 1 << 29
"""Bytes of all blocks, if that is enough for some of the largest batches."""


class PageLocker(Protocol):
    """Page-locks memory for a device's copies. From any thread."""

    def allocate(self, size: int) -> Any:
        """Return `size` bytes of page-locked memory, as an array or a tensor."""

    def register(self, address: int, size: int) -> None:
        """Page-lock memory that is there; raises what the driver's library does."""

    def unregister(self, address: int) -> None:
        """Undo that; no copy reads it any more."""


class _Region:
    """Memory that copies may read; `locked`: whether they do so directly, None: not tried yet."""

    __slots__ = ("locked", "start", "stop")

    def __init__(self, start: int, size: int, locked: bool | None) -> None:
        self.start, self.stop, self.locked = start, start + size, locked


class _Block(_Region):
    """A region that was allocated. `free` is where it goes when the last view of it is gone."""

    __slots__ = ("_lease", "_memory", "free")

    def __init__(self, memory: Bytes, free: list[_Block]) -> None:
        super().__init__(memory.ctypes.data, memory.nbytes, True)
        self.free = free
        self._memory: Bytes | None = memory
        self._lease: weakref.ref[Any] | None = None

    def lend(self) -> Bytes:
        lease = Memory(self.start, self.stop - self.start, self._memory).as_array()
        self._lease = weakref.ref(lease, self._returned)
        return lease

    def drop(self) -> None:
        """Leave the memory to its views."""
        self._lease = self._memory = None

    def _returned(self, _: object) -> None:
        self.free.append(self)


class PinnedMemory:
    """The page-locked memory of one run: a `Place`. Thread-safe.

    Args:
      batches: how many of the largest batches there may be blocks for, where `MOST_BYTES` are less.
    """

    def __init__(self, locker: PageLocker, batches: int) -> None:
        self._locker = locker
        self._batches = batches
        self._most = MOST_BYTES
        self._bytes = 0
        self._free: dict[int, list[_Block]] = {}
        self._regions: dict[int, _Region] = {}  # what is lent, too: else a block and its callback were a cycle
        self._lock = threading.RLock()  # reentrant: the collector may run a finaliser of the user's anywhere
        self._full = False  # it grows no more
        self._logged = False

    def empty(self, nbytes: int) -> Bytes | None:
        """Return at least `nbytes`, lent as long as a view of them lives; None: no room. Never waits for a block."""
        if nbytes < LEAST_LENT:
            return None
        size = _rounded(nbytes)
        with self._lock:
            if (block := self._take_free(size)) is not None:
                return block.lend()
            if self._full or not self._makes_room(size):
                return None
            self._bytes += size
        try:
            block = _Block(np.asarray(self._locker.allocate(size)), self._free.setdefault(size, []))
        except BaseException as error:
            with self._lock:
                self._bytes -= size
                self._full = True
            if not isinstance(error, Exception):
                raise
            self._log(error, "no more page-locked memory for batches")
            return None
        with self._lock:
            if not self._full:
                self._regions[block.start] = block
        return block.lend()

    def fit(self, nbytes: int) -> None:
        """A batch of so many bytes has come: there may be blocks for some of that size."""
        self._most = max(self._most, self._batches * _rounded(nbytes))

    def on_mapped(self, address: int, size: int) -> Callable[[], object]:
        """Take notice of memory that another process shares; return what is called before it is unmapped."""
        region = self._regions[address] = _Region(address, size, None)
        return partial(self._unmapped, region, os.getpid())

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether copies read these bytes directly. Registers the memory if need be: for one thread."""
        if nbytes < LEAST_LENT:
            return False
        for region in list(self._regions.values()):
            if region.start <= address and address + nbytes <= region.stop:
                if region.locked is None:
                    region.locked = self._register(region)
                return region.locked
        return False

    def close(self) -> None:
        """Lend no more, and free the blocks; what is lent lives as long as its views."""
        with self._lock:
            self._full = True
            for blocks in self._free.values():
                blocks.clear()
            for region in list(self._regions.values()):
                if isinstance(region, _Block):
                    region.drop()
                    del self._regions[region.start]

    def _take_free(self, size: int) -> _Block | None:
        """Return a block of at least this size that nothing refers to: the one used last, still in the cache."""
        for other in sorted(self._free):
            if other >= size and self._free[other]:
                return self._free[other].pop()
        return None

    def _makes_room(self, size: int) -> bool:
        """Return whether there may be another block; drops smaller ones if need be."""
        if self._bytes - sum(other * len(blocks) for other, blocks in self._free.items()) + size > self._most:
            return False
        for blocks in self._free.values():
            while blocks and self._bytes + size > self._most:
                block = blocks.pop()
                block.drop()
                del self._regions[block.start]
                self._bytes -= block.stop - block.start
        return True

    def _register(self, region: _Region) -> bool:
        try:
            self._locker.register(region.start, region.stop - region.start)
        except Exception as error:
            self._log(error, "the driver doesn't register the memory shared with a process")
            return False
        return True

    def _unmapped(self, region: _Region, owner: int) -> None:
        if os.getpid() != owner:  # a fork, whose parent has it still
            return
        if self._regions.get(region.start) is region:
            del self._regions[region.start]
        if region.locked:
            with suppress(Exception):  # the driver is gone before the interpreter
                self._locker.unregister(region.start)

    def _log(self, error: Exception, what: str) -> None:
        """Say once a run that batches are copied once more."""
        if not self._logged:
            self._logged = True
            logger.warning(
                "transfer: %s (%s: %s). Such batches are copied once more by the CPU, into a pinned buffer",
                what,
                type(error).__name__,
                str(error),  # with its traceback, a record that is kept would hold a batch
            )


def _rounded(nbytes: int) -> int:
    """Return the next power of two: that is what torch allocates in any case."""
    return 1 << max(1, nbytes - 1).bit_length()
