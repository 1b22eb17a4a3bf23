"""Lists of small arrays, or of dicts or tuples with such, as columns: one array is pickled for each.

A pickler takes 2 µs for an array, most of it in Python; a row of a column takes 0.5 µs. The other end makes an array of
its own of each row, so that nothing of this shows: no item keeps the memory of others alive.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, repeat
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias

from streamline.core.lazy_numpy import loaded_np, np

Array: TypeAlias = "np.ndarray[Any, Any]"

LEAST_ITEMS = 12
"""Fewer are pickled as quickly one by one."""

MOST_BYTES = 1 << 12
"""Of a row; larger arrays travel uncopied."""

STRIDES, SHAPE, DTYPE, COPY = attrgetter("strides"), attrgetter("shape"), attrgetter("dtype"), methodcaller("copy")


def in_columns(items: list[Any]) -> Any:
    """Return what to pickle in place of a list: its columns, which are unpickled as an equal list, or the list."""
    if len(items) < LEAST_ITEMS or "numpy" not in sys.modules:
        return items
    kind, array = type(items[0]), loaded_np.ndarray
    if kind not in (array, dict, tuple) or _several(map(type, items)) or array in copyreg.dispatch_table:
        return items
    if kind is array:
        return _Stack(items) if _stackable([items]) else items
    first, keys = items[0], None
    if kind is dict:
        first, keys = tuple(items[0].values()), tuple(items[0])
    if array not in (kinds := set(map(type, first))) or kinds - _atoms() - {array}:
        return items
    if _several(map(tuple if keys else len, items)) or (keys and {*map(type, chain.from_iterable(items))} != {str}):
        return items
    columns = list(zip(*(map(dict.values, items) if keys else items), strict=True))
    stacks = [column for column in columns if type(column[0]) is array]
    others = chain.from_iterable(column for column in columns if type(column[0]) is not array)
    if not _atoms().issuperset(map(type, others)) or not _stackable(stacks):
        return items
    return _Zipped(keys, [_Stack(column) if type(column[0]) is array else column for column in columns])


@cache
def _atoms() -> frozenset[type]:
    """Return the types of what may stand beside arrays: it refers to nothing, above all not to one of them."""
    numbers = (np.dtype(code).type for code in "?bhilBHILefd")
    return frozenset({bool, int, float, complex, str, bytes, type(None), *numbers})


def _several(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1


def _stackable(columns: Sequence[Sequence[Any]]) -> bool:
    """Return whether these are columns of small plain arrays, all of one kind in each, and none comes twice."""
    for column in columns:
        first = column[0]
        if not 0 < first.nbytes < MOST_BYTES or not first.ndim or not first.flags.c_contiguous:
            return False
        if first.dtype.isbuiltin != 1 or first.dtype.kind not in "biufc" or _several(map(type, column)):
            return False
        if _several(map(STRIDES, column)) or _several(map(SHAPE, column)) or _several(map(id, map(DTYPE, column))):
            return False
    return len(set(map(id, chain.from_iterable(columns)))) == sum(map(len, columns))


class _Stack:
    """A column of arrays; unpickled, their list."""

    def __init__(self, rows: Sequence[Array]) -> None:
        self.rows = rows

    def __reduce__(self) -> Any:
        return _rows, (np.concatenate(self.rows), len(self.rows))


class _Zipped:
    """Columns; unpickled, the list of dicts with these keys, or of tuples."""

    def __init__(self, keys: tuple[str, ...] | None, columns: list[Any]) -> None:
        self.keys = keys
        self.columns = columns

    def __reduce__(self) -> Any:
        return _items, (self.keys, self.columns)


def _rows(array: Array, count: int) -> list[Array]:
    return list(map(COPY, array.reshape(count, -1, *array.shape[1:])))


def _items(keys: tuple[str, ...] | None, columns: list[Any]) -> list[Any]:
    rows = zip(*columns, strict=True)
    return list(rows) if keys is None else list(map(dict, map(zip, repeat(keys), rows)))
