"""Formats whose files say how many rows they have, and give any of them: a place is a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Lists, StageContext
from streamline.core.meters import HoldTimer, Working
from streamline.core.state import At
from streamline.errors import DataError, PlanError, ResumeError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Format, IndexedStates, InThread, Place
from streamline.sharding.split import contiguous

BLOCK_BYTES = 4 * 2**20
"""Rows that are fetched or unpacked at once, unless one row is larger; each of them keeps its block in memory. Of a
map, nothing is read here, so lists of large rows are as long as others."""

BLOCK_ROWS = 1 << 16
"""Rows in a block at the most: tiny ones are yielded in lists of 256, and this many take some 10 ms."""


@dataclass(frozen=True, kw_only=True)
class RowTable(ABC):
    """A file that has been opened. It keeps nothing open that has to be closed.

    Attributes:
      rows: as the file says.
      missing: how many of them, the last ones, are not there: it was cut short.
    """

    rows: int
    missing: int = 0

    @abstractmethod
    def blocks(self, start: int, stop: int) -> AsyncGenerator[Sequence[Sequence[Any]], None]:
        """Yield the rows from `start` to `stop` in blocks, each as columns of one length, at least one.

        Raises:
          DataError: damaged; it says no place.
        """

    def following(self, row: int) -> int:
        """Return from which row on `blocks` can read again, after it has raised at `row`."""
        return self.rows

    @abstractmethod
    def items(self, block: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the items that a block's rows, or some of them, are. Raises as `blocks`, for one that is damaged."""

    def cut_short(self) -> str:
        """Return what is wrong where rows are missing."""
        there = self.rows - self.missing
        return f"the file is truncated: it says that it has {self.rows:,} rows, and {there:,} are there"


def row_spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the rows from `start` to `stop` in blocks that end at multiples of `step`; there may be trillions."""
    while start < stop:
        begin, start = start, min(stop, (start // step + 1) * step)
        yield begin, start


def dicts(names: Sequence[str], block: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the rows of columns as dicts."""
    return [dict(zip(names, row, strict=True)) for row in zip(*block, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RowFormat(Format[Any]):
    """Reads rows from any one on; shards have ranges of them. Place: {"file", "row"}, rows before it."""

    sequential: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]] = ("row",)

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return None

    @abstractmethod
    async def table(self, file: File, in_thread: InThread[Any]) -> RowTable:
        """Open a file. Raises as `RowTable.blocks`."""

    async def chunks(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[Any]:
        part, meter, row, place = file.part, context.meter, begin["row"], file.path
        rest, wrong = 1, None
        try:
            with Working(meter):
                table = await self.table(file, partial(context.site.tasks.threads.run, what=file.path))
        except DataError as error:
            wrong = error
        else:
            if row > table.rows:
                raise ResumeError(
                    f"the snapshot was taken after {row:,} rows of {file.path}, which has {table.rows:,}: it was "
                    "replaced, or the snapshot is damaged; use an earlier one, or begin anew"
                )
            share = contiguous(table.rows, part.num_shards, part.shard)
            row = max(row, share.start)
            while True:
                async with aclosing(table.blocks(row, min(share.stop, table.rows - table.missing))) as blocks:
                    while True:
                        try:
                            with Working(meter):
                                block = await anext(blocks, None)
                        except DataError as error:
                            block, wrong = None, error
                        if block is None:
                            break
                        for chunk in self._chunks(file.path, table, block, row, share.stop, after, name, context):
                            yield chunk
                        row += len(block[0])
                if wrong is None or (following := table.following(row)) >= share.stop:
                    break
                state = At(name, {"file": file.path, "row": following})
                context.skip_or_raise(_at_place(wrong, f"{place}, row {row:,}"), file.path, state, following - row)
                yield Chunk((), (), state)
                row, wrong = following, None
            rest, place = share.stop - row, f"{file.path}, row {row:,}"
            if rest > 0 and wrong is None:
                wrong = DataError(table.cut_short())
        if wrong is not None:
            context.skip_or_raise(_at_place(wrong, place), file.path, At(name, dict(after)), rest)
            yield Chunk((), (), At(name, dict(after)))

    def _chunks(
        self,
        path: str,
        table: RowTable,
        block: Sequence[Sequence[Any]],
        row: int,
        stop: int,
        after: Place,
        name: str,
        context: StageContext,
    ) -> Iterator[Chunk[Any]]:
        """Yield the items of a block, which begins at `row`; those that are damaged are left out, if they may be."""
        at = 0
        while at < len(block[0]):
            with HoldTimer(context.meter):
                items, failure = _items(table, [column[at : at + LIST_ITEMS] for column in block])
            begin, at = row + at, at + len(items)
            if items:
                rows = range(begin + 1, row + at + 1)
                last = after if row + at == stop else None
                yield Chunk(items, IndexedStates(name, {"file": path}, {"row": rows}, last))
            if failure is not None:
                at += 1
                state = At(name, dict(after) if row + at == stop else {"file": path, "row": row + at})
                context.skip_or_raise(_at_place(failure, f"{path}, row {row + at - 1:,}"), path, state)
                yield Chunk((), (), state)


def _items(table: RowTable, block: Sequence[Sequence[Any]]) -> tuple[list[Any], DataError | None]:
    """Return the items of a block up to the first that is damaged, and what is wrong with it."""
    try:
        return table.items(block), None
    except DataError:
        items: list[Any] = []
        for row in range(len(block[0])):
            try:
                items += table.items([column[row : row + 1] for column in block])
            except DataError as error:
                return items, error
        return items, None


def _at_place(error: DataError, place: str) -> DataError:
    wrong = DataError(f"{place}: {error}")
    wrong.__cause__ = error.__cause__
    return wrong
