"""What is skipped and what never is, how much of it a run bears, who decides, and what is said at the end."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from traceback import TracebackException
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core.error_policy import Errors, Failure, Policy
from streamline.core.state import At, Reference, Skipped
from streamline.errors import ClosedError, PlanError, PlanTypeError, StageError, TooManyErrors
from streamline.snapshot.inspection import report
from tests.kit import in_thread

Pipe = sl.Pipeline[Any]

UNLIMITED: dict[str, Any] = {"on_error": "skip", "max_errors": None}


def odd_fails(item: int) -> int:
    if item % 2:
        raise ValueError(f"bad {item}")
    return item


def raising(error: BaseException) -> Callable[[int], int]:
    """Return a function that raises `error` on item 3."""

    def fn(item: int) -> int:
        if item == 3:
            raise error
        return item

    return fn


def test_what_a_stage_skips_again_in_a_later_pass_is_counted_once() -> None:
    def failure(message: str) -> sl.Failure:
        error = ValueError(message)
        trace = TracebackException.from_exception(error)
        return sl.Failure(stage="check", kind="map", shard=0, position="", item=1, error=error, trace=trace)

    errors = Errors(Policy(on_error="skip", max_errors=None))
    for message in ("read ahead, and never consumed", "of the next pass"):
        errors.record_skip((0, "check"), failure(message), (0,), 1)
    errors.settle(Skipped("check", 0, 1, At("items", 2)))
    assert [str(one.error) for one in errors.report().last] == ["of the next pass"]


# What is skipped ------------------------------------------------------------------------------------------------------


def test_without_an_option_errors_are_raised_and_states_say_nothing_of_them() -> None:
    pipe = sl.from_items(range(5)).map(odd_fails)
    with pipe.open() as stream:
        assert next(stream) == 0
        assert stream.snapshot().state["merge"]["workers"] == {"0": {"items": 1}}
        with pytest.raises(ValueError, match="bad 1"):
            next(stream)
        assert stream.errors == sl.ErrorReport()
    with sl.from_items(range(5)).map(abs).open(**UNLIMITED) as stream:
        assert list(stream) == [0, 1, 2, 3, 4]
        assert stream.snapshot().state["merge"]["workers"] == {"0": {"items": 5}}


def test_the_count_stands_in_the_state_from_the_first_skipped_item_on() -> None:
    pipe = sl.from_items(range(5)).map(odd_fails).merge().map(raising(KeyError("x")), name="after")
    with pipe.open(**UNLIMITED) as stream:
        found = [(item, stream.snapshot().state["merge"]["workers"]["0"].get("errors")) for item in stream]
        assert found == [(0, None), (2, {"odd_fails": 1}), (4, {"odd_fails": 2})]
    with sl.from_items(range(5)).merge().map(odd_fails).open(**UNLIMITED) as stream:
        assert list(stream) == [0, 2, 4]
        assert stream.snapshot().state["errors"] == {"odd_fails": 2}


@pytest.mark.parametrize("error", [StopIteration(3), StopAsyncIteration(), RuntimeError("x"), MemoryError()])
def test_every_exception_of_user_code_is_skipped(error: BaseException) -> None:
    with sl.from_items(range(5)).map(raising(error)).open(**UNLIMITED) as stream:
        assert list(stream) == [0, 1, 2, 4]
        (failure,) = stream.errors.last
    assert (failure.stage, failure.kind, failure.shard, failure.item, failure.items) == ("fn", "map", 0, 3, 1)
    assert failure.position == "index 3 of items"
    if isinstance(error, StopIteration | StopAsyncIteration):
        assert isinstance(failure.error, StageError)
        assert failure.error.__cause__ is error
    else:
        assert failure.error is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), GeneratorExit()])
@pytest.mark.parametrize("threads", [False, True])
def test_what_is_no_exception_of_an_item_is_never_skipped(error: BaseException, threads: bool) -> None:
    options: Any = {"executor": "thread"} if threads else {}
    pipe = sl.from_items(range(5)).map(raising(error), **options)
    expected = StageError if isinstance(error, GeneratorExit) else type(error)
    seen: list[int] = []

    def consume() -> None:
        with pipe.open(**UNLIMITED) as stream, pytest.raises(expected):
            seen.extend(iter(stream.__next__, None))

    in_thread(consume)
    assert seen == [0, 1, 2]


def test_a_cancellation_is_not_skipped() -> None:
    """A stream that is left while functions run must not take their cancellation for errors."""
    started = 0

    async def waits(item: int) -> int:
        nonlocal started
        started += 1
        await anyio.sleep_forever()
        return item

    async def main() -> None:
        async with sl.from_items(range(9)).map(waits, concurrency=3).open(**UNLIMITED) as stream:
            with anyio.move_on_after(0.01):
                await anext(stream)
            await anyio.wait_all_tasks_blocked()
        assert stream.errors.total == 0
        with pytest.raises(ClosedError):
            await anext(stream)

    anyio.run(main)
    assert started == 3


@sl.stage(stateless=True)
async def custom(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield odd_fails(item)


def test_a_custom_stage_or_an_iterable_that_fails_is_dead_and_always_raises() -> None:
    def iterable() -> Iterator[int]:
        yield from map(odd_fails, range(3))

    for pipe in (sl.from_items(range(3)).through(custom), sl.from_iterable(iterable)):
        with pipe.open(**UNLIMITED) as stream, pytest.raises(ValueError, match="bad 1"):
            list(stream)


def test_a_function_that_should_have_been_async_is_a_mistake_in_the_plan() -> None:
    async def later(item: int) -> int:
        return item

    pipe = sl.from_items(range(3)).map(lambda item: later(item))
    with pipe.open(**UNLIMITED) as stream, pytest.raises(PlanTypeError, match="returned a coroutine"):
        next(stream)


def test_of_an_input_that_fails_while_it_is_unfolded_what_came_before_stays() -> None:
    def unfold(item: int) -> Iterator[str]:
        yield f"{item}a"
        odd_fails(item)
        yield f"{item}b"

    pipe = sl.from_items(range(4)).flat_map(unfold)
    whole = ["0a", "0b", "1a", "2a", "2b", "3a"]
    for k in range(len(whole) + 1):
        with pipe.open(**UNLIMITED) as stream:
            before = list(islice(stream, k))
            snapshot = stream.snapshot()
        with pipe.open(resume=snapshot, **UNLIMITED) as stream:
            assert before + list(stream) == whole
            assert stream.errors.stages == {"unfold": 2}


def test_what_isnt_an_iterable_is_skipped_like_any_other_failure() -> None:
    pipe = sl.from_items(range(3)).flat_map(lambda item: None if item == 1 else [item])  # type: ignore[arg-type,return-value]
    with pipe.open(**UNLIMITED) as stream:
        assert list(stream) == [0, 2]
        assert "expected an iterable" in str(stream.errors.last[0].error)


def test_a_batch_that_cant_be_collated_counts_as_its_items() -> None:
    def collate(items: list[int]) -> list[int]:
        if 4 in items or 9 in items:
            raise ValueError("ragged")
        return items

    with sl.from_items(range(10)).batch(4, collate=collate).open(**UNLIMITED) as stream:
        assert list(stream) == [[0, 1, 2, 3]]
        assert stream.errors.total == 6
        assert [(failure.items, failure.item) for failure in stream.errors.last] == [(4, [4, 5, 6, 7]), (2, [8, 9])]


def test_the_rest_that_a_batch_drops_doesnt_hide_errors() -> None:
    with sl.from_items(range(8)).map(odd_fails).batch(3, drop_remainder=True).open(**UNLIMITED) as stream:
        assert len(list(stream)) == 1
        assert stream.errors.total == 4


def test_counts_go_on_through_the_passes_of_a_repeat_and_through_resumes() -> None:
    for pipe in (
        sl.from_items(range(4)).shard(2, mode="contiguous").map(odd_fails).repeat(3).merge(),
        sl.from_items(range(4)).shard(2, mode="contiguous").map(odd_fails).merge().repeat(3),
        sl.from_items(range(4)).map(odd_fails).repeat(3).repeat(1, name="outer"),
    ):
        for k in range(7):
            with pipe.open(**UNLIMITED) as stream:
                before = list(islice(stream, k))
                snapshot = stream.snapshot()
            with pipe.open(resume=snapshot, **UNLIMITED) as stream:
                assert sorted(before + list(stream)) == [0, 0, 0, 2, 2, 2]
                assert stream.errors.total == 6


def test_an_endless_repeat_of_what_fails_altogether_ends() -> None:
    with sl.from_items([1, 3]).map(odd_fails).repeat().open(**UNLIMITED) as stream:
        assert list(stream) == []
        assert stream.errors.total == 2


def test_skipping_is_kept_over_a_resume_that_raises() -> None:
    pipe = sl.from_items(range(6)).map(odd_fails)
    with pipe.open(**UNLIMITED) as stream:
        assert list(islice(stream, 2)) == [0, 2]
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot) as stream:
        assert stream.errors.stages == {"odd_fails": 1}
        assert stream.snapshot().state == snapshot.state
        with pytest.raises(ValueError, match="bad 3"):
            next(stream)


# How much a run bears -------------------------------------------------------------------------------------------------


def consume(pipe: Pipe, **options: Any) -> tuple[list[Any], BaseException | None]:
    """Return what a stream delivers, and what it fails with."""
    items: list[Any] = []
    with pipe.open(on_error="skip", **options) as stream:
        try:
            items.extend(stream)
        except Exception as error:
            return items, error
    return items, None


def test_more_than_max_errors_fail_the_run_with_the_last_error_as_the_cause() -> None:
    _, error = consume(sl.from_items(range(100)).shard(2, mode="contiguous").map(odd_fails), max_errors=4)
    assert isinstance(error, TooManyErrors)
    assert "odd_fails" in str(error)
    assert "max_errors=4" in str(error)
    assert isinstance(error.__cause__, ValueError)
    notes = "\n".join(error.__cause__.__notes__)
    assert "in map(odd_fails), shard" in notes
    assert "odd_fails\n    raise ValueError" in notes
    assert consume(sl.from_items(range(8)).map(odd_fails), max_errors=4) == ([0, 2, 4, 6], None)


def test_the_last_items_of_a_stream_are_judged_too() -> None:
    for pipe in (
        sl.from_items(range(8)).map(odd_fails),
        sl.from_items(range(8)).map(odd_fails).shuffle(window=3),
        sl.from_items(range(8)).map(odd_fails).through(custom),
        sl.from_items(range(8)).map(odd_fails).merge().batch(3),
        sl.from_items(range(8)).map(odd_fails).take(9),
        sl.from_items([1, 3, 5, 7]).map(odd_fails).shuffle(window=5),
    ):
        items, error = consume(pipe, max_errors=3)
        assert isinstance(error, TooManyErrors), pipe
        assert len(items) <= 4


def test_too_many_is_raised_for_ever_and_the_snapshot_resumes_with_a_larger_limit() -> None:
    pipe = sl.from_items(range(20)).map(odd_fails)
    with pipe.open(on_error="skip", max_errors=2) as stream:
        with pytest.raises(TooManyErrors):
            list(iter(stream.__next__, None))
        with pytest.raises(TooManyErrors):
            next(stream)
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot, on_error="skip", max_errors=2) as stream, pytest.raises(TooManyErrors):
        list(stream)
    with pipe.open(resume=snapshot, on_error="skip", max_errors=10) as stream:
        assert snapshot.produced == [10 - len(list(stream))]
        assert stream.errors.total == 10


@pytest.mark.parametrize("length", [11, 1000])
def test_a_pipeline_that_fails_on_everything_is_stopped_by_default(length: int) -> None:
    items, error = consume(sl.from_items([1] * length).map(odd_fails))
    assert items == []
    assert isinstance(error, TooManyErrors)


def one_in(count: int) -> Callable[[int], int]:
    def fn(item: int) -> int:
        return 1 // (item % count)

    return fn


def test_a_rate_bears_ten_errors_in_any_case_and_is_of_all_items_then() -> None:
    assert consume(sl.from_items([1] * 10).map(odd_fails), max_errors=0.001)[1] is None
    assert isinstance(consume(sl.from_items([1] * 11).map(odd_fails), max_errors=0.01)[1], TooManyErrors)
    assert consume(sl.from_items([1] * 500).map(odd_fails), max_errors=0.5)[1] is None  # of the first thousand
    assert isinstance(consume(sl.from_items([1] * 501).map(odd_fails), max_errors=0.5)[1], TooManyErrors)
    assert consume(sl.from_items(range(1, 3000)).map(one_in(120)))[1] is None
    assert isinstance(consume(sl.from_items(range(1, 3000)).map(one_in(60)))[1], TooManyErrors)
    batches = sl.from_items(range(1, 3000)).map(one_in(120)).batch(50)  # a rate of items, not of batches
    assert consume(batches)[1] is None
    assert consume(batches.unbatch())[1] is None


def test_a_window_that_is_held_is_not_taken_for_a_high_rate() -> None:
    """2,000 items are read before the first is delivered, with more errors than a rate of one item would bear."""
    pipe = sl.from_items(range(1, 8001)).shard(4).map(one_in(120)).shuffle(window=2000).merge()
    assert consume(pipe)[1] is None
    assert isinstance(consume(pipe, max_errors=0.005)[1], TooManyErrors)


def test_a_rate_is_of_all_passes_behind_a_merge_that_is_repeated() -> None:
    pipe = sl.from_items(range(1, 1501)).map(one_in(120)).merge().repeat(2)
    with pipe.open(on_error="skip") as stream:
        list(islice(stream, 1500))
        snapshot = stream.snapshot()
    with pipe.open(on_error="skip", resume=snapshot) as stream:
        assert len(list(stream)) == 1476
        assert stream.errors.total == 24


def test_a_count_of_none_is_allowed() -> None:
    _, error = consume(sl.from_items(range(4)).map(odd_fails), max_errors=0)
    assert isinstance(error, TooManyErrors)


# Who decides ----------------------------------------------------------------------------------------------------------


def test_a_handler_decides_item_by_item() -> None:
    asked: list[sl.Failure] = []

    def handler(failure: sl.Failure) -> Any:
        asked.append(failure)
        return "raise" if failure.item == 5 else "skip"

    pipe = sl.from_items(range(9)).shard(1).map(odd_fails, name="check")
    with pipe.open(on_error=handler, max_errors=None) as stream:
        with pytest.raises(ValueError, match="bad 5") as caught:
            list(stream)
        assert stream.errors.total == 2
    assert [failure.item for failure in asked] == [1, 3, 5]
    assert caught.value.__notes__[0].startswith("in map(check), shard 0 of 1")
    assert "in odd_fails" in asked[0].traceback
    assert "transforms" not in asked[0].traceback


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_handler_that_answers_nonsense_or_fails_is_the_failure_of_the_stream(concurrent: bool) -> None:
    async def later(item: int) -> int:
        return odd_fails(item)

    source = sl.from_items(range(9))
    pipe: Pipe = source.map(later, concurrency=2) if concurrent else source.map(odd_fails)
    says: Any = lambda failure: None  # noqa: E731
    with pipe.open(on_error=says) as stream, pytest.raises(PlanTypeError, match="'raise', got None") as wrong:
        list(stream)
    assert str(wrong.value.__cause__).startswith("bad")

    def broken(failure: sl.Failure) -> Any:
        raise LookupError("broken handler")

    with pipe.open(on_error=broken) as stream, pytest.raises(LookupError) as caught:
        list(stream)
    assert "in the on_error handler" in caught.value.__notes__[0]
    assert str(caught.value.__cause__).startswith("bad")

    def ends(failure: sl.Failure) -> Any:
        raise StopIteration

    with pipe.open(on_error=ends) as stream, pytest.raises(StageError, match="on_error handler raised StopIteration"):
        list(stream)


# Options --------------------------------------------------------------------------------------------------------------


async def async_handler(failure: sl.Failure) -> str:
    return "skip"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "'raise', 'skip' or a function of a Failure, got 'ignore'"),
        ({"on_error": None}, "got NoneType None"),
        ({"on_error": async_handler}, "takes a sync function"),
        ({"on_error": "skip", "max_errors": -1}, "at least 0"),
        ({"on_error": "skip", "max_errors": 1.0}, "between 0 and 1, got 1.0"),
        ({"on_error": "skip", "max_errors": 0.0}, "between 0 and 1"),
        ({"on_error": "skip", "max_errors": float("nan")}, "between 0 and 1"),
        ({"on_error": "skip", "max_errors": True}, "(a rate) or None, got bool"),
        ({"on_error": "skip", "max_errors": "1%"}, "(a rate) or None, got str"),
        ({"max_errors": 3}, 'add on_error="skip"'),
        ({"max_errors": None}, 'add on_error="skip"'),
        ({"dead_letters": "bad.jsonl"}, 'add on_error="skip"'),
        ({"on_error": "skip", "dead_letters": ""}, "a path that isn't empty"),
        ({"on_error": "skip", "dead_letters": 3}, "a path that isn't empty, got 3"),
    ],
)
def test_options_that_make_no_sense_are_refused_where_the_pipeline_is_opened(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match="open") as caught:
        sl.from_items(range(3)).open(**options)
    assert message in str(caught.value)


def test_errors_is_a_name_that_the_states_need() -> None:
    with pytest.raises(PlanError, match="'errors' is a name that the pipeline uses itself"):
        sl.from_items(range(3)).map(abs, name="errors")

    def errors(item: int) -> int:
        return item

    assert [stage.name for stage in sl.from_items(range(3)).map(errors).stages] == ["errors_2"]


# What is said ---------------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_end_of_a_run_says_once_what_was_skipped(caplog: pytest.LogCaptureFixture) -> None:
    pipe = sl.from_items(range(8)).map(odd_fails).filter(lambda item: True).merge()
    with pipe.open(**UNLIMITED) as stream:
        list(stream)
        stream.close()
    assert warnings_of(caplog) == ["4 items were skipped: odd_fails 4"]
    caplog.clear()
    with pipe.open(**UNLIMITED) as stream:
        assert [next(stream), next(stream)] == [0, 2]
    assert warnings_of(caplog) == ["1 item was skipped: odd_fails 1"]
    caplog.clear()
    with sl.from_items(range(8)).open(**UNLIMITED) as stream:
        list(stream)
    assert warnings_of(caplog) == []


def test_an_async_stream_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with sl.from_items(range(8)).map(odd_fails).open(**UNLIMITED) as stream:
            assert stream.errors.total == 0
            assert [item async for item in stream] == [0, 2, 4, 6]
            assert stream.errors.stages == {"odd_fails": 4}
            assert stream.snapshot().state["merge"]["workers"]["0"]["errors"] == {"odd_fails": 4}
        async with sl.from_items(range(8)).map(odd_fails).open(on_error="skip", max_errors=2) as stream:
            with pytest.raises(TooManyErrors):
                async for _ in stream:
                    pass
            with pytest.raises(TooManyErrors):
                await anext(stream)

    anyio.run(main)
    said, broke = warnings_of(caplog)
    assert said == "4 items were skipped: odd_fails 4"
    assert re.fullmatch(r"[34] items were skipped: odd_fails [34]", broke)  # of the list in which there were too many


def test_a_stream_that_is_dropped_says_what_was_counted(caplog: pytest.LogCaptureFixture) -> None:
    stream = sl.from_items([1] * 600 + [0] * 600).map(odd_fails).open(**UNLIMITED).sync_stream()
    assert next(stream) == 0
    assert next(stream) == 0
    del stream
    (said,) = warnings_of(caplog)
    # Two lists; the third was begun, and is counted behind, or came together with the first good item.
    assert said.endswith(("items were skipped: odd_fails 512", "items were skipped: odd_fails 600"))


def test_reports_are_frozen_and_count_what_was_consumed_only() -> None:
    with sl.from_items(range(100)).map(odd_fails).open(**UNLIMITED) as stream:
        for done in range(0, 98, 2):
            assert next(stream) == done
            assert stream.errors.total == done // 2
        report = stream.errors
    with pytest.raises(AttributeError):
        report.total = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        report.stages["odd_fails"] = 0  # type: ignore[index]
    assert [failure.item for failure in report.last] == [87, 89, 91, 93, 95]


def test_an_inspected_snapshot_shows_what_was_skipped() -> None:
    pipe = sl.from_items(range(8)).map(odd_fails).merge().map(raising(KeyError("x")), name="after")
    with pipe.open(**UNLIMITED) as stream:
        list(stream)
        shown = report(stream.snapshot())
    assert "errors: odd_fails 4" in shown


def test_meters_count_what_stages_skip() -> None:
    stream = sl.from_items(range(8)).shard(2, mode="contiguous").map(odd_fails).open(**UNLIMITED).sync_stream()
    list(stream)
    meters = stream._session.meters.stages
    assert [meters["odd_fails", shard].figures.errors for shard in (0, 1)] == [2, 2]


def test_skipped_errors_hold_on_to_no_frames() -> None:
    with sl.from_items(range(9)).map(odd_fails).open(**UNLIMITED) as stream:
        list(stream)
        assert [failure.error.__traceback__ for failure in stream.errors.last] == [None] * 4
    assert sys.exc_info() == (None, None, None)


def test_a_stage_that_skips_admits_no_more_than_it_may() -> None:
    """Behind one slow call, others that fail at once must not let the source run away."""
    asked = 0

    async def first_waits(item: int) -> int:
        nonlocal asked
        asked = max(asked, item)
        if item == 0:
            await released.wait()
        return odd_fails(2 * item + 1)

    released = anyio.Event()

    async def main() -> None:
        nonlocal released
        released = anyio.Event()
        pipe = sl.from_items(range(10_000)).map(first_waits, concurrency=4)
        async with pipe.open(**UNLIMITED) as stream, anyio.create_task_group() as group:
            group.start_soon(lambda: anext(stream, None))
            await anyio.wait_all_tasks_blocked()
            assert asked < 400
            released.set()
        assert stream.errors.total == 10_000

    anyio.run(main)


class Kept:
    """Dead letters that a test reads."""

    path = Path("bad.jsonl")

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def letter_of(self, failure: Failure, epoch: tuple[int, ...], /) -> Any:
        return {}

    def append(self, lines: Iterable[Any]) -> None:
        self.lines.extend(lines)


@pytest.mark.parametrize("copied", [False, True])
def test_a_copy_of_a_process_writes_logs_and_refuses_nothing(copied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What was skipped is counted and written by the process that has the stream; in a fork nothing of it is."""
    letters, before = Kept(), {(0, "fn"): 3}
    errors = Errors(Policy(on_error="skip", max_errors=2), before, letters)
    error = ValueError("bad")
    failure = Failure(
        stage="fn",
        kind="map",
        shard=0,
        position="",
        item=1,
        error=error,
        items=1,
        trace=TracebackException.from_exception(error),
    )
    errors.record_skip((0, "fn"), failure, (0,), 4)
    state = Skipped("fn", 0, 4, At("items", 9))
    if copied:
        errors.disown()
        errors.enforce_limit(Reference.to(state))
    else:
        with pytest.raises(TooManyErrors):
            errors.enforce_limit(Reference.to(state))
    errors.settle(state)
    errors.close(state)
    assert len(letters.lines) == (0 if copied else 1)
    assert bool(caplog.records) == (not copied)
