"""Folds and numbers: outputs, what is carried over a resume, and what can't be."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.testing.checks import check_resume
from tests.kit import later, stopped
from tests.laws.profile import examples

NOTHING: list[int] = []


def running(total: int, item: int) -> tuple[int, int]:
    return total + item, total + item


def last_three(seen: list[int], item: int) -> tuple[list[int], list[int]]:
    seen.append(item)
    return seen[-3:], list(seen[-3:])


@examples(8)
@given(st.lists(st.integers(-5, 5), max_size=20))
def test_each_call_is_given_what_the_one_before_has_returned(items: list[int]) -> None:
    assert list(sl.from_items(items).scan(running, 0)) == list(accumulate(items))
    check_resume(sl.from_items(items).scan(running, 0), generations=2)
    check_resume(sl.from_items(items).scan(last_three, NOTHING), generations=2)


def test_what_a_function_changes_in_place_changes_no_state_and_no_init() -> None:
    init: list[int] = []
    pipe = sl.from_items(range(6)).scan(last_three, init)
    first, snapshot = stopped(pipe, 2)
    assert first == [[0], [0, 1]]
    assert snapshot.worker_states[0]["last_three"] == {"carry": [0, 1]}
    assert init == []
    for _ in range(2):
        assert stopped(pipe, 9, snapshot)[0] == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_an_item_that_is_left_out_changes_nothing_that_is_carried_on() -> None:
    def fold(seen: list[int], item: int) -> tuple[list[int], int]:
        seen.append(item)
        if item == 2:
            raise ValueError(item)
        return seen, len(seen)

    with sl.from_items(range(5)).scan(fold, NOTHING).open(on_error="skip", max_errors=None) as stream:
        assert list(stream) == [1, 2, 3, 4]


def test_the_call_that_failed_is_made_again_with_what_was_carried() -> None:
    def fold(total: int, item: int) -> tuple[int, float]:
        return total + item, 1 / (item - 3)

    with pytest.raises(ZeroDivisionError) as failure:
        list(sl.from_items(range(5)).scan(fold, 10))
    assert sl.replay(failure.value, fn=lambda total, item: (total, (total, item))) == (13, (13, 3))


@pytest.mark.parametrize("carry", [{1: 2}, (1, 2), float("nan"), float("inf"), object()])
def test_what_json_has_not_is_not_carried_on(carry: Any) -> None:
    with pytest.raises(PlanTypeError, match=r"what scan\(.*\) carries on (is not JSON-able|does not survive JSON)"):
        list(sl.from_items([1]).scan(lambda seen, item: (carry, item), None))
    with pytest.raises(PlanTypeError, match=r"\.scan\(init\) (is not JSON-able|does not survive JSON)"):
        sl.from_items([1]).scan(lambda seen, item: (seen, item), carry)


def test_a_function_that_returns_no_pair_is_an_error_that_says_so() -> None:
    with pytest.raises(PlanTypeError, match=r"\.scan\(fn\) returns what it carries on and an output.*got"):
        list(sl.from_items([1]).scan(lambda seen, item: item, 0))  # type: ignore[arg-type, return-value]
    with pytest.raises(PlanError, match=r"\.scan takes a sync function"):
        sl.from_items([1]).scan(later, 0)  # type: ignore[arg-type]


def test_items_are_numbered_on_after_a_resume_also_after_a_choice() -> None:
    items = sl.from_items("abcdefgh").shard(2).map(later, concurrency=2, ordered=False).merge("best_effort")
    pipe = items.enumerate(5)
    first, snapshot = stopped(pipe, 3)
    pairs = first + stopped(pipe, 9, snapshot)[0]
    assert [number for number, _ in pairs] == list(range(5, 13))
    assert sorted(item for _, item in pairs) == list("abcdefgh")
    assert list(sl.from_items("ab").enumerate(-1)) == [(-1, "a"), (0, "b")]
