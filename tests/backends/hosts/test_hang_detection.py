"""A worker that gives nothing while the consumer waits for it: reported once, with its stack, and replaced if asked."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.errors import WorkerDied
from tests.backends.hosts.disturbing import children, quiet
from tests.kit import at_last
from tests.laws.profile import long_but

LENGTH, AT = 24, 13
TIMEOUT_S = 0.5


def stuck_at(marks: str, how: str) -> Any:
    """Return a function that is stuck at an item on first sight."""

    def first(item: int) -> bool:
        mark = Path(marks, f"{item}")
        if item != AT or mark.exists():
            return False
        mark.touch()
        return True

    def sleeps(item: int) -> int:
        if first(item):
            time.sleep(10_000)
        return item

    async def waits_for_ever(item: int) -> int:
        if first(item):
            await anyio.sleep_forever()
        return item

    def holds_the_lock(item: int) -> int:
        if first(item):
            ctypes.PyDLL(None).sleep(10_000)
        return item

    def is_stopped(item: int) -> int:
        if first(item):
            os.kill(os.getpid(), signal.SIGSTOP)
        return item

    return locals()[how]


HOW = {
    "sleeps": "in sleeps",
    "waits_for_ever": "in waits_for_ever",
    "holds_the_lock": "in holds_the_lock",
    "is_stopped": "it doesn't answer",
}


@pytest.mark.parametrize("how", long_but(["holds_the_lock"], HOW))
def test_a_stuck_worker_is_reported_once_with_its_stack_and_replaced(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def check(times: int) -> None:
        caplog.clear()
        marks = tmp_path / str(times)
        marks.mkdir()
        pipe = sl.from_items(range(LENGTH)).shard(2).map(stuck_at(str(marks), how)).merge()
        with pipe.open(backend=sl.Processes(1, worker_timeout=times * TIMEOUT_S, replace_stuck=True)) as stream:
            assert list(stream) == list(range(LENGTH))
        logged = [record.getMessage() for record in caplog.records if "has given nothing" in record.getMessage()]
        assert len(logged) == 1
        assert HOW[how] in logged[0]

    at_last(check)


@pytest.mark.long
def test_a_worker_that_is_stuck_again_and_again_raises(caplog: pytest.LogCaptureFixture) -> None:
    def stuck(item: int) -> int:
        if item == 1:
            time.sleep(10_000)
        return item

    pipe = sl.from_items(range(LENGTH)).shard(2).map(stuck).merge()
    backend = sl.Processes(1, worker_timeout=TIMEOUT_S, replace_stuck=True, max_restarts=2)
    found: list[int] = []
    stopped = pytest.raises(WorkerDied, match="was stuck for")
    with quiet(caplog), pipe.open(backend=backend) as stream, stopped as caught:
        found.extend(stream)
    assert found == [0]
    assert caught.value.shard == 1  # although the consumer waits for shard 0, whose loop is held


def go_on_when(reported: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not reported() and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in children():
        os.kill(child, signal.SIGCONT)


@pytest.mark.long
def test_a_worker_that_is_only_reported_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def check(times: int) -> None:
        caplog.clear()
        marks = tmp_path / str(times)
        marks.mkdir()
        pipe = sl.from_items(range(LENGTH)).shard(2).map(stuck_at(str(marks), "is_stopped")).merge()
        with pipe.open(backend=sl.Processes(1, worker_timeout=times * 0.2)) as stream:
            thread = threading.Thread(target=lambda: go_on_when(lambda: bool(caplog.records)))
            thread.start()
            assert list(stream) == list(range(LENGTH))
            thread.join()
        assert sum("has given nothing" in record.getMessage() for record in caplog.records) == 1

    at_last(check)


def test_a_slow_consumer_makes_no_worker_stuck(caplog: pytest.LogCaptureFixture) -> None:
    pipe = sl.from_items(range(LENGTH)).shard(2).map(abs).merge()

    def check(times: int) -> None:
        with pipe.open(backend=sl.Processes(1, worker_timeout=times * 0.1, replace_stuck=True)) as stream:
            next(stream)
            caplog.clear()  # starting may take longer than that
            time.sleep(times * 0.3)
            next(stream)
        assert not caplog.records

    at_last(check)
