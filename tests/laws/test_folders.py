"""Caches on disk keep the laws, whatever a resume finds in their folders: random plans, in every kind of host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.tasks import Tasks
from streamline.errors import ResumeError
from streamline.pipeline import Pipeline
from streamline.testing import oracle
from streamline.testing.compositions import Composition, continued
from streamline.testing.laws import ExpectedItems, close_law, failure_law, quiescence_law, resume_law
from streamline.testing.oracle import Oracle
from streamline.testing.scripted import Script
from streamline.testing.steps import DICE, Step, steps
from streamline.testing.subjects import Subject, opened, read, run
from streamline.transforms import cache_disk as disk
from tests.laws.folders import ANYHOW, SOUND, Folders, Kept
from tests.laws.profile import examples

seeds = st.integers(0, 1000)

CACHE = Step(".cache(path=)", lambda pipe: pipe.cache(path="another at each opening"))


@st.composite
def kept(draw: st.DrawFn, *, choosing: bool, most: int = 8) -> Composition:
    """Random plans over scripts, which keep a pass on disk, or several, anywhere."""
    shards = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0, 2 * most // shards), min_size=shards, max_size=shards))
    entries = tuple(tuple(shard + 10 * at for at in range(size)) for shard, size in enumerate(sizes))
    paces = tuple(draw(st.lists(st.integers(0, 2), max_size=3)))
    pipe: Pipeline[Any] = Pipeline(Script(shards=entries, schedule=paces)).shard(shards)
    made = Composition(pipe, f"scripted of sizes {sizes}, paces {paces}", sum(sizes))
    before = draw(st.lists(steps(), max_size=2))
    made = made.with_steps([*before, CACHE], choosing)
    return draw(continued(made, choosing=choosing, stages=2, step=st.one_of(steps(), steps(), st.just(CACHE))))


blocks = st.sampled_from([1, 2, 3, 5])
"""Items of a block."""


@contextmanager
def of_items(count: int) -> Iterator[None]:
    """Let blocks have so many items."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "BLOCK_ITEMS", count)
        yield


def check(composition: Composition, seed: int, backend: Backend | None = None) -> None:
    """Check the laws on a plan, each opening of which finds another folder."""
    DICE.seed(seed)
    truth = ExpectedItems(oracle(composition.pipeline), composition.chooses)
    script = cast(Script, composition.pipeline.source) if backend is None else None
    with Folders.made(seed, SOUND if truth.choosing else ANYHOW) as folders:
        subject = Kept(composition.pipeline, folders, backend)
        resuming = partial(resume_law, truth=truth, generations=3)
        for law in (resuming, quiescence_law, partial(close_law, script=script)):
            run(partial(law, subject=subject, dice=Random(seed)))


@examples(12)
@given(kept(choosing=False), seeds, blocks)
def test_every_state_is_exact_whatever_is_in_the_folder(composition: Composition, seed: int, count: int) -> None:
    with of_items(count):
        check(composition, seed)


@pytest.mark.long
@examples(12)
@given(kept(choosing=True), seeds, blocks)
def test_behind_choices_nothing_is_lost_or_doubled_whatever_other_runs_have_written(
    composition: Composition, seed: int, count: int
) -> None:
    with of_items(count):
        check(composition, seed)


@pytest.mark.long
@examples(12)
@given(kept(choosing=True), seeds, blocks)
def test_behind_choices_what_is_damaged_or_gone_is_drawn_again_exactly_or_an_error(
    composition: Composition, seed: int, count: int
) -> None:
    DICE.seed(seed)
    truth = ExpectedItems(oracle(composition.pipeline), choosing=True)
    with of_items(count), Folders.made(seed) as folders:
        run(partial(exact_or_refused, subject=Kept(composition.pipeline, folders), truth=truth, dice=Random(seed)))


async def exact_or_refused(tasks: Tasks, subject: Subject, truth: ExpectedItems, dice: Random) -> None:
    async with opened(tasks, subject, None) as flow:
        whole = await read(flow, subject.write, dice)
    truth.insist_whole("Order", f"{subject}", [], whole.items)
    for text, k in {text: k for k, _, text in whole.states}.items():
        async with opened(tasks, subject, text) as flow:
            rest = await read(flow, subject.write, dice)
        where = f"from the state after item {k}, {text}, of {subject}"
        if rest.failure is None:
            truth.insist_whole("Resume", where, whole.items[:k], rest.items)
        else:
            assert isinstance(rest.failure, ResumeError), where
            assert "damaged or gone, and what is before it chooses an order" in str(rest.failure)
            truth.insist_part("Resume", where, [*whole.items[:k], *rest.items])


@examples(12)
@given(st.booleans().flatmap(lambda choosing: kept(choosing=choosing)), seeds, blocks, st.data())
def test_a_failure_leaves_files_that_a_resume_behind_its_fix_goes_on_with(
    composition: Composition, seed: int, count: int, data: st.DataObject
) -> None:
    DICE.seed(seed)
    pipe, error = composition.pipeline, ValueError("scripted")
    script = cast(Script, pipe.source)
    shard = data.draw(st.integers(0, len(script.shards) - 1))
    at = data.draw(st.integers(0, len(script.shards[shard])))
    broken = replace(pipe, source=script.failing(error, shard=shard, at=at))
    before = before_failure(broken)
    assume(before is not None)
    truth = ExpectedItems(oracle(pipe), composition.chooses)
    with of_items(count), Folders.made(seed, SOUND if truth.choosing else ANYHOW) as folders:
        law = partial(failure_law, broken=Kept(broken, folders), mended=Kept(pipe, folders), error=error, truth=truth)
        run(partial(law, least=0 if truth.choosing else before, dice=Random(seed)))


def before_failure(pipe: Pipeline[Any]) -> int | None:
    """Return how many items come before the failure; None: it isn't reached, as a take stops before it."""
    count = 0
    try:
        with Oracle(pipe) as truth:
            for _ in truth:
                count += 1
    except ValueError:
        return count
    return None


@pytest.mark.long
@examples(6)
@given(st.booleans().flatmap(lambda choosing: kept(choosing=choosing)), seeds, blocks)
def test_threads_keep_passes_likewise(composition: Composition, seed: int, count: int) -> None:
    with of_items(count), sl.Threads(2) as pool:
        check(composition, seed, pool)


@pytest.mark.long
def test_processes_keep_passes_likewise() -> None:
    with sl.Processes(2) as pool:
        with sl.from_items(range(2)).shard(2).map(of_two).merge().open(backend=pool) as stream:
            assert len(set(stream)) == 2  # each of them

        @examples(6)
        @given(st.booleans().flatmap(lambda choosing: kept(choosing=choosing, most=6)), seeds)
        def checks(composition: Composition, seed: int) -> None:
            check(composition, seed, pool)

        checks()


def of_two(_: int) -> int:
    """Let blocks have two items, in this process."""
    disk.BLOCK_ITEMS = 2
    os.fsync = lambda fd: None
    return os.getpid()
