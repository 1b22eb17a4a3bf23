"""Stages whose knobs are turned while they run keep the laws, with every item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.core.gate import Gate
from streamline.core.knobs import KnobValues
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.testing.checks import Fragment, check_failure, check_resume, check_stage
from streamline.testing.scripted import scripted
from streamline.testing.subjects import LOOPS, PipelineSubject, opened, run, settle
from tests.laws.profile import FACTOR, GENERATIONS, examples, in_turn, mostly_long
from tests.laws.stages import AGAIN, erratic, erratic_each, plus, stumbles_later
from tests.laws.turning import turned

MOST = 4
"""What knobs are turned to, and what the plans of these tests say: so the bound of a plan holds at any time."""

MAPS: dict[str, Fragment] = {
    "async map": lambda pipe: turned(pipe, MOST).map(erratic, concurrency=MOST),
    "unordered map": lambda pipe: turned(pipe, MOST).map(erratic, concurrency=MOST, ordered=False),
    "threads": lambda pipe: turned(pipe, MOST).map(plus, executor="thread", concurrency=MOST),
    "unordered threads": lambda pipe: turned(pipe, MOST).map(plus, executor="thread", concurrency=MOST, ordered=False),
    "map that is tried again": lambda pipe: turned(pipe, MOST).map(
        stumbles_later, concurrency=MOST, ordered=False, **AGAIN
    ),
    "limited threads": lambda pipe: turned(pipe, MOST).map(
        plus, executor="thread", concurrency=MOST, ordered=False, limit=sl.Limit(2)
    ),
    "batched map": lambda pipe: turned(pipe, MOST).map(erratic_each, batched=3, concurrency=MOST, ordered=False),
    "prefetch": lambda pipe: turned(pipe, MOST).prefetch(MOST),
    "prefetch bytes": lambda pipe: turned(pipe, MOST).prefetch(MOST, bytes=60),
    "several": lambda pipe: (
        turned(turned(pipe, MOST).map(erratic, concurrency=MOST, ordered=False), MOST, seed=1)
        .prefetch(MOST)
        .map(plus, executor="thread", concurrency=MOST)
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "loop"), mostly_long(in_turn(MAPS, LOOPS), 3))
def test_what_is_turned_keeps_the_laws(name: str, loop: str) -> None:
    check_stage(MAPS[name], range(11 if FACTOR > 1 else 7), generations=GENERATIONS, loop=loop)


@pytest.mark.long
@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_turned_far_from_what_is_written_resumes_exactly(backend: Any, ordered: bool) -> None:
    pipe = turned(sl.from_items(range(40 if FACTOR > 1 else 25)).shard(3), 30)
    check_resume(pipe.map(erratic, concurrency=2, ordered=ordered).prefetch(2), backend=backend, generations=2)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("executor", [None, "thread"])
def test_a_failing_call_of_a_map_that_is_turned_is_resumed_behind_its_fix(ordered: bool, executor: Any) -> None:
    error = LookupError("item 1005")

    def of(failure: Exception | None) -> Pipeline[Any]:
        def fails(item: int) -> int:
            if failure is not None and item == 1005:
                raise failure
            return item

        async def waits(item: int) -> int:
            return fails(await erratic(item))

        pipe = turned(scripted([1, 2, 3, 4], [11, 12, 1005, 14, 15, 16], []), MOST)
        if executor is None:
            return pipe.map(waits, concurrency=3, ordered=ordered)
        return pipe.map(fails, concurrency=3, ordered=ordered, executor="thread")

    check_failure(of(error), error, mended=of(None))


@dataclass(frozen=True)
class WithKnobs(PipelineSubject):
    """A pipeline whose knobs a test turns."""

    widths: KnobValues = field(default_factory=KnobValues)
    gates: list[Gate] = field(default_factory=list)

    def open(self, tasks: Tasks, text: str | None) -> Any:
        tasks.session.services.add(KnobValues, self.widths)
        self.gates.append(tasks.gate)
        return super().open(tasks, text)


class Calls:
    """An async function, or a sync one, that counts the calls at work; each begins only where the width lets it."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.running: set[int] = set()
        self.made: list[int] = []
        self.too_many: list[int] = []

    def begin(self, item: int) -> None:
        self.made.append(item)
        self.running.add(item)
        if len(self.running) > self.width:
            self.too_many.append(item)

    async def __call__(self, item: int) -> int:
        self.begin(item)
        await erratic(item)
        self.running.remove(item)
        return item


