"""What is seen of workers that run in hosts: stats, the watchdog, traces."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.hosts.remote_metrics import MetricsReporter, RemoteMetrics
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import Message, MetricsUpdate
from streamline.core.figures import ReadStats, StageStats
from streamline.core.meters import HostMeter, Meters, StageMeter
from streamline.core.tasks import Session
from streamline.observe.stats import Stats, stats_of
from streamline.testing.subjects import settle
from tests.backends.hosts.kit import odd, on_each
from tests.copying_backend import Copying, HostDeath

BACKENDS: list[Backend] = [sl.Threads(2), Copying(2)]


async def double(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * item


async def arriving() -> AsyncIterator[int]:
    for item in range(60):
        yield item


PIPES: dict[str, sl.Pipeline[Any]] = {
    "stages": sl.from_items(range(300)).shard(3).map(abs).filter(odd).merge().batch(7),
    "calls": sl.from_items(range(300)).shard(3).map(double, concurrency=4),
    "threads": sl.from_items(range(100)).shard(2).map(abs, executor="thread", concurrency=2).prefetch(4),
    "passes": sl.from_items(range(50)).shard(2).map(abs).repeat(3),
    "bare": sl.from_items(range(300)).shard(3),
    "feed": sl.from_stream(arriving).shard(2).map(abs),
}


def after(pipe: sl.Pipeline[Any], backend: Backend) -> sl.Stats:
    with pipe.open(backend=backend) as stream:
        list(stream)
        return stream.stats()


def counted(stats: sl.Stats) -> list[tuple[Any, ...]]:
    """What doesn't depend on time or place."""
    return [
        (
            *(stage.name, stage.kind, stage.items, stage.bytes, stage.workers),
            *(stage.concurrency, stage.executor, stage.ordered),
            [(worker.shard, worker.items) for worker in stage.per_worker],
        )
        for stage in stats.stages
    ]


@pytest.mark.one_in(3)
@on_each(BACKENDS)
@pytest.mark.parametrize("pipe", PIPES)
def test_counts_after_the_end_are_those_of_a_stream_without_hosts(pipe: str, backend: Backend) -> None:
    stats = after(PIPES[pipe], backend)
    assert counted(stats) == counted(after(PIPES[pipe], sl.Inline()))
    assert {stage.hosts for stage in stats.stages} == {0, 2}


@on_each(BACKENDS)
def test_channels_to_the_consumer_are_distinct_from_those_in_hosts(backend: Backend) -> None:
    stats = after(PIPES["calls"], backend)
    channels = {channel.name: channel for channel in stats.channels}
    border, inside = channels["double (border)"], channels["double"]
    assert border.items == inside.items == 300
    assert border.channels == inside.channels == 3
    assert border.depth == 0
    assert 1 <= border.peak <= border.capacity
    assert 1 <= inside.peak <= inside.capacity


@on_each(BACKENDS)
def test_hosts_say_how_they_are(backend: Backend) -> None:
    with PIPES["stages"].open(backend=backend) as stream:
        next(stream)
        first, second = stream.stats().hosts
        assert (first.number, second.number) == (0, 1)
        assert (first.shards, second.shards) == ((0, 2), (1,))
        assert first.alive
        list(stream)
        stats = stream.stats()
    first, second = stats.hosts
    assert first.items + second.items == 225
    assert first.restarts == second.restarts == 0
    assert (first.bytes > 0) == isinstance(backend, Copying)
    assert first.copied_bytes == first.bytes
    assert first.slabs_made == first.slabs_reused == 0
    assert not stats.since(stats).hosts[0].items
    assert "thread 0" in str(stats)


def test_without_hosts_there_are_none() -> None:
    stats = after(PIPES["stages"], sl.Inline())
    assert stats.hosts == ()
    assert "restarts" not in str(stats)


def test_processes_have_pids_memory_and_figures(processes: Backend) -> None:
    with PIPES["stages"].open(backend=processes) as stream:
        next(stream)
        pids = {host.pid for host in stream.stats().hosts}
        list(stream)
        stats = stream.stats()
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {host.pid for host in stats.hosts} == pids
    assert {host.kind for host in stats.hosts} == {"process"}
    assert all(10e6 < host.resident_bytes < 10e9 for host in stats.hosts)
    assert counted(stats) == counted(after(PIPES["stages"], sl.Inline()))
    assert f"process 0, pid {stats.hosts[0].pid}" in str(stats)


