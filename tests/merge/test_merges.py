"""Merges while they run: stalls, leads, selective filters, ends, ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal

import anyio
import pytest

import streamline as sl
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel
from streamline.core.state import At
from streamline.errors import PlanError
from streamline.merge.base import Inboxes
from streamline.merge.best_effort import BestEffortMerge
from tests.kit import AsyncTest, Counting

Run = Callable[[AsyncTest], None]
Kind = Literal["strict", "best_effort"]
KINDS: list[Kind] = ["strict", "best_effort"]


class Stalls:
    """An async function that waits at the items of some shards until it is released."""

    def __init__(self, stalled: set[int], num_shards: int) -> None:
        self.stalled = stalled
        self.num_shards = num_shards
        self.released = anyio.Event()

    async def __call__(self, item: int) -> int:
        if item % self.num_shards in self.stalled:
            await self.released.wait()
        return item


class Jitters:
    """An async function that gives way a random number of times."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    async def __call__(self, item: int) -> int:
        for _ in range(self.chance.choice([0, 0, 1, 2, 9])):
            await anyio.lowlevel.checkpoint()
        return item


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("skips", "lead"), [(1, 1), (1, 3), (2, 8), (7, 2), (7, 20)])
def test_no_worker_is_ever_further_ahead_than_max_lead(skips: int, lead: int, seed: int, run: Run) -> None:
    lengths = {0: 90, 1: 90, 2: 40, 3: 90, 4: 7}  # of shards: their spread counts while they are active
    pipe = sl.from_items(range(450)).shard(5).filter(lambda item: item // 5 < lengths[item % 5])
    pipe = pipe.map(Jitters(seed), concurrency=2).merge("best_effort", max_skips_per_round=skips, max_lead=lead)

    async def test() -> None:
        items: list[int] = []
        async with pipe.open() as stream:
            async for item in stream:
                items.append(item)
                produced = stream.snapshot().produced
                assert sum(produced) == len(items)
                active = [count for shard, count in enumerate(produced) if count < lengths[shard]]
                if len(active) > 1:
                    assert max(active) - min(active) <= lead
        for shard, length in lengths.items():
            assert [item for item in items if item % 5 == shard] == [shard + 5 * at for at in range(length)]

    run(test)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lead", [1, 2, 50])
def test_no_skips_is_strict_order(lead: int, seed: int, run: Run) -> None:
    chance = random.Random(seed)
    kept = {item for item in range(600) if chance.random() < 0.6 and item % 4 != seed}  # one shard is empty
    pipe = sl.from_items(range(600)).shard(4).filter(kept.__contains__, name="kept").map(Jitters(seed), concurrency=3)

    async def test() -> None:
        strict = [item async for item in pipe.merge()]
        unskipping = pipe.merge("best_effort", max_skips_per_round=0, max_lead=lead)
        assert [item async for item in unskipping] == strict
        assert set(strict) == kept

    run(test)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stalled", [{0}, {2}, {3}])
@pytest.mark.parametrize("lead", [1, 5, 40])
def test_one_stalled_worker_of_four_stops_the_others_only_at_max_lead(stalled: set[int], lead: int, run: Run) -> None:
    async def test() -> None:
        stalls = Stalls(stalled, 4)
        pipe = sl.from_items(range(400)).shard(4).map(stalls)
        async with pipe.merge("best_effort", max_skips_per_round=1, max_lead=lead).open() as stream:
            got = [await anext(stream) for _ in range(3 * lead)]
            assert not stalled & {item % 4 for item in got}
            with anyio.move_on_after(0.01) as scope:
                await anext(stream)
            assert scope.cancelled_caught
            stalls.released.set()
            got += [item async for item in stream]
        assert sorted(got) == list(range(400))

    run(test)


@pytest.mark.parametrize(("produced", "waits_for"), [([0, 2], [0]), ([0, 1], [1, 0]), ([5, 4], [1, 0]), ([6, 4], [1])])
def test_a_best_effort_merge_waits_for_no_worker_that_leads_too_far(produced: list[int], waits_for: list[int]) -> None:
    inboxes = Inboxes.of([Channel[int](At("items", 0), Capacity(8)).inbox for _ in range(2)])
    own = {"produced": produced, "next_worker": 1, "replay": []}
    merge = BestEffortMerge("merge", inboxes, own, max_skips_per_round=1, max_lead=2)
    assert [worker for worker, _ in merge.awaited()] == waits_for


@pytest.mark.parametrize("skips", [1, 2, 3, 9])
def test_three_stalled_workers_of_four_need_as_many_skips(skips: int, run: Run) -> None:
    async def test() -> None:
        stalls = Stalls({1, 2, 3}, 4)
        pipe = sl.from_items(range(400)).shard(4).map(stalls)
        expected = [0, 4, 8, 12, 16, 20] if skips >= 3 else [0]
        async with pipe.merge("best_effort", max_skips_per_round=skips, max_lead=6).open() as stream:
            got = [await anext(stream) for _ in expected]
            assert got == expected
            with anyio.move_on_after(0.05) as scope:
                await anext(stream)
            assert scope.cancelled_caught
            stalls.released.set()
            got += [item async for item in stream]
        assert sorted(got) == list(range(400))

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_no_task_is_busy_while_all_workers_are_stalled(kind: Kind, run: Run) -> None:
    async def test() -> None:
        stalls = Stalls({0, 1, 2, 3}, 4)
        pipe = sl.from_items(range(400)).shard(4).map(stalls, concurrency=8).merge(kind)
        async with pipe.open() as stream, anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            await anyio.wait_all_tasks_blocked()
            began = time.process_time()
            await anyio.sleep(0.2)  # what is measured, not waited for
            assert time.process_time() - began < 0.1
            stalls.released.set()

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_no_task_is_busy_while_a_plain_loop_waits(kind: Kind) -> None:
    async def stuck(item: int) -> int:
        if item >= 8:
            await anyio.sleep_forever()
        return item

    with sl.from_items(range(400)).shard(4).map(stuck).merge(kind).open() as stream:
        assert sorted(next(stream) for _ in range(8)) == list(range(8))
        began = time.process_time()
        time.sleep(0.2)  # what is measured, not waited for
        assert time.process_time() - began < 0.1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropped", [20_000])
def test_a_worker_whose_filter_drops_many_items_in_a_row_stops_no_other_for_ever(
    kind: Kind, dropped: int, run: Run
) -> None:
    length = dropped * 4 + 4000

    def keep(item: int) -> bool:
        return item % 4 != 1 or not 100 <= item // 4 < 100 + dropped

    async def test() -> None:
        pipe = sl.from_items(range(length)).shard(4).filter(keep).merge(kind)
        assert sorted([item async for item in pipe]) == [item for item in range(length) if keep(item)]

    run(test)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_filters_that_pass_nothing_end(kind: Kind, shards: int, run: Run) -> None:
    async def test() -> None:
        pipe = sl.from_items(range(10_000)).shard(shards).filter(lambda item: False).merge(kind)
        assert [item async for item in pipe] == []

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_more_shards_than_items_end(kind: Kind, run: Run) -> None:
    async def test() -> None:
        assert sorted([item async for item in sl.from_items(range(3)).shard(50).map(abs).merge(kind)]) == [0, 1, 2]

    run(test)


# A filter that passes 1 in 40,000 -----------------------------------------------------------------------------------

RARE = 40_000


def rare(item: int) -> bool:
    return item % RARE == RARE - 1


SELECTIVE: dict[str, Callable[[Any], Any]] = {
    "one worker": lambda pipe: pipe.filter(rare),
    "two filters": lambda pipe: pipe.filter(lambda item: item % 10 == 9).filter(rare),
    "two workers": lambda pipe: pipe.shard(2).filter(rare).merge(),
    "two workers, best effort": lambda pipe: pipe.shard(2).filter(rare).merge("best_effort"),
    "after the merge": lambda pipe: pipe.shard(2).merge().filter(rare).map(abs),
    "through channels": lambda pipe: pipe.filter(rare).prefetch(3).map(Jitters(0), concurrency=2).prefetch(2),
    "before a custom stage": lambda pipe: pipe.filter(rare).flat_map(lambda item: [item]).batch(1).unbatch(),
}


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("shape", SELECTIVE)
def test_a_snapshot_while_the_consumer_waits_after_a_selective_filter_rereads_little(shape: str, run: Run) -> None:
    source = Counting(4 * RARE)
    pipe = SELECTIVE[shape](sl.from_items(source))

    async def test() -> None:
        async with pipe.open() as stream, anyio.create_task_group() as group:

            async def consume() -> None:
                async for _ in stream:
                    pass

            group.start_soon(consume)
            while source.asked < RARE // 2:
                await anyio.lowlevel.checkpoint()
            asked = source.asked
            snapshot = stream.snapshot()
            group.cancel_scope.cancel()
        source.asked = 0
        async with pipe.open(resume=snapshot) as stream:
            first = await anext(stream)
            await stream.aclose()
        assert rare(first)
        # of two workers only one has rare items: strict order waits for the other's end, and so reads all
        assert source.asked <= (4 * RARE if "workers" in shape else RARE) - asked + 12_000

    run(test)


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("shape", SELECTIVE)
def test_a_snapshot_after_an_item_of_a_selective_filter_reads_almost_nothing_again(shape: str) -> None:
    source = Counting(2 * RARE)
    pipe = SELECTIVE[shape](sl.from_items(source))
    with pipe.open() as stream:
        first = next(stream)
        snapshot = stream.snapshot()
    source.lowest = 2 * RARE
    with pipe.open(resume=snapshot) as stream:
        rest = list(stream)
    assert sorted([first, *rest]) == [RARE - 1, 2 * RARE - 1]
    assert source.lowest >= (0 if "workers" in shape else RARE - 1000)


# Ranks --------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def test_unsharded_on_several_ranks_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"each of the 8 ranks would read everything.*\.shard\("):
        sl.from_items(range(10)).open(rank=0, world_size=8)


def test_fewer_shards_than_ranks_are_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"4 shards for 8 ranks.*\.shard\(8\)"):
        sl.from_items(range(10)).shard(4).open(rank=0, world_size=8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_rank_runs_its_own_shards(kind: Kind, world_size: int) -> None:
    pipe = sl.from_items(range(100)).shard(5).map(abs).merge(kind)
    seen: list[int] = []
    for rank in range(world_size):
        with pipe.open(rank=rank, world_size=world_size, ends="allow") as stream:
            mine = list(stream)
            assert list(stream.snapshot().shards) == list(range(rank, 5, world_size))
        assert {item % 5 for item in mine} == set(range(rank, 5, world_size))
        seen += mine
    assert sorted(seen) == list(range(100))


def test_torchruns_variables_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(sl.from_items(range(8)).shard(4)) == [1, 3, 5, 7]
    with pytest.raises(PlanError, match="each of the 2 ranks"):
        list(sl.from_items(range(8)))
    with sl.from_items(range(8)).open(rank=0, world_size=1) as stream:  # given beats found
        assert list(stream) == list(range(8))


def test_a_slurm_batch_script_is_alone_and_a_step_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert list(sl.from_items(range(8)).shard(4)) == list(range(8))
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert list(sl.from_items(range(8)).shard(4)) == [1, 3, 5, 7]


@pytest.mark.parametrize(
    "given", [{"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}]
)
def test_half_a_rank_or_one_outside_its_world_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        sl.from_items(range(10)).shard(4).open(**given)
