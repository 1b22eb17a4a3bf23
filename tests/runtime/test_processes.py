"""Ctrl-C and the interpreter's exit, each in a Python of its own; anything on its stderr fails."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.kit import LONGEST_S

Python = Callable[..., str]
Start = Callable[..., "AbstractContextManager[subprocess.Popen[str]]"]

PRELUDE = """
import asyncio, sys, threading, time
import anyio
import streamline as sl

async def stuck_later(item):
    if item >= 5:
        await anyio.sleep_forever()
    return item

def slow(item):
    if item >= 5:
        time.sleep(0.3)
    return item

def stuck(item):
    time.sleep(10_000 if item >= 5 else 0.002)
    return item

@sl.stage(stateless=True)
async def stage(items):
    async for item in items:
        yield await stuck_later(item)

async def source():
    for item in range(5):
        yield item
    await anyio.sleep_forever()

PIPES = {
    "running": sl.from_items(range(10**6)).shard(4).map(abs).merge(),
    "stuck": sl.from_items(range(10**6)).map(stuck_later, concurrency=3),
    "source": sl.from_iterable(source),
    "workers": sl.from_items(range(10**6)).shard(4).map(stuck_later).merge("best_effort"),
    "stage": sl.from_items(range(10**6)).through(stage).prefetch(2),
    "threads": sl.from_items(range(10**6)).map(slow, executor="thread", concurrency=2),
    "blocked threads": sl.from_items(range(10**6)).map(stuck, executor="thread", concurrency=2),
}
pipe = PIPES[%r]


def run(main, loop):
    if loop == "uvloop":
        import uvloop
        return uvloop.run(main())
    return asyncio.run(main())

def alone():
    deadline = time.monotonic() + 100
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() == 1
"""

SHAPES = ["running", "stuck", "source", "workers", "stage", "threads", "blocked threads"]
LOOPS = ["asyncio", "uvloop"]
TURNS = [SHAPES[::2], SHAPES[1::2]]
"""Which go one after the other in one interpreter. The threads that are blocked are daemons: they can't be stopped, and
stop nobody; so they come last."""


def interrupt(process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C when the script says that it is ready."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)  # not for anything to happen: so that it is most likely to be waiting when it is struck
    process.send_signal(signal.SIGINT)


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send Ctrl-C when the script says that it is ready, and return what it says then."""
    interrupt(process)
    return process.communicate(timeout=LONGEST_S)


