"""Files in which a resume can't simply seek, or that are on a server, read by workers in threads and in processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.testing.checks import check_resume
from tests.file_kit import PACK
from tests.serving import PATIENT, Server, breaking, serving

RECORDS = [{"id": number, "text": "\u00f6" * (number % 3)} for number in range(14)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture(params=["processes", pytest.param("threads", marks=pytest.mark.long)])
def hosts(request: pytest.FixtureRequest, processes: Backend) -> Backend:
    return sl.Threads(2) if request.param == "threads" else processes


def files(kind: str) -> dict[str, bytes]:
    """Return three files of records by name, one of them without any."""
    suffix, pack = PACK.get(kind, (".jsonl", bytes))
    parts = {"0": RECORDS[:6], "1": [], "2": RECORDS[6:]}
    return {
        name + suffix: pack("".join(json.dumps(record) + "\n" for record in part).encode())
        for name, part in parts.items()
    }


@pytest.mark.long
def test_compressed_files_resume_exactly_on_hosts(tmp_path: Path, hosts: Backend) -> None:
    for kind in PACK:
        folder = tmp_path / kind
        folder.mkdir()
        for name, data in files(kind).items():
            (folder / name).write_bytes(data)
        pipe = sl.read_jsonl(f"{folder}/*").shard(2).merge().batch(3, collate=None)
        check_resume(pipe, backend=hosts, generations=2)


@pytest.mark.long
def test_files_on_a_server_resume_exactly_on_hosts(server: Server, hosts: Backend) -> None:
    for kind in ("plain", "zstd"):
        server.objects, server.otherwise = files(kind), breaking(1, 0.03)
        pipe = sl.read_jsonl([server.url(name) for name in server.objects], http=PATIENT).shard(2).merge()
        check_resume(pipe.batch(3, collate=None), backend=hosts, generations=2)
