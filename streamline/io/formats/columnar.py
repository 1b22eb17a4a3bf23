"""What Parquet and Arrow files have in common: groups of rows, fetched one after the other and decoded in a thread.

A place in such a file is {"file", "group", "row"}. `group` is a row group of a Parquet file, a record batch of an Arrow
file. `row` counts the rows of the group that were read, before any filter: so a resume decodes one group from its
start, and goes on at the row. pyarrow is an extra, and imported late.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from time import perf_counter
from typing import Any, ClassVar, Protocol

from streamline.core.counters import HoldTimer, Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.core.pace import SLICE_S
from streamline.core.state import At, States
from streamline.core.threads import in_thread
from streamline.errors import DataError, PlanError, ReadError, StreamlineError
from streamline.io.fetch.file import File
from streamline.io.formats.base import AHEAD_BYTES, Format, IndexedStates, Place
from streamline.io.formats.sparse_file import Span


@dataclass(frozen=True, kw_only=True)
class Columnar(Format[Any]):
    """Reads rows as dicts, or record batches.

    Attributes:
      columns: dotted names of those that are wanted; None: all.
      predicate: rows for which it isn't true are left out; None: none are.
      batch_rows: rows in a record batch at the most; None: items are rows.
    """

    sequential: ClassVar[bool] = False
    unit: ClassVar[str]
    """What a group is called in messages: "row group"."""

    columns: tuple[str, ...] | None = None
    predicate: Predicate | None = None
    batch_rows: int | None = None

    @property
    def ahead_bytes(self) -> int | None:
        return None if self.batch_rows is None else AHEAD_BYTES  # counting rows takes longer than making them

    def begin(self, path: str | None) -> Place:
        return {"file": path, "group": 0, "row": 0}

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return None

    def options(self) -> dict[str, Any]:
        return {
            "columns": None if self.columns is None else list(self.columns),
            "filter": None if self.predicate is None else self.predicate.text,
            "batch_rows": self.batch_rows,
        }

    async def read(
        self,
        file: File,
        table: GroupedTable,
        unchanged: Unchanged | None,
        begin: Place,
        after: Place,
        name: str,
        demand: Demand,
    ) -> Lists[Any]:
        """Yield the items of a file that has been opened, as `chunks`; `table` is closed then."""
        with closing(table):
            groups = table.groups
            if groups:  # a writer that had no rows may not have known their types
                with Working(demand.meter):
                    await in_thread(demand.site.tasks.threads, lambda: check_schema(file.path, table.schema, demand))
            spans = [span for group in groups for span in group.spans]
            async with aclosing(file.ranges(spans)) as ranges:
                for number, group in enumerate(groups):
                    with Working(demand.meter):
                        data = [await anext(ranges) for _ in group.spans]
                    start = begin["row"] if group.index == begin["group"] else 0
                    if group.rows is not None and start > group.rows:
                        raise ReadError(
                            f"{file.path} has {group.rows:,} rows in {self.unit} {group.index}, expected more than "
                            f"{start:,}: has it been replaced?"
                        )
                    following = groups[number + 1] if number + 1 < len(groups) else None
                    end = after if following is None else {"file": file.path, "group": following.index, "row": 0}
                    where = GroupPosition(file.path, self.unit, group, end, start, unchanged)
                    async with aclosing(self.items(table, data, where, name, demand)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            if not groups:
                yield Chunk((), (), At(name, after))

    def items(
        self, table: GroupedTable, data: Sequence[bytes], where: GroupPosition, name: str, demand: Demand
    ) -> AsyncGenerator[Chunk[Any], None]:
        """Yield the items of a group from its row `where.row` on, each with the state after it."""
        return RowItems(self.batch_rows, name, demand).of_group(table, data, where)


async def watched(file: File, demand: Demand) -> Unchanged | None:
    """Return what checks that a local file doesn't change; remote ones have an ETag."""
    if not file.local:
        return None
    size = file.part.found.size
    return await in_thread(demand.site.tasks.threads, lambda: Unchanged(file.path, size))


def check_schema(path: str, schema: Any, demand: Demand) -> None:
    """Check that a file has the columns of the first file that this flow has read."""
    from streamline.io.formats.columnar_selection import schema_difference  # imports pyarrow

    first_path, first = demand.kept.setdefault("schema", (path, schema))
    difference = schema_difference(first, schema)
    if difference is not None:
        raise DataError(
            f"{path} differs from {first_path}: {difference}; write files of one schema, read them apart, or give "
            "columns= that they have in common"
        )


