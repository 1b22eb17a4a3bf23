"""How fast do objects come over HTTP, many small ones and some large ones? `python -m bench.http_objects`.

Needs nginx with its echo module (Debian: nginx-extras). One server for all cases of a run; each case has a process.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from bench import harness
from bench.nginx import Nginx
from bench.suite import Case, Suite, Tally, at_least, peer

SMALL, SMALL_BYTES = 5_000, 100 * 1024
LARGE, LARGE_BYTES = 64, 16 * 2**20
LINE = b'{"id": 1234567, "text": "' + b"x" * 480 + b'", "tags": [1, 2, 3]}\n'

SMOKE_ITEMS, SMOKE_LARGE = 50, 2

SERVED = "STREAMLINE_BENCH_NGINX"
"""The port and the folder of the server, for the processes of the cases."""


def serve(*, smoke: bool = False) -> None:
    """Start the server and make the files, in the process that starts all cases; for a smoke test, a few."""
    server = Nginx()
    for number in range(SMOKE_ITEMS if smoke else SMALL):
        (server.files / f"{number:05d}.bin").write_bytes(os.urandom(SMALL_BYTES))
    content = LINE * (LARGE_BYTES // len(LINE))
    for number in range(SMOKE_LARGE if smoke else LARGE):
        (server.files / f"{number:05d}.jsonl").write_bytes(content)
    os.environ[SERVED] = f"{server.port} {server.files}"
    atexit.register(server.close)


def urls(items: int, *, slow: bool, suffix: str = "bin") -> list[str]:
    port = os.environ[SERVED].split()[0]
    folder = "slow" if slow else "files"
    return [f"http://127.0.0.1:{port}/{folder}/{number:05d}.{suffix}" for number in range(items)]


def small(items: int) -> Tally:
    return Tally(items, items * SMALL_BYTES)


def large(items: int) -> Tally:
    return Tally(items, items * (LARGE_BYTES // len(LINE)) * len(LINE))


async def streamline_files(items: int, *, slow: bool, concurrency: int, suffix: str = "bin") -> Tally:
    import streamline as sl

    count = total = 0
    async with sl.read_files(urls(items, slow=slow, suffix=suffix), concurrency=concurrency).open() as stream:
        async for file in stream:
            count += 1
            total += len(file.data)
        stream.snapshot()
    return Tally(count, total)


async def by_hand(items: int, *, slow: bool, concurrency: int, suffix: str = "bin") -> Tally:
    """aiohttp, as it is written by hand: some long-lived tasks over one iterator, in no order, without any state."""
    aiohttp = peer("aiohttp")
    count = total = 0

    async def work(session: Any, left: Iterator[str]) -> None:
        nonlocal count, total
        for url in left:
            async with session.get(url) as response:
                data = await response.read()
            count += 1
            total += len(data)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        left = iter(urls(items, slow=slow, suffix=suffix))
        await asyncio.gather(*(work(session, left) for _ in range(concurrency)))
    return Tally(count, total)


async def obstore(items: int, *, slow: bool, concurrency: int, suffix: str = "bin") -> Tally:
    store_module, get = peer("obstore.store"), peer("obstore").get_async
    port = os.environ[SERVED].split()[0]
    store = store_module.HTTPStore.from_url(f"http://127.0.0.1:{port}", client_options={"allow_http": True})
    count = total = 0

    async def work(left: Iterator[str]) -> None:
        nonlocal count, total
        for url in left:
            data = await (await get(store, url.split("/", 3)[3])).bytes_async()
            count += 1
            total += len(data)

    left = iter(urls(items, slow=slow, suffix=suffix))
    await asyncio.gather(*(work(left) for _ in range(concurrency)))
    return Tally(count, total)


def spdl_aiohttp(items: int, *, slow: bool, concurrency: int) -> Tally:
    builder, aiohttp = peer("spdl.pipeline").PipelineBuilder, peer("aiohttp")
    sessions: dict[int, Any] = {}

    async def fetch(url: str) -> int:
        here = threading.get_ident()
        if here not in sessions:
            sessions[here] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency))
        async with sessions[here].get(url) as response:
            return len(await response.read())

    pipeline = builder().add_source(urls(items, slow=slow)).pipe(fetch, concurrency=concurrency).add_sink(64)
    with (built := pipeline.build(num_threads=1)).auto_stop():
        sizes = list(built)
    for session in sessions.values():
        session._connector._close()
    return Tally(len(sizes), sum(sizes))


class Requests:
    """A dataset for torch that reads with requests, a session a worker."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        content: bytes = _session().get(self._paths[index]).content
        return content


