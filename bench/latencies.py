"""How late is a first batch, and how soon do a cancelled loop and a pause stand still, while a slow function runs?"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import anyio

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, within_ms

BATCH, WORK_S, RUN_S = 32, 2e-4, 0.03


def stamp(_: int) -> float:
    """Work in Python for 200 µs, and return when it was done: a clock that all processes share."""
    stop = perf_counter() + WORK_S
    while (now := perf_counter()) < stop:
        pass
    return now


def opened(processes: int, batched: str) -> Any:
    """Return a stream without end, batched in the "worker" or after the "merge"."""
    mapped = sl.from_items(range(10**9)).shard(2).map(stamp)
    pipe = mapped.batch(BATCH).merge() if batched == "worker" else mapped.merge().batch(BATCH)
    return pipe.open(backend=sl.Processes(processes) if processes else sl.Inline())


def first_batch(n: int, **where: Any) -> Tally:
    seconds = []
    for _ in range(n):
        with opened(**where) as stream:
            made = max(next(stream))
            seconds.append(perf_counter() - made)
    return Tally(n, 0, median(seconds))


async def cancellation(n: int, **where: Any) -> Tally:
    seconds = []
    for _ in range(n):
        with anyio.CancelScope() as scope:
            async with opened(**where) as stream:
                await anext(stream)
                scope.deadline = anyio.current_time() + RUN_S
                async for _ in stream:
                    pass
        seconds.append(anyio.current_time() - scope.deadline)
    return Tally(n, 0, median(seconds))


def pause(n: int, **where: Any) -> Tally:
    seconds = []
    with opened(**where) as stream:
        for _ in range(n):
            next(stream)
            began = perf_counter()
            with stream.paused():
                seconds.append(perf_counter() - began)
    return Tally(n, 0, median(seconds))


def suite(question: str, run: Any, n: int, inline_ms: float, processes_ms: float) -> Suite:
    cases = [
        Case(f"{name}, batched {how}", partial(run, processes=processes, batched=batched), n, (within_ms(most),))
        for name, processes, most in (("Inline()", 0, inline_ms), ("Processes(2)", 2, processes_ms))
        for how, batched in (("in the worker", "worker"), ("after the merge", "merge"))
    ]
    note = f"Two shards, 200 µs of Python an item, batches of {BATCH}. The median of {n} times."
    return Suite(question=question, unit="ms", cases=tuple(cases), smoke_items=1, note=note)


SUITES = (
    suite("Latency: how late is the first batch after its last item was made?", first_batch, 7, 3, 6),
    suite("Latency: how long until a cancelled loop is left?", cancellation, 7, 7, 60),
    suite("Latency: how long until nothing moves in a pause?", pause, 40, 4, 6),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
