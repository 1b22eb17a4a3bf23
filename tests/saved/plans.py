"""Plans of which `tests/saved` keeps a snapshot: at least one of each kind of stage and of source.

`python -m tests.saved.make` adds the snapshots of plans that have none. What is there already is never written again:
it stands for the runs that users have saved with earlier versions.

All paths are relative: plans are opened in a copy of `files/`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import streamline as sl
from streamline.pipeline import Pipeline
from streamline.testing.checks import Jitter
from streamline.testing.scripted import to_elsewhere
from tests.sources.stand_ins import Dataset, StatefulNumbers

Plan = Callable[[], Pipeline[Any]]

_jitter = Jitter(Random(0))


def plus(item: int) -> int:
    return item + 1000


def plus_each(some: list[int]) -> list[int]:
    return [plus(item) for item in some]


def noisy(item: int, *, rng: np.random.Generator) -> int:
    return item + 1000 * int(rng.integers(1000))


async def erratic(item: int) -> int:
    await _jitter(item)
    return item


def third(item: int) -> bool:
    return item % 3 == 0


def fan(item: int) -> list[int]:
    return [item + 100 * copy for copy in range(item % 4)]


def document(item: int) -> list[int]:
    return [item + 100 * copy for copy in range(item % 5)]


def tens(item: int) -> int:
    return item // 10


def running(total: int, item: int) -> tuple[int, int]:
    return total + item, total + item


def length(item: int) -> int:
    return item % 7


def fails_at_seven(item: int) -> int:
    if item == 7:
        raise ValueError(item)
    return item


@sl.stage(state=dict, snapshot_every=3)
async def pairs(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncGenerator[list[int], None]:
    async for item in items:
        held = state.setdefault("held", [])
        held.append(item)
        if len(held) == 2:
            state["held"] = []
            yield held
    if state.get("held"):
        yield state["held"]


@sl.source(state=dict)
async def rows(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncGenerator[int, None]:
    for row in range(state.get("row", shard), 20, num_shards):
        state["row"] = row + num_shards
        yield row


class Numbers:
    """An iterable that knows its state, as torchdata's and Hugging Face's do."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        while self._at < 20:
            self._at += 1
            yield self._at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def waiting() -> list[int]:
    return [int(line) for line in Path("feed").read_text().split()]


async def feed() -> AsyncGenerator[int, None]:
    """Give what is in a file: a feed that has ended by the time of the resume gives nothing more."""
    for number in waiting():
        yield number


def items(shards: int = 2) -> Pipeline[int]:
    return sl.from_items(range(20)).shard(shards)


SOURCES: dict[str, Plan] = {
    "from_items": lambda: items(3),
    "from_items contiguous": lambda: sl.from_items(range(20)).shard(3, mode="contiguous"),
    "from_items shuffled": lambda: sl.from_items(range(20)).shuffle(seed=3).shard(2),
    "from_iterable": lambda: sl.from_iterable(lambda: iter(range(20))).shard(2),
    "from_iterable with a state": lambda: sl.from_iterable(Numbers).shard(2),
    "from_torch": lambda: sl.from_torch(StatefulNumbers(20)),
    "from_huggingface": lambda: sl.from_huggingface(Dataset.iterable(20)),
    "from_stream": lambda: sl.from_stream(feed).shard(2),
    "from_stream with a journal": lambda: sl.from_stream(feed, journal="journal").shard(2),
    "source": lambda: rows().shard(2),
    "read_lines": lambda: sl.read_lines("*.txt").shard(2),
    "read_lines of one file": lambda: sl.read_lines("a.txt").shard(3),
    "read_lines in turn": lambda: sl.read_lines("*.txt").shuffle_files(seed=1).shard(1, interleave=2),
    "read_lines compressed": lambda: sl.read_lines("a.txt.gz"),
    "read_jsonl": lambda: sl.read_jsonl("a.jsonl").shard(2),
    "read_csv": lambda: sl.read_csv("a.csv"),
    "read_parquet": lambda: sl.read_parquet("a.parquet").shard(2),
    "read_arrow": lambda: sl.read_arrow("a.arrow"),
    "read_tar": lambda: sl.read_tar("a.tar").shard(2),
    "read_tfrecord": lambda: sl.read_tfrecord("a.tfrecord"),
    "read_array_record": lambda: sl.read_array_record("a.array_record").shard(2),
    "read_hdf5": lambda: sl.read_hdf5("a.h5").shard(2),
    "read_lance": lambda: sl.read_lance("a.lance").shard(2),
    "read_mds": lambda: sl.read_mds("a.mds").shard(2),
    "read_npy": lambda: sl.read_npy("a.npy").shard(2),
    "read_npy of npz": lambda: sl.read_npy("a.npz"),
    "read_files": lambda: sl.read_files("*.txt").shard(2),
    "mix": lambda: sl.mix({"a": sl.from_items(range(12)), "b": rows(name="b")}, {"a": 2, "b": 1}, seed=1).shard(2),
    "concat": lambda: sl.concat(sl.from_items(range(8)), sl.from_items(range(100, 120), name="b")).shard(2),
    "sample": lambda: sl.from_items(range(20)).sample(30, weights=range(20), seed=2).shard(2),
    "zip": lambda: sl.zip(sl.from_items(range(20)), sl.from_items(range(100, 120), name="b")).shard(2),
}

