"""Jobs that write shards to object stores: moto's S3, Azurite, and a store that answers as a test says."""

from __future__ import annotations

import json
import logging
import urllib.request
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import IO, Any, ClassVar

import anyio
import pytest

import streamline as sl
from streamline.errors import PlanError, ReadError, WriteError
from streamline.io.storage.base import FoundObject, Storage
from streamline.io.storage.object_store import ObjectStorage
from streamline.io.storage.options import HttpOptions
from streamline.io.storage.output_folder import _StoreFolder
from streamline.io.storage.registry import storage
from tests.servers.s3 import Bucket
from tests.servers.scripted_store import Answer, Handler, ScriptedStore, refusal

ROWS = [{"id": number} for number in range(12)]


def keys(bucket: Bucket) -> list[str]:
    return sorted(meta["path"] for meta in bucket.store.list().collect())


def test_in_s3_a_reader_takes_the_folder_or_its_manifest(bucket: Bucket) -> None:
    check_reader(bucket)


def test_in_azure_a_reader_takes_the_folder_or_its_manifest(container: Bucket) -> None:
    check_reader(container)


def check_reader(bucket: Bucket) -> None:
    folder, options = f"{bucket.url}/a/out", {"storage_options": bucket.options}
    written = sl.write_jsonl(sl.from_items(ROWS), folder, shard_bytes=30, storage_options=bucket.options)
    assert (written.shards, written.items) == (3, 12)
    assert keys(bucket) == ["a/out/manifest.json", *(f"a/out/shard-00000-{number:06d}.jsonl" for number in range(3))]
    for path in (folder, f"{folder}/", f"{folder}/manifest.json"):
        assert list(sl.read_jsonl(path, **options)) == ROWS  # type: ignore[arg-type]
    bucket.put_all({"a/out/shard-00000-000009.jsonl": b"{}\n"})
    assert list(sl.read_jsonl(folder, **options)) == ROWS  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="is given twice"):
        list(sl.read_jsonl(f"{folder}/*", **options))  # type: ignore[arg-type]
    bucket.put_all({"a/out/shard-00000-000001.jsonl": b"{}\n"})
    with pytest.raises(ReadError, match=r"has 3 bytes, and .* were written"):
        list(sl.read_jsonl(folder, **options))  # type: ignore[arg-type]


def test_a_folder_without_a_manifest_is_a_directory(bucket: Bucket) -> None:
    bucket.put(out__x=b"1", out__manifest=b"{}")
    with pytest.raises(PlanError, match=r"is a directory: write \S+/out/\* .*\S+/out/\*\*"):
        list(sl.read_jsonl(f"{bucket.url}/out/", storage_options=bucket.options))
    with pytest.raises(ReadError, match="there is no such object"):
        list(sl.read_jsonl(f"{bucket.url}/out", storage_options=bucket.options))
    with pytest.raises(WriteError, match=r"isn't empty, .*it holds manifest and 1 more"):
        sl.from_items(ROWS).write(f"{bucket.url}/out", storage_options=bucket.options)


