"""Formats whose files say how many rows they have, and give any of them: a place is a row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from streamline.core.counters import HoldTimer, Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.core.state import At
from streamline.errors import DataError, PlanError, ResumeError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Format, IndexedStates, Place
from streamline.sharding.split import contiguous

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


BLOCK_BYTES = 4 * 2**20
"""Rows that are fetched or unpacked at once, unless one row is larger; each of them keeps its block in memory. Of a
map, nothing is read here, so lists of large rows are as long as others."""

BLOCK_ROWS = 1 << 16
"""Rows in a block at the most: tiny ones are yielded in lists of 256, and this many take some 10 ms."""


class RowTable(Protocol):
    """A file that has been opened. It keeps nothing open that has to be closed."""

    @property
    def rows(self) -> int:
        """As the file says."""

    @property
    def good(self) -> int:
        """Rows that are there: fewer where the file was cut short."""

    def blocks(self, start: int, stop: int) -> AsyncGenerator[Sequence[Sequence[Any]], None]:
        """Yield the rows from `start` to `stop` in blocks, each as columns of one length, at least one.

        Raises:
          DataError: damaged; it says no place.
        """

    def items(self, block: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the items that a block's rows, or some of them, are."""

    def cut_short(self) -> str:
        """Return what is missing, where `good` is less than `rows`."""


@dataclass(frozen=True, kw_only=True)
class RowFormat(Format[Any]):
    """Reads rows from any one on; shards have ranges of them. Place: {"file", "row"}, rows before it."""

    sequential: ClassVar[bool] = False

    def begin(self, path: str | None) -> Place:
        return {"file": path, "row": 0}

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return None

    @abstractmethod
    async def table(self, file: File, in_thread: InThread) -> RowTable:
        """Open a file. Raises as `RowTable.blocks`."""

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[Any]:
        part, meter = file.part, demand.meter
        row, stop = begin["row"], None
        try:
            with Working(meter):
                table = await self.table(file, demand.site.tasks.threads.run)
            if row > table.rows:
                raise ResumeError(
                    f"the snapshot was taken after {row:,} rows of {file.path}, which has {table.rows:,}: it was "
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
                        rows = range(row + 1, row + 1 + len(items))
                        yield Chunk(items, IndexedStates(name, begin, {"row": rows}, last))
                        row += len(items)
            if row < stop:
                raise DataError(table.cut_short())
        except DataError as error:
            known = "" if stop is None else f", row {row:,}"
            wrong = DataError(f"{file.path}{known}: {error}")
            wrong.__cause__ = error.__cause__
            demand.judge(wrong, file.path, At(name, dict(after)), 1 if stop is None else stop - row)
            yield Chunk((), (), At(name, dict(after)))
