"""Permits of limits in the hands of hosts that die: processes that are killed, and hosts that die at each message."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from tests.copying_backend import Copying, HostDeath
from tests.laws.profile import in_turn, sampled

pytestmark = pytest.mark.usefixtures("quietly")


def stamped(item: int) -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(0.001)
    return began, time.monotonic()


def test_processes_share_a_limit_too(processes: Backend) -> None:
    """They have one clock, so that calls which overlap show in what they return."""
    limit = sl.Limit(3)
    pipe = sl.from_items(range(60)).shard(4).map(stamped, executor="thread", concurrency=8, limit=limit)
    with pipe.open(backend=processes) as stream:
        spans = list(stream)
    edges = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    assert max(sum(step for _, step in edges[: at + 1]) for at in range(len(edges))) <= 3
    assert len(spans) == 60


async def later(item: int) -> int:
    for _ in range(item % 3):
        await anyio.lowlevel.checkpoint()
    return item


class DiesOnce:
    """Ends its process at an item, once, while it has a permit."""

    def __init__(self, item: int, mark: Path) -> None:
        self._item = item
        self._mark = mark

    async def __call__(self, item: int) -> int:
        await anyio.lowlevel.checkpoint()
        if item == self._item and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item


@pytest.mark.long
def test_a_process_that_is_killed_leaves_its_permits_to_the_others(tmp_path: Path) -> None:
    """There is only one: without it, nothing would come any more."""
    fn = DiesOnce(17, tmp_path / "dead")
    pipe = sl.from_items(range(40)).shard(4).map(fn, name="call", concurrency=4, limit=sl.Limit(1))
    with pipe.open(backend=sl.Processes(2)) as stream:
        assert list(stream) == list(range(40))
        assert sum(host.restarts for host in stream.stats().hosts) == 1


@pytest.mark.parametrize(("received", "rate"), in_turn(sampled(range(0, 24, 3), 2), [None, 1e6]))
def test_a_host_dies_at_any_message(received: int, rate: float | None) -> None:
    limit = sl.Limit(2, per_second=rate)
    pipe = sl.from_items(range(30)).shard(4).map(later, concurrency=5, limit=limit)
    deaths = (HostDeath(0, received=received), HostDeath(1, received=received + 2))
    with pipe.open(backend=Copying(2, deaths)) as stream:
        assert list(stream) == list(range(30))
