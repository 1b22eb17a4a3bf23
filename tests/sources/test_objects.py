"""Pipelines over an object store: the same items everywhere, exact resumes, and what has changed between runs."""

import gzip
import json
import pickle
from typing import Any, cast

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import PlanError, ReadError, ResumeError
from streamline.io.storage.paths import given_paths
from streamline.testing.checks import check_resume
from tests.servers.s3 import Bucket

ROWS = [{"id": at} for at in range(24)]


@pytest.fixture
def rows(bucket: Bucket) -> Bucket:
    for at in range(4):
        text = "".join(json.dumps(row) + "\n" for row in ROWS[at::4]).encode()
        bucket.put_all({f"d/p-{at}.jsonl" + ".gz" * (at == 3): gzip.compress(text) if at == 3 else text})
    return bucket


def pipe(bucket: Bucket, pattern: str = "d/p-*") -> Any:
    return sl.read_jsonl(f"{bucket.url}/{pattern}", storage_options=bucket.options).shard(2)


@pytest.mark.one_in(2)
def test_the_same_rows_come_wherever_workers_run(rows: Bucket, backend: Backend) -> None:
    with pipe(rows).open(backend=backend) as stream:
        got = list(stream)
    with pipe(rows).open() as stream:
        assert got == list(stream)
    assert sorted(row["id"] for row in got) == list(range(24))


@pytest.mark.long
def test_a_resume_is_exact_at_every_row(bucket: Bucket) -> None:
    bucket.put_all({"d/p-0": b'{"a":1}\n\n2\n', "d/p-1": b"", "d/p-2": gzip.compress(b"3\n4\n"), "d/p-3": b"5\n6"})
    check_resume(pipe(bucket), generations=2)


def test_one_object_is_split_at_bytes(bucket: Bucket) -> None:
    bucket.put_all({"x.txt": b"".join(b"%d\n" % at for at in range(50))})
    lines = sl.read_lines(f"{bucket.url}/x.txt", storage_options=bucket.options).shard(3)
    with lines.open() as stream:
        assert sorted(map(int, stream)) == list(range(50))


def half(bucket: Bucket, pattern: str = "d/p-*") -> tuple[list[Any], sl.Snapshot]:
    with pipe(bucket, pattern).open() as stream:
        return [next(stream) for _ in range(8)], sl.Snapshot.from_json(stream.snapshot().to_json())


def rest(bucket: Bucket, snapshot: sl.Snapshot, **options: Any) -> list[Any]:
    with pipe(bucket).open(resume=snapshot, **options) as stream:
        return list(stream)


def test_a_snapshot_lists_sizes_and_etags_and_no_secret(rows: Bucket) -> None:
    _, snapshot = half(rows)
    assert all(entry["size"] and entry["etag"] for entry in cast(Any, snapshot.listing))
    text = snapshot.to_json() + repr(pipe(rows)) + repr(pipe(rows).plan)
    assert "s3cret" not in text
    assert pickle.loads(pickle.dumps(rows.options)) == rows.options


def test_an_object_replaced_between_runs_is_refused_with_both_etags(rows: Bucket) -> None:
    _, snapshot = half(rows)
    old = next(entry["etag"] for entry in cast(Any, snapshot.listing) if entry["path"].endswith("p-1.jsonl"))
    rows.put_all({"d/p-1.jsonl": b'{"id": 0}\n' * 99})  # longer: a local file may grow, an object is another one
    for accept in ([], ["read_jsonl.changed_files"]):
        with pytest.raises(ResumeError, match=r"p-1\.jsonl was .*ETag") as caught:
            rest(rows, snapshot, accept=accept)
        assert old in str(caught.value)
        assert "is another version" in str(caught.value)


def test_an_object_replaced_between_opening_and_reading_is_an_error(rows: Bucket) -> None:
    opened = pipe(rows).open()
    rows.put_all({"d/p-0.jsonl": b'{"id": 0}\n'})
    with pytest.raises(ReadError, match=r"p-0\.jsonl has changed, at byte 0: its ETag was"), opened as stream:
        list(stream)


def test_an_object_deleted_between_opening_and_reading_is_an_error(rows: Bucket) -> None:
    opened = pipe(rows).open()
    rows.remove("d/p-0.jsonl")
    with pytest.raises(ReadError, match=r"p-0\.jsonl: .*there is no such object"), opened as stream:
        list(stream)


def test_new_objects_are_refused_or_left_to_the_next_epoch(rows: Bucket) -> None:
    before, snapshot = half(rows)
    rows.put_all({"d/p-00.jsonl": b'{"id": 99}\n'})
    with pytest.raises(ResumeError, match=r"new file .*p-00\.jsonl"):
        rest(rows, snapshot)
    assert not pipe(rows).explain(snapshot).fits
    assert pipe(rows).explain(snapshot, new_files="next_epoch").fits
    got = before + rest(rows, snapshot, new_files="next_epoch")
    assert sorted(row["id"] for row in got) == list(range(24))
    assert [*before, *pipe(rows).debug(resume=snapshot, new_files="next_epoch")] == got


def test_the_next_epoch_of_a_loader_has_the_new_objects(rows: Bucket) -> None:
    before, snapshot = half(rows)
    rows.put_all({"d/p-00.jsonl": b'{"id": 99}\n'})
    with pipe(rows).loader(resume=snapshot, new_files="next_epoch") as loader:
        assert sorted(row["id"] for row in [*before, *loader]) == list(range(24))
        assert sorted(row["id"] for row in loader) == [*range(24), 99]


@pytest.mark.parametrize("new_files", ["later", "", None, 3, ["next_epoch"]])
def test_new_files_says_one_of_two(new_files: Any) -> None:
    with pytest.raises(PlanError, match=r"open\(new_files=\) is one of 'refuse', 'next_epoch', got"):
        sl.read_lines(__file__).open(new_files=new_files)


def test_new_files_is_for_sources_of_files() -> None:
    with pytest.raises(PlanError, match="from_items reads no list of files"):
        sl.from_items([1]).open(new_files="next_epoch")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://", "expected s3://BUCKET/KEY"),
        ("s3://b", "expected s3://BUCKET/KEY"),
        ("s3://b/", "expected s3://BUCKET/KEY"),
        ("s3:///k", "expected s3://BUCKET/KEY"),
        ("s3://b*/k", "a bucket's name can't be a glob"),
        ("gcs://b/k", "did you mean gs://"),
        (
            "hdfs://b/k",
            r"hdfs:// can't be read: .*s3://, gs:// or az:// \(they need pip install 'streamline-data\[stores\]'\)",
        ),
    ],
)
def test_paths_of_stores_that_lead_nowhere_are_refused_where_they_are_written(path: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        given_paths(path)
