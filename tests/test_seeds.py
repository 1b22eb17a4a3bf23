"""What the seed documents promise and no other test keeps; docs/seeds.md has all. Each test quotes its sentence."""

from __future__ import annotations

import string
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import PlanError, PlanTypeError
from tests.kit import Counting, later

T = TypeVar("T")

Pipe = sl.Pipeline[Any]

LETTERS = list("ABCDEFGH")


# 000: ordering and resume of a multi-worker loader --------------------------------------------------------------------


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


async def test_best_effort_yields_the_first_available_item_without_waiting_for_its_turn() -> None:
    """ "Scans workers non-blocking and yields the first available item"."""
    stalls = Stalls(4, 0)
    pipe = sl.from_items(range(400)).shard(4).map(stalls).merge("best_effort", max_skips_per_round=1, max_lead=10)
    async with pipe.open() as stream:
        assert await anext(stream) == 1  # worker 0, whose turn it was, has nothing
        await anyio.wait_all_tasks_blocked()  # by now the others have some
        assert [await anext(stream) for _ in range(5)] == [2, 3, 5, 6, 7]
        assert stream.snapshot().produced == [0, 2, 2, 2]


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


def parts(order: list[int], num_workers: int, mode: str, drop_remainder: bool) -> list[list[int]]:
    """Split an order as the shards do."""
    each, rest = divmod(len(order), num_workers)
    if mode == "interleaved":
        order = order[: each * num_workers] if drop_remainder else order
        return [order[worker::num_workers] for worker in range(num_workers)]
    sizes = [each + (worker < rest and not drop_remainder) for worker in range(num_workers)]
    return [order[sum(sizes[:worker]) : sum(sizes[: worker + 1])] for worker in range(num_workers)]


@pytest.mark.one_in(5, 4)
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


@pytest.mark.long
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


# 001: iterable datasets, by the numbers of the acceptance criteria ---------------------------------------------------


class Samples:
    """A stream of `range(length)`; says how often it was closed."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.closed = 0

    def __call__(self) -> Iterator[int]:
        try:
            yield from range(self.length)
        finally:
            self.closed += 1


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 50])
async def test_criterion_6_the_replicator_handles_exhausted_streams(length: int) -> None:
    samples = Samples(length)
    async with sl.StreamReplicator(samples(), 3, capacity=50) as replicator:
        for r in range(3):
            replica = replicator.replica(r)
            assert [item async for item in replica] == list(range(r, length, 3))
            assert [item async for item in replica] == []  # for ever
    assert samples.closed == 1


async def endless() -> AsyncIterator[int]:
    item = 0
    while True:
        yield item
        item += 1


async def test_criterion_6_an_endless_stream_is_left_and_closed() -> None:
    async with sl.StreamReplicator(endless(), 2) as replicator:
        first, second = replicator.replica(0), replicator.replica(1)
        for at in range(0, 1000, 2):
            assert (await anext(first), await anext(second)) == (at, at + 1)


def test_criterion_7_what_a_worker_reads_stops_where_it_does() -> None:
    """Worker 1 of 3 reads up to its item and no further: an endless stream is served as it comes."""
    asked: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            asked.append(item)
            yield item

    assert list(islice(sl.StreamDataset(items, 1, 3), 2)) == [1, 4]
    assert asked == [0, 1, 2, 3, 4]


def test_criterion_8_workers_of_a_pipeline(backend: Any) -> None:
    """Two ranks of two shards each: every shard's worker iterates its rank's dataset and keeps its stride."""
    found: list[int] = []
    for rank in range(2):
        pipe = sl.from_iterable(sl.StreamDataset(partial(range, 90), rank, 2)).shard(2).map(abs).merge()
        with pipe.open(backend=backend) as stream:
            found += list(stream)
    assert found == [*range(0, 90, 2), *range(1, 90, 2)]


def test_criterion_8_one_stream_trains_two_trainers(processes: Backend) -> None:
    found: list[list[int]] = [[], []]
    with sl.StreamReplicator(iter(range(200)), 2, capacity=8) as replicator:
        pipes = [replicator.pipeline(r).shard(2).map(abs).merge() for r in range(2)]

        def train(r: int) -> None:
            with pipes[r].open(backend=processes if r else sl.Threads(1)) as stream:
                found[r] += stream

        threads = [threading.Thread(target=train, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [list(range(0, 200, 2)), list(range(1, 200, 2))]


# 002: workers and their shards: `each_worker` runs each shard as a rank of its own -----------------------------------


def each_worker(pipe: sl.Pipeline[Any], num_workers: int) -> list[list[Any]]:
    """Return what each worker of a pipeline of so many shards reads."""
    found = []
    for worker in range(num_workers):
        with pipe.open(rank=worker, world_size=num_workers, ends="allow") as stream:
            found.append(list(stream))
    return found


class Streaming:
    """An iterable of which each iterator begins at the beginning, as an IterableDataset; counts them."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        yield from self.data