STEP_BYTES = 1024 * 1024
"""Decoded at a time where rows are made of it: a millisecond or two."""


@dataclass
class RowGroup:
    """Some rows of a file that can be read without the others.

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
class DecodedRows:
    """Some rows of a group.

    Attributes:
      batch: a record batch: what is wanted of them.
      rows: the numbers in the group of those that are in it; None: all from `start` on.
      start: the first, before any filter.
      stop: after the last.
    """

    batch: Any
    rows: list[int] | None
    start: int
    stop: int


class GroupedTable(Protocol):
    """A file that has been opened: its groups are known. Its methods run in a thread, one at a time.

    Attributes:
      schema: of what comes out.
      groups: what this part of the file has that is wanted, in order; none is empty.
    """

    @property
    def schema(self) -> Any: ...

    @property
    def groups(self) -> Sequence[RowGroup]: ...

    def decode(self, group: RowGroup, data: Sequence[bytes], start: int) -> Iterator[DecodedRows]:
        """Yield the rows of a group from row `start` on.

        Args:
          data: what the group's spans hold.
        """

    def close(self) -> None:
        """Close what is open. Nothing is decoded any more."""


@dataclass
class GroupPosition:
    """A group that is being read.

    Attributes:
      path: of the file.
      unit: what a group is called.
      after: the place after it.
      row: rows of it that were read.
      unchanged: checks that the file doesn't change; None: not needed.
    """

    path: str
    unit: str
    group: RowGroup
    after: Place
    row: int
    unchanged: Unchanged | None

    def place(self, row: int) -> Place:
        """Return the place after `row` rows of the group."""
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
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return f"can't be decoded: {type(error).__name__}: {reason}"


STEP_S = 0.004
"""Seconds that a call in a thread goes on: going there and back takes some 0.1 ms."""

CALL_BYTES = 16 * 1024 * 1024
"""Decoded in one call in a thread at the most, unless one batch is larger."""


@dataclass
class RowItems:
    """Makes lists of items of decoded rows.

    Args:
      batch_rows: rows in a record batch; None: items are rows.
      demand: decides what is done about damage.
    """

    batch_rows: int | None
    name: str
    demand: Demand
    _slice: int = field(default=16)  # rows to be made dicts of at a time

    async def of_group(
        self, table: GroupedTable, data: Sequence[bytes], where: GroupPosition
    ) -> AsyncGenerator[Chunk[Any], None]:
        """Yield the items of a group; of one that is damaged and to be left out, those before the damage."""
        if where.row == where.group.rows:
            return
        threads, meter = self.demand.site.tasks.threads, self.demand.meter
        decoding = iter(table.decode(where.group, data, where.row))
        step = _DecodeStep(decoding, where)
        while True:
            with Working(meter):
                found, failure, ended = await in_thread(threads, step)
            for decoded in found:
                for chunk in self._chunks(decoded, where):
                    yield chunk
                where.row = decoded.stop
            if failure is not None:
                yield self._left_out(failure, where)
                return
            if ended:
                return

    def _left_out(self, failure: Exception, where: GroupPosition) -> Chunk[Any]:
        """Return the progress after a group that can't be decoded any further, if it may be left out."""
        if isinstance(failure, ReadError):
            raise failure
        error = failure if isinstance(failure, StreamlineError) else where.error(failure)
        rows, size = (where.group.rows or 0) - where.row, self.batch_rows
        item = {"file": where.path, "group": where.group.index, "row": where.row, "rows": rows}
        self.demand.judge(
            error, item, At(self.name, where.place(where.row)), max(1, rows if size is None else -(-rows // size))
        )
        return Chunk((), (), At(self.name, where.after))

    def _chunks(self, decoded: DecodedRows, where: GroupPosition) -> Iterator[Chunk[Any]]:
        end, count = where.place(decoded.stop), decoded.batch.num_rows
        if not count:
            yield Chunk((), (), At(self.name, end))
        elif self.batch_rows is not None:
            yield Chunk([decoded.batch], (At(self.name, end),))
        else:
            at = 0
            while at < count:
                with HoldTimer(self.demand.meter):
                    began = perf_counter()
                    taken = min(self._slice, count - at)
                    rows, failure = _rows(decoded.batch.slice(at, taken))
                    self._pace(perf_counter() - began)
                if rows:
                    yield Chunk(rows, self._states(decoded, where, at, len(rows), end))
                at += len(rows)
                if failure is not None:
                    yield self._bad_row(failure, decoded, where, at)
                    at += 1

    def _bad_row(self, failure: Exception, decoded: DecodedRows, where: GroupPosition, at: int) -> Chunk[Any]:
        row = decoded.start + at if decoded.rows is None else decoded.rows[at]
        after = At(self.name, where.place(row + 1))
        item = {"file": where.path, "group": where.group.index, "row": row}
        self.demand.judge(where.error(failure, row), item, after)
        return Chunk((), (), after)

    def _states(self, decoded: DecodedRows, where: GroupPosition, at: int, count: int, end: Place) -> States:
        last = end if at + count == decoded.batch.num_rows else None
        place = where.place(0)
        if decoded.rows is not None:
            return IndexedStates(self.name, place, {"row": [row + 1 for row in decoded.rows[at : at + count]]}, last)
        first = decoded.start + at + 1
        return IndexedStates(self.name, place, {"row": range(first, first + count)}, last)

    def _pace(self, spent: float) -> None:
        if spent > SLICE_S:
            self._slice = max(1, self._slice // 2)
        elif spent < SLICE_S / 3:
            self._slice = min(LIST_ITEMS, self._slice * 2)


def _rows(batch: Any) -> tuple[list[Any], Exception | None]:
    """Return the rows of a batch up to the first of which a value can't be made a Python object, and why."""
    try:
        return batch.to_pylist(), None
    except Exception:
        rows: list[Any] = []
        for index in range(batch.num_rows):
            try:
                rows += batch.slice(index, 1).to_pylist()
            except Exception as error:
                return rows, error
        return rows, None


@dataclass
class _DecodeStep:
    """Decodes some milliseconds' worth of rows, in a thread."""

    decoding: Iterator[DecodedRows]
    where: GroupPosition
    _row: int = field(init=False)

    def __post_init__(self) -> None:
        self._row = self.where.row

    def __call__(self) -> tuple[list[DecodedRows], Exception | None, bool]:
        """Return what was decoded, what it failed with, and whether that was all of the group."""
        found, failure, ended = self._decoded()
        try:
            if self.where.unchanged is not None:
                self.where.unchanged.check()
        except ReadError as error:  # these rows may be of another file
            return [], error, True
        return found, failure, ended

    def _decoded(self) -> tuple[list[DecodedRows], Exception | None, bool]:
        found: list[DecodedRows] = []
        size, stop = 0, perf_counter() + STEP_S
        try:
            while size < CALL_BYTES and perf_counter() < stop:
                if (decoded := next(self.decoding, None)) is None:
                    return found, self._end(), True
                found.append(decoded)
                self._row = decoded.stop
                size += decoded.batch.nbytes
        except Exception as error:
            return found, error, True
        return found, None, False

    def _end(self) -> Exception | None:
        if self._row == self.where.group.rows:
            return None
        return ValueError(f"expected {self.where.group.rows} rows, found {self._row:,}")


def require_pyarrow(function: str) -> None:
    """Check that pyarrow is installed, without importing it."""
    if find_spec("pyarrow") is None:
        raise PlanError(f"{function} needs pyarrow, which is not installed: pip install 'streamline[arrow]'")


@dataclass(frozen=True)
class Predicate:
    """A `pyarrow.compute.Expression` that can be compared and hashed: an expression's own == makes another expression.

    Attributes:
      text: for a person, and for the fingerprint.
      pickled: the expression.
    """

    text: str
    pickled: bytes = field(repr=False)

    @classmethod
    def of(cls, expression: Any) -> Predicate:
        return cls(str(expression), pickle.dumps(expression))

    @property
    def expression(self) -> Any:
        """The expression. Imports pyarrow."""
        return pickle.loads(self.pickled)


class Unchanged:
    """What a local file was like when it was opened: it is read in pieces, and has no ETag. Does (sync) I/O.

    Args:
      path: of the file.
      size: in bytes, as the listing says; None: it doesn't.
    """

    def __init__(self, path: str, size: int | None) -> None:
        self._path = path
        self._was = self._look()
        if size is not None and self._was[0] != size:
            raise ReadError(f"{path} has {self._was[0]:,} bytes, expected {size:,}: has it been replaced?")

    def check(self) -> None:
        """Check that the file is still the same."""
        if (now := self._look()) != self._was:
            what = (
                f"it had {self._was[0]:,} bytes, and has {now[0]:,}" if now[0] != self._was[0] else "with as many bytes"
            )
            raise ReadError(f"{self._path} changed while it was read: it was written to, or replaced ({what})")

    def _look(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - a Path costs more than the call
        except OSError as error:
            raise ReadError(f"can't read {self._path}: {error.strerror or error}") from error
        return status.st_size, status.st_mtime_ns, status.st_ino
