"""`paused()`: nothing moves inside it, and nothing is different behind it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.channel import Channel
from streamline.core.gate import Phase
from streamline.core.tasks import Session
from streamline.errors import ClosedError, PausedError, PlanError, PlanTypeError
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from streamline.testing.subjects import settle
from tests.backends.kit import AnyThreads
from tests.copying_backend import Copying
from tests.kit import AsyncTest, Pipe, Tap, in_thread, leaves
from tests.laws.profile import examples

Run = Callable[[AsyncTest], None]


@contextmanager
def channels() -> Iterator[list[Channel[Any]]]:
    """Collect the channels that are made."""
    made: list[Channel[Any]] = []
    join = Channel.join

    def noting(channel: Channel[Any], session: Session) -> None:
        made.append(channel)
        join(channel, session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "join", noting)
        yield made


def counts(made: list[Channel[Any]]) -> list[tuple[int, int, bool]]:
    """What every channel holds, and how much of it can be taken: on its way, or in the receiver's hands."""
    found = []
    for each in made:
        packets = {id(packet): packet for packet in (each.open, each.inbox._packet) if packet is not None}
        found.append((each.capacity.held, sum(len(packet.items) for packet in packets.values()), each.finished))
    return found


def movable(made: list[Channel[Any]], backend: Backend) -> list[tuple[int, ...]]:
    """Return the counts that must not change in a pause.

    What is on its way to a host arrives there: credit, and which worker to open; but no item moves, and nothing ends.
    """
    if isinstance(backend, sl.Inline):
        return list(counts(made))
    return [(items, ended) for _, items, ended in counts(made) if items or ended]


def loop_turns(stream: sl.SyncStream[Any], turns: int = 20) -> None:
    """Let the event loop of a plain stream turn so often."""
    for _ in range(turns):
        turned = threading.Event()
        if not stream._loop_thread.remote_gate._call(turned.set):
            return
        assert turned.wait(200)


def moved(run: Any, composition: Composition) -> Any:
    """The items as they are compared: in order, or as a multiset where the order is open."""
    return sorted(leaves(list(run))) if composition.chooses else list(map(repr, run))


points = st.lists(st.integers(0, 30), max_size=4)

BACKENDS: list[Backend] = [sl.Inline(), Copying(2), AnyThreads(2)]

backends = st.sampled_from(BACKENDS)


@examples(40)
@given(compositions(), points, st.integers(0, 1000), backends)
def test_a_plain_stream_pauses_anywhere_and_delivers_the_same(
    composition: Composition, points: list[int], seed: int, backend: Backend
) -> None:
    DICE.seed(seed)
    expected = moved(composition.pipeline, composition)
    found: list[Any] = []
    with channels() as made, composition.pipeline.open(backend=backend) as stream:
        while True:
            for _ in range(points.count(len(found))):
                with stream.paused() as at_work:
                    assert at_work == ()
                    before, state = movable(made, backend), stream.snapshot()
                    loop_turns(stream)
                    assert movable(made, backend) == before
                    assert stream.snapshot() == state
            try:
                found.append(next(stream))
            except StopIteration:
                break
    assert moved(found, composition) == expected


@examples(40)
@given(compositions(), points, st.integers(0, 1000), st.sampled_from(["asyncio", "uvloop"]))
def test_an_async_stream_pauses_anywhere_and_delivers_the_same(
    composition: Composition, points: list[int], seed: int, loop: str
) -> None:
    DICE.seed(seed)
    expected = moved(composition.pipeline, composition)
    found: list[Any] = []

    async def main() -> None:
        with channels() as made:
            async with composition.pipeline.open() as stream:
                while True:
                    for _ in range(points.count(len(found))):
                        async with stream.paused() as at_work:
                            assert at_work == ()
                            before, state = counts(made), stream.snapshot()
                            await settle()
                            assert counts(made) == before
                            assert stream.snapshot() == state
                    try:
                        found.append(await anext(stream))
                    except StopAsyncIteration:
                        break

    anyio.run(main, backend_options={"use_uvloop": loop == "uvloop"})
    assert moved(found, composition) == expected


# What is at work, and what may start ---------------------------------------------------------------------------------


