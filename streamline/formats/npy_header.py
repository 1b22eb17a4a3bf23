"""What an npy file's header says: where the rows are, and what they are. Read by `numpy.lib.format`, without I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy

from streamline.errors import DataError

__all__ = ["MAGIC", "Layout", "header_bytes", "layout_of"]

MAGIC = b"\x93NUMPY"

LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
"""Bytes of the header's length, behind the magic and the version. Source: NEP 1, and `numpy.lib.format`."""

MAX_HEADER_BYTES = 2**20
"""More is damage: numpy itself reads no header of more than 10,000 characters unless it is told to."""


@dataclass(frozen=True)
class Layout:
    """Where the rows of an array are.

    Attributes:
      start: the byte at which the first one begins, from the header's first byte on.
      rows: length of the first axis.
      row_shape: of the other axes.
      dtype: of the elements.
      fortran: the first axis varies fastest, so the bytes of a row are spread over the whole array.
    """

    start: int
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind the last row, from the header's first byte on."""
        return self.start + self.rows * self.row_bytes

    def array(self, data: bytes, rows: int) -> np.ndarray[Any, Any]:
        """Return the bytes of some rows as an array over them, read-only."""
        if not self.row_bytes:
            return self.empty(rows)
        return np.frombuffer(data, self.dtype).reshape(rows, *self.row_shape)

    def empty(self, rows: int) -> np.ndarray[Any, Any]:
        """Return rows that have no bytes."""
        found = np.empty((rows, *self.row_shape), self.dtype)
        found.flags.writeable = False
        return found


def header_bytes(head: bytes) -> int:
    """Return how many bytes a file's header takes, out of its first 12 bytes or more.

    Raises:
      DataError: it isn't one; it says no place.
    """
    if not head.startswith(MAGIC):
        raise DataError(f"expected an npy file, which begins with {MAGIC!r}, got {head[: len(MAGIC)]!r}")
    version = (head[6], head[7]) if len(head) > 7 else (0, 0)
    if version not in LENGTHS:
        raise DataError(f"expected an npy file of version 1.0, 2.0 or 3.0, got {version[0]}.{version[1]}, or its end")
    begin = 8 + LENGTHS[version]
    if len(head) < begin:
        raise DataError(f"the npy header is truncated: the file ends at its byte {len(head)}")
    size = begin + int.from_bytes(head[8:begin], "little")
    if size > MAX_HEADER_BYTES:
        raise DataError(f"the npy header is damaged: it says that it has {size:,} bytes")
    return size


def layout_of(head: bytes) -> Layout:
    """Return what a whole header says; what is behind it is not looked at.

    Raises:
      DataError: it can't be read, or what it says can't be; it says no place.
    """
    size = header_bytes(head)
    if len(head) < size:
        raise DataError(
            f"the npy header is truncated: expected {size:,} bytes, the file ends at its byte {len(head):,}"
        )
    begin = 8 + LENGTHS[head[6], head[7]]
    try:
        shape, fortran, dtype = _parsed(head[6], head[begin:size])
    except Exception as error:  # of numpy's parser, on garbage: ValueError, TypeError, RecursionError, ...
        raise DataError(f"the npy header can't be read: {error}") from error
    if dtype.hasobject:
        raise DataError(
            f"the array holds Python objects ({dtype}), which are pickled: reading them could run anything, so they "
            "are never read. Save numbers, strings of a fixed length or a structured dtype"
        )
    if not shape:
        raise DataError("expected an array with rows, got a single value (0 axes): np.load reads it")
    if min(shape) < 0 or dtype.subdtype is not None:
        raise DataError(f"the npy header can't be: shape {shape}, dtype {dtype}")
    return Layout(size, shape[0], shape[1:], dtype, fortran and len(shape) > 1)


def _parsed(version: int, text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    if version == 3:
        # numpy's public functions read versions 1 and 2, which are Latin-1. Beyond ASCII there is nothing in a header
        # but names in quotes, so escaped it means the same.
        text = text.decode().encode("ascii", "backslashreplace")
    parsed = npy.read_array_header_2_0(BytesIO(len(text).to_bytes(4, "little") + text))
    shape, fortran, dtype = parsed
    return tuple(int(length) for length in shape), bool(fortran), dtype
