"""What does `.map(batched=)` cost beside a plain loop over lists? A NumPy function, and words looked up one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least
from bench.tiny_items import consume, consume_async

SIZE = 256
TERMS = 48
WORDS = 1 << 12

OfList = Callable[[list[int]], list[int]]


def curve(items: list[int]) -> list[int]:
    """Return the sum of a series for each item: some 0.4 µs an item, all of it in NumPy."""
    columns = np.asarray(items)[:, None] + np.arange(TERMS)
    found: list[int] = (columns % 7).sum(axis=1).tolist()
    return found


@cache
def vocabulary() -> dict[str, int]:
    return {f"word {number}": number for number in range(WORDS)}


def ids(items: list[int]) -> list[int]:
    """Look up a word for each item: some 0.3 µs an item, all of it in Python."""
    known = vocabulary()
    return [known[f"word {item % WORDS}"] for item in items]


@cache
def expected(fn: OfList, n: int) -> Tally:
    return plain(fn, n)


def lists(n: int) -> Iterator[list[int]]:
    for start in range(0, n, SIZE):
        yield list(range(start, min(n, start + SIZE)))


def rows(fn: OfList, n: int) -> Iterable[int]:
    for items in lists(n):
        yield from fn(items)


def plain(fn: OfList, n: int) -> Tally:
    return consume(rows(fn, n))


def pipeline(fn: OfList, n: int) -> sl.Pipeline[int]:
    return sl.from_items(range(n)).map(fn, batched=SIZE)


def streamed(fn: OfList, n: int) -> Tally:
    with pipeline(fn, n).open() as stream:
        return consume(stream)


async def streamed_async(fn: OfList, n: int) -> Tally:
    async with pipeline(fn, n).open() as stream:
        return await consume_async(stream)


def one_by_one(fn: OfList, n: int) -> Tally:
    with sl.from_items(range(n)).map(lambda item: fn([item])[0]).open() as stream:
        return consume(stream)


PLAIN = "a plain loop over lists of 256"
TARGETS = (at_least(0.9, PLAIN),)
ITEMS, FEW = 2_000_000, 200_000


def suite(question: str, fn: OfList, note: str) -> Suite:
    return Suite(
        question=question,
        unit="items/s",
        floor=PLAIN,
        expected=partial(expected, fn),
        smoke_items=1_000,
        note=note,
        cases=(
            Case(PLAIN, partial(plain, fn), ITEMS),
            Case("streamline, batched=256, for", partial(streamed, fn), ITEMS, TARGETS),
            Case("streamline, batched=256, async for", partial(streamed_async, fn), ITEMS, TARGETS),
            Case("streamline, a call an item, for", partial(one_by_one, fn), FEW),
        ),
    )


SUITES = (
    suite(
        "A NumPy function of lists: what does the pipeline cost?", curve, "Whole runs, opening and closing included."
    ),
    suite("A Python function of lists: what does the pipeline cost?", ids, "Whole runs, opening and closing included."),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
