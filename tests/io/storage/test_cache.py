"""A cached storage: bytes as they come, from disk the next time, of the version that is there."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import pickle
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ReadError
from streamline.io.storage import object_cache as cache_module
from streamline.io.storage import registry as storages
from streamline.io.storage.base import FoundObject, Storage
from streamline.io.storage.object_cache import CachedStorage, ObjectCache, Spans
from streamline.io.storage.object_cache_folder import CacheFolder
from streamline.io.storage.options import Access
from streamline.io.storage.registry import Storages
from streamline.testing.checks import check_resume
from tests.kit import LONGEST_S
from tests.servers.s3 import Bucket
from tests.serving import serving_objects

URL = "far://host/object"
DATA = bytes(range(256)) * 40


@dataclass
class Remote(Storage):
    """Objects in memory, with a log of what was asked for."""

    objects: dict[str, bytes] = field(default_factory=lambda: {URL: DATA})
    weak: str = ""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    fail_at: int | None = None

    def etag(self, path: str) -> str:
        return f'{self.weak}"{hashlib.md5(self.objects[path]).hexdigest()}"'

    async def stat(self, path: str) -> FoundObject:
        self.log.append(("stat", path))
        await asyncio.sleep(0)
        return FoundObject(path, len(self.objects[path]), self.etag(path))

    async def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        self.log.append(("blocks", path, start, stop))
        if etag is not None and etag != self.etag(path):
            raise ReadError(f"its ETag was {etag} and is {self.etag(path)}")
        data = self.objects[path][:stop]
        while start < len(data):
            await asyncio.sleep(0)
            if self.fail_at is not None and start >= self.fail_at:
                raise ReadError("the server failed")
            yield data[start : start + 1000]
            start += 1000

    async def read(self, path: str, start: int, stop: int | None, etag: str | None = None) -> bytes:
        async with aclosing(self.blocks(path, start, stop, etag)) as blocks:
            return b"".join([block async for block in blocks])

    async def aclose(self) -> None: ...

    def asked(self) -> list[str]:
        """Return what was asked for since the last time, without stats."""
        log, self.log = self.log, []
        return [entry[0] for entry in log if entry[0] != "stat"]

    async def list(self, pattern: str) -> Any:
        raise NotImplementedError


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
async def storage(remote: Remote, tmp_path: Path) -> AsyncIterator[CachedStorage]:
    storage = CachedStorage(remote, ObjectCache(str(tmp_path), None))
    yield storage
    await storage.aclose()
    await storage.cache.aclose()
    await storage.cache.aclose()
    assert not parts(tmp_path)


async def blocks_of(storage: CachedStorage, start: int = 0, stop: int | None = None, etag: str | None = None) -> bytes:
    async with aclosing(storage.blocks(URL, start, stop, etag)) as blocks:
        return b"".join([block async for block in blocks])


def parts(root: Path) -> list[Path]:
    return list(root.rglob("*.part"))


def objects(root: Path) -> list[Path]:
    return list(root.rglob("*.object"))


async def kept(storage: CachedStorage, root: Path) -> int:
    await storage.cache.settle()
    return len(objects(root))


async def test_the_first_pass_streams_and_the_second_reads_the_disk(storage: CachedStorage, remote: Remote) -> None:
    async with aclosing(storage.blocks(URL)) as blocks:
        first = await anext(blocks)
        assert first == DATA[:1000]  # before the rest has been read
        assert first + b"".join([block async for block in blocks]) == DATA
    assert remote.asked() == ["blocks"]
    assert await blocks_of(storage) == DATA
    assert await blocks_of(storage, 5000) == DATA[5000:]
    assert await blocks_of(storage, 5000, 5001) == DATA[5000:5001]
    assert await storage.read(URL, 7, 5007) == DATA[7:5007]
    assert await storage.read(URL, 7, None) == DATA[7:]
    assert await blocks_of(storage, len(DATA)) == b""
    assert remote.asked() == []
    assert (storage.cache.traffic.cache_hits, storage.cache.traffic.cache_misses) == (6, 1)
    assert storage.cache.traffic.cache_bytes == len(DATA) + len(DATA) - 5000 + 1 + 5000 + len(DATA) - 7


async def test_a_known_etag_is_not_asked_for(storage: CachedStorage, remote: Remote) -> None:
    etag = remote.etag(URL)
    for _ in range(2):
        assert await blocks_of(storage, etag=etag) == DATA
    assert remote.log == [("blocks", URL, 0, None)]


async def test_ranges_that_cover_an_object_keep_it(storage: CachedStorage, remote: Remote, tmp_path: Path) -> None:
    spans = [(8000, 10240), (0, 3000), (2000, 5000), (5000, 8000)]
    for at, (start, stop) in enumerate(spans):
        assert await kept(storage, tmp_path) == 0, at
        assert await storage.read(URL, start, stop) == DATA[start:stop]
    assert [entry[0] for entry in remote.log].count("stat") == 1  # for the ETag and the size
    remote.asked()
    assert await blocks_of(storage) == DATA
    assert remote.asked() == []


async def test_a_size_is_asked_for_once_what_was_read_is_one_piece_from_the_start(
    storage: CachedStorage, remote: Remote
) -> None:
    """Of an object of which some ranges are read, a footer and a column, it isn't needed."""
    etag = remote.etag(URL)
    for start, stop in [(5000, 6000), (0, 1000), (1000, 4000)]:
        await storage.read(URL, start, stop, etag)
    assert [entry[0] for entry in remote.log] == ["blocks"] * 3
    for start, stop in [(4000, 5000), (6000, 7000)]:
        await storage.read(URL, start, stop, etag)
    assert [entry[0] for entry in remote.log] == [*["blocks"] * 4, "stat", "blocks"]


