"""A leak fails the test that caused it: threads, child processes, open files and sockets, channels left open.

Whatever is closed without being waited for (a thread after a call, say) gets a moment to end by itself.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is installed nowhere

import streamline as sl
from streamline.backends.base import Backend
from streamline.io.storage.base import ADDED
from tests.kit import LOOPS, STANDING, AsyncTest, run_on
from tests.servers.absent import not_run

gc.disable()  # until all is collected: it takes a third of that time, in each worker

T = TypeVar("T")

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(  # the same examples each time, and no limit that a busy machine could reach
        "streamline", max_examples=50, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    settings.load_profile("streamline")

LEAVE_S = 100.0
"""How long what a test has ended may take to be gone: under 1 s is promised, where a machine does nothing else."""

COLLECT_S = 0.004
"""Seconds that a look at what a test may have left should take; after a longer one, what is there is frozen."""

SLOW = re.compile(r"Executing <.*> took \d+\.\d+ seconds")
"""What asyncio's debug mode says where a step took more than 0.1 s: on a busy machine any may. What these tests guard
is everything else that it says: coroutines never awaited, resources never closed."""

LONG_RUN_S = 600.0

SHOWN_PLACES = 60

OTHERS = ("AnyIO worker thread", "pytest_timeout")
"""Threads that are not streamline's, and live longer than a test."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run three processes on two cores: a third of the time a test waits for processes, servers and clocks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what `one_in(n, first)` leaves: of a test's cases, all but each n-th, from case `first` on."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) and not item.get_closest_marker("long"):
            test = item.nodeid.partition("[")[0]
            if not _is_nth(seen[test], *mark.args):
                item.add_marker("long")
            seen[test] += 1


def _is_nth(number: int, n: int, first: int = 0) -> bool:
    return number % n == first


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests for which a server isn't here, and after a long run, the folders and files that took longest."""
    if lines := list(not_run(terminalreporter.stats.get("skipped", ()))):
        terminalreporter.section("not run")
        for line in lines:
            terminalreporter.line(line)
    spent: dict[str, float] = defaultdict(float)
    for report in [each for reports in terminalreporter.stats.values() for each in reports]:
        path = getattr(report, "nodeid", "").partition("::")[0]
        for place in (path, path.rpartition("/")[0]):
            spent[place] += getattr(report, "duration", 0.0)
    if sum(spent.values()) > LONG_RUN_S:
        terminalreporter.section("seconds, all processes together")
        for place, seconds in sorted(spent.items(), key=lambda each: -each[1])[:SHOWN_PLACES]:
            terminalreporter.line(f"{seconds:8.1f} {place}")


@pytest.fixture(scope="session", autouse=True)
def _warm_up() -> None:
    """Let uvloop and Lance make what they keep for the life of the process: a pipe for signals, threads' event loops.

    What is there by now stays, so the collector need not look at it after every test: that is most of a test's time.
    """
    if find_spec("uvloop"):
        anyio.run(anyio.lowlevel.checkpoint, backend="asyncio", backend_options={"use_uvloop": True})
    if find_spec("lance"):
        import lance

        with suppress(ValueError):
            lance.dataset("nowhere")
    if find_spec("hypothesis"):
        from hypothesis.internal.entropy import deterministic_PRNG

        with deterministic_PRNG():  # else it warns, on Python 3.14, of a generator of its own that is frozen below
            pass
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _wait_turn_by_turn() -> Iterator[None]:
    """Let `anyio.wait_all_tasks_blocked` look at each turn of the loop: it sleeps for 0.1 s where a task has work."""

    async def wait(_: object) -> None:
        this = asyncio.current_task()
        await anyio.lowlevel.checkpoint()
        while any((at := task._fut_waiter) is None or at.done() for task in asyncio.all_tasks() - {this}):  # type: ignore[attr-defined]
            await anyio.lowlevel.checkpoint()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyio._backends._asyncio.AsyncIOBackend.wait_all_tasks_blocked", classmethod(wait))
        yield


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Let programs that tests start hear Ctrl-C, although a shell that put this into the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _storages_of_tests_are_forgotten() -> Iterator[None]:
    """Every later plan would carry a storage that a test, or a page of the docs, registers: one that may not pickle."""
    before = dict(ADDED)
    yield
    ADDED.clear()
    ADDED.update(before)


