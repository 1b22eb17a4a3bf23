"""Groups, and batches by cost: where they end, what an error names, and what is no key, cost or bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError
from streamline.testing.checks import check_resume
from tests.kit import later, stopped
from tests.laws.profile import examples

keys = st.lists(st.integers(0, 2), max_size=25)
costs = st.lists(st.integers(0, 6), max_size=25)


SKIPPING: dict[str, Any] = {"on_error": "skip", "max_errors": None}


def second(item: tuple[int, int]) -> int:
    return item[1]


def cut_by_cost(items: list[tuple[int, int]], most: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the batches, found by trying how many items fit."""
    batches = []
    while items:
        count = max(n for n in range(1, min(size, len(items)) + 1) if sum(map(second, items[:n])) <= most or n == 1)
        full = next((n for n in range(1, count + 1) if sum(map(second, items[:n])) >= most), count)
        batches.append(items[:full])
        items = items[full:]
    return batches


@examples(10)
@given(keys)
def test_groups_are_runs_of_equal_keys_resumed_several_times_in_a_row(found: list[int]) -> None:
    items = list(enumerate(found))
    pipe = sl.from_items(items).group_by(second)
    expected = [(key, list(group)) for key, group in groupby(items, second)]
    assert list(pipe) == expected
    groups, snapshot = stopped(pipe, 1)
    for _ in expected:
        more, snapshot = stopped(pipe, 1, snapshot)
        groups += more
    assert groups == expected


@examples(10)
@given(costs, st.integers(6, 12), st.integers(1, 5))
def test_batches_cost_at_most_so_much(found: list[int], most: int, size: int) -> None:
    items = list(enumerate(found))
    pipe = sl.from_items(items).batch(size, max_cost=most, cost=second, collate=None)
    assert list(pipe) == cut_by_cost(items, most, size)
    check_resume(pipe, generations=2)


@examples(15)
@given(costs, st.integers(6, 9), st.integers(0, 1000))
def test_lists_that_are_read_again_end_where_they_did_though_other_items_follow(
    found: list[int], most: int, seed: int
) -> None:
    """A stage downstream rewinds over lists of items that another run chooses in another order."""
    items = sl.from_items(list(enumerate(found))).shard(2).map(later, concurrency=3, ordered=False)
    merged = items.merge("best_effort")
    check_resume(
        merged.batch(max_cost=most, cost=second, collate=None).shuffle(window=3).unbatch(), seed=seed, generations=2
    )
    pipe = merged.group_by(second).shuffle(window=2)
    groups, snapshot = stopped(pipe, 2)
    for _ in range(len(found)):
        more, snapshot = stopped(pipe, 2, snapshot)
        groups += more
    assert Counter(item for _, group in groups for item in group) == Counter(enumerate(found))
    assert all(second(item) == key for key, group in groups for item in group)


def test_a_batch_leaves_when_nothing_more_can_fit_in_it() -> None:
    more = anyio.Event()

    async def rows() -> AsyncIterator[int]:
        for item in range(3):
            yield item
        await more.wait()
        yield 3

    async def test() -> None:
        pipe = sl.from_iterable(rows).batch(max_cost=3, cost=lambda item: 1, collate=None)
        async with pipe.open() as stream:
            assert await anext(stream) == [0, 1, 2]
            more.set()
            assert await anext(stream) == [3]

    anyio.run(test)


def test_an_item_that_costs_too_much_is_an_error_or_is_left_out_and_counted() -> None:
    pipe = sl.from_items([3, 1, 9, 2, 9]).batch(max_cost=4, cost=int, collate=None)
    with pytest.raises(DataError, match=r"an item costs 9, and a batch may cost 4") as failure, pipe.open() as stream:
        list(stream)
    assert "at index 2 of items: 9" in failure.value.__notes__[0]
    with pipe.open(**SKIPPING) as stream:
        assert list(stream) == [[3, 1], [2]]
        assert stream.errors.total == 2
    batches, snapshot = stopped(pipe, 1, **SKIPPING)
    assert batches == [[3, 1]]
    with pipe.open(resume=snapshot, **SKIPPING) as stream:
        assert list(stream) == [[2]]
        assert stream.errors.total == 2


