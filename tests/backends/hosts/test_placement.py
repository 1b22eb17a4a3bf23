"""Hosts that come and go while a run goes on: who runs which worker then, and that nothing is lost or comes twice."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.hosts.placement import Elasticity, Placement
from streamline.backends.hosts.remote_worker import RemoteWorker
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.link import Link
from streamline.core.tasks import Tasks
from streamline.errors import HostError
from tests.copying_backend import Copying, HostDeath
from tests.kit import in_virtual_time
from tests.laws.profile import sampled

LENGTH = 3000

OFTEN = tuple(HostDeath(link, received=5 + 7 * link % 11) for link in range(12))


def pipeline(length: int = LENGTH, shards: int = 6) -> sl.Pipeline[int]:
    return sl.from_items(range(length)).shard(shards).shuffle(window=8).map(lambda item: item * item).merge()


async def slow(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return item


def quick(item: int) -> int:
    return item


async def all_of(stream: sl.Stream[int]) -> list[int]:
    return [item async for item in stream]


def shards_of(stream: sl.Stream[Any]) -> list[tuple[int, ...]]:
    return [host.shards for host in stream.stats().hosts]


async def test_workers_move_to_hosts_that_come_and_the_order_stays() -> None:
    pipe, seen = pipeline(), set()
    async with pipe.open(backend=Copying(3, least=1, late=(0, 300, 700))) as stream:
        got = []
        async for item in stream:
            got.append(item)
            if len(got) % 10 == 1:
                seen.add(tuple(map(len, shards_of(stream))))
            await anyio.lowlevel.checkpoint()
        stats = stream.stats()
    assert got == list(pipe)
    assert {(6, 0, 0), (3, 3, 0), (2, 2, 2)} <= seen
    assert [host.restarts for host in stats.hosts] == [0, 0, 0]
    assert all(host.items for host in stats.hosts)


async def test_work_begins_once_the_fewest_are_there() -> None:
    pipe = pipeline()
    backend = Copying(3, least=2, late=(0, 200, 10**9))
    async with pipe.open(backend=backend) as stream:
        assert await all_of(stream) == list(pipe)
        assert sorted(map(len, shards_of(stream))) == [0, 3, 3]


async def test_workers_of_hosts_that_go_move_at_once_and_no_death_counts() -> None:
    """One worker's hosts go five times in a row, with nothing in between, which would be a `WorkerDied`."""
    cuts = tuple(HostDeath(link, received=1) for link in range(5))
    pipe = pipeline()
    async with pipe.open(backend=Copying(2, cuts, least=1)) as stream:
        assert await all_of(stream) == list(pipe)
        assert sum(host.restarts for host in stream.stats().hosts) == 5


async def test_fewer_hosts_than_the_fewest_wait_then_fail() -> None:
    cuts = (HostDeath(1, received=20),)
    backend = Copying(2, cuts, least=2, late=(0, 0, 10**9), timeout_s=0.5)
    async with pipeline(60_000).open(backend=backend) as stream:
        with pytest.raises(HostError, match="1 of 2"):
            await all_of(stream)


async def test_a_host_that_comes_in_time_is_waited_for() -> None:
    cuts = (HostDeath(1, received=20),)
    backend = Copying(2, cuts, least=2, late=(0, 0, 300))
    async with pipeline().open(backend=backend) as stream:
        assert await all_of(stream) == list(pipeline())


@pytest.mark.long
async def test_counts_of_a_worker_go_on_wherever_it_runs() -> None:
    pipe = sl.from_items(range(LENGTH)).shard(2).map(slow).merge()
    async with pipe.open(backend=Copying(2, least=1, late=(0, 300))) as stream:
        assert await all_of(stream) == list(range(LENGTH))
        stats = stream.stats()
    (items,) = (stage.items for stage in stats.stages if stage.name == "slow")
    assert all(host.items for host in stats.hosts)
    assert LENGTH <= items <= LENGTH + 10  # what a move repeats counts again


@pytest.mark.long
async def test_what_a_live_source_gave_is_given_on_where_its_worker_goes() -> None:
    async def feed() -> AsyncIterator[int]:
        for item in range(LENGTH):
            yield item

    pipe = sl.from_stream(feed).shard(4).map(lambda item: item + 1).merge()
    async with pipe.open(backend=Copying(3, OFTEN, least=1, late=(0, 200, 300, 50, 20, 100))) as stream:
        assert await all_of(stream) == list(range(1, LENGTH + 1))


