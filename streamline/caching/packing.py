"""Items as a form in JSON and the bytes of their arrays: what is kept in files. Never pickle.

A form is a value of JSON as it is, or a list that begins with its kind: an array, a NumPy number, bytes, and
containers. Arrays come back C-ordered, tuples as tuples, keys as they were if they are JSON's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from streamline.errors import DataError
from streamline.states import Json

__all__ = ["Buffer", "Read", "bytes_of", "pack", "unpack", "unpack_all"]

Read = Callable[[memoryview], None]

Buffer: TypeAlias = "np.ndarray[Any, Any] | np.generic | bytes"
"""What has the bytes that are written: the items' own, so that a million of them cost a reference each."""


def bytes_of(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer, C-ordered: a copy of those that aren't, for as long as they are being written."""
    if isinstance(buffer, bytes):
        return memoryview(buffer)
    array = np.ascontiguousarray(buffer).reshape(-1)
    return array.view(np.uint8).data if array.dtype.itemsize else memoryview(b"")


def pack(value: Any, buffers: list[Buffer], writer: str) -> Json:
    """Return the form of `value`, and add what has its bytes to `buffers`.

    Args:
      writer: who writes it down, as the user wrote it: ".cache(path=)".

    Raises:
      DataError: it is, or holds, something else than JSON's values, tuples, bytes and NumPy's arrays and numbers.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        buffers.append(value)
        descr = np.lib.format.dtype_to_descr(value.dtype)
        return ["a" if isinstance(value, np.ndarray) else "n", descr, list(value.shape)]
    if kind is bytes:
        buffers.append(value)
        return ["b", len(value)]
    if kind is list or kind is tuple:
        return ["l" if kind is list else "t", [pack(part, buffers, writer) for part in value]]
    if kind is dict and all(key is None or type(key) in (bool, int, float, str) for key in value):
        return ["d", list(value), [pack(part, buffers, writer) for part in value.values()]]
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else kind.__name__
    raise DataError(
        f"{writer} writes down numbers, strings, bytes, NumPy arrays, and lists, tuples and dicts of them; got {what}: "
        f"turn it into one of them in a .map before {writer.partition('(')[0]}, and back behind it"
    )


def unpack(form: Json, read: Read) -> Any:
    """Return what `pack` was given; `read` fills a buffer with the next bytes."""
    if not isinstance(form, list):
        return form
    kind, *rest = form
    if kind in ("a", "n"):
        dtype = np.lib.format.descr_to_dtype(_descr(rest[0]))
        array: np.ndarray[Any, Any] = np.empty(rest[1], dtype)
        if array.nbytes:
            read(array.reshape(-1).view(np.uint8).data)
        return array if kind == "a" else array[()]
    if kind == "b":
        content = bytearray(rest[0])
        read(memoryview(content))
        return bytes(content)
    if kind == "d":
        return dict(zip(rest[0], (unpack(part, read) for part in rest[1]), strict=True))
    parts = [unpack(part, read) for part in rest[0]]
    return parts if kind == "l" else tuple(parts)


def unpack_all(forms: list[Json], read: Read) -> list[Any]:
    """Return what all of these forms are of; none is left in the list, as each is let go of when its item is there."""
    forms[:] = forms[::-1]
    return [unpack(forms.pop(), read) for _ in range(len(forms))]


def _descr(descr: Json) -> Any:
    """Return a structured type's description as NumPy wants it: its fields are tuples."""
    if isinstance(descr, str):
        return descr
    return [tuple(_descr(part) if isinstance(part, list) and at == 1 else tuple(part) if at == 2 else part
                  for at, part in enumerate(field)) for field in descr]  # fmt: skip
