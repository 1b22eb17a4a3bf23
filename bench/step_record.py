"""What does a record of steps cost: time of the loop's thread a step, and bytes on disk?"""

from __future__ import annotations

import atexit
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from time import thread_time
from typing import Any, Literal

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, within_mb, within_ms
from streamline.snapshot.recorder import StepWriter

BATCH = 32
STEPS = 2000


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


@cache
def lines(n: int, files: int) -> Path:
    """Return a directory of n lines of 20 to 400 characters."""
    directory = Path(mkdtemp(prefix="bench-"))
    atexit.register(shutil.rmtree, directory)
    chance = random.Random(n)
    for number in range(files):
        text = "".join(f"{line:010}".ljust(chance.randint(20, 400), "x") + "\n" for line in range(number, n, files))
        (directory / f"{number:04}.txt").write_text(text)
    return directory


def recorded(
    n: int,
    *,
    shards: int,
    window: int | None = None,
    merge: Literal["strict", "best_effort"] = "strict",
    after: int | None = None,
    in_bytes: bool = False,
) -> Tally:
    """Record batches of n lines; return CPU seconds a step, or megabytes that a million steps would take.

    Args:
      window: of a shuffle of each shard; None: there is none.
      after: of one after the merge.
    """
    pipe: Any = sl.read_lines(lines(n, max(64, shards)) / "*.txt").shard(shards)
    if window is not None:
        pipe = pipe.shuffle(window=window)
    pipe = pipe.merge(merge)
    if after is not None:
        pipe = pipe.shuffle(window=after)
    count = total = steps = 0
    with TemporaryDirectory() as folder, timed_steps() as seconds:
        with pipe.batch(BATCH, collate=None).open(record=sl.Recorder(folder)) as stream:
            for batch in stream:
                count, total, steps = count + len(batch), total + sum(int(line[:10]) for line in batch), steps + 1
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return Tally(count, total, sum(seconds) / steps, size / steps if in_bytes else None)


def expected(n: int) -> Tally:
    return Tally(n, n * (n - 1) // 2)


N = STEPS * BATCH
PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1 shard", {"shards": 1}),
    ("1 shard, a window of 4,096", {"shards": 1, "window": 4096}),
    ("8 shards, windows of 1,024", {"shards": 8, "window": 1024}),
    ("64 shards", {"shards": 64}),
    ("64 shards, windows of 256", {"shards": 64, "window": 256}),
    ("64 shards, a window of 4,096 after the merge", {"shards": 64, "after": 4096}),
    ("64 shards, best effort", {"shards": 64, "merge": "best_effort"}),
    (
        "64 shards, best effort, a window of 4,096 after the merge",
        {"shards": 64, "merge": "best_effort", "after": 4096},
    ),
    ("1,000 shards", {"shards": 1000}),
    ("1,000 shards, windows of 16", {"shards": 1000, "window": 16}),
)
WITHIN_MS = 0.1
WITHIN_BYTES = 100

SUITES = (
    Suite(
        question="A record of steps: CPU time of the loop's thread a step",
        unit="ms",
        expected=expected,
        smoke_items=10 * BATCH,
        note="Lines of 20 to 400 characters in batches of 32. Of a training step of 10 ms, 0.1 ms is 1 %.",
        cases=tuple(Case(name, partial(recorded, **plan), N, (within_ms(WITHIN_MS),)) for name, plan in PLANS),
    ),
    Suite(
        question="A record of steps: MB that a million steps take, which is bytes a step",
        unit="MB",
        expected=expected,
        smoke_items=10 * BATCH,
        note="The same.",
        cases=tuple(
            Case(name, partial(recorded, **plan, in_bytes=True), N, (within_mb(WITHIN_BYTES),)) for name, plan in PLANS
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
