"""Calls of a map in threads: a thread goes on by itself, in order, within its bound, and lets others take turns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable
from itertools import islice

import anyio
import pytest

import streamline as sl
from streamline.core import threads
from streamline.core.threads import ThreadPool
from streamline.transforms import concurrent
from tests.kit import AsyncTest


async def test_a_thread_goes_on_to_the_next_item_while_the_event_loop_is_held() -> None:
    second = threading.Event()

    def call(item: int) -> int:
        if item == 1:
            second.set()
        return item

    async with sl.from_items(range(60)).map(call, executor="thread", concurrency=1).open() as stream:
        first = await anext(stream)
        assert second.wait(200)  # the loop stands still meanwhile
        assert [first, *[item async for item in stream]] == list(range(60))


@pytest.mark.parametrize("ordered", [True, False])
def test_one_thread_calls_in_the_order_of_the_inputs(ordered: bool, run: Callable[[AsyncTest], None]) -> None:
    called: list[int] = []

    def call(item: int) -> int:
        called.append(item)
        return item

    async def test() -> None:
        pipe = sl.from_items(range(500)).map(call, executor="thread", concurrency=1, ordered=ordered)
        async with pipe.open() as stream:
            assert [item async for item in stream] == list(range(500))

    run(test)
    assert called == list(range(500))


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_calls_run_at_once_than_there_are_threads(threads: int) -> None:
    running, most, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(threads, timeout=200)

    def call(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if item < threads:
            barrier.wait()
        with lock:
            running -= 1
        return item

    pipe = sl.from_items(range(200)).map(call, executor="thread", concurrency=threads)
    assert list(pipe) == list(range(200))
    assert most == threads


def test_stages_whose_threads_are_fewer_than_they_ask_for_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread in all, and two stages of which the second needs what the first has done."""
    monkeypatch.setattr(ThreadPool.__init__, "__defaults__", (1,))
    pipe = sl.from_items(range(10**9))
    for _ in range(2):
        pipe = pipe.map(abs, executor="thread", concurrency=2)
    with pipe.open() as stream:
        assert list(islice(stream, 2_000)) == list(range(2_000))


def test_what_is_skipped_in_a_thread_keeps_its_place() -> None:
    def call(item: int) -> int:
        if item % 50 == 7:
            raise ValueError(item)
        return item

    pipe = sl.from_items(range(300)).map(call, executor="thread", concurrency=2)
    with pipe.open(on_error="skip") as stream:
        assert list(stream) == [item for item in range(300) if item % 50 != 7]


def test_nothing_after_a_failed_item_is_called_by_one_thread() -> None:
    called: list[int] = []

    def call(item: int) -> int:
        called.append(item)
        if item == 40:
            raise ValueError(item)
        return item

    found: list[int] = []
    with pytest.raises(ValueError, match="40"):
        found.extend(sl.from_items(range(300)).map(call, executor="thread", concurrency=1))
    assert called == list(range(41))


class Followed:
    """An item that can be referred to weakly."""

    def __init__(self, number: int) -> None:
        self.number = number


async def one_by_one() -> AsyncIterator[Followed]:
    for number in range(4):
        await anyio.wait_all_tasks_blocked()
        yield Followed(number)


async def check_freed(freed: threading.Event, call: Callable[[Followed], Followed], ordered: bool) -> None:
    """Whoever lets go of a batch frees its memory; a host sends one without a copy if nothing else there holds it."""
    pipe = sl.from_iterable(one_by_one).map(call, executor="thread", concurrency=1, ordered=ordered)
    async with pipe.open() as stream:
        first = weakref.ref(await anext(stream))
        held = first()
        freed.set()
        assert held is None
        assert [item.number async for item in stream] == [1, 2, 3]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_thread_at_its_next_item_holds_nothing_of_the_one_before(ordered: bool) -> None:
    freed = threading.Event()

    def call(item: Followed) -> Followed:
        if item.number == 1:
            assert freed.wait(200)
        return item

    await check_freed(freed, call, ordered)


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_thread_holds_nothing_of_an_item_that_is_on_its_way(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = threading.Event()

    def threadsafe_call() -> Callable[[Callable[[], None]], None]:
        wake = threads.threadsafe_call()

        def wake_and_stand_still(work: Callable[[], None]) -> None:
            wake(work)
            del work
            assert freed.wait(200)

        return wake_and_stand_still

    monkeypatch.setattr(concurrent, "threadsafe_call", threadsafe_call)
    await check_freed(freed, lambda item: item, ordered)
