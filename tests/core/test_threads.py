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
from queue import SimpleQueue
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from streamline.core import threads as starter
from streamline.core.threads import OneThread, ThreadPool, ThreadShare, start_thread, undisturbed, waker
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

    async def work(by: ThreadPool | ThreadShare) -> None:
        names.add(await by.run(lambda: threading.current_thread().name))

    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(work, pool)
    assert names == {"streamline map"}
    assert len(threads()) == 2
    names.clear()
    async with anyio.create_task_group() as group:
        share = others.share(3)
        for _ in range(9):
            group.start_soon(work, others)
            group.start_soon(work, share)
    assert names == {threading.current_thread().name}
    one = OneThread("streamline files")
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

    for by in (pool, pool.share(1)):
        with pytest.raises(MemoryError):
            await by.run(out_of_memory)
        assert await by.run(lambda: 1) == 1
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


@pytest.mark.parametrize(("limit", "calls"), [(3, 9), (2, 8)], ids=["all threads of a pool", "those of a share"])
async def test_more_calls_than_threads_wait_their_turn(pool: ThreadPool, limit: int, calls: int) -> None:
    running, most, lock = 0, 0, threading.Lock()
    run = pool.run if limit == 3 else pool.share(limit).run

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    barrier = threading.Barrier(limit, timeout=200)
    async with anyio.create_task_group() as group:
        for _ in range(calls):
            group.start_soon(run, work)
    assert most == limit
    assert len(threads()) == limit


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
    wake: Callable[[Callable[[], None]], object] = waker()
    thread = threading.Thread(target=lambda: wake(event.set))
    thread.start()
    with anyio.fail_after(200):
        await event.wait()
    thread.join()


async def test_a_thread_goes_on_to_the_next_call_of_a_share_while_the_event_loop_is_held(pool: ThreadPool) -> None:
    share, second = pool.share(1), threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(share.run, lambda: None)
        group.start_soon(share.run, second.set)
        await anyio.lowlevel.checkpoint()
        assert second.wait(200)  # the loop stands still meanwhile


async def test_calls_of_a_share_begin_in_order(pool: ThreadPool) -> None:
    share, begun = pool.share(1), list[int]()
    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(share.run, lambda number=number: begun.append(number))
    assert begun == list(range(20))


async def test_a_call_that_was_cancelled_while_it_waited_is_not_made(pool: ThreadPool) -> None:
    share, started, release, begun = pool.share(1), threading.Event(), threading.Event(), list[str]()

    def stuck() -> None:
        started.set()
        release.wait(200)

    async with anyio.create_task_group() as group:
        group.start_soon(share.run, stuck)
        group.start_soon(share.run, lambda: begun.append("cancelled"))
        assert await pool.run(lambda: started.wait(200))
        group.cancel_scope.cancel()
    release.set()
    assert await share.run(lambda: "next") == "next"
    assert begun == []


async def test_a_share_whose_calls_were_cancelled_has_all_its_threads_again(pool: ThreadPool) -> None:
    share = pool.share(2)
    with anyio.move_on_after(0):
        await share.run(lambda: None)
    barrier = threading.Barrier(2, timeout=200)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(share.run, barrier.wait)


async def test_a_share_that_is_resized_begins_more_calls_at_once_or_fewer_later(
    pool: ThreadPool,
) -> None:
    share, release = pool.share(1), [threading.Semaphore(0) for _ in range(6)]
    begun: SimpleQueue[int] = SimpleQueue()

    def call(number: int) -> None:
        begun.put(number)
        release[number].acquire()

    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(share.run, partial(call, number))
        await _comes(begun, [0])
        share.resize(3)
        await _comes(begun, [1, 2])
        share.resize(2)
        release[0].release()
        release[1].release()
        await _comes(begun, [3])
        assert share._busy == 2
        share.resize(1)
        share.resize(3)  # before any has ended
        await _comes(begun, [4])
        for each in release:
            each.release()
    assert pool._pending == 0


async def _comes(queue: SimpleQueue[int], numbers: list[int]) -> None:
    """Wait for numbers, in any order."""
    found = [await anyio.to_thread.run_sync(queue.get) for _ in numbers]
    assert sorted(found) == numbers


def test_a_thread_of_storages_ends_with_an_owner_that_was_never_closed() -> None:
    """Ctrl-C may come between its making and what closes it, or in the middle of that."""
    one = OneThread("streamline files")
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
        undisturbed(work)
    go_on.set()
    assert done.wait(200)
    other.join()


def test_what_such_work_raises_comes_out_and_so_does_its_context() -> None:
    said: ContextVar[str] = ContextVar("said")
    said.set("here")

    def work() -> None:
        raise HostError(f"{said.get()}, in {threading.current_thread().name}")

    with pytest.raises(HostError, match=r"^here, in streamline opening$"):
        undisturbed(work)
