"""Batches that leave after a while. Time is virtual: it passes when nothing else can happen."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest

import streamline as sl
from streamline.core.choices import Log
from streamline.core.error_policy import Errors, Policy
from streamline.core.state import Tally
from streamline.core.tasks import Tasks
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume, check_stage
from streamline.testing.laws import ExpectedItems, quiescence_law, resume_law
from streamline.testing.scripted import PAUSE, Abort, Script, scripted
from streamline.testing.subjects import LOOPS, PipelineSubject
from streamline.transforms.batch import Batch
from tests.kit import in_virtual_time

R = TypeVar("R")
WAIT_S = 0.01
"""Small: the kit gives a pull 20 s, virtual ones, and a resume may have to read everything again."""


def run(work: Callable[[Tasks], Awaitable[R]]) -> R:
    """Run `work` in virtual time."""

    async def main() -> R:
        async with anyio.create_task_group() as group:
            tasks = Tasks(group)
            try:
                found = await work(tasks)
            finally:
                tasks.clean_up()
            group.cancel_scope.cancel()
        return found

    return in_virtual_time(main)


def waiting(*shards: list[Any], size: int = 3, **options: Any) -> tuple[Pipeline[Any], Script]:
    """Return batches of what is scripted, and the script."""
    pipe = scripted(*shards).merge().batch(size, collate=None, max_wait_s=WAIT_S, **options)
    assert isinstance(pipe.source, Script)
    return pipe, pipe.source


class Unchanged(PipelineSubject):
    """In virtual time: a map in a thread, say, which a generation may have, would take none of it."""

    def changed(self, dice: Random) -> PipelineSubject:
        return self


async def started(pipe: Pipeline[Any], tasks: Tasks, text: str | None = None) -> Any:
    return PipelineSubject(pipe).open(tasks, text)


# When a batch leaves --------------------------------------------------------------------------------------------------


def test_a_batch_that_is_not_full_leaves_when_its_time_is_over() -> None:
    pipe, script = waiting([0, 1, PAUSE, 2, 3, 4, 5])

    async def work(tasks: Tasks) -> None:
        flow, began = await started(pipe, tasks), anyio.current_time()
        assert await anext(flow) == [0, 1]
        assert anyio.current_time() - began == pytest.approx(WAIT_S)
        script.release()
        assert [batch async for batch in flow] == [[2, 3, 4], [5]]
        assert anyio.current_time() - began == pytest.approx(WAIT_S)  # neither full nor at the end does one wait
        await flow.aclose()

    run(work)


def test_the_clock_starts_with_the_first_item_and_there_is_no_empty_batch() -> None:
    async def rows() -> AsyncIterator[int]:
        for item, waits in enumerate([5.0, 0.6, 0.6, 0.2, 7.0]):
            await anyio.sleep(waits * WAIT_S)
            yield item

    pipe = sl.from_iterable(rows).batch(10, collate=None, max_wait_s=WAIT_S)

    async def work(tasks: Tasks) -> list[tuple[list[int], float]]:
        flow, began = await started(pipe, tasks), anyio.current_time()
        found = [(batch, (anyio.current_time() - began) / WAIT_S) async for batch in flow]
        await flow.aclose()
        return found

    # 0 comes at 5.0 and 1 at 5.6; 2 and 3 come at 6.2 and 6.4; 4 comes at 13.4, and then nothing can come any more.
    batches, times = zip(*run(work), strict=True)
    assert batches == ([0, 1], [2, 3], [4])
    assert times == pytest.approx((6.0, 7.2, 13.4))


def test_drop_remainder_drops_only_the_rest_at_the_end() -> None:
    for drop, expected in ((False, [[0, 1], [2, 3, 4], [5]]), (True, [[0, 1], [2, 3, 4]])):
        pipe, script = waiting([0, 1, PAUSE, 2, 3, 4, 5], drop_remainder=drop)

        async def work(tasks: Tasks, pipe: Pipeline[Any] = pipe, script: Script = script) -> list[Any]:
            flow = await started(pipe, tasks)
            first = await anext(flow)
            script.release()
            rest = [batch async for batch in flow]
            await flow.aclose()
            return [first, *rest]

        assert run(work) == expected


def test_what_is_here_already_is_taken_before_a_late_batch_leaves() -> None:
    """A consumer that is slower than the feed gets full batches, however late."""
    pipe, _ = waiting(list(range(9)))

    async def work(tasks: Tasks) -> list[Any]:
        flow = await started(pipe, tasks)
        found = []
        async for batch in flow:
            found.append(batch)
            await anyio.sleep(10 * WAIT_S)
        await flow.aclose()
        return found

    assert run(work) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_one_worker_that_stalls_does_not_hold_the_batch_of_the_others() -> None:
    pipe = scripted([0, PAUSE, 2], [10, 11, 12]).merge("best_effort", max_lead=9)
    waits = pipe.batch(8, collate=None, max_wait_s=WAIT_S)

    async def work(tasks: Tasks) -> list[int]:
        flow = await started(waits, tasks)
        first = await anext(flow)
        await flow.aclose()
        return sorted(first)

    assert run(work) == [0, 10, 11, 12]


def test_it_collates_what_it_has() -> None:
    async def rows() -> AsyncIterator[int]:
        yield 1
        yield 2
        await anyio.sleep(5 * WAIT_S)
        yield 3

    async def work(tasks: Tasks) -> list[Any]:
        flow = await started(sl.from_iterable(rows).batch(4, max_wait_s=WAIT_S), tasks)
        found = [batch.tolist() async for batch in flow if isinstance(batch, np.ndarray)]
        await flow.aclose()
        return found

    assert run(work) == [[1, 2], [3]]


def test_a_plain_loop_gets_it_too() -> None:
    pipe, _ = waiting([0, 1, PAUSE, 2])
    with pipe.map(len).open() as stream:
        assert next(stream) == 2


# Failure, leaving ----------------------------------------------------------------------------------------------------


def test_timed_batches_come_before_a_failure_and_the_items_after_them_are_read_again() -> None:
    error = ValueError("the feed broke")
    pipe, script = waiting([0, 1, PAUSE, 2, Abort(error), 3])

    async def work(tasks: Tasks) -> str:
        flow = await started(pipe, tasks)
        assert await anext(flow) == [0, 1]
        script.release()
        for _ in range(2):
            with pytest.raises(ValueError, match="the feed broke") as failed:
                await anext(flow)
            assert failed.value is error
        await flow.aclose()
        return PipelineSubject(pipe).write(flow.state)

    text = run(work)
    mended: Pipeline[Any] = Pipeline(script.mended).merge().batch(3, collate=None, max_wait_s=WAIT_S)

    async def rest(tasks: Tasks) -> list[Any]:
        flow = await started(mended, tasks, text)
        found = [batch async for batch in flow]
        await flow.aclose()
        return found

    assert run(rest) == [[2, 3]]


def test_a_collate_that_fails_on_a_timed_batch_is_the_stages_failure() -> None:
    def strict(items: list[int]) -> list[int]:
        if len(items) < 3:
            raise ValueError(f"only {len(items)}")
        return items

    script = Script(shards=((0, 1, PAUSE, 2),))
    pipe = Pipeline(script).batch(3, collate=strict, max_wait_s=WAIT_S)

    async def work(tasks: Tasks) -> None:
        flow = await started(pipe, tasks)
        with pytest.raises(ValueError, match="only 2") as failed:
            await anext(flow)
        assert failed.value.__notes__[0].startswith("in batch, shard 0 of 1")
        await flow.aclose()

    run(work)


def test_a_cancelled_pull_loses_nothing() -> None:
    pipe, script = waiting([0, 1, PAUSE, 2, 3])

    async def work(tasks: Tasks) -> list[Any]:
        flow = await started(pipe, tasks)
        with anyio.move_on_after(WAIT_S / 2) as scope:
            await anext(flow)
        assert scope.cancelled_caught
        first = await anext(flow)
        script.release()
        rest = [batch async for batch in flow]
        await flow.aclose()
        return [first, *rest]

    assert run(work) == [[0, 1], [2, 3]]


def test_what_was_dropped_after_a_late_batch_is_in_its_state() -> None:
    async def rows() -> AsyncIterator[int]:
        for item in (1, 2, 0):
            yield item
        await anyio.sleep(5 * WAIT_S)

    pipe = sl.from_iterable(rows).map(lambda item: 6 // item, name="inverted").batch(3, collate=None, max_wait_s=WAIT_S)

    async def work(tasks: Tasks) -> None:
        tasks.session = replace(tasks.session, errors=Errors(Policy(on_error="skip", max_errors=None)))
        flow = await started(pipe, tasks)
        assert [batch async for batch in flow] == [[6, 3]]
        tally = Tally()
        flow.state.tally(tally)
        assert tally.skipped == {(0, "inverted"): 1}
        await flow.aclose()

    run(work)


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("loop", LOOPS)
def test_it_keeps_the_laws_when_it_seldom_waits(loop: str) -> None:
    """No time passes between the items of the kit's script: all batches but the last are full."""
    check_stage(lambda pipe: pipe.batch(5, collate=None, max_wait_s=60), range(9), loop=loop, generations=2)


