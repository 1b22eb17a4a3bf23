"""A consumer that stops, stops the source: items in flight, bytes in flight, memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel
from streamline.core.driver import drive
from streamline.core.flow import Chunk, Site
from streamline.core.gate import Gate
from streamline.core.state import At, CountedStates
from streamline.core.tasks import Session
from streamline.core.tree import nbytes
from streamline.plan.describe import in_bridge
from streamline.sources.base import Part
from tests.copying_backend import Copying
from tests.kit import LOOPS, AsyncTest, Counting, Pipe, later, stage
from tests.laws.profile import in_turn, sampled

Run = Callable[[AsyncTest], None]

LONG = pytest.mark.long

SHAPES: dict[str, Callable[[Pipe], Pipe]] = {
    "source": lambda pipe: pipe,
    "map": lambda pipe: pipe.map(abs),
    "filter": lambda pipe: pipe.filter(lambda item: True),
    "flat_map": lambda pipe: pipe.flat_map(lambda item: [item]),
    "async map": lambda pipe: pipe.map(later, concurrency=5),
    "async map of many": lambda pipe: pipe.map(later, concurrency=200),
    "unordered map": lambda pipe: pipe.map(later, concurrency=5, ordered=False),
    "threads": lambda pipe: pipe.map(abs, executor="thread", concurrency=2),
    "shuffle": lambda pipe: pipe.shuffle(window=50),
    "prefetch": lambda pipe: pipe.prefetch(7),
    "two prefetches": lambda pipe: pipe.prefetch(7).map(abs).prefetch(3),
    "custom stage": lambda pipe: pipe.through(stage),
    "4 workers": lambda pipe: pipe.shard(4).map(abs).merge(),
    "4 workers, best effort": lambda pipe: pipe.shard(4).map(abs).merge("best_effort"),
    "64 workers": lambda pipe: pipe.shard(64).map(abs).merge(),
    "4 workers with batches": lambda pipe: pipe.shard(4).batch(10).merge().unbatch(),
    "batch": lambda pipe: pipe.batch(16).unbatch(),
    "large batch": lambda pipe: pipe.map(abs).merge().batch(1000).unbatch(),
    "batch of batches": lambda pipe: pipe.batch(4, collate=None).batch(4, collate=None).unbatch().unbatch(),
    "stage behind a batch": lambda pipe: pipe.batch(10, collate=None).through(stage).unbatch(),
    "map behind a batch": lambda pipe: pipe.batch(10, collate=None).map(later, concurrency=3).unbatch(),
    "shuffle behind a batch": lambda pipe: pipe.batch(10, collate=None).shuffle(window=5).unbatch(),
    "behind the merge": lambda pipe: pipe.shard(2).merge().shuffle(window=20).map(later, concurrency=3),
    "all": lambda pipe: pipe.shard(3).shuffle(window=9).map(later, concurrency=4).merge("best_effort").prefetch(3),
}
STOPS = (1, 60, 1_500)


@pytest.mark.parametrize(("shape", "run"), in_turn(SHAPES, LOOPS), indirect=["run"])
def test_an_async_consumer_that_stops_stops_the_source(shape: str, run: Run) -> None:
    source = Counting(1_000_000)
    pipe = SHAPES[shape](sl.from_items(source))

    async def test() -> None:
        consumed = 0
        async with pipe.open() as stream:
            async for _ in stream:
                consumed += 1
                if consumed in STOPS:
                    await anyio.wait_all_tasks_blocked()
                    assert source.asked - consumed <= pipe.max_in_flight - in_bridge(pipe.plan), (
                        f"behind {consumed} items"
                    )
                    if consumed == STOPS[-1]:
                        break

    run(test)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", sampled([*SHAPES], 2))
def test_a_plain_consumer_that_stops_stops_the_source(shape: str) -> None:
    source = Counting(1_000_000)
    pipe = SHAPES[shape](sl.from_items(source))
    consumed = 0
    with pipe.open() as stream:
        for _ in stream:
            consumed += 1
            if consumed in STOPS:
                assert at_rest(source) - consumed <= pipe.max_in_flight, f"behind {consumed} items"
                if consumed == STOPS[-1]:
                    break


def at_rest(source: Counting) -> int:
    """Wait until the other thread asks for nothing any more, and return how much it has."""
    asked, still = source.asked, 0
    while still < 20:
        time.sleep(0.001)
        still = still + 1 if source.asked == asked else 0
        asked = source.asked
    return asked


def test_a_slow_plain_consumer_keeps_few_items_waiting() -> None:
    source = Counting(1_000_000)
    consumed = 0
    with sl.from_items(source).prefetch(2).open() as stream:
        for _ in stream:
            consumed += 1
            time.sleep(0.002)
            if consumed == 50:
                break
        asked = source.asked
    assert asked - consumed <= 1100  # far below what a quick one may have


def test_nothing_is_read_before_the_first_item_is_asked_for(run: Run) -> None:
    source = Counting(1000)

    async def test() -> None:
        async with sl.from_items(source).shard(2).map(abs).merge().prefetch(3).open():
            await anyio.wait_all_tasks_blocked()
        assert source.asked == 0

    run(test)


def test_take_asks_for_no_more_than_it_gives(run: Run) -> None:
    source = Counting(1000)

    async def test() -> None:
        async with sl.from_items(source).shard(1).take(10).open() as stream:
            assert [item async for item in stream] == list(range(10))
        assert source.asked == 10

    run(test)


# Bytes --------------------------------------------------------------------------------------------------------------

SIZES = [10, 9000, 30, 4000, 4000, 4000, 50_000, 1, 1, 1, 20_000, 9_999, 10_000, 10_001, 5] * 10


@dataclass
class Blobs:
    """Byte strings of given sizes, and how many bytes were asked for."""

    sizes: list[int]
    asked: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        blob = bytes(self.sizes[index])
        self.asked.append(nbytes(blob))
        return blob


@pytest.mark.parametrize("items", [1, 2, 100])
@pytest.mark.parametrize("bytes_", [1, 10_000, 10**9])
def test_a_byte_budget_never_deadlocks_and_loses_nothing(items: int, bytes_: int, run: Run) -> None:
    async def test() -> None:
        pipe = sl.from_items(Blobs(SIZES)).prefetch(items, bytes=bytes_).map(len)
        async with pipe.open() as stream:
            assert [size async for size in stream] == SIZES

    run(test)


def test_a_channel_never_holds_more_bytes_than_its_budget_but_one_item_always(run: Run) -> None:
    async def test() -> None:
        channel: Channel[bytes] = Channel(At("items", 0), Capacity(100, 10_000))
        got: list[int] = []

        async def send() -> None:
            for at, size in enumerate(SIZES):
                await channel.wait_room()
                await channel.send(Chunk([bytes(size)], CountedStates("items", at + 1)))
            channel.finish()

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            while (chunk := await channel.inbox.pull(3)) is not None:
                got.extend(len(blob) for blob in chunk.items)
                await anyio.wait_all_tasks_blocked()
                assert channel.capacity.held <= 1 or channel.capacity.held_bytes <= 10_000
                assert channel.capacity.held <= 100
        assert got == SIZES
        channel.abandon()

    run(test)


def test_the_bytes_read_ahead_stay_within_the_budget_even_if_items_grow(run: Run) -> None:
    source = Blobs([10] * 20 + [4000] * 30)
    largest = nbytes(bytes(4000))

    async def test() -> None:
        site = Site(cast("Any", SimpleNamespace(session=Session())))
        flow = sl.from_items(source).source.open(site, Part(mode="interleaved"))
        channel: Channel[bytes] = Channel(flow.state, Capacity(100, 10_000))
        consumed = 0
        async with anyio.create_task_group() as group:
            group.start_soon(drive, flow, channel, Gate())
            while (chunk := await channel.inbox.pull(3)) is not None:
                await anyio.wait_all_tasks_blocked()
                # one item may be in the driver's hands, until there is room for it
                assert sum(source.asked) - consumed <= 10_000 + largest
                consumed += sum(nbytes(blob) for blob in chunk.items)
                channel.inbox.release()
        assert consumed == sum(source.asked)

    run(test)


@pytest.mark.parametrize("backend", [sl.Inline(), Copying(1), sl.Threads(1)], ids=["inline", "copying", "threads"])
def test_a_prefetch_at_a_workers_end_keeps_to_its_budget(run: Run, backend: Backend) -> None:
    source = Blobs([4000] * 1000)

    async def test() -> None:
        consumed = 0
        async with sl.from_items(source).prefetch(2, bytes=10_000).open(backend=backend) as stream:
            for _ in range(10):
                consumed += nbytes(await anext(stream))
                await anyio.wait_all_tasks_blocked()
                assert sum(source.asked) - consumed <= 20 * 4033

    run(test)


# Memory -------------------------------------------------------------------------------------------------------------

FLAT = """
import resource, sys
import streamline as sl

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

