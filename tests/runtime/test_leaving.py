"""Leaving a loop in any way leaves nothing: no task, thread, process, file or socket, and no word.

Threads, files and channels are looked after by the `no_leaks` fixture, tasks by `run`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import anyio
import pytest

import streamline as sl
from streamline.core.tasks import Session
from streamline.errors import ClosedError, PlanError
from streamline.runtime.loop_thread import LoopThread
from tests.kit import LONGEST_S, LOOPS, AsyncTest, Pipe, Tap, gone, in_thread, run_on, streamline_tasks
from tests.laws.profile import in_turn

Run = Callable[[AsyncTest], None]
Way: TypeAlias = "Callable[[Pipe], Awaitable[None]]"

GOOD = 20


async def stuck_later(item: int) -> int:
    if item >= GOOD:
        await anyio.sleep_forever()
    return item


def slow_in_thread(item: int) -> int:
    if item >= GOOD:
        time.sleep(0.3)
    return item


@sl.stage(stateless=True)
async def stuck_stage(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        if item >= GOOD:
            await anyio.sleep_forever()
        yield item


async def stuck_source() -> AsyncIterator[int]:
    for item in range(GOOD):
        yield item
    await anyio.sleep_forever()


def long() -> sl.Pipeline[int]:
    return sl.from_items(range(1_000_000))


RUNNING: dict[str, Callable[[], Pipe]] = {
    "source": long,
    "four workers": lambda: long().shard(4).map(abs).merge(),
    "best effort": lambda: long().shard(4).map(abs).merge("best_effort"),
    "shuffle": lambda: long().shard(2).shuffle(window=8).merge(),
    "behind the merge": lambda: long().shard(2).merge().shuffle(window=8).batch(2),
    "prefetch": lambda: long().prefetch(8, bytes=1000).prefetch(2),
    "custom stage": lambda: long().through(stuck_stage).map(abs),
    "endless repeat": lambda: sl.from_items(range(3)).shard(1).map(abs).repeat(),
}
"""Pipelines that go on and on."""

STUCK: dict[str, Callable[[], Pipe]] = {
    "source": lambda: sl.from_iterable(stuck_source),
    "async map": lambda: long().map(stuck_later),
    "async map of 8": lambda: long().map(stuck_later, concurrency=8),
    "unordered map of 8": lambda: long().map(stuck_later, concurrency=8, ordered=False),
    "threads": lambda: long().map(slow_in_thread, executor="thread", concurrency=2),
    "unordered threads": lambda: long().map(slow_in_thread, executor="thread", concurrency=2, ordered=False),
    "custom stage": lambda: long().through(stuck_stage),
    "stuck behind stuck": lambda: long().map(stuck_later, concurrency=2).through(stuck_stage).prefetch(2).repeat(),
    "four workers": lambda: long().shard(4).map(stuck_later).merge(),
    "four workers, best effort": lambda: long().shard(4).map(stuck_later).merge("best_effort", max_skips_per_round=3),
    "behind the merge": lambda: long().shard(2).merge().map(stuck_later, concurrency=2).batch(2, collate=None),
}
"""Pipelines whose user code waits for ever, or for long, behind the first items."""

ALL = {
    **{f"running: {name}": pipe for name, pipe in RUNNING.items()},
    **{f"stuck: {name}": pipe for name, pipe in STUCK.items()},
}


class MineError(Exception):
    """The consumer's own."""


async def by_break(pipe: Pipe) -> None:
    async with pipe.open() as stream:
        async for _ in stream:
            break


async def by_exception(pipe: Pipe) -> None:
    with suppress(MineError):
        async with pipe.open() as stream:
            async for _ in stream:
                raise MineError
        pytest.fail("it was swallowed")


async def by_return(pipe: Pipe) -> None:
    async def function() -> Any:
        async with pipe.open() as stream:
            async for item in stream:
                return item
        return None

    assert await function() is not None


async def by_cancellation_between(pipe: Pipe) -> None:
    async with anyio.create_task_group() as group:

        async def consume() -> None:
            async with pipe.open() as stream:
                await anext(stream)
                group.cancel_scope.cancel()
                await anyio.sleep_forever()

        group.start_soon(consume)


