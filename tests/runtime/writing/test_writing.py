"""Jobs that write shards to local folders: what they write, resume, refuse; see `test_kills` for kills."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import streamline as sl
from streamline.core import atomic_file
from streamline.core.atomic_file import PendingFile
from streamline.errors import (
    CodeChangedWarning,
    DataError,
    PlanError,
    PlanTypeError,
    ReadError,
    ResumeError,
    WriteError,
)
from streamline.io.storage.manifest import parse_manifest
from streamline.io.storage.options import Access
from streamline.io.storage.output_folder import _LocalFolder, output_folder
from streamline.pipeline import Pipeline
from streamline.testing.compositions import pipelines
from tests.file_kit import zstd_library
from tests.laws.profile import examples

ROWS = [{"id": number, "text": "é" * number, "nested": {"a": [number, None]}} for number in range(20)]


def rows(count: int = 20) -> Pipeline[Any]:
    return sl.from_items(ROWS[:count]).shard(2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def snapshot_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names(folder)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", ["out", "out/", "out/manifest.json"])
def test_a_reader_takes_the_folder_or_its_manifest(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = sl.write_jsonl(rows(), "out", shard_bytes=100)
    assert (written.items, written.items_before, written.folder) == (20, 0, "out")
    files = sorted(Path("out").glob("*.jsonl"))
    assert written.shards == len(files) > 5
    assert written.bytes == sum(file.stat().st_size for file in files)
    assert str(written).startswith("out: 20 items in ")
    assert list(sl.read_jsonl(path)) == ROWS
    assert sorted(row["id"] for row in sl.read_jsonl(path).shard(3)) == list(range(20))
    assert list(sl.read_jsonl(files)) == ROWS


def test_shards_end_after_the_item_with_which_they_are_large_enough(tmp_path: Path) -> None:
    sl.from_items(["x" * 6] * 7).write(tmp_path / "out", shard_bytes=20)
    assert names(tmp_path / "out") == [
        "manifest.json", "shard-00000-000000.jsonl", "shard-00000-000001.jsonl", "shard-00000-000002.jsonl",
    ]  # fmt: skip
    sizes = [(tmp_path / "out" / name).stat().st_size for name in names(tmp_path / "out")[1:]]
    assert sizes == [27, 27, 9]


def test_parquet_takes_rows_and_batches_and_infers_or_is_told_its_columns(tmp_path: Path) -> None:
    assert sl.write_parquet(rows(), tmp_path / "rows", shard_bytes=300).shards > 1
    assert list(sl.read_parquet(tmp_path / "rows")) == ROWS
    batches = sl.read_parquet(tmp_path / "rows", batch_rows=3).filter(lambda batch: batch.num_rows > 0)
    sl.write_parquet(batches, tmp_path / "batches")
    assert list(sl.read_parquet(tmp_path / "batches")) == ROWS
    late = [{"x": None}, *({"x": number} for number in range(3))]
    schema = pa.schema([("x", pa.float32())])
    sl.write_parquet(sl.from_items(late), tmp_path / "late", schema=schema)
    sl.write_parquet(sl.read_parquet(tmp_path / "rows", batch_rows=3).map(lambda batch: batch[:0]), tmp_path / "empty")
    assert list(sl.read_parquet(tmp_path / "empty")) == []
    assert list(sl.read_parquet(tmp_path / "late")) == [{"x": None}, {"x": 0.0}, {"x": 1.0}, {"x": 2.0}]


def test_columns_are_those_of_the_first_shard_also_after_a_resume(tmp_path: Path) -> None:
    """A shard whose own rows would show another type: of nothing but None, or of whole numbers."""
    items = [{"x": 1.5}, {"x": None}, {"x": 2}, {"x": None}, {"x": 3}]
    pipe = sl.from_items(items).map(lambda item: item)
    for at in range(12):
        with crash(at):
            sl.write_parquet(pipe, tmp_path / "out", shard_bytes=1, resume=True)
    sl.write_parquet(pipe, tmp_path / "out", shard_bytes=1, resume=True)
    assert list(sl.read_parquet(tmp_path / "out")) == items


@pytest.mark.parametrize(
    "items",
    [
        [np.arange(3) + number for number in range(9)],
        [np.float32(number) for number in range(9)],
        list(range(9)),
        [np.array([(number, [1.5, 2])], dtype=[("id", "<i4"), ("at", "<f8", (2,))]) for number in range(9)],
        [np.zeros((2, 0), np.int8)] * 9,
    ],
    ids=["arrays", "scalars", "numbers", "records", "empty"],
)
def test_numpy_rows_come_back_as_they_were(items: list[Any], tmp_path: Path) -> None:
    sl.write_npy(sl.from_items(items), tmp_path / "out", shard_bytes=200)
    found = list(sl.read_npy(tmp_path / "out"))
    assert [np.asarray(row).tobytes() for row in found] == [np.asarray(item).tobytes() for item in items]
    assert {np.asarray(row).shape for row in found} == {np.asarray(items[0]).shape}
    assert {np.asarray(row).dtype for row in found} == {np.asarray(items[0]).dtype}
    whole = np.concatenate([np.load(file) for file in sorted((tmp_path / "out").glob("*.npy"))])
    assert whole.shape[0] == 9


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    long = "d" * 120
    items = [{"__key__": f"{long}/{number}", "txt": f"é{number}", "b.bin": bytes(number)} for number in range(9)]
    sl.write_tar(sl.from_items(items), tmp_path / "out", shard_bytes=5000)
    expected = [{**item, "txt": str(item["txt"]).encode()} for item in items]
    assert [{name: sample[name] for name in expected[0]} for sample in sl.read_tar(tmp_path / "out")] == expected


@pytest.mark.parametrize(
    ("name", "suffix", "unpack"), [("gzip", "gz", gzip.decompress), ("zstd", "zst", zstd_library.decompress)]
)
def test_compressed_shards_are_read_back_and_hold_what_others_do(
    name: str, suffix: str, unpack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    samples = [{"__key__": f"{number}", "txt": b"x" * number} for number in range(20)]
    for kind, items, read in (("jsonl", ROWS, sl.read_jsonl), ("tar", samples, sl.read_tar)):
        folder, plain, pipe = tmp_path / kind, tmp_path / f"plain {kind}", sl.from_items(items).shard(2)
        written = pipe.write(folder, cast("Any", kind), shard_bytes=5000, compression=name)
        pipe.write(plain, cast("Any", kind), shard_bytes=5000)
        files = sorted(folder.glob(f"shard-*.{kind}.{suffix}"))
        assert written.bytes == sum(file.stat().st_size for file in files)
        assert [unpack(file.read_bytes()) for file in files] == [
            file.read_bytes() for file in sorted(plain.glob("shard-*"))
        ]
        assert len(files) == (1 if kind == "jsonl" else 4)
        found: list[Any] = list(cast("Any", read)(folder))
        assert [{key: item[key] for key in items[0]} for item in found] == items
        with pytest.raises(WriteError, match=rf"holds {kind}\.{suffix}, and this writes {kind}: write that, or"):
            pipe.write(folder, cast("Any", kind), resume=True)


def test_the_columns_of_parquet_files_are_compressed_as_pyarrow_calls_it(tmp_path: Path) -> None:
    for name, codec in ((None, "SNAPPY"), ("zstd", "ZSTD"), ("none", "UNCOMPRESSED")):
        folder = tmp_path / codec
        rows().write(folder, "parquet", compression=name)
        (file,) = folder.glob("*.parquet")
        assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == codec
        assert list(sl.read_parquet(folder)) == ROWS


@pytest.mark.parametrize(("kind", "name", "said"), [("jsonl", "zstd", "backports.zstd"), ("parquet", "lz4", "without")])
def test_a_compression_that_is_not_installed_is_named_before_anything_is_written(
    kind: Any, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "backports" if sys.version_info < (3, 14) else "compression"
    monkeypatch.setitem(sys.modules, f"{package}.zstd", None)
    monkeypatch.delattr(sys.modules[package], "zstd")
    monkeypatch.setattr(pa, "Codec", SimpleNamespace(is_available=lambda _: False))
    with pytest.raises(PlanError, match=rf"write_{kind}\(compression='{name}'\): .*{said}"):
        rows().write(tmp_path / "out", kind, compression=name)
    assert names(tmp_path) == []


def test_values_of_numpy_become_json(tmp_path: Path) -> None:
    sl.from_items([{"a": np.arange(2), "b": np.float32(0.5), "c": np.bool_(True), "d": (1, None)}]).write(tmp_path)
    assert list(sl.read_jsonl(tmp_path)) == [{"a": [0, 1], "b": 0.5, "c": True, "d": [1, None]}]


def test_times_in_nanoseconds_become_text_and_no_bare_number(tmp_path: Path) -> None:
    times = np.array([1_700_000_000_000_000_123, 0], "M8[ns]")
    took = np.timedelta64(123, "ns")
    sl.from_items([{"a": times, "b": times[0], "c": took, "d": times[1].astype("M8[us]")}]).write(tmp_path)
    texts = ["2023-11-14T22:13:20.000000123", "1970-01-01T00:00:00.000000000"]
    assert list(sl.read_jsonl(tmp_path)) == [
        {"a": texts, "b": texts[0], "c": "123 nanoseconds", "d": "1970-01-01T00:00:00"}
    ]


def test_no_items_make_no_shards_and_an_empty_pipeline(tmp_path: Path) -> None:
    for name in ("jsonl", "npy", "parquet", "tar"):
        written = sl.from_items(range(0)).write(tmp_path / name, cast("Any", name))
        assert (written.shards, written.items) == (0, 0)
        assert list(getattr(sl, f"read_{name}")(tmp_path / name)) == []


# Failures -------------------------------------------------------------------------------------------------------------


NAN = float("nan")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: Any = reduce(lambda part, _: [part], range(60), cast("Any", 1))
SAMPLES = [{"__key__": "a", "x": b""}, {"__key__": "b", "x": b""}]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("format", "items", "said"),
    [
        ("parquet", [None], "item 1 of what is written, of type NoneType, .*a row as a dict by column"),
        ("jsonl", [1, 2, object()], "item 3 of what is written, of type object, .*no word for a builtins.object"),
        ("jsonl", [1, 2, {"a": [None, NAN]}], "item 3 .*of type dict.*holds nan"),
        ("jsonl", [1, 2, np.array([1, np.inf])], "item 3 .*of type ndarray.*holds inf"),
        ("jsonl", [1, 2, {frozenset([NAN, 1.0]): 1}], "item 3 "),
        ("npy", [np.zeros(2), np.zeros(2), np.zeros(3)], r"item 3 .*shape \(2,\) of float64.*got shape \(3,\)"),
        ("npy", [np.zeros(2), np.zeros(2), np.zeros(2, int)], "item 3 .*of float64.*of int64"),
        ("npy", [0, 1, "x"], "item 3 .*type str.*expected a NumPy array"),
        ("npy", [0, 1, np.ma.array([1])], "item 3 .*type MaskedArray.*masked or of another class"),
        ("parquet", [{"x": [1]}, {"x": [2]}, {"x": np.ma.array([1])}, {"x": [2]}], "item 3 .*holds a masked array"),
        ("npy", [0, 1, np.array([object()])], "item 3 .*Python objects"),
        ("tar", [*SAMPLES, {"x": b""}], "item 3 .*__key__"),
        ("tar", [*SAMPLES, {"__key__": "b", "y": b""}], "item 3 .*before"),
        ("tar", [*SAMPLES, {"__key__": "c", "y": 1}], "item 3 .*'y'.*int"),
        ("tar", [*SAMPLES, {"__key__": "c.d", "y": b""}], "item 3 .*another"),
        ("tar", [*SAMPLES, {"__key__": "c", "Y": b""}], "item 3 .*another"),
        ("tar", [*SAMPLES, {"__key__": "c\0d", "y": b""}], "item 3 .*another sample or field: .*NUL"),
        ("tar", [*SAMPLES, {"__key__": "c", "y\0z": b""}], "item 3 .*another sample or field: .*NUL"),
        ("jsonl", [1, 2, {3: 4}], "item 3 .*has the key 3, which would come back as a string"),
        ("jsonl", [1, 2, [{"a": {2.5: 4}}]], r"item 3 .*has the key 2\.5"),
        ("npy", [0, 1, np.ma.masked_array([1.0], [True])], "item 3 .*masked"),
        ("npy", [0, 1, np.zeros(1, "i4, i2")[["f1", "f0"]]], "item 3 .*aren't in order"),
        ("parquet", [{"x": 1}, {"x": 2}, {"x": "3"}], "item 3 "),
        ("parquet", [{"x": 1}, {"x": 2}, {"x": 3, "y": 4}], "item 3 .*has a column.*'y'"),
        ("parquet", [{"x": 1}, {"x": 2}, {}], "item 3 .*lacks the column 'x'"),
        ("parquet", [{"x": 1}, {"x": 2}, 3], "item 3 .*type int.*expected a row"),
        ("parquet", [{}], "item 1 .*expected columns, each with a str"),
        ("parquet", [{b"x": 1}], "item 1 .*expected columns, each with a str"),
        ("parquet", [{"x": {"a": 1}}, {"x": [{"a": 2}]}], "item 2 "),
        ("parquet", [{"x": [{"a": 1}]}, {"x": [{"b": 2}]}], r"item 1 .*lacks the column 'x\.b'"),
        ("parquet", [{"x": {}}], "item 1 .*no child field"),
        ("parquet", [pa.RecordBatch.from_arrays([pa.array([1])] * 2, ["x", "x"])], r"item 1 .*got \['x', 'x'\]"),
        ("parquet", [{"x": DEEP}], "item 1 .*too deeply nested"),
        ("jsonl", [1, 2, CYCLE], "item 3 .*recursion"),
        ("parquet", [{"x": CYCLE}], "item 1 .*nested too deeply, or in itself"),
    ],
)  # fmt: skip
def test_an_item_that_cannot_be_written_is_named(format: Any, items: list[Any], said: str, tmp_path: Path) -> None:
    pipe = sl.from_items(items)
    with pytest.raises(DataError, match=said) as caught:
        pipe.write(tmp_path / "out", format)
    assert "holds 0 items in 0 whole shards" in caught.value.__notes__[-1]
    assert names(tmp_path / "out") == ["manifest.json"]
    with pytest.raises(ReadError, match="isn't written to its end"):
        list(sl.read_jsonl(tmp_path / "out"))


MARKED = st.text(st.sampled_from("aé._ -:\\\n\0/\udcff\ud800Aßİ"), min_size=1, max_size=6)
"""Names with what files of some kind have no room for, or mean something by."""

KEYS = MARKED | st.text(max_size=4) | st.sampled_from(["a", "b"])

ODD_KEYS = KEYS | st.integers(-2, 2) | st.none() | st.booleans() | st.floats() | st.binary(max_size=2)

PATHS = KEYS | st.sampled_from(["../a", "/a", "a//b", "./a", "__x__/a", "PaxHeader/x", "a/" * 60 + "b", "é" * 60])


def nested(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    flat = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=3)
    return st.recursive(flat, lambda part: st.lists(part, max_size=2) | st.dictionaries(keys, part, max_size=2))


TYPES = st.recursive(
    st.sampled_from(["<i4", ">i2", "<f8", "S3", "<U2", "V2", "<M8[ns]"]),
    lambda kind: st.lists(
        st.tuples(st.sampled_from(["a", "é", "b c", "'", "语", "f1"]), kind, st.sampled_from([(), (2,)]))
        | st.tuples(st.sampled_from([("title", "d"), ("T", "é")]), kind),
        min_size=1,
        max_size=3,
    ),
    max_leaves=4,
)


def array(kind: Any, aligned: bool, backwards: bool) -> np.ndarray[Any, Any]:
    """Return an array with fields of many kinds: named and titled, padded, out of order."""
    try:
        dtype = np.dtype(kind, align=aligned)
    except ValueError:
        assume(False)
    made = np.frombuffer(bytes(range(256)) * dtype.itemsize, dtype, 2).copy()
    return made[list(dtype.names)[::-1]] if backwards and dtype.names else made


def same_array(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.dtype.fields == other.dtype.fields and (one == other).all())


ARRAYS = st.builds(array, TYPES, st.booleans(), st.booleans())

SAMPLE = st.builds(
    lambda key, fields: {"__key__": key, **fields},
    PATHS,
    st.dictionaries(ODD_KEYS, st.binary(max_size=3), min_size=1, max_size=2),
)


@examples(120)
@given(
    st.tuples(st.just("jsonl"), st.lists(nested(ODD_KEYS), min_size=1, max_size=3))
    | st.tuples(st.just("tar"), st.lists(SAMPLE, min_size=1, max_size=3))
    | st.tuples(st.just("parquet"), st.lists(st.dictionaries(ODD_KEYS, nested(ODD_KEYS), max_size=2), min_size=1))
    | st.tuples(st.just("npy"), st.lists(ARRAYS, min_size=1, max_size=1).map(lambda found: found * 2))
)
def test_what_is_written_is_read_back_as_it_was_or_refused(job: tuple[Any, list[Any]]) -> None:
    format, items = job
    with TemporaryDirectory() as folder:
        try:
            sl.from_items(items).write(folder, format)
        except DataError:
            return
        found = list(getattr(sl, f"read_{format}")(folder))
    if format == "npy":
        assert all(map(same_array, found, items))
        return
    if format == "tar":
        found = [{name: data for name, data in sample.items() if name in item or name[:2] != "__"}
                 for sample, item in zip(found, items, strict=True)]  # fmt: skip
    assert found == items


def test_arrays_of_padded_and_titled_fields_are_read_back_as_they_were(tmp_path: Path) -> None:
    kind: Any = [(("title", "a"), "i1"), ("b", [("é", "<f8", (2,)), ("c", "i1")])]
    rows = np.zeros(3, np.dtype(kind, align=True))
    rows["a"] = range(3)
    for at in range(4):
        with crash(at):
            sl.write_npy(sl.from_items(rows), tmp_path / "out", shard_bytes=1, resume=True)
    sl.write_npy(sl.from_items(rows), tmp_path / "out", shard_bytes=1, resume=True)
    found = list(sl.read_npy(tmp_path / "out"))
    assert all(map(same_array, found, rows))
    assert [row["title"] for row in found] == [0, 1, 2]


@pytest.mark.parametrize("later", [{"x": {"a": 1, "b": 2}}, {"x": {"c": 1, "a": 1}}, {"x": {}}])
def test_keys_of_nested_dicts_that_a_column_has_no_room_for_or_lacks_are_refused(later: Any, tmp_path: Path) -> None:
    schema = pa.schema([("x", pa.struct([("a", pa.int64())]))])
    with pytest.raises(DataError, match=r"item 2 .*'x\.[abc]'"):
        sl.write_parquet(sl.from_items([{"x": {"a": 1}}, later]), tmp_path, schema=schema)


def test_a_failure_keeps_whole_shards_and_a_resume_goes_on_after_a_fix(tmp_path: Path) -> None:
    def fails(item: Any) -> Any:
        return {"id": 1 / (item["id"] - 13)} if item["id"] == 13 else item

    with pytest.raises(ZeroDivisionError) as caught:
        rows().map(fails, name="f").write(tmp_path, shard_bytes=100)
    whole = len(list(tmp_path.glob("*.jsonl")))
    assert f" in {whole} whole shards" in caught.value.__notes__[-1]
    assert len(names(tmp_path)) == whole + 1 > 3

    def mended(item: Any) -> Any:
        return item

    mended.__qualname__ = fails.__qualname__
    with pytest.warns(CodeChangedWarning):
        written = rows().map(mended, name="f").write(tmp_path, shard_bytes=100, resume=True)
    assert (written.items, 0 < written.items_before <= 13) == (20, True)
    assert list(sl.read_jsonl(tmp_path)) == ROWS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", ["jsonl", "npy", "parquet", "tar"])
@pytest.mark.parametrize("operation", ["write", "commit"])
def test_a_full_disk_is_named_and_leaves_what_counts(
    format: Any, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(PendingFile):
        def write(self, content: bytes | memoryview) -> None:
            self.fail("write")
            super().write(content)

        def commit(self, name: str) -> None:
            try:
                self.fail("commit")
            except OSError:
                self.discard()
                raise
            super().commit(name)

        def fail(self, now: str) -> None:
            if now == operation:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    items: Any = {"tar": [{"__key__": str(at), "x": b"x"} for at in range(4)], "npy": range(4)}.get(format, ROWS[:4])
    pipe = sl.from_items(items)
    with monkeypatch.context() as patch:
        patch.setattr("streamline.io.storage.output_folder.PendingFile", Full)
        with pytest.raises(WriteError, match=r"can't write to .*No space left") as caught:
            pipe.write(tmp_path, format, shard_bytes=1)
    assert "holds 0 items in 0 whole shards" in caught.value.__notes__[-1]
    assert names(tmp_path) == ["manifest.json"]
    pipe.write(tmp_path, format, shard_bytes=1, resume=True)
    assert len(list(getattr(sl, f"read_{format}")(tmp_path))) == 4


def test_what_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"can't lock .*file/out: Not a directory"):
        rows().write(tmp_path / "file" / "out")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("streamline.io.storage.output_folder.PendingFile", refuse)
    with pytest.raises(WriteError, match=r"can't write to .*out: Permission denied"):
        rows().write(tmp_path / "out")


def test_ctrl_c_keeps_whole_shards_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _LocalFolder.commit

    def commit(self: _LocalFolder, shard: PendingFile, name: str) -> None:
        real(self, shard, name)
        if name == "shard-00000-000002.jsonl":
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(_LocalFolder, "commit", commit)
        with pytest.raises(KeyboardInterrupt) as caught:
            rows().write(tmp_path, shard_bytes=60)
    assert "in 2 whole shards: write again with resume=True" in caught.value.__notes__[-1]
    rows().write(tmp_path, shard_bytes=60, resume=True)
    assert list(sl.read_jsonl(tmp_path)) == ROWS


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_complete_job_has_nothing_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows().write(tmp_path, shard_bytes=100)
    before = snapshot_of(tmp_path)
    with caplog.at_level(logging.INFO, "streamline.writing"):
        again = rows().write(tmp_path, shard_bytes=100, resume=True)
    assert again.items_before == again.items == 20
    assert "is complete: nothing to do" in caplog.text
    assert snapshot_of(tmp_path) == before
    with pytest.raises(ResumeError, match="another plan"):
        rows().map(str).write(tmp_path, resume=True)
    with pytest.raises(WriteError, match=r"a job has written to .*resume=True"):
        rows().write(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    (tmp_path / ".hidden").touch()
    for resume in (False, True):
        with pytest.raises(WriteError, match=r"isn't empty, and has no manifest\.json .*holds photo\.jpg; give"):
            rows().write(tmp_path, resume=resume)
    (tmp_path / "photo.jpg").unlink()
    rows().write(tmp_path, resume=True)
    with pytest.raises(WriteError, match="holds jsonl, and this writes tar"):
        rows().write(tmp_path, "tar", resume=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("change", ["gone", "cut", "longer"])
def test_a_resume_looks_whether_the_shards_that_count_are_there(change: str, complete: bool, tmp_path: Path) -> None:
    with crash(10**9 if complete else 15):
        rows().write(tmp_path, shard_bytes=100)
    shard = tmp_path / "shard-00000-000001.jsonl"
    content = shard.read_bytes()
    shard.write_bytes({"cut": content[:-5]}.get(change, content + b"x"))
    if change == "gone":
        shard.unlink()
    says = "is gone" if change == "gone" else r"has \d+ bytes"
    with pytest.raises(WriteError, match=rf"000001\.jsonl {says}, and {len(content)} were written: put it there again"):
        rows().write(tmp_path, shard_bytes=100, resume=True)
    shard.write_bytes(content)
    assert rows().write(tmp_path, shard_bytes=100, resume=True).items == 20
    assert list(sl.read_jsonl(tmp_path)) == ROWS


def test_another_pipeline_is_refused_in_the_middle(tmp_path: Path) -> None:
    with crash(8):
        rows().write(tmp_path, shard_bytes=100)
    before = snapshot_of(tmp_path)
    with pytest.raises(ResumeError, match="another plan"):
        rows().map(str).write(tmp_path, resume=True)
    with pytest.raises(ResumeError):
        rows(19).write(tmp_path, resume=True)
    assert snapshot_of(tmp_path) == before


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with output_folder(tmp_path, Access(), "manifest.json"), pytest.raises(WriteError, match="another job writes to"):
        rows().write(tmp_path)
    rows().write(tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_where_there_are_no_locks_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(atomic_file, "try_lock", none)
    rows().write(tmp_path)
    assert "can't be locked" in caplog.text
    assert list(sl.read_jsonl(tmp_path)) == ROWS


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda pipe, out: pipe.write(out, "csv"), PlanError, "one of 'jsonl', 'npy', 'parquet', 'tar', got 'csv'"),
        (lambda pipe, out: pipe.write(out, 3), PlanTypeError, "got int 3|got 3"),
        (lambda pipe, out: pipe.write(out, shard_bytes=0), PlanError, "shard_bytes"),
        (lambda pipe, out: pipe.write(out, resume="yes"), PlanTypeError, "True or False"),
        (lambda pipe, out: pipe.write(out, ends="pad"), PlanError, "leave it out"),
        (
            lambda pipe, out: pipe.write(out, shard_byte=3),
            PlanTypeError,
            "write_jsonl has no shard_byte=: did you mean shard_bytes=",
        ),
        (lambda pipe, out: pipe.write(out, skip_steps=[1]), PlanTypeError, "write_jsonl has no skip_steps="),
        (lambda pipe, out: pipe.write(out, compression="xz"), PlanError, "None or one of 'gzip', 'zstd', got 'xz'"),
        (lambda pipe, out: pipe.write(out, "tar", compression=True), PlanTypeError, "'zstd', got bool"),
        (lambda pipe, out: pipe.write(out, "parquet", compression="bz2"), PlanError, "'snappy', 'zstd', got 'bz2'"),
        (lambda pipe, out: sl.write_npy(pipe, out, compression="gzip"), PlanError, "npy files are .*leave it out"),
        (lambda pipe, out: pipe.write(3), PlanTypeError, "folder to write to"),
        (lambda pipe, out: pipe.write(""), PlanError, "folder to write to"),
        (lambda pipe, out: pipe.write("http://host/out"), PlanError, "http:// can't be written to"),
        (lambda pipe, out: pipe.write("s3://bucket"), PlanError, "s3://BUCKET/FOLDER"),
        (lambda pipe, out: pipe.write("s3://bucket/a*"), PlanError, "s3://BUCKET/FOLDER"),
        (lambda pipe, out: sl.write_jsonl(cast("Any", 3), out), PlanTypeError, "takes a pipeline, got"),
        (lambda pipe, out: sl.write_parquet(pipe, out, schema=3), PlanTypeError, "pyarrow.Schema"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    call: Callable[[Any, Path], object], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        call(rows(), tmp_path / "out")
    assert names(tmp_path) in ([], ["out"])
    assert not list(tmp_path.glob("out/*"))


def test_a_stream_is_refused_since_the_job_opens_it(tmp_path: Path) -> None:
    with rows().open() as stream, pytest.raises(PlanTypeError, match="give the pipeline"):
        sl.write_jsonl(stream, tmp_path)  # type: ignore[arg-type]


def test_a_live_source_needs_a_journal_on_disk(tmp_path: Path) -> None:
    def feed(start: int) -> Callable[[], Any]:
        async def numbers() -> Any:
            for number in range(start, 9):
                yield number

        return numbers

    with pytest.raises(PlanError, match='journal="dir/"'):
        sl.from_stream(feed(0)).write(tmp_path / "out")
    with crash(9):
        sl.from_stream(feed(0), journal=tmp_path / "journal").write(tmp_path / "out", shard_bytes=4)
    whole = len(list((tmp_path / "out").glob("shard*")))
    assert 0 < whole < 5
    sl.from_stream(feed(9), journal=tmp_path / "journal").write(tmp_path / "out", shard_bytes=4, resume=True)
    assert list(sl.read_jsonl(tmp_path / "out")) == list(range(9))


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_ranks_write_shards_of_their_own_into_one_folder(tmp_path: Path) -> None:
    pipe = sl.from_items(range(15)).shard(3)
    pipe.write(tmp_path, shard_bytes=4, rank=0, world_size=2)
    with pytest.raises(ReadError, match=r"isn't written to its end \(ranks 1\)"):
        list(sl.read_jsonl(tmp_path))
    with crash(7):
        pipe.write(tmp_path, shard_bytes=4, rank=1, world_size=2)
    with pytest.raises(ReadError, match=r"isn't written to its end \(ranks 1\)"):
        list(sl.read_jsonl(tmp_path))
    pipe.write(tmp_path, shard_bytes=4, rank=1, world_size=2, resume=True)
    of_ranks = [list(pipe.open(rank=rank, world_size=2, ends="allow").sync_stream()) for rank in range(2)]
    assert list(sl.read_jsonl(tmp_path)) == of_ranks[0] + of_ranks[1]
    assert list(sl.read_jsonl(tmp_path / "manifest-00001-of-00002.json")) == of_ranks[1]
    assert sorted(of_ranks[0] + of_ranks[1]) == list(range(15))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("before", "now"), [(2, 3), (2, 1), (1, 2), (3, 2)])
def test_another_number_of_ranks_is_refused_and_one_process_can_go_on_for_all(
    before: int, now: int, tmp_path: Path
) -> None:
    pipe = sl.from_items(range(15)).shard(3)
    for rank in range(before):
        with crash(9):
            pipe.write(tmp_path, shard_bytes=4, rank=rank, world_size=before)
    found, ranks = snapshot_of(tmp_path), "1 rank" if before == 1 else f"{before} ranks"
    for rank, resume in ((0, True), (now - 1, True), (0, False)):
        said = rf"holds the job of {ranks}, and this is rank {rank} of {now}: .*world_size={before}\. "
        with pytest.raises(WriteError, match=said):
            pipe.write(tmp_path, rank=rank, world_size=now, resume=resume)
    assert snapshot_of(tmp_path) == found
    for rank in range(before):
        pipe.write(tmp_path, shard_bytes=4, rank=rank, world_size=before, resume=True)
    assert sorted(sl.read_jsonl(tmp_path)) == list(range(15))


# Reading --------------------------------------------------------------------------------------------------------------


def test_a_reader_takes_only_what_the_manifest_names(tmp_path: Path) -> None:
    rows().write(tmp_path, shard_bytes=100)
    (tmp_path / "shard-00000-000099.jsonl").write_text("{}\n")
    assert list(sl.read_jsonl(tmp_path)) == ROWS
    with pytest.raises(PlanError, match="is given twice"):
        list(sl.read_jsonl(tmp_path / "*"))


def test_a_shard_that_is_not_as_it_was_written_is_refused(tmp_path: Path) -> None:
    rows().write(tmp_path, shard_bytes=100)
    shard = tmp_path / "shard-00000-000001.jsonl"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ReadError, match=r"000001\.jsonl has .* bytes, and .* were written"):
        list(sl.read_jsonl(tmp_path))
    shard.unlink()
    with pytest.raises(ReadError, match="no such file"):
        list(sl.read_jsonl(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"items": 2', '"items": 3', 1), "damaged, or was edited"),
        (lambda text: text.replace('"streamline_manifest": 1', '"streamline_manifest": 9'), "is of version 9"),
        (lambda text: text[:-9], "no manifest of written shards, or is damaged"),
        (lambda text: text.replace('"body": {', '"body": {"a": ' + "[" * 100_000), "damaged: it is nested too deeply"),
    ],
)
def test_a_damaged_manifest_is_refused(change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    rows().write(tmp_path, shard_bytes=100)
    path = tmp_path / "manifest.json"
    assert change(path.read_text()) != path.read_text()
    path.write_text(change(path.read_text()))
    for work in (lambda: list(sl.read_jsonl(tmp_path)), lambda: rows().write(tmp_path, resume=True)):
        with pytest.raises(ReadError, match=said):
            work()


def test_another_programs_manifest_is_a_file_like_any(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"audio": "a.wav"}\n')
    assert list(sl.read_jsonl(tmp_path / "manifest.json")) == [{"audio": "a.wav"}]
    with pytest.raises(ReadError, match="is a directory"):
        list(sl.read_jsonl(tmp_path))


# Any pipeline, any kills ----------------------------------------------------------------------------------------------


class Crashed(BaseException):
    """A kill, as far as a process can play it: what it was about to do to the folder isn't done, or nothing after."""


