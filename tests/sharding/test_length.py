"""What comes out of a plan, counted beforehand: against what comes out of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.plan.length import num_outputs_of_rank
from streamline.testing.compositions import Composition, compositions

TEN = sl.from_items(range(10))


def same(item: Any) -> Any:
    return item


async def slow(item: Any) -> Any:
    return item


@sl.stage(stateless=True)
async def through(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for item in items:
        yield item


KNOWN: list[tuple[sl.Pipeline[Any], float]] = [
    (sl.from_items([]), 0),
    (TEN, 10),
    (TEN.shuffle(seed=1).take(7).skip(2).repeat(3).shard(4), 15),
    (TEN.repeat().take(25).shard(3, "contiguous"), 25),
    (TEN.shard(4), 10),
    (TEN.shard(4, drop_remainder=True), 8),
    (TEN.shard(4, "contiguous", drop_remainder=True), 8),
    (TEN.shard(16), 10),
    (TEN.shard(3).take(2), 6),
    (TEN.shard(3).skip(3), 1),
    (TEN.shard(3).batch(2), 6),  # of 4, 3 and 3 items: a rest in two shards
    (TEN.shard(3).batch(3, drop_remainder=True), 3),
    (TEN.shard(3).merge().batch(3), 4),
    (TEN.shard(3).merge().batch(3, drop_remainder=True), 3),
    (TEN.shard(3).map(same).map(slow, concurrency=2).map(slow, concurrency=2, ordered=False), 10),
    (TEN.shard(3).map(lambda item, rng: item, seed=0).shuffle(window=3).prefetch(2), 10),
    (TEN.shard(3).merge("best_effort").take(9).skip(1).repeat(2), 16),
    (TEN.shard(2).repeat(0), 0),
    (TEN.shard(2).skip(100).repeat(), 0),  # a pass that yields nothing ends it
    (TEN.repeat().shard(2).take(4).batch(3), 4),
    (TEN.repeat(), math.inf),
    (TEN.shard(3).repeat().batch(4).skip(5), math.inf),
    (TEN.shard(3).merge().repeat().shuffle(window=2).batch(4, drop_remainder=True), math.inf),
    (TEN.shard(3).repeat().merge().skip(3).take(8).batch(3), 3),
]


def known(pipe: sl.Pipeline[Any], rank: int = 0, world_size: int = 1) -> float | None:
    return num_outputs_of_rank(pipe.plan, rank, world_size, "allow")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("pipe", "expected"), KNOWN)
def test_what_comes_out_is_known(pipe: sl.Pipeline[Any], expected: float) -> None:
    assert known(pipe) == expected
    if expected != math.inf:
        assert len(list(pipe)) == expected


@pytest.mark.parametrize(
    "pipe",
    [
        TEN.filter(same),
        TEN.flat_map(lambda item: [item]),
        TEN.batch(2, collate=None).unbatch(),
        TEN.through(through),
        TEN.shard(2).filter(same).batch(2).take(1),
        TEN.shard(2).merge().filter(same),
        sl.from_iterable(lambda: range(10)),
        sl.from_iterable(lambda: range(10)).take(3),
        sl.from_iterable(lambda: range(10)).take(3).shard(2),
        sl.read_lines("nowhere.txt"),
    ],
)
def test_what_depends_on_the_items_is_not_known(pipe: sl.Pipeline[Any]) -> None:
    assert known(pipe) is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_count_what_their_own_shards_give(world_size: int) -> None:
    pipe = TEN.shard(5).batch(2, collate=None).merge().skip(1)
    for rank in range(world_size):
        with pipe.open(rank=rank, world_size=world_size, ends="allow") as stream:
            assert known(pipe, rank, world_size) == len(list(stream))


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(compositions(kinds=("items",)), st.data())
def test_what_is_known_is_so(composition: Composition, data: st.DataObject) -> None:
    pipe = composition.pipeline
    world_size = data.draw(st.integers(1, pipe.plan.shard.num_shards), "world_size")
    rank = data.draw(st.integers(0, world_size - 1), "rank")
    expected = known(pipe, rank, world_size)
    if expected is not None:
        with pipe.open(rank=rank, world_size=world_size, ends="allow") as stream:
            assert len(list(stream)) == expected
