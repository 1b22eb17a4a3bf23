"""How long does a resume take, and does it depend on where? From a fresh plan to the first batch after a snapshot."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, WrongItemsError, at_most, peer, within_ms

BATCH = 100
TENTHS = (1, 9)  # where snapshots are taken, of the whole

Build = Callable[[int], "sl.Pipeline[Any]"]
Items = list[Any]


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its items, and a state (as text, or the peer's own) at each tenth asked for."""

    items: Items
    states: dict[int, Any]

    def check_tail(self, tail: Items, position: int) -> Tally:
        """Raise WrongItemsError unless `tail` is all that came after `position`, in the same order."""
        if tail != self.items[position:]:
            wanted = len(self.items) - position
            raise WrongItemsError(f"the {len(tail)} items after a resume at {position} are not the {wanted} expected")
        return Tally(len(tail), 0)


def flat(batch: Any) -> Items:
    """One batch as a list of Python values, whatever a library made of it."""
    items: Items = np.asarray(batch).tolist()
    return items


def in_order(n: int) -> sl.Pipeline[Any]:
    return sl.from_items(range(n)).batch(BATCH)


def shuffled(n: int) -> sl.Pipeline[Any]:
    return sl.from_items(range(n)).shuffle(seed=0).shard(1).batch(BATCH)


def lines(n: int) -> sl.Pipeline[Any]:
    return sl.read_lines(str(_file_of_lines(n))).batch(BATCH)


@cache
def _file_of_lines(n: int) -> Path:
    folder = TemporaryDirectory(prefix="bench-resume-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "lines.txt"
    path.write_text("".join(f"line {k}\n" for k in range(n)), encoding="utf-8")
    return path


@cache
def reference(build: Build, n: int) -> Reference:
    """Run a plan once from start to end; every resume is compared with it."""
    items: Items = []
    states: dict[int, str] = {}
    with build(n).open() as stream:
        for batch in stream:
            items += flat(batch)
            if len(items) * 10 in [tenth * n for tenth in TENTHS]:
                states[len(items) * 10 // n] = stream.snapshot().to_json()
    _check_complete(items, n)
    return Reference(items, states)


def _check_complete(items: Items, n: int) -> None:
    if len(items) != n or len(set(items)) != n:
        raise WrongItemsError(f"the uninterrupted run gave {len(items)} items, {len(set(items))} different, of {n}")


async def resumed(n: int, *, build: Build, tenth: int) -> Tally:
    """Resume a fresh plan; time the first batch, then check everything that follows."""
    run = reference(build, n)
    pipe, snapshot = build(n), sl.Snapshot.from_json(run.states[tenth])
    start = perf_counter()
    async with pipe.open(resume=snapshot) as stream:
        batches = aiter(stream)
        tail = flat(await anext(batches))
        seconds = perf_counter() - start
        async for batch in batches:
            tail += flat(batch)
    return _timed(run.check_tail(tail, tenth * n // 10), seconds)


def resumed_in_plain_for(n: int, *, build: Build, tenth: int) -> Tally:
    run = reference(build, n)
    pipe, snapshot = build(n), sl.Snapshot.from_json(run.states[tenth])
    start = perf_counter()
    with pipe.open(resume=snapshot) as stream:
        tail, seconds = _drain(stream, start)
    return _timed(run.check_tail(tail, tenth * n // 10), seconds)


def _drain(batches: Iterable[Any], start: float) -> tuple[Items, float]:
    """Return all items, and the seconds from `start` to the first of them."""
    iterator = iter(batches)
    tail = flat(next(iterator))
    seconds = perf_counter() - start
    for batch in iterator:
        tail += flat(batch)
    return tail, seconds


def _timed(tally: Tally, seconds: float) -> Tally:
    return Tally(tally.count, tally.checksum, seconds)


# Peers, at nine tenths only: their tails take seconds to check.


def _grain(n: int) -> Any:
    library = peer("grain")
    dataset = library.MapDataset.source(range(n)).shuffle(seed=0).batch(BATCH)
    return dataset.to_iter_dataset(library.ReadOptions(num_threads=0, prefetch_buffer_size=0))


@cache
def grain_reference(n: int) -> Reference:
    items: Items = []
    states: dict[int, Any] = {}
    iterator = iter(_grain(n))
    for batch in iterator:
        items += flat(batch)
        if len(items) * 10 == 9 * n:
            states[9] = iterator.get_state()
    _check_complete(items, n)
    return Reference(items, states)


def grain_resumed(n: int) -> Tally:
    run, dataset = grain_reference(n), _grain(n)
    start = perf_counter()
    iterator = iter(dataset)
    iterator.set_state(run.states[9])
    tail, seconds = _drain(iterator, start)
    return _timed(run.check_tail(tail, 9 * n // 10), seconds)


def _nodes(n: int, shuffle: bool) -> Any:
    nodes = peer("torchdata.nodes")
    if not shuffle:
        return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(n)), BATCH))
    generator = peer("torch").Generator().manual_seed(0)
    sampler = peer("torch.utils.data").RandomSampler(range(n), generator=generator)
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler), BATCH))


@cache
def nodes_reference(n: int, *, shuffle: bool) -> Reference:
    items: Items = []
    states: dict[int, Any] = {}
    loader = _nodes(n, shuffle)
    for batch in loader:
        items += flat(batch)
        if len(items) * 10 == 9 * n:
            states[9] = loader.state_dict()
    _check_complete(items, n)
    return Reference(items, states)


def nodes_resumed(n: int, *, shuffle: bool) -> Tally:
    run, loader = nodes_reference(n, shuffle=shuffle), _nodes(n, shuffle)
    start = perf_counter()
    loader.load_state_dict(run.states[9])
    tail, seconds = _drain(loader, start)
    return _timed(run.check_tail(tail, 9 * n // 10), seconds)


ITEMS = 1_000_000
SOURCES: dict[str, Build] = {"from_items": in_order, "from_items, shuffled": shuffled, "read_lines": lines}


def _ours(source: str, build: Build) -> tuple[Case, Case]:
    """Early and late: were a resume to re-read, late would take nine times as long."""
    prepare, early = partial(reference, build), f"streamline {source}, at 100,000"
    late = (within_ms(5), at_most(2, early))
    return (
        Case(early, partial(resumed, build=build, tenth=1), ITEMS, (within_ms(5),), prepare=prepare),
        Case(f"streamline {source}, at 900,000", partial(resumed, build=build, tenth=9), ITEMS, late, prepare=prepare),
    )


SUITES = (
    Suite(
        question="Resume: how long until the first batch, and does it depend on where?",
        unit="ms",
        smoke_items=10_000,
        note=(
            "Of 1,000,000 items in batches of 100. A fresh plan each time, from `open(resume=…)` to the first batch; "
            "the whole tail is then compared with an uninterrupted run. Peers resume at 900,000."
        ),
        cases=(
            *(case for source, build in SOURCES.items() for case in _ours(source, build)),
            Case(
                "streamline from_items, shuffled, at 900,000, plain for",
                partial(resumed_in_plain_for, build=shuffled, tenth=9),
                ITEMS,
                (within_ms(5),),
                prepare=partial(reference, shuffled),
            ),
            Case("grain, shuffled", grain_resumed, ITEMS, peers=("grain",), prepare=grain_reference),
            *(
                Case(
                    f"torchdata.nodes, {'shuffled' if shuffle else 'in order'}",
                    partial(nodes_resumed, shuffle=shuffle),
                    ITEMS,
                    peers=("torchdata", "torch"),
                    prepare=partial(nodes_reference, shuffle=shuffle),
                )
                for shuffle in (True, False)
            ),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