async def test_ranges_at_once_keep_it_too(storage: CachedStorage, remote: Remote) -> None:
    etag = remote.etag(URL)
    spans = [(start, min(start + 1000, len(DATA))) for start in range(0, len(DATA), 1000)]
    assert b"".join(await asyncio.gather(*(storage.read(URL, *span, etag) for span in spans))) == DATA
    remote.asked()
    assert await storage.read(URL, 0, None, etag) == DATA
    assert remote.asked() == []


async def test_an_object_that_is_kept_just_after_a_look_is_not_fetched_again(
    storage: CachedStorage, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looked, go_on = CacheFolder.open, threading.Event(), threading.Event()

    def held(folder: CacheFolder, name: str) -> Any:
        found = look(folder, name)
        looked.set()
        assert go_on.wait(LONGEST_S)
        return found

    async with aclosing(storage.blocks(URL)) as first:
        began = await anext(first)
        monkeypatch.setattr(CacheFolder, "open", held)
        second = asyncio.create_task(blocks_of(storage))
        await asyncio.to_thread(looked.wait, LONGEST_S)
        assert began + b"".join([block async for block in first]) == DATA
    while not objects(tmp_path):  # noqa: ASYNC110 - a thread keeps it
        await asyncio.sleep(0.001)
    go_on.set()
    assert await second == DATA
    assert remote.asked() == ["blocks"]


async def test_a_range_is_not_made_larger_and_not_kept(storage: CachedStorage, remote: Remote, tmp_path: Path) -> None:
    for _ in range(2):
        assert await storage.read(URL, 100, 200) == DATA[100:200]
    assert await blocks_of(storage, 5000) == DATA[5000:]
    assert [entry for entry in remote.log if entry[0] == "blocks"] == [
        ("blocks", URL, 100, 200),
        ("blocks", URL, 100, 200),
        ("blocks", URL, 5000, None),
    ]
    assert await kept(storage, tmp_path) == 0


async def test_a_new_version_is_fetched_and_the_old_one_is_kept_for_who_asks(
    storage: CachedStorage, remote: Remote
) -> None:
    old = remote.etag(URL)
    assert await blocks_of(storage) == DATA
    remote.objects[URL] = b"new"
    assert await blocks_of(storage) == b"new"
    assert await blocks_of(storage, etag=old) == DATA
    assert await storage.read(URL, 0, None) == b"new"


async def test_an_object_that_changes_while_it_is_read_is_an_error_and_not_kept(
    storage: CachedStorage, remote: Remote, tmp_path: Path
) -> None:
    with pytest.raises(ReadError, match="its ETag was"):
        await blocks_of(storage, etag='"another"')
    assert await kept(storage, tmp_path) == 0


@pytest.mark.parametrize("at", range(0, len(DATA), 2500))
async def test_what_fails_on_the_way_is_not_kept(
    storage: CachedStorage, remote: Remote, tmp_path: Path, at: int
) -> None:
    remote.fail_at = at
    with pytest.raises(ReadError, match="the server failed"):
        await blocks_of(storage)
    assert await kept(storage, tmp_path) == 0
    remote.fail_at = None
    assert await blocks_of(storage) == DATA
    remote.asked()
    assert await blocks_of(storage) == DATA
    assert remote.asked() == []


async def test_a_reader_that_leaves_keeps_nothing(storage: CachedStorage, tmp_path: Path) -> None:
    async with aclosing(storage.blocks(URL)) as blocks:
        await anext(blocks)
    assert await kept(storage, tmp_path) == 0


async def test_a_cancelled_reader_leaves_nothing_open(storage: CachedStorage) -> None:
    await blocks_of(storage)
    for steps in range(6):
        reading = asyncio.ensure_future(blocks_of(storage))
        for _ in range(steps):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert await blocks_of(storage) == DATA


@pytest.mark.parametrize("weak", [True, False])
async def test_without_a_strong_etag_nothing_is_kept_and_that_is_said_once(
    storage: CachedStorage, remote: Remote, tmp_path: Path, weak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    remote.weak = "W/" if weak else ""
    for _ in range(2):
        assert await blocks_of(storage) == DATA
        assert await storage.read(URL, 5, 10) == DATA[5:10]
    assert await kept(storage, tmp_path) == (not weak)
    assert len(caplog.records) == weak


async def test_a_damaged_file_is_fetched_anew(
    storage: CachedStorage, remote: Remote, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await blocks_of(storage)
    await storage.cache.settle()
    (path,) = objects(tmp_path)
    os.truncate(path, 5000)
    remote.asked()
    assert await blocks_of(storage) == DATA
    assert remote.asked() == ["blocks"]
    assert "damaged" in caplog.text
    assert await blocks_of(storage) == DATA
    assert remote.asked() == []


async def test_a_file_that_is_cut_while_it_is_read_is_completed_from_afar(
    storage: CachedStorage, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "BLOCK_BYTES", 1000)
    await blocks_of(storage)
    await storage.cache.settle()
    (path,) = objects(tmp_path)
    for read in (blocks_of(storage), storage.read(URL, 0, None)):
        reading = asyncio.ensure_future(read)
        while storage.cache.traffic.cache_bytes < 2000:  # noqa: ASYNC110 - it is a task of this loop
            await asyncio.sleep(0)
        os.truncate(path, 3500)
        assert await reading == DATA
        storage.cache.traffic.cache_bytes = 0
        path.unlink(missing_ok=True)
        await blocks_of(storage)
        storage.cache.traffic.cache_bytes = 0


async def test_an_object_that_is_evicted_under_its_reader_is_read_on(
    storage: CachedStorage, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "BLOCK_BYTES", 1000)
    await blocks_of(storage)
    remote.asked()
    async with aclosing(storage.blocks(URL)) as blocks:
        data = await anext(blocks)
        await storage.cache.settle()
        (path,) = objects(tmp_path)
        path.unlink()
        assert data + b"".join([block async for block in blocks]) == DATA
    assert remote.asked() == []


async def test_what_another_process_is_writing_is_read_past_the_cache(
    storage: CachedStorage, remote: Remote, tmp_path: Path
) -> None:
    async with AsyncExitStack() as closing:
        other = CachedStorage(remote, ObjectCache(str(tmp_path), None))
        closing.push_async_callback(other.cache.aclose)
        blocks = await closing.enter_async_context(aclosing(storage.blocks(URL)))
        await anext(blocks)
        await storage.cache.settle()  # a part that is there already, but not locked yet, could be anyone's
        assert parts(tmp_path)
        assert await blocks_of(other) == DATA
        assert await kept(other, tmp_path) == 0
        async for _ in blocks:
            pass
        assert await kept(storage, tmp_path) == 1  # only now: a thread writes it down
        assert await blocks_of(other) == DATA
        assert other.cache.traffic.cache_hits == 1


async def test_a_full_disk_stops_nothing(
    storage: CachedStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def full(*_: Any) -> int:
        nonlocal calls
        calls += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        assert await blocks_of(storage) == DATA
    assert (await kept(storage, tmp_path), calls) == (0, 1)
    assert [record.message for record in caplog.records if "No space left" in record.message]
    assert len(caplog.records) == 1


async def test_objects_read_in_part_do_not_hold_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "IDLE_PARTS", 5)
    remote = Remote({f"far://{at}": DATA for at in range(50)})
    storage = CachedStorage(remote, ObjectCache(str(tmp_path), None))
    for path in remote.objects:
        await storage.read(path, 10, 20)
    await storage.cache.open("f" * 64)
    assert len(storage.cache._parts) == 5
    await storage.cache.aclose()
    assert not parts(tmp_path)


async def test_an_empty_object_is_kept(storage: CachedStorage, remote: Remote) -> None:
    remote.objects[URL] = b""
    assert await blocks_of(storage) == b""
    remote.asked()
    assert await blocks_of(storage) == b""
    assert remote.asked() == []


async def test_a_start_after_the_end_is_an_error_from_disk_too(storage: CachedStorage) -> None:
    await blocks_of(storage)
    with pytest.raises(ReadError, match="has 10,240 bytes, expected more than 10,241"):
        await blocks_of(storage, len(DATA) + 1)
    with pytest.raises(ReadError, match="ends at byte 10,240, expected 10,241"):
        await storage.read(URL, 0, len(DATA) + 1)


async def test_a_folder_that_cannot_be_made_is_an_error(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = CachedStorage(remote, ObjectCache(str(tmp_path / "file"), None))
    with pytest.raises(ReadError, match="name another folder"):
        await blocks_of(storage)
    await storage.cache.aclose()


async def test_local_files_are_never_kept(tmp_path: Path) -> None:
    made = Storages(Access(cache_dir=tmp_path / "cache"))
    assert not isinstance(made.of("/some/file"), CachedStorage)
    assert isinstance(made.of("http://host/file"), CachedStorage)
    await made.aclose()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"cache_dir": 5}, PlanTypeError, "expected cache_dir as str"),
        ({"cache_dir": b"x"}, PlanTypeError, "expected cache_dir as str"),
        ({"cache_dir": ""}, PlanError, "folder on local disk"),
        ({"cache_dir": "s3://bucket/cache"}, PlanError, "folder on local disk"),
        ({"cache_dir": "x", "cache_max_bytes": 0}, PlanError, "cache_max_bytes is at least 1"),
        ({"cache_dir": "x", "cache_max_bytes": 1.5}, PlanTypeError, "cache_max_bytes is an integer"),
        ({"cache_max_bytes": 5}, PlanError, "needs a cache_dir="),
    ],
)
def test_options_are_checked_where_they_are_written(options: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        Access(**options)


def test_access_with_a_cache_pickles(tmp_path: Path) -> None:
    access = Access(cache_dir=tmp_path, cache_max_bytes=5)
    assert pickle.loads(pickle.dumps(access)) == access


# Through a pipeline ---------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Any]:
    with serving_objects(
        {f"/{part}.txt": b"".join(b"%d-%d\n" % (part, i) for i in range(300)) for part in range(4)}
    ) as made:
        yield made


@pytest.mark.one_in(2, 1)
def test_a_second_run_reads_the_disk_whatever_runs_it(served: Any, tmp_path: Path, backend: Any) -> None:
    pipe = sl.read_lines(f"{served.base}/{{0..3}}.txt", cache_dir=tmp_path, cache_max_bytes=10**6).shard(4)
    with pipe.open(backend=backend) as stream:
        first = list(stream)
    assert len(first) == 1200
    assert len(objects(tmp_path)) == 4
    served.sent.clear()
    with pipe.open(backend=backend) as stream:
        assert list(stream) == first
        (reads,) = stream.stats().reads
    assert (reads.cache_hits, reads.cache_misses, reads.cache_bytes) == (4, 0, sum(map(len, served.objects.values())))
    assert "bytes from disk" in str(stream.stats())
    assert sum(served.sent) <= 8  # the first byte of each object, to learn its ETag


def columnar() -> Iterator[tuple[str, bytes]]:
    numbers = np.random.default_rng(0).random(30_000)
    plain = pa.table({"a": numbers, "b": numbers})
    for table in (plain, plain.append_column("d", pa.array(["x", "y", "z"] * 10_000).dictionary_encode())):
        file = io.BytesIO()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=10_000)
        yield "read_arrow", file.getvalue()
    file = io.BytesIO()
    pq.write_table(plain, file, row_group_size=10_000)
    yield "read_parquet", file.getvalue()


