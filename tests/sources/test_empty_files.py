"""Files without records: among others, at either end of a shard, and nothing else at all, in every format."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

import streamline as sl
from streamline.io.formats.mds import MdsFormat
from streamline.readers import pipeline_of
from tests.io.formats.records import array_record_file, lance_dataset, mds_file, put, record_file
from tests.laws.profile import in_turn

Dump = Callable[[Sequence[int]], bytes]


def lines(values: Sequence[int]) -> bytes:
    return b"".join(b"%d\n" % value for value in values)


def as_csv(values: Sequence[int]) -> bytes:
    return b"id\n" + lines(values)


def blank(values: Sequence[int]) -> bytes:
    """JSON lines among blank ones, at the beginning and the end, too."""
    return b"\n \n" + b"\n\n".join(b"%d" % value for value in values) + b"\n\n"


def table(values: Sequence[int], kind: str) -> bytes:
    data, file = pa.table({"id": pa.array(values, pa.int64())}), io.BytesIO()
    if kind == "parquet":
        pq.write_table(data, file)
        return file.getvalue()
    with (ipc.new_stream if kind == "stream" else ipc.new_file)(file, data.schema) as writer:
        writer.write_table(data)
    return file.getvalue()


def array(values: Sequence[int], *, packed: bool) -> bytes:
    file = io.BytesIO()
    if packed:
        np.savez_compressed(file, id=np.array(values, "i8"))
    else:
        np.save(file, np.array(values, "i8"))
    return file.getvalue()


def hdf5(values: Sequence[int]) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5["id"] = np.array(values, "i8")
    return file.getvalue()


def shard(values: Sequence[int]) -> bytes:
    return mds_file({"id": ("uint8", 1)}, [[bytes([value])] for value in values])


def tar(values: Sequence[int]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        out.addfile(tarfile.TarInfo("README"))
        for value in values:
            out.addfile(tarfile.TarInfo(f"{value}.txt"))
    return file.getvalue()


def records(values: Sequence[int]) -> bytes:
    return record_file(b"%d" % value for value in values)


FORMATS: dict[str, tuple[Any, Dump, Callable[[Any], int]]] = {
    "lines": (sl.read_lines, lines, int),
    "lines, gzip": (sl.read_lines, lambda values: gzip.compress(lines(values)), int),
    "jsonl": (sl.read_jsonl, blank, int),
    "jsonl, gzip": (sl.read_jsonl, lambda values: gzip.compress(blank(values)), int),
    "csv": (sl.read_csv, as_csv, lambda item: int(item["id"])),
    "csv without a header": (partial(sl.read_csv, header=False), lines, lambda item: int(item[0])),
    "parquet": (sl.read_parquet, partial(table, kind="parquet"), lambda item: int(item["id"])),
    "parquet, filtered": (
        partial(sl.read_parquet, filter=pc.field("id") >= 0),
        lambda values: table([*values, -1], "parquet"),
        lambda item: int(item["id"]),
    ),
    "arrow": (sl.read_arrow, partial(table, kind="file"), lambda item: int(item["id"])),
    "arrow stream": (sl.read_arrow, partial(table, kind="stream"), lambda item: int(item["id"])),
    "npy": (sl.read_npy, partial(array, packed=False), int),
    "npz": (sl.read_npy, partial(array, packed=True), lambda item: int(item["id"])),
    "array_record": (sl.read_array_record, lambda values: array_record_file(b"%d" % n for n in values), int),
    "mds": (partial(pipeline_of, MdsFormat()), shard, lambda item: int(item["id"])),
    "lance": (
        sl.read_lance,
        lambda values: lance_dataset({"id": pa.array(values, pa.int64())}),
        lambda item: int(item["id"]),
    ),
    "hdf5": (sl.read_hdf5, hdf5, lambda item: int(item["id"])),
    "tar": (sl.read_tar, tar, lambda item: int(item["__key__"])),
    "tar, gzip": (sl.read_tar, lambda values: gzip.compress(tar(values)), lambda item: int(item["__key__"])),
    "tfrecord": (sl.read_tfrecord, records, int),
    "tfrecord, gzip": (sl.read_tfrecord, lambda values: gzip.compress(records(values)), int),
}


@pytest.fixture(params=FORMATS)
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., sl.Pipeline[int]]:
    """Write files of these items, and return what reads them in turn."""
    function, dump, number = FORMATS[request.param]

    def read_(files: Sequence[Sequence[int]], shards: int = 1, *, passes: int | None = 1, **how: Any) -> Any:
        for at, values in enumerate(files):
            put(tmp_path / f"{at:02}", dump(values))
        pipe = function(str(tmp_path / "*"), name="x")
        if passes != 1:
            pipe = pipe.repeat(passes)
        return pipe.shard(shards, mode="file", **how).map(number)

    return read_


def test_empty_files_at_the_ends_of_shards_and_among_others(read: Callable[..., Any]) -> None:
    files = [[], [1], [], [], [2, 3], [], [], []]
    assert list(read(files)) == [1, 2, 3]
    assert sorted(read(files, 3)) == [1, 2, 3]
    assert sorted(read(files, 20)) == [1, 2, 3]
    assert sorted(read(files, 2, interleave=3, passes=2)) == [1, 1, 2, 2, 3, 3]


def test_nothing_but_empty_files(read: Callable[..., Any]) -> None:
    for (shards, how), passes in in_turn([(1, {}), (2, {}), (7, {}), (2, {"interleave": 2})], [1, 3, None]):
        assert list(read([[], [], []], shards, passes=passes, **how)) == []
    with read([[], []], 2).open() as stream:
        assert list(stream) == []
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with read([[], []], 2).open(resume=snapshot) as stream:
        assert list(stream) == []


def test_epochs_over_files_of_which_some_are_empty(read: Callable[..., Any]) -> None:
    with read([[], [1], [2, 3], []], 6).loader() as loader:
        assert [sorted(loader) for _ in range(3)] == [[1, 2, 3]] * 3


def test_a_shard_without_records_and_one_that_repeats_for_ever(read: Callable[..., Any]) -> None:
    pipe = read([[], [1, 2], []], 3, passes=None)
    with pipe.open() as stream:
        assert [next(stream) for _ in range(7)] == [1, 2, 1, 2, 1, 2, 1]
