"""Fan-out over nginx: the laws where bytes come in tiny parts, workers that are killed, many objects, silence."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core import byte_budget as budget
from streamline.errors import ReadError
from streamline.io.fetch import request as requests
from streamline.io.storage import resolve as finding
from streamline.io.storage.http_client import HttpClient
from streamline.testing.checks import check_resume
from tests.servers.faults import Faults, silence
from tests.servers.nginx import Nginx

PART_BYTES = 7


@pytest.fixture
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for a few bytes at a time."""
    monkeypatch.setattr(budget, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(budget, "MIN_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(requests, "GUESS_BYTES", 5)


def put(nginx: Nginx, folder: str, contents: list[bytes]) -> list[str]:
    for number, content in enumerate(contents):
        nginx.put(f"{folder}/{number:02d}", content)
    return [nginx.url(f"{folder}/{number:02d}") for number in range(len(contents))]


def some_lines(seed: int, files: int) -> list[list[str]]:
    rng = random.Random(seed)
    return [["x" * rng.randrange(20) for _ in range(rng.randrange(5))] for _ in range(files)]


def plan(kind: str, nginx: Nginx) -> tuple[sl.Pipeline[Any], list[Any]]:
    """Return a pipeline over a few files of random sizes, and what it gives."""
    lines = some_lines(5, 4)
    texts = ["".join(f"{line}\n" for line in file).encode() for file in lines]
    if kind == "files":
        urls = put(nginx, "laws/files", texts)
        return sl.read_files(urls, concurrency=4), list(zip(urls, texts, strict=True))
    if kind == "lines":
        urls = put(nginx, "laws/lines", texts)
        return sl.read_lines(urls, concurrency=4), [line for file in lines for line in file]
    records = [[{"n": len(line)} for line in file] for file in lines]
    urls = put(nginx, "laws/jsonl", ["".join(json.dumps(one) + "\n" for one in file).encode() for file in records])
    return sl.read_jsonl(urls, concurrency=4), [one for file in records for one in file]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("files", sl.Inline()), ("lines", sl.Threads(2))],
)
def test_the_laws_hold_over_http_in_tiny_parts(nginx: Nginx, tiny_parts: None, kind: str, backend: Any) -> None:
    pipe, expected = plan(kind, nginx)
    pipe = pipe.shard(1)
    if kind == "files":
        pipe = pipe.map(tuple)
    check_resume(pipe, expected=expected, backend=backend, generations=2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl"])
def test_processes_give_the_same_and_resume(nginx: Nginx, kind: str, processes: Backend) -> None:
    pipe, expected = plan(kind, nginx)
    sharded = pipe.shard(3, mode="file")
    sharded = (sharded.map(tuple) if kind == "files" else sharded).merge()
    with sharded.open(backend=processes) as stream:
        first = [next(stream) for _ in range(4)]
        state = stream.snapshot()
    with sharded.open(backend=processes, resume=sl.Snapshot.from_json(state.to_json())) as stream:
        rest = list(stream)
    with sharded.open() as stream:
        assert first + rest == list(stream)
    assert sorted(map(repr, first + rest)) == sorted(map(repr, expected))


def killing(item: Any) -> Any:
    """Kill this process, once: where the file that says so can be removed."""
    try:
        Path(os.environ["KILL_ONCE"]).unlink()
    except FileNotFoundError:
        return item.data
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process doesn't go on")


@pytest.mark.long
def test_a_worker_killed_while_it_fetches_loses_nothing(
    nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [b"%d" % number * 1000 for number in range(40)]
    once = tmp_path / "once"
    once.touch()
    monkeypatch.setenv("KILL_ONCE", str(once))
    put(nginx, "killed", contents)
    urls = [nginx.url(f"slow/killed/{number:02d}") for number in range(40)]  # requests are on their way when it dies
    pipe = sl.read_files(urls, concurrency=8).shard(2).map(killing).merge()
    with pipe.open(backend=sl.Processes(2)) as stream:
        found = list(stream)
        restarts = sum(host.restarts for host in stream.stats().hosts)
    assert found == contents
    assert not once.exists()
    assert restarts == 1


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(
    ("path", "objects", "size", "memory", "fewest", "most"),
    [("slow/many/one", 1000, 1000, 64 * 2**20, 150, 200), ("many/one", 300, 10_000, 2 * 2**20, 4, 20)],
    ids=["1,000 with 200 in flight", "300 with little memory"],
)
async def test_many_objects_hold_no_more_than_they_may(
    nginx: Nginx,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    objects: int,
    size: int,
    memory: int,
    fewest: int,
    most: int,
) -> None:
    monkeypatch.setattr(finding, "MOST_ASKED", 0)
    nginx.put("many/one", b"x" * size)
    urls = [f"{nginx.url(path)}?{number}" for number in range(objects)]
    running = asked = connections = held = resident = 0
    accounts: list[budget.Budget] = []
    get, made = HttpClient.get, budget.Budget.__init__

    async def counted(client: HttpClient, *args: Any, **options: Any) -> Any:
        nonlocal running, asked, connections, held, resident
        running += 1
        asked = max(asked, running)
        try:
            return await get(client, *args, **options)
        finally:
            connections = max(connections, len(os.listdir("/proc/self/fd")) - before)  # noqa: PTH208 - numbers
            resident = max(resident, resident_bytes())
            held = max(held, *(account.held for account in accounts))
            running -= 1

    def noted(self: budget.Budget, most: int) -> None:
        made(self, most)
        accounts.append(self)

    monkeypatch.setattr(HttpClient, "get", counted)
    monkeypatch.setattr(budget.Budget, "__init__", noted)
    before, begun = len(os.listdir("/proc/self/fd")), resident_bytes()  # noqa: PTH208 - numbers
    total = 0
    async with sl.read_files(urls, concurrency=200).open(memory=memory) as stream:
        async for file in stream:
            total += len(file.data)
        (read,) = stream.stats().reads
    assert total == objects * size
    assert fewest <= asked <= most
    assert fewest <= connections <= most + 10
    assert 0 < held <= memory
    assert resident - begun < memory + 64 * 2**20  # what a connection buffers is not in the budget
    assert read.requests - read.retries < 2 * objects  # what turned out not to fit is asked for again, and not for ever


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("options", [{"timeout_s": 0.2, "retries": 1}, {"deadline_s": 0.3}])
async def test_a_server_that_never_answers_ends_at_the_deadline(
    nginx: Nginx, faults: Faults, options: dict[str, Any]
) -> None:
    nginx.put("silent", b"xyz")  # of one byte, it would be as a look is, which the proxy answers
    faults.script = [silence(0)] * 100
    with anyio.fail_after(200), pytest.raises(ReadError, match="silent"):
        async with sl.read_files(faults.url("silent"), http=sl.HttpOptions(**options)).open() as stream:
            await anext(stream)
