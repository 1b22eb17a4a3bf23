"""Lists go on over several slices of user code while their reader can't use fewer items, and not for one call more."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

import streamline as sl
import streamline.core.pace
from streamline.backends.base import Backend
from streamline.backends.hosts.item_sender import ItemSender
from streamline.core.channel import Channel, FlushPoints, Inbox, Sink
from streamline.core.flow import Chunk
from streamline.core.pace import SLICE_S
from streamline.core.state import CountedStates
from streamline.testing.checks import check_resume
from tests.kit import AsyncTest, Pipe, in_thread

Run = Callable[[AsyncTest], None]


class Work:
    """A function that takes time of a clock of its own, a random while each call, and what it did when."""

    def __init__(self, durations: Iterator[float]) -> None:
        self.now = 0.0
        self.begun: dict[int, float] = {}
        self.made: dict[int, float] = {}
        self._durations = durations

    def clock(self) -> float:
        return self.now

    def __call__(self, item: int) -> int:
        self.begun[item] = self.now
        self.now += next(self._durations)
        self.made[item] = self.now
        return item


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[float]], Work]:
    def make(durations: Iterator[float]) -> Work:
        work = Work(durations)
        monkeypatch.setattr(streamline.core.pace, "perf_counter", work.clock)
        return work

    return make


def steady() -> Iterator[float]:
    while True:
        yield 2e-4


def uneven(seed: int) -> Iterator[float]:
    """Mostly a few calls a slice; now and then one that takes for ever."""
    chance = random.Random(seed)
    while True:
        yield chance.choice([3e-4, 3e-4, 4e-4, 9e-4, 9e-4, 5e-3, 10.0])


def merged(lengths: list[int]) -> list[tuple[int, int]]:
    """Return the strict order of (worker, index) of workers with so many items."""
    return sorted(((w, at) for w, length in enumerate(lengths) for at in range(length)), key=lambda p: (p[1], p[0]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [1, 2, 5, 32])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 40])
def test_flush_points_are_the_last_items_of_a_worker_in_each_batch(size: int, step: int) -> None:
    for at in range(0, size, 3):
        places = range(at, 30 * size + 30 * step, step)
        ends = [n for n, (this, then) in enumerate(pairwise(places), 1) if this // size != then // size]
        points = FlushPoints(5, at, step, size)
        for done in range(ends[-1] - 8):
            part = next(end for end in ends if end > done) - done
            for most in (1, 3, 8):
                whole = [end - done for end in ends if 0 < end - done <= most]
                assert points.next_boundary(5 + done, most) == (max(whole, default=most), part)


@pytest.mark.parametrize("seed", range(4))
def test_a_call_never_begins_while_an_item_that_completes_a_batch_waits_for_its_list(
    seed: int, work: Callable[[Iterator[float]], Work], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    shards, size = chance.randint(1, 4), chance.choice([3, 8, 20])
    lengths = [chance.choice([7, 40, 90]) for _ in range(shards)]
    fn = work(uneven(seed))
    sent: dict[int, tuple[float, float]] = {}  # when, and when its list was begun
    told = [0.0]
    send, flush_at = Channel.send, Inbox.flush_at

    async def sending(self: Channel[Any], chunk: Chunk[Any]) -> None:
        sent.update({item: (fn.now, fn.begun[chunk.items[0]]) for item in chunk.items if type(item) is int})
        await send(self, chunk)

    def telling(self: Inbox[Any], points: FlushPoints) -> None:
        told.append(fn.now)
        flush_at(self, points)

    monkeypatch.setattr(Channel, "send", sending)
    monkeypatch.setattr(Inbox, "flush_at", telling)
    pipe = sl.from_items(range(100 * shards)).shard(shards).filter(lambda item: item // shards < lengths[item % shards])
    found: list[list[int]] = []

    async def test() -> None:
        async with pipe.map(fn).merge().batch(size, collate=None).open() as stream:
            found.extend([batch async for batch in stream])

    run(test)
    order = [index * shards + worker for worker, index in merged(lengths)]
    assert [item for batch in found for item in batch] == order
    for worker in range(shards):
        mine = [(place, item) for place, item in enumerate(order) if item % shards == worker]
        for index, ((place, item), (then, later)) in enumerate(pairwise(mine)):
            when, list_begun = sent[item]
            unknown = index + 1 >= min(lengths) and list_begun <= told[-1]  # that a worker has ended, then
            if place // size != then // size and not unknown:
                begun = [at for other, at in fn.begun.items() if other % shards == worker and other >= later]
                assert all(when <= at for at in begun if at > fn.made[item] + SLICE_S)


SHAPES: dict[str, tuple[Backend, type[Sink[Any]]]] = {
    "inline": (sl.Inline(), Channel),
    "threads": (sl.Threads(2), ItemSender),
}


@pytest.mark.parametrize("reads", ["map", "items"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_for_a_batch_after_the_merge_are_as_long_as_its_part(
    shape: str, reads: str, work: Callable[[Iterator[float]], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sink = SHAPES[shape]
    fn, lengths, send = work(steady()), list[int](), sink.send

    async def sending(self: Any, chunk: Chunk[Any]) -> None:
        lengths.extend([len(chunk.items)] * (type(chunk.items[0]) is int))
        await send(self, chunk)

    class Read:
        def __len__(self) -> int:
            return 640

        def __getitem__(self, index: int) -> int:
            return fn(index)

    monkeypatch.setattr(sink, "send", sending)
    monkeypatch.setattr(streamline.core.pace, "HOLD_S", 1e9)  # the hosts share a clock: each would wait for the other
    pipe: Pipe = sl.from_items(range(640)).shard(2).map(fn) if reads == "map" else sl.from_items(Read()).shard(2)
    with pipe.merge().batch(32, collate=None).open(backend=backend) as stream:
        assert list(stream) == [list(range(start, start + 32)) for start in range(0, 640, 32)]
    first = [1, 2, 4, 8, 1] if sink is ItemSender else [16]  # a list for each batch, and not for one item more
    assert sorted(lengths) == sorted(2 * (first + 19 * [16]))


def test_lists_for_a_batch_are_long_where_items_are_left_out(
    work: Callable[[Iterator[float]], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, lengths, send = work(steady()), list[int](), ItemSender.send

    async def sending(self: Any, chunk: Chunk[Any]) -> None:
        lengths.append(len(chunk.items))
        await send(self, chunk)

    monkeypatch.setattr(ItemSender, "send", sending)
    pipe = sl.from_items(range(1600)).shard(2).filter(lambda item: item % 5).map(fn).merge().batch(32, collate=None)
    with pipe.open(backend=sl.Threads(2)) as stream:
        assert len(list(stream)) == 40
    assert sum(lengths) / len(lengths) > 5  # with lists that begin anew from each short one, fewer than 4


def test_lists_of_large_items_are_no_longer_than_a_message(run: Run) -> None:
    link = SimpleNamespace(pack=lambda items: SimpleNamespace(nbytes=2**21 * len(items)), send=lambda message: None)
    sender = ItemSender[int](cast(Any, link), cast(Any, SimpleNamespace(dump=id)), 0, items=256, size=2**30)
    sender.flush_points = FlushPoints(0, 0, 2, 32)

    async def test() -> None:
        for fit in (1, 2):  # the size of the first is unknown
            assert sender.pull_size(64) == (fit, fit)
            await sender.send(Chunk([1], CountedStates("items", 1)))

    run(test)


def test_one_large_item_among_small_ones_shortens_lists_for_a_while(run: Run) -> None:
    nbytes = 1
    link = SimpleNamespace(pack=lambda items: SimpleNamespace(nbytes=nbytes * len(items)), send=lambda message: None)
    sender = ItemSender[int](cast(Any, link), cast(Any, SimpleNamespace(dump=id)), 0, items=256, size=2**30)

    async def lengths(lists: int) -> list[int]:
        found = []
        for _ in range(lists):
            found.append(sender.pull_size(sender.room_at_once)[0])
            await sender.send(Chunk([1] * found[-1], CountedStates("items", found[-1])))
            sender.on_consumed(sender.capacity.held, sender.capacity.held_bytes)
        return found

    async def test() -> None:
        nonlocal nbytes
        assert (await lengths(9))[-1] == 256
        nbytes = 2**23
        await sender.send(Chunk([1], CountedStates("items", 1)))
        sender.on_consumed(1, nbytes)
        assert await lengths(4) == [1] * 4
        nbytes = 1
        assert (await lengths(14))[-1] == 256

    run(test)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_no_call_begins_between_a_batch_after_the_merge_and_its_receipt(
    shards: int, work: Callable[[Iterator[float]], Work], run: Run
) -> None:
    fn = work(steady())

    async def test() -> None:
        async with sl.from_items(range(10**6)).shard(shards).map(fn).merge().batch(32, collate=None).open() as stream:
            for _ in range(20):
                batch = await anext(stream)
                assert fn.now == max(fn.made[item] for item in batch)

    run(test)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_pause_waits_for_no_list_to_go_on(shards: int, work: Callable[[Iterator[float]], Work], run: Run) -> None:
    fn = work(steady())

    async def test() -> None:
        async with sl.from_items(range(10**6)).shard(shards).map(fn).batch(32, collate=None).merge().open() as stream:
            for _ in range(20):
                await anext(stream)
                began = fn.now
                async with stream.paused():
                    assert fn.now - began <= 0.0011 * shards  # a slice of each

    run(test)


@pytest.mark.parametrize("kind", ["map", "filter"])
def test_a_stage_between_merge_and_batch_works_while_others_make_more(kind: str) -> None:
    fn, seen = Blocks(3), threading.Event()

    def look(item: int) -> int:
        if item == 2:
            seen.set()
        return item + 1

    merged = sl.from_items(range(16)).map(fn).merge()
    pipe = (merged.map(look) if kind == "map" else merged.filter(look)).batch(8, collate=None)

    def consume() -> None:
        with pipe.open() as stream:
            assert len(list(stream)) == 2

    reader = threading.Thread(target=consume)
    reader.start()
    try:
        assert seen.wait(200)
    finally:
        fn.released.set()
        reader.join()


class Blocks:
    """Takes longer than a slice, and from some item on until it is released."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.released = threading.Event()

    def __call__(self, item: int) -> int:
        time.sleep(2 * SLICE_S)
        if item >= self.at:
            self.released.wait()
        return item


