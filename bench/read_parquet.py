"""Do rows and record batches of a local Parquet file come as fast as out of pyarrow's own iterator?"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

GROUP_ROWS = 100_000
BATCH_ROWS = 8_192
ROWS = 1_000_000
"""Of 8 columns, some 80 MB: numbers, text, lists of 4 numbers."""

_FOLDER = tempfile.TemporaryDirectory(prefix="streamline-bench-")


@cache
def path(rows: int) -> str:
    """Return the file of so many rows; it is made where it is missing."""
    pa, pq = peer("pyarrow"), peer("pyarrow.parquet")
    dice = np.random.default_rng(0)
    columns: dict[str, Any] = {"id": np.arange(rows)}
    columns |= {f"x{number}": dice.random(rows) for number in range(3)}
    columns["label"] = dice.integers(0, 1000, rows).astype(np.int32)
    columns["text"] = [f"sample {number} of {rows}" for number in range(rows)]
    columns["kind"] = [f"kind {number % 7}" for number in range(rows)]
    columns["box"] = pa.FixedSizeListArray.from_arrays(dice.random(4 * rows).astype(np.float32), 4)
    found = str(Path(_FOLDER.name) / f"{rows}.parquet")
    pq.write_table(pa.table(columns), found, row_group_size=GROUP_ROWS)
    return found


def prepare(rows: int) -> None:
    path(rows)


def pyarrow_rows(rows: int) -> Tally:
    count = total = 0
    for batch in peer("pyarrow.parquet").ParquetFile(path(rows)).iter_batches():
        for row in batch.to_pylist():
            count += 1
            total += row["id"]
    return Tally(count, total)


def pyarrow_batches(rows: int) -> Tally:
    count = total = 0
    for batch in peer("pyarrow.parquet").ParquetFile(path(rows)).iter_batches(batch_size=BATCH_ROWS):
        count += batch.num_rows
        total += int(batch.column("id").to_numpy().sum())
    return Tally(count, total)


def _rows(stream: Any) -> Tally:
    count = total = 0
    for row in stream:
        count += 1
        total += row["id"]
    return Tally(count, total)


def _batches(stream: Any) -> Tally:
    count = total = 0
    for batch in stream:
        count += batch.num_rows
        total += int(batch.column("id").to_numpy().sum())
    return Tally(count, total)


def rows_inline(rows: int) -> Tally:
    with sl.read_parquet(path(rows)).open() as stream:
        return _rows(stream)


def batches_inline(rows: int) -> Tally:
    with sl.read_parquet(path(rows), batch_rows=BATCH_ROWS).open() as stream:
        return _batches(stream)


def _split(rows: int) -> tuple[int, int]:
    """Return the rows of the file that is read for so many, and how many times it is."""
    return (ROWS, rows // ROWS) if rows > ROWS else (rows, 1)


def prepare_passes(rows: int) -> None:
    path(_split(rows)[0])


def pyarrow_passes(rows: int) -> Tally:
    size, times = _split(rows)
    found = [pyarrow_batches(size) for _ in range(times)]
    return Tally(sum(one.count for one in found), sum(one.checksum for one in found))


def _passes(rows: int, backend: Any) -> Tally:
    size, times = _split(rows)
    pipe = sl.read_parquet(path(size), batch_rows=BATCH_ROWS).shard(2).repeat(times)
    with pipe.open(backend=backend) as stream:
        return _batches(stream)


def passes_threads(rows: int) -> Tally:
    return _passes(rows, sl.Threads(2))


def passes_processes(rows: int) -> Tally:
    return _passes(rows, sl.Processes(2))


def expected_of_passes(rows: int) -> Tally:
    size, times = _split(rows)
    one = expected(size)
    return Tally(one.count * times, one.checksum * times)


def expected(rows: int) -> Tally:
    return Tally(rows, rows * (rows - 1) // 2)


OWN_ROWS, OWN_BATCHES = "pyarrow, iter_batches() and to_pylist()", f"pyarrow, iter_batches({BATCH_ROWS:,})"

SUITES = (
    Suite(
        question="Parquet: do rows come as fast as pyarrow makes them?",
        unit="items/s",
        floor=OWN_ROWS,
        expected=expected,
        smoke_items=2 * BATCH_ROWS,
        note="Local, 8 columns, row groups of 100,000 rows. Whole runs, opening and closing included.",
        cases=(
            Case(OWN_ROWS, pyarrow_rows, ROWS // 4, prepare=prepare),
            Case("streamline, rows", rows_inline, ROWS // 4, (at_least(0.9, OWN_ROWS),), prepare=prepare),
        ),
    ),
    Suite(
        question="Parquet: do record batches come as fast as pyarrow decodes them?",
        unit="items/s",
        floor=OWN_BATCHES,
        expected=expected,
        smoke_items=2 * BATCH_ROWS,
        note="The same file, whole; items/s are rows.",
        cases=(
            Case(OWN_BATCHES, pyarrow_batches, ROWS, prepare=prepare),
            Case("streamline, record batches", batches_inline, ROWS, (at_least(0.9, OWN_BATCHES),), prepare=prepare),
        ),
    ),
    Suite(
        question="Parquet: what do record batches cost that come from workers?",
        unit="items/s",
        floor=OWN_BATCHES,
        expected=expected_of_passes,
        smoke_items=2 * BATCH_ROWS,
        note="The same file, 20 times, so that starting processes, which import pyarrow, is a small part of it.",
        cases=(
            Case(OWN_BATCHES, pyarrow_passes, 20 * ROWS, prepare=prepare_passes),
            Case("streamline, Threads(2)", passes_threads, 20 * ROWS, (), prepare=prepare_passes),
            Case("streamline, Processes(2)", passes_processes, 20 * ROWS, (), prepare=prepare_passes),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