@pytest.mark.long
@pytest.mark.parametrize("seed", sampled(range(6), 2))
async def test_pauses_at_any_moment_of_a_move_lose_and_repeat_nothing(seed: int) -> None:
    dice = random.Random(seed)
    late = tuple(dice.randrange(400) for _ in range(16))
    cuts = tuple(HostDeath(link, received=dice.randrange(1, 60)) for link in range(10))
    pipe, got = pipeline(), []
    async with pipe.open(backend=Copying(4, cuts, least=dice.choice([1, 2]), late=late)) as stream:
        async for item in stream:
            got.append(item)
            if dice.random() < 0.02:
                async with stream.paused():
                    for _ in range(dice.randrange(60)):
                        await anyio.lowlevel.checkpoint()
                    stream.snapshot()
    assert got == list(pipe)


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("after", [0, 1, 700, LENGTH])
async def test_a_stream_may_end_while_workers_wait_or_move(after: int) -> None:
    backend = Copying(3, OFTEN, least=2, late=(0, 40, 90, 500, 600))
    got = []
    async with pipeline().open(backend=backend) as stream:
        async for item in stream:
            got.append(item)
            if len(got) >= after:
                break
    assert got == list(pipeline())[: max(after, 1)]


async def test_call_tracking_and_moves_go_together() -> None:
    """A call that ends hosts for good is found, also where its worker has moved in between."""
    cuts = (HostDeath(0, received=30), HostDeath(2, received=4))
    backend = Copying(2, cuts, least=1, late=(0, 300, 0, 200), counts=True)
    async with pipeline().open(backend=backend) as stream:
        assert await all_of(stream) == list(pipeline())


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "work"),
    [
        (Copying(4, least=1, late=(0, 20, 40, 60)), slow),
        (Copying(1, (HostDeath(0, received=5), HostDeath(1, received=5))), quick),  # calls are tracked for a while
    ],
    ids=["moved", "tracked"],
)
@pytest.mark.parametrize("dies", [False, True], ids=["", "and its host dies"])
async def test_what_came_before_a_pause_counts_where_a_worker_is_opened_again(
    backend: Copying, work: Any, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = RemoteWorker.close_to_reopen
    closed: list[Link] = []

    def close_and_pause(worker: RemoteWorker[Any]) -> None:
        close(worker)
        assert worker.link is not None
        closed.append(worker.link)
        if not worker.site.tasks.gate.holding:
            worker.site.tasks.gate.hold()

    monkeypatch.setattr(RemoteWorker, "close_to_reopen", close_and_pause)
    pipe = sl.from_items(range(LENGTH)).shard(4).map(work).merge()
    async with pipe.open(backend=backend) as stream, anyio.create_task_group() as group:
        gate = stream._session.gate

        async def resume() -> None:
            while True:
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
                if dies and len(closed) in (1, 2, 3) and gate.holding:
                    closed[-1].close()
                    for _ in range(50):
                        await anyio.lowlevel.checkpoint()
                gate.resume()

        group.start_soon(resume)
        got = await all_of(stream)
        group.cancel_scope.cancel()
    assert got == list(range(LENGTH))
    assert closed


class Alone:
    """A worker that does nothing."""

    number, finished, movable = 0, False, False
    connection: Any = None
    failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        self.failure = failure

    def close(self) -> None:
        self.finished = True


class Room:
    """A host that notes what it is given."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def take(self, worker: Any) -> None:
        self.taken.append(worker)


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_stops_the_clock_for_hosts_that_are_missing(paused: bool) -> None:
    worker: Any = Alone()
    room = Room()

    async def main() -> None:
        elasticity = Elasticity(1, 10.0, lambda _, there, least: HostError(f"{there} of {least}"))
        async with anyio.create_task_group() as group:
            tasks = Tasks(group)
            placement = Placement(elasticity, [None], CrashTracking(), tasks)  # type: ignore[list-item]
            placement.add(worker)
            placement.start(worker)
            await anyio.sleep(5)
            if paused:
                tasks.gate.hold()
            await anyio.sleep(20)
            if paused:
                tasks.gate.resume()
            await anyio.sleep(5)
            placement.host_ready(room)
            await anyio.sleep(1)
            group.cancel_scope.cancel()

    in_virtual_time(main)
    assert (room.taken == [worker]) == paused
    assert (worker.failure is None) == paused