pipe = {pipe}
at_first = 0.0
count = 0
for _ in pipe:
    count += 1
    if count == {first}:
        at_first = rss()
assert count == {total}, count
print(rss() - at_first)
"""


@pytest.mark.long
def test_memory_stays_flat_over_a_million_items(python: Callable[..., str]) -> None:
    pipe = "sl.from_items(range(1_500_000)).shard(2).map(abs).merge()"
    grown_mib = float(python(FLAT.format(pipe=pipe, first=500_000, total=1_500_000)))
    assert grown_mib < 2.5  # ten bytes an item would be 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipe", "eighth"),
    [
        pytest.param(sl.from_items(range(16_000)).shard(3).map(abs).merge("best_effort"), 2000, marks=LONG),
        pytest.param(
            sl.from_items(range(16_000)).shard(2).map(abs).merge("best_effort").shuffle(window=64), 2000, marks=LONG
        ),
        pytest.param(
            sl.from_items(range(16_000)).map(abs, executor="thread", concurrency=2, ordered=False).shuffle(window=16),
            2000,
            marks=LONG,
        ),
        (sl.from_items(range(10)).shard(1).map(abs).prefetch(2).repeat(160), 200),
    ],
)
async def test_memory_stays_flat_where_choices_and_passes_are_kept(pipe: Pipe, eighth: int) -> None:
    """By its bytes: the system's count moves with all that a plain loop may have on its way, thousands of items."""
    kept = []
    tracemalloc.start()
    try:
        async with pipe.open() as stream:
            for consumed in range(1, 7 * eighth + 1):
                await anext(stream)
                if consumed in (2 * eighth, 7 * eighth):
                    gc.collect()
                    kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[1] - kept[0] < 40_000  # a choice would be 28 bytes an item, 280,000; a pass 3 KB, 300,000


@pytest.mark.long
def test_dropped_items_do_not_pile_up_before_a_plain_consumer_that_stops() -> None:
    source = Counting(3_000_000)
    with sl.from_items(source).filter(lambda item: item < 10 or item > 2_999_990).open() as stream:
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        while source.asked < 1_000_000:  # nothing passes: the filter looks for the next item
            time.sleep(0.001)
        waiting = stream._loop_thread.bridge.consumer.queue.qsize()
    assert waiting < 20


def endless() -> Iterator[int]:
    item = 0
    while True:
        yield item
        item += 1


def test_an_endless_iterator_is_stopped_too(run: Run) -> None:
    seen: list[int] = []

    def watched() -> Iterator[int]:
        for item in endless():
            seen.append(item)
            yield item

    pipe = sl.from_iterable(watched)

    async def test() -> None:
        async with pipe.open() as stream:
            for consumed in range(1, 2000):
                await anext(stream)
                if consumed % 500 == 0:
                    await anyio.wait_all_tasks_blocked()
                    assert len(seen) - consumed <= pipe.max_in_flight - in_bridge(pipe.plan)

    run(test)
