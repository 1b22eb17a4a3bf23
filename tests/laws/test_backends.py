"""One meaning: the same plan gives the same items, order and states wherever its workers run.

Over random compositions, on hosts that copy (`Copying`), on threads, in processes, and on another backend at each
resume.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.pipeline import Pipeline
from streamline.testing import oracle
from streamline.testing.checks import check_failure, check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.scripted import Script
from streamline.testing.steps import DICE
from tests.backends.kit import AnyThreads, Changing
from tests.copying_backend import Copying
from tests.laws.profile import examples

seeds = st.integers(0, 1000)


ANY: list[Backend] = [sl.Inline(), Copying(1), Copying(2), Copying(5), AnyThreads(2)]

HOSTED: list[Backend] = [Copying(2), AnyThreads(2)]


@pytest.mark.long
@examples(25)
@given(compositions(most=16, stages=3), seeds, st.sampled_from([1, 2, 4]))
def test_compositions_keep_the_laws_on_hosts_that_copy(composition: Composition, seed: int, hosts: int) -> None:
    DICE.seed(seed)
    check_resume(composition.pipeline, seed=seed, backend=Copying(hosts))


@pytest.mark.long
def test_a_state_of_one_backend_resumes_on_any_other(processes: Backend) -> None:
    anywhere = st.lists(st.sampled_from([*ANY, processes]), min_size=2, max_size=5).map(Changing)

    @examples(15)
    @given(compositions(most=12, stages=3), seeds, anywhere)
    def check(composition: Composition, seed: int, backends: Changing) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=backends)

    check()


@pytest.mark.long
def test_compositions_keep_the_laws_in_processes(processes: Backend) -> None:
    @examples(8)
    @given(compositions(most=10, stages=3), seeds)
    def check(composition: Composition, seed: int) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=processes, generations=2)

    check()


@examples(25)
@given(compositions(most=16, stages=3, kinds=["script"]), seeds, st.data())
def test_compositions_fail_on_hosts_that_copy_behind_what_came_before(
    composition: Composition, seed: int, data: st.DataObject
) -> None:
    DICE.seed(seed)
    error = ValueError("scripted")
    pipe = composition.pipeline
    script = pipe.source
    assert isinstance(script, Script)
    shard = data.draw(st.integers(0, len(script.shards) - 1))
    at = data.draw(st.integers(0, len(script.shards[shard])))
    broken = replace(pipe, source=script.failing(error, shard=shard, at=at))
    assume(_fails(broken))
    check_failure(broken, error, seed=seed, backend=data.draw(st.sampled_from(HOSTED)))


def _fails(pipe: Pipeline[Any]) -> bool:
    """Whether the failure is reached: a take may stop before it."""
    try:
        oracle(pipe)
    except ValueError:
        return True
    return False
