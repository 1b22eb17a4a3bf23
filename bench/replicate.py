"""What does it cost to deal one stream to several readers? range → 4 readers, each of which counts and adds up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import anyio

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, items_per_second
from bench.tiny_items import MANY, SOME, consume, consume_async

READERS = 4


async def numbers(n: int) -> AsyncIterator[int]:
    for x in range(n):
        yield x


def expected(n: int) -> Tally:
    return Tally(n, n * (n - 1) // 2)


def together(tallies: Iterable[Tally]) -> Tally:
    found = list(tallies)
    return Tally(sum(tally.count for tally in found), sum(tally.checksum for tally in found))


# Floors: a loop that deals into lists, and one task that deals into queues.


def lists(n: int) -> Tally:
    dealt: list[list[int]] = [[] for _ in range(READERS)]
    for at, x in enumerate(range(n)):
        dealt[at % READERS].append(x)
    return together(consume(part) for part in dealt)


async def asyncio_queues(n: int) -> Tally:
    """The plain way to write it: a bounded queue for each reader, one item at a time."""
    queues: list[asyncio.Queue[int | None]] = [asyncio.Queue(256) for _ in range(READERS)]

    async def deal() -> None:
        at = 0
        async for x in numbers(n):
            await queues[at % READERS].put(x)
            at += 1
        for queue in queues:
            await queue.put(None)

    async def items(queue: asyncio.Queue[int | None]) -> AsyncIterator[int]:
        while (x := await queue.get()) is not None:
            yield x

    readers = asyncio.gather(*(consume_async(items(queue)) for queue in queues))
    await deal()
    return together(await readers)


async def anyio_streams(n: int) -> Tally:
    """Likewise, with anyio's memory object streams."""
    ends = [anyio.create_memory_object_stream[int](256) for _ in range(READERS)]

    async def deal() -> None:
        at = 0
        async for x in numbers(n):
            await ends[at % READERS][0].send(x)
            at += 1
        for send, _ in ends:
            send.close()

    async def read(receive: Any) -> Tally:
        async with receive:
            return await consume_async(receive)

    readers = asyncio.gather(*(read(receive) for _, receive in ends))
    await deal()
    return together(await readers)


# streamline


async def replicas(source: AsyncIterable[int] | Iterable[int] | sl.Pipeline[int]) -> Tally:
    async with sl.StreamReplicator(source, READERS) as replicator:
        readers = [consume_async(replicator.replica(r)) for r in range(READERS)]
        return together(await asyncio.gather(*readers))


async def async_source(n: int) -> Tally:
    return await replicas(numbers(n))


async def sync_source(n: int) -> Tally:
    return await replicas(range(n))


async def pipeline(n: int) -> Tally:
    return await replicas(sl.from_items(range(n)))


def plain_loops(n: int) -> Tally:
    found: list[Tally] = []
    with sl.StreamReplicator(range(n), READERS) as replicator:
        replicas = [replicator.replica(r) for r in range(READERS)]
        threads = [threading.Thread(target=lambda r=r: found.append(consume(replicas[r]))) for r in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return together(found)


FLOOR = "plain loop into lists"
TARGET = (items_per_second(500_000),)

SUITES = (
    Suite(
        question="Replicas: what does it cost to deal one stream to 4 readers?",
        unit="items/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=2_000,
        note="Items of all readers together; 256 may wait for each. Whole runs, opening and closing included.",
        cases=(
            Case(FLOOR, lists, MANY),
            Case("asyncio queues, one item at a time", asyncio_queues, SOME),
            Case("anyio streams, one item at a time", anyio_streams, SOME),
            Case("streamline, async source, async for", async_source, MANY, TARGET),
            Case("streamline, pipeline, async for", pipeline, MANY, TARGET),
            Case("streamline, sync source, async for", sync_source, MANY),
            Case("streamline, sync source, plain for in 4 threads", plain_loops, MANY),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
