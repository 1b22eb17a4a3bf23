"""One meaning on a Ray cluster, too: the laws, and snapshots that go to any other backend and back."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.hosts.pool import HostPool
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from tests.backends.kit import AnyThreads, Changing
from tests.backends.remote.machines import machines
from tests.copying_backend import Copying
from tests.laws.profile import examples
from tests.sources.live_kit import Tape

seeds = st.integers(0, 1000)

LENGTH = 600


def test_compositions_keep_the_laws_on_a_cluster(pool: HostPool) -> None:
    @examples(20)
    @given(compositions(most=10, stages=3), seeds)
    def check(composition: Composition, seed: int) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=pool, generations=2)

    check()


def test_a_state_moves_between_a_cluster_and_any_other_backend(pool: HostPool) -> None:
    anywhere = st.lists(st.sampled_from([sl.Inline(), Copying(2), AnyThreads(2), pool]), min_size=2, max_size=5)

    @examples(20)
    @given(compositions(most=12, stages=3), seeds, anywhere)
    def check(composition: Composition, seed: int, backends: list[Backend]) -> None:
        DICE.seed(seed)
        check_resume(composition.pipeline, seed=seed, backend=Changing([*backends, pool]))

    check()


def files(merge: Literal["strict", "best_effort"], folder: Path, _: Tape) -> Pipeline[Any]:
    folder.mkdir(exist_ok=True)
    for part in range(5):
        (folder / f"{part}.txt").write_text("".join(f"{line}\n" for line in range(part, LENGTH, 5)))
    return sl.read_lines(folder / "*.txt").shard(3).shuffle(window=16).map(int).merge(merge).shuffle(window=8, seed=1)


def live(merge: Literal["strict", "best_effort"], _: Path, tape: Tape) -> Pipeline[Any]:
    return sl.from_stream(tape).shard(3).map(int).merge(merge).batch(4, collate=None)


def stored(merge: Literal["strict", "best_effort"], folder: Path, tape: Tape) -> Pipeline[Any]:
    return sl.from_stream(tape, journal=folder).shard(3).map(int).merge(merge).batch(4, collate=None)


@pytest.mark.parametrize("merge", ["strict", "best_effort"])
@pytest.mark.parametrize("make", [files, live, stored], ids=lambda make: make.__name__)
def test_a_snapshot_goes_from_one_backend_to_the_next(
    pool: HostPool, tmp_path: Path, make: Any, merge: Literal["strict", "best_effort"]
) -> None:
    dice, tape, snapshot = random.Random(make.__name__ + merge), Tape(LENGTH), None
    got: list[Any] = []
    with machines(tmp_path) as remote:
        places: list[Backend] = [sl.Inline(), sl.Processes(2), remote, pool, sl.Inline()]
        for backend in places:
            last = backend is places[-1]
            with make(merge, tmp_path / "data", tape).open(backend=backend, resume=snapshot) as stream:
                got += itertools.islice(stream, None if last else dice.randrange(1, 30))
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())  # of all that was read of a feed until then
    if make is files:
        if merge == "strict":
            assert got == list(files(merge, tmp_path / "data", tape))
    else:
        got = list(itertools.chain.from_iterable(got))
        if merge == "strict":
            assert got == list(range(LENGTH))
    assert sorted(got) == list(range(LENGTH))
