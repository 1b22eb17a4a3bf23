"""The watchdog: who is told when a consumer waits, and what for."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core.gate import Event as GateEvent
from streamline.core.state import At
from streamline.core.tasks import MergeWait, Session, WaitedWorker
from streamline.errors import PlanError, PlanTypeError
from streamline.observe.watchdog import Patience, Watched, user_frame, watch

LONGEST_S = 200.0
STALL_S = 0.02


class Log(logging.Handler):
    """What the watchdog says, and events that are set when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.held: list[str] = []
        self.told = threading.Event()
        self.enough = 1

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        text = record.getMessage()
        if "the event loop was held" in text:  # a machine that is busy elsewhere does that, too
            self.held.append(text)
            return
        self.said.append(text)
        if len(self.said) >= self.enough:
            self.told.set()


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logger = logging.getLogger("streamline.watchdog")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@contextmanager
def stage_at_work(session: Session, name: str, kind: str, shard: int, since: float, calls: int = 1) -> Iterator[None]:
    meter = session.meters.stage(name, kind, shard, calls)
    meter.begun = since
    yield
    meter.begun = None


# What it says -------------------------------------------------------------------------------------------------------


def test_it_names_the_worker_whose_turn_it_is_its_stage_and_its_place() -> None:
    session = Session()
    state = At("read_jsonl", {"file": "part-003.jsonl", "line": 17, "byte": 4711})
    session.services.add(MergeWait, MergeWait(lambda: [WaitedWorker(3, state)]))
    watched = Watched(session, "read_jsonl")
    with stage_at_work(session, "fetch", "map", 3, 71.0), stage_at_work(session, "other", "map", 2, 1.0):
        assert watched.report(100.0) == (
            "waiting for shard 3 (the merge's turn): map(fetch) has been in one call for 29 s, "
            "after file part-003.jsonl, line 17, byte 4711"
        )
    with stage_at_work(session, "fetch", "map", 3, 71.0), stage_at_work(session, "load", "map", 3, 60.0, 64):
        assert "map(load) has been in up to 64 calls for 40 s" in watched.report(100.0)
    assert "nothing in it is at work, after file part-003" in watched.report(100.0)


def test_a_source_that_brings_nothing_is_said_to() -> None:
    session = Session()
    session.services.add(MergeWait, MergeWait(lambda: [WaitedWorker(0, At("feed", 5))]))
    with stage_at_work(session, "feed", "from_iterable", 0, 70.0):
        said = Watched(session, "feed").report(100.0)
    assert "from_iterable(feed) has brought nothing for 30 s, after item 5 of feed" in said


def test_a_quiet_feed_is_named_whichever_worker_waits_for_it() -> None:
    """One reader, of the rank, feeds them all; a worker that is at work itself is the nearer cause."""
    session = Session()
    session.services.add(MergeWait, MergeWait(lambda: [WaitedWorker(1, At("stream", 5))]))
    watched = Watched(session, "stream", shared=True)
    with stage_at_work(session, "stream", "from_stream", 0, 70.0):
        assert "shard 1 (the merge's turn): from_stream has brought nothing for 30 s" in watched.report(100.0)
        with stage_at_work(session, "fetch", "map", 1, 90.0):
            assert "shard 1 (the merge's turn): map(fetch) has been in one call for 10 s" in watched.report(100.0)
        with stage_at_work(session, "fetch", "map", 0, 60.0):
            assert "from_stream has brought nothing" in watched.report(100.0)


def test_of_a_best_effort_merge_it_names_all_that_may_come() -> None:
    session = Session()
    session.services.add(MergeWait, MergeWait(lambda: [WaitedWorker(shard, At("items", shard)) for shard in range(5)]))
    said = Watched(session, "items").report(100.0)
    assert said.startswith("waiting for any of the shards 0, 1, 2 and 2 more: shard 0: nothing in it is at work")


def test_active_stages_downstream_of_the_merge_come_first() -> None:
    session = Session()
    session.services.add(MergeWait, MergeWait(lambda: [WaitedWorker(0, At("items", 0))]))
    with stage_at_work(session, "fetch", "map", 0, 10.0), stage_at_work(session, "stack", "batch", 0, 95.0):
        said = Watched(session, "items", {"merge", "stack"}).report(100.0)
    assert said == "after the merge, batch(stack) has been in one call for 5 s"


