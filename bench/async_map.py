"""What does an async map cost? 64 calls in flight, each giving way to the loop once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer
from bench.tiny_items import consume_async, expected

IN_FLIGHT = 64
SLOW_EVERY, SLOW_YIELDS = 100, 100


async def one_yield(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


async def sometimes_slow(x: int) -> int:
    """One call in a hundred takes a hundred times as long, as one request in a hundred does."""
    for _ in range(1 if x % SLOW_EVERY else SLOW_YIELDS):
        await asyncio.sleep(0)
    return x + 1


# In order


async def window_of_tasks(n: int) -> Tally:
    return await consume_async(_windowed(range(n)))


async def _windowed(items: Iterable[int]) -> AsyncIterator[int]:
    """What one writes by hand: a task per item, results awaited in order."""
    window: deque[asyncio.Task[int]] = deque()
    for x in items:
        if len(window) == IN_FLIGHT:
            yield await window.popleft()
        window.append(asyncio.create_task(one_yield(x)))
    while window:
        yield await window.popleft()


async def ordered(n: int) -> Tally:
    async with sl.from_items(range(n)).map(one_yield, concurrency=IN_FLIGHT).open() as stream:
        return await consume_async(stream)


async def aiostream_ordered(n: int) -> Tally:
    stream = peer("aiostream").stream
    async with stream.map(stream.range(n), one_yield, ordered=True, task_limit=IN_FLIGHT).stream() as items:
        return await consume_async(items)


# In completion order


async def free_workers(n: int) -> Tally:
    """No order, no bound, no consumer: each worker takes the next item and keeps its own sum."""
    shared = iter(range(n))

    async def work() -> Tally:
        count = total = 0
        for x in shared:
            total += await sometimes_slow(x)
            count += 1
        return Tally(count, total)

    tallies = await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return Tally(sum(each.count for each in tallies), sum(each.checksum for each in tallies))


async def unordered(n: int) -> Tally:
    pipe = sl.from_items(range(n)).map(sometimes_slow, concurrency=IN_FLIGHT, ordered=False)
    async with pipe.open() as stream:
        return await consume_async(stream)


async def ordered_and_sometimes_slow(n: int) -> Tally:
    async with sl.from_items(range(n)).map(sometimes_slow, concurrency=IN_FLIGHT).open() as stream:
        return await consume_async(stream)


WINDOW, WORKERS, AIOSTREAM = "ordered window of 64 tasks", "64 worker tasks over one iterator", "aiostream, ordered"

SUITES = (
    Suite(
        question="Async map, in order: what do 64 calls in flight cost?",
        unit="calls/s",
        floor=WINDOW,
        expected=expected,
        smoke_items=2_000,
        note="Each call gives way to the loop once.",
        cases=(
            Case(WINDOW, window_of_tasks, 200_000),
            Case("streamline, ordered", ordered, 200_000, (at_least(0.5, WINDOW), at_least(8, AIOSTREAM))),
            Case(AIOSTREAM, aiostream_ordered, 20_000, peers=("aiostream",)),
        ),
    ),
    Suite(
        question="Async map, in completion order: does one slow call in a hundred hold up the rest?",
        unit="calls/s",
        floor=WORKERS,
        expected=expected,
        smoke_items=2_000,
        note="99 % of the calls give way once, 1 % a hundred times; 64 in flight. Ordered, for comparison, must wait.",
        cases=(
            Case(WORKERS, free_workers, 200_000),
            Case("streamline, unordered", unordered, 200_000, (at_least(0.8, WORKERS),)),
            Case("streamline, ordered", ordered_and_sometimes_slow, 200_000),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
