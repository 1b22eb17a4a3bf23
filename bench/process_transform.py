"""Do two processes do twice the work? A transform of pure Python, some 200 µs an item, in batches of 32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness, steady
from bench.suite import Case, Suite, Tally, at_least, peer

BATCH = 32
WIDTH = 128
STEPS = 16  # for each number: with 128 of them, about 200 µs
FACTOR, SUMMAND, MASK = 1_103_515_245, 12_345, 2**31 - 1


def transform(seed: int) -> npt.NDArray[np.int32]:
    """Draw numbers from a generator that is written in Python: work that holds the GIL and calls nothing."""
    state, numbers = seed, []
    for _ in range(WIDTH):
        for _ in range(STEPS):
            state = (state * FACTOR + SUMMAND) & MASK
        numbers.append(state)
    return np.array(numbers, dtype=np.int32)


@cache
def expected(n: int) -> Tally:
    """The same numbers for all seeds at once."""
    states, total = np.arange(n, dtype=np.int64), 0
    for _ in range(WIDTH):
        for _ in range(STEPS):
            states = (states * FACTOR + SUMMAND) & MASK
        total += int(states.sum())
    return Tally(n, total)


def read(batch: Any) -> tuple[int, int]:
    return len(batch), int(batch.sum())


def batches(seeds: range) -> Iterator[npt.NDArray[np.int32]]:
    for start in range(0, len(seeds), BATCH):
        yield np.stack([transform(seed) for seed in seeds[start : start + BATCH]])


def one_process(n: int) -> Tally:
    return steady.consume(batches(range(n)), read)


def two_apart(n: int) -> Tally:
    """The ceiling: two processes that know nothing of each other and drop their batches, once both have begun."""
    pipes = [harness.SPAWN.Pipe() for _ in range(2)]
    processes = [
        harness.SPAWN.Process(target=_drop, args=(range(part, n, 2), theirs)) for part, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()  # else its death would not be seen as the end of the pipe
    calls = [ours for ours, _ in pipes]
    for call in calls:
        call.recv()  # it has imported what it needs
    start = perf_counter()
    for call in calls:
        call.send(None)
    parts = [call.recv() for call in calls]
    seconds = perf_counter() - start
    for process in processes:
        process.join()
    return Tally(sum(count for count, _ in parts), sum(checksum for _, checksum in parts), seconds)


def _drop(seeds: range, calls: Connection) -> None:
    calls.send(None)
    calls.recv()
    count = checksum = 0
    for batch in batches(seeds):
        size, total = read(batch)
        count += size
        checksum += total
    calls.send((count, checksum))


def pipeline(n: int) -> sl.Pipeline[Any]:
    return sl.from_items(range(n)).shard(2).map(transform).batch(BATCH).merge()


def merged_for(n: int) -> Tally:
    """Batched after the merge: arrays leave the processes one by one."""
    pipe = sl.from_items(range(n)).shard(2).map(transform).merge().batch(BATCH)
    with pipe.open(backend=sl.Processes(2)) as stream:
        return steady.consume(stream, read)


def plain_for(n: int) -> Tally:
    with pipeline(n).open(backend=sl.Processes(2)) as stream:
        return steady.consume(stream, read)


async def async_for(n: int) -> Tally:
    async with pipeline(n).open(backend=sl.Processes(2)) as stream:
        return await steady.consume_async(stream, read)


class Transformed:
    """A map-style dataset, for torch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> npt.NDArray[np.int32]:
        return transform(index)


def torch_loader(n: int) -> Tally:
    loader = peer("torch.utils.data").DataLoader
    return steady.consume(loader(Transformed(n), batch_size=BATCH, num_workers=2, collate_fn=np.stack), read)


def transform_all(seeds: range) -> npt.NDArray[np.int32]:
    return np.stack([transform(seed) for seed in seeds])


def spdl(n: int) -> Tally:
    """In chunks made by hand: item by item it is four times slower."""
    chunks = [range(start, min(start + BATCH, n)) for start in range(0, n, BATCH)]
    with peer("concurrent.futures").ProcessPoolExecutor(2) as executor:
        builder = peer("spdl.pipeline").PipelineBuilder().add_source(chunks)
        pipeline = builder.pipe(transform_all, executor=executor, concurrency=2).add_sink(4).build(num_threads=2)
        with pipeline.auto_stop():
            return steady.consume(pipeline, read)


def grain(n: int) -> Tally:
    """The whole run: it buffers a lot before its first delivery."""
    library = peer("grain")
    dataset = library.MapDataset.source(range(n)).map(transform).batch(BATCH).to_iter_dataset()
    tally = steady.consume(dataset.mp_prefetch(library.MultiprocessingOptions(num_workers=2)), read)
    return Tally(tally.count, tally.checksum)


CEILING = "two processes apart, results dropped"
ITEMS = 6_400

SUITES = (
    Suite(
        question="A transform of pure Python: do two processes do twice the work?",
        unit="items/s",
        floor=CEILING,
        expected=expected,
        smoke_items=4 * BATCH,
        note=(
            "Some 200 µs an item, int32[128] each, batches of 32. Counted from the first delivery on; grain, which "
            "buffers many before it, from the start."
        ),
        cases=(
            Case("one process", one_process, ITEMS // 2),
            Case(CEILING, two_apart, ITEMS),
            Case("streamline, Processes(2), plain for", plain_for, ITEMS, (at_least(0.95, CEILING),)),
            Case("streamline, Processes(2), async for", async_for, ITEMS, (at_least(0.95, CEILING),)),
            Case("streamline, batched after the merge, plain for", merged_for, ITEMS, (at_least(0.85, CEILING),)),
            Case("torch DataLoader, 2 workers", torch_loader, ITEMS, peers=("torch",)),
            Case("spdl, ProcessPoolExecutor(2), chunks of 32", spdl, ITEMS, peers=("spdl",)),
            Case("grain, mp_prefetch, 2 workers", grain, ITEMS, peers=("grain",)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
