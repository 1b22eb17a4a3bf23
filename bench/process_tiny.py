"""What does an item cost at the border of a process when it is next to nothing? Integers from one process."""

from __future__ import annotations

from time import perf_counter

import streamline as sl
from bench import harness, steady
from bench.steady import steady_tally
from bench.suite import Case, Suite, Tally, at_least, items_per_second, peer
from bench.tiny_items import FEW, MANY, SOME, add_one, expected


def pipeline(n: int) -> sl.Pipeline[int]:
    return sl.from_items(range(n)).map(add_one)


def plain_for(n: int) -> Tally:
    count = total = 0
    with pipeline(n).open(backend=sl.Processes(1)) as stream:
        first = next(stream)
        start = perf_counter()
        for x in stream:
            count += 1
            total += x
        return steady_tally(count + 1, total + first, 1, perf_counter() - start)


async def async_for(n: int) -> Tally:
    count = total = 0
    async with pipeline(n).open(backend=sl.Processes(1)) as stream:
        first = await anext(stream)
        start = perf_counter()
        async for x in stream:
            count += 1
            total += x
        return steady_tally(count + 1, total + first, 1, perf_counter() - start)


class Numbers:
    """A map-style dataset, for torch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return add_one(index)


def torch_batches(n: int) -> Tally:
    return _torch(n, 64, lambda batch: (len(batch), int(batch.sum())))


def torch_items(n: int) -> Tally:
    return _torch(n, None, lambda x: (1, x))


def _torch(n: int, batch_size: int | None, read: steady.Read) -> Tally:
    loader = peer("torch.utils.data").DataLoader
    return steady.consume(loader(Numbers(n), batch_size=batch_size, num_workers=1), read)


BATCHES, ITEMS = "torch DataLoader, 1 worker, batch_size=64", "torch DataLoader, 1 worker, batch_size=None"
TARGETS = (items_per_second(1e6), at_least(5, BATCHES), at_least(30, ITEMS))

SUITES = (
    Suite(
        question="Tiny items out of a process: what does an item cost at the border?",
        unit="items/s",
        expected=expected,
        smoke_items=2_000,
        note="range → x + 1 in one process → a consumer that counts and adds up. Counted from the first delivery on.",
        cases=(
            Case("streamline, Processes(1), plain for", plain_for, MANY, TARGETS),
            Case("streamline, Processes(1), async for", async_for, MANY, TARGETS),
            Case(BATCHES, torch_batches, SOME, peers=("torch",)),
            Case(ITEMS, torch_items, 2 * FEW, peers=("torch",)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
