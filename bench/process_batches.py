"""What do batches cost that come out of processes? Those of `batch_arrays`, normalised and stacked in two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import streamline as sl
from bench import batch_arrays, harness, steady
from bench.batch_arrays import BATCH, Normalised, Samples, expected, normalise, prepare
from bench.large_images import ROWS, Rows, images, row, tally_of_images
from bench.suite import Case, Suite, Tally, at_least, peer


def read(batch: Any) -> tuple[int, float]:
    """Read one float of each sample."""
    return len(batch), float(batch[:, 0, 0, 0].sum())


def pipeline(n: int) -> sl.Pipeline[Any]:
    return sl.from_items(Samples(n)).shard(2).map(normalise).batch(BATCH).merge()


def plain_for(n: int) -> Tally:
    with pipeline(n).open(backend=sl.Processes(2)) as stream:
        return steady.consume(stream, read)


async def async_for(n: int) -> Tally:
    async with pipeline(n).open(backend=sl.Processes(2)) as stream:
        return await steady.consume_async(stream, read)


def torch_loader(n: int) -> Tally:
    return steady.consume(
        peer("torch.utils.data").DataLoader(Normalised(Samples(n)), batch_size=BATCH, num_workers=2), read
    )


def grain(n: int) -> Tally:
    library = peer("grain")
    dataset = library.MapDataset.source(Samples(n)).map(normalise).batch(BATCH, batch_fn=np.stack)
    options = library.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    workers = library.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
    return steady.consume(dataset.to_iter_dataset(options).mp_prefetch(workers), read)


# Large ones ---------------------------------------------------------------------------------------------------------


def prepare_images(_: int) -> None:
    images()


def read_images(batch: Any) -> tuple[int, float]:
    """Read one float of each image, and its label."""
    return len(batch["label"]), float(batch["image"][:, 0, 0, 0].sum() + batch["label"].sum())


def stacked_images(n: int) -> Tally:
    rows = Rows(n)

    def batches() -> Iterator[Any]:
        for start in range(0, n, ROWS):
            items = [rows[at] for at in range(start, start + ROWS)]
            yield {name: np.stack([item[name] for item in items]) for name in items[0]}

    return steady.consume(batches(), read_images)


def images_for(n: int) -> Tally:
    pipe = sl.from_items(range(n)).shard(2).map(row).batch(ROWS).merge()
    with pipe.open(backend=sl.Processes(2)) as stream:
        return steady.consume(stream, read_images)


def images_of_torch(n: int) -> Tally:
    return steady.consume(
        peer("torch.utils.data").DataLoader(Rows(n), ROWS, num_workers=2, multiprocessing_context="spawn"), read_images
    )


FLOOR, TORCH = "plain loop, one process", "torch DataLoader, 2 workers"
MANY, SOME = 81_920, 20_480

SUITES = (
    Suite(
        question="Arrays in batches out of two processes: what does the border cost?",
        unit="samples/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=10 * BATCH,
        note=(
            "float32[3, 64, 64], normalised one by one and stacked in batches of 64 (3 MiB) in 2 processes; the "
            "consumer reads one float per sample. Counted from the first delivery on."
        ),
        cases=(
            Case(FLOOR, batch_arrays.plain_loop, MANY, prepare=prepare),
            Case("streamline, Processes(2), plain for", plain_for, MANY, (at_least(4, TORCH),)),
            Case("streamline, Processes(2), async for", async_for, MANY, (at_least(4, TORCH),)),
            Case(TORCH, torch_loader, SOME, peers=("torch",), prepare=prepare),
            Case("grain, mp_prefetch, 2 workers", grain, SOME, peers=("grain",), prepare=prepare),
        ),
    ),
    Suite(
        question="Large batches out of two processes: what does the border cost?",
        unit="samples/s",
        floor=FLOOR,
        expected=tally_of_images,
        smoke_items=4 * ROWS,
        note="float32[3, 224, 224], in memory, stacked in batches of 64 (37 MiB). Counted from the first delivery on.",
        cases=(
            Case(FLOOR, stacked_images, 100 * ROWS, prepare=prepare_images),
            Case("streamline, Processes(2)", images_for, 200 * ROWS, (at_least(4, TORCH),)),
            Case(TORCH, images_of_torch, 40 * ROWS, peers=("torch",), prepare=prepare_images),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
