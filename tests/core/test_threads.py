"""A few threads for sync user code."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from streamline.core import threads as starter
from streamline.core.threads import SerialExecutor, ThreadPool, run_uninterrupted, start_thread, threadsafe_call
from streamline.errors import HostError

STARTER = starter.__file__


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(max_threads=3)
    yield pool
    pool.close()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "streamline map"}


async def test_it_returns_what_the_function_returned_in_another_thread(pool: ThreadPool) -> None:
    assert await pool.run(threading.current_thread) is not threading.current_thread()


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system have room for the two threads of ours that come first."""
    start, left = threading.Thread.start, iter([True, True])

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if thread.name.startswith("streamline") and not next(left, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)


@pytest.mark.usefixtures("no_room")
async def test_where_no_more_threads_can_be_started_those_that_are_there_do_the_work(
    pool: ThreadPool, caplog: pytest.LogCaptureFixture
) -> None:
    names, others = set[str](), ThreadPool()

    async def work(by: ThreadPool) -> None:
        names.add(await by.run(lambda: threading.current_thread().name))

    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(work, pool)
    assert names == {"streamline map"}
    assert len(threads()) == 2
    names.clear()
    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(work, others)
    assert names == {threading.current_thread().name}
    one = SerialExecutor("streamline files")
    assert one.submit(threading.current_thread).result() is threading.current_thread()
    assert one.submit(lambda: 1 // 0).exception() is not None
    one.shutdown()
    said = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(". ")[2] for text in said] == [
        "Going on with 2 threads", "Going on with 0 threads", "Going on without it"
    ]  # fmt: skip
    assert "the thread 'streamline map' can't be started: can't start new thread. Raise the limits" in said[0]


async def test_a_function_that_raises_all_the_same_fails_its_caller_and_not_the_thread(pool: ThreadPool) -> None:
    def out_of_memory() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        await pool.run(out_of_memory)
    assert await pool.run(lambda: 1) == 1
    assert len(threads()) == 1


async def test_a_result_of_none_is_a_result(pool: ThreadPool) -> None:
    fn: Callable[[], object] = lambda: None  # noqa: E731 - typed: a function without a result has none to compare
    assert await pool.run(fn) is None


async def test_calls_run_at_once_up_to_the_limit(pool: ThreadPool) -> None:
    barrier = threading.Barrier(3, timeout=200)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(pool.run, barrier.wait)
    assert len(threads()) == 3


async def test_more_calls_than_threads_wait_their_turn(pool: ThreadPool) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    barrier = threading.Barrier(3, timeout=200)
    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(pool.run, work)
    assert most == 3
    assert len(threads()) == 3


async def test_one_call_after_another_needs_one_thread(pool: ThreadPool) -> None:
    found = {await pool.run(threading.current_thread) for _ in range(20)}
    assert len(found) == 1
    assert len(threads()) == 1


async def test_threads_are_daemons_so_a_stuck_one_blocks_no_exit(pool: ThreadPool) -> None:
    assert await pool.run(lambda: threading.current_thread().daemon)


async def test_a_cancelled_call_returns_at_once_and_the_next_one_works(pool: ThreadPool) -> None:
    started, release = threading.Event(), threading.Event()

    def stuck() -> bool:
        started.set()
        return release.wait(200)

    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, stuck)
        assert await pool.run(lambda: started.wait(200))
        group.cancel_scope.cancel()
    assert not release.is_set()
    assert await pool.run(lambda: "next") == "next"
    release.set()


def test_closing_lets_every_thread_end() -> None:
    async def main() -> set[threading.Thread]:
        pool = ThreadPool(max_threads=2)
        barrier = threading.Barrier(2, timeout=200)
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, barrier.wait)
            group.start_soon(pool.run, barrier.wait)
        mine = threads()
        pool.close()
        pool.close()
        return mine

    for thread in anyio.run(main):
        thread.join(200)
        assert not thread.is_alive()


def test_a_call_that_ends_after_its_loop_ends_quietly() -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        release.wait(200)
        ended.set()

    async def main() -> None:
        pool = ThreadPool()
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, stuck)
            await anyio.to_thread.run_sync(begun.wait, 200)
            group.cancel_scope.cancel()
        pool.close()

    anyio.run(main)
    (thread,) = threads()
    release.set()
    thread.join(200)
    assert ended.is_set()
    assert not thread.is_alive()


async def test_a_waker_reaches_the_loop_from_another_thread() -> None:
    event = anyio.Event()
    wake: Callable[[Callable[[], None]], object] = threadsafe_call()
    thread = threading.Thread(target=lambda: wake(event.set))
    thread.start()
    with anyio.fail_after(200):
        await event.wait()
    thread.join()


