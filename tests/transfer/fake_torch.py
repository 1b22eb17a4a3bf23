"""A module that does as torch does, as far as a transfer uses it: tensors over NumPy, and GPUs that are late.

A GPU does nothing by itself: what stands on a stream is done when somebody waits for it. So whoever doesn't wait as he
should reads poison, and a pinned buffer that is written to too early arrives with the wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from streamline.core.place import Memory

__all__ = ["FakeTorch"]

POISON = 0xEE
STRIDED = object()


class DType:
    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = np.dtype(kind)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


NAMES = ("bool", "uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64")
DTYPES = {**{name: DType(name, name) for name in NAMES}, "bfloat16": DType("bfloat16", "uint16")}


class Device:
    def __init__(self, kind: str, index: int | None = None) -> None:
        self.type, _, number = kind.partition(":")
        self.index = int(number) if number else index

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def nothing() -> None:
    pass


class Stream:
    """Work in order; `done` of it is done."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.lock = threading.RLock()

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def run(self, until: int | None = None) -> None:
        with self.lock:  # a thread that waits returns when it is done, by another one perhaps
            until = len(self.work) if until is None else until
            while self.done < until:
                self.work[self.done]()
                self.work[self.done] = nothing  # what it read is let go of
                self.done += 1


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a wait is not to hold a core"
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.at = stream, len(stream.work)

    def synchronize(self) -> None:
        assert self.at is not None, "waited for before it was recorded"
        stream, place = self.at
        stream.run(place)


class Tensor:
    requires_grad = is_quantized = False
    layout = STRIDED

    def __init__(self, torch: FakeTorch, data: Any, device: Device, pinned: bool = False, dtype: Any = None) -> None:
        self.torch = torch
        self.data = np.asarray(data)
        self.device = device
        self.pinned = pinned
        self.dtype = dtype or DTYPES[self.data.dtype.name]
        self.used_by: list[Stream] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def is_contiguous(self) -> bool:
        return self.data.flags.c_contiguous

    def is_pinned(self) -> bool:
        return self.pinned or self.torch.cuda.locked(self.data)

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def _like(self, data: Any, dtype: Any = None) -> Tensor:
        return Tensor(self.torch, data, self.device, self.pinned, dtype or self.dtype)

    def __getitem__(self, key: Any) -> Tensor:
        return self._like(self.data[key])

    def numpy(self) -> Any:
        assert self.device.type == "cpu"
        return self.data

    def view(self, to: Any) -> Tensor:
        return self._like(self.data.view(to.kind), to) if isinstance(to, DType) else self._like(self.data.reshape(to))

    def copy_(self, other: Tensor) -> None:
        assert self.device.type == other.device.type == "cpu"
        assert self.dtype is other.dtype
        np.copyto(self.data, other.data)

    def to(self, device: Any, non_blocking: bool = False) -> Tensor:
        device = Device(str(device))
        if device.type != "cuda":
            self.torch.cuda.current_stream(self.device).run()
            return self if device == self.device else Tensor(self.torch, self.data.copy(), device, dtype=self.dtype)
        if device == self.device:
            return self
        self.torch.cuda.check_thread()
        self.torch.spend(self.nbytes)
        assert not non_blocking or self.is_pinned(), "a copy from pageable memory waits, whatever is asked for"
        stream, source = self.torch.cuda.current_stream(device), self.data
        landed: Any = np.full(source.nbytes, POISON, np.uint8).view(source.dtype).reshape(source.shape)
        if non_blocking and source.nbytes:  # a pointer, which keeps nothing alive
            source = Memory(source.ctypes.data, source.nbytes).as_array()
        into = landed.reshape(-1).view(np.uint8) if source is not self.data else landed
        self.torch.cuda.read_from(self.data, stream)
        stream.work.append(lambda: np.copyto(into, source))
        if not non_blocking:
            stream.run()
        return Tensor(self.torch, landed, device, dtype=self.dtype)

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)

    def tolist(self) -> Any:
        """Read it in the calling thread, on its stream."""
        self.torch.cuda.current_stream(self.device).run()
        return self.data.tolist()

    def __repr__(self) -> str:
        return f"tensor({self.tolist()}, {self.device}, {self.dtype})"


