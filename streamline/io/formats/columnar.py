"""What Parquet and Arrow files have in common: groups of rows, fetched one after the other and decoded in a thread.

A place in such a file is {"file", "group", "row"}. `group` is a row group of a Parquet file, a record batch of an Arrow
file. `row` counts the rows of the group that were read, before any filter: so a resume decodes one group from its
start, and goes on at the row. pyarrow is an extra, and imported late.
"""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Lists, StageContext
from streamline.core.meters import HoldTimer, Working
from streamline.core.pace import SLICE_S
from streamline.core.state import At
from streamline.errors import DataError, PlanError, ReadError, StreamlineError
from streamline.io.fetch.file import File
from streamline.io.formats.base import AHEAD_BYTES, Format, IndexedStates, InThread, Place
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
    counts: ClassVar[tuple[str, ...]] = ("group", "row")
    same_columns: ClassVar[bool] = True
    may_change: ClassVar[bool] = True
    """Whether a local file must be watched while it is read."""

    unit: ClassVar[str]
    """What a group is called in messages: "row group"."""

    columns: tuple[str, ...] | None = None
    predicate: Predicate | None = None
    batch_rows: int | None = None

    @property
    def expression(self) -> Any:
        """The predicate as pyarrow's; None: all rows are wanted."""
        return None if self.predicate is None else self.predicate.expression

    @property
    def ahead_bytes(self) -> int | None:
        return None if self.batch_rows is None else AHEAD_BYTES  # counting rows takes longer than making them

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return None

    def options(self) -> dict[str, Any]:
        return {
            "columns": None if self.columns is None else list(self.columns),
            "filter": None if self.predicate is None else self.predicate.text,
            "batch_rows": self.batch_rows,
        }

    @abstractmethod
    async def table(self, file: File, first: int, in_thread: InThread[Any]) -> GroupedTable | None:
        """Open a file, of which the groups from number `first` on are wanted; None: it is read as a stream."""

    def stream(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[Any]:
        """Yield the items of a file that can only be read from its start. As `chunks`."""
        raise NotImplementedError

    async def chunks(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[Any]:
        with Working(context.meter):
            in_thread = partial(context.site.tasks.threads.run, what=file.path)
            unchanged = None
            if file.local and self.may_change:  # remote ones have an ETag
                unchanged = await in_thread(lambda: Unchanged(file.path, file.part.found.size))
            table = await self.table(file, begin["group"], in_thread)
        if table is None:
            read = self.stream(file, begin, after, name, context)
        else:
            read = self._read(file, table, unchanged, begin, after, name, context)
        async with aclosing(read) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _read(
        self,
        file: File,
        table: GroupedTable,
        unchanged: Unchanged | None,
        begin: Place,
        after: Place,
        name: str,
        context: StageContext,
    ) -> Lists[Any]:
        with closing(table):
            groups = table.groups
            if groups:  # a writer that had no rows may not have known their types
                with Working(context.meter):
                    run = context.site.tasks.threads.run
                    await run(lambda: check_schema(file.path, table.selection.schema, context), file.path)
            spans = [span for group in groups for span in group.spans]
            async with aclosing(file.ranges(spans)) as ranges:
                for number, group in enumerate(groups):
                    with Working(context.meter):
                        data = [await anext(ranges) for _ in group.spans]
                    start = begin["row"] if group.index == begin["group"] else 0
                    if group.rows is not None and start > group.rows:
                        raise ReadError(
                            f"{file.path} has {group.rows:,} rows in {self.unit} {group.index}, expected more than "
                            f"{start:,}: has it been replaced?"
                        )
                    following = groups[number + 1] if number + 1 < len(groups) else None
                    end = after if following is None else {"file": file.path, "group": following.index, "row": 0}
                    reader = GroupReader(self, file.path, group, end, start, unchanged, name, context)
                    async with aclosing(reader.chunks(table, data)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            if not groups:
                yield Chunk((), (), At(name, after))


def check_schema(path: str, schema: Any, context: StageContext) -> None:
    """Check that a file has the columns of the first file that this flow has read."""
    from streamline.io.formats.columnar_selection import schema_difference  # imports pyarrow

    first_path, first = context.between_files.setdefault("schema", (path, schema))
    difference = schema_difference(first, schema)
    if difference is not None:
        raise DataError(
            f"{path} differs from {first_path}: {difference}; write files of one schema, read them apart, or give "
            "columns= that they have in common"
        )


FOOTER_BYTES = 64 * 1024
"""Read from a file's end at first: the footer of most files is in it. Arrow's own guess."""


async def footer_of(file: File, size: int, end: bytes, magic: bytes) -> tuple[bytes, int]:
    """Return the end of a file, from its footer's start on or before, and how many bytes it is with its length.

    Args:
      end: of the file, as far as it has been read: the footer, its length in 4 bytes, little-endian, and `magic`.
    """
    length = int.from_bytes(end[-4 - len(magic) : -len(magic)], "little") + 4 + len(magic)
    if length > size - len(magic):
        raise DataError(f"{file.path} is damaged: expected a footer of {length:,} bytes in a file of {size:,}")
    if length > len(end):
        end = await file.read(size - length, size - len(end)) + end
    return end, length


STEP_BYTES = 1024 * 1024
"""Decoded at a time where rows are made of it: a millisecond or two."""


@dataclass
class RowGroup:
    """Some rows of a file that can be read without the others.

    Attributes:
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
      after: for each row in it, how many of the group's have been read then, before any filter.
      stop: how many have been read after all of them.
    """

    batch: Any
    after: Sequence[int]
    stop: int


class GroupedTable(ABC):
    """A file that has been opened: its groups are known. Its methods run in a thread, one at a time.

    Attributes:
      selection: what is wanted of it, a `Selection`.
      groups: what this part of the file has that is wanted, in order; none is empty.
    """

    selection: Any
    groups: Sequence[RowGroup]

    @abstractmethod
    def decode(self, group: RowGroup, data: Sequence[bytes], start: int) -> Iterator[DecodedRows]:
        """Yield the rows of a group from row `start` on; `data`: what its spans hold."""

    def close(self) -> None:  # noqa: B027 - not all hold something open
        """Close what is open. Nothing is decoded any more."""


STEP_S = 0.004
"""Seconds that a call in a thread goes on: going there and back takes some 0.1 ms."""

CALL_BYTES = 16 * 1024 * 1024
"""Decoded in one call in a thread at the most, unless one batch is larger."""


@dataclass
class GroupReader:
    """Reads a group: makes lists of items of its rows.

    Attributes:
      after: the place after the group.
      row: rows of it that were read.
      unchanged: checks that the file doesn't change; None: not needed.
    """

    format: Columnar
    path: str
    group: RowGroup
    after: Place
    row: int
    unchanged: Unchanged | None
    name: str
    context: StageContext
    _slice: int = field(default=16)  # rows to be made dicts of at a time

    async def chunks(self, table: GroupedTable, data: Sequence[bytes]) -> AsyncGenerator[Chunk[Any], None]:
        """Yield the items from row `row` on, with their states; of a damaged group, those before the damage."""
        if self.row == self.group.rows:
            return
        threads = self.context.site.tasks.threads
        decoding = iter(table.decode(self.group, data, self.row))
        while True:
            with Working(self.context.meter):
                found, failure, ended = await threads.run(lambda: self._decode(decoding), self.path)
            for decoded in found:
                for chunk in self._items(decoded):
                    yield chunk
                self.row = decoded.stop
            if failure is not None:
                yield self._leave_out(failure)
                return
            if ended:
                return

    def _decode(self, decoding: Iterator[DecodedRows]) -> tuple[list[DecodedRows], Exception | None, bool]:
        """Decode some ms' worth of rows, in a thread; return them, what it failed with, and whether that was all."""
        found: list[DecodedRows] = []
        failure: Exception | None = None
        row, size, stop, ended = self.row, 0, perf_counter() + STEP_S, False
        try:
            while not ended and size < CALL_BYTES and (not found or perf_counter() < stop):
                if (decoded := next(decoding, None)) is not None:
                    found.append(decoded)
                    row = decoded.stop
                    size += decoded.batch.nbytes
                elif row != self.group.rows:
                    raise ValueError(f"expected {self.group.rows} rows, found {row:,}")
                else:
                    ended = True
        except Exception as error:
            failure = error
        try:
            if self.unchanged is not None:
                self.unchanged.check()
        except ReadError as error:  # these rows may be of another file
            return [], error, True
        return found, failure, ended

    def _leave_out(self, failure: Exception) -> Chunk[Any]:
        """Return the progress after a group that can't be decoded any further, if it may be left out."""
        if isinstance(failure, ReadError):
            raise failure
        error = failure if isinstance(failure, StreamlineError) else self._error(failure)
        rows, size = (self.group.rows or 0) - self.row, self.format.batch_rows
        item = {"file": self.path, "group": self.group.index, "row": self.row, "rows": rows}
        count = max(1, rows if size is None else -(-rows // size))
        self.context.skip_or_raise(error, item, At(self.name, self._place(self.row)), count)
        return Chunk((), (), At(self.name, self.after))

    def _items(self, decoded: DecodedRows) -> Iterator[Chunk[Any]]:
        end, count = self._place(decoded.stop), decoded.batch.num_rows
        if not count:
            yield Chunk((), (), At(self.name, end))
        elif self.format.batch_rows is not None:
            yield Chunk([decoded.batch], (At(self.name, end),))
        else:
            at = 0
            while at < count:
                with HoldTimer(self.context.meter):
                    began = perf_counter()
                    taken = min(self._slice, count - at)
                    rows, failure = _rows(decoded.batch.slice(at, taken))
                    self._pace(perf_counter() - began)
                if rows:
                    stop = at + len(rows)
                    columns, last = {"row": decoded.after[at:stop]}, end if stop == count else None
                    yield Chunk(rows, IndexedStates(self.name, self._place(0), columns, last))
                    at = stop
                if failure is not None:
                    yield self._bad_row(failure, decoded.after[at])
                    at += 1

    def _bad_row(self, failure: Exception, after: int) -> Chunk[Any]:
        state, row = At(self.name, self._place(after)), after - 1
        item = {"file": self.path, "group": self.group.index, "row": row}
        self.context.skip_or_raise(self._error(failure, f" row {row:,}"), item, state)
        return Chunk((), (), state)

    def _place(self, row: int) -> Place:
        if self.group.rows is not None and row >= self.group.rows:
            return self.after
        return {"file": self.path, "group": self.group.index, "row": row}

    def _error(self, error: Exception, at: str = "") -> DataError:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        what = f"{self.path} {self.format.unit} {self.group.index}{at}"
        found = DataError(f"{what}: can't be decoded: {type(error).__name__}: {reason}")
        found.__cause__ = error
        return found

    def _pace(self, spent: float) -> None:
        if spent > SLICE_S:
            self._slice = max(1, self._slice // 2)
        elif spent < SLICE_S / 3:
            self._slice = min(LIST_ITEMS, self._slice * 2)


def _rows(batch: Any) -> tuple[list[Any], Exception | None]:
    """Return the rows of a batch up to the first of which a value can't be made a Python object, and why."""
    from streamline.io.formats.columnar_selection import python_rows  # imports pyarrow

    try:
        return python_rows(batch), None
    except Exception:
        rows: list[Any] = []
        for index in range(batch.num_rows):
            try:
                rows += python_rows(batch.slice(index, 1))
            except Exception as error:
                return rows, error
        return rows, None


@dataclass(frozen=True)
class Predicate:
    """A `pyarrow.compute.Expression` that can be compared and hashed: an expression's own == makes another expression.

    Attributes:
      text: for a person, and for the fingerprint.
    """

    text: str
    pickled: bytes = field(repr=False)

    @classmethod
    def of(cls, expression: Any) -> Predicate:
        return cls(str(expression), pickle.dumps(expression))

    @property
    def expression(self) -> Any:
        return pickle.loads(self.pickled)


class Unchanged:
    """What a local file was like when it was opened: it is read in pieces, and has no ETag. Does (sync) I/O.

    Args:
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
