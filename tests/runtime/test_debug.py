"""`debug()`: the same stream in the calling thread, for pdb and Ctrl-C; and `first`."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import ClosedError, PlanError, PlanTypeError, TooManyErrors
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from tests.kit import Counting, Pipe, later, leaves, stage
from tests.laws.profile import examples

StartPython = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]


def same(run: Any, composition: Composition) -> Any:
    return sorted(leaves(list(run))) if composition.chooses else list(map(repr, run))


@examples(40)
@given(compositions(), st.integers(0, 40), st.integers(0, 1000), st.booleans())
def test_items_order_and_states_are_those_of_open_and_snapshots_go_both_ways(
    composition: Composition, at: int, seed: int, debug_first: bool
) -> None:
    DICE.seed(seed)
    pipe = composition.pipeline
    expected = same(pipe, composition)
    assert same(pipe.debug(), composition) == expected

    def part(stream: Any) -> tuple[list[Any], sl.Snapshot]:
        items = [item for _, item in zip(range(at), stream, strict=False)]
        return items, sl.Snapshot.from_json(stream.snapshot().to_json())

    with pipe.debug() as debugged, pipe.open() as opened:
        (first, snapshot), (others, other) = part(debugged), part(opened)
    if not composition.chooses:
        assert list(map(repr, first)) == list(map(repr, others))
    if debug_first:
        with pipe.open(resume=snapshot) as stream:
            assert same(first + list(stream), composition) == expected
    else:
        with pipe.debug(resume=other) as debugged:
            assert same(others + list(debugged), composition) == expected


def test_states_are_those_of_open_item_by_item() -> None:
    pipe = sl.from_items(range(40)).shard(3).shuffle(window=4).map(later, concurrency=4).merge().batch(3, collate=None)
    with pipe.debug() as debugged, pipe.open() as opened:
        for ours, theirs in zip(debugged, opened, strict=True):
            assert ours == theirs
            assert debugged.snapshot() == opened.snapshot()
        assert debugged.snapshot() == opened.snapshot()


class Seen:
    """Where user code was called, and with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[threading.Thread] = set()

    def note(self, what: str, item: Any) -> Any:
        self.calls.append((what, item))
        self.threads.add(threading.current_thread())
        return item

    @property
    def pipe(self) -> Pipe:
        """A pipeline of every kind of user code."""

        async def slow(item: int) -> int:
            self.note("async", item)
            for _ in range((7 * item) % 5):
                await anyio.lowlevel.checkpoint()
            return item

        async def custom(items: AsyncIterator[int]) -> AsyncIterator[int]:
            async for item in items:
                yield self.note("through", item)

        def source() -> Iterator[int]:
            for item in range(12):
                yield self.note("source", item)

        return (
            sl.from_iterable(source)
            .map(lambda item: self.note("map", item))
            .filter(lambda item: self.note("filter", item) is not None)
            .map(slow, concurrency=4)
            .map(lambda item: self.note("thread", item), executor="thread", concurrency=3)
            .through(sl.stage(stateless=True)(custom))
            .batch(2, collate=lambda items: self.note("collate", items))
        )


def test_all_user_code_runs_in_the_calling_thread_in_order_and_when_it_is_needed() -> None:
    seen = Seen()
    debugged = seen.pipe.debug()
    assert seen.calls == []
    for number, batch in enumerate(debugged):
        assert batch == [2 * number, 2 * number + 1]
        asked = max(item for what, item in seen.calls if what == "source")
        assert asked <= 2 * number + 1 + 8  # one item in the hands of each stage
    assert seen.threads == {threading.current_thread()}
    for what in ("source", "map", "filter", "async", "thread", "through"):
        assert [item for name, item in seen.calls if name == what] == list(range(12))


def test_nothing_is_read_ahead_where_no_channel_stands() -> None:
    source = Counting(1000)
    with sl.from_items(source).map(abs).debug() as stream:
        for item in range(3):
            assert next(stream) == item
            assert source.asked == item + 1


def test_it_works_inside_a_running_asyncio_loop_and_leaves_that_as_it_was() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        for pipe in (sl.from_items(range(9)).shard(3).map(later, concurrency=2).merge(), Seen().pipe):
            assert list(pipe.debug()) == list(pipe)
            with pipe.debug() as stream:
                next(stream)
                stream.snapshot()
            assert asyncio.current_task() is task
            assert asyncio.get_running_loop() is not None
            await asyncio.sleep(0)
        dropped = sl.from_items(range(9)).map(later).debug()
        next(dropped)
        del dropped
        gc.collect()
        await asyncio.sleep(0)
        async with sl.from_items(range(3)).open() as outer:
            assert [item async for item in outer] == [0, 1, 2]

    asyncio.run(main())
    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})


