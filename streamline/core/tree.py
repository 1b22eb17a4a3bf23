"""Nested items and batches: walking them, replacing their leaves, and their size in bytes, for byte budgets.

Leaves are found in dicts, lists, (named) tuples and dataclasses, at any depth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any


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
    """Return a copy of a container with some parts replaced, by key as in `parts_of`."""
    if type(whole) is dict:
        return {**whole, **changed}
    if isinstance(whole, MutableMapping):
        made, before = copy(whole), dict(whole)
        made.update(changed)
        if all(whole[key] is before[key] for key in changed):
            return made
        whole.update(before)  # the copy shares its entries: undo
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
    """Return the batch with `leaf(part, where)` in place of every leaf; unchanged parts are shared.

    The batch itself is never changed. What `leaf` raises gets a note that says where in the batch, unless its message
    does.

    Args:
      leaf: called with each leaf and where it is, "batch['tokens'][0]", in order.
    """
    # arrays, which most leaves are, skip the checks of `parts_of`
    parts = None if hasattr(type(batch), "__array_interface__") else parts_of(batch)
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
        changed.clear()  # the traceback must not keep new leaves alive, perhaps on a device
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
