"""Items into a batch, and a batch into items: what `.batch(collate="stack")` and `.unbatch()` do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from streamline.errors import DataError, PlanTypeError

__all__ = ["as_list", "stack", "unstack"]


def as_list(items: list[Any]) -> list[Any]:
    """Return the batch as the list of its items."""
    return items


def stack(items: list[Any]) -> Any:
    """Return one batch of items that look alike.

    Args:
      items: at least one. NumPy arrays, numbers, bools and torch tensors are stacked along a new first axis; dicts,
        (named) tuples and dataclasses are stacked part by part; str, bytes, None, lists and all else become a list.

    Returns:
      As the items, each array [batch, *shape] in a memory of its own.

    Raises:
      DataError: shapes, types, keys or lengths differ; the message shows them.
    """
    first = items[0]
    if len(set(map(type, items))) > 1:
        _check_types(items)
    if isinstance(first, bool | int | float | complex | np.ndarray | np.generic):
        return _stack_arrays(items)
    if _is_tensor(first):
        return _stacked(sys.modules["torch"].stack, items)
    if isinstance(first, Mapping) and _alike(items, lambda item: sorted(item, key=str)):
        return {key: stack([item[key] for item in items]) for key in first}
    if isinstance(first, tuple) and _alike(items, len):
        columns = [stack(list(column)) for column in zip(*items, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if names := _field_names(first):
        return _replaced(first, {name: stack([getattr(item, name) for item in items]) for name in names})
    return items  # also what has no parts: a batch of them would not know how many they were


def unstack(batch: Any) -> Iterable[Any]:
    """Return the items of a batch, whatever `stack` or `as_list` made it from.

    Raises:
      PlanTypeError: it is no batch: a number, a string.
    """
    if isinstance(batch, list):
        return batch
    if (isinstance(batch, np.ndarray) and batch.ndim) or _is_tensor(batch):
        rows: Iterator[Any] = iter(batch)
        return rows
    if isinstance(batch, Mapping):
        return (dict(zip(batch, row, strict=True)) for row in _rows(batch.values()))
    if isinstance(batch, tuple):
        rows = _rows(batch)
        return (type(batch)(*row) for row in rows) if hasattr(batch, "_fields") else rows
    if names := _field_names(batch):
        columns = _rows(getattr(batch, name) for name in names)
        return (_replaced(batch, dict(zip(names, row, strict=True))) for row in columns)
    raise PlanTypeError(
        f".unbatch expected a batch (list, array, dict, tuple or dataclass), got {type(batch).__name__}"
    )


def _rows(columns: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(unstack(column) for column in columns), strict=True)


def _stack_arrays(items: list[Any]) -> Any:
    if isinstance(items[0], np.ndarray):
        return _stacked(np.stack, items)
    return _stacked(np.asarray, items)  # of numbers 10 x as fast


def _stacked(stack_all: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    try:
        return stack_all(items)
    except (ValueError, RuntimeError) as error:  # NumPy's, torch's
        shapes = sorted({str(tuple(np.shape(item))) for item in items})
        if len(shapes) == 1:
            raise
        raise DataError(
            f"a batch needs arrays of one shape, got {', '.join(shapes)}: pad or crop them in a .map before .batch, or "
            "keep them apart with .batch(collate=None)"
        ) from error


def _alike(items: list[Any], shape: Callable[[Any], Any]) -> Any:
    """Return what `shape` says of all items."""
    found = [shape(item) for item in items]
    for other in found:
        if other != found[0]:
            raise DataError(f"a batch needs items of one structure, got {found[0]} and {other}")
    return found[0]


def _check_types(items: list[Any]) -> None:
    """Insist that all items are stacked in the same way: [1, None] would be an array of objects, [None, 1] a list."""
    if len(set(map(_type_of, items))) > 1:
        types = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
        raise DataError(
            f"a batch needs items of one type, got {types}: make them alike in a .map before .batch, or keep them "
            "apart with .batch(collate=None)"
        )


def _type_of(item: Any) -> object:
    if isinstance(item, bool | int | float | complex | np.ndarray | np.generic):
        return np.ndarray
    if _is_tensor(item):
        return "tensor"
    if isinstance(item, Mapping):
        return Mapping
    if isinstance(item, tuple) or _field_names(item):
        return type(item)
    return object


def _field_names(item: Any) -> list[str]:
    """Return the names of a dataclass instance's fields; none for all else."""
    return [field.name for field in fields(item)] if is_dataclass(item) and not isinstance(item, type) else []


def _replaced(item: Any, parts: dict[str, Any]) -> Any:
    """Return a dataclass instance with other parts; also where its `__init__` would not take them."""
    made = copy(item)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


def _is_tensor(item: Any) -> bool:
    torch = sys.modules.get("torch")  # never imported for this: whoever has a tensor has it
    return torch is not None and isinstance(item, torch.Tensor)
