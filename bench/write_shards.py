"""Is writing prepared data as fast as a plain loop that writes the same? JSON lines and Parquet, to local disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least

TEXT = 'Lorem ipsum "dolor" sit amet,\n consectetur. ' * 22
"""About 1 kB: a document of a few paragraphs."""

SHARD_BYTES = 16 * 2**20
ROWS_AT_ONCE = 1000


@cache
def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": TEXT} for number in range(count)]


def expected(n: int) -> Tally:
    return Tally(n, n * (n - 1) // 2)


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="bench_write_shards_"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def counted(path: Path) -> Tally:
    """Say what was written: the file names are not looked at, all lines and rows are."""
    found = Tally(0, 0)
    for file in sorted(path.glob("*.jsonl")):
        numbers = [msgspec.json.decode(line)["id"] for line in file.read_bytes().splitlines()]
        found = Tally(found.count + len(numbers), found.checksum + sum(numbers))
    for file in sorted(path.glob("*.parquet")):
        import pyarrow.parquet as pq

        numbers = pq.read_table(file, columns=["id"])["id"].to_pylist()
        found = Tally(found.count + len(numbers), found.checksum + sum(numbers))
    return found


def plain_jsonl(path: Path, n: int) -> None:
    encode = msgspec.json.Encoder().encode
    source, at = rows(n), 0
    while at < n:
        with (path / f"{at}.jsonl").open("wb", buffering=2**20) as file:
            size = 0
            for row in islice(source, at, None):
                size += file.write(encode(row)) + file.write(b"\n")
                at += 1
                if size >= SHARD_BYTES:
                    break
            file.flush()
            os.fsync(file.fileno())


def plain_parquet(path: Path, n: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, batches, size = iter(rows(n)), [], 0
    writer: Any = None
    while some := list(islice(source, ROWS_AT_ONCE)):
        batches.append(pa.RecordBatch.from_pylist(some))
        size += batches[-1].nbytes
        writer = writer or pq.ParquetWriter(path / "0.parquet", batches[0].schema)
        if size >= SHARD_BYTES:
            writer.write_table(pa.Table.from_batches(batches))
            batches, size = [], 0
    if batches:
        writer.write_table(pa.Table.from_batches(batches))
    writer.close()


def streamline_jsonl(path: Path, n: int) -> None:
    sl.write_jsonl(sl.from_items(rows(n)), path, shard_bytes=SHARD_BYTES)


def streamline_parquet(path: Path, n: int) -> None:
    sl.write_parquet(sl.from_items(rows(n)), path, shard_bytes=SHARD_BYTES)


def written(write: Callable[[Path, int], None], n: int) -> Tally:
    """Time the writing, not the look at it."""
    with folder() as path:
        begun = perf_counter()
        write(path, n)
        seconds = perf_counter() - begun
        found = counted(path)
    return Tally(found.count, found.checksum, seconds)


PLAIN, PLAIN_PARQUET = "plain loop, msgspec", "plain loop, pyarrow"
MANY = 60_000


def case(name: str, write: Callable[[Path, int], None], targets: Any = (), peers: tuple[str, ...] = ()) -> Case:
    return Case(name, partial(written, write), MANY, targets, peers, prepare=rows)


SUITES = (
    Suite(
        question="Is writing prepared data as fast as a plain loop that writes the same?",
        unit="items/s",
        floor=PLAIN,
        expected=expected,
        smoke_items=500,
        note="Records of 1 kB from memory to local disk, in shards of 16 MiB, each made durable. pyarrow's plain loop "
        "has nothing in it for a row: each call takes a thousand.",
        cases=(
            case(PLAIN, plain_jsonl),
            case("streamline, JSON lines", streamline_jsonl, (at_least(0.5, PLAIN),)),
            case(PLAIN_PARQUET, plain_parquet, peers=("pyarrow",)),
            case("streamline, Parquet", streamline_parquet, (at_least(0.3, PLAIN_PARQUET),), ("pyarrow",)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
