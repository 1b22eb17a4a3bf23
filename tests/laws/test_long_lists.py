"""Lists of 1,024 items, where items take no time: a resume at any place inside them is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

import streamline as sl
import streamline.core.capacity
import streamline.core.pace
from streamline.core.capacity import LONG_LIST_ITEMS
from streamline.sources.mix import MixRun

ITEMS = 6_000

Pipe = sl.Pipeline[Any]


def numbers() -> Pipe:
    return sl.from_items(range(2 * ITEMS))


def mixed() -> Pipe:
    parts = {name: sl.from_items(range(at * ITEMS, (at + 1) * ITEMS)) for at, name in enumerate("abc")}
    return sl.mix(parts, {"a": 1.0, "b": 2.0, "c": 5.0})


PIPES: dict[str, Callable[[], Pipe]] = {
    "items": numbers,
    "map": lambda: numbers().map(abs),
    "filter": lambda: numbers().filter(lambda item: item % 3),
    "mix": mixed,
    "mix of shards": lambda: mixed().shard(2).merge(),
    "zip": lambda: sl.zip(numbers(), numbers()),
    "shuffle": lambda: numbers().shuffle(window=3_000),
    "regenerate": lambda: sl.from_items(range(2_000)).regenerate(2_000, reuse=5),
    "cache": lambda: sl.from_items(range(2_000)).cache().repeat(5),
    "behind the merge": lambda: numbers().merge().map(abs),
}


@pytest.fixture(autouse=True)
def _no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let items take no time, whatever the machine does beside: how long lists become depends on it."""
    monkeypatch.setattr(streamline.core.capacity, "QUICK_ITEM_S", math.inf)
    monkeypatch.setattr(streamline.core.pace, "perf_counter", lambda: 0.0)


async def taken(pipe: Pipe, snapshot: Any = None, *, count: int, at: range = range(0)) -> tuple[list[Any], list[Any]]:
    """Return so many items, and the snapshots behind those at some places."""
    found, snapshots = list[Any](), list[Any]()
    async with pipe.open(resume=snapshot) as stream:
        while len(found) < count:
            found.append(await anext(stream))
            if len(found) in at:
                snapshots.append((len(found), stream.snapshot()))
    return found, snapshots


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PIPES)
def test_a_resume_inside_a_long_list_is_exact(name: str) -> None:
    pipe = PIPES[name]()
    whole, snapshots = anyio.run(partial(taken, pipe, count=ITEMS, at=range(101, ITEMS - 10, 797)))
    assert len(snapshots) == 8
    for place, snapshot in snapshots:
        again, _ = anyio.run(partial(taken, pipe, snapshot, count=5))
        assert again == whole[place : place + 5], place


def test_lists_are_long_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, serve = list[int](), MixRun._serve

    def served(self: MixRun, drawn: Any, counts: Any) -> Any:
        lengths.append(len(drawn))
        return serve(self, drawn, counts)

    monkeypatch.setattr(MixRun, "_serve", served)
    anyio.run(partial(taken, mixed(), count=ITEMS))
    assert max(lengths) > LONG_LIST_ITEMS // 2
