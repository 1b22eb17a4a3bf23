"""What does `.transfer` add to a batch on the host, and how near is it to what a GPU's wires can carry?

The first two tables need no GPU. The others do: `python -m bench.transfer` runs them where there is one, and says so
where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from mmap import mmap
from time import perf_counter
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.large_images import POOL, ROWS, Rows, images, row, tally_of_images
from bench.suite import Case, Suite, Tally, at_least, peer
from streamline.transfer.cuda import CudaCopier

LARGE_ROWS = 4096
"""Of 12 KiB each: 48 MiB, of which a copy takes a millisecond."""


@cache
def pool(rows: int) -> list[dict[str, Any]]:
    """Batches that are there: reading costs nothing, so what is measured is the way to the device."""
    return [
        {"image": np.full((rows, 3, 32, 32), level, np.float32), "label": np.full(rows, level, np.int64)}
        for level in range(POOL)
    ]


@dataclass(frozen=True)
class Batches:
    """A data set of batches, which are copied as loading them would write them."""

    length: int
    rows: int = ROWS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)
        return pool(self.rows)[index % POOL]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self.length))


def prepare(_: int) -> None:
    pool(ROWS)


def prepare_large(_: int) -> None:
    pool(LARGE_ROWS)
    torch = peer("torch")
    torch.zeros(1, device="cuda")


def consume(batches: Iterable[Any]) -> Tally:
    """Read one number of each array, as NumPy and torch both give it."""
    count, checksum = 0, 0.0
    for batch in batches:
        count += 1
        checksum += float(batch["image"][0, 0, 0, 0]) + int(batch["label"][0])
    return Tally(count, checksum)


def expected(n: int) -> Tally:
    return Tally(n, float(sum(2 * (at % POOL) for at in range(n))))


# On the host --------------------------------------------------------------------------------------------------------


def plain_loop(n: int) -> Tally:
    return consume(Batches(n))


def plain_tensors(n: int) -> Tally:
    torch = peer("torch")
    return consume({name: torch.from_numpy(array) for name, array in batch.items()} for batch in Batches(n))


def streamed(n: int) -> Tally:
    with sl.from_items(Batches(n)).open() as stream:
        return consume(stream)


def transferred(device: str, n: int) -> Tally:
    with sl.from_items(Batches(n)).transfer(device).open() as stream:
        return consume(stream)


def loader(n: int, **options: Any) -> Iterable[Any]:
    """torch's, over batches that are made already."""
    batches: Iterable[Any] = peer("torch.utils.data").DataLoader(
        Batches(n, options.pop("rows", ROWS)), batch_size=None, **options
    )
    return batches


def torch_loader(n: int) -> Tally:
    return consume(loader(n))


# On a GPU -----------------------------------------------------------------------------------------------------------


def after_work(batches: Iterable[Any], steps: int) -> Tally:
    """Multiply matrices after each batch, as training does, and read what came at the end: only then all is done."""
    torch = peer("torch")
    square, total, count = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16), None, 0
    for batch in batches:
        for _ in range(steps):
            square @ square
        found = batch["image"][0, 0, 0, 0].double() + batch["label"][0]
        total = found if total is None else total + found
        count += 1
    return Tally(count, 0.0 if total is None else float(total))


def pinned_limit(n: int, steps: int = 0) -> Tally:
    """Copy the same pinned batches again and again, with nothing in between: what the wires carry."""
    torch = peer("torch")
    pinned = [
        {name: torch.from_numpy(array).pin_memory() for name, array in batch.items()} for batch in pool(LARGE_ROWS)
    ]
    moved = (
        {name: tensor.to("cuda", non_blocking=True) for name, tensor in pinned[at % POOL].items()} for at in range(n)
    )
    return after_work(moved, steps)


def work_alone(n: int, steps: int) -> Tally:
    """Work on batches that are on the GPU already."""
    torch = peer("torch")
    there = [{name: torch.from_numpy(array).cuda() for name, array in batch.items()} for batch in pool(LARGE_ROWS)]
    return after_work((there[at % POOL] for at in range(n)), steps)


def to_cuda(n: int, steps: int = 0) -> Tally:
    with sl.from_items(Batches(n, LARGE_ROWS)).transfer("cuda", depth=3).open() as stream:
        return after_work(stream, steps)


def pinning_loader(n: int, steps: int = 0) -> Tally:
    pinned = loader(n, rows=LARGE_ROWS, pin_memory=True)
    moved = ({name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()} for batch in pinned)
    return after_work(moved, steps)


def spdl(n: int, steps: int = 0) -> Tally:
    torch, pipelines, transfer = peer("torch"), peer("spdl.pipeline"), peer("spdl.io").transfer_tensor_h2d

    def move(batch: dict[str, Any]) -> Any:
        return transfer({name: torch.from_numpy(array) for name, array in batch.items()})

    builder = pipelines.PipelineBuilder().add_source(Batches(n, LARGE_ROWS)).pipe(move, concurrency=1).add_sink(3)
    with (pipeline := builder.build(num_threads=1)).auto_stop():
        return after_work(pipeline, steps)


