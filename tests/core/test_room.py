"""Room in a channel for items that take no time to make: wider, by a clock that the test moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import streamline as sl
import streamline.core.capacity
import streamline.core.channel
import streamline.core.driver
import streamline.core.pace
from streamline.core.capacity import LIST_ITEMS, LONG_LIST_ITEMS, QUICK_ITEM_S, Capacity
from streamline.core.channel import Channel
from streamline.core.driver import drive
from streamline.core.figures import ChannelStats
from streamline.core.flow import Chunk, Flow
from streamline.core.state import At, CountedStates
from tests.kit import AsyncTest

Run = Callable[[AsyncTest], None]

BEGIN = At("items", 0)
USUAL, WIDEST = 512, 2048


class Clock:
    """Stands still, but for what a test adds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(streamline.core.channel, "perf_counter", found)
    return found


class Source(Flow[int]):
    """Endless; each item takes `item_s`."""

    def __init__(self, clock: Clock, item_s: float) -> None:
        super().__init__(BEGIN)
        self.clock, self.item_s = clock, item_s
        self.given, self.longest = 0, 0

    async def _next(self, limit: int) -> Chunk[int] | None:
        self.clock.now += limit * self.item_s
        first, self.given, self.longest = self.given, self.given + limit, max(self.longest, limit)
        return Chunk(range(first, first + limit), CountedStates("items", first + 1))


async def filled(channel: Channel[int], source: Source, taken: int) -> None:
    """Let `source` fill the channel, take so many items, let it fill it again, and end it."""
    async with anyio.create_task_group() as group:
        group.start_soon(drive, source, channel, channel.gate)
        await anyio.wait_all_tasks_blocked()
        while taken > 0:
            taken -= len((await channel.inbox.pull(min(taken, LONG_LIST_ITEMS)) or Chunk((), ())).items)
        channel.inbox.release()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(("item_s", "most"), [(QUICK_ITEM_S / 2, WIDEST), (QUICK_ITEM_S * 2, USUAL)])
def test_a_channel_is_wider_for_items_that_take_no_time(run: Run, clock: Clock, item_s: float, most: int) -> None:
    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(USUAL, widest=WIDEST))
        meter = channel.meter = ChannelStats(name="items", capacity=USUAL)
        source = Source(clock, item_s)
        await filled(channel, source, 400)
        assert channel.capacity.held == channel.capacity.items == meter.capacity == meter.peak == most
        assert source.given == 400 + most
        assert source.longest == (LONG_LIST_ITEMS if most == WIDEST else LIST_ITEMS)

    run(test)


def test_the_first_filling_of_a_channel_says_nothing_of_its_items(run: Run, clock: Clock) -> None:
    """It is unknown when it began: the source may have waited."""

    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(USUAL, widest=WIDEST))
        await filled(channel, Source(clock, 0.0), 0)
        assert channel.capacity.held == USUAL

    run(test)


def test_room_is_back_to_its_usual_size_after_slow_items(run: Run, clock: Clock) -> None:
    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(USUAL, widest=WIDEST))
        source = Source(clock, 0.0)
        async with anyio.create_task_group() as group:
            group.start_soon(drive, source, channel, channel.gate)
            for _ in range(2):
                await anyio.wait_all_tasks_blocked()
                await channel.inbox.pull(200)
            await anyio.wait_all_tasks_blocked()
            assert channel.capacity.held == WIDEST
            source.item_s = 1.0
            for _ in range(30):
                await channel.inbox.pull(200)
                await anyio.wait_all_tasks_blocked()
            assert channel.capacity.held <= USUAL
            assert channel.capacity.longest == LIST_ITEMS
            group.cancel_scope.cancel()

    run(test)


@pytest.mark.parametrize("most", [1, 100, 512, 600, 5000])
def test_a_bound_holds_however_quick_items_are(run: Run, clock: Clock, most: int) -> None:
    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(USUAL, widest=WIDEST))
        channel.capacity.limit_to(most)
        await filled(channel, Source(clock, 0.0), min(most, 400))
        assert channel.capacity.held <= most
        assert (channel.capacity.held == WIDEST) == (most > WIDEST)

    run(test)


def test_what_is_kept_for_another_end_is_no_wider(run: Run, clock: Clock) -> None:
    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(USUAL, widest=WIDEST))
        assert channel.inbox.keep() == USUAL
        async with anyio.create_task_group() as group:
            group.start_soon(drive, Source(clock, 0.0), channel, channel.gate)
            for _ in range(4):
                await channel.inbox.pull(200)
                await anyio.wait_all_tasks_blocked()
                channel.inbox.free(200, 0)
            await anyio.wait_all_tasks_blocked()
            assert channel.capacity.held == USUAL
            group.cancel_scope.cancel()

    run(test)


def test_a_budget_of_bytes_holds_however_quick_items_are(run: Run, clock: Clock) -> None:
    """An int has 32 bytes or less: a list stands where an item stands."""

    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(USUAL, 8000, by_list=True, widest=WIDEST))
        await filled(channel, Source(clock, 0.0), 400)
        assert 0 < channel.capacity.held_bytes <= 8000 + LONG_LIST_ITEMS * 32

    run(test)


class Counting:
    """Endless for a test; counts how many were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int, /) -> int:
        self.asked += 1
        return index


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stages", ["none", "map after the merge", "batch"])
def test_a_consumer_that_stops_holds_no_more_than_is_declared(
    run: Run, monkeypatch: pytest.MonkeyPatch, shards: int, stages: str
) -> None:
    """On any machine, whatever the clock: each item takes no time at all, or every one its time."""
    monkeypatch.setattr(streamline.core.pace, "SLICE_S", math.inf)  # else the consumer has turns while it fills
    monkeypatch.setattr(streamline.core.driver, "HANDOVER_S", math.inf)
    for item_s in (math.inf, 0.0):
        monkeypatch.setattr(streamline.core.capacity, "QUICK_ITEM_S", item_s)
        items = Counting()
        pipe: sl.Pipeline[Any] = sl.from_items(items).shard(shards)
        if stages == "map after the merge":
            pipe = pipe.merge().map(abs)
        if stages == "batch":
            pipe = pipe.batch(4)

        async def test(pipe: sl.Pipeline[Any] = pipe, items: Counting = items, quick: bool = item_s > 0) -> None:
            taken = 0
            async with pipe.open() as stream:
                for _ in range(5_000):
                    found = await anext(stream)
                    taken += len(found) if stages == "batch" else 1
                await anyio.wait_all_tasks_blocked()
            assert items.asked - taken <= pipe.max_in_flight
            if shards == 1 and stages == "none":
                assert items.asked - taken > (USUAL if quick else 0)

        run(test)


def test_batches_never_take_no_time() -> None:
    pipe = sl.from_items(range(9)).batch(4)
    assert pipe.plan.worker_widest(1) == pipe.plan.worker_capacity(1) == USUAL // 4
    assert sl.from_items(range(9)).plan.worker_widest(1) == WIDEST
