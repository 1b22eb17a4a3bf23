"""Stages that go back to a mark, behind stages that choose an order: nothing is lost or doubled at any resume point.

An earlier design lost 121 to 257 of 300 items here, while each stage alone was exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

import streamline as sl
import streamline.transforms.completion_order
import streamline.transforms.map
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from streamline.testing.laws import atoms
from streamline.testing.scripted import PAUSE, YIELD, Script, scripted
from streamline.testing.subjects import LOOPS, ChainSubject, PipelineSubject, read, run
from tests.laws.profile import GENERATIONS, SEEDS, in_turn, mostly_long
from tests.laws.stages import REWINDING, best_effort, fan, unordered


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize(("name", "seed"), mostly_long(in_turn(REWINDING, SEEDS), 3))
def test_behind_an_unordered_map(name: str, seed: int) -> None:
    check_resume(REWINDING[name](unordered(sl.from_items(range(21)))), seed=seed, generations=GENERATIONS)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("name", "seed"), mostly_long(in_turn(REWINDING, SEEDS), 3))
def test_behind_a_best_effort_merge(name: str, seed: int) -> None:
    check_resume(REWINDING[name](best_effort(_uneven(seed))), seed=seed, generations=GENERATIONS)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_behind_a_best_effort_merge_batches_into_an_unordered_map(seed: int) -> None:
    check_resume(unordered(best_effort(_uneven(seed)).batch(3, collate=None)), seed=seed, generations=GENERATIONS)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "loop"), mostly_long(in_turn(range(max(len(LOOPS), len(SEEDS))), LOOPS), 2))
def test_choices_in_choices(seed: int, loop: str) -> None:
    pipe = unordered(_uneven(seed)).shuffle(window=3).flat_map(fan)
    check_resume(best_effort(pipe).shuffle(window=4), seed=seed, loop=loop, generations=GENERATIONS)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_many_choices_in_a_row_while_segments_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamline.transforms.completion_order, "SEGMENT_ITEMS", 3)
    monkeypatch.setattr(streamline.transforms.map, "AHEAD", 1)
    pipe = unordered(unordered(_uneven(seed)).filter(lambda item: item % 2 == 0), 2)
    check_resume(unordered(best_effort(pipe)).shuffle(window=3), seed=seed, generations=GENERATIONS)


@pytest.mark.parametrize("concurrency", mostly_long([2, 1, 5, 40], 4))
def test_an_unordered_map_of_an_unordered_map_with_any_concurrency(concurrency: int) -> None:
    check_resume(unordered(unordered(sl.from_items(range(19)), 3), concurrency))


def test_what_was_done_before_a_resume_counts_as_passed_once_it_has_arrived() -> None:
    async def same(item: int) -> int:
        return item

    pipe = scripted([0, PAUSE, 1, 2, 3, 4]).map(same, concurrency=2, ordered=False)
    script = pipe.source
    assert isinstance(script, Script)
    subject = ChainSubject(script, pipe.stages)

    async def work(tasks: Tasks) -> None:
        flow = subject.open(tasks, '{"script": 0, "same": {"done": [[1, 3]], "replay": []}}')
        assert await anext(flow) == 0
        text = subject.write(flow.state)
        script.release()
        assert [item async for item in flow] == [3, 4]
        assert [item async for item in subject.open(tasks, text)] == [3, 4]

    run(work)


def test_each_worker_keeps_its_order_behind_a_best_effort_merge() -> None:
    for seed in SEEDS:
        check_resume(best_effort(_uneven(seed)), seed=seed)


COUNTING: dict[str, Callable[[Pipeline[Any]], Pipeline[Any]]] = {
    "take": lambda pipe: pipe.take(11),
    "skip": lambda pipe: pipe.skip(11),
    "full batches": lambda pipe: pipe.batch(4, drop_remainder=True, collate=None),
}


@pytest.mark.parametrize("rest", COUNTING)
def test_what_counts_behind_choices_counts_right_over_all_generations(rest: str) -> None:
    """Which items come is open here; how many, and that none comes twice, is not."""
    pipe = unordered(sl.from_items(range(30)))
    counted: Pipeline[Any] = COUNTING[rest](pipe)
    delivered = _in_generations(counted, Random(5))
    found = Counter(atoms(delivered))
    assert sum(found.values()) == {"take": 11, "skip": 19, "full batches": 28}[rest]
    assert not found - Counter(atoms(list(range(30))))


def _in_generations(pipe: Pipeline[Any], dice: Random) -> list[Any]:
    """Run a pipeline to its end, resumed again and again."""
    subject = PipelineSubject(pipe)

    async def work(tasks: Tasks, text: str | None, limit: int | None) -> tuple[list[Any], str]:
        flow = subject.open(tasks, text)
        found = await read(flow, subject.write, dice, limit)
        await flow.aclose()
        return found.items, found.last

    delivered: list[Any] = []
    text: str | None = None
    for limit in (3, 0, 1, 2, None):
        items, text = run(partial(work, text=text, limit=limit))
        delivered += items
    return delivered


def _uneven(seed: int) -> Pipeline[Any]:
    """Return workers of sizes 5, 3, 0, 9 and 4 that are not equally fast."""
    pipe = scripted(range(5), range(10, 13), [], [YIELD, *range(20, 29)], range(30, 34), schedule=(0, 2, 1, 3, seed))
    assert isinstance(pipe.source, Script)
    return pipe