def test_by_remainder() -> None:
    """ "Worker 0: [A, C, E, G] (items 0, 2, 4, 6), Worker 1: [B, D, F, H]"."""
    pipe = sl.from_items(LETTERS).shard(2)
    assert each_worker(pipe, 2) == [list("ACEG"), list("BDFH")]
    assert list(pipe) == LETTERS  # "unique, complete", and in the dataset's order


def test_by_remainder_of_a_stream_without_an_index() -> None:
    """ "yield from (x for i, x in enumerate(data) if i % num_workers == worker_id)"."""
    pipe = sl.from_iterable(lambda: (letter for letter in LETTERS)).shard(2)
    assert each_worker(pipe, 2) == [list("ACEG"), list("BDFH")]
    assert list(pipe) == LETTERS


def test_by_contiguous_block() -> None:
    """ "Worker 0: [A, B], Worker 1: [C, D], Worker 2: [E, F], Worker 3: [G, H]"."""
    pipe = sl.from_items(LETTERS).shard(4, mode="contiguous")
    assert each_worker(pipe, 4) == [list("AB"), list("CD"), list("EF"), list("GH")]
    assert list(pipe) == list("ACEGBDFH")


def test_by_file(tmp_path: Path) -> None:
    """ "Worker 0: reads file1 ... Worker 3: reads file4"."""
    for number in range(1, 5):
        (tmp_path / f"file{number}").write_text(f"{number}a\n{number}b\n")
    pipe = sl.read_lines(tmp_path / "file*").shard(4)
    assert "shard into 4 (file)" in str(pipe)
    assert each_worker(pipe, 4) == [[f"{number}a", f"{number}b"] for number in range(1, 5)]
    assert each_worker(sl.read_lines(tmp_path / "file*").shard(3), 3) == [
        ["1a", "1b", "4a", "4b"],
        ["2a", "2b"],
        ["3a", "3b"],
    ]


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("mode", ["interleaved", "contiguous", "file", "replicated"])
def test_union_is_the_dataset_and_intersection_is_empty(mode: Any, tmp_path: Path) -> None:
    """ "Union of all shards = full dataset (no gaps). Intersection of shards = empty (no overlaps)"."""
    letters = list(string.ascii_lowercase[:10])
    pairs = [letters[at : at + 2] for at in range(0, 10, 2)]
    for pair in pairs:
        (tmp_path / f"{pair[0]}.txt").write_text("\n".join(pair))
    others: dict[str, sl.Pipeline[str]] = {
        "replicated": sl.from_iterable(lambda: letters),
        "file": sl.read_lines(tmp_path / "*.txt"),
    }
    for num_workers in (1, 2, 3, 8, 11):
        pipe = others.get(mode, sl.from_items(letters)).shard(num_workers, mode=mode)
        assert Counter(chain.from_iterable(each_worker(pipe, num_workers))) == Counter(letters)
        assert sorted(pipe) == letters