def test_a_failure_is_the_users_with_their_frames_and_comes_for_ever() -> None:
    def fail_at_three(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    found: list[int] = []
    stream = sl.from_items(range(9)).map(fail_at_three).map(later).debug()
    for _ in range(2):
        with pytest.raises(ValueError, match="three") as failed:
            found.extend(stream)
        frames = [frame.name for frame in traceback.extract_tb(failed.value.__traceback__)]
        assert frames[-1] == "fail_at_three"
        assert len(frames) == 2  # this test, and the user's
        assert failed.value.__notes__ == [failed.value.__notes__[0]]
    assert found == [0, 1, 2]
    assert stream.snapshot().produced == [3]
    with pytest.raises(ValueError, match="three"):
        sl.from_items(range(9)).shard(2).map(fail_at_three).merge().first(8)


def test_closing_leaving_and_dropping_leave_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    pipe = sl.from_items(range(100)).shard(3).map(later, concurrency=2).through(stage).merge().batch(2, collate=None)
    with pipe.debug() as stream:
        next(stream)
    with pytest.raises(ClosedError):
        next(stream)
    stream.close()
    assert stream.snapshot().produced == [1, 1, 0]
    for _ in pipe.debug():
        break
    dropped = pipe.debug()
    next(dropped)
    cycle: list[Any] = [dropped]
    cycle.append(cycle)
    del dropped, cycle
    gc.collect()
    pipe.debug()
    with pipe.debug() as stream:
        assert stream.snapshot().produced == [0, 0, 0]
    never = pipe.debug()
    never.close()
    with pytest.raises(ClosedError):
        next(never)
    assert capfd.readouterr() == ("", "")


def test_a_generator_of_a_user_is_closed() -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append("source")

    async def custom(items: AsyncIterator[int]) -> AsyncIterator[int]:
        try:
            async for item in items:
                yield item
        finally:
            closed.append("custom")

    with sl.from_iterable(source).through(sl.stage(stateless=True)(custom)).debug() as stream:
        next(stream)
    assert sorted(closed) == ["custom", "source"]


def test_it_can_not_be_asked_by_the_pipeline_that_it_runs() -> None:
    streams: list[Any] = []

    def ask(item: int) -> int:
        return item + int(next(streams[0]))

    streams.append(sl.from_items(range(3)).map(ask).debug())
    with pytest.raises(RuntimeError, match="by the pipeline that it is running"):
        next(streams[0])


def test_options_mean_what_they_mean_to_open(tmp_path: Any) -> None:
    pipe = sl.from_items(range(20)).shard(4).shuffle(window=5).merge()
    with pipe.open(rank=1, world_size=2, epoch=3) as stream:
        expected = list(stream)
    assert list(pipe.debug(rank=1, world_size=2, epoch=3)) == expected
    with pytest.raises(PlanError, match="each of the 2 ranks"):
        sl.from_items(range(3)).debug(rank=0, world_size=2)
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    assert list(sl.read_lines(f"{tmp_path}/*.txt").debug()) == ["1", "2", "3"]


def test_errors_are_skipped_counted_and_written_down_as_by_open(tmp_path: Any) -> None:
    def odd_fails(item: int) -> int:
        if item % 2:
            raise ValueError(item)
        return item

    pipe, letters = sl.from_items(range(8)).shard(2, "contiguous").map(odd_fails), tmp_path / "bad.jsonl"
    with pipe.debug(on_error="skip", max_errors=None, dead_letters=letters) as stream:
        assert stream.errors.total == 0
        assert sorted(stream) == [0, 2, 4, 6]
    assert stream.errors.stages == {"odd_fails": 4}
    assert len(letters.read_text().splitlines()) == 4
    stages = {stage.name: stage for stage in stream.stats().stages}
    assert (stages["odd_fails"].items, stages["odd_fails"].errors) == (4, 4)
    with pytest.raises(TooManyErrors):
        list(pipe.debug(on_error="skip", max_errors=3))


def test_a_person_who_looks_at_an_item_is_not_told_that_the_event_loop_was_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def looks(item: int) -> int:
        time.sleep(0.11)
        return item

    assert list(sl.from_items(range(2)).map(looks).debug()) == [0, 1]
    assert not [record for record in caplog.records if record.name == "streamline.hints"]


# In a Python of its own ----------------------------------------------------------------------------------------------

PDB = """
import gc
import streamline as sl

gc.set_threshold(1)  # what the collector calls back would be stopped in

def inspect(item):
    if item == 2:
        breakpoint()
    return item * 10

{more}

for pipe in [{pipes}]:
    print("== next", flush=True)
    for item in pipe.debug():
        print("got", item, flush=True)
"""

PLACES = {
    "map": "sl.from_items(range(4)).map(inspect)",
    "filter": "sl.from_items(range(4)).filter(lambda item: inspect(item) is not None)",
    "async map": "sl.from_items(range(4)).map(ask, concurrency=2)",
    "threads": "sl.from_items(range(4)).map(inspect, executor='thread', concurrency=2)",
    "custom stage": "sl.from_items(range(4)).through(custom)",
    "collate": "sl.from_items(range(4)).batch(1, collate=lambda items: inspect(items[0]))",
    "source": "sl.from_iterable(lambda: (inspect(item) for item in range(4)))",
}

MORE = """
async def ask(item):
    return inspect(item)

@sl.stage(stateless=True)
async def custom(items):
    async for item in items:
        yield inspect(item)
"""


@pytest.mark.long
def test_pdb_stops_in_user_code_of_every_kind_goes_on_and_quits_without_noise(start_python: StartPython) -> None:
    script = PDB.format(pipes=", ".join([*PLACES.values(), PLACES["async map"]]), more=MORE)
    with start_python(script, stdin=subprocess.PIPE) as process:
        output, errors = process.communicate("p item + 40\nu\np item\nw\nc\n" * len(PLACES) + "q\n", timeout=200)
    _, *parts, _ = output.split("== next\n")  # the last one is of the pipeline that is quit
    for place, printed in zip(PLACES, parts, strict=True):
        before, _, after = printed.partition("(Pdb) ")
        assert after.startswith("42\n"), place
        assert before.count("got") == 2, place
        # Its line: breakpoint() since 3.13, the next one before.
        assert re.search(r"script[.]py\(\d+\)inspect\(\)", after), place
        assert "for item in" in after, place  # the loop at the bottom of the stack is seen
        assert after.count("got") == 2, place
    assert process.returncode == 1
    assert errors.startswith("Traceback")  # of the quitting, and nothing before it
    assert errors.count("Traceback") == 1
    assert errors.rstrip().splitlines()[-2].startswith("bdb.BdbQuit")
    assert "destroyed" not in errors
    assert "never" not in errors


STUCK = """
import anyio, asyncio, gc, sys, time
import streamline as sl

def spin(item):
    if item == 2:
        print("stuck", flush=True)
        while True:
            pass
    return item

async def wait(item):
    if item == 2:
        print("stuck", flush=True)
        await anyio.sleep_forever()
    return item

@sl.stage(stateless=True)
async def custom(items):
    try:
        async for item in items:
            yield item
    finally:
        print("closed", flush=True)

pipe = sl.from_items(range(9)).shard(2).through(custom).merge()
for stuck in [pipe.map(spin), pipe.map(wait), pipe.map(spin, executor="thread", concurrency=2)]:
    stream = stuck.debug()
    try:
        for item in stream:
            print("got", item, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        next(stream)
    except KeyboardInterrupt:
        print("for ever", flush=True)
    gc.collect()
    print("next", flush=True)
"""


@pytest.mark.long
def test_ctrl_c_comes_out_where_the_items_are_asked_for(start_python: StartPython) -> None:
    with start_python(STUCK, "-W", "error") as process:
        assert process.stdout is not None
        for stage in ("a loop", "a wait", "a call for a thread"):
            printed = list[str]()
            while printed[-1:] != ["next"]:
                line = process.stdout.readline()
                assert line, (stage, printed)
                printed.append(line.rstrip("\n"))
                if line == "stuck\n":
                    process.send_signal(signal.SIGINT)
            assert printed[-5:] == ["closed", "closed", "interrupted", "for ever", "next"], stage
        output, errors = process.communicate(timeout=200)
    assert (output, errors, process.returncode) == ("", "", 0)


# first ----------------------------------------------------------------------------------------------------------------


def test_first_gives_the_first_items_and_reads_little_more() -> None:
    source = Counting(100_000)
    pipe = sl.from_items(source).map(abs).map(later, concurrency=64)
    for count in (1, 3, 10):
        source.asked = 0
        assert pipe.first(count) == list(range(count))
        assert source.asked <= 4 * count + 1
    assert sl.from_items(range(3)).first(10) == [0, 1, 2]
    assert sl.from_items(range(9000)).shard(3).merge().first(8000) == list(range(8000))


def test_first_of_nothing_opens_nothing() -> None:
    def never() -> Iterator[int]:
        raise AssertionError("opened")

    assert sl.from_iterable(never).first(0) == []


@pytest.mark.parametrize(("count", "error"), [(-1, PlanError), ("3", PlanTypeError), (1.0, PlanTypeError)])
def test_first_of_no_number_is_refused(count: Any, error: type[PlanError]) -> None:
    with pytest.raises(error, match=r"\.first\(count\)"):
        sl.from_items(range(3)).first(count)


def test_first_behaves_as_open_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sl.from_items(range(20)).shard(2).merge().first(3) == [1, 3, 5]
    with pytest.raises(PlanError, match="each of the 2 ranks"):
        sl.from_items(range(20)).first(3)
