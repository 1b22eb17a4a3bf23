"""The verdict names the true limit of pipelines whose limit is known, and is silent where nothing limits.

Each has one part that is ten or more times as slow as the rest. Nothing is said about times; where the machine does
much else beside, that part is slower still (`at_last`).
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import anyio
import pytest

import streamline as sl
from streamline.io.storage.local import LocalStorage
from streamline.observe import contention
from streamline.observe.stats import Stats
from tests.kit import Pipe, at_last, run_on
from tests.laws.profile import mostly_long

Drain: TypeAlias = Callable[[Pipe, float], Stats]

SLOW_S = 0.004
COUNT = 64


def decode(item: Any) -> Any:
    time.sleep(SLOW_S)
    return item


def compute(item: int) -> int:
    """Hold the interpreter."""
    end = perf_counter() + SLOW_S
    while perf_counter() < end:
        item += 1
    return item


def quick(item: Any) -> Any:
    return item


async def fetch(item: int) -> int:
    await anyio.sleep(SLOW_S)
    return item


async def skewed(item: int) -> int:
    """Slow for the third of three shards."""
    await anyio.sleep(SLOW_S if item % 3 == 2 else 0)
    return item


def skewed_sync(item: int) -> int:
    if item % 3 == 2:
        time.sleep(2 * SLOW_S)
    return item


async def straggling(item: int) -> int:
    """One in 100 takes 100 times as long."""
    await anyio.sleep(50 * SLOW_S if item % 100 == 50 else SLOW_S / 2)
    return item


def slow_collate(items: list[int]) -> list[int]:
    time.sleep(2 * SLOW_S)
    return items


def slow_filter(item: int) -> bool:
    time.sleep(SLOW_S)
    return item % 2 == 0


def slow_halves(item: int) -> list[int]:
    time.sleep(SLOW_S)
    return [item, item]


def rare(item: int) -> bool:
    return item % 5_000 == 0


@sl.stage(stateless=True)
async def enrich(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        await anyio.sleep(SLOW_S)
        yield item


@sl.source(state=dict)
async def arriving_rows(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[int]:
    async for item in arriving():
        state["n"] = item
        if item % num_shards == shard:
            yield item


@sl.source(state=dict)
def dripping_rows(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
    for item in dripping():
        state["n"] = item
        if item % num_shards == shard:
            yield item


class SlowItems:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return decode(index)  # type: ignore[no-any-return]


class SlowLists(SlowItems):
    def __len__(self) -> int:
        return 2_000

    def __getitems__(self, indices: list[int]) -> list[int]:
        time.sleep(10 * SLOW_S)
        return indices


async def arriving() -> AsyncIterator[int]:
    for item in range(COUNT):
        await anyio.sleep(SLOW_S)
        yield item


def dripping() -> Any:
    for item in range(COUNT):
        time.sleep(SLOW_S)
        yield item


def late_first() -> Any:
    """The first item takes as long as all others of a run."""
    time.sleep(100 * SLOW_S)
    yield from range(COUNT)


def plain(pipe: Pipe, body_s: float) -> Stats:
    """Consume by `for`, with a body that takes `body_s`."""
    with pipe.open() as stream:
        for _ in stream:
            if body_s:
                time.sleep(body_s)
        return stream.stats()


def drain_async(pipe: Pipe, body_s: float, *, hold: bool) -> Stats:
    found: list[Stats] = []

    async def test() -> None:
        async with pipe.open() as stream:
            async for _ in stream:
                if hold:
                    time.sleep(body_s)  # noqa: ASYNC251 - this is what is wrong with it
                elif body_s:
                    await anyio.sleep(body_s)
            found.append(stream.stats())

    run_on("asyncio", test)
    return found[0]


def awaiting(pipe: Pipe, body_s: float) -> Stats:
    """Consume by `async for`, with a body that awaits."""
    return drain_async(pipe, body_s, hold=False)


def holding(pipe: Pipe, body_s: float) -> Stats:
    """Consume by `async for`, with a body that holds the event loop."""
    return drain_async(pipe, body_s, hold=True)


ITEMS = sl.from_items(range(COUNT))
MANY = sl.from_items(range(4 * COUNT))


@dataclass(frozen=True)
class Known:
    """A pipeline whose limit is known.

    Attributes:
      stage: the limit, as printed; None: the consumer.
      body: how long the loop's body takes, in units of `SLOW_S`.
    """

    pipe: Pipe
    rule: str
    stage: str | None
    drain: Drain = plain
    body: float = 0.0


KNOWN: dict[str, Known] = {
    "a source by index": Known(sl.from_items(SlowItems()).map(quick), "loop", "from_items"),
    "a source by lists of indices": Known(sl.from_items(SlowLists()).map(quick), "loop", "from_items"),
    "a sync iterable": Known(sl.from_iterable(dripping).map(quick), "loop", "from_iterable"),
    "an async iterable": Known(sl.from_iterable(arriving).map(quick), "calls", "from_iterable"),
    "a custom source": Known(arriving_rows().shard(2).map(quick), "calls", "source(arriving_rows)"),
    "a sync custom source": Known(dripping_rows().shard(2).map(quick), "loop", "source(dripping_rows)"),
    "a slow feed": Known(sl.from_stream(arriving).shard(2).map(quick), "calls", "from_stream"),
    "a sync map that waits": Known(MANY.take(COUNT).shard(4).map(decode).map(quick), "loop", "map(decode)"),
    "a sync map that computes": Known(ITEMS.map(quick).map(compute), "loop", "map(compute)"),
    "a sync map in an async for": Known(ITEMS.map(fetch, concurrency=64).map(decode), "loop", "map(decode)", awaiting),
    "a sync map behind the merge": Known(ITEMS.shard(4).map(quick).merge().map(decode), "loop", "map(decode)"),
    "an async map": Known(MANY.map(fetch, concurrency=4).map(quick), "calls", "map(fetch)"),
    "an async map in an async for": Known(MANY.map(fetch, concurrency=4), "calls", "map(fetch)", awaiting),
    "an unordered map": Known(MANY.map(fetch, concurrency=4, ordered=False), "calls", "map(fetch)"),
    "a map in threads": Known(
        MANY.map(quick).map(decode, executor="thread", concurrency=4).map(quick), "calls", "map(decode)"
    ),
    "a collate behind the merge": Known(
        MANY.shard(2).map(quick).merge().batch(8, collate=slow_collate), "loop", "batch"
    ),
    "a filter": Known(ITEMS.map(quick).filter(slow_filter), "loop", "filter(slow_filter)"),
    "a flat_map": Known(ITEMS.flat_map(slow_halves).map(quick), "loop", "flat_map(slow_halves)"),
    "a custom stage": Known(ITEMS.map(quick).through(enrich).map(quick), "calls", "through(enrich)"),
    "the consumer": Known(ITEMS.map(quick), "consumer", None, plain, 1),
    "the consumer, awaiting": Known(ITEMS.map(fetch, concurrency=64), "consumer", None, awaiting, 1),
    "the consumer behind a slow first item": Known(sl.from_iterable(late_first), "consumer", None, plain, 1),
    "the body of an async for": Known(ITEMS.take(40).shard(2).map(decode), "loop body", None, holding, 2),
    "a worker that awaits more": Known(MANY.shard(3).map(skewed), "uneven workers", "map(skewed)"),
    "a worker that works more": Known(
        MANY.take(2 * COUNT).shard(3).map(skewed_sync).prefetch(2).merge(), "uneven workers", "map(skewed_sync)"
    ),
    "a worker under a best-effort merge": Known(
        MANY.shard(3).map(skewed).merge("best_effort"), "uneven workers", "map(skewed)"
    ),
    "stragglers held in order": Known(
        MANY.map(straggling, concurrency=16).map(quick), "order", "map(straggling)", awaiting
    ),
    "a selective filter": Known(
        sl.from_items(range(4_000_000)).filter(rare).map(quick), "selective filter", "filter(rare)"
    ),
}


@pytest.fixture(autouse=True)
def _what_else_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other tests are seen, which may keep its cores busy."""
    monkeypatch.setattr(contention, "threads", tuple)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", mostly_long(KNOWN, 4))
