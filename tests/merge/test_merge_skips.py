"""How many items are skipped up to an item of a strict merge doesn't depend on which of its workers is faster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio.lowlevel
import pytest

import streamline as sl
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel
from streamline.core.error_policy import Failure
from streamline.core.flow import Chunk
from streamline.core.state import At, CountedStates, MadeStates, Skipped, State, Tally
from streamline.merge.base import DeferredProgress, Inboxes
from streamline.merge.strict import StrictMerge
from streamline.pipeline import Pipeline
from tests.kit import run_on

ORDER = [0, 1, 2, 7, 4, 6]
"""Of two shards of eight items, of which 3 and 5 are skipped."""

LATE = ["nobody", "shard 0", "shard 1", "the consumer"]


async def all_else_rests() -> None:
    """Whatever others can do before we go on, they have done."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


def pipeline(items: int, late: str) -> Pipeline[int]:
    """Return two workers and their strict merge; one of them waits for the other at each item but its first."""

    async def check(item: int) -> int:
        if late == f"shard {item % 2}" and item > 1:
            await all_else_rests()
        if item in (3, 5):
            raise ValueError(item)
        return item

    return sl.from_items(range(items)).shard(2).map(check).merge()


async def take_all(stream: sl.Stream[int], found: list[int], late: str) -> None:
    async for item in stream:
        found.append(item)
        if late == "the consumer":
            await all_else_rests()


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("items", "order"), [(8, ORDER), (7, [0, 1, 2, 4, 6])])
@pytest.mark.parametrize("count", [3, 4])
def test_skipped_items_of_a_strict_merge_count_when_it_comes_to_them(
    late: str, items: int, order: list[int], count: int
) -> None:
    async def test() -> None:
        found: list[int] = []
        async with pipeline(items, late).take(count).open(on_error="skip", max_errors=None) as stream:
            await take_all(stream, found, late)
        assert found == order[:count]
        assert stream.errors.total == (2 if count > 3 else 0)  # it looks for what comes behind 1 when it has had 2

    run_on("asyncio", test)


@pytest.mark.parametrize("late", LATE)
def test_what_a_worker_skipped_before_it_failed_counts(late: str) -> None:
    def decide(failure: Failure) -> Any:
        return "raise" if failure.item == 5 else "skip"

    async def test() -> None:
        found: list[int] = []
        async with pipeline(8, late).open(on_error=decide, max_errors=None) as stream:
            with pytest.raises(ValueError, match="5"):
                await take_all(stream, found, late)
        assert found == [0, 1, 2]
        assert stream.errors.total == 1

    run_on("asyncio", test)


# The merge alone: what comes when is posted by hand ------------------------------------------------------------------


class Worker:
    """The far end of a worker: item i is i, and what it skips it counts."""

    def __init__(self, shard: int) -> None:
        self.channel = Channel[int](At("items", 0), Capacity(100))
        self.shard = shard
        self.at = self.skipped = 0

    def gives(self) -> None:
        states = MadeStates(Skipped, "check", self.shard, self.skipped, states=CountedStates("items", self.at + 1))
        self.at += 1
        self.channel.reserve(1)
        self.channel.post(Chunk([self.at], states))

    def skips(self) -> None:
        self.at += 1
        self.skipped += 1
        self.channel.post(Chunk((), (), Skipped("check", self.shard, self.skipped, At("items", self.at))))


def merge_of(*workers: Worker) -> StrictMerge[int]:
    merge = StrictMerge("merge", Inboxes.of([worker.channel.inbox for worker in workers]))
    merge.held = DeferredProgress()
    return merge


def skipped(state: State) -> int:
    tally = Tally()
    state.tally(tally)
    return sum(tally.skipped.values())


async def pulled(merge: StrictMerge[int], limit: int) -> list[int]:
    """Return the next list, and be sure that it needs no news."""
    with anyio.fail_after(200):
        chunk = await merge.pull(limit)
    return [] if chunk is None else list(chunk.items)


Test = Callable[[Worker, Worker, StrictMerge[int]], Awaitable[None]]


def at_work(test: Test) -> None:
    """Run a test of two workers; each gave an item, the second skipped one behind it, and has the turn but one."""

    async def run() -> None:
        workers = Worker(0), Worker(1)
        for worker in (*workers, workers[0]):
            worker.gives()
        workers[1].skips()
        async with aclosing(merge_of(*workers)) as merge:
            await test(*workers, merge)

    run_on("asyncio", run)


def test_what_is_skipped_at_a_workers_end_counts_at_the_next_item() -> None:
    async def test(first: Worker, second: Worker, merge: StrictMerge[int]) -> None:
        first.gives()
        second.channel.finish()
        assert await pulled(merge, 10) == [1, 1]
        assert await pulled(merge, 10) == [2]
        chunk = await merge.pull(10)
        assert chunk is not None
        assert list(chunk.items) == [3]
        assert skipped(chunk.states[0]) == 1

    at_work(test)


def test_what_is_skipped_before_a_failure_comes_before_it() -> None:
    async def test(first: Worker, second: Worker, merge: StrictMerge[int]) -> None:
        second.channel.fail(ValueError("at the third"))
        assert await pulled(merge, 10) == [1, 1]
        assert await pulled(merge, 1) == [2]
        assert skipped(merge.state) == 0
        assert await pulled(merge, 10) == []
        assert skipped(merge.state) == 1
        with pytest.raises(ValueError, match="at the third"):
            await merge.pull(10)

    at_work(test)


def test_what_is_held_is_told_at_its_workers_turn_and_needs_no_news() -> None:
    async def test(first: Worker, second: Worker, merge: StrictMerge[int]) -> None:
        assert await pulled(merge, 10) == [1, 1]
        assert await pulled(merge, 1) == [2]
        assert await pulled(merge, 10) == []
        assert skipped(merge.state) == 1

    at_work(test)


def test_what_was_held_is_forgotten_behind_the_next_item() -> None:
    async def test(first: Worker, second: Worker, merge: StrictMerge[int]) -> None:
        assert await pulled(merge, 10) == [1, 1]
        second.gives()
        assert await pulled(merge, 10) == [2, 3]
        for worker in (first, second):
            worker.channel.finish()
        assert await merge.pull(10) is None
        assert [state.json() for state in merge.state.workers] == [  # type: ignore[attr-defined]
            {"items": 2, "errors": {"check": 0}},
            {"items": 3, "errors": {"check": 1}},
        ]

    at_work(test)