def test_long_waits_are_read_at_a_glance() -> None:
    session = Session()
    session.services.add(MergeWait, MergeWait(lambda: [WaitedWorker(0, At("items", 0))]))
    with stage_at_work(session, "fetch", "map", 0, 0.0):
        assert "has been in one call for 86,400 s" in Watched(session, "items").report(86_400.0)
        assert "has been in one call for 0.021 s" in Watched(session, "items").report(0.0213)


def test_a_failing_report_ends_nothing() -> None:
    session = Session()
    session.services.add(MergeWait, MergeWait(lambda: [][: int(1 / 0)]))
    assert Watched(session, "items").report(0.0) == "what for is unknown (ZeroDivisionError: division by zero)"
    assert "the merge waits for no worker" in Watched(Session(), "items").report(0.0)


# Plain loops --------------------------------------------------------------------------------------------------------


class Feed:
    """An async source that gives `count` items, then waits until it is released, and gives the rest."""

    def __init__(self, count: int, released: threading.Event) -> None:
        self.count = count
        self.released = released

    async def __call__(self) -> AsyncIterator[int]:
        for item in range(2 * self.count):
            if item == self.count:
                await anyio.to_thread.run_sync(self.released.wait, LONGEST_S)
            yield item


def feed_of(count: int, released: threading.Event) -> sl.Pipeline[int]:
    feed = Feed(count, released)

    async def items() -> AsyncIterator[int]:
        async for item in feed():
            yield item

    return sl.from_iterable(items)


def test_a_plain_loop_logs_what_it_waits_for(log: Log) -> None:
    log.enough = 3
    with feed_of(3, log.told).shard(2).merge().open(stall_s=STALL_S) as stream:
        assert list(stream) == list(range(6))
    waited = [float(text.split()[4]) for text in log.said[:3]]
    assert all(text.startswith("the consumer has waited ") for text in log.said)
    assert any("waiting for shard 1 (the merge's turn)" in text for text in log.said)
    assert all(seconds >= 0.9 * STALL_S * 2**number for number, seconds in enumerate(waited))  # told with two digits


