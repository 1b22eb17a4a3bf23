"""A merge's state: who gave how many, where each worker stands, and which choices are to be repeated."""

from __future__ import annotations

import json
from typing import Any

import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.merge.base import FIRST_WORKERS, choices_of
from streamline.pipeline import Pipeline

UNEVEN = [5, 3, 0, 4]


def uneven(lengths: list[int]) -> Pipeline[tuple[int, int]]:
    """One worker per length, each with its own (worker, number) items."""
    longest = max([*lengths, 1])
    grid = [(worker, number) for number in range(longest) for worker in range(len(lengths))]
    return sl.from_items(grid).shard(len(lengths)).filter(lambda item: item[1] < lengths[item[0]], name="own")


def sequential(lengths: list[int]) -> list[tuple[int, int]]:
    """Round after round, in index order, past workers that have ended: the order of a strict merge."""
    return [
        (worker, number)
        for number in range(max([*lengths, 0]))
        for worker in range(len(lengths))
        if number < lengths[worker]
    ]


def states(pipe: Pipeline[Any]) -> list[tuple[Any, sl.Snapshot]]:
    """Return each item with the snapshot right after it, through JSON."""
    with pipe.open() as stream:
        return [(item, sl.Snapshot.from_json(stream.snapshot().to_json())) for item in stream]


def test_strict_order_is_round_robin_past_workers_that_have_ended() -> None:
    assert list(uneven(UNEVEN)) == sequential(UNEVEN)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_strict_order_is_the_sequential_oracles(lengths: list[int]) -> None:
    assert list(uneven(lengths)) == sequential(lengths)


@pytest.mark.parametrize("kind", ["strict", "best_effort"])
def test_produced_counts_the_items_consumed_from_each_worker(kind: Any) -> None:
    counts = [0] * len(UNEVEN)
    for (worker, _), snapshot in states(uneven(UNEVEN).merge(kind)):
        counts[worker] += 1
        assert snapshot.produced == counts
    assert counts == UNEVEN


def test_the_next_worker_is_the_one_after_the_last() -> None:
    for (worker, _), snapshot in states(uneven(UNEVEN).merge("best_effort", max_skips_per_round=1)):
        assert snapshot.next_worker == (worker + 1) % len(UNEVEN)


@pytest.mark.parametrize("kind", ["strict", "best_effort"])
def test_there_is_nothing_to_repeat_where_no_stage_goes_back(kind: Any) -> None:
    for _, snapshot in states(uneven(UNEVEN).merge(kind)):
        assert snapshot.state["merge"]["replay"] == []


def test_a_strict_merge_has_no_choices_to_repeat_after_a_rewinding_stage_either() -> None:
    for _, snapshot in states(uneven(UNEVEN).merge().shuffle(window=5)):
        assert snapshot.state["merge"]["replay"] == []


def test_a_best_effort_merge_logs_as_many_choices_as_are_read_again_and_no_more() -> None:
    """▲ A log is as long as the rewind, never longer."""
    pipe = sl.from_items(range(200)).shard(4).merge("best_effort").shuffle(window=8)
    lengths = [len(choices_of(snapshot.flow_state["merge"])) for _, snapshot in states(pipe)]
    assert lengths == [8 if count % 8 else 0 for count in range(1, 201)]


@pytest.mark.parametrize("shards", [3, FIRST_WORKERS + 6])
def test_a_mark_from_before_workers_were_open_leads_to_what_they_have_chosen_since(shards: int) -> None:
    """▲ Such a mark had states of theirs with no log: the snapshot failed."""
    count = 3 * shards

    async def out_of_order(item: int) -> int:
        if item < shards:  # the first one of each worker
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
        return item

    pipe = (sl.from_items(range(count)).shard(shards).map(out_of_order, concurrency=2, ordered=False).merge()).shuffle(
        window=count, seed=0
    )  # its mark is the beginning until all has come
    with pipe.open() as stream:
        first = next(stream)
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        whole = [first, *stream]
    assert sorted(whole) == list(range(count))
    assert [state["out_of_order"]["replay"] for state in snapshot.worker_states] == [[1, 2, 0]] * shards
    with pipe.open(resume=snapshot) as stream:
        assert [first, *stream] == whole


def test_the_choices_in_a_snapshot_are_those_that_are_made_again() -> None:
    pipe = (
        sl.from_items(range(60))
        .shard(4)
        .merge("best_effort")
        .batch(3, collate=None)
        .flat_map(lambda batch: batch, name="flat")
    )
    found = states(pipe)
    for at in (0, 1, 4, 17, 30, 58):
        with pipe.open(resume=found[at][1]) as stream:
            rest = list(stream)
        assert sorted([item for item, _ in found[: at + 1]] + rest) == list(range(60))


def test_one_worker_after_another_ends_exactly_at_the_snapshot() -> None:
    found = states(uneven(UNEVEN))
    for at, (_, snapshot) in enumerate(found):
        with uneven(UNEVEN).open(resume=snapshot) as stream:
            assert list(stream) == [item for item, _ in found[at + 1 :]]


def test_it_is_json_of_a_fixed_shape() -> None:
    for _, snapshot in states(uneven(UNEVEN)):
        own = json.loads(snapshot.to_json())
        assert own
        assert list(snapshot.state["merge"]) == ["next_worker", "produced", "replay", "workers"]
        assert len(snapshot.worker_states) == len(UNEVEN)