STAGES: dict[str, Plan] = {
    "map": lambda: items().map(plus),
    "map ordered": lambda: items().map(erratic, concurrency=3),
    "map unordered": lambda: items().map(erratic, concurrency=3, ordered=False),
    "map threads": lambda: items().map(plus, executor="thread", concurrency=2),
    "map of lists": lambda: items().map(plus_each, batched=3),
    "map with rng": lambda: items().map(noisy, seed=1),
    "filter": lambda: items().filter(third),
    "enumerate": lambda: items().enumerate(5),
    "flat_map": lambda: items().flat_map(fan),
    "groups": lambda: items().group_by(tens),
    "batch": lambda: items().batch(3, collate=None),
    "batch after the merge": lambda: items().merge().batch(3),
    "unbatch": lambda: items().batch(5).unbatch(),
    "batch by cost": lambda: items().batch(max_cost=9, cost=length, collate=None),
    "scan": lambda: items().scan(running, 0),
    "window": lambda: items().window(4, 3),
    "shuffle": lambda: items().shuffle(window=4, seed=1),
    "shuffle after the merge": lambda: items().merge().shuffle(window=4, seed=1),
    "take": lambda: items().take(9),
    "skip": lambda: items().skip(2),
    "take and skip before the shard": lambda: sl.from_items(range(40)).skip(3).take(20).repeat(2).shard(2),
    "repeat": lambda: items().shuffle(window=4).repeat(2),
    "prefetch": lambda: items().prefetch(3),
    "cache": lambda: items(1).shuffle(window=4).cache().repeat(2),
    "cache on disk": lambda: items(1).shuffle(window=4).cache(path="cache").repeat(2),
    "regenerate": lambda: items().repeat().regenerate(4, seed=2).take(12),
    "regenerate ahead": lambda: items().regenerate(4, overlap=True),
    "regenerate spilled": lambda: items(1).regenerate(6, spill="spill"),
    "buckets": lambda: items().bucket_by_length([1, 4], [3, 2, 4], length=length, collate=None),
    "pack": lambda: items().map(document).pack(3),
    "through": lambda: items().through(pairs),
    "transfer": lambda: to_elsewhere(items(), depth=3),
    "skipped": lambda: items().map(fails_at_seven),
    "merge, best effort": lambda: items(3).map(erratic).merge("best_effort", max_skips_per_round=1, max_lead=4),
    "shuffle after a best-effort merge": lambda: items(3).map(erratic).merge("best_effort").shuffle(window=7),
    "batch after an unordered map": lambda: (
        items().map(erratic, concurrency=3, ordered=False).merge("best_effort").batch(3, collate=None).unbatch()
    ),
}

PLANS = {**SOURCES, **STAGES}

FREE = {name for name in PLANS if "unordered" in name or "best" in name}
"""Plans whose order is chosen anew in each run: of them, the multiset of the items is fixed."""


def shown(item: Any) -> str:
    """Return an item as text."""
    if isinstance(item, np.ndarray):
        return f"{item.dtype}{item.tolist()}"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{key}: {shown(value)}" for key, value in item.items()) + "}"
    if isinstance(item, list | tuple):
        return "[" + ", ".join(map(shown, item)) + "]"
    return repr(item)
