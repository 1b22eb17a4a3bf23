"""What does `open(tune=True)` find in ten seconds, and what does the search cost meanwhile?

Against the plan as written, and the best of a grid of knobs.

Six real pipelines: a sleepy API, objects over HTTP at 30 ms, threads that release the GIL, threads of pure Python,
blocks of a disk, and a mixture of an API, decompression and batches. And what `loader(tune=True)` finds in some passes
over pure Python in processes, whose number is its knob.
"""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import islice
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least

SMOKE_ITEMS = 20

TUNED_S = 10.0

WARM_S = 0.5

TRIED_S = 1.0
"""Of each point of a grid, to find the best."""


# Pipelines: of an endless source, so many items a second as the knobs let come ----------------------------------------
def api(calls: int = 8) -> Any:
    return sl.from_items(range(10**9)).map(answer, concurrency=calls)


async def answer(item: int) -> int:
    """An API that takes 50 ms, and serves 64 at once."""
    async with SERVED.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(64)):
        await asyncio.sleep(0.05)
    return item


SERVED = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


def http(requests: int = 4) -> Any:
    return sl.read_files(_urls(), concurrency=requests).repeat()


def hashes(threads: int = 2) -> Any:
    return sl.from_items(range(10**9)).map(_hash, executor="thread", concurrency=threads)


BLOCK = bytes(1 << 20)


def _hash(item: int) -> int:
    sha256(BLOCK).digest()
    return item


def python(threads: int = 2) -> Any:
    return sl.from_items(range(10**9)).map(_count, executor="thread", concurrency=threads)


def _count(item: int) -> int:
    total = 0
    for number in range(20_000):
        total += number
    return item


def disk(threads: int = 2) -> Any:
    return sl.from_items(range(10**9)).map(_block, executor="thread", concurrency=threads)


DISK_BYTES, BLOCK_BYTES = 1 << 28, 1 << 18


@cache
def _file() -> int:
    """Make a file whose reads go past the system's cache."""
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder, "blocks")
        path.write_bytes(os.urandom(DISK_BYTES))
        return os.open(path, os.O_RDONLY | os.O_DIRECT)


class _Memory(threading.local):
    """What each thread reads into: whole pages."""

    def __init__(self) -> None:
        self.pages = mmap(-1, BLOCK_BYTES)


_memory = _Memory()


def _block(item: int) -> int:
    if os.preadv(_file(), [_memory.pages], item * 7919 * BLOCK_BYTES % DISK_BYTES) < BLOCK_BYTES:
        raise EOFError(item)
    return item


def mixed(calls: int = 4, threads: int = 2) -> Any:
    """An API, what it gives decompressed in threads, and batches of which some are ready."""
    pipe = sl.from_items(range(10**9)).map(answer, concurrency=calls)
    return pipe.map(_unpack, executor="thread", concurrency=threads).batch(8, collate=None).prefetch(2).unbatch()


PACKED = zlib.compress(os.urandom(1 << 14) * 4)


def _unpack(item: int) -> int:
    zlib.decompress(PACKED)
    return item


# A server whose answers take 30 ms ------------------------------------------------------------------------------------
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n\r\n'


class _Answers(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport, self._got = transport, b""

    def data_received(self, data: bytes) -> None:
        self._got += data
        while b"\r\n\r\n" in self._got:
            head, _, self._got = self._got.partition(b"\r\n\r\n")
            body = b"" if head.startswith(b"HEAD") else bytes(1000)
            asyncio.get_running_loop().call_later(0.03, self._transport.write, ANSWER + body)


def _serve(told: Any) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Answers, "127.0.0.1", 0, backlog=512)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@cache
def _urls() -> list[str]:
    ours, theirs = harness.SPAWN.Pipe()
    harness.SPAWN.Process(target=_serve, args=(theirs,), daemon=True).start()
    port = ours.recv()
    return [f"http://127.0.0.1:{port}/{number:04d}.bin" for number in range(2000)]


# Measuring ------------------------------------------------------------------------------------------------------------
def rate(pipe: Any, n: int, lead_s: float, tune: Any = False) -> Tally:
    """Read a pipeline for so long, then time n items."""
    with pipe.open(tune=tune) as stream:
        _read(stream, lead_s)
        began = perf_counter()
        count = sum(1 for _ in islice(stream, n))
        return Tally(count, 0, perf_counter() - began)


def _read(stream: Any, seconds: float) -> float:
    """Read a stream for so long from its first item on; return the items a second."""
    next(stream)
    began = now = perf_counter()
    for count, _ in enumerate(stream, 1):
        now = perf_counter()
        if now >= began + seconds:
            return count / (now - began)
    raise EOFError("the stream has an end")


def as_written(n: int, make: Callable[..., Any]) -> Tally:
    return rate(make(), n, WARM_S if n > SMOKE_ITEMS else 0.0)


def while_tuned(n: int, make: Callable[..., Any]) -> Tally:
    """Return the mean rate of the search."""
    with make().open(tune=True) as stream:
        return Tally(n, 0, n / _read(stream, TUNED_S if n > SMOKE_ITEMS else 0.0))


