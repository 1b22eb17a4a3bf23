"""Moto's S3 server, in a process of its own: one for all tests of a session, a new bucket for each."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from obstore.store import from_url

START_S = 200.0
"""Moto imports half of botocore: 1.5 s on a free core."""

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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server accepts connections."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with socket.socket() as look:
            if look.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"no server on port {port} within {START_S:.0f} s")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    port = free_port()
    program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        wait_for(process, port)
        endpoint = f"http://127.0.0.1:{port}"
        make_bucket(endpoint, "warm")
        store_of("s3://warm", options_for(endpoint)).put("warm", b"")  # obstore's own threads stay, with their files
        yield endpoint
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def bucket(s3_endpoint: str) -> Bucket:
    name = f"bucket-{next(NUMBERS)}"
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