# Batches made of items, to a GPU -----------------------------------------------------------------------------------


def prepare_images(_: int) -> None:
    images()
    peer("torch").zeros(1, device="cuda")


def batches_of_images(n: int) -> Tally:
    return Tally(n, tally_of_images(n * ROWS).checksum)


def summed(batches: Iterable[Any]) -> Tally:
    """Add up a number of each row, on the GPU, and read the sum at the end."""
    total, count = peer("torch").zeros((), device="cuda", dtype=peer("torch").float64), 0
    for batch in batches:
        total += batch["image"][:, 0, 0, 0].double().sum() + batch["label"].sum()
        count += 1
    return Tally(count, float(total))


def stacked_by_hand(n: int) -> Tally:
    """Stack rows into two pinned buffers in turn, and copy out of one while the other is written."""
    torch, rows = peer("torch"), Rows(n * ROWS)
    slots = [
        {
            "image": torch.empty((ROWS, 3, 224, 224), pin_memory=True),
            "label": torch.empty(ROWS, dtype=torch.int64, pin_memory=True),
        }
        for _ in range(2)
    ]
    copies, done = torch.cuda.Stream(), [torch.cuda.Event(blocking=True) for _ in slots]

    def moved() -> Iterator[Any]:
        for number in range(n):
            slot, copied = slots[number % 2], done[number % 2]
            copied.synchronize()
            items = [rows[number * ROWS + at] for at in range(ROWS)]
            for name, tensor in slot.items():
                np.stack([item[name] for item in items], out=tensor.numpy())
            with torch.cuda.stream(copies):
                batch = {name: tensor.to("cuda", non_blocking=True) for name, tensor in slot.items()}
                copied.record()
            torch.cuda.current_stream().wait_event(copied)
            for tensor in batch.values():
                tensor.record_stream(torch.cuda.current_stream())
            yield batch

    return summed(moved())


def collated(n: int) -> Tally:
    with sl.from_items(Rows(n * ROWS)).batch(ROWS).transfer("cuda", depth=3).open() as stream:
        return summed(stream)


def collated_in_processes(n: int) -> Tally:
    pipe = sl.from_items(range(n * ROWS)).shard(4).map(row).batch(ROWS).merge().transfer("cuda", depth=3)
    with pipe.open(backend=sl.Processes(4)) as stream:
        return summed(stream)


def collated_by_torch(workers: int, n: int) -> Tally:
    batches = peer("torch.utils.data").DataLoader(
        Rows(n * ROWS), ROWS, num_workers=workers, pin_memory=True, multiprocessing_context="spawn" if workers else None
    )
    return summed({name: part.to("cuda", non_blocking=True) for name, part in batch.items()} for batch in batches)


# Page-locking -------------------------------------------------------------------------------------------------------

LOCKED_BYTES = 1 << 26


@cache
def unlocked() -> Any:
    """Memory that processes could share, whose pages are there."""
    memory = np.frombuffer(mmap(-1, LOCKED_BYTES), np.uint8)
    memory[:] = 1
    return memory


@cache
def locked() -> Any:
    return peer("torch").empty(LOCKED_BYTES, dtype=peer("torch").uint8, pin_memory=True)


def prepare_memory(_: int) -> None:
    unlocked()
    locked()
    peer("torch").zeros(1, device="cuda")


def copied_by_cpu(n: int) -> Tally:
    source, target = peer("torch").from_numpy(unlocked()), locked()
    return _each(n, lambda: target.copy_(source))


