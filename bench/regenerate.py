"""A cache that is filled: what does an item cost that is served from it, shuffled, and a block of rows?"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least

SIZE = 10_000
"""Items of a cycle: served so often that drawing them is nothing."""
ROWS, WIDTH, BLOCK = 16_384, 256, 256

Block = npt.NDArray[np.float32]


def consume(items: Iterable[int]) -> Tally:
    count = checksum = 0
    for item in items:
        count += 1
        checksum += item
    return Tally(count, checksum)


async def consume_async(items: AsyncIterable[int]) -> Tally:
    count = checksum = 0
    async for item in items:
        count += 1
        checksum += item
    return Tally(count, checksum)


def expected(n: int) -> Tally:
    rounds = max(1, n // SIZE)
    return Tally(rounds * SIZE, rounds * sum(range(SIZE)))


def served(n: int) -> Iterator[int]:
    held, dice = list(range(SIZE)), np.random.default_rng(0)
    for _ in range(max(1, n // SIZE)):
        for index in dice.permutation(SIZE).tolist():
            yield held[index]


def a_loop(n: int) -> Tally:
    return consume(served(n))


async def an_async_loop(n: int) -> Tally:
    """The same, where drawing may wait."""

    async def drawn() -> AsyncIterator[int]:
        for item in served(n):
            yield item

    return await consume_async(drawn())


def regenerated(n: int) -> Tally:
    with sl.from_items(range(SIZE)).regenerate(SIZE, reuse=max(1, n // SIZE)).open() as stream:
        return consume(stream)


async def regenerated_async(n: int) -> Tally:
    async with sl.from_items(range(SIZE)).regenerate(SIZE, reuse=max(1, n // SIZE)).open() as stream:
        return await consume_async(stream)


def cached(n: int) -> Tally:
    with sl.from_items(range(SIZE)).cache().repeat(max(1, n // SIZE)).open() as stream:
        return consume(stream)


@cache
def blocks() -> list[Block]:
    """A cycle's rows: each holds its own number."""
    rows = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, axis=1)
    return np.split(rows, ROWS // BLOCK)


def prepare(_: int) -> None:
    blocks()


def consume_blocks(found: Iterable[Block]) -> Tally:
    count = checksum = 0
    for block in found:
        count += len(block)
        checksum += int(block[:, 0].sum(dtype=np.float64))
    return Tally(count, checksum)


def expected_rows(n: int) -> Tally:
    rounds = max(1, n // ROWS)
    return Tally(rounds * ROWS, rounds * sum(range(ROWS)))


def a_loop_of_rows(n: int) -> Tally:
    def served() -> Iterator[Block]:
        held, dice = np.concatenate(blocks()), np.random.default_rng(0)
        for _ in range(max(1, n // ROWS)):
            order = dice.permutation(ROWS)
            for start in range(0, ROWS, BLOCK):
                yield held.take(order[start : start + BLOCK], axis=0)

    return consume_blocks(served())


def regenerated_rows(n: int) -> Tally:
    with sl.from_items(blocks()).regenerate(ROWS, block=BLOCK, reuse=max(1, n // ROWS)).open() as stream:
        return consume_blocks(stream)


LOOP = "a plain loop over a list, permuted"
ASYNC_LOOP = "a plain loop over an async generator"
LOOP_OF_ROWS = "a plain loop over an array, permuted"
MANY = 200 * SIZE

SUITES = (
    Suite(
        question="Regenerating: what does an item cost that is served from a filled cache?",
        unit="items/s",
        floor=LOOP,
        expected=expected,
        smoke_items=2 * SIZE,
        note=f"{SIZE:,} ints, drawn once and served again and again, each time in another order. Whole runs.",
        cases=(
            Case(LOOP, a_loop, MANY),
            Case("streamline .regenerate, plain for", regenerated, MANY, (at_least(0.5, LOOP),)),
            Case(ASYNC_LOOP, an_async_loop, MANY),
            Case("streamline .regenerate, async for", regenerated_async, MANY, (at_least(0.5, ASYNC_LOOP),)),
            Case("streamline .cache, plain for", cached, MANY),
        ),
    ),
    Suite(
        question="Regenerating: what does a row cost, in blocks of 256?",
        unit="items/s",
        floor=LOOP_OF_ROWS,
        expected=expected_rows,
        smoke_items=ROWS,
        note=f"{ROWS:,} rows of {WIDTH} float32 (16 MiB), drawn once, gathered by permutation into blocks of {BLOCK}.",
        cases=(
            Case(LOOP_OF_ROWS, a_loop_of_rows, 40 * ROWS, prepare=prepare),
            Case(
                "streamline .regenerate(block=256)", regenerated_rows, 40 * ROWS, (at_least(0.5, LOOP_OF_ROWS),),
                prepare=prepare,
            ),
        ),
    ),
)  # fmt: skip


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
