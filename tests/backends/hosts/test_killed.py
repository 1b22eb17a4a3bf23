"""Processes that are killed at every moment that matters: nothing is lost, doubled or moved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
import streamline.backends.hosts.connection
import streamline.backends.hosts.remote_worker
from streamline.backends.hosts.child_process import HostProcess
from tests.backends.hosts.disturbing import children
from tests.laws.profile import long_but

LENGTH = 8

pytestmark = pytest.mark.usefixtures("quietly")


async def tape() -> AsyncIterator[int]:
    for item in range(LENGTH):
        yield item


async def later(item: int) -> int:
    await anyio.sleep(item % 3 / 1000)
    return item


def twice(item: int) -> list[int]:
    return [item, -item]


def items() -> sl.Pipeline[int]:
    return sl.from_items(range(LENGTH)).shard(2)


def live() -> sl.Pipeline[int]:
    return sl.from_stream(tape).shard(2)


STRICT: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "strict": lambda: items().shuffle(window=4).map(abs).merge().batch(2, collate=None),
    "live": lambda: live().map(later, concurrency=2).merge(),
}
"""Where the order is fixed."""

FREE: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "best effort": lambda: items().map(abs).merge("best_effort", max_skips_per_round=1),
    "unordered": lambda: (
        items().map(later, concurrency=2, ordered=False).merge().flat_map(twice).batch(3, collate=None)
    ),
    "live, best effort": lambda: live().map(abs).merge("best_effort"),
}
"""Where it is chosen."""


def leaves(item: Any) -> list[int]:
    return [leaf for part in item for leaf in leaves(part)] if isinstance(item, list) else [item]


def killed_at_each_step(pipe: sl.Pipeline[Any], n: int) -> list[Any]:
    """Return what a stream gives whose processes are killed in turn, one after each item."""
    found = []
    with pipe.open(backend=sl.Processes(n, max_restarts=50)) as stream:
        for step, item in enumerate(stream):
            found.append(item)
            if victims := children():
                kill(victims[step % len(victims)])
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", STRICT)
def test_a_kill_after_every_item_keeps_the_order(name: str) -> None:
    make = STRICT[name]
    assert killed_at_each_step(make(), 2) == make().first(100)


@pytest.mark.long
@pytest.mark.parametrize("name", FREE)
def test_a_kill_after_every_item_loses_and_repeats_nothing(name: str) -> None:
    make = FREE[name]
    assert Counter(leaves(killed_at_each_step(make(), 2))) == Counter(leaves(make().first(100)))


@pytest.mark.long
@pytest.mark.parametrize("at", long_but([3], [0, 3, 6]))
def test_a_snapshot_is_taken_while_a_process_dies(at: int) -> None:
    pipe = items().shuffle(window=4).merge()
    whole = pipe.first(100)
    with pipe.open(backend=sl.Processes(2)) as stream:
        found = [next(stream) for _ in range(at + 1)]
        victims = children()
        threading.Thread(target=os.kill, args=(victims[at % len(victims)], signal.SIGKILL)).start()
        snapshot = stream.snapshot()
        with stream.paused():
            assert stream.snapshot().to_json() == snapshot.to_json()
        assert found + list(stream) == whole
    with pipe.open(backend=sl.Processes(2), resume=sl.Snapshot.from_json(snapshot.to_json())) as stream:
        assert found + list(stream) == whole


@pytest.mark.long
def test_a_journal_on_disk_loses_nothing_when_processes_die(tmp_path: Path) -> None:
    def pipe() -> sl.Pipeline[int]:
        return sl.from_stream(tape, journal=tmp_path / "journal").shard(2).map(abs).merge()

    found = []
    with pipe().open(backend=sl.Processes(2)) as stream:
        for item in stream:
            found.append(item)
            if item == 3:
                for victim in children():
                    kill(victim)
            if item == 5:
                break
        snapshot = stream.snapshot()
    with pipe().open(backend=sl.Processes(2), resume=snapshot) as stream:
        found.extend(stream)
    assert found[:LENGTH] == list(range(LENGTH))


@pytest.mark.parametrize("delay_s", long_but([0.05], [0.0, 0.05, 0.2]))
def test_a_process_is_killed_while_it_starts(delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    start = HostProcess.__init__
    killed: list[threading.Timer] = []

    def dying(self: HostProcess, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if len(killed) < 2:
            timer = threading.Timer(delay_s, self.kill)
            killed.append(timer)
            timer.start()

    monkeypatch.setattr(HostProcess, "__init__", dying)
    with items().map(abs).merge().open(backend=sl.Processes(1)) as stream:
        assert list(stream) == list(range(LENGTH))
    for timer in killed:
        timer.join()


def slow_to_close(item: int) -> int:
    with suppress(BaseException):
        time.sleep(0.02)
    return item


@pytest.mark.long
@pytest.mark.parametrize("delay_s", long_but([0.005], [0.0, 0.005, 0.02]))
def test_processes_are_killed_while_the_stream_is_closed(delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streamline.backends.hosts.remote_worker, streamline.backends.hosts.connection):
        monkeypatch.setattr(module, "CLOSE_S", 10_000.0)  # which nothing may wait for
    with sl.from_items(range(1000)).shard(4).map(slow_to_close).merge().open(backend=sl.Processes(2)) as stream:
        next(stream)
        timers = [threading.Timer(delay_s, kill, (victim,)) for victim in children()]
        for timer in timers:
            timer.start()
    for timer in timers:
        timer.join()


def kill(victim: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
