"""The acceptance criteria of seed 001, by their numbers; the details are in tests/training/test_stream_dataset.py and
tests/replicating.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError
from tests.laws.profile import examples


class Samples:
    """A stream of `range(length)`; says how often it was begun, and closed."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.begun = self.closed = 0

    def __call__(self) -> Iterator[int]:
        self.begun += 1
        try:
            yield from range(self.length)
        finally:
            self.closed += 1


async def endless() -> AsyncIterator[int]:
    item = 0
    while True:
        yield item
        item += 1


def test_criterion_1_the_dataset_caches_its_iterator() -> None:
    samples = Samples(6)
    dataset = sl.StreamDataset(samples)
    assert list(islice(iter(dataset), 2)) == [0, 1]
    assert list(islice(iter(dataset), 2)) == [2, 3]
    assert list(dataset) == [4, 5]
    assert list(dataset) == []  # also when it is exhausted
    assert samples.begun == 1


def test_criterion_2_reset_drops_the_cached_iterator() -> None:
    samples = Samples(3)
    dataset = sl.StreamDataset(samples)
    for _ in range(3):  # "each epoch, reset to re-stream data"
        assert list(islice(dataset, 2)) == [0, 1]
        dataset.reset()
    assert samples.begun == samples.closed == 3
    assert list(dataset) == [0, 1, 2]


@examples(50)
@given(st.integers(0, 60), st.integers(1, 9))
def test_criterion_3_workers_partition_the_stream(length: int, num_workers: int) -> None:
    """The seed skips `worker_id` items and then strides from there, so that its workers miss and share items."""
    parts = [list(sl.StreamDataset(Samples(length), w, num_workers)) for w in range(num_workers)]
    assert parts == [list(range(w, length, num_workers)) for w in range(num_workers)]


@examples(50)
@given(st.integers(0, 60), st.integers(1, 9))
def test_criterion_4_and_5_no_two_workers_share_a_sample_and_none_is_left_out(length: int, num_workers: int) -> None:
    seen = Counter[int]()
    for worker in range(num_workers):
        seen.update(sl.StreamDataset(Samples(length), worker, num_workers))
    assert seen == Counter(range(length))


async def test_criterion_4_each_replica_has_samples_of_its_own() -> None:
    """The seed's replicas share one position, and skip what they don't take."""
    found: list[list[int]] = [[], [], []]
    async with sl.StreamReplicator(Samples(100)(), 3, capacity=4) as replicator, anyio.create_task_group() as group:
        for r, mine in enumerate(found):
            group.start_soon(_read, replicator.replica(r), mine)
    assert found == [list(range(r, 100, 3)) for r in range(3)]


async def _read(items: Any, found: list[int]) -> None:
    async for item in items:
        found.append(item)  # noqa: PERF401 - what came before an error counts


def test_criterion_5_threads_of_one_dataset_have_each_sample_once() -> None:
    dataset = sl.StreamDataset(Samples(2000))
    parts: list[list[int]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=mine.extend, args=(dataset,)) for mine in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(item for mine in parts for item in mine) == Counter(range(2000))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 50])
async def test_criterion_6_the_replicator_handles_exhausted_streams(length: int) -> None:
    samples = Samples(length)
    async with sl.StreamReplicator(samples(), 3, capacity=50) as replicator:
        for r in range(3):
            replica = replicator.replica(r)
            assert [item async for item in replica] == list(range(r, length, 3))
            assert [item async for item in replica] == []  # for ever
    assert samples.closed == 1


async def test_criterion_6_an_endless_stream_is_left_and_closed() -> None:
    async with sl.StreamReplicator(endless(), 2) as replicator:
        first, second = replicator.replica(0), replicator.replica(1)
        for at in range(0, 1000, 2):
            assert (await anext(first), await anext(second)) == (at, at + 1)


def test_criterion_7_the_partitioning_of_workers_is_validated() -> None:
    for worker_id, num_workers in [(2, 2), (-1, 2), (0, 0), (0, -3)]:
        with pytest.raises(PlanError):
            sl.StreamDataset(Samples(1), worker_id, num_workers)
    wrong: list[tuple[Any, Any]] = [("0", 2), (0, 2.0), (None, 2), (False, 1)]
    for worker_id, num_workers in wrong:
        with pytest.raises(PlanError):
            sl.StreamDataset(Samples(1), worker_id, num_workers)
    for number in (-1, 2):
        with pytest.raises(PlanError):
            sl.StreamReplicator(range(3), 2).replica(number)


def test_criterion_7_what_a_worker_reads_stops_where_it_does() -> None:
    """Worker 1 of 3 reads up to its item and no further: an endless stream is served as it comes."""
    asked: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            asked.append(item)
            yield item

    assert list(islice(sl.StreamDataset(items, 1, 3), 2)) == [1, 4]
    assert asked == [0, 1, 2, 3, 4]


# Integration: workers in processes, in threads, in torch's DataLoader -------------------------------------------------


def test_criterion_8_workers_in_processes_of_their_own() -> None:
    """Each has its pickled dataset, and they don't talk."""
    script = "import pickle, sys; print(*pickle.load(sys.stdin.buffer))"
    for worker in range(2):
        dataset = pickle.dumps(sl.StreamDataset(partial(range, 100), worker, 2))
        done = subprocess.run(
            [sys.executable, "-c", script], input=dataset, capture_output=True, check=True, timeout=200
        )
        assert [int(word) for word in done.stdout.split()] == list(range(worker, 100, 2))


def test_criterion_8_workers_of_a_pipeline(backend: Any) -> None:
    """Two ranks of two shards each: every shard's worker iterates its rank's dataset and keeps its stride."""
    found: list[int] = []
    for rank in range(2):
        pipe = sl.from_iterable(sl.StreamDataset(partial(range, 90), rank, 2)).shard(2).map(abs).merge()
        with pipe.open(backend=backend) as stream:
            found += list(stream)
    assert found == [*range(0, 90, 2), *range(1, 90, 2)]


def test_criterion_8_workers_of_a_torch_data_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's DataLoader does it: a copy of the dataset for each worker, which knows its number by worker_info."""
    data = ModuleType("torch.utils.data")
    here = threading.local()
    data.get_worker_info = lambda: getattr(here, "info", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.data", data)
    dataset = sl.StreamDataset(Samples(31))
    parts: list[list[int]] = [[], [], []]

    def worker(number: int) -> None:
        here.info = SimpleNamespace(id=number, num_workers=3)
        parts[number] += sl.StreamDataset(dataset.factory)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parts == [list(range(number, 31, 3)) for number in range(3)]
    assert list(dataset) == list(range(31))  # and without workers


@pytest.mark.parametrize("backend", [sl.Threads(1), sl.Processes(1)], ids=str)
def test_criterion_8_one_stream_trains_two_trainers(backend: Any) -> None:
    found: list[list[int]] = [[], []]
    with sl.StreamReplicator(iter(range(200)), 2, capacity=8) as replicator:
        pipes = [replicator.pipeline(r).shard(2).map(abs).merge() for r in range(2)]

        def train(r: int) -> None:
            with pipes[r].open(backend=backend) as stream:
                found[r] += stream

        threads = [threading.Thread(target=train, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [list(range(0, 200, 2)), list(range(1, 200, 2))]
