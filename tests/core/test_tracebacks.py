"""Tracebacks go from the user's loop to the user's function: streamline's frames between are left out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core.tracebacks import hide_frames, trace_of
from streamline.errors import DataError, PlanError, ReadError, StageError

NUMBERS = sl.from_items([1, 0, 2])


def invert(number: int) -> int:
    return 1 // number


async def ainvert(number: int) -> int:
    await anyio.lowlevel.checkpoint()
    return invert(number)


def numbers() -> Iterator[int]:
    yield 1
    yield invert(0)


def frames(run: Callable[[], Any], kind: type[BaseException] = ZeroDivisionError) -> list[str]:
    """Return the functions of the traceback of what `run` raises, from its own on."""
    with pytest.raises(kind) as raised:
        run()
    found = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    return found[found.index("frames") + 1 :]


def loop(items: Any) -> None:
    for _ in items:
        pass


def call_next(items: Any) -> None:
    while True:
        next(items)


async def aloop(pipe: Any, options: dict[str, Any]) -> None:
    async with pipe.open(**options) as stream:
        async for _ in stream:
            pass


PIPES = {
    "map": NUMBERS.map(invert),
    "after a merge": NUMBERS.shard(2).map(invert).merge().batch(1),
    "threads of a map": NUMBERS.map(invert, executor="thread"),
    "iterable": sl.from_iterable(numbers),
}


@pytest.mark.parametrize("pipe", PIPES.values(), ids=PIPES)
def test_a_loop_shows_the_call_and_the_function_and_nothing_between(pipe: Any) -> None:
    own = ["numbers", "invert"] if pipe is PIPES["iterable"] else ["invert"]
    assert frames(lambda: loop(pipe)) == ["<lambda>", "loop", *own]
    assert frames(lambda: pipe.first(3)) == ["<lambda>", *own]
    assert frames(lambda: loop(pipe.loader())) == ["<lambda>", "loop", *own]
    with pipe.open() as stream:
        assert frames(lambda: call_next(stream)) == ["<lambda>", "call_next", *own]
        assert frames(lambda: next(stream)) == ["<lambda>", *own]  # it fails for ever, and grows no longer


def test_looking_whether_a_failed_stream_goes_on_leaves_the_traceback_of_its_failure() -> None:
    """A loader's iterator that is dropped looks, while the failure is on its way to the user."""
    with NUMBERS.map(invert).open() as stream:
        with pytest.raises(ZeroDivisionError) as raised:
            loop(stream)
        before = traceback.format_exception(raised.value)
        assert stream.peek() is None
        assert traceback.format_exception(raised.value) == before


def test_an_async_function_and_each_backend_too() -> None:
    assert frames(lambda: loop(NUMBERS.map(ainvert, concurrency=2))) == ["<lambda>", "loop", "ainvert", "invert"]
    for backend in (sl.Threads(2), sl.Inline()):
        with NUMBERS.shard(2).map(invert).open(backend=backend) as stream:
            assert frames(lambda: loop(stream)) == ["<lambda>", "loop", "invert"]


@pytest.mark.long
def test_a_process_tells_the_functions_frames_in_a_note() -> None:
    with NUMBERS.shard(2).map(invert).open(backend=sl.Processes(1)) as stream:
        assert frames(lambda: loop(stream)) == ["<lambda>", "loop"]
        with pytest.raises(ZeroDivisionError) as failed:
            next(stream)
    (note,) = [note for note in failed.value.__notes__ if note.startswith("the traceback in process 0")]
    assert [line.split(" in ")[1] for line in note.splitlines() if line.startswith("  File")] == ["invert"]


def test_async_for_too() -> None:
    found = frames(lambda: anyio.run(aloop, PIPES["map"], {}))
    assert found[-2:] == ["aloop", "invert"]


def test_replicas_datasets_and_debug_too() -> None:
    replicator = sl.StreamReplicator(PIPES["map"], 1)
    with replicator.replica(0) as replica:
        assert frames(lambda: loop(replica)) == ["<lambda>", "loop", "__next__", "invert"]
    assert frames(lambda: loop(sl.StreamDataset(numbers))) == ["<lambda>", "loop", "numbers", "invert"]
    assert frames(lambda: loop(PIPES["map"].debug())) == ["<lambda>", "loop", "invert"]


def test_the_exception_is_the_one_that_was_raised_with_its_notes() -> None:
    error = LookupError("gone")

    def fail(_: int) -> int:
        raise error

    with pytest.raises(LookupError) as failed:
        loop(NUMBERS.map(fail))
    assert failed.value is error
    assert "in map(fail), shard 0 of 1" in error.__notes__[-1]