async def cancelled_in_a_wait(consume: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(consume)
    for _ in range(50):
        await anyio.lowlevel.checkpoint()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def by_native_cancellation_of_a_wait(pipe: Pipe) -> None:
    async def consume() -> None:
        async with pipe.open() as stream:
            async for _ in stream:
                pass

    await cancelled_in_a_wait(consume())


async def by_cancellation_of_a_bare_loop(pipe: Pipe) -> None:
    async def consume() -> None:
        async for _ in pipe:
            pass

    await cancelled_in_a_wait(consume())
    gc.collect()


async def by_a_timeout_around_all(pipe: Pipe) -> None:
    with anyio.move_on_after(0.05) as scope:
        async with pipe.open() as stream:
            async for _ in stream:
                pass
    assert scope.cancelled_caught


async def by_asyncios_timeout_around_all(pipe: Pipe) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05), pipe.open() as stream:
            async for _ in stream:
                pass
        pytest.fail("it was swallowed")


async def by_a_bare_break(pipe: Pipe) -> None:
    async for _ in pipe:
        break
    gc.collect()


async def by_garbage_collection(pipe: Pipe) -> None:
    stream = aiter(pipe)
    await anext(stream)
    del stream
    gc.collect()


async def by_garbage_collection_in_a_cycle(pipe: Pipe) -> None:
    cycle: list[Any] = [aiter(pipe)]
    cycle.append(cycle)
    await anext(cycle[0])
    del cycle
    gc.collect()


async def by_closing_twice(pipe: Pipe) -> None:
    async with pipe.open() as stream:
        await anext(stream)
        await stream.aclose()
        await stream.aclose()


async def by_closing_from_two_tasks(pipe: Pipe) -> None:
    async with pipe.open() as stream:
        await anext(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.aclose)
            group.start_soon(stream.aclose)


async def by_never_iterating(pipe: Pipe) -> None:
    async with pipe.open():
        pass


async def by_never_opening(pipe: Pipe) -> None:
    pipe.open()
    aiter(pipe)


WAYS: list[Way] = [
    by_break,
    by_exception,
    by_return,
    by_cancellation_between,
    by_native_cancellation_of_a_wait,
    by_cancellation_of_a_bare_loop,
    by_a_timeout_around_all,
    by_asyncios_timeout_around_all,
    by_a_bare_break,
    by_garbage_collection,
    by_garbage_collection_in_a_cycle,
    by_closing_twice,
    by_closing_from_two_tasks,
    by_never_iterating,
    by_never_opening,
]


