"""Object stores over a real S3 server: listed, looked at, streamed."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import anyio
import pytest

from streamline.errors import PlanError, ReadError
from streamline.io.storage import object_store as objects
from streamline.io.storage.object_store import ObjectStorage
from streamline.io.storage.options import Access
from streamline.io.storage.resolve import find
from tests.servers.s3 import Bucket

KEYS = ["a b", "a%20b", "ünï/日本", "a+b", "a#b", "a?b", "[z]", "{w}", "a\\b", "~x", "q=1&r", "'quoted\"", "a..b"]
"""Keys that a URL, a glob or a shell would take for something else."""

COUNT = 1001
"""Objects: a page of a listing, and one more."""


@pytest.fixture
async def storage(bucket: Bucket) -> AsyncIterator[ObjectStorage]:
    made = ObjectStorage(bucket.options)
    yield made
    await made.aclose()


async def paths(storage: ObjectStorage, pattern: str) -> list[str]:
    return [found.path for found in await storage.list(pattern)]


async def all_of(storage: ObjectStorage, path: str, *span: Any) -> bytes:
    async with aclosing(storage.blocks(path, *span)) as blocks:
        return b"".join([block async for block in blocks])


async def test_odd_keys_are_listed_and_read_as_they_are(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put_all({f"d/{key}": key.encode() for key in KEYS})
    assert await paths(storage, f"{bucket.url}/d/**") == sorted(f"{bucket.url}/d/{key}" for key in KEYS)
    for key in KEYS:
        assert await all_of(storage, f"{bucket.url}/d/{key}") == key.encode()


async def test_globs_stop_at_a_slash(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put_all(dict.fromkeys(["top", "d/a1", "d/a2", "d/b1", "d/deep/a1", "d/deep/er/a1", "dx/a1"], b"x"))
    for pattern, expected in {
        "*": ["top"],
        "d/a*": ["d/a1", "d/a2"],
        "d/?1": ["d/a1", "d/b1"],
        "d/[!a]*": ["d/b1"],
        "d/*/a1": ["d/deep/a1"],
        "*/a1": ["d/a1", "dx/a1"],
        "d/**/a1": ["d/a1", "d/deep/a1", "d/deep/er/a1"],
        "d/**": ["d/a1", "d/a2", "d/b1", "d/deep/a1", "d/deep/er/a1"],
        "**/er/*": ["d/deep/er/a1"],
        "none/*": [],
    }.items():
        assert await paths(storage, f"{bucket.url}/{pattern}") == [f"{bucket.url}/{key}" for key in expected], pattern


async def test_marks_of_directories_are_no_objects(bucket: Bucket, storage: ObjectStorage, s3_endpoint: str) -> None:
    bucket.put_all({"d/a": b"a", "d/empty": b"", "d/sub/b": b"b"})
    for mark in ("d/", "d/sub/", "d/void/"):
        put_raw(f"{s3_endpoint}/{bucket.url.removeprefix('s3://')}/{mark}")
    assert await paths(storage, f"{bucket.url}/d/*") == [f"{bucket.url}/d/a", f"{bucket.url}/d/empty"]
    deep = [f"{bucket.url}/d/{key}" for key in ("a", "empty", "sub/b")]
    assert await paths(storage, f"{bucket.url}/d/**") == await paths(storage, f"{bucket.url}/**") == deep


def put_raw(url: str) -> None:
    request = urllib.request.Request(url, b"", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request, timeout=200):
        pass


async def test_a_key_that_obstore_can_not_name_is_not_passed_over(
    bucket: Bucket, storage: ObjectStorage, s3_endpoint: str
) -> None:
    put_raw(f"{s3_endpoint}/{bucket.url.removeprefix('s3://')}/d//x")
    with pytest.raises(ReadError, match=r"s3://.*/d: a key with an empty part"):
        await storage.list(f"{bucket.url}/d/**")


@pytest.mark.parametrize("key", ["a//b", "a/../b", "a/./b"])
def test_a_key_that_obstore_can_not_name_is_refused_at_the_first_try(key: str) -> None:
    with pytest.raises(ReadError, match=r"key with an empty part, '\.' or '\.\.'"):
        find((f"s3://bucket/{key}",), Access(storage_options={"skip_signature": True}))


def test_a_container_without_its_account_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(PlanError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        find(("az://container/key",), Access())


@pytest.mark.long
def test_more_objects_than_a_page_holds_are_all_found(bucket: Bucket) -> None:
    async def fill() -> None:
        for start in range(0, COUNT, 100):
            numbers = range(start, min(start + 100, COUNT))
            await asyncio.gather(*(bucket.store.put_async(f"d/{at:05}", b"%d" % at) for at in numbers))

    anyio.run(fill)
    found = find((f"{bucket.url}/d/*",), Access(storage_options=bucket.options))
    assert [one.path for one in found] == [f"{bucket.url}/d/{at:05}" for at in range(COUNT)]
    assert all(one.size and one.etag for one in found)
    assert find((f"{bucket.url}/**",), Access(storage_options=bucket.options)) == found


async def test_what_is_looked_at_has_size_and_etag(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put(a=b"abc")
    found = await storage.stat(f"{bucket.url}/a")
    assert (found.path, found.size) == (f"{bucket.url}/a", 3)
    assert found.etag == '"900150983cd24fb0d6963f7d28e17f72"'  # MD5, as S3 has it
    assert await storage.list(f"{bucket.url}/*") == [found]


@pytest.mark.parametrize("span", [(0, None), (0, 10), (1, None), (5, 5), (9, 10), (10, None), (3, 100)])
async def test_any_span_is_read(bucket: Bucket, storage: ObjectStorage, span: tuple[int, int | None]) -> None:
    bucket.put(a=b"0123456789")
    assert await all_of(storage, f"{bucket.url}/a", *span) == b"0123456789"[slice(*span)]


async def test_an_empty_object_has_no_blocks(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put(a=b"")
    assert await all_of(storage, f"{bucket.url}/a") == await all_of(storage, f"{bucket.url}/a", 0, 7) == b""
    with pytest.raises(ReadError, match="ends at byte 0, expected 7"):
        await storage.read(f"{bucket.url}/a", 0, 7)


async def test_a_byte_after_the_end_is_an_error(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put(a=b"abc")
    with pytest.raises(ReadError, match=r"/a has 3 bytes, expected more than 4: has it been replaced\?"):
        await all_of(storage, f"{bucket.url}/a", 4)


async def test_blocks_are_of_bounded_size(bucket: Bucket, storage: ObjectStorage) -> None:
    data = bytes(range(256)) * 16 * 1024
    bucket.put(a=data)
    async with aclosing(storage.blocks(f"{bucket.url}/a")) as blocks:
        sizes = [len(block) async for block in blocks]
    assert len(sizes) >= 3
    assert max(sizes) <= 2 * 2**20
    assert await storage.read(f"{bucket.url}/a", 3, len(data) - 3) == data[3:-3]


async def test_a_replaced_object_names_both_etags(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put(a=b"abc")
    before = await storage.stat(f"{bucket.url}/a")
    bucket.put(a=b"xyz")
    now = await storage.stat(f"{bucket.url}/a")
    with pytest.raises(ReadError, match=rf"/a has changed, at byte 1: its ETag was {before.etag} and is {now.etag}"):
        await all_of(storage, f"{bucket.url}/a", 1, None, before.etag)


async def test_a_missing_object_says_so(bucket: Bucket, storage: ObjectStorage) -> None:
    path = f"{bucket.url}/none"
    for ask in (storage.stat(path), storage.read(path, 0, 1), all_of(storage, path)):
        with pytest.raises(ReadError, match=rf"{path}: .*404.*there is no such object"):
            await ask


async def test_a_missing_bucket_says_so(storage: ObjectStorage, bucket: Bucket) -> None:
    for ask in (storage.list("s3://nobody/*"), storage.list("s3://nobody/**"), all_of(storage, "s3://nobody/a")):
        with pytest.raises(ReadError, match=r"s3://nobody.*NoSuchBucket.*there is no such bucket"):
            await ask


class Refusing:
    """A store that refuses, and holds on to its errors, as obstore's threads do until they are asked again."""

    def __init__(self) -> None:
        self.kept: list[Exception] = []

    async def _refuse(self, *asked: Any, **options: Any) -> Any:
        self.kept.append(FileNotFoundError("404 Not Found"))
        raise self.kept[-1]

    get_async = head_async = list_with_delimiter_async = _refuse


