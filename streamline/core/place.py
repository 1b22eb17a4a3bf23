"""Memory for arrays that will leave a host, or go to a device: written there, they needn't be copied.

A host's link has shared memory, a transfer to a GPU page-locked memory, both by the run's `Lender`. `.batch`, `.pack`
and `.regenerate(block=)` use their site's; `empty`, for functions of users, finds that of the host that calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias

from streamline.core.lazy_numpy import np

if TYPE_CHECKING:
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class Memory:
    """Bytes at an address, which live as long as this object does; `keep` lives as long."""

    def __init__(self, address: int, size: int, keep: object = None) -> None:
        self._keep = keep
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}

    def as_array(self) -> Bytes:
        """Return the bytes as an array, whose `base` is no array; call it once.

        A weak reference to it dies with the last view: the garbage collector doesn't traverse arrays, so never before a
        finaliser that still reads one. If its base were an array, NumPy would have views refer to that.
        """
        array = np.asarray(self)
        del self.__array_interface__
        return array


Mapped: TypeAlias = Callable[[int, int], Callable[[], object]]
"""Called with the address and size of memory that another process shares with this one; returns what is called, in any
thread, before that is unmapped."""


class Place(Protocol):
    """Lends memory in which what is written needn't be copied to leave this host, or to reach a device."""

    def empty(self, nbytes: int) -> Bytes | None:
        """Return at least `nbytes`, at a cache line; None: there is no room, or so few aren't worth it. Never waits."""


@dataclass(frozen=True)
class Lender:
    """A service: the `place` in which arrays are written, and what is called for memory that a host process shares."""

    place: Place | None = None
    on_mapped: Mapped | None = None


def lent(place: Place | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Return an uninitialised array in memory that `place` lends; None: it has none for this."""
    if place is None or dtype.hasobject:
        return None
    memory = place.empty(math.prod(shape) * dtype.itemsize)
    return None if memory is None else np.ndarray(shape, dtype, memory)


CURRENT_PLACE: ContextVar[Place | None] = ContextVar("streamline_place", default=None)
"""The place of the run that calls a user's function, in its event loop and in its threads."""


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = float) -> npt.NDArray[Any]:
    """Return an uninitialised array, as `numpy.empty` does; in a host process, one that leaves it without a copy.

    For functions that make large arrays, in stages that run in `Processes`: fill it and return it, as it is or inside
    dicts, tuples and the like. It is copied if the function, or a stage, still refers to it when it leaves, or if
    there was no room. The consumer gets an ordinary, writable array either way. Elsewhere, and for small arrays, this
    is `numpy.empty`.

    Like every view, such an array can't be resized in place. A raw pointer (`ctypes.data`, `__array_interface__`) keeps
    nothing alive: keep the array for as long as it is used.
    """
    kind = np.dtype(dtype)
    lengths = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
    array = lent(CURRENT_PLACE.get(), lengths, kind)
    return np.empty(lengths, kind) if array is None else array