class Calls:
    """An async function whose calls wait until they are let go."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.open = anyio.Event()
        self.hold_from = 4

    async def __call__(self, item: int) -> int:
        self.started.append(item)
        if item >= self.hold_from:
            await self.open.wait()
        self.ended.append(item)
        return item


SHAPES: dict[str, Callable[[Calls], Pipe]] = {
    "ordered": lambda calls: sl.from_items(range(40)).map(calls, concurrency=3),
    "unordered": lambda calls: sl.from_items(range(40)).map(calls, concurrency=3, ordered=False),
    "workers": lambda calls: sl.from_items(range(40)).shard(2).map(calls, concurrency=3).merge(),
    "best effort": lambda calls: sl.from_items(range(40)).shard(2).map(calls).merge("best_effort").prefetch(3),
    "behind": lambda calls: sl.from_items(range(40)).shard(2).merge().map(calls, concurrency=2).batch(1, collate=None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_in_flight_end_and_no_new_one_starts(shape: str, run: Run) -> None:
    async def test() -> None:
        calls = Calls()
        async with SHAPES[shape](calls).open() as stream:
            first = [await anext(stream) for _ in range(2)]
            await settle()
            running = len(calls.started)
            assert running > len(calls.ended)
            async with anyio.create_task_group() as group:

                async def enter() -> None:
                    async with stream.paused() as at_work:
                        assert at_work == ()
                        assert stream._session.gate.phase is Phase.PAUSED
                        assert len(calls.started) == len(calls.ended) == running
                        await settle()
                        assert len(calls.started) == running

                group.start_soon(enter)
                await settle()
                assert stream._session.gate.phase is Phase.QUIESCING
                assert len(calls.started) == running
                calls.open.set()
            rest = [item async for item in stream]
        flat = [item for each in first + rest for item in (each if isinstance(each, list) else [each])]
        assert sorted(flat) == list(range(40))

    run(test)


def test_what_does_not_rest_in_time_is_named_and_its_result_waits(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        calls = Calls()
        async with sl.from_items(range(40)).shard(2).map(calls, concurrency=2, name="ask").merge().open() as stream:
            await anext(stream)
            await settle()
            with caplog.at_level(logging.WARNING), channels():
                async with stream.paused(quiesce_timeout=0.01) as at_work:
                    assert at_work == ("map(ask) of shard 0 (2 calls)", "map(ask) of shard 1 (2 calls)")
                    started = len(calls.started)
                    calls.open.set()
                    await settle()
                    assert len(calls.started) == started
                    assert len(calls.ended) == started
                    stream.snapshot().to_json()
            assert sorted([0, *[item async for item in stream]]) == list(range(40))

    run(test)
    assert "still at work after 0.01 s: map(ask) of shard 0 (2 calls)" in caplog.text
    assert "streamline.pausing" in {record.name for record in caplog.records}


def test_a_call_that_holds_the_loop_is_named_and_another_thread_may_pause() -> None:
    armed, entered, go, left = threading.Event(), threading.Event(), threading.Event(), threading.Event()
    found: list[int] = []

    def hold(item: int) -> int:
        if armed.is_set() and not go.is_set():
            entered.set()
            assert go.wait(200)
        return item

    def consume(stream: sl.SyncStream[int]) -> None:
        while len(found) < 50_000:
            try:
                found.append(next(stream))
            except PausedError:
                assert left.wait(200)

    with sl.from_items(range(50_000)).map(hold, name="hold").open() as stream:
        thread = threading.Thread(target=consume, args=(stream,), daemon=True)
        thread.start()
        armed.set()
        assert entered.wait(200)
        with stream.paused(quiesce_timeout=0.01) as at_work:
            assert "worker of shard 0" in at_work
            go.set()
            loop_turns(stream)
            assert stream._session.gate.phase is Phase.PAUSED
        left.set()
        thread.join(200)
    assert found == list(range(50_000))


def test_calls_in_threads_end_and_no_new_one_starts() -> None:
    go, started, ended = threading.Event(), [], []
    two = threading.Semaphore(0)

    def slow(item: int) -> int:
        started.append(item)
        if item in (3, 4):
            two.release()
            assert go.wait(200)
        ended.append(item)
        return item

    def test() -> None:
        with sl.from_items(range(300)).map(slow, executor="thread", concurrency=2).open() as stream:
            first = next(stream)
            assert two.acquire(timeout=200)
            timer = threading.Timer(0.05, go.set)
            timer.start()
            with stream.paused() as at_work:
                assert at_work == ()
                count = len(started)
                assert len(ended) == count < 300
                loop_turns(stream)
                assert len(started) == count
            timer.join()
            assert [first, *stream] == list(range(300))

    in_thread(test)


def test_a_call_in_a_thread_that_waits_behind_a_stuck_one_is_not_made_in_the_pause() -> None:
    go, stuck, ended, started = threading.Event(), threading.Event(), threading.Event(), []

    def slow(item: int) -> int:
        started.append(item)
        if item == 0:
            stuck.set()
            assert go.wait(200)
            ended.set()
        return item

    def test() -> None:
        with sl.from_items(range(300)).map(slow, executor="thread").open() as stream:
            assert stuck.wait(200)
            loop_turns(stream)  # the next one is claimed
            with stream.paused(quiesce_timeout=0) as at_work:
                assert at_work != ()
                loop_turns(stream)  # it holds
                go.set()
                assert ended.wait(200)
                loop_turns(stream)
                assert started == [0]
            assert list(stream) == list(range(300))

    in_thread(test)


def test_a_custom_stage_and_an_async_source_come_to_rest_behind_what_they_wait_for(run: Run) -> None:
    begun: list[int] = []
    own = anyio.Event()

    @sl.stage(stateless=True)
    async def waiting(items: AsyncIterator[int]) -> AsyncIterator[int]:
        async for item in items:
            begun.append(item)
            if item == 2:
                await own.wait()
            yield item

    async def test() -> None:
        nonlocal own
        begun.clear()
        own = anyio.Event()
        tap = Tap()
        tap.put(*range(6))
        async with tap.pipe.through(waiting).open() as stream:
            assert [await anext(stream), await anext(stream)] == [0, 1]
            with anyio.fail_after(200):
                while begun != [0, 1, 2] or not tap.waits:
                    await settle()
            async with stream.paused(quiesce_timeout=0.01) as at_work:
                assert at_work == ("source of shard 0", "through(waiting) of shard 0")
                own.set()
                tap.put(6, 7)
                await settle()
                assert begun == [0, 1, 2]
            assert [await anext(stream) for _ in range(6)] == [2, 3, 4, 5, 6, 7]

    run(test)


# Asking, nesting, ending ----------------------------------------------------------------------------------------------


async def take_all(stream: sl.Stream[int], found: list[int]) -> None:
    while True:
        found.append(await anext(stream))


def take_all_plainly(stream: sl.SyncStream[int], found: list[int]) -> None:
    while True:
        found.append(next(stream))


def test_asking_for_more_inside_is_an_error_and_no_deadlock(run: Run) -> None:
    async def test() -> None:
        async with sl.from_items(range(1000)).shard(2).merge().open() as stream:
            found = [await anext(stream)]
            async with stream.paused():
                with pytest.raises(PausedError, match="leave its paused\\(\\) block"):
                    await take_all(stream, found)
                with pytest.raises(PausedError, match="paused already"):
                    async with stream.paused():
                        pass
                with pytest.raises(PausedError):
                    await anext(stream)
            assert found + [item async for item in stream] == list(range(1000))

    run(test)


def test_asking_a_plain_stream_for_more_inside_is_an_error_and_no_deadlock() -> None:
    def test() -> None:
        with sl.from_items(range(1000)).shard(2).merge().open() as stream:
            found = [next(stream)]
            with stream.paused():
                with pytest.raises(PausedError, match="leave its paused\\(\\) block"):
                    take_all_plainly(stream, found)
                with pytest.raises(PausedError, match="paused already"), stream.paused():
                    pass
            assert found + list(stream) == list(range(1000))

    in_thread(test)


def test_a_consumer_that_waits_already_gets_its_item_behind_the_pause(run: Run) -> None:
    async def test() -> None:
        for merged in (False, True):
            tap = Tap()
            found: list[Any] = []
            pipe: Pipe = tap.pipe.shard(2).merge("best_effort").batch(1, collate=None) if merged else tap.pipe
            async with pipe.open() as stream, anyio.create_task_group() as group:

                async def consume(stream: Any = stream, found: list[Any] = found) -> None:
                    found.append(await anext(stream))

                group.start_soon(consume)
                await settle()
                async with stream.paused(quiesce_timeout=0):
                    tap.put(7, 8)
                    await settle()
                    assert found == []
                await settle()
                with anyio.fail_after(200):
                    while not found:
                        await anyio.lowlevel.checkpoint()

    run(test)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e30])
def test_a_timeout_out_of_range_is_refused(value: float) -> None:
    with sl.from_items(range(3)).open() as stream, pytest.raises(PlanError, match="quiesce_timeout"):
        stream.paused(quiesce_timeout=value)


@pytest.mark.parametrize("value", ["1", None, True])
def test_a_timeout_of_another_type_is_refused(value: Any) -> None:
    with sl.from_items(range(3)).open() as stream, pytest.raises(PlanTypeError, match="number of seconds"):
        stream.paused(quiesce_timeout=value)


def test_what_has_ended_failed_or_been_closed_is_at_rest_already(run: Run) -> None:
    def failing(item: int) -> int:
        raise ValueError(item)

    async def test() -> None:
        async with sl.from_items(range(3)).open() as stream:
            assert [item async for item in stream] == [0, 1, 2]
            async with stream.paused() as at_work:
                assert at_work == ()
        async with stream.paused():
            pass
        broken = aiter(sl.from_items(range(3)).map(failing))
        with pytest.raises(ValueError, match="0"):
            await anext(broken)
        async with broken.paused():  # type: ignore[attr-defined]
            pass

    run(test)
    with sl.from_items(range(3)).open() as stream:
        assert list(stream) == [0, 1, 2]
        with stream.paused() as at_work:
            assert at_work == ()
            assert stream.snapshot().produced == [3]
        with pytest.raises(StopIteration):
            next(stream)
    with stream.paused(), pytest.raises(StopIteration):
        next(stream)


def test_a_stream_that_has_not_begun_may_be_paused(run: Run) -> None:
    async def test() -> None:
        stream: Any = aiter(sl.from_items(range(9)).shard(3).merge())
        async with stream.paused():
            with pytest.raises(PausedError):
                await anext(stream)
        assert [item async for item in stream] == list(range(9))

    run(test)


class MineError(Exception):
    """The consumer's own."""


