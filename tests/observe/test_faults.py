"""Faults that are put into running streams: the page, the metrics and `stats()` name each, and its place.

Each is the worst part of its stream by far; nothing is said about times, and nothing here depends on them: what is
looked for has to come. Where a fault is the machine's, the files in which the kernel tells it are made up.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core.figures import ThreadStats
from streamline.io.storage import retry
from streamline.observe import contention, page
from streamline.runtime import run
from tests.kit import LONGEST_S, Pipe
from tests.laws.profile import mostly_long
from tests.page_kit import asked, updates

SLOW_S = 0.004
MANY = 10**9
ITEMS = sl.from_items(range(MANY))


def slow(item: Any) -> Any:
    time.sleep(SLOW_S)
    return item


async def skewed(item: int) -> int:
    await anyio.sleep(10 * SLOW_S if item % 4 == 3 else 0)
    return item


async def straggling(item: int) -> int:
    await anyio.sleep(1 if item % 100 == 50 else 0)
    return item


def rare(item: int) -> bool:
    return item % 10_000 == 0


async def fetch(item: Any) -> Any:
    await anyio.sleep(SLOW_S)
    return item


def quick(item: Any) -> Any:
    return item


def collecting(item: int) -> int:
    gc.collect()
    return item


@sl.source(state=dict)
def rows(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
    for item in range(shard, MANY, num_shards):
        state["n"] = item
        time.sleep(SLOW_S)
        yield item


class Hung:
    """A function whose third call doesn't return until it may."""

    def __init__(self) -> None:
        self.may_return = threading.Event()

    def __call__(self, item: int) -> int:
        if item == 2:
            self.may_return.wait()
        return item


HUNG = Hung()


@contextmanager
def a_full_heap() -> Iterator[None]:
    """Objects enough for a collection to take a while."""
    kept = [[number] for number in range(200_000)]
    yield
    kept.clear()


@contextmanager
def told(**read: Callable[..., Any]) -> Iterator[None]:
    """Let the kernel tell something else."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in read.items():
            patch.setattr(contention, name, function)
        yield


CALM: dict[str, Callable[..., Any]] = {
    "memory_wait_s": lambda: 0.0,
    "quota_periods": lambda: (0, 0),
    "gil_waits_s": lambda looks: [0.0] * looks,
    "threads": tuple,
}
"""What is told of a machine on which nobody else is at work, which isn't true of this one. Nor would a look always find
the GIL held that a thread of a test holds: where cores are busy, that doesn't get one at once (see test_contention)."""


def half_of_the_time() -> float:
    return 0.5 * time.perf_counter()


def periods() -> tuple[int, int]:
    passed = int(10 * time.perf_counter())
    return passed, passed * 9 // 10


def exporting() -> tuple[ThreadStats, ...]:
    """A thread that isn't the pipeline's computes."""
    return (ThreadStats(number=1, name="exporter", cpu_s=0.9 * time.perf_counter(), core_wait_s=0.0),)


def starved() -> tuple[ThreadStats, ...]:
    """The pipeline's thread gets a core for a fifth of the time, and could use one for all of it."""
    now = time.perf_counter()
    loop = next((each.native_id for each in threading.enumerate() if each.name == "streamline loop"), None)
    return (ThreadStats(number=loop or 0, name="streamline loop", cpu_s=0.2 * now, core_wait_s=0.7 * now),)


class _Answers(BaseHTTPRequestHandler):
    """Lines, to each second request: to the others, that it should be made again."""

    protocol_version = "HTTP/1.1"
    asked = itertools.count()

    def do_GET(self) -> None:
        body = b"line\n" * 20
        time.sleep(SLOW_S)
        busy = next(self.asked) % 2 == 0
        self.send_response(503 if busy else 200)
        self.send_header("Retry-After", "0")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(0 if busy else len(body)))
        self.end_headers()
        if not busy:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def a_busy_server() -> Iterator[str]:
    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@dataclass(frozen=True)
class Fault:
    """A stream with a fault.

    Attributes:
      rule, by: as the metric `streamline.limit` has them.
      words: that the page says of it, at the beginning of its headline or in what follows.
      around: what runs beside the stream, or what else is wrong.
      body_s: how long the loop's body takes.
    """

    pipe: Pipe
    rule: str
    by: str
    words: str
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    body_s: float = 0.0


