"""The verdict on pipelines that run in hosts, and whose limit is known.

As in `tests/runtime/test_verdict.py`: one part is ten or more times as slow as the rest; nothing is said about times.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.observe import contention
from tests.kit import Pipe, at_last
from tests.laws.profile import in_turn

SLOW_S = 0.004
COUNT = 100


@dataclass(frozen=True)
class Known:
    """A pipeline whose limit is known; see `tests/runtime/test_verdict.py`."""

    pipe: Pipe
    rule: str
    stage: str | None
    body_s: float = 0.0


@dataclass(frozen=True)
class SlowItems:
    item_s: float

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        time.sleep(self.item_s)
        return index


def quick(item: Any) -> Any:
    return item


def known_of(slow_s: float) -> dict[str, Known]:
    def decode(item: Any) -> Any:
        time.sleep(slow_s)
        return item

    async def fetch(item: int) -> int:
        await anyio.sleep(slow_s)
        return item

    async def arriving() -> AsyncIterator[int]:
        for item in range(COUNT):
            await anyio.sleep(slow_s)
            yield item

    items = sl.from_items(range(COUNT)).shard(2)
    return {
        "a sync map": Known(items.map(quick).map(decode), "loop", "map(decode)"),
        "an async map": Known(items.map(fetch, concurrency=2).map(quick), "calls", "map(fetch)"),
        "a source": Known(sl.from_items(SlowItems(slow_s)).shard(2).map(quick), "loop", "from_items"),
        "a feed": Known(sl.from_stream(arriving).shard(2).map(quick), "calls", "from_stream"),
        "the consumer": Known(items.map(quick), "consumer", None, slow_s),
        "after the merge": Known(items.map(quick).merge().map(decode), "loop", "map(decode)"),
    }


@pytest.fixture(autouse=True)
def _what_else_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other tests are seen, which may keep its cores busy."""
    monkeypatch.setattr(contention, "threads", tuple)


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize(("name", "kind"), in_turn(known_of(SLOW_S), ["processes", "threads"]))
def test_the_limit_is_named(name: str, kind: str, processes: Backend) -> None:
    def check(times: int) -> None:
        known = known_of(times * SLOW_S)[name]
        with known.pipe.open(backend=processes if kind == "processes" else sl.Threads(2)) as stream:
            for _ in stream:
                if known.body_s:
                    time.sleep(known.body_s)
            stats = stream.stats()
        verdict = stats.verdict
        assert verdict is not None, f"nothing was said:\n{stats}"
        assert (verdict.rule, verdict.stage) == (known.rule, known.stage), f"\n{stats}"
        assert str(verdict) in str(stats)

    at_last(check)


def made_again(item: int, item_s: float) -> int:
    time.sleep(item_s)
    return item


@dataclass(frozen=True)
class Heavy:
    """An item that is made in no time, and takes long to be made again from its pickle."""

    item: int
    item_s: float

    def __reduce__(self) -> Any:
        return made_again, (self.item, self.item_s)


def test_transfer_that_takes_longer_than_making_the_items_is_the_verdict(processes: Backend) -> None:
    count = 2000  # more than hosts may have on their way: time is counted from the first item on

    def check(times: int) -> None:
        pipe = sl.from_items(range(count)).shard(2).map(partial(Heavy, item_s=times * SLOW_S / 8))
        with pipe.open(backend=processes) as stream:
            found: list[Any] = list(stream)
            assert found == list(range(count))
            stats = stream.stats()
        verdict = stats.verdict
        assert verdict is not None, f"nothing was said:\n{stats}"
        assert (verdict.rule, verdict.stage) == ("border", None), f"\n{stats}"
        assert ".batch" in verdict.line

    at_last(check)
