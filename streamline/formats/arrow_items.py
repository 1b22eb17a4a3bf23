"""From a group of rows to items, each with the state behind it: decoded in a thread, handed out in the event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from streamline.core.counters import HoldTimer, Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand
from streamline.core.pace import SLICE_S
from streamline.core.state import At, State, States
from streamline.core.threads import in_thread
from streamline.errors import ReadError, StreamlineError
from streamline.formats.arrow_groups import Decoded, Table, Where
from streamline.formats.base import Place
from streamline.formats.steps import Steps

__all__ = ["Items"]


STEP_S = 0.004
"""Seconds that a call in a thread goes on: going there and back takes some 0.1 ms."""


CALL_BYTES = 16 * 1024 * 1024
"""Decoded in one call in a thread at the most, unless one batch is larger."""


class Kept:
    """The states behind rows that a filter let through; the last one is behind all that were looked at."""

    __slots__ = ("_last", "_name", "_place", "_rows")

    def __init__(self, name: str, place: Place, rows: Sequence[int], last: Place | None) -> None:
        self._name = name
        self._place = place
        self._rows = rows
        self._last = last

    def __getitem__(self, index: int, /) -> State:
        if self._last is not None and index == len(self._rows) - 1:
            return At(self._name, self._last)
        return At(self._name, {**self._place, "row": self._rows[index] + 1})

    def trimmed(self, first: int, count: int) -> States:
        last = self._last if first + count == len(self._rows) else None
        return Kept(self._name, self._place, self._rows[first : first + count], last)


@dataclass
class Items:
    """Makes lists of items of decoded rows.

    Args:
      batch_rows: rows in a record batch; None: items are rows.
      name: of the source.
      demand: says what is done about damage.
    """

    batch_rows: int | None
    name: str
    demand: Demand
    _slice: int = field(default=16)  # rows to be made dicts of at a time

    async def of_group(self, table: Table, data: Sequence[bytes], where: Where) -> AsyncGenerator[Chunk[Any], None]:
        """Yield the items of a group; of one that is damaged and to be left out, those before the damage."""
        if where.row == where.group.rows:
            return
        threads, meter = self.demand.site.tasks.threads, self.demand.meter
        decoding = iter(table.decode(where.group, data, where.row))
        step = _Step(decoding, where)
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

    def _left_out(self, failure: Exception, where: Where) -> Chunk[Any]:
        """Return the progress behind a group that can't be decoded any further, if it may be left out."""
        if isinstance(failure, ReadError):
            raise failure
        error = failure if isinstance(failure, StreamlineError) else where.error(failure)
        rows, size = (where.group.rows or 0) - where.row, self.batch_rows
        behind = At(self.name, where.after)
        item = {"file": where.path, "group": where.group.index, "row": where.row, "rows": rows}
        self.demand.judge(
            error, item, At(self.name, where.place(where.row)), max(1, rows if size is None else -(-rows // size))
        )
        return Chunk((), (), behind)

    def _chunks(self, decoded: Decoded, where: Where) -> Iterator[Chunk[Any]]:
        behind, count = where.place(decoded.stop), decoded.batch.num_rows
        if not count:
            yield Chunk((), (), At(self.name, behind))
        elif self.batch_rows is not None:
            yield Chunk([decoded.batch], (At(self.name, behind),))
        else:
            at = 0
            while at < count:
                with HoldTimer(self.demand.meter):
                    began = perf_counter()
                    taken = min(self._slice, count - at)
                    rows, failure = _rows(decoded.batch.slice(at, taken))
                    self._pace(perf_counter() - began)
                if rows:
                    yield Chunk(rows, self._states(decoded, where, at, len(rows), behind))
                at += len(rows)
                if failure is not None:
                    yield self._bad_row(failure, decoded, where, at)
                    at += 1

    def _bad_row(self, failure: Exception, decoded: Decoded, where: Where, at: int) -> Chunk[Any]:
        row = decoded.start + at if decoded.rows is None else decoded.rows[at]
        behind = At(self.name, where.place(row + 1))
        item = {"file": where.path, "group": where.group.index, "row": row}
        self.demand.judge(where.error(failure, row), item, behind)
        return Chunk((), (), behind)

    def _states(self, decoded: Decoded, where: Where, at: int, count: int, behind: Place) -> States:
        last = behind if at + count == decoded.batch.num_rows else None
        place = where.place(0)
        if decoded.rows is not None:
            return Kept(self.name, place, decoded.rows[at : at + count], last)
        return Steps(self.name, place, "row", decoded.start + at + 1, count, last)

    def _pace(self, spent: float) -> None:
        if spent > SLICE_S:
            self._slice = max(1, self._slice // 2)
        elif spent < SLICE_S / 3:
            self._slice = min(LIST_ITEMS, self._slice * 2)


def _rows(batch: Any) -> tuple[list[Any], Exception | None]:
    """Return the rows of a batch up to the first of which a value can't be had in Python, and why."""
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
class _Step:
    """Decodes some milliseconds' worth of rows, in a thread."""

    decoding: Iterator[Decoded]
    where: Where
    _behind: int = field(init=False)

    def __post_init__(self) -> None:
        self._behind = self.where.row

    def __call__(self) -> tuple[list[Decoded], Exception | None, bool]:
        """Return what was decoded, what it failed with, and whether that was all of the group."""
        found, failure, ended = self._decoded()
        try:
            if self.where.unchanged is not None:
                self.where.unchanged.check()
        except ReadError as error:  # nobody knows of which file these rows are
            return [], error, True
        return found, failure, ended

    def _decoded(self) -> tuple[list[Decoded], Exception | None, bool]:
        found: list[Decoded] = []
        size, stop = 0, perf_counter() + STEP_S
        try:
            while size < CALL_BYTES and perf_counter() < stop:
                if (decoded := next(self.decoding, None)) is None:
                    return found, self._end(), True
                found.append(decoded)
                self._behind = decoded.stop
                size += decoded.batch.nbytes
        except Exception as error:
            return found, error, True
        return found, None, False

    def _end(self) -> Exception | None:
        if self._behind == self.where.group.rows:
            return None
        return ValueError(f"expected {self.where.group.rows} rows, found {self._behind:,}")
