"""Shared memory without names, in slabs that are reused.

The sending end of a link owns a pool of slabs. A slab's descriptor is sent once, and both ends map it. For a list of
items the sender takes a slab, writes their buffers into it, and sends a message of a few bytes; the receiver builds
views. When the last view is garbage collected, in any thread, a byte at the head of the slab marks it as free: no call,
no message, and a receiver that dies leaks nothing. A slab is gone when both ends have unmapped it; until then views
stay valid.

What is large can be written there at once: `SlabPool.empty` lends a slab at the sending end, and an array made in it is
*given* to the other end as it is, without a copy, if by then nothing else at this end refers to it. What this end still
holds (a cache, a generator's frame) is copied: neither end ever sees what the other writes. So a slab is free when both
ends have let go.

Freed slabs are taken last in, first out: memory that is still in the cache is twice as fast.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from streamline.core.forks import disown_in_copies
from streamline.core.lazy_numpy import np
from streamline.core.place import Bytes, Mapped, Memory

ALIGN = 64
"""Alignment of buffers in bytes: a cache line, more than any dtype needs."""

HEAD = ALIGN
"""Bytes before the first buffer; the first one says whether the slab is free."""

FREE, TAKEN = 0, 1

SMALLEST = 1 << 16
"""Bytes of the smallest slab."""

PAGE = 1 << 12

SWEEP = 16
"""Slabs checked whenever one is wanted: they are freed in about the order of use."""

LEAST_ONCE = 1 << 20
"""Bytes from which on a slab is made for one use when none is free: half the CPU time of a socket (1 MiB: 0.7 ms, 1.6
through the socket), and large enough that the system's limit of mappings holds."""

ONCE = 0
"""The number of a slab that is used once."""

SHARED = 0xFFFFFFFE
"""The number of a slab that is used once and goes to several processes; the largest that a frame can say."""

SLAB_BYTES = 1 << 15
"""Bytes of a list of items from which on it goes through shared memory (measured by bench/buffer_threshold.py)."""

LENT_BYTES = 1 << 19
"""Bytes of a buffer from which on it is written there at once. Of CPU time at both ends, a batch of 8 MiB takes 0.9 ms
in place of 1.6 so; of 1 MiB in lists of eight, 178 us in place of 188; of 256 KiB, 89 in place of 77."""

MOST_LENT = 64
"""Slabs that may be lent at this end at once; and half of the pool's bytes: the rest is for what must be copied."""

SOME = 4
"""Lists of the largest size so far that a pool has room for. Of a list of 37 MiB, pages that are used once take both
ends 10 ms of CPU time each; those that are reused, 1."""


# Mapping --------------------------------------------------------------------------------------------------------------
_libc = ctypes.CDLL(None, use_errno=True)

_libc.mmap.restype = ctypes.c_void_p

_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)

_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once: half the time of touching each

_FAILED = ctypes.c_void_p(-1).value


class _Mapping(Memory):
    """Memory shared with another process, for as long as this object lives; `own`: what is written here stays here.

    Rejected: `mmap.mmap`, which keeps a descriptor open (until Python 3.13): a consumer that keeps batches would run
    out of them.
    """

    def __init__(self, fd: int, size: int, mapped: Mapped | None, *, own: bool = False) -> None:
        flags = mmap.MAP_PRIVATE if own else _FLAGS  # populating a private one would copy it
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        super().__init__(address, size)
        self._mapped = address, size
        self._before_unmapping = None if mapped is None else mapped(address, size)

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        if hasattr(self, "_mapped"):
            try:
                if self._before_unmapping is not None:
                    self._before_unmapping()
            finally:
                munmap(*self._mapped)


def map_shared(fd: int, size: int, mapped: Mapped | None = None, *, own: bool = False) -> Bytes:
    """Map a descriptor's memory as bytes, for as long as the array or a view of it lives; `OSError`: no room.

    Args:
      own: pages that are written here are copied first, so no other process sees that.
    """
    return _Mapping(fd, size, mapped, own=own).as_array()


def make_shared(size: int) -> int:
    """Return a descriptor of `size` bytes of nameless shared memory; `OSError`: none is left."""
    if sys.platform == "linux":
        fd = os.memfd_create("streamline", os.MFD_CLOEXEC)
    else:
        fd = _unlinked()
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked() -> int:
    """Return a descriptor of unlinked POSIX shared memory, for systems without memfd."""
    posix = import_module("_posixshmem")  # CPython's own, wherever there is multiprocessing.shared_memory
    while True:
        name = f"/streamline-{os.getpid()}-{os.urandom(6).hex()}"
        try:
            fd: int = posix.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        except FileExistsError:
            continue
        posix.shm_unlink(name)
        return fd


class Descriptor:
    """A descriptor, `fd`, that is closed once it is sent, or never will be: at the latest with this object."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd: int | None = fd

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close it. Idempotent; also as the interpreter exits, when `os` is gone."""
        if self.fd is not None:
            fd, self.fd = self.fd, None
            close(fd)

    def __del__(self) -> None:
        self.close()