@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
def test_an_iterable_in_two_workers_has_no_duplicates(backend: Any) -> None:
    """ "Full duplication" there; here each worker keeps its stride of what it iterates."""
    stream = Streaming(LETTERS)
    pipe = sl.from_iterable(lambda: iter(stream)).shard(2)
    with pipe.open(backend=backend) as letters:
        assert sorted(letters) == LETTERS
    assert stream.begun == 2
    assert "each item is read 2 times: by every worker, which keeps one item in 2" in str(pipe)


def test_an_iterable_on_two_ranks_without_a_shard_is_refused() -> None:
    """ "No error or warning is raised" there; here the error says what would happen, and the way out."""
    for pipe in (sl.from_iterable(lambda: iter(LETTERS)), sl.from_items(LETTERS)):
        for rank in range(2):
            with pytest.raises(PlanError, match=r"each of the 2 ranks would read everything.*\.shard\("):
                pipe.open(rank=rank, world_size=2)


def test_an_iterator_that_workers_would_share_is_refused() -> None:
    """An iterator is no factory: two workers of it would each get what the other hasn't."""
    with pytest.raises(PlanTypeError, match="is a function"):
        sl.from_iterable(iter(LETTERS))  # type: ignore[arg-type]


async def test_workers_prefetch_while_the_consumer_computes() -> None:
    """ "By the time the GPU finishes batch 1, batch 2 is already queued"."""
    made: list[int] = []

    def load(item: int) -> int:
        made.append(item)
        return item

    async with sl.from_items(range(400)).shard(2).map(load).merge().batch(4, collate=None).open() as stream:
        assert await anext(stream) == [0, 1, 2, 3]
        await anyio.wait_all_tasks_blocked()  # the consumer computes, and asks for nothing
        assert set(made) >= set(range(8))


# 003: caches that are generated during training ----------------------------------------------------------------------


SIZE = 6
"""Samples per regeneration cycle."""


def cache(of: int, num_ranks: int, draw: Callable[[int], Any] = abs, **options: Any) -> sl.Pipeline[Any]:
    """The seed's system: a contiguous shard for each rank, gone round for ever, in caches of SIZE."""
    return sl.from_items(range(of)).shard(num_ranks, mode="contiguous").repeat().map(draw).regenerate(SIZE, **options)


def served(pipe: sl.Pipeline[Any], rank: int, num_ranks: int, cycles: int, **options: Any) -> list[list[Any]]:
    """Return the first cycles that a rank serves."""
    with pipe.open(rank=rank, world_size=num_ranks, **options) as stream:
        return [[next(stream) for _ in range(SIZE)] for _ in range(cycles)]


@pytest.mark.parametrize("of", [1, 5, 6, 7, 100])
def test_each_cycle_is_exactly_its_size(of: int) -> None:
    """ "Each regeneration creates exactly samples_per_regeneration_cycle samples", however long the shard is."""
    cycles = served(cache(of, 1), 0, 1, 5)
    assert [sorted(cycle) for cycle in cycles] == [
        sorted(number % of for number in range(start, start + SIZE)) for start in range(0, 5 * SIZE, SIZE)
    ]


def test_what_is_generated_in_batches_makes_exact_cycles_too() -> None:
    """ "Samples are processed in batches": of 4, in caches of 6."""
    pipe = sl.from_items(range(10)).repeat().batch(4).map(lambda batch: batch * 10).unbatch().regenerate(SIZE)
    cycles = served(pipe, 0, 1, 4)
    drawn = [sample * 10 for _ in range(3) for sample in range(10)]
    assert [sorted(cycle) for cycle in cycles] == [sorted(drawn[at : at + SIZE]) for at in range(0, 4 * SIZE, SIZE)]


