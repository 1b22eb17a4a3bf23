"""Streams over hosts that are cancelled, interrupted and left: nothing is lost, nothing stays, nothing is said."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import streamline as sl
from streamline.backends.base import Backend
from tests.backends.hosts.disturbing import children
from tests.kit import LONGEST_S, Pipe
from tests.laws.profile import in_turn, long_but, sampled

Python = Callable[..., str]
Start = Callable[..., "AbstractContextManager[Popen[str]]"]

COUNT = 120


async def jitters(item: int) -> int:
    for _ in range(item * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return item


def items() -> sl.Pipeline[int]:
    return sl.from_items(range(COUNT)).shard(3)


SHAPES: dict[str, Callable[[], Pipe]] = {
    "source": items,
    "async map": lambda: items().map(jitters, concurrency=3),
    "best effort": lambda: items().map(jitters).merge("best_effort", max_skips_per_round=2),
    "after the merge": lambda: items().map(jitters).merge().flat_map(lambda item: [item]).prefetch(3, bytes=200),
    "passes": lambda: sl.from_items(range(20)).shard(2).map(jitters).merge().repeat(COUNT // 20).map(jitters),
}


async def whole(stream: sl.Stream[Any], ask: Callable[[sl.Stream[Any]], Any]) -> tuple[list[Any], int]:
    """Read to the end, however often `ask` times out; return the items and the timeouts."""
    found, timeouts = [], 0
    while True:
        try:
            found.append(await ask(stream))
        except TimeoutError:
            timeouts += 1
        except StopAsyncIteration:
            return found, timeouts


KINDS_OF_HOSTS = ["copying", "threads", "processes"]


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(
    ("shape", "loop", "hosts"),
    [(*pair, kind) for pair, kind in in_turn(in_turn(SHAPES, ["asyncio", "uvloop"]), KINDS_OF_HOSTS)],
    indirect=["hosts"],
)
def test_a_pull_may_be_cancelled_at_any_moment(shape: str, loop: str, hosts: Backend) -> None:
    dice = random.Random(f"{shape} {loop}")
    asked = 0

    async def ask(stream: sl.Stream[Any]) -> Any:
        """Ask in a task of its own, which is cancelled after some steps of the loop or some time."""
        nonlocal asked
        answer: list[Any] = []

        async def one() -> None:
            try:
                answer.append(await anext(stream))
            except StopAsyncIteration as end:
                answer.append(end)

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            asked += 1
            if asked == 1:  # nothing has come yet: this one is cancelled for sure
                group.cancel_scope.cancel()
            if dice.random() < 0.1:
                await anyio.sleep(dice.choice([0.0001, 0.001, 0.005]))
            for _ in range(dice.choice([0, 1, 2, 3, 5, 8, 20])):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        if not answer:
            raise TimeoutError
        if isinstance(answer[0], StopAsyncIteration):
            raise answer[0]
        return answer[0]

    async def test() -> None:
        truth = [item async for item in SHAPES[shape]()]
        with anyio.fail_after(200):
            async with SHAPES[shape]().open(backend=hosts) as stream:
                found, timeouts = await whole(stream, ask)
        assert found == truth if shape != "best effort" else sorted(found) == sorted(truth)
        assert timeouts

    anyio.run(test, backend_options={"use_uvloop": loop == "uvloop"})


class MineError(Exception):
    """A consumer's own."""


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize("checkpoints", sampled([0, 1, 2, 3, 5, 8, 13, 21, 50], 3))
def test_a_stream_may_be_left_at_any_moment_of_its_beginning(checkpoints: int, hosts: Backend) -> None:
    async def test() -> None:
        for _ in range(3):
            with anyio.CancelScope() as scope:
                async with SHAPES["async map"]().open(backend=hosts) as stream, anyio.create_task_group() as group:
                    group.start_soon(anext, stream)
                    for _ in range(checkpoints):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
            with pytest.raises(MineError):  # as it is, in no group
                await leave()

    async def leave() -> None:
        async with SHAPES["async map"]().open(backend=hosts) as stream:
            with anyio.move_on_after(checkpoints / 10_000):
                await anext(stream)
            raise MineError

    anyio.run(test)


@pytest.mark.one_in(2, 1)
def test_two_streams_of_two_tasks_leave_each_other_alone(hosts: Backend) -> None:
    """One is cancelled wherever it may be, again and again; the other one is whole."""
    dice = random.Random(0)

    async def disturb(until: anyio.Event) -> None:
        while not until.is_set():
            with anyio.move_on_after(dice.choice([0.0, 0.001, 0.01])):
                async with SHAPES["after the merge"]().open(backend=hosts) as stream:
                    async for _ in stream:
                        await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()

    async def test() -> None:
        done = anyio.Event()
        with anyio.fail_after(200):
            await beside(done)

    async def beside(done: anyio.Event) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(disturb, done)
            for _ in range(2):
                async with SHAPES["async map"]().open(backend=hosts) as stream:
                    assert [item async for item in stream] == list(range(COUNT))
            done.set()

    anyio.run(test)


