"""Moto's S3 server: one for all tests of a session, a new bucket for each."""

from __future__ import annotations

import itertools
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from obstore.store import from_url

from tests.servers.shared import for_session, shared

NUMBERS = itertools.count()


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own for a test.

    Attributes:
      url: "s3://name".
      options: the `storage_options=` that reach it.
      store: obstore's, to put objects and to look at them.
    """

    url: str
    options: Mapping[str, Any]
    store: Any

    def put(self, **objects: bytes) -> None:
        """Put objects, by key; "__" stands for a slash, as in `put_all`."""
        self.put_all({key.replace("__", "/"): data for key, data in objects.items()})

    def put_all(self, objects: Mapping[str, bytes]) -> None:
        """Put objects by key."""
        for key, data in objects.items():
            self.store.put(key, data)

    def remove(self, key: str) -> None:
        self.store.delete(key)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    def program(port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    with shared(for_session(tmp_path_factory, "s3"), program) as port:
        endpoint = f"http://127.0.0.1:{port}"
        name = f"warm-{os.getpid()}"
        make_bucket(endpoint, name)
        store_of(f"s3://{name}", options_for(endpoint)).put("warm", b"")  # obstore's own threads stay, with their files
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint: str) -> Bucket:
    name = f"bucket-{os.getpid()}-{next(NUMBERS)}"
    make_bucket(s3_endpoint, name)
    options = options_for(s3_endpoint)
    return Bucket(f"s3://{name}", options, store_of(f"s3://{name}", options))


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(
        f"{endpoint}/{name}",
        method="PUT",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"},
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        assert answer.status == 200


def options_for(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "who",
        "secret_access_key": "s3cret",
        "allow_http": True,
    }


def store_of(url: str, options: Mapping[str, Any]) -> Any:
    config = {name: value for name, value in options.items() if name != "allow_http"}
    return from_url(url, config=config, client_options={"allow_http": True, "pool_max_idle_per_host": "0"})  # type: ignore[call-overload]
