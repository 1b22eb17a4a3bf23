"""What seed 000, a loader's design, promises: its ordering, its resume, its knobs. Each test quotes its sentence.

Where another test keeps a promise already, docs/seeds.md names that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any, TypeVar

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from tests.kit import Counting, later
from tests.laws.profile import examples

T = TypeVar("T")

Pipe = sl.Pipeline[Any]


def round_robin(workers: Sequence[Sequence[T]]) -> Iterator[T]:
    """The seed's strict order, written as its four rules are: the sequential baseline, without prefetch."""
    iterators = [iter(worker) for worker in workers]
    done: set[int] = set()
    for turn in count():
        if len(done) == len(iterators):
            return
        worker = turn % len(iterators)
        if worker not in done:
            try:
                yield next(iterators[worker])
            except StopIteration:
                done.add(worker)


def uneven(lengths: Sequence[int]) -> Pipe:
    """One worker for each length, with items (worker, number)."""
    grid = [(worker, number) for number in range(max(lengths)) for worker in range(len(lengths))]
    return sl.from_items(grid).shard(len(lengths)).filter(lambda item: item[1] < lengths[item[0]], name="own")


class Stalls:
    """An async function that waits at the items of some of the workers until it is released."""

    def __init__(self, num_workers: int, *stalled: int) -> None:
        self.num_workers = num_workers
        self.stalled = stalled
        self.released = anyio.Event()

    async def __call__(self, item: int) -> int:
        if item % self.num_workers in self.stalled:
            await self.released.wait()
        return item


async def delivered_while_stalled(pipe: Pipe, stalls: Stalls) -> tuple[list[int], list[int]]:
    """Return what comes until everybody waits, and what comes once the stalled go on."""
    found: list[int] = []

    async def consume(stream: sl.Stream[int]) -> None:
        async for item in stream:
            found.append(item)  # noqa: PERF401 - it is looked at meanwhile

    async with pipe.open() as stream, anyio.create_task_group() as group:
        group.start_soon(consume, stream)
        await anyio.wait_all_tasks_blocked()
        stalled = list(found)
        stalls.released.set()
    return stalled, found[len(stalled) :]


# Strict -------------------------------------------------------------------------------------------------------------


@examples(20)
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
def test_strict_is_round_robin_past_workers_that_are_exhausted(lengths: list[int]) -> None:
    """ "Visit workers in index order", "if a worker is exhausted, mark it done and skip it on future rounds"."""
    workers = [[(worker, number) for number in range(length)] for worker, length in enumerate(lengths)]
    assert list(uneven(lengths).merge()) == list(round_robin(workers))


def test_strict_is_deterministic_with_uneven_shards() -> None:
    """ "Deterministic even with uneven shard lengths (dropRemainder=false)"."""
    whole = list(round_robin([range(4), range(4, 8), range(8, 11), range(11, 14)]))
    pipe = sl.from_items(range(14)).shard(4, mode="contiguous").map(abs).merge()
    for backend in (sl.Inline(), sl.Threads(1), sl.Threads(3)):
        with pipe.open(backend=backend) as stream:
            assert list(stream) == whole


def test_strict_is_the_default() -> None:
    """ "Strict (default)": "we prefer determinism over throughput by default"."""
    pipe = sl.from_items(range(40)).shard(3)
    assert "merge (strict)" in str(pipe) == str(pipe.merge("strict"))
    assert list(pipe) == list(pipe.merge()) == list(range(40))


async def test_strict_waits_for_a_slow_worker() -> None:
    """ "Strict ordering can block if one worker is slow"."""
    stalls = Stalls(4, 1)
    pipe = sl.from_items(range(40)).shard(4).map(stalls).merge()
    assert await delivered_while_stalled(pipe, stalls) == ([0], list(range(1, 40)))


def test_the_order_is_the_keys_and_the_epochs() -> None:
    """ "Deterministic ordering given a fixed dataset + RNG key"; the iterator "includes key/epoch/resume state"."""
    pipe = sl.from_items(range(50)).shuffle(seed=7).shard(3).shuffle(window=4, seed=7).merge()
    assert list(pipe) == list(pipe)
    other = sl.from_items(range(50)).shuffle(seed=8).shard(3).shuffle(window=4, seed=8).merge()
    orders = {tuple(pipe), tuple(other)}
    for epoch in (1, 2):
        with pipe.open(epoch=epoch) as stream:
            orders.add(tuple(stream))
    assert len(orders) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(50))}


# Best effort --------------------------------------------------------------------------------------------------------


async def test_best_effort_yields_the_first_available_item_without_waiting_for_its_turn() -> None:
    """ "Scans workers non-blocking and yields the first available item"."""
    stalls = Stalls(4, 0)
    pipe = sl.from_items(range(400)).shard(4).map(stalls).merge("best_effort", max_skips_per_round=1, max_lead=10)
    async with pipe.open() as stream:
        assert await anext(stream) == 1  # worker 0, whose turn it was, has nothing
        await anyio.wait_all_tasks_blocked()  # by now the others have some
        assert [await anext(stream) for _ in range(5)] == [2, 3, 5, 6, 7]
        assert stream.snapshot().produced == [0, 2, 2, 2]