BEFORE_A_BLOCKED_CALL: dict[str, Callable[[Blocks], tuple[Pipe, Backend]]] = {
    "in the worker": lambda fn: (sl.from_items(range(64)).map(fn).batch(8, collate=None), sl.Inline()),
    "in a host": lambda fn: (sl.from_items(range(64)).shard(1).map(fn).batch(8, collate=None).merge(), sl.Threads(1)),
    "after a merge of one": lambda fn: (sl.from_items(range(64)).map(fn).merge().batch(8, collate=None), sl.Inline()),
    "after the merge": lambda fn: (
        sl.from_items(range(64)).shard(3).map(fn).merge().batch(8, collate=None),
        sl.Threads(3),
    ),
}


@pytest.mark.parametrize("shape", BEFORE_A_BLOCKED_CALL)
def test_the_batches_before_a_call_that_blocks_arrive(shape: str) -> None:
    fn = Blocks(40)
    pipe, backend = BEFORE_A_BLOCKED_CALL[shape](fn)

    def consume() -> None:
        with pipe.open(backend=backend) as stream:
            assert [next(stream) for _ in range(5)] == [list(range(start, start + 8)) for start in range(0, 40, 8)]
            fn.released.set()

    try:
        in_thread(consume)
    finally:
        fn.released.set()


