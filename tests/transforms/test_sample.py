"""Draws from an index: how often each item comes, that all shards together have each draw once, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.sharding.index import SampledOnce, WholeIndex
from streamline.testing.checks import check_resume
from streamline.testing.oracle import oracle
from tests.kit import stopped
from tests.laws.profile import examples

WEIGHTS = [1, 0, 3, 6]


@pytest.mark.parametrize("seed", range(3))
def test_items_come_as_often_as_their_weights_say(seed: int) -> None:
    found = Counter(sl.from_items("abcd").sample(20_000, weights=WEIGHTS, seed=seed))
    assert found["b"] == 0
    for item, weight in zip("abcd", WEIGHTS, strict=True):
        deviation = (20_000 * weight / 10 * (1 - weight / 10)) ** 0.5
        assert abs(found[item] - 2_000 * weight) <= 5 * deviation


def test_first_draws_without_replacement_are_by_weight_and_none_comes_twice() -> None:
    assert sorted(sl.from_items("abcd").sample(3, weights=WEIGHTS, replacement=False)) == list("acd")
    firsts = Counter[int]()
    for seed in range(3_000):
        drawn = SampledOnce(WholeIndex(4), np.array(WEIGHTS), 3, [seed])(np.arange(3)).tolist()
        assert sorted(drawn) == [0, 2, 3]
        firsts[drawn[0]] += 1
    for at, weight in ((0, 1), (2, 3), (3, 6)):
        assert abs(firsts[at] - 300 * weight) <= 5 * (300 * weight * (1 - weight / 10)) ** 0.5


@examples(8)
@given(st.integers(1, 12), st.integers(0, 20), st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_shards_together_have_each_draw_once_and_resume_exactly(
    length: int, count: int, shards: int, weighted: bool, seed: int
) -> None:
    weights = [1 + at % 3 for at in range(length)] if weighted else None
    pipe = sl.from_items(range(length)).sample(count, weights=weights, seed=seed)
    assert list(pipe) == oracle(pipe)
    assert Counter(pipe.shard(shards)) == Counter(pipe)
    check_resume(pipe.shard(shards).merge(), generations=3)


def test_each_epoch_has_other_draws_and_the_same_epoch_the_same() -> None:
    pipe = sl.from_items(range(50)).sample(weights=[1.0] * 50)
    with pipe.loader(persistent=False) as loader:
        epochs = [list(loader), list(loader)]
    assert epochs[0] != epochs[1]
    assert epochs[0] == list(pipe)
    assert len(pipe.loader()) == 50
    passes = list(sl.from_items(range(50)).sample().repeat(2))
    assert passes[:50] != passes[50:]


def test_a_resume_with_other_draws_is_refused() -> None:
    snapshot = stopped(sl.from_items(range(9)).sample(weights=range(9)), 2)[1]
    for other in (
        sl.from_items(range(9)).sample(weights=range(1, 10)),
        sl.from_items(range(9)).sample(weights=range(9), seed=1),
        sl.from_items(range(9)).sample(8, weights=range(9)),
    ):
        with pytest.raises(ResumeError, match="every item would be at another place"):
            other.open(resume=snapshot)
    with sl.from_items(range(9)).sample(weights=np.arange(9.0)).open(resume=snapshot) as stream:
        assert len(list(stream)) == 7


def test_nothing_is_drawn_from_nothing() -> None:
    assert list(sl.from_items([]).sample(weights=[])) == list(sl.from_items([]).sample(5)) == []
    assert list(sl.from_items("ab").sample(0)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, "a weight for each item that it draws from, 3 here, got 2"),
        ({"weights": [1, -1, 2]}, "none is below 0"),
        ({"weights": [0, 0, 0]}, "one of them at least is above 0"),
        ({"weights": [1, float("nan"), 2]}, "are finite"),
        ({"replacement": False}, r"is \.shuffle\(\)\.take\(count\)"),
        ({"count": 3, "weights": [1, 0, 2], "replacement": False}, "2 of 3 have a weight above 0.*got 3"),
        ({"count": -1}, r"\.sample\(count\) is at least 0"),
    ],
)
def test_what_cant_be_drawn_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sl.from_items(range(3)).sample(**options)


def test_what_has_no_index_or_is_no_weight_is_refused() -> None:
    with pytest.raises(PlanError, match="sample"):
        sl.from_iterable(lambda: iter(range(3))).sample()
    with pytest.raises(PlanError, match=r"put \.sample before \.repeat"):
        sl.from_items(range(3)).repeat().sample().shard(2)
    with pytest.raises(PlanTypeError, match="a number for each item"):
        sl.from_items(range(3)).sample(weights="abc")  # type: ignore[arg-type]
    with pytest.raises(PlanTypeError, match="a number for each item"):
        sl.from_items(range(3)).sample(weights=3)  # type: ignore[arg-type]