def test_the_place_is_where_the_worker_stood_last(log: Log, tmp_path: Path) -> None:
    for part in range(2):
        (tmp_path / f"part-{part}.jsonl").write_text("1\n2\n3\n")
    calls = 0

    async def fetch(item: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 6:
            await anyio.to_thread.run_sync(log.told.wait, LONGEST_S)
        return item

    pipe = sl.read_jsonl(str(tmp_path / "part-*.jsonl")).shard(2).map(fetch).merge()
    with pipe.open(stall_s=STALL_S) as stream:
        assert list(stream) == [1, 1, 2, 2, 3, 3]
    assert any(f"part-{part}.jsonl line 2 (ends at byte 4)" in text for part in range(2) for text in log.said)


def blocks(item: int, event: threading.Event) -> int:
    if item == 2:
        event.wait(LONGEST_S)
    return item


def test_sync_code_that_holds_the_loop_is_named_with_its_line(log: Log) -> None:
    def stuck(item: int) -> int:
        return blocks(item, log.told)

    with sl.from_items(range(4)).map(stuck).open(stall_s=STALL_S) as stream:
        assert list(stream) == [0, 1, 2, 3]
    line = blocks.__code__.co_firstlineno + 2
    assert f"the event loop is held by blocks ({__file__}, line {line})" in log.said[0]
    assert "executor='thread'" in log.said[0]


def test_a_consumer_that_takes_its_time_is_no_stall(log: Log) -> None:
    with sl.from_items(range(4)).open(stall_s=0.001) as stream:
        for _ in stream:
            log.told.wait(0.01)  # it trains
    assert not log.said


def test_there_is_no_watchdog_without_a_limit(log: Log) -> None:
    released = threading.Event()
    with feed_of(1, released).open(stall_s=None) as stream:
        next(stream)
        threading.Timer(0.05, released.set).start()
        assert list(stream) == [1]
    assert not log.said


def test_a_paused_stream_is_no_stall(log: Log) -> None:
    session = Session()
    session.gate.on(GateEvent.QUIESCE)
    session.gate.on(GateEvent.PAUSE)
    looks = 0

    def take(timeout_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            session.gate.on(GateEvent.RESUME)
        if looks == 5:
            return
        raise queue.Empty

    Patience(Watched(session, "items"), STALL_S).wait(take, None, None, perf_counter())
    assert len(log.said) == 1
    assert looks == 5  # two in the pause, then one that begins anew, and one after the look at the loop


def test_ctrl_c_comes_out_of_a_watched_wait() -> None:
    def take(timeout_s: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Patience(Watched(Session(), "items"), STALL_S).wait(take, None, None, perf_counter())


# Async loops --------------------------------------------------------------------------------------------------------


def hold(seconds: float) -> None:
    """Hold the event loop, as sync user code does."""
    threading.Event().wait(seconds)


async def until(log: Log, count: int) -> None:
    """Wait for so many warnings."""
    with anyio.fail_after(LONGEST_S):
        while len(log.said) < count:
            await anyio.lowlevel.checkpoint()


async def test_a_task_tells_at_the_limit_and_at_twice_and_four_times_of_it(log: Log) -> None:
    session = Session()
    session.meters.consumer.waiting_since = perf_counter()
    task = asyncio.create_task(watch(Watched(session, "items"), STALL_S))
    await until(log, 3)
    task.cancel()
    waited = [float(text.split()[4]) for text in log.said]
    assert all(seconds >= 0.9 * STALL_S * 2**number for number, seconds in enumerate(waited))


async def test_each_wait_begins_anew(log: Log) -> None:
    session = Session()
    consumer = session.meters.consumer
    consumer.waiting_since = perf_counter() - 1000 * STALL_S  # it will be told next at 1,024 times the limit
    task = asyncio.create_task(watch(Watched(session, "items"), STALL_S))
    await until(log, 1)
    consumer.waiting_since = perf_counter()
    await until(log, 2)
    task.cancel()


async def test_an_async_consumer_that_has_what_it_wants_is_no_stall(log: Log) -> None:
    session = Session()
    task = asyncio.create_task(watch(Watched(session, "items"), 0.001))
    await asyncio.to_thread(log.told.wait, 0.03)
    hold(0.01)  # it trains
    await asyncio.to_thread(log.told.wait, 0.01)
    session.meters.consumer.waiting_since = perf_counter()
    session.gate.on(GateEvent.QUIESCE)
    session.gate.on(GateEvent.PAUSE)
    await asyncio.to_thread(log.told.wait, 0.01)
    task.cancel()
    assert not log.said


async def test_a_loop_held_while_the_consumer_waited_is_reported_afterwards(log: Log) -> None:
    session = Session()
    stage = session.meters.stage("decode", "map", 0)
    task = asyncio.create_task(watch(Watched(session, "items"), STALL_S))
    await anyio.lowlevel.checkpoint()
    began = session.meters.consumer.waiting_since = perf_counter()
    hold(4 * STALL_S)  # a stage's function
    stage.count_hold(began, perf_counter())
    with anyio.fail_after(LONGEST_S):
        while not log.held:
            await anyio.lowlevel.checkpoint()
    task.cancel()
    assert "the event loop was held, by map(decode) as it seems" in log.held[0]


async def test_the_task_ends_with_its_stream() -> None:
    async with sl.from_items(range(3)).open() as stream:
        assert "streamline watchdog" in {task.get_name() for task in asyncio.all_tasks()}
        await anext(stream)
    assert not {task for task in asyncio.all_tasks() if task.get_name().startswith("streamline")}


async def test_an_async_loop_logs_what_it_waits_for(log: Log) -> None:
    async with feed_of(3, log.told).shard(2).merge().open(stall_s=STALL_S) as stream:
        assert [item async for item in stream] == list(range(6))
    assert any("waiting for shard 1 (the merge's turn)" in text for text in log.said)


# Options, frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stall_s", [0, -1, math.inf, math.nan])
def test_a_limit_is_a_time(stall_s: float) -> None:
    with pytest.raises(
        PlanError, match=r"\.open\(stall_s=\) \(or None, for no watchdog\) is a finite number of seconds"
    ):
        sl.from_items(range(3)).open(stall_s=stall_s)


@pytest.mark.parametrize("stall_s", ["30", True])
def test_a_limit_is_a_number(stall_s: Any) -> None:
    with pytest.raises(PlanTypeError, match=r"\.open\(stall_s=\) \(or None, .*\) is a number of seconds, got"):
        sl.from_items(range(3)).open(stall_s=stall_s)


def test_without_a_frame_of_the_users_there_is_none() -> None:
    assert user_frame(None) is None


def test_a_debugger_is_left_in_peace() -> None:
    """Somebody who looks at a variable for a minute is no stall."""
    names: set[str] = set()

    def look(item: int) -> int:
        names.update(task.get_name() for task in asyncio.all_tasks())
        return item

    pipe = sl.from_items(range(3)).map(look)
    assert list(pipe.debug()) == [0, 1, 2]
    assert "streamline supervisor" in names
    assert "streamline watchdog" not in names
