"""A device with a virtual clock: a copy reads its buffer when it ends; one that is written to too early arrives wrong.

It copies from memory that it allocated, or that was registered with it, and from no other.

Two clocks matter: that of the thread that stages (`now`), and the device's copy engine (`busy_until`), which does one
copy after the other. A wait for a point moves `now` there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamline.core.tree import replaced
from streamline.transfer.pinned_ring import Done

POISON = 0xEE


class Staged:
    """What a copy reads. As a copy engine does, it holds on to no memory: that is up to who asked for the copy."""

    def __init__(self, memory: np.ndarray[Any, Any], start: int, leaf: np.ndarray[Any, Any]) -> None:
        self.memory = weakref.ref(memory)
        self.start, self.nbytes, self.dtype, self.shape = start, leaf.nbytes, leaf.dtype, leaf.shape
        self.address = memory.ctypes.data + start

    def read(self) -> np.ndarray[Any, Any]:
        memory = self.memory()
        assert memory is not None, "freed while it was copied from"
        read = memory.reshape(-1).view(np.uint8)[self.start : self.start + self.nbytes].copy()
        found: np.ndarray[Any, Any] = read.view(self.dtype).reshape(self.shape)
        return found


class Copy:
    """What will hold a leaf; poison until the copy has ended."""

    def __init__(self, staged: Staged, ends: float) -> None:
        self.data = np.frombuffer(bytes([POISON]) * staged.nbytes, np.uint8).view(staged.dtype).reshape(staged.shape)
        self.nbytes = staged.nbytes
        self.reads = staged.address
        self.ends = ends
        self._staged: Staged | None = staged

    def end(self) -> None:
        assert self._staged is not None
        self.data, self._staged = self._staged.read(), None


@dataclass(frozen=True)
class Point(Done):
    device: FakeDevice
    time: float

    def wait(self) -> None:
        self.device.fails("wait")
        self.device.until(self.time)


@dataclass
class FakeDevice:
    """A `Copier`.

    Attributes:
      copy_s: seconds for each copied byte; stage_s: for each staged one.
      pinned: whether arrays are in memory already that copies can read.
      registered: sizes of memory that was there, by address.
      failing: how often each call may be made yet before it raises; none: for ever.
      beside: buffers that were there when another one was allocated.
      made: what was to hold each leaf.
    """

    copy_s: float = 1.0
    stage_s: float = 0.0
    pinned: bool = False
    failing: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    busy_until: float = 0.0
    pending: list[Copy] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    made: list[weakref.ref[Copy]] = field(default_factory=list)
    refs: list[weakref.ref[Any]] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)

    @property
    def buffers(self) -> int:
        """How many there are."""
        return sum(ref() is not None for ref in self.refs)

    def until(self, time: float) -> None:
        """Let time pass, and what ends meanwhile end."""
        self.now = max(self.now, time)
        while self.pending and self.pending[0].ends <= self.now:
            self.pending.pop(0).end()

    def fails(self, call: str) -> None:
        left = self.failing.get(call)
        if left is not None:
            self.failing[call] = left - 1
            if left == 0:
                raise MemoryError(f"{call}: out of memory")

    def size(self, leaf: Any, where: str) -> int | None:
        self.fails("size")
        return None if not isinstance(leaf, np.ndarray) else 0 if self.pinned else leaf.nbytes

    def allocate(self, size: int) -> Any:
        self.fails("allocate")
        self.beside.append(self.buffers)
        buffer = np.full(size, POISON, np.uint8)
        self.refs.append(weakref.ref(buffer))
        self.allocated.append(size)
        return buffer

    def register(self, address: int, size: int) -> None:
        self.fails("register")
        assert address not in self.registered, "registered twice"
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        stop = address + self.registered.pop(address)
        assert not any(address <= copy.reads < stop for copy in self.pending), "unregistered while it was copied from"

    def address(self, leaf: Any) -> int | None:
        return leaf.ctypes.data if leaf.flags.c_contiguous else None

    def locked(self, leaf: Any) -> bool:
        """Whether a copy may read it where it is."""
        start, buffers = leaf.ctypes.data, [buffer for ref in self.refs if (buffer := ref()) is not None]
        ranges = [*self.registered.items(), *((buffer.ctypes.data, buffer.nbytes) for buffer in buffers)]
        return any(begin <= start and start + leaf.nbytes <= begin + size for begin, size in ranges)

    def stage(self, leaf: Any, buffer: Any, start: int) -> Any:
        self.fails("stage")
        self.until(self.now)
        memory = buffer[start : start + leaf.nbytes]
        assert memory.nbytes == leaf.nbytes
        memory[:] = leaf.reshape(-1).view(np.uint8)
        self.until(self.now + leaf.nbytes * self.stage_s)
        return Staged(buffer, start, leaf)

    def copy(self, staged: Any) -> Any:
        self.fails("copy")
        if not isinstance(staged, Staged):
            assert self.pinned or not staged.nbytes or self.locked(staged), "copied from pageable memory"
            staged = Staged(staged, 0, staged)
        self.busy_until = max(self.busy_until, self.now) + staged.nbytes * self.copy_s
        self.pending.append(Copy(staged, self.busy_until))
        self.made.append(weakref.ref(self.pending[-1]))
        return self.pending[-1]

    def mark(self) -> Point:
        self.fails("mark")
        return Point(self, self.busy_until)

    def hand_over(self, done: Done, copied: Sequence[Any], batch: Any) -> Any:
        assert isinstance(done, Point)
        return batch, done.time


def arrived(batch: Any) -> Any:
    """Return a batch as it is on the device now."""
    return replaced(batch, lambda leaf, where: leaf.data if isinstance(leaf, Copy) else leaf)


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)
