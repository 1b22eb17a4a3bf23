"""The interface of devices, the host's memory, its reference member, and NumPy arrays as torch's tensors.

A `Target` is found when a pipeline is opened; in each run, its `Mover` moves the batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from streamline.core.figures import Detail, Details
from streamline.core.lazy_numpy import has_more, np
from streamline.core.meters import ReadDetails
from streamline.core.place import Mapped, Place
from streamline.errors import DataError


class Copies:
    """Counters of the copies of one run.

    Attributes:
      copied_bytes: to the device; in the host's memory, what couldn't be taken as it was.
      staged_bytes: of those, what the CPU has written into a pinned buffer before.
      device_waited_s: waited for the device to finish with a buffer before the next batch.

    Args:
      pinned: whether the last two are counted: copies are made from pinned memory.
    """

    __slots__ = ("copied_bytes", "device_waited_s", "pinned", "staged_bytes")

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.copied_bytes = self.staged_bytes = 0
        self.device_waited_s = 0.0

    def details(self) -> Details:
        """Return the counters for the stage's meter."""
        copied = Detail("copied_bytes", self.copied_bytes)
        if not self.pinned:
            return (copied,)
        return copied, Detail("staged_bytes", self.staged_bytes), Detail("device_waited_s", self.device_waited_s)


@dataclass(frozen=True)
class HandOver:
    """Makes, in the consumer's thread, what a stream gives of what the channel of its transfer carries: `arrived`."""

    arrived: Callable[[Any], Any]


class Mover(ABC):
    """Moves the batches of one run, one after the other. Creating it doesn't touch the device.

    Success: `move` returns what the channel carries. Failure: it raises at its batch; copies that it had begun are
    waited for before their memory is reused. Close: no copy is left in progress, and the memory is freed.

    Attributes:
      hands_over: whether the consumer, in its own thread, has to call `arrived` with what `move` returned.
      details: returns the counters of its copies; None: it makes none.
      place: where batches for it are written at best; None: in ordinary memory.
      on_mapped: called with memory that a host process shares with this one; None: not called.
    """

    hands_over = False
    details: ReadDetails | None = None
    place: Place | None = None
    on_mapped: Mapped | None = None

    @abstractmethod
    def move(self, batch: Any) -> Any:
        """Return the batch on the device, or what `arrived` takes; its copies may still be in progress.

        Called in one thread at a time; where batches are in place already, in the event loop's.

        Raises:
          DataError: the device has no such arrays; the message says where in the batch.
          What the device's library raises, with a note that says where in the batch.
        """

    def arrived(self, moved: Any) -> Any:
        """Return the batch, in the consumer's thread, when it takes it; doesn't wait.

        After Ctrl-C in the middle of it, or right after it, it is called again, with the same or with its result.
        """
        return moved

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Wait for copies in progress, and free the memory. Idempotent, from any thread."""


class Target(ABC):
    """An available device. Two that compare equal are the same one."""

    @abstractmethod
    def mover(self, depth: int) -> Mover:
        """Return the mover of one run, with up to `depth` batches in flight."""


@dataclass(frozen=True)
class HostMemory(Target):
    """Nothing is moved."""

    def mover(self, depth: int) -> Mover:
        return _NoMove()


class _NoMove(Mover):
    def move(self, batch: Any) -> Any:
        return batch


# Tensors --------------------------------------------------------------------------------------------------------------

USER_DEFINED = 256
"""The number of the first of other libraries' dtypes. `isbuiltin` would take what was unpickled for one, as all arrays
are that come from host processes."""


def dtype_of(torch: Any, array: np.ndarray[Any, Any], where: str) -> Any:
    """Return torch's dtype for an array; a DataError if there is none, or elements are masked."""
    check_array(array, where)
    dtype = _dtype(torch, array.dtype)
    if dtype is None:
        raise DataError(
            f"{where}: torch has no dtype for a NumPy array of {array.dtype}: convert it in a .map before .transfer, "
            "or make it a list there, which stays what it is"
        )
    return dtype


@lru_cache(maxsize=64)  # NumPy works out a dtype's name anew each time, which takes longer than making the tensor
def _dtype(torch: Any, dtype: np.dtype[Any]) -> Any:
    found = getattr(torch, dtype.name, None)
    return found if isinstance(found, torch.dtype) else None


def check_array(array: np.ndarray[Any, Any], where: str) -> None:
    """Raise a DataError if an array has a mask, or a unit, say."""
    if has_more(type(array)):
        what = f"a {type(array).__name__} would lose its mask, or what else it has beside values, on the way"
        raise DataError(f"{where}: {what}: .filled() or np.asarray it in a .map before")


def is_plain(array: np.ndarray[Any, Any]) -> bool:
    """Whether torch takes an array's memory as it is, without a warning.

    To NumPy, an array with no step along an axis is contiguous whatever its stride there; to torch, a stride says more.
    """
    dtype, flags = array.dtype, array.flags
    native = dtype.isnative and dtype.num < USER_DEFINED and flags.writeable and flags.c_contiguous
    return native and all(stride >= 0 and stride % dtype.itemsize == 0 for stride in array.strides)


def as_tensor(torch: Any, array: np.ndarray[Any, Any], where: str) -> Any:
    """Return an array as a tensor: the same memory if that can be, else a copy of it.

    Raises:
      DataError: torch has no such dtype, or no masks.
    """
    dtype = dtype_of(torch, array, where)
    if not is_plain(array):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True, subok=False)
    if array.dtype.num < USER_DEFINED:
        return torch.from_numpy(array)
    bits = array.view(f"i{array.dtype.itemsize}")  # bfloat16, say: another library's dtype in NumPy, torch has its own
    return torch.from_numpy(bits).view(dtype)
