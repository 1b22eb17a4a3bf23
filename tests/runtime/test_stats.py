"""`stats()` of running streams: every figure where it belongs, at any moment, from the consumer's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core.figures import StageStats
from streamline.core.meters import Meters
from streamline.observe.stats import Stats
from tests.kit import AsyncTest, Pipe, at_last, in_thread

Run = Callable[[AsyncTest], None]


def add_one(x: int) -> int:
    return x + 1


def is_even(x: int) -> bool:
    return x % 2 == 0


async def double(x: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * x


def twice(x: int) -> list[int]:
    return [x, x]


@sl.stage(stateless=True)
async def passing(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield item


def after(pipe: Pipe) -> Stats:
    with pipe.open() as stream:
        for _ in stream:
            pass
    return stream.stats()


def stage(stats: Stats, name: str) -> StageStats:
    return next(stage for stage in stats.stages if stage.name == name)


N = 1000
ITEMS = sl.from_items(range(N))
EVERYTHING = (
    ITEMS.shard(3)
    .map(add_one)
    .filter(is_even)
    .map(double, concurrency=4)
    .map(add_one, executor="thread", concurrency=2, name="threads")
    .flat_map(twice)
    .through(passing)
    .shuffle(window=16)
    .prefetch(8)
    .take(N)
    .merge()
    .map(add_one, name="last")
    .batch(10, collate=None)
)


@pytest.mark.one_in(2)
def test_items_are_those_that_came_out_of_each_stage(run: Run) -> None:
    found = [after(EVERYTHING)]

    async def test() -> None:
        async with EVERYTHING.open() as stream:
            async for _ in stream:
                pass
            found.append(stream.stats())

    run(test)
    for stats in found:
        assert {each.name: each.items for each in stats.stages} == {
            "items": N, "add_one": N, "is_even": N // 2, "double": N // 2, "threads": N // 2, "twice": N,
            "passing": N, "shuffle": N, "take": N, "merge": N, "last": N, "batch": N // 10,
        }  # fmt: skip
        assert stats.items == N // 10
        assert [each.name for each in stats.stages] == [
            "items", "add_one", "is_even", "double", "threads", "twice", "passing", "shuffle", "take", "merge", "last",
            "batch",
        ]  # fmt: skip
        assert {each.workers for each in stats.stages[:-3]} == {3}
        assert (stage(stats, "double").concurrency, stage(stats, "double").executor) == (4, "task")
        assert stage(stats, "threads").executor == "thread"
        assert {channel.name: channel.channels for channel in stats.channels} == {
            "double": 3, "threads": 3, "passing": 3, "shuffle": 3, "take": 3, "batch": 1,
        }  # fmt: skip
        for channel in stats.channels:
            assert 0 < channel.peak <= channel.capacity


def test_workers_add_up() -> None:
    stats = after(ITEMS.shard(3).map(add_one))
    assert [(worker.shard, worker.items) for worker in stage(stats, "add_one").per_worker] == [
        (0, 334), (1, 333), (2, 333)
    ]  # fmt: skip
    assert stage(stats, "merge").items == stats.items == N


def test_bytes_are_estimated() -> None:
    stats = after(sl.from_items([b"12345678"] * N).map(bytes.hex))
    assert stage(stats, "items").bytes == 8 * N
    assert stage(stats, "hex").bytes == 16 * N


class Gate:
    """A function that holds the loop at its third call until it is let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, item: int) -> int:
        self.calls += 1
        if self.calls == 3:
            self.reached.set()
            self.go_on.wait(200)
        return item


def test_a_call_that_lasts_is_seen_while_it_lasts() -> None:
    gate = Gate()

    def consume() -> None:
        with ITEMS.take(5).map(gate, name="gate").map(add_one).open() as stream:
            reader = iter(stream)
            try:
                gate.reached.wait(200)
                first = stage(stream.stats(), "gate").busy_s
                then = first
                while then - first < 0.01:  # its clock goes on
                    then = stage(stream.stats(), "gate").busy_s
                meter = stream._session.meters.stages["gate", 0]
                assert meter.since is not None
                assert stage(stream.stats(), "add_one").busy_s < then
            finally:
                gate.go_on.set()
            assert len(list(reader)) == 5
            assert meter.since is None

    in_thread(consume)