# The sender's side ----------------------------------------------------------------------------------------------------
class Slab:
    """Memory that this end fills and the other reads: `size` bytes with the head, `memory` without.

    Its `number` is the same at both ends; `ONCE` if it isn't reused. `address` is where it begins at this end.
    """

    __slots__ = ("_claim", "_flag", "_lease", "_whole", "address", "descriptor", "memory", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        fd = make_shared(size)
        self.descriptor = Descriptor(fd)
        self._whole = map_shared(fd, size)
        self._flag = self._whole.data[:1]
        self.memory = self._whole.data[HEAD:]
        self.address: int = self._whole.ctypes.data
        self._lease: weakref.ref[Any] | None = None
        self._claim: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        """Whether the other end has no view of it left, and none is on its way there."""
        return self._flag[0] == FREE and not self.claimed

    @property
    def claimed(self) -> bool:
        """Whether a part of it is packed, to be sent."""
        return self._claim is not None and self._claim() is not None

    @property
    def held(self) -> bool:
        """Whether this end has a view of what it was lent."""
        return self._lease is not None and self._lease() is not None

    def take(self) -> None:
        """Mark it as taken; the other end frees it."""
        self._flag[0] = TAKEN

    def lend(self) -> Bytes:
        """Return its memory, for this end to fill; to be held by nothing else."""
        lease = Memory(self.address + HEAD, self.size - HEAD, self._whole).as_array()
        self._lease = weakref.ref(lease)
        return lease

    def claim(self, start: int, nbytes: int) -> SlabPart | None:
        """Return a part of what was lent, to be sent; None: another one is being sent, or this is too little of it."""
        if 2 * nbytes < self.size or self.claimed:
            return None
        part = SlabPart(self, start, nbytes)
        self._claim = weakref.ref(part)
        return part


class SlabPart:
    """A buffer that lies in a lent slab: bytes `start` to `start + nbytes`. While this lives the slab isn't reused."""

    __slots__ = ("__weakref__", "nbytes", "slab", "start")

    def __init__(self, slab: Slab, start: int, nbytes: int) -> None:
        self.slab = slab
        self.start = start
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes

    @property
    def memory(self) -> memoryview:
        """Its bytes, to be copied."""
        return self.slab.memory[self.start - HEAD :][: self.nbytes]

    def give(self) -> bool:
        """Mark the slab as taken by the other end, unless this end still has a view of it; return whether it hasn't."""
        if self.slab.held:
            return False
        self.slab.take()
        return True


class SlabPool:
    """The slabs of one sender: made on demand, up to a bound, and reused. Thread-safe.

    What it has lent or sent is here, too: nothing else keeps a slab from being unmapped.

    Args:
      capacity: bytes of all slabs, or as many as `SOME` of the largest lists take, if that is more. A list larger than
        this gets a slab used once, as do large ones if none is free.
      made: called with each slab that is made to be reused, without the lock, before it is used.
    """

    def __init__(self, capacity: int, made: Callable[[Slab], object] = lambda _: None) -> None:
        self._capacity = capacity
        self._largest = capacity
        self._on_made = made
        self._lock = threading.RLock()  # reentrant: the collector may run a finaliser of the user's anywhere
        self._held = 0
        self._made = 0
        self._closed = False
        self._free: dict[int, list[Slab]] = {}
        self._out: dict[int, deque[Slab]] = {}
        self._lent: list[Slab] = []
        self._dropped: list[int] = []
        disown_in_copies(self)

    @property
    def nbytes(self) -> int:
        """Of all slabs."""
        return self._held

    def take_dropped(self) -> list[int]:
        """Return the numbers of slabs dropped since the last call, for the other end to drop."""
        with self._lock:
            numbers, self._dropped = self._dropped, []
        return numbers

    def take(self, nbytes: int) -> Slab | None:
        """Return a slab of at least `nbytes`; None: none is free, or the system is out of memory."""
        try:
            if nbytes > self._largest:
                return Slab(ONCE, nbytes + HEAD)
            slab = self._find(_room(nbytes + HEAD))
            if slab is None:
                return Slab(ONCE, nbytes + HEAD) if nbytes >= LEAST_ONCE else None
        except OSError:
            return None
        slab.take()
        with self._lock:
            if not self._closed:  # by `made`, where the other end has gone
                self._out[slab.size].append(slab)
        return slab

    def empty(self, nbytes: int) -> Bytes | None:
        """Return at least `nbytes` of a slab, for this end to fill and to send; None: there is no room.

        It is lent for as long as a view of it lives. From any thread; never waits for a slab.
        """
        if not LENT_BYTES <= nbytes <= self._largest:
            return None
        size = _room(nbytes + HEAD)
        with self._lock:
            self._capacity = max(self._capacity, SOME * size)
            self._sweep_lent()
            held = sum(slab.size for slab in self._lent)
            if len(self._lent) >= MOST_LENT or 2 * (held + size) > self._capacity:
                return None
        try:
            slab = self._find(size)
        except OSError:
            return None
        if slab is None:
            return None
        lease = slab.lend()
        with self._lock:
            if not self._closed:
                self._lent.append(slab)
        return lease

    @property
    def lends(self) -> bool:
        """Whether a slab is lent, perhaps."""
        return bool(self._lent)

    def claim(self, buffer: memoryview) -> SlabPart | None:
        """Return the part of a lent slab that `buffer` is; None: it lies elsewhere, or is to be copied."""
        if 2 * buffer.nbytes < LENT_BYTES:
            return None
        address: int = np.frombuffer(buffer, np.uint8).ctypes.data
        with self._lock:
            for slab in self._lent:
                start = address - slab.address
                if 0 < start < slab.size:
                    return slab.claim(start, buffer.nbytes)
        return None

    def close(self) -> None:
        """Drop all slabs; those in use stay with their users."""
        with self._lock:
            for slabs in (*self._free.values(), *self._out.values(), self._lent):
                for slab in slabs:
                    slab.descriptor.close()
            self._free.clear()
            self._out.clear()
            self._lent.clear()
            self._held = 0
            self._closed = True

    def disown(self) -> None:
        """Lend and take nothing more: this is a fork, which shares the memory with the process that sends it."""
        self._lock = threading.RLock()  # another thread may have held it
        self.close()

    def _find(self, size: int) -> Slab | None:
        """Return a free slab of at least this size, or a new one; None: there is no room. `OSError`: no memory."""
        with self._lock:
            if self._closed:
                return None
            self._capacity = max(self._capacity, SOME * size)
            free = self._free.setdefault(size, [])
            self._sweep(size)
            if free:
                return free.pop()
            if self._held + size > self._capacity:
                larger = self._make_room(size)
                if larger is not None:
                    return larger
                if self._held + size > self._capacity:
                    return None
            self._made += 1
            self._held += size
            number = self._made
        try:
            slab = Slab(number, size)  # takes milliseconds
        except BaseException:
            with self._lock:
                self._held -= size
            raise
        self._on_made(slab)
        return slab

    def _sweep(self, size: int) -> None:
        """Move freed slabs to the stack: the one used last, still in the cache, on top."""
        out, free = self._out.setdefault(size, deque()), self._free.setdefault(size, [])
        for _ in range(min(len(out), SWEEP)):
            if out:  # else a finaliser of the user's has moved the rest
                slab = out.popleft()
                (free if slab.free else out).append(slab)

    def _sweep_lent(self) -> None:
        """Move slabs that this end has let go of to where those are that were sent."""
        lent, self._lent = self._lent, []
        for slab in lent:
            (self._lent if slab.held else self._out.setdefault(slab.size, deque())).append(slab)

    def _make_room(self, size: int) -> Slab | None:
        """Return a larger free slab; if there is none, drop smaller ones.

        A descriptor that waits to be sent stays open: the other end must get it before it hears of the drop.
        """
        self._sweep_lent()
        for other in sorted(self._out):
            self._sweep(other)
            if other > size and self._free[other]:
                return self._free[other].pop()
        for slab in self._smaller(size):
            self._held -= slab.size
            self._dropped.append(slab.number)
            if self._held + size <= self._capacity:
                break
        return None

    def _smaller(self, size: int) -> Iterator[Slab]:
        for other in sorted(self._free, reverse=True):
            while other < size and self._free[other]:
                yield self._free[other].pop(0)


def _room(nbytes: int) -> int:
    """Return the slab size for `nbytes`: four sizes per doubling, so that at most a quarter is unused.

    Each has a page more, for what lies beside an array: of a power of two bytes, as many are, nearly nothing is unused.
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = 1 << (nbytes - PAGE - 1).bit_length() - 3
    return -(-(nbytes - PAGE) // step) * step + PAGE


# The receiver's side --------------------------------------------------------------------------------------------------
class SlabLease:
    """A slab as the receiver sees it; `own`: it has others, too, and is never used again."""

    __slots__ = ("_address", "_lease", "_own", "_owner", "_whole")

    def __init__(self, fd: int, size: int, mapped: Mapped | None = None, *, own: bool = False) -> None:
        self._whole = map_shared(fd, size, mapped, own=own)
        self._own = own
        self._address: int = self._whole.ctypes.data
        self._lease: weakref.ref[Any] | None = None
        self._owner = os.getpid()

    @property
    def used(self) -> bool:
        """Whether anything has come in it."""
        return self._lease is not None

    def lend(self, nbytes: int, start: int = HEAD) -> memoryview:
        """Return bytes from `start` on; the slab is free when the last view of them dies."""
        lease = Memory(self._address + start, nbytes, self._whole).as_array()
        self._lease = weakref.ref(lease, self._return)
        return lease.data

    def _return(self, _: object) -> None:
        if os.getpid() == self._owner and not self._own:  # else this is a fork, whose parent may hold views
            self._whole[0] = FREE
