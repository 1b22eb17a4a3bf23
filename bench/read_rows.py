"""Do rows of HDF5, Lance, ArrayRecord and MDS files come as fast as out of a plain loop over their own libraries?"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

_FOLDER = tempfile.TemporaryDirectory(prefix="streamline-bench-")

SLICE_BYTES = 4 * 2**20
"""What a plain loop reads at a time: as much as streamline."""


def contents(size: int, rows: int) -> Iterator[bytes]:
    """Yield values of `size` bytes, each of which begins with its number."""
    rest = bytes(size - 8)
    for number in range(rows):
        yield struct.pack("<Q", number) + rest


def write_hdf5(path: str, size: int, rows: int) -> None:
    with peer("h5py").File(path, "w") as file:
        data = np.zeros((rows, size // 8), "<i8")
        data[:, 0] = np.arange(rows)
        file.create_dataset("data", data=data, chunks=(max(1, 2**20 // size), size // 8))


def write_lance(path: str, size: int, rows: int) -> None:
    pa = peer("pyarrow")
    table = pa.table({"id": range(rows), "data": pa.array(contents(size, rows), pa.binary())})
    peer("lance").write_dataset(table, path)


def write_array_record(path: str, size: int, rows: int) -> None:
    writer = peer("array_record.python.array_record_module").ArrayRecordWriter(path, f"group_size:{_group(size)}")
    for record in contents(size, rows):
        writer.write(record)
    writer.close()


def _group(size: int) -> int:
    return max(1, 2**16 // size)


MDS_COLUMNS = {"column_names": ["data"], "column_encodings": ["bytes"], "column_sizes": [None]}


def write_mds(path: str, size: int, rows: int) -> None:
    text = json.dumps(MDS_COLUMNS).encode()
    starts = list(accumulate([4 + size] * rows, initial=4 * (rows + 2) + len(text)))
    with Path(path).open("wb") as file:
        file.write(struct.pack(f"<{rows + 2}I", rows, *starts) + text)
        for sample in contents(size, rows):
            file.write(struct.pack("<I", size) + sample)


WRITERS: dict[str, Callable[[str, int, int], None]] = {
    "hdf5": write_hdf5,
    "lance": write_lance,
    "array_record": write_array_record,
    "mds": write_mds,
}


@cache
def path(kind: str, size: int, rows: int) -> str:
    """Return the file of so many rows; it is made where it is missing."""
    found = str(Path(_FOLDER.name) / f"{size}-{rows}.{kind}")
    WRITERS[kind](found, size, rows)
    return found


def prepare(kind: str, size: int, rows: int) -> None:
    path(kind, size, rows)


def hdf5_rows(file: str, size: int) -> Iterator[dict[str, Any]]:
    with peer("h5py").File(file, "r") as h5:
        found, step = h5["data"], max(1, SLICE_BYTES // size)
        for start in range(0, len(found), step):
            for row in found[start : start + step]:
                yield {"data": row}


def lance_rows(file: str, size: int) -> Iterator[dict[str, Any]]:
    for batch in peer("lance").dataset(file).to_batches(batch_size=min(8192, max(1, SLICE_BYTES // size))):
        yield from batch.to_pylist()


def array_record_rows(file: str, size: int) -> Iterator[bytes]:
    reader = peer("array_record.python.array_record_module").ArrayRecordReader(file)
    step = max(1, SLICE_BYTES // size // _group(size)) * _group(size)
    for start in range(0, reader.num_records(), step):
        yield from reader.read(start, min(start + step, reader.num_records()))
    reader.close()


def mds_rows(file: str, size: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard of `MDS_COLUMNS`, by hand."""
    with Path(file).open("rb") as shard:
        (rows,) = struct.unpack("<I", shard.read(4))
        starts = np.frombuffer(shard.read(4 * (rows + 1)), "<u4").tolist()
        shard.seek(starts[0])
        for start, stop in pairwise(starts):
            sample = shard.read(stop - start)
            (length,) = struct.unpack_from("<I", sample)
            yield {"data": sample[4 : 4 + length]}


LOOPS: dict[str, Callable[[str, int], Iterable[Any]]] = {
    "hdf5": hdf5_rows,
    "lance": lance_rows,
    "array_record": array_record_rows,
    "mds": mds_rows,
}

READERS: dict[str, Callable[[str], sl.Pipeline[Any]]] = {
    "hdf5": sl.read_hdf5,
    "lance": sl.read_lance,
    "array_record": sl.read_array_record,
    "mds": sl.read_mds,
}

NUMBERS: dict[str, Callable[[Any], int]] = {
    "hdf5": lambda row: int(row["data"][0]),
    "lance": lambda row: int.from_bytes(row["data"][:8], "little"),
    "array_record": lambda row: int.from_bytes(row[:8], "little"),
    "mds": lambda row: int.from_bytes(row["data"][:8], "little"),
}


def _tally(kind: str, rows: Iterable[Any]) -> Tally:
    count = total = 0
    number = NUMBERS[kind]
    for row in rows:
        count += 1
        total += number(row)
    return Tally(count, total)


def plain(kind: str, size: int, rows: int) -> Tally:
    return _tally(kind, LOOPS[kind](path(kind, size, rows), size))


def ours(kind: str, size: int, rows: int) -> Tally:
    with READERS[kind](path(kind, size, rows)).open() as stream:
        return _tally(kind, stream)


def expected(rows: int) -> Tally:
    return Tally(rows, rows * (rows - 1) // 2)


LIBRARIES = {
    "hdf5": ("HDF5", "h5py, by slices of 4 MiB", ("h5py",)),
    "lance": ("Lance", "pylance, by batches", ("lance", "pyarrow")),
    "array_record": ("ArrayRecord", "array_record, by ranges of 4 MiB", ("array_record",)),
    "mds": ("MDS", "a loop over the shard, by hand", ()),
}

NOTE = (
    "Whole runs, opening and closing included; the file is in the page cache. A plain loop has no place to resume at, "
    "and frees each row before the next. MDS, by hand, knows its only column, so it is a floor without a target."
)

SUITES = tuple(
    Suite(
        question=f"{title}: do rows of {what} come as fast as out of a plain loop?",
        unit="items/s",
        floor=loop,
        expected=expected,
        smoke_items=200,
        note=NOTE,
        cases=(
            Case(loop, partial(plain, kind, size), rows, peers=peers, prepare=partial(prepare, kind, size)),
            Case(
                "streamline",
                partial(ours, kind, size),
                rows,
                (at_least(ratio, loop),) if peers else (),
                peers=peers,
                prepare=partial(prepare, kind, size),
            ),
        ),
    )
    for kind, (title, loop, peers) in LIBRARIES.items()
    for what, size, rows, ratio in (("128 bytes", 128, 300_000, 0.5), ("100 kB", 100_000, 5_000, 0.8))
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