@pytest.mark.parametrize("lead", [1, 3, 8])
async def test_best_effort_keeps_a_bounded_lead(lead: int) -> None:
    """ "Enforces a bounded lead (maxLead) relative to the slowest active worker"."""
    stalls = Stalls(4, 2)
    pipe = sl.from_items(range(400)).shard(4).map(stalls).merge("best_effort", max_skips_per_round=3, max_lead=lead)
    before, after = await delivered_while_stalled(pipe, stalls)
    assert sorted(before) == sorted(worker + 4 * number for worker in (0, 1, 3) for number in range(lead))
    assert sorted(before + after) == list(range(400))


async def test_the_lead_is_over_active_workers() -> None:
    """ "Relative to the slowest *active* worker": one that has ended holds nobody back."""
    pipe = uneven([2, 0, 40]).merge("best_effort", max_skips_per_round=2, max_lead=1)
    assert sorted([item async for item in pipe]) == [(0, 0), (0, 1), *((2, number) for number in range(40))]


@pytest.mark.parametrize(("skips", "some"), [(0, False), (1, False), (2, True), (3, True)])
async def test_best_effort_waits_behind_max_skips_per_round(skips: int, some: bool) -> None:
    """ "Caps empty scans per round (maxSkipsPerRound) before blocking"."""
    stalls = Stalls(4, 0, 1)
    pipe = sl.from_items(range(40)).shard(4).map(stalls).merge("best_effort", max_skips_per_round=skips, max_lead=2)
    before, after = await delivered_while_stalled(pipe, stalls)
    assert sorted(before) == ([2, 3, 6, 7] if some else [])
    assert sorted(before + after) == list(range(40))


async def test_best_effort_follows_the_schedule_and_is_exact_on_each() -> None:
    """ "Explicitly not deterministic across schedules": another order, but the same items, each worker's in order."""
    orders = []
    for stalled in (0, 1, 2):
        stalls = Stalls(3, stalled)
        pipe = sl.from_items(range(60)).shard(3).map(stalls).merge("best_effort", max_skips_per_round=2, max_lead=5)
        before, after = await delivered_while_stalled(pipe, stalls)
        orders.append(tuple(before + after))
    assert len(set(orders)) == 3
    for order in orders:
        for worker in range(3):
            assert [item for item in order if item % 3 == worker] == list(range(worker, 60, 3))


@pytest.mark.parametrize("taken", [1, 4, 10])
async def test_a_best_effort_run_resumes_exactly_on_another_schedule(taken: int) -> None:
    """ "All items consumed before checkpoint are preserved": none is lost or comes twice, whoever is slow now."""

    def pipe(stalls: Stalls) -> Pipe:
        return sl.from_items(range(60)).shard(3).map(stalls).merge("best_effort", max_skips_per_round=2, max_lead=5)

    async with pipe(Stalls(3, 0)).open() as stream:
        first = [await anext(stream) for _ in range(taken)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert snapshot.produced == [sum(item % 3 == worker for item in first) for worker in range(3)]
    async with pipe(Stalls(3)).open(resume=snapshot) as stream:
        order = first + [item async for item in stream]
    for worker in range(3):
        assert [item for item in order if item % 3 == worker] == list(range(worker, 60, 3))


# Resume -------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Pipe], Pipe]] = {
    "strict": lambda pipe: pipe.merge(),
    "best effort": lambda pipe: pipe.merge("best_effort", max_skips_per_round=1, max_lead=3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_of_what_was_consumed_from_each_worker(kind: str) -> None:
    """ "nextWorker", "workerStates: after the last **consumed** item from that worker", "produced"."""
    source = Counting(300)
    pipe = KINDS[kind](sl.from_items(source).shard(3).prefetch(8))
    with pipe.open() as stream:
        for number, item in enumerate(stream, 1):
            if number > 20:
                break
            snapshot = stream.snapshot()
            assert snapshot.next_worker == (item + 1) % 3
            assert sum(snapshot.produced) == number < source.asked  # more was read ahead, and doesn't count
            assert snapshot.worker_states == [{"items": taken} for taken in snapshot.produced]


@pytest.mark.parametrize("taken", [1, 5, 12])
def test_what_was_prefetched_and_not_consumed_is_discarded_and_made_again(taken: int) -> None:
    """ "Discard any prefetched-but-unconsumed items (they will be regenerated)"."""
    source = Counting(500)
    pipe = sl.from_items(source).shard(4).prefetch(8).merge()
    with pipe.open() as stream:
        assert [next(stream) for _ in range(taken)] == list(range(taken))
        snapshot = stream.snapshot()
    assert source.asked > taken
    source.asked, source.lowest = 0, 500
    with pipe.open(resume=snapshot) as stream:
        assert list(stream) == list(range(taken, 500))
    assert (source.asked, source.lowest) == (500 - taken, taken)


@examples(12)
@given(data=st.data())
def test_prefix_property(data: st.DataObject) -> None:
    """ "The resumed stream matches the baseline order from that point onward", at any point, through any resumes."""
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any))
    pipe = uneven(lengths).map(later, concurrency=3).prefetch(2).merge()
    baseline = list(round_robin([[(worker, n) for n in range(length)] for worker, length in enumerate(lengths)]))
    found: list[Any] = []
    snapshot = None
    for _ in range(3):
        with pipe.open(resume=snapshot) as stream:
            for _ in range(data.draw(st.integers(0, len(baseline) - len(found)))):
                found.append(next(stream))  # noqa: PERF401 - a comprehension would hide that a stream ended early
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            assert found == baseline[: len(found)]
    with pipe.open(resume=snapshot) as stream:
        assert found + list(stream) == baseline