@pytest.mark.parametrize("overlap", [False, True])
def test_all_ranks_regenerate_at_the_same_step_however_fast_they_are(overlap: bool) -> None:
    """ "samples_processed_since_last_regen >= samples_per_regeneration_cycle", and not "slightly different ... speeds
    could lead to regeneration at different global steps": a shard of 10, a slow one of 9."""

    def slow_at_rank_1(sample: int) -> int:
        time.sleep(0.001 if sample >= 10 else 0)
        return sample

    steps = []
    for rank in range(2):
        with cache(19, 2, slow_at_rank_1, overlap=overlap).open(rank=rank, world_size=2) as stream:
            places = []
            for _ in range(3 * SIZE + 2):
                next(stream)
                (state,) = stream.snapshot().worker_states
                places.append((state["regenerate"]["cycle"], state["regenerate"]["served"]))
        steps.append(places)
    assert steps[0] == steps[1] == [divmod(step, SIZE) for step in range(1, 3 * SIZE + 3)]


class Activation:
    """What is made of a sample, which a weak reference can follow."""

    def __init__(self, sample: int) -> None:
        self.sample = sample


@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(1)], ids=str)
def test_the_old_cache_is_cleared_before_the_new_one_is_generated(backend: Any) -> None:
    """ "Old cache (self.data_store) is cleared", then "new activations are generated"."""
    alive: weakref.WeakSet[Activation] = weakref.WeakSet()
    before_draws: list[int] = []

    def draw(sample: int) -> Activation:
        before_draws.append(len(alive))
        activation = Activation(sample)
        alive.add(activation)
        return activation

    pipe = cache(100, 1, draw).map(lambda activation: activation.sample).take(5 * SIZE)
    with pipe.open(backend=backend) as stream:
        assert len(list(stream)) == 5 * SIZE
    assert before_draws[: 5 * SIZE] == list(range(SIZE)) * 5


def drawn_position(sample: int, *, rng: np.random.Generator) -> tuple[int, int]:
    return sample, int(rng.integers(1000))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
def test_positions_that_are_drawn_come_from_the_seed(backend: Any) -> None:
    """ "Deterministic Activation Positions" also where they are random: the same in each run, and after a resume."""

    def positions(seed: int) -> sl.Pipeline[Any]:
        shards = sl.from_items(range(9)).shard(2, mode="contiguous").repeat()
        return shards.map(drawn_position, seed=seed).regenerate(SIZE).merge()

    pipe = positions(3)
    with pipe.open(backend=backend) as stream:
        first = [next(stream) for _ in range(16)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        rest = [next(stream) for _ in range(16)]
    assert pipe.first(32) == first + rest
    with pipe.open(backend=backend, resume=snapshot) as stream:
        assert [next(stream) for _ in range(16)] == rest
    assert positions(4).first(32) != first + rest
    assert len(set(first + rest)) > 25  # a sample has another position each time that it is drawn


def test_a_cycle_goes_on_where_the_last_one_ended() -> None:
    """The seed restarts its iterator with each cache, and never sees what is after the first: "seeing some samples
    more frequently". Here no sample is drawn twice more than another."""
    drawn = Counter(dict.fromkeys(range(20), 0))

    def draw(sample: int) -> int:
        drawn[sample] += 1
        return sample

    with sl.from_items(range(20)).repeat().map(draw).regenerate(6).open() as stream:
        for _ in range(54):
            next(stream)
            assert max(drawn.values()) - min(drawn.values()) <= 1
    assert min(drawn.values()) > 1


def test_regenerating_is_no_new_epoch() -> None:
    """ "If using FastDistributedSampler, the epoch is preserved": a trainer's epochs and the caches don't mind each
    other, also where one ends in the middle of the other."""
    pipe = sl.from_items(range(10)).repeat().regenerate(6)
    whole = pipe.first(24)
    with pipe.loader(steps_per_epoch=8) as loader:
        for epoch in range(3):
            assert loader.epoch == epoch
            assert list(loader) == whole[8 * epoch : 8 * epoch + 8]