def test_a_call_that_is_awaited_or_in_a_thread_is_seen_while_it_lasts(run: Run) -> None:
    release = threading.Event()

    async def test() -> None:
        begun, let_go = anyio.Event(), anyio.Event()

        async def wait(item: int) -> int:
            begun.set()
            await let_go.wait()
            return item

        pipe = ITEMS.take(1).map(wait, concurrency=2)
        async with pipe.open() as stream:
            async with anyio.create_task_group() as group:
                group.start_soon(_drain, stream)
                await begun.wait()
                meter = stream._session.meters.stages["wait", 0]
                assert meter.since is not None
                assert stage(stream.stats(), "wait").busy_s > 0
                assert meter.figures.busy_s == 0
                assert stream._session.meters.consumer.waiting_since is not None
                let_go.set()
            assert meter.since is None
            assert meter.figures.busy_s > 0

        def stop(item: int) -> int:
            begun_in_thread.set()
            release.wait(200)
            return item

        begun_in_thread = threading.Event()
        async with ITEMS.take(1).map(stop, executor="thread").open() as stream:
            async with anyio.create_task_group() as group:
                group.start_soon(_drain, stream)
                while not begun_in_thread.is_set():
                    await anyio.lowlevel.checkpoint()
                meter = stream._session.meters.stages["stop", 0]
                assert meter.since is not None
                release.set()
            assert meter.since is None
            assert meter.figures.busy_s > 0

    run(test)


async def _drain(stream: sl.Stream[Any]) -> None:
    async for _ in stream:
        pass


def test_a_stage_that_is_suspended_is_not_busy(run: Run) -> None:
    """Two workers in one loop: the quick one's function is not charged for the time that the slow one holds it."""

    def check(times: int) -> None:
        def slow_in_shard_0(item: int) -> int:
            if item % 2 == 0:
                time.sleep(times * 0.02)
            return item

        async def test() -> None:
            async with sl.from_items(range(20)).shard(2).map(slow_in_shard_0).through(passing).open() as stream:
                await _drain(stream)
            slow, quick = stage(stream.stats(), "slow_in_shard_0").per_worker
            assert slow.busy_s >= times * 0.2
            assert quick.busy_s < slow.busy_s / 4
            assert stage(stream.stats(), "passing").busy_s < slow.busy_s / 4

        run(test)

    at_last(check)