def test_the_limit_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, slow_s = KNOWN[name], SLOW_S

    def check(times: int) -> None:
        monkeypatch.setattr(sys.modules[__name__], "SLOW_S", times * slow_s)
        stats = known.drain(known.pipe, known.body * SLOW_S)
        verdict = stats.verdict
        assert verdict is not None, f"nothing was said:\n{stats}"
        assert (verdict.rule, verdict.stage) == (known.rule, known.stage), f"\n{stats}"
        assert str(verdict) in str(stats)

    at_last(check)


def test_of_a_slow_feed_no_speed_is_promised() -> None:
    known = KNOWN["a slow feed"]
    verdict = known.drain(known.pipe, 0).verdict
    assert verdict is not None
    assert verdict.speedup is None
    assert "items/s and is waited for" in verdict.line


def test_files_that_arrive_slowly_are_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a line\n")

    async def blocks(
        self: LocalStorage, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes]:
        for _ in range(COUNT):
            await anyio.sleep(SLOW_S)
            yield b"a line\n" * 5

    monkeypatch.setattr(LocalStorage, "blocks", blocks)
    slow_s = SLOW_S

    def check(times: int) -> None:
        monkeypatch.setattr(sys.modules[__name__], "SLOW_S", times * slow_s)
        stats = plain(sl.read_lines(str(path)).map(quick), 0)
        verdict = stats.verdict
        assert verdict is not None
        assert (verdict.rule, verdict.stage) == ("calls", "read_lines"), f"\n{stats}"
        assert ".shard(" in verdict.line

    at_last(check)


