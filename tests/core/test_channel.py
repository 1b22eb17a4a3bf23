"""Channels: capacity in items and bytes, lists that stay open, ends, and receivers that are cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import streamline.core.pace
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Inbox
from streamline.core.driver import drive
from streamline.core.flow import Chunk, Flow
from streamline.core.pace import HANDOVER_S
from streamline.core.state import At, CountedStates
from streamline.errors import ClosedError
from streamline.merge.base import Inboxes
from streamline.merge.best_effort import BestEffortMerge
from tests.kit import AsyncTest

Run = Callable[[AsyncTest], None]

BEGIN = At("items", 0)


def chunk_of(*items: Any, first: int = 1) -> Chunk[Any]:
    return Chunk(list(items), CountedStates("items", first))


async def send(channel: Channel[Any], *items: Any, first: int = 1) -> None:
    await channel.send(chunk_of(*items, first=first))


async def items_of(inbox: Inbox[Any], limit: int = 256) -> Sequence[Any]:
    chunk = await inbox.pull(limit)
    assert chunk is not None
    return list(chunk.items)


@pytest.fixture
def channel() -> Channel[Any]:
    return Channel(BEGIN, Capacity(8))


def test_a_list_that_waits_takes_what_is_sent_next(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        await send(channel, 1)
        await send(channel, 2, first=2)
        await send(channel, 3, first=3)
        assert await items_of(channel.inbox) == [1, 2, 3]
        channel.abandon()

    run(test)


def test_room_counts_what_the_receiver_took_until_it_asks_again(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        await send(channel, 1, 2, 3)
        assert channel.capacity.room == 5
        await items_of(channel.inbox)
        assert channel.capacity.room == 5
        channel.inbox.release()
        assert channel.capacity.room == 8
        channel.abandon()

    run(test)


def test_a_sender_waits_for_room_and_goes_on_when_it_is_freed(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        await send(channel, *range(8))
        waited: list[int] = []

        async def wait() -> None:
            waited.append(await channel.wait_room())

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert waited == []
            while not waited:
                await items_of(channel.inbox, 3)
                channel.inbox.release()
                await anyio.wait_all_tasks_blocked()
        assert waited[0] >= 1
        channel.abandon()

    run(test)


async def test_a_list_that_is_taken_in_parts_gives_back_the_bytes_of_each() -> None:
    channel: Channel[bytes] = Channel(BEGIN, Capacity(100, 10**6))
    await send(channel, bytes(1000), bytes(10), bytes(1))
    for size in (1000, 10, 1):
        assert await items_of(channel.inbox, 1) == [bytes(size)]
    channel.inbox.release()
    assert (channel.capacity.held, channel.capacity.held_bytes) == (0, 0)
    channel.abandon()


def test_an_item_larger_than_the_byte_budget_passes_alone(run: Run) -> None:
    async def test() -> None:
        channel: Channel[bytes] = Channel(BEGIN, Capacity(100, 1000))
        await send(channel, bytes(5000))
        sent: list[int] = []

        async def send_another() -> None:
            await send(channel, b"x", first=2)
            sent.append(2)

        async with anyio.create_task_group() as group:
            group.start_soon(send_another)
            await anyio.wait_all_tasks_blocked()
            assert sent == []
            assert await items_of(channel.inbox) == [bytes(5000)]
            channel.inbox.release()
            assert await items_of(channel.inbox) == [b"x"]
        assert sent == [2]
        channel.abandon()

    run(test)


def test_the_receiver_has_all_items_before_the_failure_and_then_the_failure_for_ever(
    run: Run, channel: Channel[Any]
) -> None:
    async def test() -> None:
        error = ValueError("bad")
        await send(channel, 1, 2)
        channel.fail(error)
        assert await items_of(channel.inbox, 1) == [1]
        assert await items_of(channel.inbox, 1) == [2]
        for _ in range(3):
            with pytest.raises(ValueError, match="bad") as raised:
                await channel.inbox.pull()
            assert raised.value is error
        channel.abandon()

    run(test)


def test_a_failure_wakes_a_receiver_that_waits(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        seen: list[BaseException] = []

        async def receive() -> None:
            try:
                await channel.inbox.pull()
            except ValueError as error:
                seen.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            channel.fail(ValueError("bad"))
        assert len(seen) == 1
        channel.abandon()

    run(test)


def test_an_abandoned_channel_is_an_error_for_its_receiver_not_an_end(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        seen: list[BaseException] = []

        async def receive() -> None:
            try:
                await channel.inbox.pull()
            except ClosedError as error:
                seen.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            channel.abandon()
        assert len(seen) == 1
        with pytest.raises(ClosedError):
            await channel.inbox.pull()

    run(test)


def test_progress_passes_after_the_items_before_it_and_only_the_last_is_kept(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        await send(channel, 1)
        for done in (7, 8, 9):
            channel.post(Chunk((), (), At("items", done)))
        first = await channel.inbox.pull(1)
        assert first is not None
        assert first.items == [1]
        assert first.end.json() == {"items": 9}
        assert channel.inbox.state.json() == {"items": 9}
        channel.post(Chunk((), (), At("items", 12)))
        later = await channel.inbox.pull(1)
        assert later is not None
        assert not later.items
        assert channel.inbox.state.json() == {"items": 12}
        channel.abandon()

    run(test)


def test_progress_that_an_item_overtakes_is_not_adopted_early(run: Run, channel: Channel[Any]) -> None:
    async def test() -> None:
        await send(channel, 1, 2)
        channel.post(Chunk((), (), At("items", 9)))
        await channel.inbox.pull(1)
        assert channel.inbox.state.json() == {"items": 1}
        channel.abandon()

    run(test)


@pytest.mark.parametrize("native", [True, False])
def test_a_receiver_cancelled_in_the_moment_of_a_send_loses_nothing(
    run: Run, channel: Channel[Any], native: bool
) -> None:
    async def test() -> None:
        got: list[Any] = []
        scope = anyio.CancelScope()

        async def receive() -> None:
            with scope:
                got.extend(await items_of(channel.inbox))

        task = asyncio.get_running_loop().create_task(receive())
        await anyio.wait_all_tasks_blocked()
        await send(channel, 1)
        task.cancel() if native else scope.cancel()
        await asyncio.wait([task])
        await send(channel, 2, first=2)
        channel.finish()
        while (chunk := await channel.inbox.pull()) is not None:
            got.extend(chunk.items)
        assert got == [1, 2]
        channel.abandon()

    run(test)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("best_effort", [False, True])
def test_a_receiver_that_is_sent_something_each_turn_can_be_cancelled(
    run: Run, channel: Channel[Any], native: bool, best_effort: bool
) -> None:
    async def test() -> None:
        scope, received = anyio.CancelScope(), 0
        merge = BestEffortMerge("merge", Inboxes.of([channel.inbox]), max_skips_per_round=2, max_lead=8)
        flow = merge if best_effort else channel.inbox

        async def receive() -> None:
            nonlocal received
            with scope:
                while received < 100:
                    await flow.pull()
                    received += 1

        loop = asyncio.get_running_loop()
        task = loop.create_task(receive())
        cancel: Callable[[], object] = task.cancel if native else scope.cancel
        for turn in range(200):
            channel.post(Chunk((), (), At("items", turn)))
            if turn == 10:  # so that each turn it is tried between a post and its receipt
                loop.call_soon(loop.call_soon, cancel)
            await anyio.lowlevel.checkpoint()
        await asyncio.wait([task])
        assert received < 20
        channel.abandon()

    run(test)


@pytest.mark.parametrize("native", [True, False])
def test_a_receiver_cancelled_as_the_channel_fails_gets_the_failure_next_time(
    run: Run, channel: Channel[Any], native: bool
) -> None:
    async def test() -> None:
        scope = anyio.CancelScope()

        async def receive() -> None:
            with scope:
                await items_of(channel.inbox)

        task = asyncio.get_running_loop().create_task(receive())
        await anyio.wait_all_tasks_blocked()
        channel.fail(ValueError("bad"))
        task.cancel() if native else scope.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        for _ in range(2):
            with pytest.raises(ValueError, match="bad"):
                await channel.inbox.pull()
        channel.abandon()

    run(test)


@pytest.mark.parametrize("seed", range(6))
def test_random_sends_receives_and_cancellations_keep_every_item_and_its_state(run: Run, seed: int) -> None:
    chance = random.Random(seed)

    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(chance.randint(1, 9)))
        got: list[int] = []

        async def sender() -> None:
            sent = 0
            while sent < 200:
                count = min(chance.randint(1, await channel.wait_room()), 200 - sent)
                await channel.send(chunk_of(*range(sent, sent + count), first=sent + 1))
                sent += count
                for _ in range(chance.choice([0, 0, 1, 3])):
                    await anyio.lowlevel.checkpoint()
            channel.finish()

        async def receive() -> bool:
            chunk = await channel.inbox.pull(chance.randint(1, 5))
            if chunk is None:
                return False
            got.extend(chunk.items)
            return True

        async with anyio.create_task_group() as group:
            group.start_soon(sender)
            while True:
                task = asyncio.get_running_loop().create_task(receive())
                for _ in range(chance.choice([1, 1, 2, 3, 5])):
                    await anyio.lowlevel.checkpoint()
                if chance.random() < 0.5:
                    task.cancel()
                await asyncio.wait([task])
                assert channel.capacity.held <= channel.capacity.items
                assert channel.inbox.state.json() == {"items": len(got)}
                if not task.cancelled() and not task.result():
                    break
        assert got == list(range(200))
        channel.abandon()

    run(test)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pace's clock goes on by most of a slice a pull; what gives way is taken down."""
    seen: list[str] = []
    real = anyio.lowlevel.checkpoint
    monkeypatch.setattr(streamline.core.pace, "perf_counter", lambda: seen.count("pull") * 0.75 * HANDOVER_S)

    async def checkpoint() -> None:
        seen.append("gives way")
        await real()

    monkeypatch.setattr(streamline.core.pace, "checkpoint", checkpoint)
    return seen


