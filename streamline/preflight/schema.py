"""Whether the first records of several files are of one kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Mixed", "mixed"]


SHOWN = 5
"""Keys that a message names."""


Mixed = tuple[str, bool]
"""What differs, and whether whoever reads one record's way fails on the other; else it may be meant."""


def mixed(records: Sequence[tuple[str, object]], *, columns: bool) -> list[Mixed]:
    """Return how records differ from the first one.

    Args:
      records: (where it is from, the record).
      columns: whether all files must have the same keys: tables; else some keys may be optional.
    """
    if not records:
        return []
    first, model = records[0]
    shape = _shape(model)
    found = [_differs(first, shape, where, _shape(record), columns) for where, record in records[1:]]
    return [difference for difference in found if difference is not None]


def _differs(first: str, one: Any, where: str, other: Any, columns: bool) -> Mixed | None:
    if not isinstance(one, dict) or not isinstance(other, dict):
        if not _compatible(one, other):
            return f"the first record of {first} is {_said(one)}, that of {where} is {_said(other)}", True
        return None
    wrong = [key for key in one.keys() & other.keys() if not _compatible(one[key], other[key])]
    if wrong:
        keys = ", ".join(f"{key!r} is {one[key]} and {other[key]}" for key in sorted(wrong, key=str)[:SHOWN])
        return f"the first records of {first} and {where} differ: {keys}", True
    if one.keys() != other.keys():
        said = [f"{where} has no {_keys(one.keys() - other.keys())}"] if one.keys() - other.keys() else []
        said += [f"{first} has no {_keys(other.keys() - one.keys())}"] if other.keys() - one.keys() else []
        return f"the first records differ: {', '.join(said)}", columns or not one.keys() & other.keys()
    return None


def _shape(record: object) -> Any:
    """Return a record's type, or by key those of its values."""
    if isinstance(record, Mapping):
        return {key: _type(value) for key, value in record.items()}
    return _type(record)


def _type(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"


def _compatible(one: Any, other: Any) -> bool:
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    return one == other or "NoneType" in (one, other) or {one, other} == {"int", "float"}


def _said(shape: Any) -> str:
    return "a mapping" if isinstance(shape, dict) else str(shape)


def _keys(keys: Any) -> str:
    names = sorted(map(repr, keys))
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")
