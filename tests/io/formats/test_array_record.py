"""ArrayRecord files, written by the library itself: every record from every place on, and damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import streamline as sl
from streamline.errors import DataError, PlanError

RECORDS = [b"record %d" % n * (n % 5) for n in range(30)]


def write(path: Path, records: list[bytes], group: int = 4) -> Path:
    writer = ArrayRecordWriter(str(path), f"group_size:{group}")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("kept", [0, 1, 100, 65_536, -1])
def test_a_file_cut_short_is_an_error_that_says_so(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "a", RECORDS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match="was cut short: array_record can't open it"):
        list(sl.read_array_record(path))


def test_what_is_remote_is_refused_where_it_is_written() -> None:
    with pytest.raises(PlanError, match=r"reads local files only.*copy s3://bucket/a"):
        sl.read_array_record("s3://bucket/a")


def test_without_array_record_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.core.options.find_spec", lambda module: None)
    with pytest.raises(PlanError, match=r"read_array_record needs array_record.*streamline-data\[array_record\]"):
        sl.read_array_record("a")