@pytest.mark.long
def test_nothing_is_said_where_nothing_limits() -> None:
    def check(times: int) -> None:
        items = sl.from_items(range(600_000 * times))
        for stats in (plain(items.map(quick), 0), awaiting(items.shard(4).map(quick), 0)):
            assert stats.verdict is None, f"\n{stats}"

    at_last(check)


def test_nothing_is_said_of_a_few_items() -> None:
    assert plain(ITEMS.take(5).map(decode), 0).verdict is None
    with ITEMS.map(decode).open() as stream:
        assert stream.stats().verdict is None


def hints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "streamline.hints"]


def nap(item: int) -> int:
    time.sleep(0.11)
    return item


def test_a_function_that_holds_the_consumers_loop_is_hinted_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        awaiting(sl.from_items(range(4)).shard(2).map(nap), 0)
    (hint,) = hints(caplog)
    assert hint.startswith("map(nap) held the event loop for 0.")
    assert 'executor="thread"' in hint


def test_each_stage_gets_a_hint_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def collate(items: list[int]) -> list[int]:
        time.sleep(0.11)
        return items

    with caplog.at_level(logging.WARNING):
        awaiting(sl.from_items(range(2)).map(nap).batch(2, collate=collate), 0)
    assert [hint.split(" held")[0] for hint in hints(caplog)] == ["map(nap)", "batch"]


def test_a_plain_loop_and_threads_get_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plain(sl.from_items(range(2)).map(nap), 0)
        awaiting(sl.from_items(range(2)).map(nap, executor="thread"), 0)
    assert hints(caplog) == []


def test_advice_that_is_followed_takes_the_limit_away() -> None:
    before = plain(MANY.map(fetch, concurrency=1).take(COUNT), 0).verdict
    assert before is not None
    assert before.speedup is not None
    assert "concurrency=8" in before.line
    after = plain(MANY.map(fetch, concurrency=8), 0)
    assert next(itertools.dropwhile(lambda stage: stage.kind != "map", after.stages)).concurrency == 8
