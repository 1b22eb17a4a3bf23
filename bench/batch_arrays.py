"""What does a pipeline add to real array work? float32[3, 64, 64], normalised one by one, in batches of 64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

Array = npt.NDArray[np.float32]

BATCH = 64
SHAPE = (3, 64, 64)
POOL = 64  # 3 MiB: the less memory costs, the more the pipeline shows
LEVELS = 8

# Powers of two, so that sums of normalised samples are exact and a checksum may be compared with ==.
MEAN = np.full((3, 1, 1), 0.5, dtype=np.float32)
SCALE = np.full((3, 1, 1), 4.0, dtype=np.float32)


@cache
def pool() -> Array:
    """One array of samples; sample k is filled with k mod 8."""
    levels = np.arange(POOL, dtype=np.float32) % LEVELS
    return np.broadcast_to(levels[:, None, None, None], (POOL, *SHAPE)).copy()


@dataclass(frozen=True)
class Samples:
    """A data set of views into the pool: reading costs nothing, so what is measured is the work and the pipeline."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Array:
        sample: Array = pool()[index % POOL]
        return sample

    def __iter__(self) -> Iterator[Array]:
        return (self[index] for index in range(self.length))


def prepare(_: int) -> None:
    pool()


def normalise(sample: Array) -> Array:
    return (sample - MEAN) * SCALE


@dataclass
class Reader:
    """The consumer: reads one float of each sample, of NumPy and torch batches alike."""

    count: int = 0
    checksum: float = 0.0

    def read(self, batch: Any) -> None:
        self.count += len(batch)
        self.checksum += float(batch[:, 0, 0, 0].sum())

    def tally(self) -> Tally:
        return Tally(self.count, self.checksum)


def consume(batches: Iterable[Any]) -> Tally:
    reader = Reader()
    for batch in batches:
        reader.read(batch)
    return reader.tally()


def expected(n: int) -> Tally:
    return Tally(n, float(sum((k % POOL % LEVELS - 0.5) * 4 for k in range(n))))


def plain_loop(n: int) -> Tally:
    return consume(_stacked(Samples(n)))


def _stacked(samples: Samples) -> Iterator[Array]:
    rows: list[Array] = []
    for sample in samples:
        rows.append(normalise(sample))
        if len(rows) == BATCH:
            yield np.stack(rows)
            rows = []
    if rows:
        yield np.stack(rows)


def pipeline(n: int) -> sl.Pipeline[Any]:
    return sl.from_items(Samples(n)).map(normalise).batch(BATCH)


async def async_for(n: int) -> Tally:
    reader = Reader()
    async with pipeline(n).open() as stream:
        async for batch in stream:
            reader.read(batch)
    return reader.tally()


def plain_for(n: int) -> Tally:
    with pipeline(n).open() as stream:
        return consume(stream)


@dataclass(frozen=True)
class Normalised:
    """The same as a map-style dataset, for torch."""

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Array:
        return normalise(self.samples[index])


def torch_loader(n: int) -> Tally:
    return consume(peer("torch.utils.data").DataLoader(Normalised(Samples(n)), batch_size=BATCH, num_workers=0))


def torchdata_nodes(n: int) -> Tally:
    nodes = peer("torchdata.nodes")
    samples = nodes.Mapper(nodes.IterableWrapper(Samples(n)), normalise)
    return consume(nodes.Loader(nodes.Mapper(nodes.Batcher(samples, BATCH, drop_last=False), np.stack)))


FLOOR = "plain loop"
ITEMS = 81_920

SUITES = (
    Suite(
        question="Arrays in batches: what does a pipeline add to real work?",
        unit="samples/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=10 * BATCH,
        note="float32[3, 64, 64] views of one array → normalise each → batches of 64 → read one float per sample.",
        cases=(
            Case(FLOOR, plain_loop, ITEMS, prepare=prepare),
            Case("streamline, async for", async_for, ITEMS, (at_least(0.9, FLOOR),), prepare=prepare),
            Case("streamline, plain for", plain_for, ITEMS, (at_least(0.9, FLOOR),), prepare=prepare),
            Case("torch DataLoader, num_workers=0", torch_loader, ITEMS, peers=("torch",), prepare=prepare),
            Case("torchdata.nodes", torchdata_nodes, ITEMS, peers=("torchdata", "torch"), prepare=prepare),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
