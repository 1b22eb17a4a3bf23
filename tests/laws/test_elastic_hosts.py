"""One meaning where hosts come and go at random: random pipelines, resumed anywhere, here and there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from tests.backends.kit import Changing
from tests.copying_backend import Copying, HostDeath
from tests.laws.profile import examples

pytestmark = pytest.mark.long

seeds = st.integers(0, 1000)

deaths = st.lists(st.integers(1, 12), max_size=6).map(
    lambda counts: tuple(HostDeath(link, received=count) for link, count in enumerate(counts))
)

come_and_go = st.builds(
    lambda most, least, cuts, late: Copying(most, cuts, least=min(least, most), late=tuple(late)),
    st.integers(1, 4),
    st.integers(1, 2),
    deaths,
    st.lists(st.integers(0, 40), max_size=10),
)


@examples(30)
@given(compositions(most=12, stages=3), seeds, come_and_go)
def test_compositions_keep_the_laws_where_hosts_come_and_go(
    composition: Composition, seed: int, backend: Copying
) -> None:
    DICE.seed(seed)
    check_resume(composition.pipeline, seed=seed, backend=backend, generations=2)


@examples(20)
@given(compositions(most=12, stages=3), seeds, come_and_go)
def test_a_state_moves_between_hosts_that_come_and_go_and_one_process(
    composition: Composition, seed: int, backend: Copying
) -> None:
    DICE.seed(seed)
    check_resume(composition.pipeline, seed=seed, backend=Changing([backend, sl.Inline()]))
