"""What does .pack cost beside a plain loop? Documents of tokens, cut into blocks of 2,048."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least

LENGTH = 2048
EOS = 1
POOL = 512

Tokens = npt.NDArray[np.int32]


@cache
def pool() -> list[Tokens]:
    """Documents of 30 to some thousand tokens, as texts are: many short ones, few long ones."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(20_000, 30 + rng.lognormal(5.5, 1.2, POOL)).astype(int)
    return [rng.integers(2, 32_000, size, dtype=np.int32) for size in sizes.tolist()]


class Documents:
    """A data set of them."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tokens:
        return pool()[index % POOL]


def prepare(_: int) -> None:
    pool()


def consume(blocks: Iterable[dict[str, Any]]) -> Tally:
    count = checksum = 0
    for block in blocks:
        count += 1
        checksum += int(block["tokens"][-1]) + int(block["segment_ids"][-1]) + int(block["positions"][-1])
    return Tally(count, checksum)


@cache
def expected(n: int) -> Tally:
    return consume(packed(Documents(n)[index] for index in range(n)))


def packed(documents: Iterable[Tokens]) -> Iterator[dict[str, Any]]:
    """What one would write: parts of documents until a block is full, then one concatenation for each array."""
    eos = np.array([EOS], np.int32)
    parts: list[Tokens] = []
    sizes: list[int] = []
    room = LENGTH
    for document in documents:
        whole = np.concatenate([document, eos])
        start = 0
        while start < len(whole):
            part = whole[start : start + room]
            parts.append(part)
            sizes.append(len(part))
            start += len(part)
            room -= len(part)
            if not room:
                yield block_of(parts, sizes)
                parts, sizes, room = [], [], LENGTH
    if parts:
        yield block_of([*parts, np.zeros(room, np.int32)], sizes)


def block_of(parts: list[Tokens], sizes: list[int]) -> dict[str, Any]:
    missing = LENGTH - sum(sizes)
    ids = [np.full(size, number, np.int32) for number, size in enumerate(sizes, 1)]
    positions = [np.arange(size, dtype=np.int32) for size in sizes]
    padding = [np.zeros(missing, np.int32)] if missing else []
    return {
        "tokens": np.concatenate(parts),
        "segment_ids": np.concatenate([*ids, *padding]),
        "positions": np.concatenate([*positions, *padding]),
    }


def plain(n: int) -> Tally:
    documents = Documents(n)
    return consume(packed(documents[index] for index in range(n)))


def streamed(n: int) -> Tally:
    with sl.from_items(Documents(n)).pack(LENGTH, eos=EOS).open() as stream:
        return consume(stream)


async def streamed_async(n: int) -> Tally:
    count = checksum = 0
    async with sl.from_items(Documents(n)).pack(LENGTH, eos=EOS).open() as stream:
        async for block in stream:
            count += 1
            checksum += int(block["tokens"][-1]) + int(block["segment_ids"][-1]) + int(block["positions"][-1])
    return Tally(count, checksum)


PLAIN = "a plain Python loop"
TARGETS = (at_least(0.5, PLAIN),)
ITEMS = 40_000

SUITES = (
    Suite(
        question="Packing documents into blocks of 2,048 tokens: what does the pipeline cost?",
        unit="items/s",
        floor=PLAIN,
        expected=expected,
        smoke_items=POOL,
        note="Items are documents, of some 500 tokens. Whole runs, opening and closing included.",
        cases=(
            Case(PLAIN, plain, ITEMS, prepare=prepare),
            Case("streamline, for", streamed, ITEMS, TARGETS, prepare=prepare),
            Case("streamline, async for", streamed_async, ITEMS, TARGETS, prepare=prepare),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
