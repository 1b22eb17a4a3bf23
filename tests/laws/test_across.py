"""Features together: skipped items, dead letters, live sources, ranks and loaders, over random pipelines and resumes.

Whatever is interrupted how often, and whatever changes meanwhile that needs nothing at a resume: what is delivered,
how many items are counted as skipped, and the lines of dead letters are those of a run that was never interrupted.
`STREAMLINE_EXAMPLES=50 pytest tests/laws` searches deeper.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.snapshot.inspection import report
from streamline.testing.compositions import Composition, compositions
from streamline.testing.laws import ExpectedItems
from streamline.testing.steps import DICE, Step, steps
from streamline.testing.subjects import changed
from tests.laws.failing import BACKENDS, SKIP, AnyPipeline, Runs, failing_steps, insist, live_pipelines
from tests.laws.profile import examples
from tests.sources.live_kit import Tape

pytestmark = pytest.mark.long

seeds = st.integers(0, 10_000)

backends = st.sampled_from(BACKENDS)


def describe(pipe: AnyPipeline, snapshot: sl.Snapshot) -> None:
    """Whatever a snapshot is of, it can be looked at."""
    assert repr(snapshot)
    assert report(snapshot)
    assert pipe.explain(snapshot).fits


CACHES = TemporaryDirectory()
"""Where caches on disk are while an example runs: it is emptied for each."""


def caches() -> st.SearchStrategy[Step]:
    return st.just(Step(".cache(path=)", lambda pipe: pipe.cache(path=Path(CACHES.name, "cache"))))


# Whole pipelines ----------------------------------------------------------------------------------------------------


@examples(30)
@given(compositions(more=st.one_of(failing_steps(), failing_steps(), caches())), seeds)
def test_skipped_items_are_the_same_however_a_run_is_interrupted(composition: Composition, seed: int) -> None:
    DICE.seed(seed)
    dice, pipe = Random(seed), composition.pipeline
    with TemporaryDirectory() as folder:
        whole, parts = Runs(Path(folder, "whole.jsonl")), Runs(Path(folder, "parts.jsonl"), Random(seed))
        rmtree(Path(CACHES.name, "cache"), ignore_errors=True)
        whole.part(pipe, None, None)
        rmtree(Path(CACHES.name, "cache"), ignore_errors=True)
        snapshot = None
        for most in (*(dice.randrange(len(whole.items) // 2 + 2) for _ in range(5)), None):
            snapshot = parts.part(pipe, snapshot, most, dice.randrange(3) if most else 0)
            snapshot = sl.Snapshot.from_json(snapshot.to_json())
            describe(pipe, snapshot)
        insist(whole, parts, composition.chooses, ".cache(path=)" in composition.text)


@examples(14)
@given(live_pipelines(), seeds)
def test_a_live_source_of_two_ranks_with_skipped_items_is_exact(
    live: tuple[str, int, Callable[[Tape, Path], Composition]], seed: int
) -> None:
    """Take has been left out: behind the end of a worker, which items the others get depends on timing."""
    DICE.seed(seed)
    dice, (_, length, make) = Random(seed), live
    with TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            where: dict[str, Any] = {"rank": rank, "world_size": 2, "ends": "allow"}
            whole = Runs(Path(folder, f"whole{rank}.jsonl"), **where)
            parts = Runs(Path(folder, f"parts{rank}.jsonl"), Random(seed + rank), **where)
            whole.part(make(Tape(length), Path(folder, f"whole{rank}")).pipeline, None, None)
            ranks.append((whole, parts, make(Tape(length), Path(folder, "parts"))))
        snapshot = None
        for step in range(3):
            for whole, parts, made in ranks:
                most = None if step == 2 else dice.randrange(len(whole.items) // 2 + 2)
                parts.part(made.pipeline, snapshot, most).save(Path(folder, f"step-{step}/"))
            snapshot = sl.Snapshot.load(Path(folder, f"step-{step}/"))
            describe(ranks[0][2].pipeline, snapshot)
        for whole, parts, made in ranks:
            insist(whole, parts, made.chooses)


@examples(10)
@given(
    st.integers(0, 40),
    st.integers(1, 3),
    st.lists(st.one_of(steps(), failing_steps()), max_size=3),
    st.lists(st.one_of(steps(), failing_steps()), max_size=2),
    seeds,
)
def test_pipelines_that_begin_with_replicas_are_exact_with_skipped_items(
    length: int, shards: int, before: list[Step], behind: list[Step], seed: int
) -> None:
    """Each generation has a replicator of its own, which deals the stream from its start again."""
    DICE.seed(seed)
    dice = Random(seed)

    def made(replicator: sl.StreamReplicator[int], r: int, kept: Path) -> Composition:
        source = replicator.pipeline(r, journal=kept if seed % 2 else None)
        with_before = Composition(source.shard(shards), "", length).with_steps(_not_take(before))
        return Composition(with_before.pipeline.merge(), "", with_before.most).with_steps(_not_take(behind))

    with TemporaryDirectory() as folder:
        paths = [(Path(folder, f"whole{r}"), Path(folder, f"parts{r}")) for r in range(2)]
        for path in chain(*paths):
            path.mkdir()
        runs = [(Runs(whole / "letters.jsonl"), Runs(parts / "letters.jsonl", Random(seed))) for whole, parts in paths]
        snapshots: list[sl.Snapshot | None] = [None, None]
        for generation in range(4):
            stream = sl.from_items(range(length)).shard(3).shuffle(window=4)
            with sl.StreamReplicator(stream, 2, capacity=length + 1) as replicator:
                readers = [made(replicator, r, path[generation > 0] / "journal") for r, path in enumerate(paths)]
                for r, (composition, (whole, parts)) in enumerate(zip(readers, runs, strict=True)):
                    if generation == 0:
                        whole.part(composition.pipeline, None, None)
                        continue
                    most = None if generation == 3 else dice.randrange(len(whole.items) // 2 + 2)
                    snapshot = parts.part(composition.pipeline, snapshots[r], most)
                    snapshots[r] = sl.Snapshot.from_json(snapshot.to_json())
                    describe(composition.pipeline, snapshot)
        for whole, parts in runs:
            insist(whole, parts, composition.chooses)


def _not_take(steps: list[Step]) -> list[Step]:
    return [step for step in steps if not step.text.startswith(".take")]


@examples(20)
@given(compositions(most=14, stages=3, choosing=False, more=failing_steps()), seeds, backends)
def test_a_loader_writes_each_dead_letter_once_over_epochs_and_resumes(
    composition: Composition, seed: int, backend: Backend
) -> None:
    dice, pipe = Random(seed), composition.pipeline
    with TemporaryDirectory() as folder:
        whole, parts = Runs(Path(folder, "whole.jsonl")), Runs(Path(folder, "parts.jsonl"), backend=backend)
        with pipe.loader(**whole.options) as loader:
            epochs = [list(loader) for _ in range(3)]
        delivered: list[list[Any]] = [[], [], []]
        state: dict[str, Any] | None = None
        for generation in range(6):
            left = dice.randrange(12) if generation < 5 else None
            with changed(pipe, dice).loader(**parts.options) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                while loader.epoch < 3 and left != 0:
                    epoch = loader.epoch
                    for item in loader:
                        delivered[epoch].append(item)
                        left = None if left is None else left - 1
                        if left == 0:
                            break
                state = loader.state_dict()
        ExpectedItems(epochs, False).insist_whole("Resume", "over all epochs", [], delivered)
        assert parts.lines(False) == whole.lines(False)


def test_a_second_epoch_of_a_live_source_is_refused_and_steps_go_on_until_it_ends() -> None:
    with sl.from_stream(Tape(9)).shard(2).loader(**SKIP) as loader:
        assert list(loader) == list(range(9))
        with pytest.raises(sl.errors.PlanError, match="one epoch"):
            iter(loader)
    with sl.from_stream(Tape(9)).shard(2).loader(steps_per_epoch=6, **SKIP) as loader:
        assert list(loader) == [0, 1, 2, 3, 4, 5]
        rest = iter(loader)
        assert [next(rest), next(rest), next(rest)] == [6, 7, 8]
        with pytest.raises(sl.errors.PlanError, match="one epoch"):
            next(rest)


# Leaving ------------------------------------------------------------------------------------------------------------


def leave_by_break(pipe: AnyPipeline, most: int) -> None:
    for seen, _ in enumerate(pipe.open(**SKIP).sync_stream()):
        if seen >= most:
            break


def leave_by_exception(pipe: AnyPipeline, most: int) -> None:
    with pytest.raises(KeyError), pipe.open(**SKIP) as stream:  # noqa: PT012 - the loop's body raises
        for _ in zip(range(most), stream, strict=False):
            pass
        raise KeyError


def leave_by_dropping(pipe: AnyPipeline, most: int) -> None:
    stream = pipe.open(**SKIP).sync_stream()
    for _ in range(most):
        next(stream, None)
    del stream


def leave_while_paused(pipe: AnyPipeline, most: int) -> None:
    with pipe.open(**SKIP) as stream:
        for _ in range(most):
            next(stream, None)
        with stream.paused(quiesce_timeout=0):
            stream.close()


def leave_a_loader(pipe: AnyPipeline, most: int) -> None:
    loader = pipe.loader(**SKIP)
    for _ in zip(range(most), loader, strict=False):
        pass
    loader.state_dict()
    del loader


def leave_two_at_once(pipe: AnyPipeline, most: int) -> None:
    with pipe.open(**SKIP) as one, pipe.open(**SKIP) as other:
        for _ in range(most):
            next(one, None)
            next(other, None)
        one.close()
        next(other, None)


def leave_by_cancellation(pipe: AnyPipeline, most: int) -> None:
    async def work() -> None:
        async with pipe.open(**SKIP) as stream:
            for _ in range(most):
                await anext(stream, None)
            with anyio.move_on_after(0):
                await anext(stream, None)
            await anext(stream, None)  # the cancelled one had no effect

    anyio.run(work)


WAYS = [
    leave_by_break,
    leave_by_exception,
    leave_by_dropping,
    leave_while_paused,
    leave_a_loader,
    leave_two_at_once,
    leave_by_cancellation,
]


@examples(80)
@given(compositions(stages=3, more=failing_steps()), st.sampled_from(WAYS), st.integers(0, 8), backends)
def test_a_run_with_skipped_items_may_be_left_in_any_way(
    composition: Composition, leave: Callable[[AnyPipeline, int], None], most: int, backend: Backend
) -> None:
    """What it would leave behind (threads, files, warnings), conftest looks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SKIP, "backend", backend)
        leave(composition.pipeline, most)
