"""A program that says when its first batch came: `python -m bench.first_batch LIBRARY WHAT`, run by `start_up`.

Two processes, small arrays, batches of 32. It prints one line of JSON: count, checksum and the seconds. Nothing but
numpy is imported before a library is: children that import this module again would pay for it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

BATCH, ITEMS, WIDTH = 32, 640, 16

Open = Callable[[], Iterator[Any]]
"""Starts anew, and returns batches; the second and third time, too."""


def sample(index: int) -> npt.NDArray[np.float32]:
    return np.full(WIDTH, index, dtype=np.float32)


class Samples:
    """A map-style dataset."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        return sample(index)


def samples(indices: range) -> npt.NDArray[np.float32]:
    return np.stack([sample(index) for index in indices])


def pipeline() -> Any:
    import streamline as sl

    return sl.from_items(range(ITEMS)).shard(2).map(sample).batch(BATCH).merge()


def ours() -> Iterator[Any]:
    import streamline as sl

    with pipeline().open(backend=sl.Processes(2)) as stream:
        yield from stream


def our_loader() -> Open:
    import streamline as sl

    loader = pipeline().loader(backend=sl.Processes(2), persistent=True)
    return lambda: iter(loader)


def torch(context: str) -> Iterator[Any]:
    yield from _torch(context, persistent=False)


def torch_loader(context: str) -> Open:
    loader = _torch(context, persistent=True)
    return lambda: iter(loader)


def _torch(context: str, *, persistent: bool) -> Any:
    return importlib.import_module("torch.utils.data").DataLoader(
        Samples(), batch_size=BATCH, num_workers=2, multiprocessing_context=context, persistent_workers=persistent
    )


def spdl() -> Iterator[Any]:
    pipelines = importlib.import_module("spdl.pipeline")
    executors = importlib.import_module("concurrent.futures")
    chunks = [range(start, start + BATCH) for start in range(0, ITEMS, BATCH)]
    with executors.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        builder = pipelines.PipelineBuilder().add_source(chunks)
        builder = builder.pipe(samples, executor=executor, concurrency=2, output_order="input")
        running = builder.add_sink(3).build(num_threads=2)
        with running.auto_stop():
            yield from running


OURS = "streamline.constructors", "streamline.backends.processes"
"""What `import streamline` finds when it is first used."""

LIBRARIES: dict[str, tuple[tuple[str, ...], Callable[[], Iterator[Any]], Callable[[], Open] | None]] = {
    "streamline": (OURS, ours, our_loader),
    "torch-spawn": (("torch",), partial(torch, "spawn"), partial(torch_loader, "spawn")),
    "torch-forkserver": (("torch",), partial(torch, "forkserver"), partial(torch_loader, "forkserver")),
    "spdl-spawn": (("spdl.pipeline",), spdl, None),
}
"""What to import first, untimed; what opens it; what opens epochs of a loader that keeps its processes."""


def timed(start: Open) -> dict[str, float]:
    """Return the time to the first batch; then read on to the end."""
    began = perf_counter()
    batches = start()
    first = next(batches)
    seconds = perf_counter() - began
    count, checksum = len(first), float(first.sum())
    for batch in batches:
        count += len(batch)
        checksum += float(batch.sum())
    return {"count": count, "checksum": checksum, "seconds": seconds}


def main(library: str, what: str) -> None:
    modules, opening, loader = LIBRARIES[library]
    for module in modules:
        importlib.import_module(module)
    start = opening if what != "epoch" or loader is None else loader()
    if what != "first":
        timed(start)
    print(json.dumps(timed(start)))


if __name__ == "__main__":
    main(*sys.argv[1:])
