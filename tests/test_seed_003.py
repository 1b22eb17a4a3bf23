"""What seed 003, a cache that is made anew while one trains, promises; each test quotes its sentence.

What the seed calls a sample's activations is here whatever `draw` makes of the sample. docs/seeds.md names the tests
elsewhere that keep the rest: block form, spilled cycles, memory that is used again.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamline as sl

SIZE = 6
"""Samples per regeneration cycle."""


def cache(of: int, num_ranks: int, draw: Callable[[int], Any] = abs, **options: Any) -> sl.Pipeline[Any]:
    """The seed's system: a contiguous shard for each rank, gone round for ever, in caches of SIZE."""
    return sl.from_items(range(of)).shard(num_ranks, mode="contiguous").repeat().map(draw).regenerate(SIZE, **options)


def served(pipe: sl.Pipeline[Any], rank: int, num_ranks: int, cycles: int, **options: Any) -> list[list[Any]]:
    """Return the first cycles that a rank serves."""
    with pipe.open(rank=rank, world_size=num_ranks, **options) as stream:
        return [[next(stream) for _ in range(SIZE)] for _ in range(cycles)]


class Draws:
    """Makes of each sample itself, and remembers in which order it was asked to."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, sample: int) -> int:
        self.asked.append(sample)
        return sample


# Shards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_gets_a_contiguous_portion(num_ranks: int) -> None:
    """ "dataset.shard(num_shards=world_size, index=rank, contiguous=True)": a block each, the first ones one more."""
    each, more = divmod(16, num_ranks)
    for rank in range(num_ranks):
        start = rank * each + min(rank, more)
        block = set(range(start, start + each + (rank < more)))
        assert {sample for cycle in served(cache(16, num_ranks), rank, num_ranks, 4) for sample in cycle} == block


@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(1)], ids=str)
def test_each_rank_always_gets_the_same_shard_in_the_same_order(backend: Any) -> None:
    """ "Each rank always gets the same shard": and here, in the same caches, item for item."""
    assert served(cache(16, 3), 1, 3, 5, backend=backend) == served(cache(16, 3), 1, 3, 5)


def test_no_rank_sees_anothers_data() -> None:
    """ "Each rank only ever sees its own shard of the data"."""
    seen = [{sample for cycle in served(cache(31, 3), rank, 3, 8) for sample in cycle} for rank in range(3)]
    assert [len(samples) for samples in seen] == [11, 10, 10]
    assert set.union(*seen) == set(range(31))


# Cycles -------------------------------------------------------------------------------------------------------------


def test_samples_are_drawn_in_the_order_of_the_shard_and_round_again() -> None:
    """ "No randomization", "when the iterator is exhausted, it restarts from the beginning"."""
    draws = Draws()
    served(cache(10, 2, draws), 1, 2, 4)
    assert draws.asked[: 4 * SIZE] == [5, 6, 7, 8, 9] * 4 + [5, 6, 7, 8]


def test_a_cycle_goes_on_where_the_last_one_ended() -> None:
    """The seed restarts its iterator with each cache, and never sees what is after the first: "seeing some samples
    more frequently". Here no sample is drawn twice more than another."""
    draws = Draws()
    with cache(20, 1, draws).open() as stream:
        for _ in range(9 * SIZE):
            next(stream)
            counts = Counter(dict.fromkeys(range(20), 0) | Counter(draws.asked))
            assert max(counts.values()) - min(counts.values()) <= 1
    assert len(set(draws.asked)) == 20


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


# The order inside a cache -------------------------------------------------------------------------------------------


def test_the_order_within_each_cache_is_shuffled_by_seed_and_cycle() -> None:
    """ "The order of samples **within each cache** is shuffled": not "non-deterministic", but by (seed, cycle)."""
    cycles = served(cache(SIZE, 1, seed=4), 0, 1, 6)  # each cycle is the same samples
    assert all(sorted(cycle) == list(range(SIZE)) for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) > 3
    assert cycles == served(cache(SIZE, 1, seed=4), 0, 1, 6)
    assert cycles != served(cache(SIZE, 1, seed=5), 0, 1, 6)
    assert served(cache(SIZE, 1, shuffle=False), 0, 1, 3) == [list(range(SIZE))] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_the_data_each_rank_sees_is_reproducible_from_any_step(rank: int) -> None:
    """ "Given the same random seed and rank configuration, the data each rank sees is reproducible"."""
    pipe = cache(9, 2)
    whole = [sample for cycle in served(pipe, rank, 2, 4) for sample in cycle]
    for step in (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE - 2):
        with pipe.open(rank=rank, world_size=2) as stream:
            assert [next(stream) for _ in range(step)] == whole[:step]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        with pipe.open(rank=rank, world_size=2, resume=snapshot) as stream:
            assert [next(stream) for _ in range(4 * SIZE - step)] == whole[step:]


# When a cache is made anew ------------------------------------------------------------------------------------------


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


def test_regenerating_is_no_new_epoch() -> None:
    """ "If using FastDistributedSampler, the epoch is preserved": a trainer's epochs and the caches don't mind each
    other, also where one ends in the middle of the other."""
    pipe = cache(10, 1)
    whole = [sample for cycle in served(pipe, 0, 1, 4) for sample in cycle]
    with pipe.loader(steps_per_epoch=8) as loader:
        for epoch in range(3):
            assert loader.epoch == epoch
            assert list(loader) == whole[8 * epoch : 8 * epoch + 8]


# Memory -------------------------------------------------------------------------------------------------------------


class Activation:
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


# Positions ----------------------------------------------------------------------------------------------------------


def midpoint(sample: int) -> tuple[int, int]:
    """The position in the middle between the first that may be and the sequence's end, as the seed's is."""
    length, first = 10 + sample, 4
    return sample, (first + length) // 2


def drawn_position(sample: int, *, rng: np.random.Generator) -> tuple[int, int]:
    return sample, int(rng.integers(1000))


def test_positions_that_are_computed_are_the_same_in_each_cache() -> None:
    """ "Position selection is **deterministic** (midpoint between min_pos and sequence length)"."""
    for cycle in served(cache(9, 1, midpoint), 0, 1, 5):
        assert all(position == (14 + sample) // 2 for sample, position in cycle)


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
