"""Files of any compression, here and on a server, and their reading from any state on. For tests of formats."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.errors import StreamlineError
from streamline.io.formats import csv as csv_files
from streamline.io.formats import line_decoding as lines
from streamline.io.storage import local
from tests.laws.profile import FACTOR

if sys.version_info >= (3, 14):
    from compression import zstd as _library
else:
    from backports import zstd as _library

zstd_library = _library

Read = Callable[..., Awaitable[Any]]
Put = Callable[[str, bytes], str]


def zstd(data: bytes) -> bytes:
    """Return a zstd frame as the tool makes it: with a checksum."""
    return zstd_library.compress(data, options={zstd_library.CompressionParameter.checksum_flag: 1})


PACK: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", gzip.compress),
    "zstd": (".zst", zstd),
    "bzip2": (".bz2", bz2.compress),
    "xz": (".xz", lzma.compress),
}

KINDS = (
    ["plain", *PACK, "gzip parts", "zstd parts", "gzip unnamed", "http", "zstd http"]
    if FACTOR > 1
    else ["plain", "gzip unnamed", "zstd parts", "http"]
)
"""Each compression, here and in parts, is in `io/formats/test_contract.py`, too."""


@pytest.fixture(params=KINDS)
async def put(request: pytest.FixtureRequest, tmp_path: Path, server: Any) -> Put:
    """Make a file of the given name and text, compressed or not, here or on a server, and return its path."""
    kind, _, how = request.param.partition(" ")

    def put_(name: str, data: bytes) -> str:
        suffix, pack = PACK.get(kind, (".txt", bytes))
        name += ".txt" if how == "unnamed" else suffix
        if how == "parts":
            step = max(3, len(data) // 50)
            data = b"".join(pack(data[at : at + step]) for at in range(0, len(data) + 1, step))
        else:
            data = pack(data)
        if "http" in (kind, how):
            server.objects[name] = data
            return str(server.url(name))
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return put_


@pytest.fixture(params=["one slice", "small slices"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in slices and blocks of a few bytes, too."""
    if request.param == "small slices":
        monkeypatch.setattr(lines, "FIRST_SLICE_BYTES", 2)
        monkeypatch.setattr(lines, "SLICE_BYTES", 2)
        monkeypatch.setattr(csv_files, "SLICE_BYTES", 2)
        monkeypatch.setattr(local, "FIRST_BLOCK_BYTES", 3)
        monkeypatch.setattr(local, "BLOCK_BYTES", 4)


@pytest.fixture(params=[None, 100])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in blocks of a few bytes, too."""
    if request.param:
        monkeypatch.setattr(local, "FIRST_BLOCK_BYTES", request.param)
        monkeypatch.setattr(local, "BLOCK_BYTES", request.param)


def outcome(pipe: sl.Pipeline[Any], **options: Any) -> tuple[list[Any], StreamlineError | None]:
    """Return the items up to the end or the failure, and that."""
    seen: list[Any] = []
    try:
        with pipe.open(**options) as stream:
            seen.extend(stream)
    except StreamlineError as error:
        return seen, error
    return seen, None


async def outcome_aside(pipe: sl.Pipeline[Any], **options: Any) -> tuple[list[Any], StreamlineError | None]:
    """Do the same in a thread: the server has its turn."""
    return await anyio.to_thread.run_sync(partial(outcome, pipe, **options))


class Plain:
    """Makes items comparable by their repr, as the kit wants them: a record batch's shows its buffers' addresses."""

    def __call__(self, item: Any) -> Any:
        return item.to_pylist() if hasattr(item, "to_pylist") else item


async def check_every_resume(read: Read, source: Any, expected: list[Any], **options: Any) -> Any:
    """Check that a source gives what is expected, and the rest of it from each of its states on."""
    whole = await read(source, **options)
    assert whole.failure is None
    assert whole.items == expected
    states = [whole.begin, *whole.states, whole.end]
    for done, state in enumerate(states[:-1]):
        resumed = await read(source, json.loads(json.dumps(state)), **options)
        assert resumed.failure is None
        assert resumed.items == expected[done:], state
    assert (await read(source, whole.end, **options)).items == []
    return whole