def test_the_batches_before_a_call_that_blocks_arrive_after_another_worker_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn, told, times, flush_at = Blocks(30), threading.Event(), [], Inbox.flush_at

    def telling(self: Inbox[Any], points: FlushPoints) -> None:
        flush_at(self, points)
        times.append(points)
        if len(times) > 2:
            told.set()

    def work(item: int) -> int:
        if item >= 14:
            told.wait()  # that shard 1 has ended
        return fn(item)

    monkeypatch.setattr(Inbox, "flush_at", telling)
    pipe = sl.from_items(range(64)).shard(2).filter(lambda item: item % 2 == 0 or item < 10)

    def consume() -> None:
        with pipe.map(work).merge().batch(4, collate=None).open(backend=sl.Threads(2)) as stream:
            assert [next(stream) for _ in range(5)][2:] == [[8, 9, 10, 12], [14, 16, 18, 20], [22, 24, 26, 28]]
            fn.released.set()

    try:
        in_thread(consume)
    finally:
        fn.released.set()
        told.set()


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_resume_is_exact_where_each_call_is_a_slice(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamline.core.pace, "SLICE_S", -1.0)
    pipe = sl.from_items(range(29)).shard(3).filter(lambda item: item % 3 or item < 12).map(abs).merge()
    check_resume(pipe.batch(size, collate=None))


def test_snapshots_are_as_without_a_batch_once_a_worker_has_ended() -> None:
    merged = sl.from_items(range(12)).shard(3).filter(lambda item: item < 5).merge()
    with merged.open() as stream, merged.batch(2, collate=None).open() as batches:
        for _ in batches:
            next(stream), next(stream, None)
            assert batches.snapshot().next_worker == stream.snapshot().next_worker