# Choices ------------------------------------------------------------------------------------------------------------


def fan(batch: list[Any]) -> list[Any]:
    return batch[::-1]


@sl.stage(state=dict, snapshot_every=2)
async def pairs(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncGenerator[list[Any], None]:
    async for item in items:
        held = state.setdefault("held", [])
        held.append(item)
        if len(held) == 2:
            state["held"] = []
            yield held[::-1]
    if state.get("held"):
        yield state["held"]


def batched(pipe: Pipeline[Any]) -> Pipeline[Any]:
    return pipe.batch(3, collate=None, max_wait_s=WAIT_S)


DOWNSTREAM: dict[str, Callable[[Pipeline[Any]], Pipeline[Any]]] = {
    "nothing": lambda pipe: pipe,
    "unbatch": lambda pipe: pipe.unbatch(),
    "flat_map": lambda pipe: pipe.flat_map(fan),
    "shuffle": lambda pipe: pipe.shuffle(window=2),
    "custom": lambda pipe: pipe.through(pairs),
    "unordered map": lambda pipe: pipe.map(late, concurrency=3, ordered=False),
    "another": lambda pipe: batched(pipe.flat_map(fan)).flat_map(fan),
    "many": lambda pipe: batched(pipe.flat_map(fan).shuffle(window=3)).shuffle(window=2).through(pairs),
}

_dice = Random(0)


async def late(item: Any) -> Any:
    await anyio.sleep(WAIT_S * _dice.choice([0, 0.3, 2.1]))
    return item


async def gappy() -> AsyncIterator[int]:
    """Never at the same pace twice: each run chooses other batches."""
    for item in range(17):
        await anyio.sleep(WAIT_S * _dice.choice([0, 0, 0.4, 0.9, 3]))
        yield item


@pytest.mark.one_in(5, 4)
@pytest.mark.parametrize("name", DOWNSTREAM)
def test_a_resume_is_exact_after_batches_that_time_has_made(name: str) -> None:
    pipe = DOWNSTREAM[name](batched(sl.from_iterable(gappy)))
    law = partial(resume_law, subject=Unchanged(pipe), generations=5, dice=Random(1))
    run(partial(law, truth=ExpectedItems([*range(17)], choosing=True)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["nothing", "flat_map", "many"])
def test_a_resume_is_exact_after_choices_upon_choices(name: str) -> None:
    pipe = sl.from_iterable(gappy).shard(2).map(late, concurrency=2, ordered=False).merge("best_effort")
    pipe = DOWNSTREAM[name](batched(pipe))
    law = partial(resume_law, subject=Unchanged(pipe), generations=5, dice=Random(2))
    run(partial(law, truth=ExpectedItems([*range(17)], choosing=True)))


def test_states_stand_still_while_time_passes() -> None:
    pipe = DOWNSTREAM["many"](batched(sl.from_iterable(gappy)))
    run(partial(quiescence_law, subject=PipelineSubject(pipe), dice=Random(3)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_wait_that_is_over_at_once_is_exact_too(seed: int) -> None:
    """In real time: a batch leaves whenever nothing is ready, which the script's pace decides."""
    pipe = scripted(range(20), range(20, 31), schedule=(0, 2, 1, 3, seed)).merge("best_effort")
    pipe = pipe.batch(4, collate=None, max_wait_s=1e-9)
    check_resume(DOWNSTREAM["shuffle"](pipe), seed=seed, generations=2)
    check_resume(pipe.flat_map(fan).batch(3, collate=None, max_wait_s=1e-9).flat_map(fan), seed=seed, generations=2)


def test_a_plain_mark_would_lose_items() -> None:
    """What the log of sizes is for: flat_map stands inside a batch that the next run would not make."""
    pipe, _ = waiting([0, 1, PAUSE, 2, 3])
    pipe = pipe.flat_map(fan)
    subject = PipelineSubject(pipe)

    async def first(tasks: Tasks) -> str:
        flow = await started(pipe, tasks)
        assert await anext(flow) == 1  # of [0, 1]
        await flow.aclose()
        return subject.write(flow.state)

    async def rest(tasks: Tasks, text: str) -> list[Any]:
        mended: Pipeline[Any] = (
            Pipeline(scripted(range(4)).source).merge().batch(3, collate=None, max_wait_s=WAIT_S).flat_map(fan)
        )
        flow = await started(mended, tasks, text)
        found = [item async for item in flow]
        await flow.aclose()
        return found

    text = run(first)
    body = json.loads(text)
    assert body["state"]["batch"] == {"replay": [2]}
    assert run(partial(rest, text=text)) == [0, 3, 2]
    body["state"]["batch"]["replay"] = []
    assert run(partial(rest, text=json.dumps(body))) == [1, 0, 3]  # 1 again, 2 never


def test_choices_outlive_resumes_that_have_not_made_them_all() -> None:
    pipe, _ = waiting([0, PAUSE, 1, 2, 3, 4, 5, 6])
    pipe = pipe.shuffle(window=3)
    subject = PipelineSubject(pipe)
    again: Pipeline[Any] = (
        Pipeline(scripted(range(7)).source).merge().batch(3, collate=None, max_wait_s=WAIT_S).shuffle(window=3)
    )

    async def work(tasks: Tasks) -> None:
        flow = await started(pipe, tasks)
        assert isinstance(pipe.source, Script)
        async with anyio.create_task_group() as group:
            group.start_soon(_release_later, pipe.source)
            found = [await anext(flow)]
        await flow.aclose()
        text = subject.write(flow.state)
        assert json.loads(text)["state"]["batch"] == {"replay": [1, 3, 3]}
        for _ in range(2):
            flow = await started(again, tasks, text)
            assert json.loads(PipelineSubject(again).write(flow.state))["state"]["batch"] == {"replay": [1, 3, 3]}
            found.append(await anext(flow))
            text = PipelineSubject(again).write(flow.state)
            await flow.aclose()
        assert sorted(map(tuple, found)) == [(0,), (1, 2, 3), (4, 5, 6)]

    run(work)


async def _release_later(script: Script) -> None:
    await anyio.sleep(5 * WAIT_S)
    script.release()


def test_fewer_items_than_were_chosen_is_an_error() -> None:
    pipe, _ = waiting([0, 1, PAUSE, 2])
    pipe = pipe.flat_map(fan)

    async def first(tasks: Tasks) -> str:
        flow = await started(pipe, tasks)
        await anext(flow)
        await flow.aclose()
        return PipelineSubject(pipe).write(flow.state)

    text = run(first)
    shorter = scripted([0]).merge().batch(3, collate=None, max_wait_s=WAIT_S).flat_map(fan)

    async def rest(tasks: Tasks) -> None:
        flow = await started(shorter, tasks, text)
        with pytest.raises(ResumeError, match="batch: fewer items came than when the snapshot was taken"):
            await anext(flow)
        await flow.aclose()

    run(rest)


# The plan -----------------------------------------------------------------------------------------------------------


def test_it_may_change_between_two_runs() -> None:
    """As concurrency may: which items come is the same. Sizes that are to be repeated are, also without a wait."""
    pipe, _ = waiting([0, 1, PAUSE, 2, 3])
    plain = scripted(range(5)).merge().batch(3, collate=None).flat_map(fan)

    async def first(tasks: Tasks) -> str:
        flow = await started(pipe.flat_map(fan), tasks)
        assert await anext(flow) == 1
        await flow.aclose()
        return PipelineSubject(pipe.flat_map(fan)).write(flow.state)

    text = run(first)

    async def rest(tasks: Tasks) -> list[Any]:
        flow = await started(plain, tasks, text)
        assert json.loads(PipelineSubject(plain).write(flow.state))["state"]["batch"] == {"replay": [2]}
        found = [item async for item in flow]
        await flow.aclose()
        return found

    assert run(rest) == [0, 4, 3, 2]


def test_a_short_last_batch_is_as_short_when_it_is_made_again() -> None:
    pipe = sl.from_items(range(10)).batch(3, collate=None).shuffle(window=4, seed=1)
    with pipe.open() as stream:
        found = [next(stream)]
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot) as stream:
        found += stream
    assert sorted(found) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_only_with_a_wait_does_it_choose() -> None:
    numbers = sl.from_items(range(3))
    plain, waits = numbers.batch(2, collate=None).stages[0], numbers.batch(2, collate=None, max_wait_s=1).stages[0]
    assert (plain.chooses, waits.chooses) == (False, True)
    assert plain.options == waits.options
    assert (plain.kind, waits.kind) == ("batch", "batch")
    assert "max_wait_s=1" in repr(numbers.batch(2, max_wait_s=1))
    assert "max_wait_s" not in repr(numbers.batch(2))


def test_what_numbers_its_inputs_is_refused_after_it() -> None:
    with pytest.raises(PlanError, match=r"\.map\(seed=\)"):
        sl.from_items(range(3)).batch(2, max_wait_s=1).map(lambda batch, rng: batch, seed=0)
    with pytest.raises(PlanError, match=r"\.repeat goes through what batch has chosen"):
        sl.from_items(range(3)).batch(2, max_wait_s=1).repeat(2).unbatch()


def test_what_it_holds_is_counted() -> None:
    plain, waits = sl.from_items(range(3)).batch(8), sl.from_items(range(3)).batch(8, max_wait_s=1)
    assert waits.max_in_flight == plain.max_in_flight + 8  # the channel before it


def test_it_reads_a_channel_that_is_there_already() -> None:
    async def work(tasks: Tasks, pipe: Pipeline[Any]) -> list[str]:
        flow = await started(pipe, tasks)
        await anext(flow)
        names = [task.name or "" for task in anyio.get_running_tasks()]
        await flow.aclose()
        return [name for name in names if "input of batch" in name]

    endless = sl.from_items(range(3)).repeat()
    assert run(partial(work, pipe=endless.batch(2, collate=None, max_wait_s=1))) != []
    assert run(partial(work, pipe=endless.prefetch(4).batch(2, collate=None, max_wait_s=1))) == []


@pytest.mark.parametrize("value", [0, -1, 0.0, math.inf, math.nan])
def test_a_wait_is_a_time(value: float) -> None:
    with pytest.raises(PlanError, match=r"\.batch\(max_wait_s=\) is a finite number of seconds, more than 0, got"):
        sl.from_items(range(3)).batch(2, max_wait_s=value)


@pytest.mark.parametrize("value", [True, "1", [1]])
def test_a_wait_is_a_number(value: Any) -> None:
    with pytest.raises(PlanTypeError, match=r"\.batch\(max_wait_s=\) is a number of seconds, got"):
        sl.from_items(range(3)).batch(2, max_wait_s=value)


def test_any_number_of_seconds_will_do() -> None:
    stage = sl.from_items(range(3)).batch(2, max_wait_s=2).stages[0]
    assert isinstance(stage, Batch)
    assert stage.max_wait_s == 2


@pytest.mark.long
def test_choices_that_are_no_longer_needed_are_released() -> None:
    with sl.from_items(range(3000)).merge().batch(2, collate=None, max_wait_s=60).open() as stream:
        for _ in range(1200):
            next(stream)
        gc.collect()
        assert sum(isinstance(found, Log) for found in gc.get_objects()) < 600  # of the batches that are ahead
