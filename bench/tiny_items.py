"""What does an item cost when the work is nothing? range → x + 1 → the consumer, with a state after every item."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

MANY, SOME, FEW = 1_000_000, 100_000, 5_000  # for cases of more than 1 M, about 100 k, below 10 k items/s


def add_one(x: int) -> int:
    return x + 1


async def add_one_async(x: int) -> int:
    return x + 1


def consume(items: Iterable[int]) -> Tally:
    count = total = 0
    for x in items:
        count += 1
        total += x
    return Tally(count, total)


async def consume_async(items: AsyncIterable[int]) -> Tally:
    count = total = 0
    async for x in items:
        count += 1
        total += x
    return Tally(count, total)


def expected(n: int) -> Tally:
    return Tally(n, n * (n + 1) // 2)


# Floors: what the language itself costs.


async def numbers(n: int) -> AsyncIterator[int]:
    for x in range(n):
        yield x


async def mapped(items: AsyncIterable[int]) -> AsyncIterator[int]:
    async for x in items:
        yield add_one(x)


async def async_generators(n: int) -> Tally:
    return await consume_async(mapped(numbers(n)))


def generators(n: int) -> Tally:
    def plain(n: int) -> Iterator[int]:
        yield from range(n)

    return consume(add_one(x) for x in plain(n))


async def anyio_hops(n: int) -> Tally:
    """Three tasks in a row, joined by anyio streams that carry one item at a time: the plain way to write it."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        first_send, first_receive = anyio.create_memory_object_stream[int](256)
        last_send, last_receive = anyio.create_memory_object_stream[int](256)
        tasks.start_soon(_send_numbers, n, first_send)
        tasks.start_soon(_send_mapped, first_receive, last_send)
        async with last_receive:
            return await consume_async(last_receive)


async def _send_numbers(n: int, send: MemoryObjectSendStream[int]) -> None:
    async with send:
        for x in range(n):
            await send.send(x)


async def _send_mapped(receive: MemoryObjectReceiveStream[int], send: MemoryObjectSendStream[int]) -> None:
    async with receive, send:
        async for x in receive:
            await send.send(add_one(x))


async def anyio_lists(n: int) -> Tally:
    """The same with lists, which have to be made by hand: what a hand-over costs that carries no state."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        first_send, first_receive = anyio.create_memory_object_stream[list[int]](1)
        last_send, last_receive = anyio.create_memory_object_stream[list[int]](1)
        tasks.start_soon(_send_number_lists, n, first_send)
        tasks.start_soon(_send_mapped_lists, first_receive, last_send)
        async with last_receive:
            tally = Tally(0, 0)
            async for items in last_receive:
                part = consume(items)
                tally = Tally(tally.count + part.count, tally.checksum + part.checksum)
            return tally


async def _send_number_lists(n: int, send: MemoryObjectSendStream[list[int]]) -> None:
    async with send:
        for first in range(0, n, 256):
            await send.send(list(range(first, min(first + 256, n))))


async def _send_mapped_lists(
    receive: MemoryObjectReceiveStream[list[int]], send: MemoryObjectSendStream[list[int]]
) -> None:
    async with receive, send:
        async for items in receive:
            await send.send([add_one(x) for x in items])


# streamline


async def async_for(n: int) -> Tally:
    async with sl.from_items(range(n)).map(add_one).open() as stream:
        return await consume_async(stream)


def plain_for(n: int) -> Tally:
    with sl.from_items(range(n)).map(add_one).open() as stream:
        return consume(stream)


async def strict_merge(n: int) -> Tally:
    async with sl.from_items(range(n)).shard(4).map(add_one).merge().open() as stream:
        return await consume_async(stream)


async def best_effort_merge(n: int) -> Tally:
    workers = sl.from_items(range(n)).shard(4).map(add_one)
    async with workers.merge("best_effort", max_skips_per_round=2, max_lead=8).open() as stream:
        return await consume_async(stream)


async def three_tasks(n: int) -> Tally:
    async with sl.from_items(range(n)).prefetch(256).map(add_one).prefetch(256).open() as stream:
        return await consume_async(stream)


# Peers, each as fast as it goes without chunks made by hand.


def spdl_threads(n: int) -> Tally:
    return _spdl(n, add_one, concurrency=2)


def spdl_async(n: int) -> Tally:
    return _spdl(n, add_one_async, concurrency=64)


def _spdl(n: int, fn: Any, concurrency: int) -> Tally:
    """From an async source: a sync one costs an executor call per item, and halves the rate."""
    builder = peer("spdl.pipeline").PipelineBuilder().add_source(numbers(n)).pipe(fn, concurrency=concurrency)
    pipeline = builder.add_sink(64).build(num_threads=2)
    with pipeline.auto_stop():
        return consume(pipeline)


def grain(n: int) -> Tally:
    """Without its default 16 threads, which make tiny items 30 times slower."""
    library = peer("grain")
    dataset = library.MapDataset.source(range(n)).map(add_one)
    return consume(dataset.to_iter_dataset(library.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def torchdata_nodes(n: int) -> Tally:
    nodes = peer("torchdata.nodes")
    return consume(nodes.Loader(nodes.Mapper(nodes.IterableWrapper(range(n)), add_one)))


async def aiostream(n: int) -> Tally:
    stream = peer("aiostream").stream
    async with stream.map(stream.range(n), add_one).stream() as items:
        return await consume_async(items)


FLOOR = "async generator chain"
ONE_WORKER = (at_least(0.4, FLOOR), at_least(100, "spdl, async fn, 64 in flight"), at_least(5, "grain, no threads"))

SUITES = (
    Suite(
        question="Tiny items: what does an item cost when the work is nothing?",
        unit="items/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=2_000,
        note="range → x + 1 → a consumer that counts and adds up. Whole runs, opening and closing included.",
        cases=(
            Case("plain generator", generators, MANY),
            Case(FLOOR, async_generators, MANY),
            Case("anyio streams, one item per hop, three tasks", anyio_hops, SOME),
            Case("anyio streams, lists of 256 made by hand, three tasks", anyio_lists, MANY),
            Case("streamline, async for", async_for, MANY, ONE_WORKER),
            Case("streamline, plain for", plain_for, MANY, (at_least(0.8, "streamline, async for"),)),
            Case("streamline, 4 workers, strict merge", strict_merge, MANY, (at_least(0.3, FLOOR),)),
            Case("streamline, 4 workers, best-effort merge", best_effort_merge, MANY, (at_least(0.3, FLOOR),)),
            Case("streamline, three tasks in a row", three_tasks, MANY, (at_least(0.2, FLOOR),)),
            Case("spdl, threads, 2 in flight", spdl_threads, FEW, peers=("spdl",)),
            Case("spdl, async fn, 64 in flight", spdl_async, FEW, peers=("spdl",)),
            Case("grain, no threads", grain, SOME, peers=("grain",)),
            Case("torchdata.nodes Mapper", torchdata_nodes, MANY, peers=("torchdata", "torch")),
            Case("aiostream map", aiostream, SOME, peers=("aiostream",)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
