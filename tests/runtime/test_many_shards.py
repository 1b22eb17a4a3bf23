"""A thousand shards: what is made before the first item, and for each of them, is counted."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Workers
from streamline.backends.hosts.connection import OPENING, HostConnection
from streamline.backends.hosts.remote_worker import RemoteWorker
from streamline.backends.ipc.link import Link
from streamline.core.channel import Inbox
from streamline.core.flow import Site
from streamline.core.state import Tree
from streamline.merge.base import FIRST_WORKERS
from streamline.plan.plan import Plan

MANY = 1000


class Counting:
    """Inline, with a count of the workers that were opened, and of those that were started."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.started: list[int] = []

    def check(self, plan: Plan) -> None:
        """Every plan runs here."""

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        self._inline = sl.Inline().begin(plan, site, workers)
        return self

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        self.opened.append(site.shard)
        inbox = self._inline.open_worker(site, state, feed)
        feeder = inbox._channel.feeder
        start = feeder.start

        def noted() -> None:
            self.started.append(site.shard)
            start()

        feeder.start = noted  # type: ignore[method-assign]
        return inbox


async def test_the_first_item_waits_for_the_first_workers_alone() -> None:
    backend = Counting()
    async with sl.from_items(range(MANY)).shard(MANY).open(backend=backend) as stream:
        assert backend.opened == list(range(FIRST_WORKERS))
        assert await anext(stream) == 0
        assert len(backend.opened) < MANY // 2
    assert backend.started == backend.opened


@pytest.mark.long
@pytest.mark.parametrize("merge", [{}, {"kind": "best_effort"}])
def test_all_workers_are_opened_and_started_once_in_turn(merge: dict[str, Any]) -> None:
    backend = Counting()
    with sl.from_items(range(3 * MANY)).shard(MANY).merge(**merge).open(backend=backend) as stream:
        found = list(stream)
    assert found == list(range(3 * MANY)) if not merge else sorted(found) == list(range(3 * MANY))
    assert sorted(backend.opened) == list(range(MANY))
    assert backend.started == backend.opened


def test_a_merge_that_waits_starts_the_others() -> None:
    """No worker is idle because the one whose turn it is takes long."""

    begun: set[int] = set()
    all_begun = anyio.Event()

    async def slow(item: int) -> int:
        begun.add(item)
        if len(begun) == 300:
            all_begun.set()
        if item == 0:
            await all_begun.wait()
        return item

    with sl.from_items(range(300)).shard(300).map(slow).open() as stream:
        assert list(stream) == list(range(300))


@pytest.mark.long
def test_a_snapshot_has_workers_that_are_not_open_yet() -> None:
    pipe = sl.from_items(range(2 * MANY)).shard(MANY).map(lambda item: item)
    with pipe.open(backend=Counting()) as stream:
        first = [next(stream) for _ in range(3)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert len(snapshot.worker_states) == MANY
    backend = Counting()
    with pipe.open(resume=snapshot, backend=backend) as stream:
        assert backend.opened == list(range(MANY)), "a state that can't be resumed is refused at the opening"
        assert next(stream) == 3
        assert len(backend.started) < MANY // 2
        assert [*first, 3, *stream] == list(range(2 * MANY))
    assert backend.started == [*range(3, MANY), 0, 1, 2]


def test_batches_after_the_merge_end_where_they_ended_with_all_workers_open() -> None:
    """What a worker is told of flush points when it is opened late is what it would have been told at the start."""
    told: dict[int, Any] = {}

    class Told(Counting):
        def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
            inbox = super().open_worker(site, state, feed)
            points = lambda: told.setdefault(site.shard, inbox._channel.flush_points)  # noqa: E731
            inbox._channel.feeder.on_flush_points = points  # type: ignore[method-assign]
            return inbox

    shards, size = 2 * FIRST_WORKERS + 1, 32
    with (
        sl.from_items(range(3 * shards)).shard(shards).merge().batch(size, collate=None).open(backend=Told()) as stream
    ):
        assert [item for batch in stream for item in batch] == list(range(3 * shards))
    assert told == {worker: (0, worker % size, shards, size) for worker in range(shards)}


def test_a_host_opens_a_few_workers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opening: list[int] = []
    actual = RemoteWorker.open

    def opened(worker: RemoteWorker[Any], link: Link) -> None:
        assert isinstance(worker.connection, HostConnection)
        opening.append(len(worker.connection._workers.opening))
        actual(worker, link)

    monkeypatch.setattr(RemoteWorker, "open", opened)
    with sl.from_items(range(600)).shard(300).open(backend=sl.Threads(2)) as stream:
        assert list(stream) == list(range(600))
    assert len(opening) == 300
    assert max(opening) == OPENING
