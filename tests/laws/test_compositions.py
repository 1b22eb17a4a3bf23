"""Random compositions of all stages: strict ones equal the oracle, choosing ones lose and double nothing.

`STREAMLINE_EXAMPLES=50 pytest tests/laws` searches deeper.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamline.pipeline import Pipeline
from streamline.testing import oracle
from streamline.testing.checks import check_failure, check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.scripted import Script
from streamline.testing.steps import DICE
from tests.laws.profile import GENERATIONS, examples, short

seeds = st.integers(0, 1000)
lists = st.sampled_from([1, 2, 3, 256])


@examples(25)
@given(compositions(choosing=False), seeds, lists)
def test_strict_compositions_equal_the_oracle_and_resume_exactly(
    composition: Composition, seed: int, most: int
) -> None:
    with short(LIST_ITEMS=most):
        check_resume(composition.pipeline, seed=seed, generations=GENERATIONS)


@examples(20)
@given(compositions(choosing=True), seeds, lists)
def test_choosing_compositions_lose_and_double_nothing(composition: Composition, seed: int, most: int) -> None:
    DICE.seed(seed)
    with short(LIST_ITEMS=most):
        check_resume(composition.pipeline, seed=seed, generations=GENERATIONS)


@pytest.mark.long
@examples(25)
@given(compositions(choosing=True, stages=3), seeds, lists)
def test_choosing_compositions_hold_where_segments_turn(composition: Composition, seed: int, most: int) -> None:
    DICE.seed(seed)
    with short(SEGMENT_ITEMS=3, AHEAD=2, WAITING_ITEMS=2, LIST_ITEMS=most):
        check_resume(composition.pipeline, seed=seed)


@pytest.mark.long
@examples(20)
@given(compositions(stages=3, most=40), seeds, st.sampled_from([0.0, math.inf]))
def test_compositions_hold_where_channels_widen(composition: Composition, seed: int, quick_s: float) -> None:
    """Channels of 2 to 8 items, which are full soon; lists of 1 and of 3 items."""
    DICE.seed(seed)
    with short(READ_AHEAD_ITEMS=2, LIST_ITEMS=1, LONG_LIST_ITEMS=3, QUICK_ITEM_S=quick_s):
        check_resume(composition.pipeline, seed=seed)


@pytest.mark.long
@examples(15)
@given(compositions(stages=3, most=12), seeds)
def test_compositions_hold_on_uvloop(composition: Composition, seed: int) -> None:
    DICE.seed(seed)
    check_resume(composition.pipeline, seed=seed, loop="uvloop")


@examples(25)
@given(compositions(kinds=["script"]), seeds, st.data())
def test_compositions_fail_behind_what_came_before(composition: Composition, seed: int, data: st.DataObject) -> None:
    DICE.seed(seed)
    error = ValueError("scripted")
    pipe = composition.pipeline
    script = pipe.source
    assert isinstance(script, Script)
    shard = data.draw(st.integers(0, len(script.shards) - 1))
    at = data.draw(st.integers(0, len(script.shards[shard])))
    broken = replace(pipe, source=script.failing(error, shard=shard, at=at))
    assume(_fails(broken))
    check_failure(broken, error, seed=seed)


def _fails(pipe: Pipeline[Any]) -> bool:
    """Whether the failure is reached: a take may stop before it."""
    try:
        oracle(pipe)
    except ValueError:
        return True
    return False
