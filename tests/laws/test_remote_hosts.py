"""One meaning on other machines, too: the laws over agents on this one, and resumes from and to any other backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from tests.backends.kit import AnyThreads, Changing
from tests.backends.remote.machines import machines
from tests.copying_backend import Copying
from tests.laws.failing import Runs, insist, live_pipelines
from tests.laws.profile import examples
from tests.sources.live_kit import Tape

pytestmark = pytest.mark.long

seeds = st.integers(0, 1000)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Two hosts that are up before a test begins, so that they are no test's leak."""
    with machines(tmp_path_factory.mktemp("keys")) as remote, remote as pool:
        with sl.from_items(range(2)).shard(2).open(backend=pool) as stream:
            list(stream)
        yield pool


def cuts() -> Iterator[int | None]:
    """Yield after how many bytes connections are cut: the agent's own isn't, one in five of its links is."""
    dice = Random(0)
    yield None
    while True:
        yield dice.choice([*12 * [None], 200, 900, 4000])


def test_compositions_keep_the_laws_on_other_machines(pool: Backend) -> None:
    @examples(12)
    @given(compositions(most=10, stages=3), seeds)
    def check(composition: Composition, seed: int) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=pool, generations=2)

    check()


def test_compositions_keep_the_laws_where_connections_are_cut(tmp_path: Path) -> None:
    with machines(tmp_path, cuts=cuts()) as remote, remote as pool:

        @examples(6)
        @given(compositions(most=6, stages=2), seeds)
        def check(composition: Composition, seed: int) -> None:
            DICE.seed(seed)
            check_resume(composition.pipeline, seed=seed, backend=pool, generations=1)

        check()


def test_a_state_moves_between_machines_and_any_other_backend(pool: Backend, processes: Backend) -> None:
    others = [sl.Inline(), Copying(2), AnyThreads(2), processes, pool]
    anywhere = st.lists(st.sampled_from(others), min_size=2, max_size=5)

    @examples(15)
    @given(compositions(most=12, stages=3), seeds, anywhere)
    def check(composition: Composition, seed: int, backends: list[Backend]) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=Changing([*backends, pool]))

    check()


def test_a_live_source_and_its_journal_move_between_machines_processes_and_this_one(
    pool: Backend, processes: Backend
) -> None:
    @examples(20)
    @given(live_pipelines(), seeds)
    def check(live: tuple[str, int, Callable[[Tape, Path], Composition]], seed: int) -> None:
        DICE.seed(seed)
        dice, (_, length, make) = Random(seed), live
        with TemporaryDirectory() as name:
            folder = Path(name)
            whole = Runs(folder / "whole.jsonl")
            parts = Runs(folder / "parts.jsonl", Random(seed), backends=[sl.Inline(), processes, pool])
            whole.part(make(Tape(length), folder / "whole").pipeline, None, None)
            made, snapshot = make(Tape(length), folder / "parts"), None
            for step in range(5):
                most = None if step == 4 else dice.randrange(len(whole.items) // 2 + 2)
                parts.part(made.pipeline, snapshot, most).save(folder / "snapshot")
                snapshot = sl.Snapshot.load(folder / "snapshot")
            insist(whole, parts, made.chooses)

    check()
