"""What does `.map(seed=)` cost? Each item draws one number from a generator of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least
from bench.tiny_items import consume

SEED, NAME = 7, "draw"
TOP = 1 << 20


def draw(item: int, *, rng: np.random.Generator) -> int:
    return int(rng.integers(TOP))


async def draw_later(item: int, *, rng: np.random.Generator) -> int:
    return int(rng.integers(TOP))


def key() -> npt.NDArray[Any]:
    """Return what the numbers of the only shard in the first epoch begin with."""
    return np.random.SeedSequence([SEED, len(NAME), *NAME.encode(), 1, 0, 0]).generate_state(2, np.uint64)


@cache
def expected(n: int) -> Tally:
    return one_each(n)


def one_each(n: int) -> Tally:
    begun = key()
    philox = (np.random.Philox(key=begun, counter=[0, 0, item, 0]) for item in range(n))
    return consume(draw(item, rng=np.random.Generator(bits)) for item, bits in enumerate(philox))


def inline(n: int) -> Tally:
    with sl.from_items(range(n)).map(draw, seed=SEED, name=NAME).open() as stream:
        return consume(stream)


def tasks(n: int) -> Tally:
    with sl.from_items(range(n)).map(draw_later, seed=SEED, name=NAME, concurrency=8).open() as stream:
        return consume(stream)


BY_HAND = "a generator made for each item, by hand"

SUITES = (
    Suite(
        question="A random generator for each item: what does it cost?",
        unit="items/s",
        floor=BY_HAND,
        expected=expected,
        smoke_items=1_000,
        note="Whole runs, opening and closing included; one number is drawn an item.",
        cases=(
            Case(BY_HAND, one_each, 100_000),
            Case("streamline, .map(seed=)", inline, 200_000, (at_least(2.0, BY_HAND),)),
            Case("streamline, .map(seed=, concurrency=8)", tasks, 100_000, (at_least(1.0, BY_HAND),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
