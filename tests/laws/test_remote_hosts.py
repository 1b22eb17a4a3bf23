"""One meaning on other machines, too: the laws over agents on this one, and resumes from and to any other backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from tests.backends.remote.machines import machines
from tests.copying_backend import Copying
from tests.kit import AnyThreads, Changing
from tests.laws.profile import examples

seeds = st.integers(0, 1000)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Two hosts that are up before a test begins, so that they are no test's leak."""
    with machines(tmp_path_factory.mktemp("keys")) as remote, remote as pool:
        with sl.from_items(range(2)).shard(2).open(backend=pool) as stream:
            list(stream)
        yield pool


def test_compositions_keep_the_laws_on_other_machines(pool: Backend) -> None:
    @examples(12)
    @given(compositions(most=10, stages=3), seeds)
    def check(composition: Composition, seed: int) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=pool, generations=2)

    check()


def test_a_state_moves_between_machines_and_any_other_backend(pool: Backend) -> None:
    anywhere = st.lists(st.sampled_from([sl.Inline(), Copying(2), AnyThreads(2), pool]), min_size=2, max_size=5)

    @examples(15)
    @given(compositions(most=12, stages=3), seeds, anywhere)
    def check(composition: Composition, seed: int, backends: list[Backend]) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=Changing([*backends, pool]))

    check()
