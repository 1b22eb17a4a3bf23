"""The verdict on pipelines that run in hosts, and whose limit is known.

As in `tests/running/test_verdict.py`: one part is ten or more times as slow as the rest; nothing is said about times.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from tests.running.kit import Pipe

SLOW_S = 0.004
COUNT = 200


def decode(item: Any) -> Any:
    time.sleep(SLOW_S)
    return item


async def fetch(item: int) -> int:
    await anyio.sleep(SLOW_S)
    return item


def quick(item: Any) -> Any:
    return item


class SlowItems:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return decode(index)  # type: ignore[no-any-return]


async def arriving() -> AsyncIterator[int]:
    for item in range(COUNT // 2):
        await anyio.sleep(SLOW_S)
        yield item


def made_again(item: int) -> int:
    time.sleep(SLOW_S / 8)
    return item


class Heavy:
    """An item that is made in no time, and takes long to be made again from its pickle."""

    def __init__(self, item: int) -> None:
        self.item = item

    def __reduce__(self) -> Any:
        return made_again, (self.item,)


@dataclass(frozen=True)
class Known:
    """A pipeline whose limit is known; see `tests/running/test_verdict.py`."""

    pipe: Pipe
    rule: str
    stage: str | None
    body_s: float = 0.0


ITEMS = sl.from_items(range(COUNT)).shard(2)

KNOWN: dict[str, Known] = {
    "a sync map": Known(ITEMS.map(quick).map(decode), "loop", "map(decode)"),
    "an async map": Known(ITEMS.map(fetch, concurrency=2).map(quick), "calls", "map(fetch)"),
    "a source": Known(sl.from_items(SlowItems()).shard(2).map(quick), "loop", "from_items"),
    "a feed": Known(sl.from_stream(arriving).shard(2).map(quick), "calls", "from_stream"),
    "the consumer": Known(ITEMS.map(quick), "consumer", None, SLOW_S),
    "behind the merge": Known(ITEMS.map(quick).merge().map(decode), "loop", "map(decode)"),
}


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_limit_is_named(name: str, kind: str, pool: Backend) -> None:
    known = KNOWN[name]
    with known.pipe.open(backend=pool if kind == "processes" else sl.Threads(2)) as stream:
        for _ in stream:
            if known.body_s:
                time.sleep(known.body_s)
        stats = stream.stats()
    verdict = stats.verdict
    assert verdict is not None, f"nothing was said:\n{stats}"
    assert (verdict.rule, verdict.stage) == (known.rule, known.stage), f"\n{stats}"
    assert str(verdict) in str(stats)


def test_a_border_that_takes_longer_than_making_what_crosses_it(pool: Backend) -> None:
    count = 2000  # more than hosts may have on their way: time is counted from the first item on
    with sl.from_items(range(count)).shard(2).map(Heavy).open(backend=pool) as stream:
        found: list[Any] = list(stream)
        assert found == list(range(count))
        stats = stream.stats()
    verdict = stats.verdict
    assert verdict is not None, f"nothing was said:\n{stats}"
    assert (verdict.rule, verdict.stage) == ("border", None), f"\n{stats}"
    assert ".batch" in verdict.line