def test_what_streamline_finds_itself_shows_the_call_alone() -> None:
    def fold(_: int) -> Any:
        return 3

    assert frames(lambda: loop(NUMBERS.flat_map(fold)), PlanError) == ["<lambda>", "loop"]
    assert frames(lambda: sl.read_jsonl("nowhere.jsonl").open(), ReadError) == ["<lambda>", "open"]
    assert frames(lambda: sl.from_items([1, None]).batch(2).first(1), DataError) == ["<lambda>"]


def test_causes_lose_our_frames_and_members_of_a_group_too() -> None:
    def end(_: int) -> int:
        raise StopIteration

    def chained(number: int) -> int:
        try:
            return invert(number)
        except ZeroDivisionError as error:
            raise KeyError(number) from error

    def names(error: BaseException | None) -> list[str]:
        assert error is not None
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    with pytest.raises(StageError) as ended:
        loop(NUMBERS.map(end))
    assert names(ended.value.__cause__) == ["end"]
    with pytest.raises(KeyError) as failed:
        loop(NUMBERS.map(chained))
    assert names(failed.value.__cause__) == ["chained", "invert"]

    def several(number: int) -> int:
        raise ExceptionGroup("two", [KeyError(1), KeyError(2)])

    assert frames(lambda: loop(NUMBERS.map(several)), ExceptionGroup) == ["<lambda>", "loop", "several"]

    async def in_group(number: int) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(ainvert, number)

    with pytest.raises(ExceptionGroup) as group:
        loop(NUMBERS.map(in_group))
    assert names(group.value.exceptions[0]) == ["ainvert", "invert"]


def test_exceptions_that_are_each_others_cause_are_trimmed_once() -> None:
    first, second = KeyError(1), KeyError(2)
    first.__cause__, second.__cause__ = second, first
    hide_frames(first)


@pytest.mark.parametrize(("broken", "last"), [("sources.items.positions_of", "open"), ("transforms.map.Look", "lists")])
def test_a_fault_of_our_own_shows_where_it_was(broken: str, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"streamline.{broken}")
    found = frames(lambda: loop(NUMBERS.map(invert)), NameError)
    assert found[:2] == ["<lambda>", "loop"]
    assert found[-1] == last


def test_a_traceback_for_a_log_begins_at_the_first_frame_of_the_user_or_shows_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def starts(found: traceback.TracebackException | None) -> list[str]:
        """Return where each begins, from an exception to the first cause."""
        return [] if found is None else [found.stack[0].name, *starts(found.__cause__ or found.__context__)]

    def ours(work: Callable[[], Any]) -> Exception:
        """Return what it raises, from the first frame of ours on."""
        with pytest.raises((ZeroDivisionError, PlanError)) as raised:
            work()
        trace = raised.value.__traceback__
        while trace and not trace.tb_frame.f_code.co_filename.startswith(str(Path(sl.__file__).parent)):
            trace = trace.tb_next
        return raised.value.with_traceback(trace)

    monkeypatch.setenv("STREAMLINE_TRACEBACK", "full")
    error, middle, first = (ours(lambda: loop(NUMBERS.map(invert))) for _ in range(3))
    fault = ours(lambda: sl.from_items(3))  # type: ignore[arg-type]
    error.__cause__, middle.__context__, first.__cause__ = middle, first, fault
    assert starts(trace_of(error)) == [*["_fetch_trimmed"] * 3, "from_items"]
    monkeypatch.delenv("STREAMLINE_TRACEBACK")
    assert starts(trace_of(error)) == [*["invert"] * 3, "from_items"]
    hide_frames(error)
    assert [traceback.extract_tb(each.__traceback__)[0].name for each in (error, middle, first)] == ["invert"] * 3


def test_all_frames_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_TRACEBACK", "short")
    assert frames(lambda: loop(PIPES["map"])) == ["<lambda>", "loop", "invert"]
    monkeypatch.setenv("STREAMLINE_TRACEBACK", "full")
    found = frames(lambda: loop(PIPES["map"]))
    assert found[:3] == ["<lambda>", "loop", "_fetch_trimmed"]
    assert "apply" in found
    assert found[-1] == "invert"


def test_nothing_of_a_loop_that_handles_another_error_is_lost() -> None:
    with pytest.raises(KeyError) as outer:
        fail_on_a_failure()
    assert [frame.name for frame in traceback.extract_tb(outer.value.__traceback__)][-1] == "fail_on_a_failure"
    (inner,) = traceback.extract_tb(outer.value.__context__.__traceback__)[1:-1]  # type: ignore[union-attr]
    assert inner.name == "loop"


def fail_on_a_failure() -> None:
    try:
        loop(PIPES["map"])
    except ZeroDivisionError:
        raise KeyError("the user's own")  # noqa: B904
