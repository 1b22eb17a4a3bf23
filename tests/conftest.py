"""A leak fails the test that caused it: threads, child processes, open files and sockets, channels left open.

Whatever is closed without being waited for (a thread behind a call, say) gets a moment to end by itself.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are no package

from tests.servers.absent import not_run

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
"""Seconds that a look at what a test may have left should take; behind a longer one, what is there is frozen."""

OTHERS = ("AnyIO worker thread", "pytest_timeout")
"""Threads that are not streamline's, and live longer than a test."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run three processes on two cores: a third of the time a test waits for processes, servers and clocks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests for which a server isn't here."""
    if lines := list(not_run(terminalreporter.stats.get("skipped", ()))):
        terminalreporter.section("not run")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def _warm_up() -> None:
    """Let uvloop make what it keeps for the life of the process: a pipe for signals.

    What is there by now stays, so the collector need not look at it after every test: that is most of a test's time.
    """
    if find_spec("uvloop"):
        anyio.run(anyio.lowlevel.checkpoint, backend="asyncio", backend_options={"use_uvloop": True})
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Let programs that tests start hear Ctrl-C, although a shell that put this into the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
        assert not left, f"the test left {name}: {_named(left) if name == 'processes' else left}"
    if len(sys.modules) > modules or collecting_s > COLLECT_S:
        gc.freeze()  # what was imported stays, too, and what pytest keeps of thousands of tests: 0.3 s each in the end


def _named(pids: set[Any]) -> list[str]:
    """Return what runs in these processes."""
    found = []
    for pid in sorted(pids):
        with suppress(OSError):  # it has just ended
            found.append(f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def _until_gone(look: Callable[[], set[T]]) -> set[T]:
    deadline = time.monotonic() + LEAVE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def _threads() -> set[object]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(OTHERS)}


def _files() -> set[object]:
    found: set[object] = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - twice for each test: paths take most of the time
        try:
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))  # noqa: PTH115
        except OSError:
            continue  # the one that the listing itself used
    return found


def _children() -> set[object]:
    found: set[object] = set()
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        try:
            with open(f"/proc/self/task/{task}/children", "rb") as file:  # noqa: PTH123
                found.update(file.read().decode().split())
        except OSError:
            continue
    return found


LOOKS: dict[str, Callable[[], set[object]]] = {"threads": _threads, "files": _files, "processes": _children}
