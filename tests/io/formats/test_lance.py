"""Lance datasets, written by the library itself: every row from every place on, versions, damage, a store."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError, ReadError, ResumeError, SnapshotError
from streamline.io.formats import lance as lance_format
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from tests.servers.s3 import Bucket

ROWS: list[dict[str, Any]] = [{"n": n, "text": "x" * (n % 4), "in": {"a": n, "b": [n] * (n % 3)}} for n in range(40)]


def write(path: Path, rows: list[Any], mode: str = "create") -> Any:
    return lance.write_dataset(pa.Table.from_pylist(rows), str(path), mode=mode, max_rows_per_file=15)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A dataset of three fragments."""
    write(tmp_path / "a.lance", ROWS)
    return tmp_path / "a.lance"


def taken(pipe: Pipeline[Any], count: int) -> tuple[list[Any], sl.Snapshot]:
    with pipe.open() as stream:
        return [next(stream) for _ in range(count)], sl.Snapshot.from_json(stream.snapshot().to_json())


def rest(pipe: Pipeline[Any], snapshot: sl.Snapshot) -> list[Any]:
    with pipe.open(resume=snapshot) as stream:
        return list(stream)


@pytest.mark.long
def test_rows_that_were_deleted_are_not_there(path: Path) -> None:
    lance.dataset(path).delete("n % 4 = 1 or (n > 14 and n < 30)")
    expected = [row for row in ROWS if row["n"] % 4 != 1 and not 14 < row["n"] < 30]
    assert list(sl.read_lance(path)) == expected
    check_resume(sl.read_lance(path).shard(4))


@pytest.mark.long
def test_columns_and_a_filter_over_others(path: Path) -> None:
    wanted = pc.is_in(pc.field("n"), pa.array([3, 14, 15, 39]))
    pipe = sl.read_lance(path, columns=["text", "in"], filter=wanted)
    assert list(pipe) == [{key: ROWS[n][key] for key in ("text", "in")} for n in (3, 14, 15, 39)]
    check_resume(pipe.shard(3))
    with pytest.raises(DataError, match=r"a\.lance has no column 'x': it has 'n', 'text', 'in'"):
        list(sl.read_lance(path, columns=["x"]))


@pytest.mark.long
def test_several_datasets_and_a_glob(path: Path) -> None:
    write(path.with_name("b.lance"), ROWS[:3])
    pipe = sl.read_lance(path.with_name("*.lance")).shard(2, mode="file")
    assert sorted(row["n"] for row in pipe) == sorted([*range(40), 0, 1, 2])
    check_resume(pipe)
    with pytest.raises(PlanError, match="is given twice"):
        list(sl.read_lance([path, path]))


