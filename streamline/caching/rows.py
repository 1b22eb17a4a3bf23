"""Blocks: arrays, or dicts and tuples of arrays, whose first axis are rows. Many rows in few arrays.

What is handed out is always a copy, so that the arrays which hold a cycle can hold the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamline.errors import DataError

__all__ = ["Array", "Rows", "columns_of", "part"]


Array: TypeAlias = "npt.NDArray[Any]"


Form: TypeAlias = "tuple[Any, ...]"
"""What blocks of one stream have in common: structure, types, and shapes behind the first axis."""


WAY_OUT = "make blocks of NumPy arrays in a .map before .regenerate(block=), or leave out block="


class Rows:
    """Room for `size` rows of blocks that are alike."""

    def __init__(self, size: int, block: int) -> None:
        self.block_rows = block
        self.size = size
        self._form: Form | None = None
        self._columns: list[Array] = []
        self.filled = 0

    @classmethod
    def holding(cls, whole: Any, block: int) -> Rows:
        """Return the rows of a block, in its own memory."""
        columns, form = columns_of(whole)
        rows = cls(len(columns[0]), block)
        rows._form, rows._columns, rows.filled = form, columns, rows.size
        return rows

    @property
    def missing(self) -> int:
        """Rows that there is still room for."""
        return self.size - self.filled

    @property
    def outputs(self) -> int:
        """Blocks that come out of one serving; the last one may be short."""
        return -(-self.filled // self.block_rows)

    def add(self, block: Any, skip: int) -> int:
        """Copy the rows of a block from row `skip` on, as many as there is room for; return how many the block has.

        Raises:
          DataError: it is no block, or not like those before.
        """
        columns, form = columns_of(block)
        if form != self._form:
            self._take_form(columns, form)
        rows = len(columns[0])
        count = max(0, min(self.missing, rows - skip))
        for mine, its in zip(self._columns, columns, strict=True):
            mine[self.filled : self.filled + count] = its[skip : skip + count]
        self.filled += count
        return rows

    def _take_form(self, columns: list[Array], form: Form) -> None:
        if self.filled:
            raise DataError(
                f".regenerate(block=) needs blocks that are alike: expected {self._form}, got {form}; {WAY_OUT}"
            )
        self._form = form
        self._columns = [np.empty((self.size, *column.shape[1:]), column.dtype) for column in columns]

    def block(self, order: npt.NDArray[np.intp], number: int) -> Any:
        """Return block `number` of this order, in a memory of its own."""
        picked = order[number * self.block_rows : (number + 1) * self.block_rows]
        return _joined(self._form or (), iter([column.take(picked, axis=0) for column in self._columns]))

    def whole(self) -> Any:
        """Return all rows as one block, in this memory."""
        return _joined(self._form or (), iter([column[: self.filled] for column in self._columns]))

    def clear(self) -> None:
        """Forget the rows; the room stays."""
        self.filled = 0

    def drop(self) -> None:
        """Forget the rows and their room."""
        self._columns, self.filled = [], 0


def columns_of(block: Any) -> tuple[list[Array], Form]:
    """Return the arrays of a block, and its form.

    Raises:
      DataError: it is no block: something else than arrays, or arrays of different lengths.
    """
    columns: list[Array] = []
    form = _form_of(block, columns)
    if not columns or len({len(column) for column in columns}) > 1:
        found = ", ".join(str(len(column)) for column in columns) or "no array"
        raise DataError(f".regenerate(block=) needs blocks of as many rows in each array, got {found}; {WAY_OUT}")
    return columns, form


def part(block: Any, start: int) -> Any:
    """Return a block's rows from `start` on, in its own memory."""
    columns, form = columns_of(block)
    return _joined(form, iter([column[start:] for column in columns]))


def _form_of(block: Any, columns: list[Array]) -> Form:
    if isinstance(block, np.ndarray) and block.ndim:
        columns.append(block)
        return "array", block.dtype, block.shape[1:]
    if isinstance(block, dict):
        return "dict", tuple(block), tuple(_form_of(value, columns) for value in block.values())
    if isinstance(block, tuple):
        return "tuple", type(block), tuple(_form_of(value, columns) for value in block)
    raise DataError(
        ".regenerate(block=) needs blocks: NumPy arrays, or dicts and tuples of them, whose first axis are rows; got "
        f"{type(block).__name__}; {WAY_OUT}"
    )


def _joined(form: Form, columns: Iterator[Array]) -> Any:
    if form[0] == "array":
        return next(columns)
    parts = [_joined(inner, columns) for inner in form[2]]
    if form[0] == "dict":
        return dict(zip(form[1], parts, strict=True))
    return form[1](*parts) if hasattr(form[1], "_fields") else tuple(parts)