OPERATIONS: dict[type, tuple[str, ...]] = {
    _LocalFolder: ("manifest", "replace_manifest", "shard", "commit", "remove"),
    PendingFile: ("write", "write_start"),
}


@contextmanager
def crash(at: int) -> Iterator[None]:
    """Stop the job at its operation `at` on the folder, if it comes to it."""
    left = [at]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crashed
            return real(*args, **options)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for owner, operations in OPERATIONS.items():
            for name in operations:
                patch.setattr(owner, name, counted(vars(owner)[name]))
        patch.setattr(os, "fsync", lambda _: None)
        with suppress(Crashed):
            yield


sizes = st.integers(1, 60)


@pytest.mark.long
@examples(250)
@given(
    pipelines(most=12, stages=3),
    sizes,
    st.lists(st.tuples(st.integers(0, 25), sizes), max_size=3),
    st.sampled_from([None, "gzip", "zstd"]),
)
def test_any_pipeline_is_written_exactly_once_whatever_kills_it(
    pipeline: Pipeline[Any], shard_bytes: int, kills: list[tuple[int, int]], compression: str | None
) -> None:
    stages = tuple(stage for stage in pipeline.stages if not stage.last)  # nothing comes after a transfer
    texts = replace(pipeline, stages=stages).map(repr)
    expected = list(texts)
    with TemporaryDirectory() as folder:
        for at, size in (*kills, (10**9, shard_bytes)):
            with crash(at):
                texts.write(folder, shard_bytes=size, compression=compression, resume=True)
        found = list(sl.read_jsonl(folder))
        manifest = parse_manifest(Path(folder, "manifest.json").read_bytes(), folder)
        assert names(Path(folder)) == sorted(["manifest.json", *(shard.name for shard in manifest.shards)])
    if pipeline.plan.chooser is None:
        assert found == expected
    else:  # which items are in a batch together is chosen, too
        assert numbers_in(found) == numbers_in(expected)


def numbers_in(texts: list[str]) -> Counter[str]:
    return Counter(found for text in texts for found in re.findall(r"-?\d+", text))


# Encoders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["jsonl", "npy", "parquet", "tar"])
def test_memory_is_bounded_by_what_is_gathered_not_by_the_shard(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamline.io.formats.encoders.WRITE_BYTES", 1000)
    monkeypatch.setattr("streamline.io.formats.encoders.GROUP_BYTES", 1000)
    most, real = [0], PendingFile.write

    def write(self: PendingFile, content: bytes) -> None:
        most[0] = max(most[0], len(content))
        real(self, content)

    monkeypatch.setattr(PendingFile, "write", write)
    random = np.random.default_rng(0)
    data = [random.integers(0, 2**60, 10) for _ in range(300)]
    items: Any = {
        "tar": [{"__key__": str(at), "x": row.tobytes()} for at, row in enumerate(data)],
        "npy": data,
        "parquet": [{"x": row.tolist()} for row in data],
    }.get(format, [row.tolist() for row in data])
    sl.from_items(items).write(tmp_path, format)
    assert (tmp_path / f"shard-00000-000000.{format}").stat().st_size > 20_000
    assert most[0] < 10_000
