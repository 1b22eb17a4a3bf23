"""Lists between the event loop's thread and a plain loop's: piled up where items take no time, else handed over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import anyio
import pytest

import streamline as sl
import streamline.runtime.thread_bridge
from streamline.core.capacity import LONG_LIST_ITEMS
from streamline.core.flow import Chunk
from streamline.core.state import CountedStates
from streamline.runtime.thread_bridge import SLOW_ITEM_S, TINY_ITEM_S, ThreadBridge

MOST = 4 * LONG_LIST_ITEMS


def chunk(items: int) -> Chunk[int]:
    return Chunk(range(items), CountedStates("items", 1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every list is dealt with in no time."""
    monkeypatch.setattr(streamline.runtime.thread_bridge, "perf_counter", lambda: 1.0)


def quick(handover: ThreadBridge[int]) -> None:
    """Let the consumer be as quick as can be: 4,096 items may be out then."""
    for _ in range(20):
        handover.take(lambda: None, 1.0)  # there is none yet


@pytest.fixture
async def handover(clock: None) -> ThreadBridge[int]:
    found = ThreadBridge[int](MOST)
    found.taken_at = 1.0
    quick(found)
    return found


async def test_lists_of_tiny_items_are_piled_up_until_as_many_are_out_as_may_be(handover: ThreadBridge[int]) -> None:
    for _ in range(4):
        assert await handover.wait_room(None) == LONG_LIST_ITEMS
        assert handover.queue.empty()
        handover.put(chunk(LONG_LIST_ITEMS), 0.0)
    waiting = asyncio.create_task(handover.wait_room(None))
    await asyncio.sleep(0)
    assert handover.queue.qsize() == 4
    found: list[Any] = []
    events: list[anyio.Event] = []
    for number in range(1, 5):
        assert events == []  # the loop is woken when nothing is left
        handover.take(lambda: found.append(handover.queue.get()), 1.0)
        handover.consumed(number * LONG_LIST_ITEMS, events.append)
    assert [len(chunk.items) for chunk in found] == 4 * [LONG_LIST_ITEMS]
    events.pop().set()
    assert await waiting == LONG_LIST_ITEMS


@pytest.mark.parametrize("item_s", [TINY_ITEM_S, 2 * TINY_ITEM_S, SLOW_ITEM_S / 2])
async def test_a_list_that_took_its_time_is_handed_over_at_once_with_those_before(
    handover: ThreadBridge[int], item_s: float
) -> None:
    handover.put(chunk(10), 0.0)
    assert handover.queue.empty()
    handover.put(chunk(10), 10 * item_s)
    assert handover.queue.qsize() == 2


async def test_a_consumer_that_has_not_been_quick_gets_each_list_at_once(clock: None) -> None:
    handover = ThreadBridge[int](MOST)
    handover.put(chunk(2), 0.0)
    assert handover.queue.qsize() == 1


async def test_the_loop_is_woken_behind_each_list_of_a_consumer_that_has_not_been_quick(clock: None) -> None:
    handover = ThreadBridge[int](2)
    handover.put(chunk(1), 0.0)
    handover.put(chunk(1), 0.0)
    waiting = asyncio.create_task(handover.wait_room(None))
    await asyncio.sleep(0)
    events: list[anyio.Event] = []
    for _ in range(3):  # Ctrl-C came in the middle of the first two
        handover.consumed(1, events.append)
    assert len(events) == 1
    events.pop().set()
    assert await waiting == 1


async def test_a_pile_waits_no_longer_than_a_moment(handover: ThreadBridge[int]) -> None:
    """The source may have stopped."""
    handover.put(chunk(10), 0.0)
    handover.put(chunk(10), 0.0)
    assert handover.queue.empty()
    await asyncio.to_thread(handover.queue.get)
    assert handover.queue.qsize() == 1


async def test_what_is_piled_up_comes_before_the_end(handover: ThreadBridge[int]) -> None:
    handover.put(chunk(10), 0.0)
    failure = ValueError("no more")
    handover.end(failure)
    assert isinstance(handover.queue.get_nowait(), Chunk)
    assert handover.queue.get_nowait() is failure


def test_items_before_a_source_that_stops_reach_a_quick_loop() -> None:
    """Those before a wait that never ends: none stays behind in a pile."""
    stops = threading.Event()

    async def source() -> AsyncIterator[int]:
        for item in range(50_000):
            yield item
        stops.set()
        await asyncio.Event().wait()

    with sl.from_iterable(source).open() as stream:
        assert list(islice(stream, 50_000)) == list(range(50_000))
    assert stops.is_set()


def test_items_before_a_failure_reach_a_quick_loop() -> None:
    def source() -> Iterator[int]:
        yield from range(50_000)
        raise ValueError("no more")

    with sl.from_iterable(source).open() as stream:
        assert list(islice(stream, 50_000)) == list(range(50_000))
        with pytest.raises(ValueError, match="no more"):
            next(stream)