async def test_a_call_that_was_cancelled_while_it_waited_is_not_made() -> None:
    pool, started, release, begun = ThreadPool(1), threading.Event(), threading.Event(), list[str]()

    def stuck() -> None:
        started.set()
        release.wait(200)

    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, stuck)
        await anyio.to_thread.run_sync(started.wait)
        group.start_soon(pool.run, lambda: begun.append("cancelled"))
        await anyio.wait_all_tasks_blocked()
        assert pool.crowded
        group.cancel_scope.cancel()
    release.set()
    assert await pool.run(lambda: "next") == "next"
    assert begun == []
    assert pool._pending == 0
    pool.close()


def test_a_thread_of_storages_ends_with_an_owner_that_was_never_closed() -> None:
    """Ctrl-C may come between its making and what closes it, or in the middle of that."""
    one = SerialExecutor("streamline files")
    assert one.submit(abs, -1).result(200) == 1
    thread = one._thread
    assert thread is not None
    del one
    gc.collect()
    thread.join(200)
    assert not thread.is_alive()


def test_an_interrupt_while_a_thread_starts_is_no_lack_of_room() -> None:
    """It may come wherever this thread is, and the other one, which starts it, goes on: none is left half started."""
    place = passed = 0

    def strike(frame: FrameType, event: str, arg: object) -> None:
        nonlocal passed
        if event in ("call", "c_return") and sys._getframe(1).f_code.co_filename == STARTER:
            passed += 1
            if passed > place:
                raise KeyboardInterrupt

    for place in range(200):  # noqa: B007 - read above
        passed, ran = 0, threading.Event()
        thread = threading.Thread(target=ran.set, daemon=True)
        sys.setprofile(strike)
        try:
            start_thread(thread)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.setprofile(None)
        if thread.ident is not None:
            assert ran.wait(200)
            thread.join(200)
        assert thread not in threading.enumerate()
    assert place > 5
    assert ran.wait(200)


def cancelled_by_a_scope(call: Callable[[], Coroutine[Any, Any, Any]], begun: threading.Event) -> Awaitable[None]:
    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await anyio.to_thread.run_sync(begun.wait, 200)
            group.cancel_scope.cancel()

    return run()


def cancelled_as_asyncio_does(call: Callable[[], Coroutine[Any, Any, Any]], begun: threading.Event) -> Awaitable[None]:
    async def run() -> None:
        task = asyncio.ensure_future(call())
        await anyio.to_thread.run_sync(begun.wait, 200)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    return run()


@pytest.mark.parametrize("cancelled", [cancelled_by_a_scope, cancelled_as_asyncio_does])
async def test_a_caller_that_is_cancelled_waits_for_its_call_into_a_library(pool: ThreadPool, cancelled: Any) -> None:
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        assert not ended.wait(0.1)
        ended.set()

    await cancelled(partial(pool.run, read, "a file"), begun)
    assert ended.is_set()


@pytest.mark.parametrize("cancelled", [cancelled_by_a_scope, cancelled_as_asyncio_does])
async def test_a_call_into_a_library_that_does_not_end_is_left_behind_with_a_warning(
    pool: ThreadPool, cancelled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamline.core.threads.CALL_S", 0.01)
    begun, release = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        release.wait(200)

    await cancelled(partial(pool.run, read, "a.h5"), begun)
    release.set()
    assert [record.getMessage() for record in caplog.records] == [
        "closed; a thread is still at work on a.h5 after 0.01 s, and is left"
    ]


async def test_a_call_into_a_library_that_was_cancelled_before_it_began_is_not_made(pool: ThreadPool) -> None:
    begun, release, made = threading.Event(), threading.Event(), list[int]()

    def stuck() -> None:
        begun.set()
        release.wait(200)

    one = ThreadPool(max_threads=1)
    async with anyio.create_task_group() as group:
        group.start_soon(one.run, stuck)
        await anyio.to_thread.run_sync(begun.wait, 200)
        group.start_soon(one.run, lambda: made.append(1), "a file")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    release.set()
    assert await one.run(lambda: "next", "a file") == "next"
    one.close()
    assert made == []


def test_work_that_nothing_disturbs_is_done_whole_though_its_caller_is_interrupted() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(200)
        done.set()

    def strike() -> None:
        begun.wait(200)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    other = threading.Thread(target=strike)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(work)
    go_on.set()
    assert done.wait(200)
    other.join()


def test_what_such_work_raises_comes_out_and_so_does_its_context() -> None:
    said: ContextVar[str] = ContextVar("said")
    said.set("here")

    def work() -> None:
        raise HostError(f"{said.get()}, in {threading.current_thread().name}")

    with pytest.raises(HostError, match=r"^here, in streamline opening$"):
        run_uninterrupted(work)
