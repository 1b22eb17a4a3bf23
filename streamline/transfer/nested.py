"""Arrays and tensors inside a batch: in dicts, lists, (named) tuples and dataclasses, however deep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

__all__ = ["replaced"]

Leaf = Callable[[Any, str], Any]


def replaced(batch: Any, leaf: Leaf, where: str = "batch") -> Any:
    """Return the batch with every leaf replaced by what `leaf` makes of it; a part in which nothing changes stays.

    The batch itself is never changed. What `leaf` raises comes out with a note that says where in the batch, unless its
    message does.

    Args:
      leaf: called with each leaf and where it is, "batch['tokens'][0]", in order.
    """
    if isinstance(batch, np.ndarray):  # most leaves are: they needn't be asked whether they are anything else
        return _leaf(batch, leaf, where)
    if isinstance(batch, Mapping):
        parts: Iterable[tuple[Any, str, Any]] = ((key, f"[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, list | tuple):
        names = getattr(batch, "_fields", None)
        keys = [f"[{index}]" for index in range(len(batch))] if names is None else [f".{name}" for name in names]
        parts = ((index, keys[index], part) for index, part in enumerate(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        held = ((field.name, getattr(batch, field.name, NOT_THERE)) for field in fields(batch))
        parts = ((name, f".{name}", value) for name, value in held if value is not NOT_THERE)
    else:
        return _leaf(batch, leaf, where)
    changed: dict[Any, Any] = {}
    new: Any = None
    try:
        for key, step, part in parts:
            new = replaced(part, leaf, where + step)
            if new is not part:
                changed[key] = new
    except BaseException:
        changed.clear()  # what remembers the failure is not to hold on to what was made, on a device perhaps
        new = None
        raise
    return _with(batch, changed) if changed else batch


NOT_THERE: Any = object()
"""For a field of a dataclass that was never set."""


def _leaf(part: Any, leaf: Leaf, where: str) -> Any:
    try:
        return leaf(part, where)
    except Exception as error:
        if where not in str(error):
            error.add_note(f"at {where}, {_described(part)}")
        raise


def _described(part: Any) -> str:
    shape, dtype = getattr(part, "shape", None), getattr(part, "dtype", None)
    return f"a {type(part).__name__}" + (f" of {dtype}{list(shape)}" if shape is not None else "")


def _with(batch: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a batch with other parts."""
    if type(batch) is dict:
        return {**batch, **changed}
    if isinstance(batch, MutableMapping):
        made, before = copy(batch), dict(batch)
        made.update(changed)
        if all(batch[key] is before[key] for key in changed):
            return made
        batch.update(before)  # its copy shares what it holds
    if isinstance(batch, Mapping):
        return {**batch, **changed}
    if isinstance(batch, list | tuple):
        parts = [changed.get(index, part) for index, part in enumerate(batch)]
        if isinstance(batch, list):
            return parts
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    made = copy(batch)
    for name, part in changed.items():
        object.__setattr__(made, name, part)  # also where it is frozen, or its `__init__` would not take it
    return made
