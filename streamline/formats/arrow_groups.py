"""Groups of rows in a file of columns: what can be had of it without the rest.

A place in such a file is {"file", "group", "row"}. `group` is a row group of a Parquet file, a record batch of an Arrow
file. `row` counts the rows of the group that are behind it, before any filter: so a resume decodes one group from its
start, and goes on at the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamline.errors import DataError
from streamline.formats.arrow_spans import Span
from streamline.formats.arrow_unchanged import Unchanged
from streamline.formats.base import Place

__all__ = ["STEP_BYTES", "Decoded", "Group", "Table", "Where"]


STEP_BYTES = 1024 * 1024
"""Decoded at a time where rows are made of it: a millisecond or two."""


@dataclass
class Group:
    """Some rows of a file that can be had without the others.

    Attributes:
      index: in the file.
      rows: how many; None: it is known when it is decoded.
      spans: the bytes that are needed of it, in order.
      step: rows to be decoded at a time.
    """

    index: int
    rows: int | None
    spans: tuple[Span, ...]
    step: int


@dataclass(frozen=True)
class Decoded:
    """Some rows of a group.

    Attributes:
      batch: a record batch: what is wanted of them.
      rows: the numbers in the group of those that are in it; None: all from `start` on.
      start: the first, before any filter.
      stop: behind the last.
    """

    batch: Any
    rows: list[int] | None
    start: int
    stop: int


class Table(Protocol):
    """A file that has been opened: its groups are known. Its methods run in a thread, and none beside another.

    Attributes:
      schema: of what comes out.
      groups: what this part of the file has that is wanted, in order; none is empty.
    """

    @property
    def schema(self) -> Any: ...

    @property
    def groups(self) -> Sequence[Group]: ...

    def decode(self, group: Group, data: Sequence[bytes], start: int) -> Iterator[Decoded]:
        """Yield the rows of a group from row `start` on.

        Args:
          data: what the group's spans hold.

        Raises:
          Whatever pyarrow does with data that are damaged.
        """

    def close(self) -> None:
        """Close what is open. Nothing is decoded any more."""


@dataclass
class Where:
    """A group that is being read.

    Attributes:
      path: of the file.
      unit: what a group is called.
      group: the group.
      after: the place behind it.
      row: rows of it that are behind us.
      unchanged: sees whether the file changes; None: nobody has to.
    """

    path: str
    unit: str
    group: Group
    after: Place
    row: int
    unchanged: Unchanged | None

    def place(self, row: int) -> Place:
        """Return the place behind `row` rows of the group."""
        if self.group.rows is not None and row >= self.group.rows:
            return self.after
        return {"file": self.path, "group": self.group.index, "row": row}

    def error(self, error: Exception, row: int | None = None) -> DataError:
        """Return the error for data that can't be decoded."""
        at = "" if row is None else f" row {row:,}"
        found = DataError(f"{self.path} {self.unit} {self.group.index}{at}: {_said(error)}")
        found.__cause__ = error
        return found


def _said(error: Exception) -> str:
    return (
        f"can't be decoded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    )
