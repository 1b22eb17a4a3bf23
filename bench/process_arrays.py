"""How fast do large arrays come out of a process? 8 MiB each, made anew for each item."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness, steady
from bench.suite import Case, Suite, Tally, at_least, peer

Array = npt.NDArray[np.float32]

FLOATS = 2 * 2**20
NBYTES = 4 * FLOATS
PAGE = 1024  # floats
LEVELS = 256
ROWS = 64  # of a batch
SLOTS = 4  # of the ring by hand


@cache
def template() -> Array:
    return np.ones(FLOATS, dtype=np.float32)


def fresh(index: int) -> Array:
    """What a producer makes: an array in memory of its own, told apart by its first number."""
    array = template().copy()
    array[0] = index % LEVELS
    return array


@dataclass(frozen=True)
class Arrays:
    """A map-style dataset; an iterable one, too, for spdl."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Array:
        return fresh(index)

    def __iter__(self) -> Iterator[Array]:
        return (fresh(index) for index in range(self.length))


def read(array: Any) -> tuple[int, float]:
    """Touch each page."""
    return 1, float(array.reshape(-1)[::PAGE].sum())


def expected(n: int) -> Tally:
    return Tally(n, float(n * (FLOATS // PAGE - 1) + sum(index % LEVELS for index in range(n))))


@dataclass(frozen=True)
class Rows:
    """A map-style dataset: views of 64 rows of 128 KiB each."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Array:
        return row(index)


def row(index: int) -> Array:
    rows: Array = template().reshape(ROWS, -1)
    view: Array = rows[index % ROWS]
    return view


Fill = Callable[[Array], object]
"""Writes an array into the slot of a ring."""


def copied(index: int) -> Fill:
    return partial(np.copyto, src=fresh(index))


def filled(index: int) -> Fill:
    return partial(fill, index)


def fill(index: int, slot: Array) -> Array:
    slot[:] = template()
    slot[0] = index % LEVELS
    return slot


def stacked(index: int) -> Fill:
    rows = [row(ROWS * index + at) for at in range(ROWS)]
    return lambda slot: np.stack(rows, out=slot.reshape(ROWS, -1))


def emptied(index: int) -> Array:
    """What a producer makes that asks for memory where it will be read."""
    return fill(index, sl.empty(FLOATS, np.float32))


def ring(make: Callable[[int], Fill], n: int) -> Tally:
    """By hand: four slots, views out; the consumer must be done with one before it takes the next."""
    free, full = harness.SPAWN.Semaphore(SLOTS), harness.SPAWN.Semaphore(0)
    memory = SharedMemory(create=True, size=SLOTS * NBYTES)
    process = harness.SPAWN.Process(target=_fill, args=(make, n, memory.name, free, full))
    process.start()
    try:
        return steady.consume(_drained(n, memory, free, full), read)
    finally:
        process.join()
        memory.close()
        memory.unlink()


def _fill(make: Callable[[int], Fill], n: int, name: str, free: Semaphore, full: Semaphore) -> None:
    memory = SharedMemory(name)
    slots = _slots(memory)
    for index in range(n):
        write = make(index)
        free.acquire()
        write(slots[index % SLOTS])
        full.release()
    del slots  # else the memory could not be closed
    memory.close()


def _drained(n: int, memory: SharedMemory, free: Semaphore, full: Semaphore) -> Iterator[Array]:
    slots = _slots(memory)
    for index in range(n):
        full.acquire()
        yield slots[index % SLOTS]
        free.release()


def _slots(memory: SharedMemory) -> npt.NDArray[np.float32]:
    return np.ndarray((SLOTS, FLOATS), dtype=np.float32, buffer=memory.buf)


PIPES: dict[str, Callable[[int], sl.Pipeline[Any]]] = {
    "fresh": lambda n: sl.from_items(Arrays(n)),
    "rows": lambda n: sl.from_items(Rows(ROWS * n)).batch(ROWS),
    "empty": lambda n: sl.from_items(range(n)).map(emptied),
}


def plain_for(name: str, n: int) -> Tally:
    with PIPES[name](n).open(backend=sl.Processes(1)) as stream:
        return steady.consume(stream, read)


async def async_for(name: str, n: int) -> Tally:
    async with PIPES[name](n).open(backend=sl.Processes(1)) as stream:
        return await steady.consume_async(stream, read)


def expected_rows(n: int) -> Tally:
    return Tally(n, float(n * (FLOATS // PAGE)))


def torch_loader(n: int) -> Tally:
    return steady.consume(peer("torch.utils.data").DataLoader(Arrays(n), batch_size=None, num_workers=1), read)


def spdl_pool(n: int) -> Tally:
    pipelines = peer("spdl.pipeline")
    arena = pipelines.SharedMemorySegmentPool(segment_size=NBYTES, count=6)
    return steady.consume(pipelines.iterate_in_subprocess(partial(Arrays, n), arena=arena), read)


FLOOR = "a ring by hand, 4 slots, one copy in"
TORCH, SPDL = "torch DataLoader, 1 worker, tensors", "spdl iterate_in_subprocess, SharedMemorySegmentPool"
STACKED, FILLED = "a ring by hand, 4 slots, np.stack(out=slot)", "a ring by hand, 4 slots, filled in place"
TARGETS = (at_least(0.9, FLOOR), at_least(8, TORCH), at_least(1, SPDL))
MANY, FEW = 600, 100

SUITES = (
    Suite(
        question="Large arrays: how fast do they come out of a process?",
        unit="items/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=8,
        note=(
            "float32 arrays of 8 MiB from one process, each a copy of a template; the consumer reads one float of each "
            "page. 1,000 items/s are 8.4 GB/s. Counted from the first delivery on."
        ),
        cases=(
            Case(FLOOR, partial(ring, copied), MANY),
            Case("streamline, Processes(1), plain for", partial(plain_for, "fresh"), MANY, TARGETS),
            Case("streamline, Processes(1), async for", partial(async_for, "fresh"), MANY, TARGETS),
            Case(TORCH, torch_loader, FEW, peers=("torch",)),
            Case(SPDL, spdl_pool, MANY, peers=("spdl",)),
        ),
    ),
    Suite(
        question="Large batches: how fast are they collated in a process, and read in another one?",
        unit="items/s",
        floor=STACKED,
        expected=expected_rows,
        smoke_items=8,
        note="64 views of 128 KiB are a batch of 8 MiB; the rest is as above. 1,000 items/s are 8.4 GB/s.",
        cases=(
            Case(STACKED, partial(ring, stacked), MANY),
            Case("streamline, .batch(64), plain for", partial(plain_for, "rows"), MANY, (at_least(0.85, STACKED),)),
            Case("streamline, .batch(64), async for", partial(async_for, "rows"), MANY, (at_least(0.85, STACKED),)),
        ),
    ),
    Suite(
        question="Large arrays that are made where they are read: how fast do they come out of a process?",
        unit="items/s",
        floor=FILLED,
        expected=expected,
        smoke_items=8,
        note="As above; each array is filled from the template, in a slot of the ring or in `sl.empty`.",
        cases=(
            Case(FILLED, partial(ring, filled), MANY),
            Case("streamline, sl.empty, plain for", partial(plain_for, "empty"), MANY, (at_least(0.85, FILLED),)),
            Case("streamline, sl.empty, async for", partial(async_for, "empty"), MANY, (at_least(0.85, FILLED),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