def test_what_is_left_out_inside_a_group_is_counted_once_wherever_a_run_stops() -> None:
    def key(item: int) -> int:
        if item % 3 == 2:
            raise ValueError("no key")
        return item // 5

    pipe = sl.from_items(range(12)).group_by(key)
    whole = [(0, [0, 1, 3, 4]), (1, [6, 7, 9]), (2, [10])]
    for stop in range(4):
        groups, snapshot = stopped(pipe, stop, **SKIPPING)
        with pipe.open(resume=snapshot, **SKIPPING) as stream:
            assert groups + list(stream) == whole
            assert stream.errors.total == 4


@pytest.mark.parametrize("cost", [-1, float("nan"), True, None, "3"])
def test_what_is_no_cost_is_an_error_that_names_the_item(cost: Any) -> None:
    pipe = sl.from_items([1]).batch(max_cost=4, cost=lambda item: cost, collate=None)
    with pytest.raises((DataError, PlanTypeError), match="expected a cost") as failure:
        list(pipe)
    assert "at index 0 of items: 1" in failure.value.__notes__[0]


def test_costs_of_numpy_count() -> None:
    pipe = sl.from_items([1, 2, 3]).batch(max_cost=3, cost=np.float32, collate=None)  # type: ignore[arg-type]
    assert list(pipe) == [[1, 2], [3]]


def test_a_group_that_is_too_large_is_an_error_with_the_way_out() -> None:
    assert list(sl.from_items([1, 1, 1, 2]).group_by(int, max_items=3)) == [(1, [1, 1, 1]), (2, [2])]
    with pytest.raises(DataError, match=r"more than 3 consecutive items have the key 1: .*\.group_by\(max_items=\)"):
        list(sl.from_items([1, 1, 1, 1]).group_by(int, max_items=3))


def test_keys_that_cant_be_compared_are_an_error_that_names_the_item() -> None:
    with pytest.raises(ValueError, match="truth value") as failure:
        list(sl.from_items([1, 2, 3]).group_by(lambda item: np.array([item, item])))
    assert "at index 1 of items: 2" in failure.value.__notes__[0]


def test_options_that_contradict_are_refused_where_they_are_written() -> None:
    pipe = sl.from_items(["a", "bb"])
    with pytest.raises(PlanTypeError, match=r"takes both"):
        pipe.batch(max_cost=4)
    with pytest.raises(PlanTypeError, match=r"takes both"):
        pipe.batch(4, cost=len)
    with pytest.raises(PlanTypeError, match=r"\.batch\(size\) is an integer, got NoneType"):
        pipe.batch()
    with pytest.raises(PlanError, match=r"max_cost=\) is more than 0"):
        pipe.batch(max_cost=0, cost=len)
    with pytest.raises(PlanError, match=r"max_wait_s=\) is for batches of one size"):
        pipe.batch(max_cost=4, cost=len, max_wait_s=1)
    with pytest.raises(PlanError, match=r"\.group_by\(key\) is a sync function"):
        pipe.group_by(later)
    with pytest.raises(PlanError, match=r"\.group_by\(max_items=\) is at least 1"):
        pipe.group_by(len, max_items=0)


def test_another_cost_is_taken_at_a_resume() -> None:
    snapshot = stopped(sl.from_items(range(8)).batch(max_cost=3, cost=lambda item: 1, collate=None), 1)[1]
    wider = sl.from_items(range(8)).batch(max_cost=5, cost=lambda item: 1, collate=None)
    with wider.open(resume=snapshot, accept=["batch.max_cost"]) as stream:
        assert list(stream) == [[3, 4, 5, 6, 7]]
