"""Memory maps of files travel as a path and a place: the child maps the same pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["mapped_again"]


def mapped_again(array: np.ndarray[Any, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return what makes `array` anew from the file that it maps (as `__reduce__` does); None: it is data.

    Slices, transposes and reshapes of a memory map, and plain arrays that look at one, count too. A map in mode "c" is
    data: what was written to it stands in no file.
    """
    root = _root(array)
    if root is None or type(array) not in (np.memmap, np.ndarray) or not array.size or array.dtype.hasobject:
        return None
    modes = {"r": "r", "r+": "r+", "w+": "r+"}
    if root.mode not in modes or root.filename is None or not os.path.exists(root.filename):  # noqa: PTH110 - a string
        return None
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    before = sum(-step for step in reach if step < 0)
    size = before + sum(step for step in reach if step > 0) + array.itemsize
    begin = root.offset + _address(array) - _address(root) - before
    place = (str(root.filename), modes[root.mode], begin, size)
    look = (type(array) is np.memmap, before, array.shape, array.strides, array.dtype, array.flags.writeable)
    return _mapped, (place, look)


def _root(array: np.ndarray[Any, Any]) -> Any:
    """Return the memory map that `array` looks at, as it was opened."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) else None


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _mapped(place: tuple[str, Any, int, int], look: tuple[bool, int, Any, Any, Any, bool]) -> np.ndarray[Any, Any]:
    path, mode, begin, size = place
    as_map, first, shape, strides, dtype, writeable = look
    whole: Any = np.memmap(path, np.uint8, mode, offset=begin, shape=(size,))
    kind: Any = np.memmap if as_map else np.ndarray
    array: Any = np.ndarray.__new__(kind, shape, dtype, buffer=whole, offset=first, strides=strides)
    if as_map:
        array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, begin + first, mode
    array.flags.writeable = writeable
    return array  # type: ignore[no-any-return]
