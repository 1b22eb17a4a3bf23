"""Is reading text as fast as a plain loop over the file? JSON lines, compressed or not, and CSV; local files."""

from __future__ import annotations

import atexit
import csv
import gzip
import json
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

TEXT = 'Lorem ipsum "dolor" sit amet,\n consectetur. ' * 22
"""About 1 kB: a document of a few paragraphs."""


@cache
def written(kind: str, records: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bench_read_jsonl_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"data.{kind}"
    rows = ({"id": number, "text": TEXT} for number in range(records))
    if kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
        return path
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, 6) if kind == "jsonl.gz" else data)
    return path


def expected(n: int) -> Tally:
    return Tally(n, n * (n - 1) // 2)


def consume(rows: Iterable[dict[str, Any]]) -> Tally:
    count = checksum = 0
    for row in rows:
        count += 1
        checksum += int(row["id"])
    return Tally(count, checksum)


async def streamline_async(kind: str, n: int) -> Tally:
    read = sl.read_csv if kind == "csv" else sl.read_jsonl
    count = checksum = 0
    async with read(written(kind, n)).open() as stream:
        async for row in stream:
            count += 1
            checksum += int(row["id"])
    return Tally(count, checksum)


def streamline_for(kind: str, n: int) -> Tally:
    read = sl.read_csv if kind == "csv" else sl.read_jsonl
    return consume(read(written(kind, n)))


def plain(kind: str, n: int) -> Tally:
    decode = msgspec.json.Decoder().decode
    path = written(kind, n)
    with gzip.open(path, "rb") if kind == "jsonl.gz" else path.open("rb") as file:
        return consume(map(decode, file))


def dict_reader(n: int) -> Tally:
    with written("csv", n).open(newline="", encoding="utf-8") as file:
        return consume(csv.DictReader(file))


def hf_datasets(n: int) -> Tally:
    datasets = peer("datasets")
    return consume(datasets.load_dataset("json", data_files=str(written("jsonl", n)), split="train", streaming=True))


def torchdata_nodes(n: int) -> Tally:
    nodes = peer("torchdata.nodes")
    decode = msgspec.json.Decoder().decode
    with written("jsonl", n).open("rb") as file:
        return consume(nodes.Loader(nodes.Mapper(nodes.IterableWrapper(file), decode)))


PLAIN, PLAIN_GZIP, DICT_READER = "plain loop, msgspec", "plain loop over gzip, msgspec", "csv.DictReader"
PEERS = ("datasets, streaming", "torchdata.nodes")
MANY, SOME = 60_000, 20_000
JSON_TARGETS = (at_least(0.9, PLAIN), *(at_least(1, name) for name in PEERS))


def prepared(kind: str, name: str, run: Any, items: int, targets: Any = (), peers: tuple[str, ...] = ()) -> Case:
    return Case(name, run, items, targets, peers, prepare=partial(written, kind))


SUITES = (
    Suite(
        question="Is reading text as fast as a plain loop over the file?",
        unit="items/s",
        floor=PLAIN,
        expected=expected,
        smoke_items=500,
        note="Records of 1 kB in local files. Whole runs, opening and closing included.",
        cases=(
            prepared("jsonl", PLAIN, partial(plain, "jsonl"), MANY),
            prepared("jsonl", "streamline, async for", partial(streamline_async, "jsonl"), MANY, JSON_TARGETS),
            prepared("jsonl", "streamline, plain for", partial(streamline_for, "jsonl"), MANY, JSON_TARGETS),
            prepared("jsonl", PEERS[0], hf_datasets, SOME, peers=("datasets",)),
            prepared("jsonl", PEERS[1], torchdata_nodes, MANY, peers=("torchdata", "torch")),
            prepared("jsonl.gz", PLAIN_GZIP, partial(plain, "jsonl.gz"), MANY),
            prepared(
                "jsonl.gz",
                "streamline, gzip",
                partial(streamline_for, "jsonl.gz"),
                MANY,
                (at_least(0.9, PLAIN_GZIP),),
            ),
            prepared("csv", DICT_READER, dict_reader, MANY),
            prepared("csv", "streamline, CSV", partial(streamline_for, "csv"), MANY, (at_least(0.8, DICT_READER),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
