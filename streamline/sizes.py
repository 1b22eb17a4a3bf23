"""How many bytes an item holds, for byte budgets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["nbytes"]


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
    if is_dataclass(item) and not isinstance(item, type):
        return sum(_nbytes(getattr(item, field.name)) for field in fields(item))
    return sys.getsizeof(item)