@given(st.lists(st.integers(1, 9), min_size=1), st.booleans(), st.sampled_from(LOOPS))
@examples(60)
def test_there_are_never_more_calls_than_the_present_width(turns: list[int], ordered: bool, loop: str) -> None:
    calls = Calls(3)
    pipe = sl.from_items(range(60)).map(calls, concurrency=3, ordered=ordered, name="calls")

    async def work(tasks: Tasks) -> list[int]:
        found = []
        async with opened(tasks, subject := WithKnobs(pipe), None) as flow:
            async for item in flow:
                found.append(item)
                calls.width = turns[item % len(turns)]
                subject.widths.set({"calls": calls.width})
        return found

    found = run(work, loop)
    assert calls.too_many == []
    assert (found if ordered else sorted(found)) == list(range(60)) == sorted(calls.made)


class Held:
    """An async function whose calls wait until they are let go."""

    def __init__(self) -> None:
        self.waiting: dict[int, anyio.Event] = {}
        self.begun = 0

    async def __call__(self, item: int) -> int:
        self.begun += 1
        self.waiting[item] = anyio.Event()
        await self.waiting[item].wait()
        del self.waiting[item]
        return item

    def let_go(self, count: int) -> None:
        for item in sorted(self.waiting)[:count]:
            self.waiting[item].set()


def held(work: Callable[[Held, WithKnobs, Tasks], Any], ordered: bool = True) -> None:
    """Do some work with a pipeline whose calls are held."""
    calls = Held()
    subject = WithKnobs(sl.from_items(range(500)).map(calls, concurrency=4, ordered=ordered, name="calls"))
    run(partial(work, calls, subject))


@pytest.mark.parametrize("ordered", [True, False])
def test_more_calls_begin_at_once_and_too_many_end_by_themselves(ordered: bool) -> None:
    async def work(calls: Held, subject: WithKnobs, tasks: Tasks) -> None:
        async with opened(tasks, subject, None) as flow, anyio.create_task_group() as group:
            group.start_soon(flow.pull, 1)
            await settle()
            assert len(calls.waiting) == 4
            subject.widths.set({"calls": 100})
            await settle()
            assert len(calls.waiting) == 100
            subject.widths.set({"calls": 3})
            await settle()
            assert len(calls.waiting) == 100  # none is cut off
            calls.let_go(96)
            await settle()
            assert (len(calls.waiting), calls.begun) == (4, 100)  # and none begins while there are too many
            calls.let_go(2)
            await settle()
            assert (len(calls.waiting), calls.begun) == (3, 101)
            subject.widths.set({"calls": 1})
            subject.widths.set({"calls": 2})  # before any has ended
            calls.let_go(3)
            await settle()
            assert (len(calls.waiting), calls.begun) == (2, 103)
            group.cancel_scope.cancel()

    held(work, ordered)


def test_a_pause_holds_whatever_is_turned_in_it() -> None:
    async def work(calls: Held, subject: WithKnobs, tasks: Tasks) -> None:
        async with opened(tasks, subject, None) as flow, anyio.create_task_group() as group:
            group.start_soon(flow.pull, 1)
            await settle()
            (gate,) = subject.gates
            gate.hold()
            calls.let_go(4)
            await settle()
            gate.insist()
            for width in (9, 2, 30, 6):
                subject.widths.set({"calls": width})
                await settle()
            assert (len(calls.waiting), gate.at_work) == (0, ())
            gate.resume()
            await settle()
            assert len(calls.waiting) == 6
            group.cancel_scope.cancel()

    held(work)


def test_a_buffer_that_has_become_smaller_takes_nothing_before_there_is_room() -> None:
    async def work(tasks: Tasks) -> None:
        subject = WithKnobs(pipe := scripted(list(range(100))).prefetch(16))
        record = pipe.source.record  # type: ignore[attr-defined]
        async with opened(tasks, subject, None) as flow:
            await anext(flow)
            await settle()
            before = record.asked
            subject.widths.set({"prefetch": 2})
            for _ in range(8):
                await anext(flow)
                await settle()
            assert record.asked == before
            subject.widths.set({"prefetch": 40})
            await settle()
            assert record.asked >= before + 20

    run(work)


def test_values_hold_for_what_is_opened_later() -> None:
    async def work(calls: Held, subject: WithKnobs, tasks: Tasks) -> None:
        subject.widths.set({"calls": 7})
        async with opened(tasks, subject, None) as flow, anyio.create_task_group() as group:
            group.start_soon(flow.pull, 1)
            await settle()
            assert len(calls.waiting) == 7
            group.cancel_scope.cancel()

    held(work)


def test_one_call_at_a_time_is_no_knob() -> None:
    pipe = sl.from_items(range(9)).map(erratic, concurrency=1).map(plus, executor="thread")
    assert [stage.knob for stage in pipe.plan.worker] == [None, None]
