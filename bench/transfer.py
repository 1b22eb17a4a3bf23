"""What does `.transfer` add to a batch on the host, and how near is it to what a GPU's wires can carry?

The first two tables need no GPU. The others do: `python -m bench.transfer` runs them where there is one, and says so
where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

POOL = 8
ROWS = 64
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


HOST, TENSORS, LIMIT = "plain loop", "plain loop, torch.from_numpy", "pinned memory, the same batches again and again"
ALONE = "the work alone, batches on the GPU"
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
