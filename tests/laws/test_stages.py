"""Every stage keeps the laws, on every event loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import streamline as sl
import streamline.transforms.completion_order
import streamline.transforms.map
from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.state import Picked
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_failure, check_stage
from streamline.testing.scripted import PAUSE, Script, scripted
from streamline.testing.subjects import LOOPS, PipelineSubject, run, settle
from streamline.transforms.base import Stage
from tests.laws.profile import FACTOR, GENERATIONS, in_turn, mostly_long
from tests.laws.stages import ORDERED, STAGES, THREADS, erratic

ITEMS = range(17 if FACTOR > 1 else 6)
"""What a stage is checked over: each pair of places is looked at."""


VARIANTS = {
    "map that is tried again", "limited map", "maps that share a limit", "map of one at a time",
    "unordered batched map", "batched map behind a filter", "unordered map behind a filter", "filter that drops all",
    "flat_map to nothing", "shuffle of one window", "regenerate one cycle", "buckets that never fill", "one group",
    "batch by a cost of nothing", "pack of one block", "take nothing", "skip all", "windows by twos", "windows apart",
    "window of more than there is", "pack without the rest", "regenerate rows", "repeat of a part of a cache",
    "repeat of a cache of nothing", "repeat of a part of a cache on disk", "repeat of a cache on disk of nothing",
}  # fmt: skip
"""Stages of which there is another row."""


def rows(table: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, loop, marks=pytest.mark.long) if name in VARIANTS else (name, loop)
        for name, loop in in_turn(table, LOOPS)
    ]


@pytest.mark.parametrize(("name", "loop"), rows(STAGES))
def test_a_stage_keeps_the_laws(name: str, loop: str) -> None:
    check_stage(STAGES[name], ITEMS, behind_choices=name != "repeat", generations=GENERATIONS, loop=loop)


@pytest.mark.parametrize(("name", "loop"), rows(ORDERED))
def test_a_stage_that_depends_on_order_keeps_the_laws(name: str, loop: str) -> None:
    check_stage(ORDERED[name], ITEMS, behind_choices=False, generations=GENERATIONS, loop=loop)


@pytest.mark.long
@pytest.mark.parametrize(("name", "loop"), mostly_long(in_turn(THREADS, LOOPS), 2))
def test_threads_keep_the_laws(name: str, loop: str) -> None:
    check_stage(THREADS[name], range(9), generations=GENERATIONS, loop=loop)


@pytest.mark.long
@pytest.mark.parametrize(("name", "items"), in_turn(STAGES, [[], [7]]))
def test_a_stage_keeps_the_laws_over_few_items(name: str, items: list[int]) -> None:
    check_stage(STAGES[name], items, behind_choices=name != "repeat", generations=2)


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_long(["shuffle", "flat_map", "unordered map", "stateful", "filter"], 5))
def test_a_stage_keeps_the_laws_while_segments_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamline.transforms.completion_order, "SEGMENT_ITEMS", 3)
    monkeypatch.setattr(streamline.transforms.map, "AHEAD", 2)
    check_stage(
        lambda pipe: STAGES[name](pipe.map(erratic, concurrency=3, ordered=False)),
        range(17 if FACTOR > 1 else 11),
        generations=GENERATIONS,
    )


def test_a_stage_that_declares_nothing_keeps_the_laws_from_its_start() -> None:
    async def undeclared(items: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        total = 0
        async for item in items:
            total += item
            yield total

    with warnings.catch_warnings(action="ignore"):
        check_stage(lambda pipe: pipe.through(undeclared), range(9), behind_choices=False)


@dataclass(frozen=True, kw_only=True)
class Generous(Stage[int, int]):
    """Gives all that it gets, whatever it is asked for, but every third item: which is progress behind the others."""

    async def lists(self, run: StageRun[int]) -> Lists[int]:
        while (chunk := await run.upstream.pull()) is not None:
            kept = [index for index, item in enumerate(chunk.items) if item % 3]
            yield Chunk([chunk.items[index] for index in kept], Picked(chunk.states, kept), chunk.end)


def test_a_list_that_is_longer_than_was_asked_for_is_handed_out_in_parts() -> None:
    check_stage(Generous(name="generous"), range(13))


def test_a_slow_map_hands_on_what_it_has() -> None:
    def slow(item: int) -> int:
        time.sleep(0.0006)
        return item

    check_stage(lambda pipe: replace(pipe, stages=(Generous(name="generous"),)).map(slow), range(7), laws=["resume"])


FAILING = ["map", "threads", "unordered threads", "async", "unordered", "flat_map", "filter", "through"]


@pytest.mark.parametrize(("name", "loop"), mostly_long(in_turn(FAILING, LOOPS), 3))
def test_a_failing_function_is_resumed_behind_its_fix(name: str, loop: str) -> None:
    error = LookupError("item 1005")
    check_failure(_failing(name, error), error, mended=_failing(name, None), loop=loop)


def _failing(name: str, error: BaseException | None) -> Pipeline[Any]:
    """Return a pipeline that fails at one item; or the same one, mended."""

    def fails(item: int) -> int:
        if error is not None and item == 1005:
            raise error
        return item

    async def waits(item: int) -> int:
        await erratic(item)
        return fails(item)

    @sl.stage(stateless=True)
    async def passes(items: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        async for item in items:
            yield fails(item)

    pipe: Pipeline[Any] = scripted([1, 2, 3, 4], [11, 12, 1005, 14, 15, 16], [], [21, 22, 23]).map(plus_nothing)
    kinds: dict[str, Callable[[], Pipeline[Any]]] = {
        "map": lambda: pipe.map(fails),
        "threads": lambda: pipe.map(fails, executor="thread"),
        "unordered threads": lambda: pipe.map(fails, executor="thread", concurrency=2, ordered=False),
        "async": lambda: pipe.map(waits, concurrency=3),
        "unordered": lambda: pipe.map(waits, concurrency=3, ordered=False),
        "flat_map": lambda: pipe.flat_map(lambda item: [fails(item), item]),
        "filter": lambda: pipe.filter(fails),
        "through": lambda: pipe.through(passes),
    }
    return kinds[name]()


def plus_nothing(item: int) -> int:
    return item


def test_a_paused_source_waits_until_it_is_released() -> None:
    pipe = scripted([0, 1, PAUSE, 2])
    script = pipe.source
    assert isinstance(script, Script)

    async def work(tasks: Any) -> list[int]:
        flow = PipelineSubject(pipe).open(tasks, None)
        found = [await anext(flow), await anext(flow)]
        await settle()
        assert script.record.asked == 2
        script.release()
        return [*found, *[item async for item in flow]]

    assert run(work) == [0, 1, 2]
