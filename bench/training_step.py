"""What does a loader add to a training step of 5 ms, over the same loop with batches that lie ready in a list?

Both loops run in one process, in turn, some dozen steps each, and the best stretch of each counts. Two clocks: the
wall's, which needs cores that nothing else uses; and the CPU time of the process, all its threads together, which is
what a step pays where it has no core to spare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, peer, within_ms
from streamline.backends.base import Backend

Step = Callable[[], Callable[[], object]]
"""Returns what a step does beside its batch."""

Clock = Callable[[], float]

STEP_S = 0.005
MOST_MS = 0.1
"""2 % of a step."""

BLOCK = 40
"""Steps of one loop before it is the other's turn: many times as many as batches wait between threads."""

SAMPLES, POOL, SIZE = 64, 8, 192


@cache
def pool() -> list[dict[str, Any]]:
    return [
        {"image": np.full((SAMPLES, 3, 32, 32), level, np.uint8), "label": np.full(SAMPLES, level, np.int64)}
        for level in range(POOL)
    ]


@dataclass(frozen=True)
class Batches:
    """A data set of batches: making them is another question."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return pool()[index % POOL]


@cache
def products() -> Callable[[], object]:
    """Return a step of products of matrices, on one core and without the GIL, that takes 5 ms of it."""
    torch = peer("torch")
    torch.set_num_threads(1)
    square = torch.ones(SIZE, SIZE)

    def multiply(count: int) -> float:
        began = time.thread_time()
        for _ in range(count):
            square @ square
        return time.thread_time() - began

    multiply(20)
    count = max(1, round(20 * STEP_S / min(multiply(20) for _ in range(20))))
    return partial(multiply, count)


def sleeps() -> Callable[[], object]:
    return partial(time.sleep, STEP_S)


def train(batches: Iterator[Any], count: int, step: Callable[[], object], clock: Clock) -> tuple[float, float]:
    """Return how long a step took, of `count`, and a checksum of their batches."""
    checksum, began = 0.0, clock()
    for batch in islice(batches, count):
        checksum += float(batch["image"][0, 0, 0, 0]) + int(batch["label"][0])
        step()
    return (clock() - began) / count, checksum


def added(n: int, *, step: Step, backend: Callable[[], Backend], transfer: bool, clock: Clock) -> Tally:
    """Train on a list and on a loader in turn, and return what the loader added to a step."""
    lead = 2 * POOL
    pipe = sl.from_items(Batches(n + lead)).shard(2).merge()
    listed = pool()
    if transfer:
        torch = peer("torch")
        pipe = pipe.transfer("cpu")
        listed = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in listed]
    ready, once, checksum = cycle(listed), step(), 0.0
    without, with_loader = list[float](), list[float]()
    with pipe.loader(backend=backend()) as loader:
        batches = iter(loader)
        train(batches, lead, once, clock)  # starting up is another question
        for done in range(0, n, BLOCK):
            count = min(BLOCK, n - done)
            without.append(train(ready, count, once, clock)[0])
            took, found = train(batches, count, once, clock)
            with_loader.append(took)
            checksum += found
        assert next(batches, None) is None
    return Tally(n, checksum, min(with_loader) - min(without))


def expected(n: int) -> Tally:
    return Tally(n, float(sum(2 * (at % POOL) for at in range(n))))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "Inline()": sl.Inline,
    "Threads(1)": partial(sl.Threads, 1),
    "Processes(1)": partial(sl.Processes, 1),
}

CLOCKS: dict[str, Clock] = {"CPU time of the process": time.process_time, "time": time.perf_counter}


def _cases(clock: Clock, step: Step, what: str, peers: tuple[str, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{what}, {name}{', .transfer(cpu)' if transfer else ''}",
            partial(added, step=step, backend=backend, transfer=transfer, clock=clock),
            5 * BLOCK,
            (within_ms(MOST_MS),),
            peers=("torch",) if transfer else peers,
        )
        for name, backend in BACKENDS.items()
        for transfer in (False, True)
    )


SUITES = tuple(
    Suite(
        question=f"A training step of 5 ms: what does a loader add to its {name}?",
        unit="ms",
        expected=expected,
        smoke_items=2 * POOL,
        note=(
            "Over the same steps in the same process on batches that lie in a list (uint8[64, 3, 32, 32] and "
            "int64[64]). One step multiplies matrices in torch, on one core, the other one sleeps."
        ),
        cases=(*_cases(clock, sleeps, "sleep", ()), *_cases(clock, products, "products", ("torch",))),
    )
    for name, clock in CLOCKS.items()
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
