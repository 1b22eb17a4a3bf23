"""What disturbs host processes, and what must be gone after them."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from streamline.backends.hosts.connection import HostConnection
from tests.kit import LONGEST_S, STANDING

__all__ = ["Chaos", "children", "connections_of", "leaves_nothing_shared", "quiet", "recoveries"]


def children() -> list[int]:
    """Return the hosts that this process has started: servers and hosts that other tests use may not be struck."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            found += map(int, (task / "children").read_text().split())
    return sorted(filter(_is_host, found))


def _is_host(pid: int) -> bool:
    try:
        of_all = STANDING.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return not of_all and b"streamline process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False


def connections_of(stream: Any) -> list[HostConnection]:
    """Return what a stream has of each of its hosts."""
    return [holder.__self__._handle.__self__ for holder in stream._session.gate._holders]


@contextmanager
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let nothing be logged of hosts that end."""
    with caplog.at_level(logging.ERROR, "streamline.hosts"):
        yield


def _shared() -> set[str]:
    """Return what is mapped of memory without a name, and what has one."""
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line}
    return maps | {str(path) for path in Path("/dev/shm").glob("*streamline*")}


@contextmanager
def leaves_nothing_shared() -> Iterator[None]:
    """Insist that no shared memory is left, mapped or named."""
    before = _shared()
    yield
    deadline = time.monotonic() + LONGEST_S
    while left := _shared() - before:
        assert time.monotonic() < deadline, f"shared memory is left: {left}"
        gc.collect()  # a closed stream is a cycle, which its thread may still hold, and with it a list of items


class Chaos:
    """Kills, stops and continues this process's children at random moments, in a thread of its own.

    It strikes again when something was given since: on a busy machine a process takes longer to start than from one
    strike to the next, and what is killed before it has begun says nothing of how a stream goes on.

    Args:
      given: what has been given so far: a number that rises.

    Attributes:
      struck: how often, by signal.
    """

    def __init__(self, seed: int, every_s: float, given: Callable[[], int]) -> None:
        self.struck: dict[str, int] = {}
        self._given = given
        self._dice = random.Random(seed)
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos")

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        before = 0
        while not self._over.wait(self._dice.uniform(0.2, 1.8) * self._every_s):
            if self._given() == before or not (victims := children()):
                continue
            victim = self._dice.choice(victims)
            with suppress(ProcessLookupError):  # it has gone by itself
                if self._dice.random() < 0.5:
                    self._strike(victim, signal.SIGKILL)
                else:
                    self._strike(victim, signal.SIGSTOP)
                    self._over.wait(self._dice.uniform(0, self._every_s))
                    self._strike(victim, signal.SIGCONT)
            before = self._given()

    def _strike(self, victim: int, number: signal.Signals) -> None:
        os.kill(victim, number)
        self.struck[number.name] = self.struck.get(number.name, 0) + 1


@contextmanager
def recoveries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[float]]]:
    """Measure the seconds from each death that a run notices to the next item of each worker that it has struck.

    Yields:
      What returns them, sorted.
    """
    from streamline.backends.hosts.remote_worker import RemoteWorker

    lost_at: dict[tuple[int, int], float] = {}
    took_s: list[float] = []
    lost, items = RemoteWorker.on_host_lost, RemoteWorker.items

    def losing(self: RemoteWorker[object]) -> None:
        if (
            self.channel.capacity.held < self.channel.capacity.items // 2
        ):  # else it may well give nothing, run_uninterrupted
            lost_at[id(self), self.number] = time.perf_counter()
        lost(self)

    def giving(self: RemoteWorker[object], message: Any, link: Any) -> None:
        items(self, message, link)
        if (since := lost_at.pop((id(self), self.number), None)) is not None:
            took_s.append(time.perf_counter() - since)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteWorker, "on_host_lost", losing)
        patched.setattr(RemoteWorker, "items", giving)
        yield lambda: sorted(took_s)