@pytest.mark.parametrize(("read", "data"), list(columnar()), ids=["arrow", "arrow with a dictionary", "parquet"])
def test_a_file_of_which_all_columns_are_read_is_kept(served: Any, tmp_path: Path, read: str, data: bytes) -> None:
    served.objects["/table"] = data
    pipe = getattr(sl, read)(f"{served.base}/table", cache_dir=tmp_path, batch_rows=10_000)
    found = []
    for _ in range(2):
        with pipe.open() as stream:
            found.append(list(stream))
            (reads,) = stream.stats().reads
    assert found[0] == found[1]
    assert sum(map(len, found[0])) == 30_000
    assert (reads.requests, reads.cache_misses) == (1, 0)  # the look at its version


def test_a_resume_is_exact_with_and_without_what_is_kept(served: Any, tmp_path: Path) -> None:
    served.objects.update({path: data[:20] for path, data in served.objects.items()})
    check_resume(sl.read_lines(f"{served.base}/{{0..1}}.txt", cache_dir=tmp_path, cache_max_bytes=60).shard(2))


def test_a_store_whose_listing_tells_etags_is_asked_for_nothing_but_the_listing(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_all({f"d/{part}.txt": b"one\ntwo\n" * (part + 1) for part in range(3)})
    pipe = sl.read_lines(f"{bucket.url}/d/*", storage_options=bucket.options, cache_dir=tmp_path).shard(3)
    found, requests = [], []
    for _ in range(2):
        with pipe.open() as stream:
            found.append(list(stream))
            (reads,) = stream.stats().reads
            requests.append(reads.requests)
    assert found[0] == found[1]
    assert requests == [1 + 3, 1]  # the listing, which tells sizes, too; and each object once
    assert (reads.cache_hits, reads.cache_misses) == (3, 0)
    bucket.put_all({"d/1.txt": b"new\n"})
    with pipe.open() as stream:
        assert "new" in list(stream)


def test_the_same_name_at_another_endpoint_is_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def scope(**options: str) -> str:
        return storages._where(Access(storage_options=options))

    assert scope(endpoint="http://a") != scope(endpoint="http://b") != scope()
    assert scope(aws_endpoint_url="http://a") != scope(azure_storage_account_name="a")
    assert scope(secret_access_key="a") == scope(secret_access_key="b")
    before = scope()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://c")
    assert scope() != before


def test_spans_are_the_set_of_their_bytes() -> None:
    draw, size = random.Random(0), 12
    for _ in range(1000):
        spans, there = Spans(), set[int]()
        for _ in range(draw.randint(0, 12)):
            start, stop = draw.randint(0, size), draw.randint(0, size)
            spans.add(start, stop)
            there |= set(range(start, stop))
            assert spans.from_start == (bool(there) and there == set(range(len(there))))
            assert [spans.cover(end) for end in range(size + 1)] == [
                set(range(end)) <= there for end in range(size + 1)
            ]