def parts(order: list[int], num_workers: int, mode: str, drop_remainder: bool) -> list[list[int]]:
    """Split an order as the shards do."""
    each, rest = divmod(len(order), num_workers)
    if mode == "interleaved":
        order = order[: each * num_workers] if drop_remainder else order
        return [order[worker::num_workers] for worker in range(num_workers)]
    sizes = [each + (worker < rest and not drop_remainder) for worker in range(num_workers)]
    return [order[sum(sizes[:worker]) : sum(sizes[: worker + 1])] for worker in range(num_workers)]


@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("mode", ["interleaved", "contiguous"])
def test_multi_prefetch_resume_smoke(mode: Any, drop_remainder: bool, backend: Any) -> None:
    """ "Compares multi-prefetch to a sequential round-robin baseline, then checks resume at multiple split points"."""
    whole = sl.from_items(range(23)).shuffle(seed=3)
    baseline = list(round_robin(parts(list(whole), 4, mode, drop_remainder)))
    pipe = whole.shard(4, mode=mode, drop_remainder=drop_remainder).map(later, concurrency=2).prefetch(4).merge()
    for split in (1, 9, 14, len(baseline)):
        with pipe.open(backend=backend) as stream:
            first = [next(stream) for _ in range(split)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        with pipe.open(backend=backend, resume=snapshot) as stream:
            assert first == baseline[:split]
            assert list(stream) == baseline[split:]


def test_multi_prefetch_resume_smoke_in_processes(processes: Backend) -> None:
    """The same over processes, and across: what stopped in one kind of worker goes on in another."""
    baseline = list(round_robin(parts(list(range(23)), 3, "contiguous", False)))
    pipe = sl.from_items(range(23)).shard(3, mode="contiguous").map(abs).prefetch(4).merge()
    for split, before, behind in ((5, processes, sl.Inline()), (16, sl.Inline(), processes)):
        with pipe.open(backend=before) as stream:
            first = [next(stream) for _ in range(split)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        with pipe.open(backend=behind, resume=snapshot) as stream:
            assert first + list(stream) == baseline


# Knobs --------------------------------------------------------------------------------------------------------------


async def test_the_buffer_of_each_worker_is_as_large_as_it_is_told() -> None:
    """ "bufferSize: per-worker prefetch queue size": what is read ahead grows by it, and the items stay."""
    ahead, most = [], []
    for buffer in (1, 6, 50):
        source = Counting(10_000)
        pipe = sl.from_items(source).shard(4).prefetch(buffer).merge()
        async with pipe.open() as stream:
            assert await anext(stream) == 0
            await anyio.wait_all_tasks_blocked()
            ahead.append(source.asked - 1)
            most.append(pipe.max_in_flight)
            assert [await anext(stream) for _ in range(50)] == list(range(1, 51))
    assert all(read <= bound for read, bound in zip(ahead, most, strict=True))
    assert ahead == sorted(set(ahead))
    assert most[1] - most[0] >= 4 * 5
    assert most[2] - most[1] >= 4 * 44


def test_what_the_workers_and_what_the_consumer_may_hold_is_set_apart() -> None:
    """ "Separate control of worker queue size vs consumer queue size", a future extension there."""
    text = str(sl.from_items(range(100)).shard(4).prefetch(3).merge().prefetch(70))
    assert "worker x4   from_items → [3 items]" in text
    assert "merge → [70 items]" in text


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 30])
def test_any_number_of_workers_gives_the_datasets_order(workers: int) -> None:
    """ "numWorkers: number of shard workers": interleaved, it changes nothing but the speed."""
    assert list(sl.from_items(range(23)).shard(workers).map(later, concurrency=2).merge()) == list(range(23))


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("mode", ["interleaved", "contiguous"])
def test_shards_are_balanced_or_blocks_and_equal_or_complete(mode: Any, drop_remainder: bool) -> None:
    """ "ShardMode: interleaved or contiguous", "dropRemainder: equal shard sizes vs full coverage"."""
    pipe = sl.from_items(range(23)).shard(4, mode=mode, drop_remainder=drop_remainder).merge()
    found = []
    for rank in range(4):  # one worker each
        with pipe.open(rank=rank, world_size=4, ends="allow") as stream:
            found.append(list(stream))
    assert found == parts(list(range(23)), 4, mode, drop_remainder)
    assert {max(map(len, found)) - min(map(len, found))} == ({0} if drop_remainder else {1})
    assert sorted(chain.from_iterable(found)) == (list(range(20)) if drop_remainder else list(range(23)))