def found(n: int, make: Callable[..., Any]) -> Tally:
    with make().open(tune=True) as stream:
        _read(stream, TUNED_S if n > SMOKE_ITEMS else 0.0)
    with TemporaryDirectory() as folder:
        stream.tuning.save(Path(folder, "tune.json"))
        return rate(make(), n, WARM_S if n > SMOKE_ITEMS else 0.0, Path(folder, "tune.json"))


def best(n: int, make: Callable[..., Any], grid: tuple[tuple[int, ...], ...]) -> Tally:
    whole = n > SMOKE_ITEMS
    return rate(make(*_best(make, grid)) if whole else make(), n, WARM_S if whole else 0.0)


@cache
def _best(make: Callable[..., Any], grid: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the values with which the most items come, each tried for a second."""
    return max(grid, key=lambda values: _tried(make(*values)))


def _prepare(n: int, make: Callable[..., Any], grid: tuple[tuple[int, ...], ...]) -> None:
    if n > SMOKE_ITEMS:
        _best(make, grid)


def _tried(pipe: Any) -> float:
    with pipe.open() as stream:
        return _read(stream, TRIED_S)


def expected(n: int) -> Tally:
    return Tally(n, 0)


# Passes in processes --------------------------------------------------------------------------------------------------
PASSES, SHARDS = 8, 8


def second_pass(n: int, hosts: int = 1, tune: Any = False) -> Tally:
    """Time a pass over n items in so many processes, after another one, which has started them."""
    with _hosted(n, hosts, tune) as loader:
        deque(loader, 0)
        began = perf_counter()
        return Tally(sum(1 for _ in loader), 0, perf_counter() - began)


def _hosted(n: int, hosts: int, tune: Any) -> Any:
    return sl.from_items(range(n)).shard(SHARDS).map(_count).merge().loader(backend=sl.Processes(hosts), tune=tune)


def found_in_passes(n: int) -> Tally:
    with _hosted(n, 1, tune=True) as loader:
        for _ in range(PASSES if n > SMOKE_ITEMS else 1):
            deque(loader, 0)
    with TemporaryDirectory() as folder:
        loader.tuning.save(Path(folder, "tune.json"))
        return second_pass(n, 1, Path(folder, "tune.json"))


def best_number(n: int) -> Tally:
    return second_pass(n, _best_number(n) if n > SMOKE_ITEMS else 1)


@cache
def _best_number(n: int) -> int:
    """Return the number of processes with which a pass takes least, each tried for one."""
    return min((1, 2, 4, SHARDS), key=lambda hosts: second_pass(n, hosts).seconds or 0.0)


def _prepare_number(n: int) -> None:
    if n > SMOKE_ITEMS:
        _best_number(n)


def _suite(
    question: str, note: str, make: Callable[..., Any], few: int, items: int, grid: Sequence[tuple[int, ...]]
) -> Suite:
    """Return the table of a pipeline; as it is written, it gives `few` items in a second or two."""
    written = Case("as written", partial(as_written, make=make), few)
    points = tuple(grid)
    search = partial(_prepare, make=make, grid=points)
    grids = Case("the best of a grid", partial(best, make=make, grid=points), items, prepare=search)
    kept = at_least(0.97, written.name)
    search_cost = Case("in ten seconds of open(tune=True)", partial(while_tuned, make=make), items, (kept,))
    targets = (at_least(0.9, grids.name), kept)
    tuned = Case("with what was found then", partial(found, make=make), items, targets)
    return Suite(
        question=f"Tuning for 10 s: {question}",
        unit="items/s",
        cases=(written, grids, search_cost, tuned),
        smoke_items=SMOKE_ITEMS,
        floor=grids.name,
        expected=expected,
        note=note,
    )


POWERS = [(1,), (2,), (4,), (8,), (16,), (32,), (64,), (128,), (256,)]
FEW = POWERS[:6]

SUITES = (
    _suite("a sleepy API", "50 ms a call, 64 at once; concurrency=8 is written.", api, 300, 3000, POWERS[2:]),
    _suite("objects over HTTP", "1 kB, each after 30 ms; concurrency=4 is written.", http, 250, 4000, POWERS[:-1]),
    _suite("threads that release the GIL", "Hashes of 1 MiB; concurrency=2 is written.", hashes, 4000, 4000, FEW),
    _suite("threads of pure Python", "1 ms a call; concurrency=2 is written.", python, 2500, 2500, FEW),
    _suite("a disk", "Blocks of 256 KiB, past the system's cache; concurrency=2 is written.", disk, 8000, 8000, FEW),
    _suite(
        "an API, decompression in threads, batches",
        "concurrency=4 of the API's calls, and of 2 threads, are written.",
        mixed,
        150,
        2000,
        [(calls, threads) for (calls,) in POWERS[2:8] for threads in (1, 2, 4)],
    ),
    Suite(
        question=f"Tuning for {PASSES} passes: pure Python in processes",
        unit="items/s",
        cases=(
            Case("as written", second_pass, 2500),
            Case("the best of a grid", best_number, 2500, prepare=_prepare_number),
            Case(
                "with what loader(tune=True) has found",
                found_in_passes,
                2500,
                (at_least(0.9, "the best of a grid"), at_least(0.97, "as written")),
            ),
        ),
        smoke_items=SMOKE_ITEMS,
        floor="the best of a grid",
        expected=expected,
        note="1 ms a call; 8 shards; Processes(1) is written.",
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
