"""What needs nothing at a resume (docs/resume.md) may change at any item, again and again: nothing is lost or doubled.

A strict merge logs no choices: a stage downstream that reads again lost and doubled items under a best-effort one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from random import Random
from typing import Any

import pytest

import streamline as sl
import streamline.transforms.map
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.testing.laws import ExpectedItems
from streamline.testing.scripted import YIELD, scripted
from streamline.testing.subjects import PipelineSubject, changed, opened, read, run
from tests.copying_backend import Copying
from tests.laws.profile import FACTOR, mostly_long, sampled
from tests.laws.stages import REWINDING, best_effort, erratic, fan, pairs, unordered

Pipe = Pipeline[Any]

STAGES: dict[str, Callable[[Pipe], Pipe]] = {
    **REWINDING,
    "regenerate": lambda pipe: pipe.regenerate(4),
    "cache": lambda pipe: pipe.cache().repeat(2),
    "prefetch and shuffle": lambda pipe: pipe.prefetch(2).shuffle(window=4),
    "map and shuffle": lambda pipe: pipe.map(erratic, concurrency=3).shuffle(window=4),
    "unordered map and shuffle": lambda pipe: unordered(pipe).shuffle(window=4),
    "batches that don't wait": lambda pipe: pipe.batch(3, collate=None, max_wait_s=1e-9).unbatch(),
    "pack": lambda pipe: pipe.map(lambda item: [item] * 3).pack(4).map(lambda block: block["tokens"]),
}


def uneven() -> Pipe:
    """Return workers of sizes 5, 3, 0, 9 and 4 that are not equally fast: best-effort order is not the strict one."""
    return scripted(range(5), range(10, 13), [], [YIELD, *range(20, 29)], range(30, 34), schedule=(0, 2, 1, 3, 5))


def insist_any_item(*pipes: Pipe, backends: tuple[Any, ...] = (None,)) -> None:
    """Insist that each state of the first pipeline's run is one of the others, too; under each of these backends.

    Of each second state one of the others in turn, unless there is time for all.
    """
    first, *others = [PipelineSubject(pipe, backend or sl.Inline()) for pipe in pipes for backend in backends]

    async def work(tasks: Tasks) -> None:
        begun = await reading(tasks, first, None)
        truth, turns = ExpectedItems(begun.items, choosing=True), cycle(others)
        for text, k in sampled([*{text: k for k, _, text in begun.states}.items()], 2):
            for then in others if FACTOR > 1 else [next(turns)]:
                rest = await reading(tasks, then, text)
                truth.insist_whole("Resume", f"from {text} in {then}", begun.items[:k], rest.items)

    run(work)


async def reading(tasks: Tasks, subject: PipelineSubject, text: str | None, limit: int | None = None) -> Any:
    async with opened(tasks, subject, text) as flow:
        found = await read(flow, subject.write, Random(0), limit)
    if found.failure is not None:
        raise found.failure
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", mostly_long(STAGES, 4))
def test_another_kind_of_merge_at_any_item(name: str) -> None:
    strict, choosing = STAGES[name](uneven().merge()), STAGES[name](best_effort(uneven()))
    other = STAGES[name](uneven().merge("best_effort", max_skips_per_round=3, max_lead=1))
    insist_any_item(strict, choosing, other)
    insist_any_item(choosing, strict, other)


@pytest.mark.long
@pytest.mark.parametrize("name", ["shuffle", "unbatch", "custom", "unordered map and shuffle"])
def test_one_kind_of_merge_after_the_other(name: str) -> None:
    """Two items of each, so that a window that was begun in strict order lasts over all three."""
    strict, choosing = STAGES[name](uneven().merge()), STAGES[name](best_effort(uneven()))

    async def work(tasks: Tasks, dice: Random) -> None:
        truth = ExpectedItems((await reading(tasks, PipelineSubject(strict), None)).items, choosing=True)
        for kinds in ([strict, choosing] * 3, [choosing, strict] * 3):
            items: list[Any] = []
            text = None
            for pipe, limit in zip(kinds, (*(dice.randrange(3) for _ in range(5)), None), strict=True):
                found = await reading(tasks, PipelineSubject(pipe), text, limit)
                items, text = [*items, *found.items], found.last
            truth.insist_whole("Resume", f"in turn, {kinds[0]} first", [], items)

    for seed in range(6):
        run(partial(work, dice=Random(seed)))


@pytest.mark.parametrize("section", ["of a worker", "after the merge"])
def test_a_wait_for_batches_that_comes_and_goes_at_any_item(section: str) -> None:
    """Batches that a shuffle reads again are cut where they were."""

    def pipe(max_wait_s: float | None) -> Pipe:
        if section == "of a worker":
            pipe = uneven().batch(3, collate=None, max_wait_s=max_wait_s).shuffle(window=2)
            return pipe.merge().shuffle(window=3)
        return uneven().merge().batch(4, collate=None, max_wait_s=max_wait_s).shuffle(window=2)

    insist_any_item(pipe(None), pipe(1e-9), pipe(None))
    insist_any_item(pipe(None), pipe(1e-9), backends=(Copying(2), None))
    insist_any_item(pipe(1e-9), pipe(None), pipe(1e-9))


@pytest.mark.long
def test_fewer_calls_at_once_than_choices_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that came before their turn filled the channel, and the input whose turn it was found no room."""
    monkeypatch.setattr(streamline.transforms.map, "WAITING_ITEMS", 2)
    pipes = [unordered(sl.from_items(range(60)), calls).shuffle(window=20) for calls in (30, 1)]
    insist_any_item(*pipes)


@pytest.mark.long
def test_changes_of_all_kinds_on_other_backends() -> None:
    pipe = best_effort(unordered(uneven()).flat_map(fan)).through(pairs).shuffle(window=3)
    for seed, other in enumerate([Copying(2), sl.Threads(2)]):
        then = changed(pipe, Random(seed))
        insist_any_item(pipe, then, backends=(other, None))


# In the calling thread ----------------------------------------------------------------------------------------------


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("name", mostly_long(STAGES, 7))
def test_debug_goes_on_at_any_item_of_what_chooses(name: str) -> None:
    """One call at a time waited for a result that was to come first, of an input that had no room."""
    pipe = STAGES[name](best_effort(unordered(uneven())))

    async def work(tasks: Tasks) -> Any:
        return await reading(tasks, PipelineSubject(pipe), None)

    whole = run(work)
    truth = ExpectedItems(whole.items, choosing=True)
    for text, k in sampled([*{text: k for k, _, text in whole.states}.items()], 2):
        with pipe.debug(resume=sl.Snapshot.from_json(text)) as stream:
            truth.insist_whole("Resume", f"from {text} by debug", whole.items[:k], list(stream))
