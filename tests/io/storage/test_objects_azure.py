"""Azure's store, over a real Azurite: what differs from S3 is how ETags are listed, and how errors read."""

from typing import Any

import pytest

import streamline as sl
from streamline.errors import ReadError
from streamline.io.storage.object_store import ObjectStorage
from streamline.io.storage.options import Access
from streamline.io.storage.resolve import find
from tests.servers.s3 import Bucket

KEYS = ["a b", "a%20b", "a+b", "a#b", "a?b", "deep/ünï"]


def test_odd_keys_are_listed_and_read_as_they_are(container: Bucket) -> None:
    container.put_all({f"d/{key}": key.encode() for key in KEYS})
    lines = sl.read_lines(f"{container.url}/d/**", storage_options=container.options)
    assert list(lines) == sorted(KEYS)


def test_listing_and_asking_tell_the_same_etag(container: Bucket) -> None:
    container.put(a=b"abc")
    access = Access(storage_options=container.options)
    assert find((f"{container.url}/*",), access) == find((f"{container.url}/a",), access)


async def test_spans_ends_and_other_versions(container: Bucket) -> None:
    container.put(a=b"abc", empty=b"")
    storage, path = ObjectStorage(container.options), f"{container.url}/a"
    before = (await storage.stat(path)).etag
    assert await storage.read(path, 1, 3, before) == b"bc"
    assert await storage.read(path, 3, None) == await storage.read(f"{container.url}/empty", 0, None) == b""
    with pytest.raises(ReadError, match="has 3 bytes, expected more than 4"):
        await storage.read(path, 4, None)
    container.put(a=b"xyz")
    with pytest.raises(ReadError, match=f"/a has changed, at byte 0: its ETag was {before} and is "):
        await storage.read(path, 0, 3, before)
    await storage.aclose()


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("az://nobody/*", {}, r"ContainerNotFound.*no such bucket \(or container\)"),
        ("az://nobody/x", {}, "404"),
        ("{}/none", {}, "there is no such object"),
        (
            "{}/*",
            {"account_key": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHg="},
            "AuthorizationFailure.*AZURE_STORAGE_ACCOUNT_KEY",
        ),
    ],
)
def test_refusals_say_what_to_do(container: Bucket, path: str, options: Any, message: str) -> None:
    lines = sl.read_lines(path.format(container.url), storage_options={**container.options, **options})
    with pytest.raises(ReadError, match=message):
        lines.open()
