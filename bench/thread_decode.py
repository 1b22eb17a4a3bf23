"""Do threads decode twice as fast? JPEGs of 640 x 480, decoded and resized to 224 x 224, in batches of 32."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

Image = npt.NDArray[np.uint8]

BATCH = 32
WIDTH, HEIGHT, SIDE = 640, 480, 224
POOL = 32
WINDOW = 64


@cache
def pool() -> list[bytes]:
    """Encoded images as smooth as photographs are: noise that is enlarged."""
    library, rng, files = peer("PIL.Image"), np.random.default_rng(0), []
    for _ in range(POOL):
        coarse = rng.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), dtype=np.uint8)
        file = BytesIO()
        library.fromarray(coarse).resize((WIDTH, HEIGHT), library.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def prepare(_: int) -> None:
    pool()


def thumbnail(encoded: bytes) -> Image:
    library = peer("PIL.Image")
    with library.open(BytesIO(encoded)) as image:
        small = image.convert("RGB").resize((SIDE, SIDE), library.Resampling.BILINEAR)
    return np.asarray(small)


@dataclass(frozen=True)
class Files:
    """A data set of encoded images."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> bytes:
        return pool()[index % POOL]

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(self.length))


def consume(batches: Iterable[Any]) -> Tally:
    """Read the middle of each image."""
    count = checksum = 0
    for batch in batches:
        count += len(batch)
        checksum += int(batch[:, SIDE // 2, SIDE // 2].sum())
    return Tally(count, checksum)


@cache
def expected(n: int) -> Tally:
    middles = [int(thumbnail(file)[SIDE // 2, SIDE // 2].sum()) for file in pool()]
    return Tally(n, sum(middles[index % POOL] for index in range(n)))


def stacked(images: Iterable[Image]) -> Iterator[npt.NDArray[np.uint8]]:
    rows: list[Image] = []
    for image in images:
        rows.append(image)
        if len(rows) == BATCH:
            yield np.stack(rows)
            rows = []
    if rows:
        yield np.stack(rows)


def one_thread(n: int) -> Tally:
    return consume(stacked(thumbnail(file) for file in Files(n)))


def window(n: int) -> Tally:
    return consume(stacked(_windowed(n)))


def _windowed(n: int) -> Iterator[Image]:
    with ThreadPoolExecutor(2) as executor:
        running: deque[Future[Image]] = deque()
        for file in Files(n):
            running.append(executor.submit(thumbnail, file))
            if len(running) == WINDOW:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def map_in_threads(n: int) -> Tally:
    pipeline = sl.from_items(Files(n)).map(thumbnail, executor="thread", concurrency=2).batch(BATCH)
    with pipeline.open() as stream:
        return consume(stream)


def thread_hosts(n: int) -> Tally:
    pipeline = sl.from_items(Files(n)).shard(2).map(thumbnail).batch(BATCH).merge()
    with pipeline.open(backend=sl.Threads(2)) as stream:
        return consume(stream)


@dataclass(frozen=True)
class Thumbnails:
    """A map-style dataset, for torch."""

    files: Files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image:
        return thumbnail(self.files[index])


def torch_loader(n: int) -> Tally:
    return consume(peer("torch.utils.data").DataLoader(Thumbnails(Files(n)), batch_size=BATCH, num_workers=2))


def spdl(n: int) -> Tally:
    builder = peer("spdl.pipeline").PipelineBuilder().add_source(Files(n))
    builder = builder.pipe(thumbnail, concurrency=2, output_order="input").aggregate(BATCH).pipe(np.stack)
    pipeline = builder.add_sink(3).build(num_threads=2)
    with pipeline.auto_stop():
        return consume(pipeline)


FLOOR, TORCH, SPDL = "ThreadPoolExecutor(2), window of 64", "torch DataLoader, 2 workers", "spdl, 2 threads"
TARGETS = (at_least(1, FLOOR), at_least(1.4, TORCH), at_least(1.2, SPDL))
ITEMS = 640
PILLOW = ("PIL",)

SUITES = (
    Suite(
        question="JPEGs: do two threads decode twice as fast?",
        unit="items/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=2 * BATCH,
        note="640 x 480, resized to 224 x 224 by Pillow, batches of 32. Whole runs, opening and closing included.",
        cases=(
            Case("one thread", one_thread, ITEMS // 2, peers=PILLOW, prepare=prepare),
            Case(FLOOR, window, ITEMS, peers=PILLOW, prepare=prepare),
            Case('streamline, executor="thread"', map_in_threads, ITEMS, TARGETS, peers=PILLOW, prepare=prepare),
            Case("streamline, Threads(2)", thread_hosts, ITEMS, TARGETS, peers=PILLOW, prepare=prepare),
            Case(TORCH, torch_loader, ITEMS, peers=("torch", *PILLOW), prepare=prepare),
            Case(SPDL, spdl, ITEMS, peers=("spdl", *PILLOW), prepare=prepare),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
