"""What slows all stages of this process alike: Python's garbage collector, its lock (the GIL), and the machine.

Looked at when figures are read, and no more than a few times a second, whatever reads them. Nothing runs in between but
the clock of the collector. Of hosts' processes nothing is known here.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Any

from streamline.core.cpus import quota_periods
from streamline.core.figures import ContentionStats, ThreadStats
from streamline.core.forks import ForkSafeLock

LOOK_S = 0.25
"""What was seen is used again for so long."""

GIL_LOOKS = 3
"""In a row, at each look."""

GIL_WAIT_S = 0.0002
"""A look takes 60 µs where no thread wants the lock: the kernel's timers have that slack. One that computes in Python
keeps it until it calls something that waits, for the switch interval at the most: 5 ms."""

MOST_THREADS = 128
"""Whose times are read."""

PRESSURE = ("/sys/fs/cgroup{group}/memory.pressure", "/proc/pressure/memory")
"""Of this process's control group, or of the machine."""

SOME = re.compile(r"^some .*total=(\d+)", re.MULTILINE)
"""Of pressure stall information: microseconds in which a task or more waited."""


class CollectorClock:
    """How long Python's garbage collector has stopped this process, from the first look on."""

    def __init__(self) -> None:
        self.stopped_s = 0.0
        self._began = 0.0

    def __call__(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = perf_counter()
        else:
            self.stopped_s += perf_counter() - self._began


class ContentionMeter:
    """Looks at what this process contends for. One a process. From any thread."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._collector: CollectorClock | None = None
        self._gil_looks = self._gil_waits = 0
        self._seen = ContentionStats()

    def read(self) -> ContentionStats:
        """Return what was seen up to now, or up to `LOOK_S` ago."""
        if perf_counter() - self._seen.looked_s >= LOOK_S and self._lock.acquire(blocking=False):
            try:
                self._seen = self._look()
            finally:
                self._lock.release()
        return self._seen

    def _look(self) -> ContentionStats:
        if self._collector is None:
            self._collector = CollectorClock()
            gc.callbacks.append(self._collector)
        self._gil_looks += GIL_LOOKS
        self._gil_waits += sum(wait_s >= GIL_WAIT_S for wait_s in gil_waits_s(GIL_LOOKS))
        periods, throttled = quota_periods()
        return ContentionStats(
            looked_s=perf_counter(),
            collecting_s=self._collector.stopped_s,
            gil_looks=self._gil_looks,
            gil_waits=self._gil_waits,
            quota_periods=periods,
            quota_throttled=throttled,
            memory_wait_s=memory_wait_s(),
            threads=threads(),
        )


CONTENTION = ContentionMeter()


def gil_waits_s(looks: int) -> Iterator[float]:
    """Yield how long it takes to get the GIL back after it was given up, less what this thread waits for a core.

    On a busy machine, that is most of what it takes where no thread wants the lock.
    """
    with _own_times() as core_wait_s:
        waited_s = core_wait_s()
        for _ in range(looks):
            began = perf_counter()
            time.sleep(0)  # long enough for a thread that wants the lock to wake up and take it
            took_s, before_s, waited_s = perf_counter() - began, waited_s, core_wait_s()
            yield took_s - (waited_s - before_s)


@contextmanager
def _own_times() -> Iterator[Callable[[], float]]:
    """Let it be read how long this thread has waited for a core: 0 where the system doesn't tell."""
    try:
        file = FileIO("/proc/thread-self/schedstat")  # it closes itself, should Ctrl-C come here
    except OSError:
        yield lambda: 0.0
        return
    with file:
        yield lambda: 1e-9 * int(os.pread(file.fileno(), 64, 0).split()[1])


def threads() -> tuple[ThreadStats, ...]:
    """Return the threads of Python's that this process has, with their times as far as the system tells them."""
    found = [_thread(thread) for thread in threading.enumerate()[:MOST_THREADS] if thread.native_id is not None]
    return tuple(thread for thread in found if thread is not None)


def _thread(thread: threading.Thread) -> ThreadStats | None:
    number = thread.native_id or 0
    times = _text(f"/proc/self/task/{number}/schedstat").split()
    if len(times) < 2:
        return None  # it has just ended, or this isn't Linux
    return ThreadStats(number=number, name=thread.name, cpu_s=1e-9 * int(times[0]), core_wait_s=1e-9 * int(times[1]))


def memory_wait_s() -> float:
    """Return how long programs have waited for memory: of this process's control group, else of the machine."""
    file = _pressure_file()
    found = SOME.search(_text(file)) if file else None
    return 1e-6 * int(found[1]) if found is not None else 0.0


@cache
def _pressure_file() -> str | None:
    groups = re.findall(r"^0::(/.*)$", _text("/proc/self/cgroup"), re.MULTILINE) or [""]
    files = (pattern.format(group=groups[0].rstrip("/")) for pattern in PRESSURE)
    return next((file for file in files if _text(file)), None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
