"""npy and npz files: rows along the first axis, from any row on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamline.core.counters import HoldTimer, Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.core.state import At
from streamline.errors import DataError, PlanError, ResumeError
from streamline.fetching.file import File
from streamline.formats.base import Format, Place
from streamline.formats.npy_columns import Column, InThread, column_of, first_bytes
from streamline.formats.npy_zip import MAGICS, members
from streamline.formats.steps import Steps
from streamline.sharding.split import contiguous

__all__ = ["NpyFormat"]


BLOCK_BYTES = 4 * 2**20
"""Rows that are fetched or unpacked at once, unless one row is larger; each of them keeps its block in memory. Of a
map, nothing is read here, so lists of large rows are as long as others."""


BLOCK_ROWS = 1 << 16
"""Rows in a block at the most: tiny ones are handed on in lists of 256, and this many take some 10 ms."""


@dataclass(frozen=True)
class Table:
    """Columns of one length.

    Attributes:
      columns: in the order of the archive.
      archive: items are dicts; else the only column's rows.
    """

    columns: tuple[Column, ...]
    archive: bool

    @property
    def rows(self) -> int:
        """As the headers say."""
        return self.columns[0].layout.rows if self.columns else 0

    @property
    def good(self) -> int:
        """Rows that are there in every column."""
        return min((column.good for column in self.columns), default=0)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the rows from `start` to `stop` in blocks, the same for all columns."""
        row_bytes = sum(column.read_bytes for column in self.columns)
        step = max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, row_bytes)))
        for at in range(start, stop, step):
            yield at, min(stop, at + step)

    async def blocks(self, start: int, stop: int) -> AsyncGenerator[list[np.ndarray[Any, Any]], None]:
        """Yield blocks of rows from `start` to `stop`, a list of one array for each column."""
        async with AsyncExitStack() as opened:
            columns = []
            for column in self.columns:
                spans = self.spans(start, stop)
                columns.append(await opened.enter_async_context(aclosing(column.blocks(spans))))
            for _ in self.spans(start, stop):
                yield [await anext(column) for column in columns]

    def items(self, block: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
        """Return the rows of a part of a block as items."""
        if not self.archive:
            return list(block[0])
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in zip(*block, strict=True)]


@dataclass(frozen=True, kw_only=True)
class NpyFormat(Format[Any]):
    """npy files, whose items are rows, and npz files, whose items are dicts of rows. Place: `row`, rows before it.

    Attributes:
      arrays: those of an npz file that are read; None: all.
    """

    kind: ClassVar[str] = "read_npy"
    reread: ClassVar[str] = "computes its row's byte (deflated: unpacks up to it)"
    sequential: ClassVar[bool] = False

    arrays: tuple[str, ...] | None = None

    def begin(self, path: str | None) -> Place:
        return {"file": path, "row": 0}

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return None

    def options(self) -> dict[str, Any]:
        return {} if self.arrays is None else {"arrays": list(self.arrays)}

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[Any]:
        part, meter = file.part, demand.meter
        row, stop = begin["row"], None
        try:
            with Working(meter):
                table = await self._table(file, demand.site.tasks.threads.run)
            if row > table.rows:
                raise ResumeError(
                    f"the snapshot stands behind {row:,} rows of {file.path}, which has {table.rows:,}: it was "
                    "replaced, or the snapshot is damaged; use an earlier one, or begin anew"
                )
            share = contiguous(table.rows, part.num_shards, part.shard)
            row, stop = max(row, share.start), share.stop
            async with aclosing(table.blocks(row, min(stop, table.good))) as blocks:
                while True:
                    with Working(meter):
                        block = await anext(blocks, None)
                    if block is None:
                        break
                    for at in range(0, len(block[0]), LIST_ITEMS):
                        with HoldTimer(meter):
                            items = table.items([column[at : at + LIST_ITEMS] for column in block])
                        last = after if row + len(items) == stop else None
                        yield Chunk(items, Steps(name, begin, "row", row + 1, len(items), last))
                        row += len(items)
            if row < stop:
                raise DataError(_cut_short(table))
        except DataError as error:
            known = "" if stop is None else f", row {row:,}"
            wrong = DataError(f"{file.path}{known}: {error}")
            wrong.__cause__ = error.__cause__
            demand.judge(wrong, file.path, At(name, dict(after)), 1 if stop is None else stop - row)
            yield Chunk((), (), At(name, dict(after)))

    async def _table(self, file: File, in_thread: InThread) -> Table:
        head = await first_bytes(file)
        if not head.startswith(MAGICS):
            return Table((await column_of(file, None, head, in_thread),), archive=False)
        found = {member.name: member for member in await members(file)}
        names = found if self.arrays is None else self.arrays
        missing = [name for name in names if name not in found]
        if missing or not found:
            raise DataError(f"expected arrays {list(names)}, the archive has {list(found)}")
        columns = []
        for name in names:
            try:
                columns.append(await column_of(file, found[name], b"", in_thread))
            except DataError as error:
                said = str(error)
                raise DataError(said if said.startswith("array ") else f"array {name!r}: {said}") from error.__cause__
        lengths = {column.name: column.layout.rows for column in columns}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"expected arrays with as many rows, got {lengths}: name those that belong together, arrays=[...]"
            )
        return Table(tuple(columns), archive=True)


def _cut_short(table: Table) -> str:
    short: Column = min(table.columns, key=lambda column: column.good)
    which = f"array {short.name!r}" if short.name else "the file"
    return f"{which} is truncated: its header says {short.layout.rows:,} rows, and {short.good:,} are there"
