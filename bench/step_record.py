"""What does a record of steps cost: time of the loop's thread a step, and bytes on disk?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, within_ms
from streamline.snapshot.recorder import StepWriter

BATCH = 32
STEPS = 400


@contextmanager
def timed_steps() -> Iterator[list[float]]:
    """Yield a list to which the CPU time of each step's recording is added."""
    seconds: list[float] = []
    inner = StepWriter.step

    def step(writer: StepWriter, *args: Any, **options: Any) -> None:
        began = thread_time()
        inner(writer, *args, **options)
        seconds.append(thread_time() - began)

    StepWriter.step = step  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        StepWriter.step = inner  # type: ignore[method-assign]


def recorded(n: int, *, shards: int, window: int | None, in_bytes: bool = False) -> Tally:
    """Record batches of n items; return CPU seconds a step, or megabytes that a million steps would take."""
    pipe: Any = sl.from_items(range(n)).shard(shards)
    if window is not None:
        pipe = pipe.shuffle(window=window)
    count = total = steps = 0
    with TemporaryDirectory() as folder, timed_steps() as seconds:
        with pipe.merge().batch(BATCH, collate=None).open(record=sl.Recorder(folder)) as stream:
            for batch in stream:
                count, total, steps = count + len(batch), total + sum(batch), steps + 1
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return Tally(count, total, sum(seconds) / steps, size / steps if in_bytes else None)


def expected(n: int) -> Tally:
    return Tally(n, n * (n - 1) // 2)


N = STEPS * BATCH
PLANS = (
    ("1 shard", {"shards": 1, "window": None}),
    ("1 shard, a window of 4,096", {"shards": 1, "window": 4096}),
    ("8 shards, windows of 1,024", {"shards": 8, "window": 1024}),
    ("64 shards", {"shards": 64, "window": None}),
    ("64 shards, windows of 256", {"shards": 64, "window": 256}),
    ("1,000 shards", {"shards": 1000, "window": None}),
)
WITHIN_MS = {"1 shard": 0.1, "1 shard, a window of 4,096": 0.1}

SUITES = (
    Suite(
        question="A record of steps: CPU time of the loop's thread a step",
        unit="ms",
        expected=expected,
        smoke_items=10 * BATCH,
        note="Integers in batches of 32. Of a training step of 10 ms, 0.1 ms is 1 %.",
        cases=tuple(
            Case(name, partial(recorded, **plan), N, (within_ms(WITHIN_MS[name]),) if name in WITHIN_MS else ())
            for name, plan in PLANS
        ),
    ),
    Suite(
        question="A record of steps: MB that a million steps take, which is bytes a step",
        unit="MB",
        expected=expected,
        smoke_items=10 * BATCH,
        note="The same.",
        cases=tuple(Case(name, partial(recorded, **plan, in_bytes=True), N) for name, plan in PLANS),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
