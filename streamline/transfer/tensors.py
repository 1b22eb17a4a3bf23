"""NumPy arrays as torch tensors, without torch's warnings: strided, read-only, and of dtypes that only one has."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from streamline.core.lazy_numpy import has_more, np
from streamline.errors import DataError

USER_DEFINED = 256
"""The number of the first of other libraries' dtypes. `isbuiltin` would take what was unpickled for one, as all arrays
are that come from host processes."""


def dtype_of(torch: Any, array: np.ndarray[Any, Any], where: str) -> Any:
    """Return torch's dtype for an array.

    Raises:
      DataError: there is none; or elements are masked, which tensors don't support.
    """
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
