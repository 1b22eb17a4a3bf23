"""Every stage as users write it, and functions that wait and choose."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import lru_cache
from itertools import count
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import streamline as sl
from streamline.pipeline import Pipeline
from streamline.testing.checks import Jitter
from streamline.testing.scripted import to_elsewhere

Fragment = Callable[[Pipeline[Any]], Pipeline[Any]]


async def erratic(item: Any) -> Any:
    """Return the item; never at the same pace twice, so that each run of a test chooses another order."""
    return await _jitter_of(os.environ.get("PYTEST_CURRENT_TEST"))(item)


@lru_cache(1)
def _jitter_of(test: str | None) -> Jitter:
    """Return what is erratic in a test: the same whichever tests ran before it."""
    return Jitter(Random(0))


class Folder:
    """Where caches on disk are, in a test of stages: each in a folder of its own.

    Attributes:
      root: of the folders; None: no such test runs.
    """

    root: Path | None = None
    _numbers = count()

    @classmethod
    def new(cls) -> Path:
        assert cls.root is not None
        return cls.root / str(next(cls._numbers))


def plus(item: int) -> int:
    return item + 1000


def noisy(item: int, *, rng: Any) -> int:
    return item + 1000 * int(rng.integers(1000))


def plus_each(items: list[int]) -> list[int]:
    return [plus(item) for item in items]


async def erratic_each(items: list[int]) -> list[int]:
    return [await erratic(item) for item in items]


def stumbles(item: int) -> int:
    if _stumbling.random() < 0.2:
        raise ConnectionError("it has stumbled")
    return item + 1000


async def stumbles_later(item: int) -> int:
    return stumbles(await erratic(item))


_stumbling = Random(0)
AGAIN: dict[str, Any] = {"retries": 99, "backoff": 0}
SHARED = sl.Limit(2)


NONE_SEEN: dict[str, int] = {}


def count_by_rest(seen: dict[str, int], item: int) -> tuple[dict[str, int], tuple[int, int]]:
    key = str(item % 3)
    seen[key] = seen.get(key, 0) + 1
    return seen, (item, seen[key])


def fan(item: int) -> list[int]:
    return [item + 100 * copy for copy in range(item % 4)]


def document(item: int) -> list[int]:
    return [item + 100 * copy for copy in range(item % 5)]


def packed(block: dict[str, Any]) -> list[int]:
    return [int(token) for token, segment in zip(block["tokens"], block["segment_ids"], strict=True) if segment]


def shown(block: dict[str, Any]) -> str:
    return str([array.tolist() for array in block.values()])


@sl.stage(state=dict, snapshot_every=3)
async def pairs(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncGenerator[list[Any], None]:
    async for item in items:
        held = state.setdefault("held", [])
        held.append(item)
        if len(held) == 2:
            state["held"] = []
            yield held
    if state.get("held"):
        yield state["held"]


@sl.stage(stateless=True, snapshot_every=2)
async def twice(items: AsyncIterator[int]) -> AsyncGenerator[int, None]:
    async for item in items:
        yield item
        yield item + 1000


@sl.stage(state=dict, snapshot_every=1)
async def odd(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncGenerator[int, None]:
    async for item in items:
        if item % 2:
            state["kept"] = state.get("kept", 0) + 1
            yield item


STAGES: dict[str, Fragment] = {
    "map": lambda pipe: pipe.map(plus),
    "async map": lambda pipe: pipe.map(erratic, concurrency=3),
    "unordered map": lambda pipe: pipe.map(erratic, concurrency=3, ordered=False),
    "map that is tried again": lambda pipe: pipe.map(stumbles_later, concurrency=3, **AGAIN),
    "unordered map that is tried again": lambda pipe: pipe.map(stumbles_later, concurrency=3, ordered=False, **AGAIN),
    "limited map": lambda pipe: pipe.map(erratic, concurrency=3, limit=sl.Limit(2, per_second=50_000, burst=2)),
    "maps that share a limit": lambda pipe: pipe.map(stumbles_later, concurrency=3, limit=SHARED, **AGAIN).map(
        erratic, name="next", concurrency=2, ordered=False, limit=SHARED
    ),
    "limited threads": lambda pipe: pipe.map(
        stumbles, executor="thread", concurrency=3, ordered=False, limit=sl.Limit(2), **AGAIN
    ),
    "map of one at a time": lambda pipe: pipe.map(erratic, concurrency=1, ordered=False),
    "batched map": lambda pipe: pipe.map(plus_each, batched=4),
    "batched async map": lambda pipe: pipe.map(erratic_each, batched=3, concurrency=2),
    "unordered batched map": lambda pipe: pipe.map(erratic_each, batched=3, concurrency=3, ordered=False),
    "batched map behind a filter": lambda pipe: pipe.filter(lambda item: item % 3 == 0).map(plus_each, batched=4),
    "unordered map behind a filter": lambda pipe: pipe.filter(lambda item: item % 5 == 0).map(
        erratic, concurrency=2, ordered=False
    ),
    "filter": lambda pipe: pipe.filter(lambda item: item % 3 == 0),
    "filter that drops all": lambda pipe: pipe.filter(lambda item: False),
    "flat_map": lambda pipe: pipe.flat_map(fan),
    "flat_map to nothing": lambda pipe: pipe.flat_map(lambda item: []),
    "batch": lambda pipe: pipe.batch(5, collate=None),
    "unbatch": lambda pipe: pipe.batch(5).unbatch(),
    "shuffle": lambda pipe: pipe.shuffle(window=5),
    "shuffle of one window": lambda pipe: pipe.shuffle(window=100),
    "regenerate": lambda pipe: pipe.regenerate(5),
    "regenerate ahead": lambda pipe: pipe.regenerate(4, overlap=True),
    "regenerate one cycle": lambda pipe: pipe.regenerate(100, shuffle=False, reuse=2),
    "cache": lambda pipe: pipe.cache(),
    "cache on disk": lambda pipe: pipe.cache(path=Folder.new()),
    "prefetch": lambda pipe: pipe.prefetch(3),
    "prefetch bytes": lambda pipe: pipe.prefetch(8, bytes=60),
    "stateful": lambda pipe: pipe.through(pairs),
    "stateless": lambda pipe: pipe.through(twice),
    "dropping": lambda pipe: pipe.through(odd),
    "buckets": lambda pipe: pipe.bucket_by_length([1, 4], [3, 2, 4], length=lambda item: item % 7, collate=None),
    "buckets that never fill": lambda pipe: pipe.bucket_by_length([3], 50, length=lambda item: item % 7, collate=None),
    "groups": lambda pipe: pipe.group_by(lambda item: item % 10 // 4).map(itemgetter(1)),
    "one group": lambda pipe: pipe.group_by(lambda item: 0).map(itemgetter(1)),
    "batch by cost": lambda pipe: pipe.batch(3, max_cost=7, cost=lambda item: item % 5, collate=None),
    "batch by a cost of nothing": lambda pipe: pipe.batch(5, max_cost=1, cost=lambda item: 0, collate=None),
    "scan": lambda pipe: pipe.scan(lambda seen, item: (seen + 1, item), 0),
    "pack": lambda pipe: pipe.map(document).pack(3).map(packed),
    "pack of one block": lambda pipe: pipe.map(document).pack(50, eos=0).map(packed),
    "repeat": lambda pipe: pipe.repeat(2),
    "transfer": lambda pipe: to_elsewhere(pipe, depth=3),
    "transfer in place": lambda pipe: pipe.transfer("host"),
}
"""Stages for which the multiset of what comes out doesn't depend on the order of what goes in."""