@pytest.mark.long
@pytest.mark.parametrize("way", long_but(["del"], ["break", "exception", "del"]))
def test_leaving_a_plain_loop_ends_its_own_processes(way: str) -> None:
    before = children()
    opened = items().map(jitters).open(backend=sl.Processes(2))
    if way == "exception":
        with pytest.raises(MineError), opened as plain:
            raise MineError(next(plain))
        return
    stream = opened.sync_stream()
    next(stream)
    assert len(children()) == len(before) + 2
    if way == "break":
        stream.close()
    del stream  # what stays, conftest looks for


# In a Python of its own -----------------------------------------------------------------------------------------------

PRELUDE = """
import asyncio, contextlib, os, sys, threading, time
from pathlib import Path
import anyio
import streamline as sl

async def stuck_later(item):
    if item >= 5:
        await anyio.sleep_forever()
    return item

def slow(item):
    time.sleep(0.3 if item >= 5 else 0)
    return item

def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            found += (task / "children").read_text().split()
    return found

def alone():
    deadline = time.monotonic() + 100
    while (threading.active_count() > 1 or children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() == 1 and not children()

PIPES = {
    "running": sl.from_items(range(10**6)).shard(4).map(abs).merge(),
    "stuck": sl.from_items(range(10**6)).shard(2).map(stuck_later, concurrency=3),
    "slow": sl.from_items(range(10**6)).shard(2).map(slow),
}
pipe, backend = PIPES[%r], sl.%s(2)
"""

KINDS = ["Processes", "Threads"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("Processes", ["stuck"]),
        pytest.param("Processes", ["running", "slow"], marks=pytest.mark.long),
        pytest.param("Threads", ["running", "slow"], marks=pytest.mark.long),
    ],
)
def test_ctrl_c_in_a_plain_or_async_loop_is_an_interrupt_and_leaves_nothing(
    kind: str, shapes: list[str], start_python: Start
) -> None:
    """As a terminal does it: the whole group of processes is struck; one loop after the other in one interpreter."""
    script = PRELUDE % ("stuck", kind) + (
        f"""
import signal
os.setpgrp()

def press():
    time.sleep(0.1)
    os.killpg(0, signal.SIGINT)

def plain():
    with PIPES[shape].open(backend=backend) as stream:
        for item in stream:
            if item == 4:
                threading.Thread(target=press).start()

async def main():
    async with pipe.open(backend=backend) as stream:
        async for item in stream:
            if item == 4:
                threading.Thread(target=press).start()

for shape in [*{shapes}, "async"]:
    try:
        asyncio.run(main()) if shape == "async" else plain()
    except KeyboardInterrupt:
        print(shape, end=" ")
    print(alone())
"""
    )
    with start_python(script) as process:
        output, errors = process.communicate(timeout=200)
    assert (output, errors) == ("".join(f"{shape} True\n" for shape in [*shapes, "async"]), "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"), long_but([("Processes", ())], [("Processes", ()), ("Threads", ("-X", "dev"))])
)
def test_an_interpreter_that_exits_with_open_streams_prints_and_leaks_nothing(
    kind: str, options: tuple[str, ...], python: Python, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    script = PRELUDE % ("stuck", kind) + (
        f"""
kept = [iter(PIPES["running"].open(backend=backend).sync_stream())]
assert next(kept[-1]) == 0
kept.append(pipe.open(backend=backend).__enter__())
assert [next(kept[-1]) for _ in range(5)] == [0, 1, 2, 3, 4]

async def main():
    asyncio.get_running_loop().slow_callback_duration = 10
    kept.append(await PIPES["slow"].open(backend=backend).__aenter__())
    assert await anext(kept[-1]) == 0
    kept.append(await pipe.open(backend=backend).__aenter__())
    kept.append(asyncio.ensure_future(anext(kept[-1])))
    await asyncio.sleep(0)
    Path({str(pids)!r}).write_text(" ".join(children()))
    print("leaving")

asyncio.run(main())
"""
    )
    assert python(script, *options) == "leaving\n"
    deadline = time.monotonic() + LONGEST_S
    while left := [pid for pid in pids.read_text().split() if alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.01)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("kind", long_but(["Threads"], KINDS))
def test_an_interpreter_exits_under_a_worker_that_is_stuck_in_user_code(kind: str, python: Python) -> None:
    script = PRELUDE % ("slow", kind) + (
        """
from streamline.backends.hosts import connection, remote_worker

connection.CLOSE_S = remote_worker.CLOSE_S = 1000.0  # after that, a host is killed, and the log says so

def stuck(item):
    time.sleep(10_000 if item >= 5 else 0)
    return item

stream = sl.from_items(range(100)).shard(2).map(stuck).open(backend=backend).sync_stream()
print(next(stream))
"""
    )
    assert python(script) == "0\n"