def test_binary_columns_that_lance_stores_apart_are_read_whole(tmp_path: Path) -> None:
    apart = pa.field("data", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    contents = [b"x" * (100_000 * n) for n in range(4)]
    lance.write_dataset(pa.table([contents], schema=pa.schema([apart])), tmp_path / "a")
    assert [row["data"] for row in sl.read_lance(tmp_path / "a")] == contents


# Versions -------------------------------------------------------------------------------------------------------------


def test_a_resume_reads_on_in_its_version_whatever_was_written_since(path: Path) -> None:
    pipe = sl.read_lance(path).shard(2)
    before, snapshot = taken(pipe, 7)
    whole = list(pipe)
    write(path, ROWS[:5], mode="append")
    lance.dataset(path).delete("n < 30")
    assert before + rest(pipe, snapshot) == whole
    assert sorted(row["n"] for row in pipe) == [0, 1, 2, 3, 4, *range(30, 40)][5:]
    with pipe.open(resume=snapshot) as stream:
        again = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert again.listing == snapshot.listing
    assert before + rest(pipe, again) == whole


def test_the_version_that_is_asked_for(path: Path) -> None:
    dataset = write(path, ROWS[:5], mode="append")
    dataset.tags.create("first", 1)
    assert list(sl.read_lance(path, version=1)) == list(sl.read_lance(path, version="first")) == ROWS
    _, snapshot = taken(sl.read_lance(path, version=1), 3)
    assert rest(sl.read_lance(path), snapshot) == rest(sl.read_lance(path, version="first"), snapshot) == ROWS[3:]
    with pytest.raises(ResumeError, match=r"a\.lance was \(ETag version 1 (?s:.*)version= asks for another one"):
        rest(sl.read_lance(path, version=2), snapshot)
    with pytest.raises(ReadError, match=r"can't open the Lance dataset version 9 of .*a\.lance: .*; tag the versions"):
        list(sl.read_lance(path, version=9))


def test_a_version_that_is_gone_is_named_with_the_way_out(path: Path) -> None:
    pipe = sl.read_lance(path)
    _, snapshot = taken(pipe, 3)
    write(path, ROWS[:5], mode="overwrite").cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(ReadError, match=r"can't open the Lance dataset version 1 of .*tag the versions that runs read"):
        rest(pipe, snapshot)
    assert list(pipe) == ROWS[:5]


@pytest.mark.parametrize("versions", [1, 2])
def test_another_dataset_in_its_place_is_refused(path: Path, versions: int) -> None:
    """By its files' names: the number of its version is the same."""
    pipe = sl.read_lance(path)
    _, snapshot = taken(pipe, 3)
    shutil.rmtree(path)
    write(path, ROWS)
    if versions == 1:
        with pytest.raises(ResumeError, match=r"is another version, and nothing says that it begins as the old one"):
            rest(pipe, snapshot)
    else:
        write(path, ROWS, mode="append")
        with pytest.raises(
            ReadError, match=r"was written anew: it was version 1 \(.*, and is version 1 \(.*begin anew"
        ):
            rest(pipe, snapshot)


def test_a_version_that_goes_while_it_is_read(tmp_path: Path) -> None:
    """It has more rows than may be in flight."""
    path = tmp_path / "a.lance"
    lance.write_dataset(pa.table({"n": range(20_000)}), path, max_rows_per_file=1000)
    with sl.read_lance(path).open(on_error="skip") as stream:
        assert next(stream) == {"n": 0}
        shutil.rmtree(path)
        with pytest.raises(ReadError, match="can't open the Lance dataset version 1"):
            list(stream)


def test_a_listing_that_was_edited_is_refused(path: Path) -> None:
    pipe = sl.read_lance(path)
    _, snapshot = taken(pipe, 3)
    edited = sl.Snapshot.from_json(snapshot.to_json().replace("version 1 (", "version x ("))
    with pytest.raises(SnapshotError, match="what it lists of 'read_lance'"):
        rest(pipe, edited)


# What can go wrong ----------------------------------------------------------------------------------------------------


def test_damage_comes_after_the_rows_before_it(path: Path) -> None:
    damaged = lance.dataset(path).get_fragments()[1].metadata.files[0].path
    (path / "data" / damaged).write_bytes(b"x" * 1000)
    with sl.read_lance(path).open() as stream:
        found = list[Any]()
        with pytest.raises(DataError, match=r"a\.lance fragment 1: can't be decoded"):
            found.extend(stream)
    assert found == ROWS[:15]
    with sl.read_lance(path).open(on_error="skip", max_errors=None) as stream:
        assert list(stream) == ROWS[:15] + ROWS[30:]
        assert stream.errors.total == 15


def test_a_panic_of_lance_on_a_damaged_file_is_an_error_that_names_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no `Exception` (pyo3's PanicException), so nothing would take it for an error."""
    pipe = sl.read_lance(path)
    _, snapshot = taken(pipe, 1)
    (manifest,) = (path / "_versions").glob("*.manifest")
    content = bytearray(manifest.read_bytes())
    content[2] = 255  # of the length of what follows
    manifest.write_bytes(content)
    for work in (lambda: list(pipe), lambda: rest(pipe, snapshot)):
        with pytest.raises(ReadError, match=r"panicked, as on a damaged file: range end index"):
            work()
    panic = type("PanicException", (BaseException,), {})

    def panics(*_: object, **__: object) -> Any:
        raise panic("on a page")

    write(path.with_name("b.lance"), ROWS)
    monkeypatch.setattr(lance.LanceFragment, "to_batches", panics)
    with pytest.raises(DataError, match=r"b\.lance fragment 0: can't be decoded: .*panicked.*on a page"):
        list(sl.read_lance(path.with_name("b.lance")))


def test_a_dataset_in_a_store(bucket: Bucket) -> None:
    options = {key: str(value).lower() for key, value in bucket.options.items()} | {"pool_max_idle_per_host": "0"}
    url = f"{bucket.url}/train/a.lance"
    lance.write_dataset(pa.Table.from_pylist(ROWS), url, max_rows_per_file=15, storage_options=options)
    pipe = sl.read_lance(url, storage_options=options).shard(2)
    whole = list(pipe)
    before, snapshot = taken(pipe, 7)
    assert before + rest(pipe, snapshot) == whole
    assert "s3cret" not in snapshot.to_json()


def lance_files() -> list[str]:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))  # noqa: PTH208
    return [target for link in links if ".lance" in (target := os.readlink(link) if os.path.islink(link) else "")]  # noqa: PTH114, PTH115


def test_a_loop_that_is_left_leaves_no_file_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_format, "STEP_ROWS", 1)
    for row in sl.read_lance(path).shard(2):
        assert row == ROWS[0]
        break
    assert lance_files() == []


def test_options_are_checked_where_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"read_lance\(version=\)"):
        sl.read_lance("a", version=0)
    with pytest.raises(PlanTypeError, match=r"storage_options=\) is a mapping of strings"):
        sl.read_lance("a", storage_options={"key": 1})  # type: ignore[dict-item]
    assert "secret" not in repr(sl.read_lance("a", storage_options={"key": "secret"}).plan)
    with pytest.raises(ReadError, match=r"can't open the Lance dataset a: Dataset at path .*a was not found"):
        list(sl.read_lance("a"))
    monkeypatch.setattr("streamline.core.options.find_spec", lambda module: None)
    with pytest.raises(PlanError, match=r"read_lance needs pylance.*streamline-data\[lance\]"):
        sl.read_lance("a")
