"""Where the system has no room for another thread, process or file, a stream works or says so: it never hangs."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

import streamline as sl
from streamline.errors import HostError
from streamline.transforms.concurrent import ThreadedPool


async def feed() -> AsyncIterator[int]:
    for item in range(20):
        yield item


def numbers() -> sl.Pipeline[int]:
    return sl.from_items(range(20)).shard(2)


def double(item: int) -> int:
    return 2 * item


PIPES: dict[str, Callable[[Path], Any]] = {
    "inline": lambda path: numbers().map(double).open(),
    "calls in threads": lambda path: numbers().map(double, executor="thread", concurrency=3).open(),
    "unordered": lambda path: numbers().map(double, executor="thread", concurrency=3, ordered=False).open(),
    "Threads": lambda path: numbers().map(double).open(backend=sl.Threads(2)),
    "files": lambda path: sl.read_lines(__file__).map(len).batch(8).open(),
    "cache": lambda path: numbers().map(double).cache(path=path).open(),
    "journal": lambda path: sl.from_stream(feed, journal=path).shard(2).map(double).open(),
    "loader": lambda path: numbers().map(double).loader(steps_per_epoch=5),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", PIPES)
def test_whichever_thread_is_the_first_that_cannot_be_started_nothing_hangs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    refused = list[str]()
    room = left = 0

    def start_if_there_is_room(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if thread.name.startswith("streamline") and left < 0:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    def items(path: Path) -> list[Any]:
        with PIPES[kind](path) as stream:
            return [repr(item) for item in stream]

    expected = sorted(items(tmp_path / "as usual"))
    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    while True:
        left = room
        refused.clear()
        try:
            assert sorted(items(tmp_path / str(room))) == expected
        except HostError as error:
            assert f"the thread {refused[0]!r} can't be started: can't start new thread" in str(error)  # noqa: PT017
        if not refused:
            break
        room += 1
    assert room > 0


def test_out_of_memory_is_one_error_and_not_a_group_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(ThreadedPool, "_next_most", out_of_memory)
    with pytest.raises(MemoryError, match=r"no memory is left for the calls at once of map\(double\) of shard \d"):
        list(numbers().map(double, executor="thread", concurrency=3))


@pytest.mark.parametrize("loops", range(3))
def test_event_loops_that_can_not_be_made_are_an_error_that_names_the_limit(
    loops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's own, and those of its threads: it waited for one for ever."""
    left = iter(range(loops))

    def new_event_loop(make: Any = uvloop.new_event_loop) -> Any:
        if next(left, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make()

    monkeypatch.setattr(uvloop, "new_event_loop", new_event_loop)
    refused = pytest.raises(HostError, match=r"an event loop can't be made: Too many open files.*`ulimit -n`")
    with refused, numbers().map(double).open(backend=sl.Threads(2)) as stream:
        list(stream)


def test_processes_without_room_in_files_are_an_error_that_names_the_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with (
            pytest.raises(HostError, match=r"memory that processes share: File too large \(limits: `ulimit -f`"),
            numbers().map(double).open(backend=sl.Processes(1)) as stream,
        ):
            list(stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