def test_leaving_by_closing_breaking_or_an_exception_leaves_nothing(run: Run) -> None:
    async def test() -> None:
        pipe = sl.from_items(range(10_000)).shard(3).map(settled, concurrency=2).merge().batch(2, collate=None)
        async with pipe.open() as stream:
            await anext(stream)
            async with stream.paused():
                await stream.aclose()
                with pytest.raises(ClosedError):
                    await anext(stream)
        with suppress(MineError):
            async with pipe.open() as stream:
                await anext(stream)
                async with stream.paused():
                    raise MineError
            pytest.fail("it was swallowed")
        async with pipe.open() as stream:
            async for _ in stream:
                async with stream.paused():
                    break
        dropped: Any = aiter(pipe)
        await anext(dropped)
        await dropped.paused().__aenter__()
        del dropped
        gc.collect()

    run(test)


async def settled(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return item


def test_leaving_a_plain_stream_inside_a_pause_leaves_nothing() -> None:
    def test() -> None:
        pipe = sl.from_items(range(10_000)).shard(3).map(settled, concurrency=2).merge().batch(2, collate=None)
        with pipe.open() as stream:
            next(stream)
            with stream.paused():
                stream.close()
                with pytest.raises(ClosedError):
                    next(stream)
        with suppress(MineError):
            with pipe.open() as stream:
                next(stream)
                with stream.paused():
                    raise MineError
            pytest.fail("it was swallowed")
        for _ in (stream := iter(pipe)):
            with stream.paused():
                break
        del stream
        dropped = iter(pipe)
        next(dropped)
        dropped.paused().__enter__()
        del dropped
        gc.collect()

    in_thread(test)


def test_closing_a_stream_ends_the_wait_of_whoever_pauses_it(run: Run) -> None:
    async def test() -> None:
        calls, entered = Calls(), []
        async with sl.from_items(range(40)).map(calls).open() as stream, anyio.create_task_group() as group:
            await anext(stream)
            await settle()

            async def enter() -> None:
                async with stream.paused():
                    entered.append(stream._session.gate.phase)

            group.start_soon(enter)
            await settle()
            assert stream._session.gate.phase is Phase.QUIESCING
            await stream.aclose()
        assert len(entered) == 1

    run(test)


def test_closing_a_plain_stream_ends_the_wait_of_whoever_pauses_it() -> None:
    calls = Calls()
    stream = iter(sl.from_items(range(40)).map(calls))
    next(stream)

    def enter() -> None:
        with stream.paused(quiesce_timeout=200):
            pass

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    while stream._session.gate.phase is Phase.RUNNING:
        loop_turns(stream, 1)
    stream.close()
    thread.join(200)
    assert not thread.is_alive()


def test_a_timeout_while_it_is_entered_leaves_the_stream_running(run: Run) -> None:
    async def test() -> None:
        calls = Calls()
        async with sl.from_items(range(40)).map(calls, concurrency=2).open() as stream:
            first = await anext(stream)
            await settle()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def enter() -> None:
                        async with stream.paused():
                            pytest.fail("entered")

                    group.start_soon(enter)
                    await settle()
                    stream.snapshot().to_json()
                    assert stream._session.gate.phase is Phase.QUIESCING
                    scope.cancel()
            assert stream._session.gate.phase is Phase.RUNNING
            calls.open.set()
            assert [first, *[item async for item in stream]] == list(range(40))

    run(test)


def test_ctrl_c_while_a_plain_stream_is_paused_leaves_it_running() -> None:
    calls = Calls()
    with sl.from_items(range(40)).map(calls, concurrency=2).open() as stream:
        first = next(stream)
        while len(calls.started) == len(calls.ended):
            loop_turns(stream, 1)

        def interrupt() -> None:
            while stream._session.gate.phase is not Phase.QUIESCING:
                loop_turns(stream, 1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), stream.paused(quiesce_timeout=200):
            pytest.fail("entered")
        thread.join()
        loop_turns(stream)
        assert stream._session.gate.phase is Phase.RUNNING
        stream._loop_thread.remote_gate._call(calls.open.set)
        assert [first, *stream] == list(range(40))


def test_snapshots_from_a_signal_handler_inside_a_snapshot_are_taken() -> None:
    with sl.from_items(range(40)).open() as stream:
        next(stream)
        taken: list[sl.Snapshot | None] = []
        coordinator = stream._resolved.snapshots
        inner = coordinator._assemble

        def interrupted(state: Any) -> sl.Snapshot:
            if not taken:
                taken.append(None)
                taken[0] = stream.snapshot()
            return inner(state, None, 1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(coordinator), "_assemble", lambda self, state, journal, step: interrupted(state))
            assert stream.snapshot() == taken[0]
        assert stream._gate.phase is Phase.RUNNING


def test_a_run_resumes_exactly_at_a_snapshot_of_a_pause() -> None:
    pipe = sl.from_items(range(60)).shard(3).map(settled, concurrency=4, ordered=False).merge().shuffle(window=5)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(17)]
        with stream.paused():
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with pipe.open(resume=snapshot) as stream:
        assert sorted(first + list(stream)) == list(range(60))


def test_files_are_read_on_behind_a_pause(tmp_path: Any) -> None:
    for part in range(3):
        (tmp_path / f"{part}.txt").write_text("".join(f"{part} {line}\n" for line in range(4000)))
    pipe = sl.read_lines(f"{tmp_path}/*.txt").shard(3).merge()
    expected = list(pipe)
    found = []
    with channels() as made, pipe.open() as stream:
        for item in stream:
            found.append(item)
            if len(found) % 1500 == 1:
                with stream.paused() as at_work:
                    assert at_work == ()
                    before = counts(made)
                    loop_turns(stream)
                    assert counts(made) == before
    assert found == expected


def test_pausing_an_abandoned_loop_says_nothing() -> None:
    async def main() -> None:
        stream: Any = aiter(sl.from_items(range(100)).shard(2).map(settled).merge())
        await anext(stream)
        await stream.paused().__aenter__()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()