@cache
def _session() -> Any:
    return peer("requests").Session()


def torch_loader(items: int, *, slow: bool) -> Tally:
    loader = peer("torch.utils.data").DataLoader(Requests(urls(items, slow=slow)), batch_size=None, num_workers=8)
    count = total = 0
    for data in loader:
        count += 1
        total += len(data)
    return Tally(count, total)


def wrk(items: int, *, concurrency: int) -> Tally:
    """`wrk` for two seconds, as if it had read `items`."""
    script = "-t1", f"-c{concurrency}", "-d2s", urls(1, slow=True)[0]
    said = subprocess.run(["wrk", *script], capture_output=True, text=True, check=True).stdout
    rate = float(next(line for line in said.splitlines() if line.startswith("Requests/sec")).split()[1])
    return Tally(items, items * SMALL_BYTES, seconds=items / rate)


async def json_lines(items: int, *, local: bool) -> Tally:
    import streamline as sl

    folder = os.environ[SERVED].split()[1]
    paths = [f"{folder}/{number:05d}.jsonl" for number in range(items)]
    count = total = 0
    pipe = sl.read_jsonl(paths if local else urls(items, slow=True, suffix="jsonl"))
    async with pipe.shard(1).open() as stream:
        async for record in stream:
            count += 1
            total += record["id"]
    return Tally(items, total)


def records(items: int) -> Tally:
    return Tally(items, items * (LARGE_BYTES // len(LINE)) * 1234567)


MISSING = "http_objects needs nginx with its echo module: apt install nginx-extras"

OURS, HAND = "streamline, read_files", "aiohttp by hand"


def small_cases(slow: bool) -> tuple[Case, ...]:
    at: dict[str, Any] = {"slow": slow, "concurrency": 64}
    targets = (at_least(0.95 if slow else 0.75, HAND), *(() if slow else (at_least(3, "spdl over aiohttp"),)))
    if slow:
        targets = (*targets, at_least(7, "torch DataLoader, 8 workers, requests"))
    return (
        Case(HAND, partial(by_hand, **at), SMALL),
        Case(OURS, partial(streamline_files, **at), SMALL, targets),
        Case("obstore", partial(obstore, **at), SMALL, peers=("obstore",)),
        Case("spdl over aiohttp", partial(spdl_aiohttp, **at), SMALL, peers=("spdl",)),
        Case(
            "torch DataLoader, 8 workers, requests",
            partial(torch_loader, slow=slow),
            1_000,
            peers=("torch", "requests"),
        ),
    )


def suites() -> tuple[Suite, ...]:
    """Return the suites; those of cases whose programs are there."""
    at: dict[str, Any] = {"slow": True, "concurrency": 64, "suffix": "jsonl"}
    many = [Case("streamline, 256 in flight", partial(streamline_files, slow=True, concurrency=256), SMALL)]
    if shutil.which("wrk"):
        targets = (at_least(0.9, "wrk, 256 connections"),)
        many[0] = Case(many[0].name, many[0].run, SMALL, targets)
        many.append(Case("wrk, 256 connections", partial(wrk, concurrency=256), SMALL))
    return (
        Suite("Small objects, 30 ms away: 100 KiB each", "items/s", small_cases(True), SMOKE_ITEMS, HAND, small),
        Suite("The same, 256 in flight", "items/s", tuple(many), SMOKE_ITEMS, None, small),
        Suite("The same without the 30 ms", "items/s", small_cases(False), SMOKE_ITEMS, HAND, small),
        Suite(
            "Large objects, 30 ms away: 16 MiB each",
            "items/s",
            (
                Case(HAND, partial(by_hand, **at), LARGE),
                Case("obstore", partial(obstore, **at), LARGE, peers=("obstore",)),
                Case(OURS, partial(streamline_files, **at), LARGE, (at_least(0.95, HAND), at_least(0.95, "obstore"))),
            ),
            SMOKE_LARGE,
            HAND,
            large,
        ),
        Suite(
            "The same as JSON lines, parsed",
            "items/s",
            (
                Case("local files", partial(json_lines, local=True), 8),
                Case("30 ms away", partial(json_lines, local=False), 8, (at_least(0.9, "local files"),)),
            ),
            1,
            "local files",
            records,
        ),
    )


def main() -> None:
    if Nginx.missing():
        sys.exit(MISSING)
    serve(smoke="--smoke" in sys.argv)
    harness.main(suites())


if __name__ == "__main__":
    main()