FAULTS = {
    "a slow function": Fault(ITEMS.map(quick).map(slow), "loop", "map(slow)", "map(slow) limits"),
    "a slow service": Fault(ITEMS.map(fetch, concurrency=4), "calls", "map(fetch)", "map(fetch) limits"),
    "a small limit": Fault(
        ITEMS.map(fetch, concurrency=8, limit=sl.Limit(1)), "limit", "map(fetch)", "The limit= of map(fetch) limits"
    ),
    "a slow component of a mixture": Fault(
        sl.mix({"web": ITEMS, "code": rows()}, {"web": 1, "code": 1}), "loop", "source(code/rows)",
        "source(code/rows) limits"
    ),
    "a slow loop": Fault(ITEMS.map(quick), "consumer", "consumer", "The pipeline keeps up", body_s=10 * SLOW_S),
    "a thread that keeps the GIL": Fault(
        ITEMS.map(fetch, concurrency=4), "gil", "process", "The thread 'exporter' limits",
        partial(told, gil_waits_s=lambda looks: [0.005] * looks, threads=exporting),
    ),
    "pauses of the collector": Fault(
        ITEMS.map(collecting), "collector", "process", "Python's garbage collector limits", a_full_heap
    ),
    "memory that is short": Fault(
        ITEMS.map(slow), "memory", "process", "The machine's memory limits",
        partial(told, memory_wait_s=half_of_the_time),
    ),
    "a quota that is used up": Fault(
        ITEMS.map(slow), "quota", "process", "The CPU quota of this container limits",
        partial(told, quota_periods=periods),
    ),
    "cores that others use": Fault(
        ITEMS.map(slow), "cores", "process", "The machine's cores limit", partial(told, threads=starved)
    ),
    "a filter that drops nearly all": Fault(
        ITEMS.filter(rare).map(quick), "selective filter", "filter(rare)", "filter(rare) keeps 1 of"
    ),
    "stragglers": Fault(
        ITEMS.map(straggling, concurrency=16).map(quick), "order", "map(straggling)", "while slow ones hold up"
    ),
    "a skewed shard": Fault(
        ITEMS.shard(4).map(skewed), "uneven workers", "map(skewed)", "map(skewed) of shard 3 limits"
    ),
}  # fmt: skip
"""Some of each kind: which limit is named of which pipeline, runtime/test_verdict.py says."""


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EVERY_S", 0.05)
    monkeypatch.setattr(page, "MOST_TIME_SHARE", 1.0)
    monkeypatch.setattr(contention, "LOOK_S", 0.02)


@contextmanager
def consumed(pipe: Pipe, body_s: float = 0.0, **options: Any) -> Iterator[Any]:
    """Consume in another thread, as long as the block lasts."""
    ended, opened, streams = threading.Event(), threading.Event(), []

    def consume() -> None:
        with pipe.open(page=True, **options) as stream:
            streams.append(stream)
            opened.set()
            for _ in stream:
                if ended.is_set() or (body_s and ended.wait(body_s)):
                    return

    thread = threading.Thread(target=consume)
    thread.start()
    assert opened.wait(LONGEST_S)
    try:
        yield streams[0]
    finally:
        ended.set()
        thread.join()


def headlines(stream: Any) -> Iterator[str]:
    """Yield what the page says first, as it changes, and fail when what should come doesn't."""
    deadline, last = time.monotonic() + LONGEST_S, ""
    with closing(updates(stream.page)) as found:  # type: ignore[type-var]
        for text in found:
            (shown,) = json.loads(text)["streams"]
            verdict = shown["verdict"]
            last = "; ".join(filter(None, (verdict["words"], verdict["rest"], verdict["advice"])))
            yield last
            assert time.monotonic() < deadline, f"it says only: {last}"


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("name", mostly_long(FAULTS, 3))
def test_a_fault_is_named_by_page_metrics_and_verdict(name: str) -> None:
    fault = FAULTS[name]
    with told(**CALM), fault.around():
        contention.CONTENTION.read()  # the stream's first picture may be of what was seen last: else of another test
        with consumed(fault.pipe, fault.body_s) as stream:
            insist_named(fault, stream)


def insist_named(fault: Fault, stream: Any) -> None:
    for line in headlines(stream):
        verdict = stream.stats().verdict
        named = {
            "page": fault.words in line,
            "verdict": verdict is not None and verdict.rule == fault.rule,
            "metrics": f'by="{fault.by}",rule="{fault.rule}"' in asked(stream.page, "metrics")[0],
        }
        print(time.monotonic(), named, verdict and verdict.rule)  # what a failure shows
        if all(named.values()):
            break


def test_a_call_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STALLED_S", 0.1)
    HUNG.may_return.clear()
    with consumed(ITEMS.map(quick).map(HUNG, executor="thread", concurrency=2)) as stream:
        try:
            assert any("Nothing comes" in line and "map(Hung)" in line for line in headlines(stream))
        finally:
            HUNG.may_return.set()


def test_a_busy_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_S", 0.0)
    with told(**CALM), a_busy_server() as url:
        pipe = sl.read_lines([f"{url}/{number}.txt" for number in range(4)]).repeat()
        with consumed(pipe) as stream:
            assert any("requests were repeats: the server is busy" in line for line in headlines(stream))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def bad(item: int) -> int:
        raise ValueError(item)

    path = tmp_path / "dead.jsonl"
    with ITEMS.map(bad).open(on_error="skip", dead_letters=path) as stream:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(sl.errors.DeadLetterError, match=f"No space left on device: '{path}'"):
            next(stream)
        monkeypatch.undo()