def check_each_is_interrupted(process: subprocess.Popen[str], shapes: list[str]) -> None:
    """Interrupt the loops of a script in turn; each says whether nothing is left of it."""
    assert process.stdout is not None
    for shape in shapes[:-1]:
        interrupt(process)
        assert process.stdout.readline() == f"{shape} True\n"
    assert interrupted(process) == (f"{shapes[-1]} True\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize("shapes", [TURNS[0], pytest.param(TURNS[1], marks=pytest.mark.long)])
def test_ctrl_c_in_a_plain_loop_ends_it_and_leaves_nothing(shapes: list[str], start_python: Start) -> None:
    """With `open` and without; "running" is struck in the loop's body, the others while they wait."""
    script = (
        PRELUDE % "running"
        + f"""
def bare(pipe):
    for item in pipe:
        ready(item)

def opened(pipe):
    with pipe.open() as stream:
        for item in stream:
            ready(item)

def ready(item):
    if item == 4:
        print("ready", flush=True)
        while shape == "running":
            pass

for number, shape in enumerate({shapes}):
    try:
        (bare if number % 2 else opened)(PIPES[shape])
    except KeyboardInterrupt:
        print(shape, end=" ")
    print(shape == "blocked threads" or alone(), flush=True)  # the traceback, which holds the iterator, is gone now
"""
    )
    with start_python(script) as process:
        check_each_is_interrupted(process, shapes)


@pytest.mark.long
def test_a_plain_loop_goes_on_where_ctrl_c_was_caught(start_python: Start) -> None:
    script = (
        PRELUDE % "threads"
        + """
got = []
with pipe.open() as stream:
    while len(got) < 9:
        try:
            got.append(next(stream))
            if len(got) == 5:
                print("ready", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
print(got)
"""
    )
    with start_python(script) as process:
        output, errors = interrupted(process)
    assert (output, errors) == ("interrupted\n[0, 1, 2, 3, 4, 5, 6, 7, 8]\n", "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("shapes", "loop"), [pytest.param(TURNS[0], "asyncio", marks=pytest.mark.long), (TURNS[1], "uvloop")]
)
def test_ctrl_c_in_an_async_loop_is_a_keyboard_interrupt_and_nothing_else(
    shapes: list[str], loop: str, start_python: Start
) -> None:
    script = (
        PRELUDE % "running"
        + f"""
async def main():
    async for item in PIPES[shape]:
        if item == 4:
            print("ready", flush=True)

for shape in {shapes}:
    try:
        run(main, {loop!r})
    except KeyboardInterrupt:
        print(shape, shape == "blocked threads" or alone(), flush=True)
"""
    )
    with start_python(script) as process:
        check_each_is_interrupted(process, shapes)


@pytest.mark.long
@pytest.mark.parametrize(("loop", "options"), list(zip(LOOPS, [(), ("-X", "dev")], strict=True)))
def test_an_interpreter_that_exits_under_unfinished_loops_of_all_kinds_says_nothing(
    loop: str, options: tuple[str, ...], python: Python
) -> None:
    """After first pulls that were left at any turn, and a loop that was closed with tasks of ours in it."""
    script = (
        PRELUDE % "stuck"
        + f"""
async def begin():
    for pipe in PIPES.values():
        asyncio.ensure_future(anext(aiter(pipe)))
    for _ in range(turns):
        await asyncio.sleep(0)

for turns in range(6):
    run(begin, {loop!r})

loop = asyncio.new_event_loop()
stream = aiter(pipe)
print(loop.run_until_complete(anext(stream)))
loop.close()

kept = []

async def main():
    for pipe in PIPES.values():
        kept.append(aiter(pipe))
        assert await anext(kept[-1]) == 0
        kept.append(await pipe.open().__aenter__())
        assert await anext(kept[-1]) == 0
    for pipe in PIPES.values():
        kept.append(await pipe.open().__aenter__())
        kept.append(asyncio.ensure_future(anext(kept[-1])))
    await asyncio.sleep(0)

run(main, {loop!r})

for each in PIPES.values():
    kept.append(iter(each))
    assert next(kept[-1]) == 0
    kept.append(each.open().__enter__())
    assert next(kept[-1]) == 0
    kept.append(iter(each))

for item in PIPES["running"]:
    print("leaving")
    sys.exit(3)
"""
    )
    assert python(script, *options, code=3) == "0\nleaving\n"


@pytest.mark.long
def test_a_plain_loop_in_a_thread_ends_with_the_interpreter(python: Python) -> None:
    script = (
        PRELUDE % "stuck"
        + """
begun = threading.Event()

def consume():
    for item in pipe:
        begun.set()

threading.Thread(target=consume, daemon=True).start()
begun.wait()
print("leaving")
"""
    )
    assert python(script) == "leaving\n"


@pytest.mark.long
def test_an_interpreter_whose_plain_loop_is_stuck_in_user_code_exits_all_the_same(python: Python) -> None:
    script = (
        PRELUDE % "running"
        + """
stream = iter(sl.from_items(range(100)).map(stuck))
print(next(stream))
"""
    )
    assert python(script) == "0\n"


CLOSED = """
import asyncio, itertools, os, signal, sys
import streamline as sl

pipe = sl.from_items(range(20)).shard(2).map(abs).merge()

async def in_asyncio():
    async with pipe.open() as stream:
        return [item async for item in stream]

def ways(closed):
    yield list(pipe)
    yield asyncio.run(in_asyncio())
    with pipe.open(backend=sl.Threads(2)) as stream:
        yield list(stream)
    if len(closed) == 3:
        with pipe.open(backend=sl.Processes(1)) as stream:
            yield list(stream)

if __name__ == "__main__":
    said = os.dup(2)
    for count in (1, 2, 3):
        for closed in itertools.combinations(range(3), count):
            if (child := os.fork()) == 0:
                for fd in closed:
                    os.close(fd)
                right = all(items == list(range(20)) for items in ways(closed))
                held = all(os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in closed)
                os._exit(0 if right and held else 1)
            if (status := os.waitpid(child, 0)[1]) != 0:
                os.write(said, f"{closed}: {status}".encode())
"""


@pytest.mark.long
def test_streams_run_where_stdin_stdout_or_stderr_are_closed(python: Callable[..., str]) -> None:
    """▲ uvloop aborts the process when it closes one of these descriptors."""
    assert python(CLOSED) == ""
