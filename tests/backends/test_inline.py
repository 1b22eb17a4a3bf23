"""The reference backend: one task a worker, in the stream's own event loop, and the seam that others will use."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import streamline as sl
from streamline.backends.base import Backend, Workers
from streamline.core.channel import Inbox
from streamline.core.flow import Site
from streamline.core.state import Tree
from streamline.plan.plan import Plan


class Watching:
    """A backend that notes what it is asked for, and lets `Inline` do it."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int, Tree | None]] = []

    def check(self, plan: Plan) -> None:
        """Every plan runs here."""

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        self._inline = sl.Inline().begin(plan, site, workers)
        return self

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        self.opened.append((site.shard, site.num_shards, state))
        return self._inline.open_worker(site, state, feed)


def test_backends_compare() -> None:
    assert sl.Inline() == sl.Inline()
    backend: Backend = sl.Inline()
    assert repr(backend) == "Inline()"


async def test_workers_run_in_the_streams_own_loop() -> None:
    seen: set[object] = set()

    def note(item: int) -> int:
        seen.add((threading.current_thread(), asyncio.get_running_loop()))
        return item

    async with sl.from_items(range(20)).shard(4).map(note).open(backend=sl.Inline()) as stream:
        assert [item async for item in stream] == list(range(20))
    assert seen == {(threading.current_thread(), asyncio.get_running_loop())}


async def test_each_worker_is_a_task_of_its_own() -> None:
    seen: set[object] = set()

    def note(item: int) -> int:
        seen.add(asyncio.current_task())
        return item

    async with sl.from_items(range(20)).shard(4).map(note).open() as stream:
        assert len([item async for item in stream]) == 20
    assert len(seen) == 4
    assert asyncio.current_task() not in seen, "user code never runs in the consumer's task"


def test_a_backend_opens_one_worker_per_shard_of_its_rank_at_its_state() -> None:
    pipe = sl.from_items(range(20)).shard(5)
    first = Watching()
    with pipe.open(backend=first, rank=1, world_size=2) as stream:
        assert [next(stream), next(stream), next(stream)] == [1, 3, 6]
        snapshot = stream.snapshot()
    assert first.opened == [(1, 5, None), (3, 5, None)]
    second = Watching()
    with pipe.open(backend=second, rank=1, world_size=2, resume=snapshot) as stream:
        assert list(stream) == [8, 11, 13, 16, 18]
    assert second.opened == [(1, 5, {"items": 2}), (3, 5, {"items": 1})]


def test_the_backend_is_no_part_of_a_snapshot() -> None:
    pipe = sl.from_items(range(6)).shard(2)
    with pipe.open(backend=Watching()) as stream:
        next(stream)
        snapshot = stream.snapshot()
    with pipe.open(backend=sl.Inline(), resume=snapshot) as stream:
        assert list(stream) == [1, 2, 3, 4, 5]
