"""Items into a batch, and a batch into items: what `.batch(collate="stack")` and `.unbatch()` do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

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
        (named) tuples, lists and dataclasses are stacked part by part; str, bytes, None and all else become a list.

    Returns:
      As the items, each array [batch, *shape] in a memory of its own.

    Raises:
      DataError: shapes, keys or lengths differ; the message shows them.
    """
    first = items[0]
    if isinstance(first, np.ndarray):
        return _stack_arrays(items)
    if isinstance(first, bool | int | float | complex | np.generic):
        return np.asarray(items)
    if _is_tensor(first):
        return sys.modules["torch"].stack(items)
    if isinstance(first, Mapping):
        return {key: stack([item[key] for item in _alike(items, lambda item: sorted(item, key=str))]) for key in first}
    if isinstance(first, tuple):
        columns = [stack(list(column)) for column in zip(*_alike(items, len), strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return [stack(list(column)) for column in zip(*_alike(items, len), strict=True)]
    if is_dataclass(first) and not isinstance(first, type):
        parts = {field.name: stack([getattr(item, field.name) for item in items]) for field in fields(first)}
        return replace(cast(Any, first), **parts)
    return items


def unstack(batch: Any) -> Iterable[Any]:
    """Return the items of a batch, whatever `stack` or `as_list` made it from.

    Raises:
      PlanTypeError: it is no batch: a number, a string.
    """
    if isinstance(batch, list):
        return batch
    if (isinstance(batch, np.ndarray) and batch.ndim) or _is_tensor(batch):
        return iter(batch)
    if isinstance(batch, Mapping):
        return (dict(zip(batch, row, strict=True)) for row in _rows(batch.values()))
    if isinstance(batch, tuple):
        rows = _rows(batch)
        return (type(batch)(*row) for row in rows) if hasattr(batch, "_fields") else rows
    if is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in fields(batch)]
        columns = _rows(getattr(batch, name) for name in names)
        return (replace(cast(Any, batch), **dict(zip(names, row, strict=True))) for row in columns)
    raise PlanTypeError(
        f".unbatch expected a batch (list, array, dict, tuple or dataclass), got {type(batch).__name__}"
    )


def _rows(columns: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(unstack(column) for column in columns), strict=True)


def _stack_arrays(items: list[Any]) -> Any:
    try:
        return np.stack(items)
    except ValueError as error:
        shapes = sorted({str(np.shape(item)) for item in items})
        raise DataError(
            f"a batch needs arrays of one shape, got {', '.join(shapes)}: pad or crop them in a .map before .batch, or "
            "keep them apart with .batch(collate=None)"
        ) from error


def _alike(items: list[Any], shape: Any) -> list[Any]:
    """Return `items` if `shape` is the same for all."""
    found = [shape(item) for item in items]
    for other in found:
        if other != found[0]:
            raise DataError(f"a batch needs items of one structure, got {found[0]} and {other}")
    return items


def _is_tensor(item: Any) -> bool:
    torch = sys.modules.get("torch")  # never imported for this: whoever has a tensor has it
    return torch is not None and isinstance(item, torch.Tensor)