def test_in_s3_a_job_that_was_thought_dead_overwrites_nothing_that_counts(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_late_job(bucket, monkeypatch)


def test_in_azure_a_job_that_was_thought_dead_overwrites_nothing_that_counts(
    container: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_late_job(container, monkeypatch)


def check_late_job(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job goes on while another has taken its place, which writes other shards: of another size."""
    folder, pipe, real = f"{bucket.url}/out", sl.from_items(ROWS), _StoreFolder.commit

    def late(self: _StoreFolder, shard: Any, name: str) -> None:
        if name.endswith("1.jsonl"):
            monkeypatch.setattr(_StoreFolder, "commit", real)
            pipe.write(folder, shard_bytes=20, resume=True, storage_options=bucket.options)
        real(self, shard, name)

    monkeypatch.setattr(_StoreFolder, "commit", late)
    with pytest.raises(WriteError, match="was written by another job meanwhile"):
        pipe.write(folder, shard_bytes=30, storage_options=bucket.options)
    assert "out/shard-00000-000001.jsonl" in keys(bucket)
    assert "out/shard-00000-000001-1.jsonl" in keys(bucket)
    assert list(sl.read_jsonl(folder, storage_options=bucket.options)) == ROWS


def test_a_start_that_was_overtaken_removes_no_shard_of_the_later_one(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has replaced the manifest, and is about to remove what doesn't count, when another start replaces that."""
    folder, pipe, real, looked = f"{bucket.url}/out", sl.from_items(ROWS), _StoreFolder.names, list[str]()

    def late(self: _StoreFolder) -> dict[str, int | None]:
        looked.append(self.path)
        if len(looked) == 2:
            pipe.write(folder, shard_bytes=20, resume=True, storage_options=bucket.options)
        return real(self)

    monkeypatch.setattr(_StoreFolder, "names", late)
    with pytest.raises(WriteError, match="was written by another job meanwhile"):
        pipe.write(folder, shard_bytes=30, storage_options=bucket.options)
    assert list(sl.read_jsonl(folder, storage_options=bucket.options)) == ROWS


def test_a_resume_writes_beside_what_the_job_before_may_still_write(bucket: Bucket) -> None:
    def fails(row: Any) -> Any:
        if row["id"] == 7 and not mended:
            raise ValueError("row 7")
        return row

    mended: list[bool] = []
    pipe, folder = sl.from_items(ROWS).map(fails), f"{bucket.url}/out"
    with pytest.raises(ValueError, match="row 7") as caught:
        pipe.write(folder, shard_bytes=30, storage_options=bucket.options)
    assert "in 1 whole shard:" in caught.value.__notes__[-1]
    bucket.put_all({"out/shard-00000-000001.jsonl": b"of a kill"})
    mended.append(True)
    pipe.write(folder, shard_bytes=30, storage_options=bucket.options, resume=True)
    assert keys(bucket)[1:] == [f"out/shard-00000-00000{name}.jsonl" for name in ("0", "1-1", "2-1")]
    assert list(sl.read_jsonl(folder, storage_options=bucket.options)) == ROWS


def test_an_upload_that_fails_leaves_no_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.io.storage.object_store.PART_BYTES", 5 * 2**20)

    class Broken(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError("a disk that fails")
            return super().read(size)

    async def upload() -> None:
        storage = ObjectStorage(bucket.options, HttpOptions(retries=0))
        await storage.upload(f"{bucket.url}/x", Broken(bytes(11 * 2**20)), 11 * 2**20)

    with pytest.raises(WriteError, match=r"can't write: .*a disk that fails"):
        anyio.run(upload)
    assert keys(bucket) == []
    address = f"{bucket.options['endpoint']}/{bucket.url.removeprefix('s3://')}?uploads"
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert b"<Upload>" not in answer.read()


def stored(handler: Handler) -> None:
    """Take what is put, as a store does."""
    length = int(handler.headers["Content-Length"])
    handler.store.objects[handler.path.split("/", 2)[-1]] = handler.rfile.read(length)
    handler.send_response(200)
    handler.send_header("ETag", '"v1"')
    handler.send_header("Connection", "close")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def stored_unheard(handler: Handler) -> None:
    """Take what is put, and break off before the answer."""
    length = int(handler.headers["Content-Length"])
    handler.store.objects[handler.path.split("/", 2)[-1]] = handler.rfile.read(length)


CHANGED = refusal(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")


def put(scripted: ScriptedStore, *script: Answer) -> dict[str, str]:
    """Put a manifest into a store that answers so."""
    scripted.script[:] = script

    async def replace() -> dict[str, str]:
        storage = ObjectStorage(scripted.options, HttpOptions(retries=2))
        return await storage.replace("s3://bucket/out/manifest.json", b"{}", None)

    return anyio.run(replace)


def test_a_busy_store_is_asked_again(scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.io.storage.retry.BACKOFF_S", 0.0)
    assert put(scripted, refusal(503, "SlowDown"), refusal(500), stored) == {"e_tag": '"v1"'}
    with pytest.raises(WriteError, match=r"can't write: .*failed 3 times in a row.*503"):
        put(scripted, *[refusal(503, "SlowDown")] * 3)


def test_an_answer_that_is_lost_is_no_other_job(scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest was written, the answer never came, and the second try finds it there."""
    monkeypatch.setattr("streamline.io.storage.retry.BACKOFF_S", 0.0)
    assert put(scripted, stored_unheard, CHANGED) == {"e_tag": '"v1"'}
    scripted.objects["out/manifest.json"] = b"another's"
    with pytest.raises(WriteError, match="was written by another job meanwhile"):
        put(scripted, CHANGED)


def test_what_a_store_refuses_is_named(scripted: ScriptedStore) -> None:
    with pytest.raises(WriteError, match=r"can't write: s3://bucket/out/manifest\.json: .*403"):
        put(scripted, refusal(403, "AccessDenied"))


def test_no_secret_is_in_a_manifest(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "streamline"):
        sl.from_items(ROWS).write(f"{bucket.url}/out", storage_options=bucket.options)
    manifest = bytes(bucket.store.get("out/manifest.json").bytes())
    assert json.loads(manifest)["body"]["complete"] is True
    assert b"s3cret" not in manifest
    assert "s3cret" not in caplog.text


def test_a_full_disk_of_this_machine_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(WriteError, match=r"temporary files \(TMPDIR\)"):
        sl.from_items(ROWS).write(f"{bucket.url}/out", storage_options=bucket.options)


class Memory(Storage):
    """A storage of a user's own that can be written to."""

    objects: ClassVar[dict[str, bytes]] = {}

    def __init__(self, access: Any) -> None:
        pass

    async def list(self, pattern: str) -> list[FoundObject]:
        return [FoundObject(path, len(data)) for path, data in sorted(self.objects.items()) if fnmatch(path, pattern)]

    async def stat(self, path: str) -> FoundObject:
        if path not in self.objects:
            raise ReadError(f"no {path}")
        return FoundObject(path, len(self.objects[path]))

    async def blocks(self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None) -> Any:
        yield self.objects[path][start:stop]

    async def upload(self, path: str, file: IO[bytes], size: int) -> None:
        file.seek(0)
        self.objects[path] = file.read()

    async def look(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        return None if path not in self.objects else (self.objects[path], {})

    async def replace(self, path: str, content: bytes, version: dict[str, str] | None) -> dict[str, str]:
        self.objects[path] = content
        return {}


def test_a_storage_of_a_users_own_is_written_to_and_one_that_reads_only_says_so() -> None:
    storage("memory")(Memory)
    sl.from_items(ROWS).write("memory://out", shard_bytes=30)
    assert sorted(Memory.objects)[0] == "memory://out/manifest.json"
    for path in ("memory://out", "memory://out/manifest.json"):
        assert list(sl.read_jsonl(path)) == ROWS
    with pytest.raises(ReadError, match="no memory://other"):
        list(sl.read_jsonl("memory://other"))
    storage("readonly")(type("ReadOnly", (Memory,), {"look": Storage.look}))
    with pytest.raises(WriteError, match="readonly:// can't be written to"):
        sl.from_items(ROWS).write("readonly://out")