class Ticking(Flow[int]):
    """Gives a list of one item a pull, ten in all."""

    def __init__(self, ticks: list[str]) -> None:
        super().__init__(BEGIN)
        self._ticks = ticks

    async def _next(self, limit: int) -> Chunk[int] | None:
        if self._ticks.count("pull") == 10:
            return None
        self._ticks.append("pull")
        return Chunk([1], CountedStates("items", self._ticks.count("pull")))


def test_a_driver_that_waited_for_room_has_given_way(run: Run, ticks: list[str]) -> None:
    async def test() -> None:
        channel: Channel[int] = Channel(BEGIN, Capacity(1))
        async with anyio.create_task_group() as group:
            group.start_soon(drive, Ticking(ticks), channel, channel.gate)
            while await channel.inbox.pull() is not None:
                pass
        assert ticks == ["pull"] * 10
        channel.abandon()

    run(test)


@pytest.mark.parametrize(("capacity", "held", "last"), [(100, 0, False), (2000, 1000, False), (100, 0, True)])
def test_a_driver_that_finds_room_gives_way_when_its_slice_is_over(
    run: Run, ticks: list[str], capacity: int, held: int, last: bool
) -> None:
    async def test() -> None:
        channel: Channel[int] = Channel(
            BEGIN, Capacity(capacity, 10**6)
        )  # after a list, one by one: little room, no wait
        channel.turns = 1 if last else 2
        for _ in range(held):
            channel.admit(0, (BEGIN,), 1)
        await drive(Ticking(ticks), channel, channel.gate)
        assert ticks == ["pull", "pull", *["gives way"] * (1 if last else 2)] * 5
        channel.abandon()

    run(test)


@pytest.mark.parametrize("bytes_", [None, 10**6])
@pytest.mark.parametrize("capacity", [1, 8, 255, 256, 300, 342, 512, 2000])
def test_there_is_room_at_once_exactly_where_waiting_for_it_takes_no_time(
    run: Run, capacity: int, bytes_: int | None
) -> None:
    async def test() -> None:
        for held in range(0, capacity + 1, max(1, capacity // 30)):
            channel: Channel[int] = Channel(BEGIN, Capacity(capacity, bytes_))
            channel.reserve(held)
            with anyio.CancelScope() as scope:
                scope.cancel()
                room = await channel.wait_room()
                assert room == channel.room_at_once == channel.capacity.room
            assert scope.cancelled_caught == (channel.room_at_once == 0)
            channel.abandon()

    run(test)
