"""Azurite, Microsoft's emulator of Azure's blob storage: one for all tests of a session.

`.ci/servers` installs it; without it, its tests are counted and named as not run, see `tests.servers.absent`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import shutil
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from obstore.store import AzureStore

from tests.servers.absent import absent
from tests.servers.s3 import Bucket
from tests.servers.shared import for_session, shared

HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "streamline", "azurite")
PROGRAM = HOME / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Source: Azurite's README; the same for everybody."""

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    node = shutil.which("node")
    if node is None:
        absent("Azurite needs Node.js, which isn't here: install it, then run .ci/servers")
    if not PROGRAM.exists():
        absent(f"Azurite isn't in {HOME}: run .ci/servers, which installs it")
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]

    def program(port: int) -> list[str]:
        return [node, str(PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]

    with shared(for_session(tmp_path_factory, "azurite"), program) as port:
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"


@pytest.fixture
def container(azure_endpoint: str, obstore_is_warm: None) -> Bucket:
    name = f"container-{os.getpid()}-{next(NUMBERS)}"
    make_container(azure_endpoint, name)
    config = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": azure_endpoint}
    store = AzureStore(name, config=config, client_options={"allow_http": True, "pool_max_idle_per_host": "0"})  # type: ignore[arg-type]
    return Bucket(f"az://{name}", {**config, "allow_http": True}, store)


def make_container(endpoint: str, name: str) -> None:
    """Make a container: obstore can't. Source of the signature: Azure's "Authorize with Shared Key"."""
    date, version = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2021-08-06"
    signed = (
        f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=200) as answer:
        assert answer.status == 201