ORDERED: dict[str, Fragment] = {
    "map with rng": lambda pipe: pipe.map(noisy, seed=1),
    "batch without the rest": lambda pipe: pipe.batch(5, drop_remainder=True, collate=None),
    "take": lambda pipe: pipe.take(7),
    "take nothing": lambda pipe: pipe.take(0),
    "skip": lambda pipe: pipe.skip(7),
    "skip all": lambda pipe: pipe.skip(100),
    "enumerate": lambda pipe: pipe.enumerate(),
    "groups with keys": lambda pipe: pipe.group_by(lambda item: item % 10 // 4),
    "scan with a dict": lambda pipe: pipe.scan(count_by_rest, NONE_SEEN),
    "windows": lambda pipe: pipe.window(4),
    "windows by twos": lambda pipe: pipe.window(5, 2),
    "windows apart": lambda pipe: pipe.window(2, 5),
    "window of more than there is": lambda pipe: pipe.window(100),
    "windows unfolded": lambda pipe: pipe.window(3, 3).unbatch(),
    "batch by cost without the rest": lambda pipe: pipe.batch(
        max_cost=6, cost=lambda item: item % 5, drop_remainder=True, collate=None
    ),
    "buckets without the rests": lambda pipe: pipe.bucket_by_length(
        [1, 4], 3, length=lambda item: item % 7, collate=None, drop_remainder=True
    ),
    "pack with segments": lambda pipe: pipe.map(document).pack(7, eos=5).map(shown),
    "pack without the rest": lambda pipe: pipe.map(document).pack(4, drop_remainder=True).map(shown),
    "regenerate rows": lambda pipe: pipe.batch(5).regenerate(6, block=2),
    "regenerate rows ahead": lambda pipe: pipe.batch(3).regenerate(8, block=4, overlap=True, reuse=2),
    "regenerate again and again": lambda pipe: pipe.take(5).repeat(3).regenerate(4).repeat(2),
    "repeat of a cache": lambda pipe: pipe.shuffle(window=4).cache().repeat(2),
    "repeat of a part of a cache": lambda pipe: pipe.shuffle(window=4).cache().take(5).repeat(3),
    "repeat of a cache of nothing": lambda pipe: pipe.filter(lambda item: False).cache().repeat(3),
    "repeat of a part of a cache on disk": lambda pipe: (
        pipe.shuffle(window=4).cache(path=Folder.new()).take(5).repeat(3)
    ),
    "repeat of a cache on disk of nothing": lambda pipe: (
        pipe.filter(lambda item: False).cache(path=Folder.new()).repeat(3)
    ),
    "repeat of shuffles": lambda pipe: pipe.shuffle(window=4).repeat(3),
    "repeat of a filter": lambda pipe: pipe.filter(lambda item: item % 7 == 1).repeat(3),
    "shards": lambda pipe: pipe.shard(3).merge().shuffle(window=4),
}

THREADS: dict[str, Fragment] = {
    "threads": lambda pipe: pipe.map(plus, executor="thread", concurrency=2),
    "threads that are tried again": lambda pipe: pipe.map(stumbles, executor="thread", concurrency=2, **AGAIN),
    "batched threads": lambda pipe: pipe.map(plus_each, batched=4, executor="thread", concurrency=2),
    "unordered threads": lambda pipe: pipe.map(plus, executor="thread", concurrency=2, ordered=False),
}


def unordered(pipe: Pipeline[Any], concurrency: int = 4) -> Pipeline[Any]:
    return pipe.map(erratic, concurrency=concurrency, ordered=False)


def best_effort(pipe: Pipeline[Any]) -> Pipeline[Any]:
    return pipe.merge("best_effort", max_skips_per_round=2, max_lead=3)


REWINDING: dict[str, Callable[[Pipeline[Any]], Pipeline[Any]]] = {
    "flat_map": lambda pipe: pipe.flat_map(fan),
    "shuffle": lambda pipe: pipe.shuffle(window=4),
    "unordered map": unordered,
    "buckets": lambda pipe: pipe.bucket_by_length([1, 4], [3, 2, 1], length=lambda item: item % 7, collate=None),
    "batch": lambda pipe: pipe.batch(3, collate=None),
    "unbatch": lambda pipe: pipe.batch(3, collate=None).unbatch(),
    "batched map": lambda pipe: pipe.map(plus_each, batched=3),
    "groups": lambda pipe: pipe.group_by(lambda item: item % 10 // 4).map(itemgetter(1)),
    "batch by cost": lambda pipe: pipe.batch(3, max_cost=7, cost=lambda item: item % 5, collate=None),
    "custom": lambda pipe: pipe.through(pairs),
    "custom without a state": lambda pipe: pipe.through(twice),
    "custom that drops": lambda pipe: pipe.through(odd),
    "filter and shuffle": lambda pipe: pipe.filter(lambda item: item % 3 == 0).shuffle(window=3),
    "shuffles of different windows": lambda pipe: pipe.shuffle(window=3).shuffle(window=5).shuffle(window=2),
}
