"""No item waits for another: bursts, slow functions, windows. Counted, not timed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

import streamline as sl
import streamline.core.channel
from streamline.core import pace
from streamline.core.pace import SLICE_S
from streamline.transforms import concurrent
from streamline.transforms.completion_order import AsCompleted
from tests.kit import AsyncTest, Counting, Pipe, Tap, in_thread, later, stage

Run = Callable[[AsyncTest], None]

BURST = 37

SHAPES: dict[str, Callable[[Pipe], Pipe]] = {
    "source": lambda pipe: pipe,
    "map": lambda pipe: pipe.map(abs),
    "filter": lambda pipe: pipe.filter(lambda item: True),
    "flat_map": lambda pipe: pipe.flat_map(lambda item: iter([item])),
    "async map": lambda pipe: pipe.map(later, concurrency=8),
    "unordered map": lambda pipe: pipe.map(later, concurrency=8, ordered=False),
    "threads": lambda pipe: pipe.map(abs, executor="thread", concurrency=2),
    "unordered threads": lambda pipe: pipe.map(abs, executor="thread", concurrency=2, ordered=False),
    "custom stage": lambda pipe: pipe.through(stage),
    "prefetch": lambda pipe: pipe.prefetch(4),
    "prefetch of bytes": lambda pipe: pipe.prefetch(50, bytes=300),
    "batch of one": lambda pipe: pipe.batch(1, collate=None).unbatch(),
    "take and skip": lambda pipe: pipe.shard(1).take(10_000).skip(0),
    "best effort": lambda pipe: pipe.merge("best_effort"),
    "behind the merge": lambda pipe: pipe.merge().map(later, concurrency=3).prefetch(2).map(abs),
    "many": lambda pipe: pipe.map(abs).through(stage).prefetch(3).map(later, concurrency=2).merge().map(abs),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_item_of_a_burst_arrives_though_no_other_follows(shape: str, run: Run) -> None:
    async def test() -> None:
        tap = Tap()
        async with SHAPES[shape](tap.pipe).open() as stream:
            for burst in range(4):
                items = list(range(burst * BURST, (burst + 1) * BURST))
                tap.put(*items)
                with anyio.fail_after(200):
                    assert sorted([await anext(stream) for _ in items]) == items

    run(test)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_item_of_a_burst_arrives_in_a_plain_loop(shape: str) -> None:
    async def source() -> AsyncIterator[int]:
        for item in range(BURST):
            yield item
        await anyio.sleep_forever()

    def consume() -> None:
        with SHAPES[shape](sl.from_iterable(source)).open() as stream:
            assert sorted(next(stream) for _ in range(BURST)) == list(range(BURST))

    in_thread(consume)


def test_a_full_batch_arrives_while_the_next_one_waits_for_items(run: Run) -> None:
    async def test() -> None:
        tap = Tap()
        async with tap.pipe.batch(4, collate=None).open() as stream:
            tap.put(*range(10))
            with anyio.fail_after(200):
                assert [await anext(stream), await anext(stream)] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    run(test)


class Slow:
    """Takes 200 µs a call, or as long as it is told."""

    def __init__(self, call_s: float = 0.0002) -> None:
        self.calls = 0
        self._call_s = call_s

    def __call__(self, item: int) -> int:
        self.calls += 1
        stop = time.perf_counter() + self._call_s
        while time.perf_counter() < stop:
            pass
        return item


class Held(Slow):
    """Makes 75 calls, and no other before the loop has its first item, whenever the system gives that thread a turn."""

    def __init__(self, call_s: float) -> None:
        super().__init__(call_s)
        self.arrived = threading.Event()
        self.in_time = True

    def __call__(self, item: int) -> int:
        if self.calls >= 75:
            self.in_time &= self.arrived.wait(HELD_S)
            self.arrived.set()  # or each further call would wait as long
        return super().__call__(item)


HELD_S = 30.0

SLOW: dict[str, Callable[[Slow], Pipe]] = {
    "map": lambda slow: sl.from_items(range(5000)).map(slow),
    "filter": lambda slow: sl.from_items(range(5000)).filter(lambda item: slow(item) >= 0),
    "flat_map": lambda slow: sl.from_items(range(5000)).flat_map(lambda item: [slow(item)]),
    "map behind the merge": lambda slow: sl.from_items(range(5000)).merge().map(slow),
    "map before a prefetch": lambda slow: sl.from_items(range(5000)).map(slow).prefetch(100),
    "from_iterable": lambda slow: sl.from_iterable(lambda: (slow(item) for item in range(5000))),
    "4 workers": lambda slow: sl.from_items(range(5000)).shard(4).map(slow).merge(),
    "threads": lambda slow: sl.from_items(range(5000)).map(slow, executor="thread"),
}


@pytest.mark.parametrize("shape", SLOW)
def test_the_first_item_behind_a_slow_function_arrives_behind_few_calls(shape: str, run: Run) -> None:
    async def test() -> None:
        slow = Slow()
        async with SLOW[shape](slow).open() as stream:
            await anext(stream)
            assert slow.calls <= 30

    run(test)


@pytest.mark.parametrize("shape", SLOW)
def test_the_first_item_of_a_slow_function_arrives_after_few_calls_in_a_plain_loop(shape: str) -> None:
    slow = Held(0.001)
    with SLOW[shape](slow).open() as stream:
        next(stream)
        slow.arrived.set()
        assert slow.in_time, "75 calls were made, and their items waited for more of them"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", [shape for shape in SLOW if shape != "threads"])
def test_a_chain_of_slow_sync_functions_lets_other_tasks_have_turns(shape: str, run: Run) -> None:
    async def test() -> None:
        slow, turns = Slow(), 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group, SLOW[shape](slow).open() as stream:
            group.start_soon(other)
            for _ in range(300):
                await anext(stream)
            group.cancel_scope.cancel()
        assert slow.calls >= 300
        assert turns >= slow.calls / 30  # 6 ms each

    run(test)


def test_a_consumer_that_has_waited_for_an_item_gives_no_turn_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []
    real, now = anyio.lowlevel.checkpoint, 0.0

    async def checkpoint() -> None:
        given.append(anyio.get_current_task().name)
        await real()

    def slow(item: int) -> int:
        nonlocal now
        now += 1.5 * SLICE_S
        return item

    async def test() -> None:
        mine = anyio.get_current_task().name
        async with sl.from_items(range(30)).map(slow).open() as stream:
            assert [item async for item in stream] == list(range(30))
        assert mine not in given

    for module in (streamline.core.pace, streamline.core.channel):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    monkeypatch.setattr(streamline.core.pace, "checkpoint", checkpoint)

    run(test)


def test_a_loop_over_ready_items_lets_other_tasks_have_turns(run: Run) -> None:
    async def test() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(other)
            async for _ in sl.from_items(range(100_000)).map(abs):
                pass
            group.cancel_scope.cancel()
        assert turns >= 100

    run(test)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("behind", [False, True])
def test_a_window_shuffle_draws_its_next_window_item_by_item_while_it_serves_one(behind: bool, run: Run) -> None:
    window = 16_384
    source = Counting(6 * window)
    pipe = sl.from_items(source)
    pipe = pipe.merge().shuffle(window=window) if behind else pipe.shuffle(window=window)

    async def test() -> None:
        before, jumps, most = 0, [], pipe.max_in_flight
        async with pipe.open() as stream:
            for served in range(5 * window):
                await anext(stream)
                if served:
                    jumps.append(source.asked - before)
                before = source.asked
                assert source.asked - served <= most
        assert max(jumps) <= 4400  # a few lists: what channels hold, never a window

    run(test)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("step_s", "calls", "longest"), [(0.0, 64, 2), (SLICE_S, 64, 1), (0.0, 8, 1)])
def test_results_of_calls_wait_for_those_of_further_turns_where_many_come_quickly(
    step_s: float, calls: int, longest: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest list, in turns of the calls: of few calls, or where a turn takes long, none waits."""
    clock, lists = itertools.count(step=step_s), list[int]()
    monkeypatch.setattr(concurrent, "perf_counter", clock.__next__)
    monkeypatch.setattr(pace, "perf_counter", lambda: 0.0)  # else a task that gives way lets more calls return
    take = AsCompleted.take

    def counted(order: AsCompleted[int, int]) -> Any:
        chunk = take(order)
        lists.append(len(chunk.items) if chunk else 0)
        return chunk

    monkeypatch.setattr(AsCompleted, "take", counted)

    async def one_turn(item: int) -> int:
        await anyio.lowlevel.checkpoint()
        return item

    async def test() -> None:
        async with sl.from_items(range(2_000)).map(one_turn, concurrency=calls, ordered=False).open() as stream:
            assert sorted([item async for item in stream]) == list(range(2_000))

    run(test)
    assert calls * (longest - 1) < max(lists) <= calls * longest
