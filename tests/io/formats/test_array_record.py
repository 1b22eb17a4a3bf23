"""ArrayRecord files, written by the library itself: every record from every place on, and damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, PlanError, ReadError
from streamline.io.formats import array_record, rows
from streamline.testing.checks import check_resume
from tests.laws.profile import covering

RECORDS = [b"record %d" % n * (n % 5) for n in range(30)]


def write(path: Path, records: list[bytes], group: int = 4) -> Path:
    writer = ArrayRecordWriter(str(path), f"group_size:{group}")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.parametrize(("group", "block_bytes"), covering([1, 4, 100], [1, 100, rows.BLOCK_BYTES]))
def test_a_resume_at_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, block_bytes: int
) -> None:
    monkeypatch.setattr(array_record, "BLOCK_BYTES", block_bytes)
    path = write(tmp_path / "a", RECORDS[:13], group)
    assert list(sl.read_array_record(path)) == RECORDS[:13]
    check_resume(sl.read_array_record(path).shard(3))


def test_shards_have_ranges_of_records(tmp_path: Path, backend: Backend) -> None:
    with sl.read_array_record(write(tmp_path / "a", RECORDS)).shard(4).open(backend=backend) as stream:
        found = list(stream)
    assert sorted(found) == sorted(RECORDS)
    assert found[:4] == [RECORDS[n] for n in (0, 8, 16, 23)]


@pytest.mark.parametrize("kept", [0, 1, 100, 65_536, -1])
def test_a_file_cut_short_is_an_error_that_says_so(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "a", RECORDS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match="was cut short: array_record can't open it"):
        list(sl.read_array_record(path))


@pytest.mark.parametrize("group", [1, 4])
def test_of_a_damaged_file_only_one_group_is_left_out(tmp_path: Path, group: int) -> None:
    """Random bytes aren't compressed, so that each group takes as much of the file."""
    rng = np.random.default_rng(0)
    records = [rng.bytes(10_000) for _ in range(30)]
    path = write(tmp_path / "a", records, group)
    content = bytearray(path.read_bytes())
    content[content.index(records[17][:100]) + 50] ^= 0xFF
    path.write_bytes(content)
    first, stop = 17 // group * group, 17 // group * group + group
    with sl.read_array_record(path).open() as stream:
        found = list[bytes]()
        with pytest.raises(DataError, match=rf"a, row {first}: array_record can't read it"):
            found.extend(stream)
        snapshot = stream.snapshot()
    assert found == records[:first]
    for begin, resume in ((0, None), (first, snapshot)):
        with sl.read_array_record(path).open(on_error="skip", max_errors=None, resume=resume) as stream:
            assert list(stream) == records[begin:first] + records[stop:]
            assert stream.errors.total == group
    with sl.read_array_record(path).shard(3).open(on_error="skip", max_errors=None) as stream:
        assert sorted(stream) == sorted(records[:first] + records[stop:])


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_record, "BLOCK_BYTES", 1)
    path = write(tmp_path / "a", [b"x"] * 5000, group=1)
    with sl.read_array_record(path).open() as stream:
        assert next(stream) == b"x"
        path.write_bytes(path.read_bytes())
        with pytest.raises(ReadError, match="changed while it was read"):
            list(stream)


def test_what_is_remote_is_refused_where_it_is_written() -> None:
    with pytest.raises(PlanError, match=r"reads local files only.*copy s3://bucket/a"):
        sl.read_array_record("s3://bucket/a")


def test_without_array_record_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.core.options.find_spec", lambda module: None)
    with pytest.raises(PlanError, match=r"read_array_record needs array_record.*streamline-data\[array_record\]"):
        sl.read_array_record("a")
