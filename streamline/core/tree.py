"""Nested items and batches: walking them, replacing their leaves, their size in bytes, and digests to compare them.

Leaves are found in dicts, lists, (named) tuples and dataclasses, at any depth. A digest is cheap, however large the
item is; sizes are for byte budgets.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy as np


def parts_of(whole: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a container by key, index, or field name; None: it is a leaf."""
    if isinstance(whole, Mapping):
        return whole.items()
    if isinstance(whole, list | tuple):
        return enumerate(whole)
    names = field_names(whole)
    return None if names is None else [(name, getattr(whole, name)) for name in names if hasattr(whole, name)]


def field_names(item: Any) -> list[str] | None:
    """Return the names of a dataclass instance's fields; None: it is none."""
    return [field.name for field in fields(item)] if is_dataclass(item) and not isinstance(item, type) else None


def with_parts(whole: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a container with other parts, by key as in `parts_of`."""
    if type(whole) is dict:
        return {**whole, **changed}
    if isinstance(whole, MutableMapping):
        made, before = copy(whole), dict(whole)
        made.update(changed)
        if all(whole[key] is before[key] for key in changed):
            return made
        whole.update(before)  # its copy shares what it holds
    if isinstance(whole, Mapping):
        return {**whole, **changed}
    if isinstance(whole, list | tuple):
        parts = [changed.get(index, part) for index, part in enumerate(whole)]
        if isinstance(whole, list):
            return parts
        return type(whole)(*parts) if hasattr(whole, "_fields") else tuple(parts)
    made = copy(whole)
    for name, part in changed.items():
        object.__setattr__(made, name, part)  # also where it is frozen, or its `__init__` would not take it
    return made


Leaf = Callable[[Any, str], Any]


def replaced(batch: Any, leaf: Leaf, where: str = "batch") -> Any:
    """Return the batch with every leaf replaced by what `leaf` makes of it; a part in which nothing changes stays.

    The batch itself is never changed. What `leaf` raises comes out with a note that says where in the batch, unless its
    message does.

    Args:
      leaf: called with each leaf and where it is, "batch['tokens'][0]", in order.
    """
    # most leaves are arrays: they needn't be asked whether they are anything else
    parts = None if isinstance(batch, np.ndarray) else parts_of(batch)
    if parts is None:
        return _leaf(batch, leaf, where)
    changed: dict[Any, Any] = {}
    new: Any = None
    named = not isinstance(batch, Mapping | list)
    names = getattr(batch, "_fields", None) if named else None
    try:
        for key, part in parts:
            name = key if names is None else names[key]
            new = replaced(part, leaf, f"{where}.{name}" if named and type(name) is str else f"{where}[{key!r}]")
            if new is not part:
                changed[key] = new
    except BaseException:
        changed.clear()  # what remembers the failure is not to hold on to what was made, on a device perhaps
        new = None
        raise
    return with_parts(batch, changed) if changed else batch


def _leaf(part: Any, leaf: Leaf, where: str) -> Any:
    try:
        return leaf(part, where)
    except Exception as error:
        if where not in str(error):
            shape, dtype = getattr(part, "shape", None), getattr(part, "dtype", None)
            shown = f" of {dtype}{list(shape)}" if shape is not None else ""
            error.add_note(f"at {where}, a {type(part).__name__}{shown}")
        raise


def nbytes(item: Any) -> int:
    """Return the payload of an item in bytes: buffers, strings, and what containers hold; 1 or more.

    An estimate: object headers are left out for arrays and counted for the rest; shared parts count each time.
    """
    return max(1, _nbytes(item))


def _nbytes(item: Any) -> int:
    size = getattr(item, "nbytes", None)  # arrays, tensors, memory views
    if isinstance(size, int):
        return size
    if isinstance(item, bytes | bytearray | str):
        return len(item)
    if isinstance(item, Mapping):
        return sum(_nbytes(key) + _nbytes(value) for key, value in item.items())
    if isinstance(item, list | tuple | set | frozenset):
        return sum(map(_nbytes, item))
    if (names := field_names(item)) is not None:
        return sum(_nbytes(getattr(item, name)) for name in names)
    return sys.getsizeof(item)


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
    written = _DigestInput()
    try:
        written.add(item)
    except _Enough:
        return written.digest()
    except Exception:  # nothing that is known, a tensor on a GPU, a list that holds itself
        return None
    return written.digest()


class _Enough(Exception):  # noqa: N818 - no error
    """All that counts has been written."""


class _DigestInput:
    """What a digest is made of: each part after its type and its length, so that no two items look like one."""

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
        names = field_names(item) or getattr(kind, "__struct_fields__", None)
        if names is not None or is_dataclass(item):
            self._parts(kind, [getattr(item, name) for name in names or ()])
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