@pytest.fixture(autouse=True)
def no_leaks(_warm_up: None) -> Iterator[None]:
    """Compare what is open after the test with what was open before it."""
    before = {name: look() for name, look in LOOKS.items()}
    modules = len(sys.modules)
    yield
    begun = time.perf_counter()
    gc.collect()  # an unclosed channel or file warns here, and a warning is an error
    collecting_s = time.perf_counter() - begun
    for name, look in LOOKS.items():
        left = _until_gone(lambda look=look, name=name: look() - before[name])  # type: ignore[misc]
        assert not left, f"the test left {name}: {NAMED[name](left)}"
    if len(sys.modules) > modules or collecting_s > COLLECT_S:
        gc.freeze()  # what was imported stays, too, and what pytest keeps of thousands of tests: 0.3 s each in the end


def _programs(pids: set[Any]) -> list[str]:
    """Return what runs in these processes."""
    found = []
    for pid in sorted(pids):
        with suppress(OSError):  # it has just ended
            found.append(f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def _paths(files: set[Any]) -> list[str]:
    """Return what these descriptors are of."""
    found = []
    for fd, *_ in sorted(files):
        with suppress(OSError):  # it has just been closed
            found.append(f"{fd}: {Path(f'/proc/self/fd/{fd}').readlink()}")
    return found


NAMED: dict[str, Callable[[set[Any]], object]] = {"threads": set, "files": _paths, "processes": _programs}


def _until_gone(look: Callable[[], set[T]]) -> set[T]:
    deadline = time.monotonic() + LEAVE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def _threads() -> set[object]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(OTHERS)}


def _files() -> set[object]:
    """Return each descriptor, and what it is of, by kind and number; an event loop's has a name instead."""
    found: set[object] = set()
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - twice for each test: paths take most of the time
        try:
            of = os.fstat(fd)
            kind = stat.S_IFMT(of.st_mode)
            name = "" if kind else os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue  # the one that the listing itself used
        found.add((fd, kind, of.st_dev, of.st_ino, name))
    return found


def _children() -> set[object]:
    """Return the pids of all children; those of a thread that ends meanwhile move to another one."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none: so it is with most tests
        return set()
    while True:
        threads, found = os.listdir("/proc/self/task"), set[object]()  # noqa: PTH208
        for thread in threads:
            with suppress(OSError), open(f"/proc/self/task/{thread}/children", "rb") as file:  # noqa: PTH123
                found.update(file.read().decode().split())
        if os.listdir("/proc/self/task") == threads:  # noqa: PTH208
            return found


LOOKS: dict[str, Callable[[], set[object]]] = {"threads": _threads, "files": _files, "processes": _children}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[AsyncTest], None]:
    """Run a coroutine function to its end on each event loop; one that hangs, or leaves a task, fails."""
    return lambda test: run_on(request.param, test)


@pytest.fixture(scope="session")
def processes() -> Iterator[Backend]:
    """Two processes that are up before a test begins, so that they are no test's leak; their start would take longest.

    For tests that ask nothing of processes themselves.
    """
    with sl.Processes(2, env={STANDING: "1"}) as pool:
        with sl.from_items(range(2)).shard(2).open(backend=pool) as stream:
            list(stream)
        yield pool


@pytest.fixture(scope="session", params=["inline", "threads", "processes"])
def backend(request: pytest.FixtureRequest) -> Any:
    """Where workers may run: the same must come of each."""
    if request.param == "processes":
        return request.getfixturevalue("processes")
    return sl.Inline() if request.param == "inline" else sl.Threads(2)


@pytest.fixture
def start_python(tmp_path: Path) -> Callable[..., AbstractContextManager[subprocess.Popen[str]]]:
    """Start a script in a Python of its own, its output in pipes; one that hangs is killed."""

    @contextmanager
    def start(script: str, *options: str, stdin: int | None = None) -> Iterator[subprocess.Popen[str]]:
        path = tmp_path / "script.py"
        path.write_text(script)
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with subprocess.Popen(
            [sys.executable, *options, str(path)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


@pytest.fixture
def python(start_python: Callable[..., AbstractContextManager[subprocess.Popen[str]]]) -> Callable[..., str]:
    """Run a script in a Python of its own, and return what it printed; anything on its stderr fails."""

    def run(script: str, *options: str, code: int = 0, limit_s: float = 200) -> str:
        with start_python(script, *options) as process:
            output, errors = process.communicate(timeout=limit_s)
        told = [line for line in errors.splitlines() if not SLOW.fullmatch(line)]
        assert told == []
        assert process.returncode == code
        return output

    return run