def test_a_source_that_waits_is_busy_and_its_reader_waits(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a line\n" * N)
    stats = after(sl.read_lines(str(path)).map(str.upper))
    assert stage(stats, "read_lines").busy_s > stage(stats, "read_lines").held_s > 0
    assert stage(stats, "upper").wait_input_s > 0
    assert stage(stats, "read_lines").items == N


def test_a_stopped_consumer_shows_as_waits_for_room_that_last() -> None:
    def consume() -> None:
        with sl.from_items(range(100_000)).map(add_one).open() as stream:
            next(stream)
            while stage(stream.stats(), "add_one").wait_output_s < 0.02:  # seen while it lasts
                time.sleep(0)
            assert stream.stats().items == 1

    in_thread(consume)


def test_a_repeated_pass_goes_on_with_its_meters() -> None:
    stats = after(sl.from_items(range(10)).map(double, concurrency=2).repeat(3))
    assert {each.name: each.items for each in stats.stages} == {"items": 30, "double": 30, "repeat": 30, "merge": 30}
    assert [channel.items for channel in stats.channels] == [30, 30]


def test_stats_are_there_before_the_first_item_and_behind_the_end(run: Run) -> None:
    async def test() -> None:
        stream = sl.from_items(range(5)).map(add_one).open().stream()
        assert stream.stats().items == 0
        assert stream.stats().verdict is None
        assert await anext(stream) == 1
        assert stream.stats().items == 1
        await stream.aclose()
        stats = stream.stats()
        assert stats.items == 1
        assert stream.stats().elapsed_s == stats.elapsed_s
        assert "map(add_one)" in str(stats)

    run(test)


def test_a_plain_stream_that_was_left_keeps_its_figures() -> None:
    with ITEMS.map(add_one).open() as stream:
        for _ in range(3):
            next(stream)
    stats = stream.stats()
    assert stats.items == 3
    assert stream.stats().elapsed_s == stats.elapsed_s


@pytest.mark.one_in(2, 1)
def test_a_custom_stage_may_read_ahead_in_a_task_of_its_own(run: Run) -> None:
    """It waits for inputs and for room at the same time then."""

    @sl.stage(stateless=True)
    async def ahead(items: AsyncIterator[int]) -> AsyncIterator[int]:
        send, receive = anyio.create_memory_object_stream[int](4)

        async def read() -> None:
            async with send:
                async for item in items:
                    await send.send(item)

        task = asyncio.get_running_loop().create_task(read())
        with receive:
            async for item in receive:
                yield item
        await task

    async def test() -> None:
        async with ITEMS.map(double).through(ahead).map(double, name="again").open() as stream:
            assert len([item async for item in stream]) == N
        assert stage(stream.stats(), "ahead").items == N

    run(test)


def test_what_failed_before_the_end_is_counted() -> None:
    def fail(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        return item

    with ITEMS.map(fail).open() as stream, pytest.raises(ValueError, match="seven"):
        list(stream)
    assert stream.stats().items == stage(stream.stats(), "fail").items == 7


def test_a_window_of_a_running_stream() -> None:
    with ITEMS.map(add_one).open() as stream:
        for _ in range(300):
            next(stream)
        earlier = stream.stats()
        assert len(list(stream)) == 700
    window = stream.stats().since(earlier)
    assert window.items == 700
    assert 0 < window.elapsed_s < stream.stats().elapsed_s


@pytest.mark.long
def test_stats_may_be_read_from_another_thread_while_the_stream_runs() -> None:
    """The consumer's thread reads while the loop's thread writes, all the time."""

    def consume() -> None:
        with ITEMS.repeat(20).shard(2).map(double, concurrency=8).map(add_one).open() as stream:
            last = stream.stats()
            for count, _ in enumerate(stream):
                if count % 50 == 0:
                    stats = stream.stats()
                    assert stats.items == count + 1
                    for now, before in zip(stats.stages, last.stages, strict=True):
                        assert now.items >= before.items
                    last = stats

    in_thread(consume)


def test_a_session_that_counts_nothing_delivers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmark of metering compares with."""
    monkeypatch.setattr("streamline.runtime.run.Meters", partial(Meters, on=False))
    with EVERYTHING.open() as stream:
        assert sum(map(len, stream)) == N
    stats = stream.stats()
    assert (stats.items, stats.stages, stats.channels) == (N // 10, (), ())


def test_what_stands_between_what_was_written_stands_there_under_a_name_of_its_own() -> None:
    def augment(item: int, *, rng: Any) -> int:
        return item

    pipe = sl.from_iterable(lambda: range(20)).shard(2).map(augment, seed=0).merge()
    with pipe.open() as stream:
        assert len(list(stream)) == 20
    assert list(map(str, stream.stats().stages)) == ["from_iterable", "shard", "rng(augment)", "map(augment)", "merge"]


def test_a_table_fits_a_terminal() -> None:
    pipe = sl.from_items(range(2000)).shard(2).map(abs, name="a_name_that_is_longer_than_anybody_needs_it_to_be")
    with pipe.open() as stream:
        assert len(list(stream)) == 2000
    lines = str(stream.stats()).splitlines()
    assert max(map(len, lines[1:6])) <= 80
    assert any(line.startswith("map(a_name_that_is_… ") for line in lines)
