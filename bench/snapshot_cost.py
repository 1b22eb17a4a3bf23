"""What does a snapshot cost: the call itself over 64 workers, and one per batch in a training loop?"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import streamline as sl
from bench import batch_arrays, harness
from bench.suite import Case, Suite, Tally, WrongItemsError, at_least, within_ms
from bench.tiny_items import add_one, expected

WORKERS = 64
EVERY = 61  # items between snapshots: no divisor of the workers' round, so they fall everywhere in it


async def call(n: int, *, quantile: float, to_json: bool = False) -> Tally:
    """Time each of many snapshots during one run."""
    count = total = 0
    seconds: list[float] = []
    async with _workers(n).open() as stream:
        async for x in stream:
            count += 1
            total += x
            if count % EVERY == 0:
                start = perf_counter()
                snapshot = stream.snapshot()
                if to_json:
                    snapshot.to_json()
                seconds.append(perf_counter() - start)
                _check(snapshot, count)
    return Tally(count, total, _quantile(seconds, quantile))


def call_from_plain_for(n: int, *, quantile: float) -> Tally:
    count = total = 0
    seconds: list[float] = []
    with _workers(n).open() as stream:
        for x in stream:
            count += 1
            total += x
            if count % EVERY == 0:
                start = perf_counter()
                snapshot = stream.snapshot()
                seconds.append(perf_counter() - start)
                _check(snapshot, count)
    return Tally(count, total, _quantile(seconds, quantile))


def _workers(n: int) -> sl.Pipeline[int]:
    return sl.from_items(range(n)).shard(WORKERS).map(add_one).merge()


def _check(snapshot: sl.Snapshot, count: int) -> None:
    """A quick snapshot of the wrong place is worth nothing."""
    if sum(snapshot.produced) != count:
        raise WrongItemsError(f"a snapshot after {count} items says {sum(snapshot.produced)}")


def _quantile(seconds: list[float], quantile: float) -> float:
    return sorted(seconds)[int(quantile * len(seconds))]


async def loop(n: int, *, snapshots: bool, to_json: bool = False) -> Tally:
    """The loop of batch_arrays, with a snapshot after each batch."""
    reader = batch_arrays.Reader()
    snapshot: Any = None
    async with batch_arrays.pipeline(n).open() as stream:
        async for batch in stream:
            reader.read(batch)
            if snapshots:
                snapshot = stream.snapshot()
            if to_json:
                snapshot.to_json()
    return reader.tally()


CALLS = 64_000
FLOOR = "no snapshot"
ITEMS = batch_arrays.ITEMS
PREPARE = batch_arrays.prepare
AWAIT, PLAIN, JSON = "async for", "plain for", "async for, with to_json()"

SUITES = (
    Suite(
        question="Snapshot: how long does the call take?",
        unit="ms",
        expected=expected,
        smoke_items=2_000,
        note="64 workers, 1,049 snapshots in a run; each round gives one median and one 99th percentile.",
        cases=(
            Case(f"{AWAIT}, median", partial(call, quantile=0.5), CALLS, (within_ms(1),)),
            Case(f"{AWAIT}, p99", partial(call, quantile=0.99), CALLS, (within_ms(1),)),
            Case(f"{PLAIN}, median", partial(call_from_plain_for, quantile=0.5), CALLS),
            Case(f"{PLAIN}, p99", partial(call_from_plain_for, quantile=0.99), CALLS),
            Case(f"{JSON}, median", partial(call, quantile=0.5, to_json=True), CALLS),
        ),
    ),
    Suite(
        question="Snapshot: what does one per batch take from a loop?",
        unit="samples/s",
        floor=FLOOR,
        expected=batch_arrays.expected,
        smoke_items=10 * batch_arrays.BATCH,
        note="The loop of the array benchmark: one worker, batches of 64.",
        cases=(
            Case(FLOOR, partial(loop, snapshots=False), ITEMS, prepare=PREPARE),
            Case("one per batch", partial(loop, snapshots=True), ITEMS, (at_least(0.95, FLOOR),), prepare=PREPARE),
            Case("one per batch, to_json()", partial(loop, snapshots=True, to_json=True), ITEMS, prepare=PREPARE),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