def test_clocks_of_processes_are_this_ones(processes: Backend) -> None:
    before = time.perf_counter()
    (there,) = sl.from_items([0]).map(lambda _: time.perf_counter()).open(backend=processes).sync_stream()
    assert before < there < time.perf_counter()


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("received", [4, 12])
async def test_work_repeated_after_a_death_counts_again_and_errors_do_not(received: int) -> None:
    def even(item: int) -> int:
        if item % 10 == 3:
            raise ValueError(item)
        return item

    backend = Copying(1, (HostDeath(0, received=received), HostDeath(1, received=received)), max_restarts=10)
    pipe = sl.from_items(range(2_000)).map(even)
    async with pipe.open(backend=backend, on_error="skip", max_errors=None) as stream:
        found = [item async for item in stream]
        stats, report = stream.stats(), stream.errors
    assert found == [item for item in range(2_000) if item % 10 != 3]
    assert report.total == 200
    by_name = {stage.name: stage for stage in stats.stages}
    assert by_name["even"].errors == 200
    assert by_name["even"].items > 0  # of what a host did just before its death, nothing is known
    (host,) = stats.hosts
    assert host.restarts == 2
    assert host.items == 1_800


# What goes on ---------------------------------------------------------------------------------------------------------


class Wires(Link):
    """Keeps what it is sent."""

    copies = True

    def __init__(self) -> None:
        self.sent: list[MetricsUpdate] = []
        self.came = threading.Semaphore(0)

    def send(self, message: Message) -> None:
        assert isinstance(message, MetricsUpdate)
        self.sent.append(message)
        self.came.release()

    def pack(self, items: Any) -> Any: ...
    def unpack(self, packed: Any) -> Any: ...
    async def receive(self) -> Any: ...
    async def flush(self) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


def mirrored() -> tuple[Meters, RemoteMetrics]:
    meters = Meters(0.0)
    return meters, RemoteMetrics(meters, HostMeter(0, "process", lambda: 4711))


def test_a_function_that_is_stuck_is_told_while_its_event_loop_stands_still() -> None:
    """By a thread: nothing here runs but this one."""
    link, session = Wires(), Session()
    reporter = MetricsReporter(link, session)
    meter = session.meters.stage("decode", "map", 3)
    meter.begun = began = time.perf_counter()
    reporter.wake()
    try:
        assert link.came.acquire(timeout=200)
    finally:
        reporter.close()
    meters, mirror = mirrored()
    mirror.show(link.sent[0])
    shown = meters.stages["decode", 3]
    assert shown.since == began
    assert str(shown.host) == "process 0, pid 4711"


def test_nothing_is_reported_twice_or_checked_while_nothing_is_at_work() -> None:
    link, session = Wires(), Session()
    reporter = MetricsReporter(link, session)
    session.meters.stage("decode", "map", 3).count([1, 2])
    reporter.wake()
    assert link.came.acquire(timeout=200)
    thread = reporter._thread
    assert thread is not None
    deadline = time.monotonic() + 200
    while reporter._active.is_set():  # it waits for news once it has looked
        assert time.monotonic() < deadline
    reporter.close()
    assert not thread.is_alive()
    assert len(link.sent) == 1


def test_a_host_that_is_gone_is_at_nothing_and_what_it_did_stays() -> None:
    link, session = Wires(), Session()
    reporter = MetricsReporter(link, session)
    meter = session.meters.stage("decode", "map", 3)
    channel = session.meters.channel("decode", 3, 8)
    meter.count([1, 2])
    meter.count_work(1.0, 3.0)
    meter.begun = time.perf_counter()
    channel.items, channel.depth, channel.peak = 7, 5, 6
    reporter.report()
    meters, mirror = mirrored()
    mirror.show(link.sent[0])
    mirror.on_lost()
    shown, passed = meters.stages["decode", 3], meters.channels["decode", 3]
    assert shown.since is None
    assert (shown.figures.items, passed.items, passed.depth, passed.peak) == (2, 7, 0, 6)
    assert shown.figures.busy_s >= 2.0
    mirror.show(link.sent[0])  # of the next one
    assert (shown.figures.items, passed.items, passed.depth) == (4, 14, 5)
    assert shown.figures.busy_s >= 4.0


def test_counts_of_a_worker_that_moves_and_returns_add_up_once() -> None:
    """Each host goes on with what it counted itself: it doesn't know of the other."""
    link, session = Wires(), Session()
    reporter = MetricsReporter(link, session)
    meter, channel = session.meters.stage("decode", "map", 3), session.meters.channel("decode", 3, 8)

    def counted(items: int, seconds: float) -> MetricsUpdate:
        meter.figures.items, meter.figures.busy_s, channel.items = items, seconds, items
        reporter.report()
        return link.sent[-1]

    meters, first = mirrored()
    second = RemoteMetrics(meters, HostMeter(1, "process", lambda: 4712))
    shown = []
    for host, took, items in [(first, True, 10), (second, True, 3), (second, False, 4), (first, True, 15)]:
        if took:
            host.take_over(3)
        host.show(counted(items, float(items)))
        stage, channel_shown = meters.stages["decode", 3], meters.channels["decode", 3]
        shown.append((stage.figures.items, stage.figures.busy_s, channel_shown.items, str(stage.host)))
    assert shown == [
        (10, 10.0, 10, "process 0, pid 4711"),
        (13, 13.0, 13, "process 1, pid 4712"),
        (14, 14.0, 14, "process 1, pid 4712"),
        (19, 19.0, 19, "process 0, pid 4711"),
    ]


