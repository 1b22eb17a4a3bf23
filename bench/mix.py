"""What does sl.mix cost beside a plain loop? Eight components, by weights."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from functools import cache

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least

COMPONENTS = 8
WEIGHTS = {f"part-{number}": float(1 + number) for number in range(COMPONENTS)}


def parts(n: int) -> dict[str, range]:
    """Ranges that hold more items than are drawn of them."""
    return {name: range(at * n, (at + 1) * n) for at, name in enumerate(WEIGHTS)}


def consume(items: Iterable[int], n: int) -> Tally:
    """Count n items; which of them were drawn, two generators see otherwise."""
    count = checksum = 0
    for item in items:
        count += 1
        checksum |= item
        if count == n:
            break
    return Tally(count, checksum < COMPONENTS * n * 2)


async def consume_async(items: AsyncIterable[int], n: int) -> Tally:
    count = checksum = 0
    async for item in items:
        count += 1
        checksum |= item
        if count == n:
            break
    return Tally(count, checksum < COMPONENTS * n * 2)


@cache
def expected(n: int) -> Tally:
    return Tally(n, True)


def plain(n: int) -> Tally:
    """Numbers drawn many at once; then the next item of the data set that each says, whose place is kept."""
    return consume(_drawn(n), n)


async def plain_async(n: int) -> Tally:
    """The same, where drawing may wait."""

    async def drawn() -> AsyncIterator[int]:
        for item in _drawn(n):
            yield item

    return await consume_async(drawn(), n)


def _drawn(n: int) -> Iterable[int]:
    sets = list(parts(n).values())
    taken = [0] * COMPONENTS
    rng = np.random.default_rng(0)
    weights = np.array(list(WEIGHTS.values()))
    while True:
        for pick in rng.choice(COMPONENTS, 1024, p=weights / weights.sum()).tolist():
            yield sets[pick][taken[pick]]
            taken[pick] += 1


def mixed(n: int) -> Tally:
    with sl.mix({name: sl.from_items(part) for name, part in parts(n).items()}, WEIGHTS).open() as stream:
        return consume(stream, n)


async def mixed_async(n: int) -> Tally:
    async with sl.mix({name: sl.from_items(part) for name, part in parts(n).items()}, WEIGHTS).open() as stream:
        return await consume_async(stream, n)


PLAIN = "a plain Python loop"
PLAIN_ASYNC = "a plain loop over an async generator"
ITEMS = 400_000

SUITES = (
    Suite(
        question="A mixture of eight: what does the pipeline cost?",
        unit="items/s",
        floor=PLAIN,
        expected=expected,
        smoke_items=2_000,
        note="Eight ranges, weights 1 to 8, items of no size. Whole runs, opening and closing included.",
        cases=(
            Case(PLAIN, plain, ITEMS),
            Case("streamline, for", mixed, ITEMS, (at_least(0.5, PLAIN),)),
            Case(PLAIN_ASYNC, plain_async, ITEMS),
            Case("streamline, async for", mixed_async, ITEMS, (at_least(0.5, PLAIN_ASYNC),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