def copied_to_gpu(n: int) -> Tally:
    torch, source = peer("torch"), locked()
    target = torch.empty(LOCKED_BYTES, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return _each(n, copy)


def allocated(n: int) -> Tally:
    torch = peer("torch")
    return _each(
        n, lambda: torch.empty(LOCKED_BYTES, dtype=torch.uint8, pin_memory=True), lambda: torch._C._host_emptyCache()
    )


def registered(n: int) -> Tally:
    copier, address = CudaCopier(0), unlocked().ctypes.data
    return _each(n, lambda: copier.register(address, LOCKED_BYTES), lambda: copier.unregister(address))


def unregistered(n: int) -> Tally:
    copier, address = CudaCopier(0), unlocked().ctypes.data
    copier.register(address, LOCKED_BYTES)
    found = _each(n, lambda: copier.unregister(address), lambda: copier.register(address, LOCKED_BYTES))
    copier.unregister(address)
    return found


def _each(n: int, call: Callable[[], object], undo: Callable[[], object] = lambda: None) -> Tally:
    """Return the mean time of a call; what undoes it isn't counted."""
    seconds = 0.0
    for _ in range(n):
        began = perf_counter()
        kept = call()
        seconds += perf_counter() - began
        del kept
        undo()
    return Tally(n, 0, seconds / n)


HOST, TENSORS, LIMIT = "plain loop", "plain loop, torch.from_numpy", "pinned memory, the same batches again and again"
ALONE = "the work alone, batches on the GPU"
BY_HAND = "plain loop, np.stack into two pinned buffers"
BY_CPU = "copied by the CPU into pinned memory"
STEPS = 12
"""Products of 4096 x 4096: of bfloat16 on an H200 some 0.2 ms each, so that work and copy take about as long."""

SUITES = (
    Suite(
        question="Handing batches over: what does a transfer add where there is nothing to do?",
        unit="items/s",
        floor=HOST,
        expected=expected,
        smoke_items=20,
        note="Items are batches: float32[64, 3, 32, 32] and int64[64], in memory already; one number of each is read.",
        cases=(
            Case(HOST, plain_loop, 100_000, prepare=prepare),
            Case("streamline, no transfer", streamed, 100_000, prepare=prepare),
            Case('streamline, .transfer("host")', partial(transferred, "host"), 4_000, prepare=prepare),
        ),
    ),
    Suite(
        question="Tensors out of arrays, on the CPU: what does a transfer add to a batch?",
        unit="items/s",
        floor=TENSORS,
        expected=expected,
        smoke_items=20,
        note="As above. Nothing is copied: the pipeline's hop between two threads is what a batch costs.",
        cases=(
            Case(TENSORS, plain_tensors, 40_000, peers=("torch",), prepare=prepare),
            Case('streamline, .transfer("cpu")', partial(transferred, "cpu"), 4_000, peers=("torch",), prepare=prepare),
            Case("torch DataLoader, num_workers=0", torch_loader, 40_000, peers=("torch",), prepare=prepare),
        ),
    ),
)


def _on_gpu(name: str, run: Callable[[int], Tally], *targets: Any, more: tuple[str, ...] = ()) -> Case:
    return Case(name, run, 400, targets, peers=("torch", *more), prepare=prepare_large)


def _of_rows(name: str, run: Callable[[int], Tally], *targets: Any) -> Case:
    return Case(name, run, 120, targets, peers=("torch",), prepare=prepare_images)


def _locking(name: str, run: Callable[[int], Tally]) -> Case:
    return Case(name, run, 10, peers=("torch",), prepare=prepare_memory)


GPU_SUITES = (
    Suite(
        question="To a GPU: how near to what the wires carry?",
        unit="items/s",
        floor=LIMIT,
        expected=expected,
        smoke_items=20,
        note="Items are batches of 48 MiB in pageable memory; the floor's are pinned, and no time goes into that.",
        cases=(
            _on_gpu(LIMIT, pinned_limit),
            _on_gpu('streamline, .transfer("cuda", depth=3)', to_cuda, at_least(0.9, LIMIT)),
            _on_gpu("torch DataLoader, pin_memory", pinning_loader),
            _on_gpu("spdl, transfer_tensor_h2d in a thread", spdl, more=("spdl",)),
        ),
    ),
    Suite(
        question="Copies beside work that takes about as long: does a batch take the longer of the two?",
        unit="items/s",
        floor=ALONE,
        expected=expected,
        smoke_items=20,
        note=f"As above, with {STEPS} products of matrices after each batch.",
        cases=(
            _on_gpu(ALONE, partial(work_alone, steps=STEPS)),
            _on_gpu('streamline, .transfer("cuda", depth=3)', partial(to_cuda, steps=STEPS), at_least(0.95, ALONE)),
            _on_gpu("torch DataLoader, pin_memory", partial(pinning_loader, steps=STEPS)),
            _on_gpu("spdl, transfer_tensor_h2d in a thread", partial(spdl, steps=STEPS), more=("spdl",)),
        ),
    ),
    Suite(
        question="Batches made of items, to a GPU: what does all of it cost?",
        unit="items/s",
        floor=BY_HAND,
        expected=batches_of_images,
        smoke_items=4,
        note="Items of the table are batches of 64 images of 588 KiB, 37 MiB, made of arrays that are in memory.",
        cases=(
            _of_rows(BY_HAND, stacked_by_hand),
            _of_rows('streamline, .batch(64).transfer("cuda", depth=3)', collated, at_least(0.95, BY_HAND)),
            _of_rows("the same, in four processes", collated_in_processes),
            _of_rows("torch DataLoader, pin_memory, num_workers=0", partial(collated_by_torch, 0)),
            _of_rows("torch DataLoader, pin_memory, num_workers=4", partial(collated_by_torch, 4)),
        ),
    ),
    Suite(
        question="Page-locking: what does it cost beside the copy that it saves?",
        unit="ms",
        floor=BY_CPU,
        smoke_items=1,
        note="Of 64 MiB, once.",
        cases=(
            _locking(BY_CPU, copied_by_cpu),
            _locking("copied to the GPU out of pinned memory", copied_to_gpu),
            _locking("pinned memory allocated", allocated),
            _locking("shared memory registered", registered),
            _locking("shared memory unregistered", unregistered),
        ),
    ),
)


def main() -> None:
    try:
        there = bool(peer("torch").cuda.is_available())
    except ModuleNotFoundError:
        there = False
    if not there:
        print("left out, for want of a CUDA device:", "; ".join(suite.question for suite in GPU_SUITES))
    harness.main((*SUITES, *GPU_SUITES) if there else SUITES)


if __name__ == "__main__":
    main()
