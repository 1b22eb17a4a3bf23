"""A digest of an item, to tell whether two items are the same: cheap, however large the item is."""

from __future__ import annotations

import os
from array import array
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy as np

__all__ = ["digest"]

DIGEST_BYTES = 16

EDGE_BYTES = 1 << 15
"""Of a longer buffer, so many bytes from its beginning and from its end count, and how long it is."""

MOST_PARTS = 4096
"""Of an item that holds more, these count, in order."""

TOLD_BY_REPR = frozenset({"datetime", "decimal", "fractions", "uuid"})
"""Modules whose classes say all that they hold in their `repr`."""


def digest(item: object) -> bytes | None:
    """Return a digest of an item: that of an equal one is equal, in any process; None: it can't be made.

    It is made of numbers, strings, bytes, paths, times, arrays, torch tensors in memory, enums; of lists, tuples, sets,
    dicts, dataclasses and msgspec structs of them. An item that holds anything else has none: nothing of the user's
    (a `repr`, a `__reduce__`) is called to look into it.
    """
    written = _Written()
    try:
        written.add(item)
    except _Enough:
        return written.digest()
    except Exception:  # nothing that is known, a tensor on a GPU, a list that holds itself
        return None
    return written.digest()


class _Enough(Exception):  # noqa: N818 - no error
    """All that counts has been written."""


class _Written:
    """What a digest is made of: each part behind its type and its length, so that no two items look like one."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._left = MOST_PARTS

    def digest(self) -> bytes:
        return self._hash.digest()

    def add(self, item: Any) -> None:
        """Write an item, and what it holds.

        Raises:
          _Enough: that, and no more.
          TypeError: it is of no class that is known.
        """
        if not self._left:
            raise _Enough
        self._left -= 1
        kind: type[Any] = type(item)
        if item is None or kind in (bool, int, float, complex) or kind.__module__ in TOLD_BY_REPR:
            self._bytes(kind, repr(item).encode())
        elif isinstance(item, Enum):
            self._bytes(kind, item.name.encode())
        elif isinstance(item, str):
            self._bytes(kind, item.encode(errors="surrogatepass"))
        elif isinstance(item, bytes | bytearray | memoryview | array):
            self._bytes(kind, memoryview(item).cast("B"))
        elif isinstance(item, np.ndarray | np.generic):
            self._array(np.asarray(item))
        elif isinstance(item, dict):
            self._parts(kind, [part for entry in item.items() for part in entry])
        elif isinstance(item, list | tuple):
            self._parts(kind, item)
        elif isinstance(item, set | frozenset):
            self._parts(kind, sorted(_known(part) for part in item))
        elif isinstance(item, os.PathLike):
            self._bytes(kind, os.fsencode(item))
        else:
            self._object(kind, item)

    def _object(self, kind: type[Any], item: Any) -> None:
        if is_dataclass(kind):
            self._parts(kind, [getattr(item, field.name) for field in fields(kind)])
        elif (names := getattr(kind, "__struct_fields__", None)) is not None:
            self._parts(kind, [getattr(item, name) for name in names])
        elif kind.__module__.partition(".")[0] == "torch":
            self._array(item.detach().numpy())
        else:
            raise TypeError(f"a {kind.__name__} has no digest")

    def _parts(self, kind: type[Any], parts: Any) -> None:
        self._head(kind, len(parts))
        for part in parts:
            self.add(part)

    def _array(self, item: np.ndarray[Any, Any]) -> None:
        if item.dtype.hasobject:
            self._parts(np.ndarray, item.ravel().tolist())
            return
        self._hash.update(f"{item.dtype.str}{item.shape}".encode())
        edge = EDGE_BYTES // max(1, item.itemsize) + 1
        if item.size <= 2 * edge:
            self._bytes(np.ndarray, item.tobytes())
        else:  # the middle isn't even looked at: it may be on disk
            self._bytes(np.ndarray, item.flat[:edge].tobytes())
            self._bytes(np.ndarray, item.flat[item.size - edge :].tobytes())

    def _bytes(self, kind: type[Any], data: bytes | memoryview) -> None:
        self._head(kind, len(data))
        if len(data) <= 2 * EDGE_BYTES:
            self._hash.update(data)
        else:
            self._hash.update(data[:EDGE_BYTES])
            self._hash.update(data[-EDGE_BYTES:])

    def _head(self, kind: type[Any], length: int) -> None:
        self._hash.update(f"{kind.__qualname__}:{length}:".encode())


def _known(part: object) -> bytes:
    found = digest(part)
    if found is None:
        raise TypeError(f"a {type(part).__name__} has no digest")
    return found