@pytest.mark.parametrize("ask", ["read", "stat", "list", "_exists"])
async def test_an_error_that_the_client_keeps_has_no_frames(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold on to the store, and its connection."""
    store = Refusing()
    monkeypatch.setattr(objects, "open_store", lambda *which: store)
    storage = ObjectStorage()
    with suppress(ReadError):
        await getattr(storage, ask)("s3://bucket/a", *([0, 1] if ask == "read" else []))
    await storage.aclose()
    assert [error.__traceback__ for error in store.kept] == [None]


async def test_reading_may_be_cancelled_anywhere(bucket: Bucket, storage: ObjectStorage) -> None:
    """No request outlives its task, and the storage serves the next."""
    data = bytes(3_000_000)
    bucket.put(a=data)
    path = f"{bucket.url}/a"
    for steps in range(0, 60, 3):
        task = asyncio.ensure_future(all_of(storage, path))
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        task.cancel()
        await asyncio.wait([task])
    assert await all_of(storage, path) == data


async def test_a_reader_may_leave_in_the_middle(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.put(a=bytes(5_000_000))
    async with aclosing(storage.blocks(f"{bucket.url}/a")) as blocks:
        await anext(blocks)


def test_globs_braces_and_plain_objects_are_found_together(bucket: Bucket) -> None:
    bucket.put_all(dict.fromkeys(["t/1", "t/2", "v/1", "x*", "one"], b"x"))
    given = ("{t,v}/*", "x*", "one")
    found = find(tuple(f"{bucket.url}/{path}" for path in given), Access(storage_options=bucket.options))
    assert [one.path for one in found] == [f"{bucket.url}/{key}" for key in ("t/1", "t/2", "v/1", "x*", "one")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none/*", "no object matches s3://.*none/.: check the spelling"),
        ("one{,x}", "/onex: .*there is no such object"),
    ],
)
def test_what_is_not_there_is_found_out_at_once(bucket: Bucket, path: str, message: str) -> None:
    bucket.put(one=b"x")
    with pytest.raises(ReadError, match=message):
        find((f"{bucket.url}/{path}",), Access(storage_options=bucket.options))


def test_an_object_given_twice_is_refused(bucket: Bucket) -> None:
    bucket.put(one=b"x")
    with pytest.raises(PlanError, match="/one is given twice"):
        find((f"{bucket.url}/one", f"{bucket.url}/on?"), Access(storage_options=bucket.options))


async def test_finding_works_inside_a_running_loop(bucket: Bucket) -> None:
    bucket.put(one=b"x")
    assert len(find((f"{bucket.url}/*",), Access(storage_options=bucket.options))) == 1