class FakeTorch:
    """The module. `devices` of them are there; after `memory` bytes, a GPU has none left."""

    strided = STRIDED
    __version__ = "0.fake"

    def __init__(self, devices: int = 2, memory: float = float("inf")) -> None:
        self.Tensor = Tensor
        self.dtype = DType
        self.memory = memory
        self.left = memory
        self.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
        for name, kind in DTYPES.items():
            setattr(self, name, kind)
        self.version = SimpleNamespace(cuda="13.0" if devices else None)
        self.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False))
        self.cuda = Cuda(devices)

    def device(self, kind: str, index: int | None = None) -> Device:
        return Device(kind, index)

    def spend(self, size: int) -> None:
        if size > self.left:
            raise self.OutOfMemoryError("CUDA out of memory")
        self.left -= size

    def empty(self, size: int, *, dtype: Any, pin_memory: bool) -> Tensor:
        assert pin_memory
        if self.cuda.refusing == "allocate":
            raise RuntimeError("CUDA error: out of memory")
        self.cuda.pinned_on.append(self.cuda.current_device())
        memory = np.full(size, POISON, dtype.kind)
        self.cuda.allocated.append(memory)
        return Tensor(self, memory, Device("cpu"), pinned=True)

    def from_numpy(self, array: Any) -> Tensor:
        assert array.flags.writeable, "torch would warn"
        assert array.dtype.isnative, "torch raises"
        assert all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides), "torch raises"
        return Tensor(self, array, Device("cpu"))


class Cuda:
    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.local = threading.local()
        self.defaults: dict[tuple[int, Any], Stream] = {}
        self.pinned_on: list[int] = []
        self.allocated: list[Any] = []  # for ever, since copies read by pointers
        self.registered: dict[int, int] = {}
        self.unregistered = 0
        self.faults: list[str] = []
        self.reads: list[tuple[int, Stream, int]] = []
        self.refusing = ""  # "allocate" or "register" fails
        self.Stream = Stream
        self.Event = Event

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def check_error(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def check_thread(self) -> None:
        """As the runtime does: what was refused in a thread is raised by its next call, once."""
        code, self.local.refused = getattr(self.local, "refused", 0), 0
        self.check_error(code)

    def _register(self, address: int, size: int, flags: int) -> int:
        if self.refusing == "register":
            self.local.refused = 712
            return 712
        if address in self.registered:
            self.faults.append("registered twice")
        self.registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        stop = address + self.registered.pop(address)
        self.unregistered += 1
        if any(address <= at < stop and number >= stream.done for at, stream, number in self.reads):
            self.faults.append("unregistered while it was copied from")
        return 0

    def read_from(self, array: Any, stream: Stream) -> None:
        """The next work on this stream reads an array."""
        self.reads.append((array.ctypes.data, stream, len(stream.work)))

    def locked(self, array: Any) -> bool:
        """Whether an array's memory is page-locked."""
        start = array.ctypes.data
        ranges = [*self.registered.items(), *((memory.ctypes.data, memory.nbytes) for memory in self.allocated)]
        return any(begin <= start and start + array.nbytes <= begin + size for begin, size in ranges)

    def current_device(self) -> int:
        return int(getattr(self.local, "device", 0))

    def set_device(self, index: int) -> None:
        self.local.device = index

    def current_stream(self, device: Device) -> Stream:
        own: Stream | None = getattr(self.local, "stream", None)
        return own or self.defaults.setdefault((threading.get_ident(), device), Stream(device))

    @contextmanager
    def device(self, device: Device) -> Iterator[None]:
        before = self.current_device()
        self.local.device = device.index
        try:
            yield
        finally:
            self.local.device = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self.local, "stream", None)
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before