def test_another_run_in_the_same_host_counts_from_nothing_and_adds_up() -> None:
    """A host that ranks share may serve a shard again that it gave up."""
    meters, mirror = mirrored()
    for items, seconds in [(10, 4.0), (1, 0.1), (3, 0.2)]:
        link, session = Wires(), Session()
        session.meters.stage("decode", "map", 3).figures.add(StageStats(name="", kind="", items=items, busy_s=seconds))
        session.meters.channel("decode", 3, 8).items = items
        MetricsReporter(link, session).report()
        mirror.show(link.sent[-1])
    figures = meters.stages["decode", 3].figures
    assert (figures.items, round(figures.busy_s, 3), meters.channels["decode", 3].items) == (13, 4.2, 13)


@pytest.mark.parametrize("ahead", [-1e6, 1e6])
def test_calls_that_are_free_on_another_machine_are_free_here(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    here = time.perf_counter
    link, session = Wires(), Session()
    link.one_machine = False
    session.meters.stage("fetch", "map", 3, 2).slots = [0.0, 0.0]
    with monkeypatch.context() as patch:
        patch.setattr("streamline.backends.hosts.remote_metrics.perf_counter", lambda: here() + ahead)
        MetricsReporter(link, session).report()
    meters, mirror = mirrored()
    mirror.show(link.sent[-1])
    assert meters.stages["fetch", 3].until(here()).busy_s == 0
    mirror.on_lost()
    assert meters.stages["fetch", 3].figures.busy_s == 0


@pytest.mark.parametrize("ahead", [-1e6, 1e6])
def test_times_of_another_machine_are_shown_by_this_ones_clock(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    here = time.perf_counter
    link, session = Wires(), Session()
    link.one_machine = False
    meter = session.meters.stage("decode", "map", 3)
    spans: list[tuple[float, float]] = []
    meters, mirror = mirrored()
    reporter = MetricsReporter(link, session)
    reporter.observe(True)
    meters.hooks.observe(lambda _, __, began, ended: spans.append((began, ended)))
    for _ in range(3):  # on the machine with the other clock
        with monkeypatch.context() as patch:
            patch.setattr("streamline.backends.hosts.remote_metrics.perf_counter", lambda: here() + ahead)
            before, meter.begun = here(), here() + ahead
            meter.count([1])
            meter.count_work(meter.begun, meter.begun + 0.5)
            reporter.report()
        mirror.show(link.sent[-1])
        shown = meters.stages["decode", 3].since
        assert shown is not None
        assert before <= shown <= here()
    assert all(before - 60 < began < ended < here() + 60 for began, ended in spans)
    mirror.on_lost()
    mirror.show(link.sent[-1]._replace(clock=here() + 5))  # a host on a third machine
    assert meters.stages["decode", 3].since is not None


def test_what_hosts_have_asked_of_servers_adds_up_also_of_those_that_are_gone() -> None:
    link, session = Wires(), Session()
    reporter = MetricsReporter(link, session)
    traffic = session.meters.traffic("read_lines")
    traffic.requests, traffic.retries, traffic.bytes, traffic.in_flight = 5, 2, 100, 3
    reporter.report()
    assert not reporter.report()
    meters, mirror = mirrored()
    mirror.show(link.sent[0])
    mirror.show(link.sent[0])  # what was sent is a sum, not an addition
    assert stats_of(meters).reads == (ReadStats(name="read_lines", requests=5, retries=2, bytes=100, in_flight=3),)
    mirror.on_lost()
    assert stats_of(meters).reads[0].in_flight == 0  # nobody waits for those answers any more
    mirror.show(MetricsUpdate((), traffics=(ReadStats("read_lines", 1, 0, 7, 2, 1, 5, 2),)))  # of the next one
    mirror.show(MetricsUpdate((), traffics=(ReadStats("read_lines", 2, 1, 9, 3, 1, 6, 1),)))
    meters.traffic("read_lines").requests += 1  # of a flow in the stream's own event loop
    (reads,) = later = stats_of(meters).reads
    assert (reads.requests, reads.retries, reads.bytes, reads.in_flight) == (8, 3, 109, 1)
    assert (reads.cache_hits, reads.cache_misses, reads.cache_bytes) == (3, 1, 6)
    earlier = Stats(elapsed_s=0, items=0, consumer_wait_s=0, reads=(ReadStats(name="read_lines", requests=7),))
    window = Stats(elapsed_s=1, items=0, consumer_wait_s=0, reads=later).since(earlier)
    assert window.reads == (
        ReadStats(
            name="read_lines",
            requests=1,
            retries=3,
            bytes=109,
            cache_hits=3,
            cache_misses=1,
            cache_bytes=6,
            in_flight=1,
        ),
    )


class Stuck:
    """Stands still at one item until it is released."""

    def __init__(self, go: Callable[[], bool]) -> None:
        self.go = go

    def __call__(self, item: int) -> int:
        while item == 9 and not self.go():
            time.sleep(0.01)
        return item


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_watchdog_names_stage_shard_and_host_and_shows_the_stack(
    kind: str, processes: Backend, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    pipe = sl.from_items(range(20)).shard(2).map(Stuck(go.exists), name="decode")
    backend = sl.Threads(2) if kind == "thread" else processes

    class Go(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has been in one call" in record.getMessage():
                go.touch()

    logger, handler = logging.getLogger("streamline.watchdog"), Go()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING), pipe.open(backend=backend, stall_s=0.5) as stream:
            assert list(stream) == list(range(20))
            (_, host) = stream.stats().hosts
    finally:
        logger.removeHandler(handler)
    text = caplog.text
    assert "waiting for shard 1 (the merge's turn): map(decode) has been in one call for " in text
    assert f" in {host.name}, after index " in text
    assert f"What runs in {host.name}:" in text
    assert "in __call__" in text


# Traces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_trace_has_a_process_of_its_own_for_each_host(hosts: Backend, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    more = sl.from_items(range(20_000)).shard(3).map(abs).filter(odd).merge().batch(7)  # than is read before it begins
    with more.open(backend=hosts) as stream:
        with stream.trace(path):
            list(stream)
        assert stream._session.meters.hooks.observer is None
    events = json.loads(path.read_text())
    of_pid = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(of_pid) == {1, 2, 3}
    assert all(f"{stream.stats().hosts[pid - 2].kind} {pid - 2}" in name for pid, name in of_pid.items() if pid > 1)
    tracks = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert {(2, "shard 0 · map(abs)"), (3, "shard 1 · map(abs)"), (2, "shard 2 · map(abs)")} <= tracks
    spans = [event for event in events if event["ph"] == "X" and event["pid"] > 1]
    assert {event["pid"] for event in spans} == {2, 3}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)


@pytest.mark.anyio
async def test_spans_cross_only_while_a_trace_is_on(tmp_path: Path) -> None:
    sent: list[MetricsUpdate] = []
    show = RemoteMetrics.show

    def noting(mirror: RemoteMetrics, counts: MetricsUpdate) -> None:
        sent.append(counts)
        show(mirror, counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteMetrics, "show", noting)
        async with sl.from_items(range(20_000)).shard(2).map(abs).open(backend=Copying(2)) as stream:
            await anext(stream)
            await settle()
            assert sent
            assert not any(counts.spans for counts in sent)
            with stream.trace(tmp_path / "run.json"):
                [item async for item in stream]
        assert any(counts.spans for counts in sent)


def test_hosts_hold_no_event_loop_that_anybody_minds(caplog: pytest.LogCaptureFixture) -> None:
    def nap(item: int) -> int:
        time.sleep(0.11)
        return item

    async def test() -> None:
        async with sl.from_items(range(2)).map(nap).open(backend=sl.Threads(1)) as stream:
            assert [item async for item in stream] == [0, 1]

    with caplog.at_level(logging.WARNING):
        anyio.run(test)
    assert not [record for record in caplog.records if record.name == "streamline.hints"]


def test_the_edge_of_a_worker_costs_the_same_however_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    link, session = Wires(), Session()
    reporter, counted = MetricsReporter(link, session), StageMeter.totals
    for shard in range(500):
        for name in ("items", "decode"):
            session.meters.stage(name, "map", shard).count([shard])
            session.meters.channel(name, shard, 8).items = shard + 1
    looked_at: list[int] = []

    def noted(meter: StageMeter) -> StageStats:
        looked_at.append(meter.figures.shard)
        return counted(meter)

    monkeypatch.setattr(StageMeter, "totals", noted)
    assert reporter.report(7)
    assert looked_at == [7, 7]
    (update,) = link.sent
    assert [(stage.name, stage.shard) for stage, _ in update.stages] == [("decode", 7), ("items", 7)]
    assert [(channel.name, channel.shard) for channel in update.channels] == [("decode", 7), ("items", 7)]
    assert reporter.report()
    assert len(link.sent[1].stages) == 998
