"""Lists between the event loop's thread and a plain loop's: piled up where items take no time, else handed over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import pytest

import streamline as sl
import streamline.runtime.thread_bridge
from streamline.core.capacity import LONG_LIST_ITEMS
from streamline.core.flow import Chunk
from streamline.core.gate import Rest
from streamline.core.pace import HANDOVER_S
from streamline.core.state import CountedStates
from streamline.runtime.thread_bridge import SLOW_ITEM_S, TINY_ITEM_S, ConsumerCapacity, ThreadBridge

MOST = 4 * LONG_LIST_ITEMS


def chunk(items: int) -> Chunk[int]:
    return Chunk(range(items), CountedStates("items", 1))


class Clock:
    """The time that the bridge reads."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every list is made, and dealt with, in no time."""
    clock = Clock()
    monkeypatch.setattr(streamline.runtime.thread_bridge, "perf_counter", clock)
    return clock


@pytest.fixture
async def bridge(clock: Clock) -> ThreadBridge[int]:
    """The bridge to a consumer that is as quick as can be: 4,096 items may be out."""
    found = ThreadBridge[int](ConsumerCapacity(MOST))
    found.consumer.taken_at = 1.0
    for _ in range(20):
        found.consumer.take(lambda: None, 1.0, Rest.set)  # there is none yet
    return found


async def sent(bridge: ThreadBridge[int], clock: Clock, items: int, item_s: float = 0.0) -> None:
    """Send a list whose items took so long each."""
    bridge.pull_size(items)
    clock.now += items * item_s
    await bridge.send(chunk(items))


async def test_lists_of_tiny_items_are_piled_up_until_as_many_are_out_as_may_be(
    bridge: ThreadBridge[int], clock: Clock
) -> None:
    queue = bridge.consumer.queue
    for _ in range(4):
        assert bridge.pull_size(await bridge.wait_room()) == (LONG_LIST_ITEMS, 1)
        assert queue.empty()
        await sent(bridge, clock, LONG_LIST_ITEMS)
    waiting = asyncio.create_task(bridge.wait_room())
    await asyncio.sleep(0)
    assert queue.qsize() == 4
    found: list[Any] = []
    events: list[Rest] = []
    for number in range(1, 5):
        assert events == []  # the loop is woken when nothing is left
        bridge.consumer.take(lambda: found.append(queue.get()), clock.now, events.append)
        bridge.consumer.note_consumed(number * LONG_LIST_ITEMS, events.append)
    assert [len(chunk.items) for chunk in found] == 4 * [LONG_LIST_ITEMS]
    events.pop().set()
    assert await waiting == MOST


async def test_a_list_that_took_its_time_is_handed_over_at_once_with_those_before(
    bridge: ThreadBridge[int], clock: Clock
) -> None:
    await sent(bridge, clock, 1)
    await sent(bridge, clock, LONG_LIST_ITEMS)
    assert bridge.consumer.queue.empty()
    await sent(bridge, clock, 1, 2 * HANDOVER_S)
    assert bridge.consumer.queue.qsize() == 3


@pytest.mark.parametrize("item_s", [TINY_ITEM_S, 2 * TINY_ITEM_S, SLOW_ITEM_S / 2])
async def test_what_is_sent_before_the_driver_gives_way_is_handed_over_as_one_list(
    bridge: ThreadBridge[int], clock: Clock, item_s: float
) -> None:
    for _ in range(3):
        await sent(bridge, clock, 10, item_s)
    assert bridge.consumer.queue.empty()
    await asyncio.sleep(0)
    found = bridge.consumer.queue.get_nowait()
    assert isinstance(found, Chunk)
    assert list(found.items) == 3 * list(range(10))
    assert [found.states[at].json() for at in range(30)] == 3 * [{"items": at + 1} for at in range(10)]
    assert bridge.consumer.queue.empty()