@pytest.mark.one_in(7, 2)
@pytest.mark.parametrize(
    ("way", "run"), in_turn(WAYS, LOOPS), indirect=["run"], ids=lambda one: getattr(one, "__name__", None)
)
def test_leaving_an_async_loop_leaves_nothing(way: Way, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    for shape, pipe in ALL.items():

        async def test(shape: str = shape, pipe: Callable[[], Pipe] = pipe) -> None:
            await way(pipe())
            await gone(streamline_tasks)

        run(test)
    assert capfd.readouterr() == ("", "")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", ["source", "four workers", "behind the merge", "prefetch"])
def test_a_task_that_is_cancelled_at_any_of_its_steps_and_awaited_leaves_no_task(shape: str, run: Run) -> None:
    async def consume() -> None:
        async with RUNNING[shape]().open() as stream:
            for _ in range(3):
                await anext(stream)

    async def test() -> None:
        for steps in itertools.count():
            task = asyncio.ensure_future(consume())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert streamline_tasks() == set(), f"cancelled after {steps} steps"
            if not task.cancelled():
                return

    run(test)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", ALL)
def test_closing_from_another_task_while_a_pull_waits_is_an_error_for_it_not_an_end(shape: str, run: Run) -> None:
    seen: list[BaseException] = []

    async def test() -> None:
        async def consume(stream: sl.Stream[Any]) -> None:
            try:
                while True:
                    await anext(stream)
                    await anyio.lowlevel.checkpoint()
            except Exception as error:
                seen.append(error)

        async with ALL[shape]().open() as stream, anyio.create_task_group() as group:
            group.start_soon(consume, stream)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            await stream.aclose()
        assert [type(error) for error in seen] == [ClosedError]
        with pytest.raises(ClosedError):
            await anext(stream)

    run(test)


@pytest.mark.parametrize("checkpoints", range(8))
def test_closing_while_the_first_pull_starts_is_an_error_for_it_not_an_end(checkpoints: int, run: Run) -> None:
    async def test() -> None:
        stream = aiter(RUNNING["four workers"]())
        assert isinstance(stream, sl.Stream)
        task = asyncio.ensure_future(anext(stream))
        for _ in range(checkpoints):
            await anyio.lowlevel.checkpoint()
        await stream.aclose()
        await asyncio.wait([task])
        assert task.exception() is None or isinstance(task.exception(), ClosedError)
        with pytest.raises(ClosedError):
            await anext(stream)

    run(test)


# Timeouts around one pull -------------------------------------------------------------------------------------------


async def jitters(item: int) -> int:
    for _ in range(item * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return item


async def jittering_source() -> AsyncIterator[int]:
    for item in range(300):
        await jitters(item)
        yield item


@sl.stage(stateless=True)
async def jittering_stage(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield await jitters(item)


def short() -> sl.Pipeline[int]:
    return sl.from_items(range(300))


FINITE: dict[str, Callable[[], Pipe]] = {
    "source": short,
    "async source": lambda: sl.from_iterable(jittering_source),
    "async map": lambda: short().map(jitters, concurrency=3),
    "unordered map": lambda: short().map(jitters, concurrency=3, ordered=False),
    "threads": lambda: short().map(abs, executor="thread", concurrency=2),
    "custom stage": lambda: short().through(jittering_stage),
    "four workers": lambda: short().shard(4).map(jitters).merge(),
    "four workers, best effort": lambda: short().shard(4).map(jitters).merge("best_effort", max_skips_per_round=2),
    "everything behind the merge": lambda: (
        short().shard(3).map(jitters).merge().flat_map(lambda item: [item]).prefetch(3, bytes=200)
    ),
}


@pytest.mark.one_in(7, 4)
@pytest.mark.parametrize("cancel", ["task.cancel", "cancel scope", "asyncio.timeout", "move_on_after", "wait_for"])
@pytest.mark.parametrize(("shape", "run"), in_turn(FINITE, LOOPS), indirect=["run"])
def test_a_timeout_around_one_anext_loses_and_doubles_nothing(shape: str, cancel: str, run: Run) -> None:
    chance = random.Random(f"{shape} {cancel}")
    timeouts = 0

    async def cancelled_after_some_steps(stream: sl.Stream[Any]) -> Any:
        scope = anyio.CancelScope()

        async def ask() -> Any:
            with scope:
                return await anext(stream)
            raise TimeoutError

        task = asyncio.get_running_loop().create_task(ask())
        for _ in range(chance.choice([1, 1, 2, 3, 5, 8])):
            await anyio.lowlevel.checkpoint()
        task.cancel() if cancel == "task.cancel" else scope.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            raise TimeoutError
        return task.result()

    async def ask(stream: sl.Stream[Any]) -> Any:
        limit_s = chance.choice([0, 0.0001, 0.001])
        if cancel == "asyncio.timeout":
            async with asyncio.timeout(limit_s):
                return await anext(stream)
        if cancel == "move_on_after":
            with anyio.move_on_after(limit_s):
                return await anext(stream)
            raise TimeoutError
        if cancel == "wait_for":
            return await asyncio.wait_for(anext(stream), limit_s)
        return await cancelled_after_some_steps(stream)

    async def test() -> None:
        nonlocal timeouts
        got: list[int] = []
        async with FINITE[shape]().open() as stream:
            while True:
                try:
                    got.append(await ask(stream))
                except TimeoutError:
                    timeouts += 1
                    if not timeouts % 10:  # so that limits below a turn of the loop end some time
                        got.extend([item] if (item := await anext(stream, None)) is not None else [])
                except StopAsyncIteration:
                    break
        assert sorted(got) == list(range(300))
        if "best effort" not in shape and "unordered" not in shape:
            assert got == list(range(300))

    run(test)
    if cancel == "task.cancel":  # others may find that the item was there in time, each time
        assert timeouts


@types.coroutine
def cancelled_at(work: Any, suspension: int, scope: anyio.CancelScope) -> Any:
    """Await `work`, and cancel `scope` where it is suspended for the time with this number, 0-based."""
    step, value = work.send, None
    for count in itertools.count():
        try:
            waits_for = step(value)
        except StopIteration as end:
            return end.value
        if count == suspension:
            scope.cancel()
        try:
            step, value = work.send, (yield waits_for)
        except BaseException as error:
            step, value = work.throw, error


def test_a_cancellation_at_each_place_where_anext_waits_loses_and_doubles_nothing(run: Run) -> None:
    async def waits(item: int) -> int:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        return item

    pipe = sl.from_items(range(12)).shard(2).map(waits, concurrency=2).merge().prefetch(2).map(waits)

    async def test() -> None:
        got, suspension, cancelled = list[int](), 0, 0
        stream = pipe.open().stream()  # the first one starts it, too
        while True:
            with anyio.CancelScope() as scope:
                try:
                    got.append(await cancelled_at(anext(stream).__await__(), suspension, scope))
                except StopAsyncIteration:
                    break
                suspension = -1
            suspension += 1
            cancelled += scope.cancelled_caught
            assert stream.count == len(got)
        assert got == list(range(12))
        assert cancelled > 5

    run(test)


def test_another_event_loop_is_refused_with_the_way_out() -> None:
    opening = sl.from_items(range(9)).open().stream().start()
    with pytest.raises(PlanError, match=r"runs on asyncio and uvloop, .* \(trio's\?\): read it in a thread"):
        opening.send(None)  # as an event loop would that asyncio knows nothing of


def test_a_timeout_leaves_the_state_behind_the_last_item_received(run: Run) -> None:
    async def test() -> None:
        tap = Tap()
        async with tap.pipe.map(jitters, concurrency=2).open() as stream:
            tap.put(1, 2)
            assert [await anext(stream), await anext(stream)] == [1, 2]
            before = stream.snapshot().to_json()
            for _ in range(3):
                with anyio.move_on_after(0.01):
                    await anext(stream)
                assert stream.snapshot().to_json() == before
            tap.put(3)
            assert await anext(stream) == 3

    run(test)


# Clean-up of user code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [by_break, by_exception, by_a_bare_break, by_a_timeout_around_all])
def test_users_generators_are_closed_and_may_await_while_they_are(way: Way, run: Run) -> None:
    closed: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            for item in range(1_000_000):
                yield item
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            closed.append("source")

    @sl.stage(stateless=True)
    async def stage(items: AsyncIterator[int]) -> AsyncIterator[int]:
        try:
            async for item in items:
                yield item
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            closed.append("stage")

    async def fn(item: int) -> int:
        try:
            if item > GOOD:
                await anyio.sleep_forever()
        finally:
            if item == GOOD + 1:
                closed.append("function")
        return item

    async def test() -> None:
        await way(sl.from_iterable(source).through(stage).map(fn, concurrency=3))
        await gone(streamline_tasks)

    run(test)
    assert {"source", "stage"} <= set(closed)
    assert len(closed) == len(set(closed))


def test_a_plain_iterators_generator_is_closed() -> None:
    closed: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield from range(1_000_000)
        finally:
            closed.append("source")

    with sl.from_iterable(source).open() as stream:
        next(stream)
    assert closed == ["source"]


# The plain loop -----------------------------------------------------------------------------------------------------


def plainly_by_break(pipe: Pipe) -> None:
    for _ in pipe:
        break


def plainly_by_break_in_with(pipe: Pipe) -> None:
    with pipe.open() as stream:
        for _ in stream:
            break


def plainly_by_exception(pipe: Pipe) -> None:
    with suppress(MineError):
        with pipe.open() as stream:
            for _ in stream:
                raise MineError
        pytest.fail("it was swallowed")


def plainly_by_return(pipe: Pipe) -> None:
    def function() -> Any:
        for item in pipe:
            return item
        return None

    assert function() is not None


def plainly_by_del(pipe: Pipe) -> None:
    stream = iter(pipe)
    next(stream)
    del stream


def plainly_by_garbage_collection_in_a_cycle(pipe: Pipe) -> None:
    cycle: list[Any] = [iter(pipe)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


def plainly_by_closing_twice(pipe: Pipe) -> None:
    with pipe.open() as stream:
        next(stream)
        stream.close()
        stream.close()


def plainly_by_never_iterating(pipe: Pipe) -> None:
    with pipe.open():
        pass
    pipe.open()
    iter(pipe)


def plainly_by_first(pipe: Pipe) -> None:
    assert len(pipe.first(2)) == 2


PLAIN_WAYS = [
    plainly_by_break,
    plainly_by_break_in_with,
    plainly_by_exception,
    plainly_by_return,
    plainly_by_del,
    plainly_by_garbage_collection_in_a_cycle,
    plainly_by_closing_twice,
    plainly_by_never_iterating,
    plainly_by_first,
]


@pytest.mark.one_in(5, 4)
@pytest.mark.parametrize("way", PLAIN_WAYS, ids=lambda way: way.__name__)
def test_leaving_a_plain_loop_leaves_nothing(way: Callable[[Pipe], None], capfd: pytest.CaptureFixture[str]) -> None:
    def test(shape: str, pipe: Callable[[], Pipe]) -> None:
        way(pipe())

    for shape, pipe in ALL.items():
        in_thread(partial(test, shape, pipe))
    assert capfd.readouterr() == ("", "")


def test_a_plain_loop_may_be_closed_while_another_thread_waits_in_it() -> None:
    stream = iter(STUCK["async map"]())
    seen: list[BaseException] = []
    waiting = threading.Event()

    def consume() -> None:
        try:
            for item in stream:
                if item == GOOD - 1:
                    waiting.set()
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert waiting.wait(LONGEST_S)
    stream.close()
    thread.join(LONGEST_S)
    assert [type(error) for error in seen] == [ClosedError]


def test_a_plain_loop_works_inside_a_running_event_loop(run: Run) -> None:
    async def test() -> None:
        assert sl.from_items(range(10)).map(abs).first(5) == [0, 1, 2, 3, 4]

    run(test)


@pytest.mark.long
def test_streams_can_be_opened_one_after_the_other_without_anything_adding_up() -> None:
    for _ in range(60):
        assert sl.from_items(range(10)).shard(2).map(abs, executor="thread").merge().first(3) == [0, 1, 2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_event_loop_that_ends_under_an_unfinished_stream_ends_it(
    loop: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for pipe in ALL.values():
        kept: list[Any] = []

        async def main(pipe: Callable[[], Pipe] = pipe, kept: list[Any] = kept) -> None:
            kept.append(aiter(pipe()))
            await anext(kept[0])

        options = {"use_uvloop": loop == "uvloop"}
        anyio.run(main, backend="asyncio", backend_options=options)
        kept.clear()
        gc.collect()
    assert capfd.readouterr() == ("", "")


def test_a_stream_of_an_ended_event_loop_says_so_when_it_is_asked_in_another(run: Run) -> None:
    kept: list[Any] = []

    async def first() -> None:
        kept.append(aiter(STUCK["async map"]()))
        await anext(kept[0])

    async def second() -> None:
        with pytest.raises(ClosedError):
            [item async for item in kept[0]]

    run_on("asyncio", lambda: _then_end(first))
    run(second)


async def _then_end(main: AsyncTest) -> None:
    await main()
    for task in streamline_tasks():
        task.cancel()


class EndingThread:
    """Ends after so many joins."""

    ident = 1

    def __init__(self, joins: int) -> None:
        self.joins = 0
        self._enough = joins

    def is_alive(self) -> bool:
        return self.joins < self._enough

    def join(self, _: float) -> None:
        self.joins += 1


@pytest.mark.parametrize(("turns", "joins"), [(True, 5), (False, 1)])
def test_a_close_waits_for_a_loop_that_turns_but_not_for_one_that_is_stuck(turns: bool, joins: int) -> None:
    loop_thread = LoopThread[int](sl.from_items(range(3)).open().resolved, Session())
    loop_thread._thread = thread = EndingThread(5)  # type: ignore[assignment]
    loop_thread._wake = lambda call: call() if turns else None
    loop_thread.stop()
    assert thread.joins == joins
