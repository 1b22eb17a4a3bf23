"""How fast do large arrays come out of a process? 8 MiB each, made anew for each item."""

from __future__ import annotations

from collections.abc import Iterator
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
    return 1, float(array[::PAGE].sum())


def expected(n: int) -> Tally:
    return Tally(n, float(n * (FLOATS // PAGE - 1) + sum(index % LEVELS for index in range(n))))


def ring(n: int) -> Tally:
    """By hand: four slots, one copy in, views out; the consumer must be done with one before it takes the next."""
    free, full = harness.SPAWN.Semaphore(SLOTS), harness.SPAWN.Semaphore(0)
    memory = SharedMemory(create=True, size=SLOTS * NBYTES)
    process = harness.SPAWN.Process(target=_fill, args=(n, memory.name, free, full))
    process.start()
    try:
        return steady.consume(_drained(n, memory, free, full), read)
    finally:
        process.join()
        memory.close()
        memory.unlink()


def _fill(n: int, name: str, free: Semaphore, full: Semaphore) -> None:
    memory = SharedMemory(name)
    slots = _slots(memory)
    for index in range(n):
        array = fresh(index)
        free.acquire()
        slots[index % SLOTS] = array
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


def plain_for(n: int) -> Tally:
    with sl.from_items(Arrays(n)).open(backend=sl.Processes(1)) as stream:
        return steady.consume(stream, read)


async def async_for(n: int) -> Tally:
    async with sl.from_items(Arrays(n)).open(backend=sl.Processes(1)) as stream:
        return await steady.consume_async(stream, read)


def torch_loader(n: int) -> Tally:
    return steady.consume(peer("torch.utils.data").DataLoader(Arrays(n), batch_size=None, num_workers=1), read)


def spdl_pool(n: int) -> Tally:
    pipelines = peer("spdl.pipeline")
    arena = pipelines.SharedMemorySegmentPool(segment_size=NBYTES, count=6)
    return steady.consume(pipelines.iterate_in_subprocess(partial(Arrays, n), arena=arena), read)


FLOOR = "a ring by hand, 4 slots, one copy in"
TORCH, SPDL = "torch DataLoader, 1 worker, tensors", "spdl iterate_in_subprocess, SharedMemorySegmentPool"
TARGETS = (at_least(0.8, FLOOR), at_least(8, TORCH), at_least(1, SPDL))
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
            Case(FLOOR, ring, MANY),
            Case("streamline, Processes(1), plain for", plain_for, MANY, TARGETS),
            Case("streamline, Processes(1), async for", async_for, MANY, TARGETS),
            Case(TORCH, torch_loader, FEW, peers=("torch",)),
            Case(SPDL, spdl_pool, MANY, peers=("spdl",)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