async def test_the_loop_is_woken_when_a_consumer_that_is_not_quick_leaves_a_quarter_free(clock: Clock) -> None:
    bridge = ThreadBridge[int](ConsumerCapacity(2))
    bridge.capacity.begin()
    for _ in range(2):
        await sent(bridge, clock, 1)
    waiting = asyncio.create_task(bridge.wait_room())
    await asyncio.sleep(0)
    events: list[Rest] = []
    for _ in range(3):  # Ctrl-C came in the middle of the first two
        bridge.consumer.note_consumed(1, events.append)
    assert len(events) == 1
    events.pop().set()
    assert await waiting == 1


async def test_a_pile_waits_no_longer_than_a_moment(bridge: ThreadBridge[int], clock: Clock) -> None:
    """The source may have stopped."""
    for _ in range(2):
        await sent(bridge, clock, LONG_LIST_ITEMS)
    assert bridge.consumer.queue.empty()
    await asyncio.to_thread(bridge.consumer.queue.get)
    assert bridge.consumer.queue.qsize() == 1


async def test_what_is_piled_up_comes_before_the_end(bridge: ThreadBridge[int], clock: Clock) -> None:
    await sent(bridge, clock, 10)
    failure = ValueError("no more")
    bridge.fail(failure)
    assert isinstance(bridge.consumer.queue.get_nowait(), Chunk)
    assert bridge.consumer.queue.get_nowait() is failure


async def test_no_more_bytes_are_out_than_may_be_but_one_list_always(clock: Clock) -> None:
    bridge = ThreadBridge[bytes](ConsumerCapacity(2, 100, 1000))
    bridge.capacity.begin()
    for at in range(2):
        bridge.pull_size(1)
        sending = asyncio.create_task(bridge.send(Chunk([bytes(2000)], CountedStates("items", at))))
        await asyncio.sleep(0)
        assert sending.done() == (at == 0)
    await asyncio.sleep(0)
    bridge.consumer.note_consumed(1, lambda freed: freed.set())
    await sending
    assert bridge.capacity.held == 1


async def test_items_are_made_when_the_consumer_asks_and_ahead_when_it_has_one(clock: Clock) -> None:
    bridge = ThreadBridge[int](ConsumerCapacity(4096, 512))
    assert bridge.room_at_once == 0
    waiting = asyncio.create_task(bridge.wait_room())
    await asyncio.sleep(0)
    bridge.consumer.take(lambda: None, 1e6, Rest.set)
    assert await waiting == 2
    await sent(bridge, clock, 1)
    assert bridge.room_at_once == 1
    bridge.consumer.note_consumed(1, lambda freed: None)
    assert bridge.room_at_once == 512


async def test_it_begins_without_a_consumer_too(clock: Clock) -> None:
    """One that comes later finds them ready."""
    bridge = ThreadBridge[int](ConsumerCapacity(4096, 512))
    assert await bridge.wait_room() == 2
    for _ in range(2):
        await sent(bridge, clock, 1)
    assert await bridge.wait_room() == 510


async def test_the_loop_holds_still_after_slow_items_alone(
    bridge: ThreadBridge[int], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[int]()
    monkeypatch.setattr(bridge.consumer, "let_take", lambda: held.append(bridge.consumer.queue.qsize()))
    await sent(bridge, clock, LONG_LIST_ITEMS, SLOW_ITEM_S / 2)
    assert (bridge.consumer.queue.qsize(), held) == (1, [])
    await sent(bridge, clock, 100, 2 * SLOW_ITEM_S)
    assert held == [2]


def test_a_consumer_that_waits_is_let_take_a_slow_list_and_no_other_is_waited_for() -> None:
    bridge = ThreadBridge[int](ConsumerCapacity(2))
    consumer, took = bridge.consumer, threading.Event()

    def take() -> None:
        consumer.take(consumer.queue.get, 1.0, Rest.set)
        took.set()

    consumer.let_take()  # nobody waits
    thread = threading.Thread(target=take)
    thread.start()
    while not consumer._waits:
        time.sleep(0.001)
    consumer.queue.put(None)
    consumer.let_take()
    thread.join()
    assert took.is_set()


@pytest.mark.long
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
