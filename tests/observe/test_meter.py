"""Meters: what is counted is what was done, also while it is being done."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core import cpus
from streamline.core import meters as core_meters
from streamline.core.figures import Doing
from streamline.core.meters import HOLD_S, ConsumerMeter, HoldTimer, HostMeter, Meters, StageMeter, Working
from streamline.observe import stats as picture
from streamline.observe.stats import Stats, collect, host_stats, stats_of


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (core_meters, picture):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def test_work_and_waits_add_up_and_reach_the_observer() -> None:
    meter = StageMeter("decode", "map", 3)
    seen: list[tuple[StageMeter, Doing, float, float]] = []
    meter.hooks.observer = lambda *stretch: seen.append(stretch)
    meter.count_work(1, 2)
    meter.count_hold(2, 2.5)
    meter.count_wait("wait_input", 3, 5)
    meter.count_wait("wait_output", 5, 9)

    figures = meter.figures
    assert (figures.busy_s, figures.held_s, figures.wait_input_s, figures.wait_output_s) == (1.5, 0.5, 2, 4)
    assert meter.loop.held_s == 0.5
    assert seen == [
        (meter, "work", 1, 2),
        (meter, "work", 2, 2.5),
        (meter, "wait_input", 3, 5),
        (meter, "wait_output", 5, 9),
    ]


def test_what_is_going_on_is_seen_before_it_is_over(clock: Clock) -> None:
    meter = StageMeter("fetch", "map", 0, concurrency=3)
    meter.slots = [0.0, 96.0, 99.0]
    meter.wait_begins("wait_input", slot=0)
    clock.now = 101.0
    figures = meter.until(clock.now)
    assert (figures.busy_s, figures.wait_input_s, figures.wait_output_s) == (7.0, 1.0, 0.0)
    since = [meter.since]
    meter.wait_ends(slot=0)
    meter.slots = [0.0] * 3
    since.append(meter.since)
    assert since == [96.0, None]
    assert meter.until(200.0).wait_input_s == meter.figures.wait_input_s == 1.0


@pytest.mark.parametrize("doing", ["wait_input", "wait_output"])
def test_a_wait_is_counted_as_what_it_was(doing: Doing, clock: Clock) -> None:
    meter = StageMeter("fetch", "map", 0)
    meter.wait_begins(doing)
    clock.now += 3
    meter.wait_ends()
    assert {"wait_input": meter.figures.wait_input_s, "wait_output": meter.figures.wait_output_s}[doing] == 3
    assert meter.figures.wait_input_s + meter.figures.wait_output_s == 3


def test_a_stretch_of_work_is_counted_also_if_it_fails(clock: Clock) -> None:
    meter = StageMeter("batch", "batch", 0)

    def collate() -> None:
        assert meter.since == 100.0
        clock.now += 2
        raise ValueError("collate")

    with pytest.raises(ValueError, match="collate"), HoldTimer(meter):
        collate()
    with Working(meter):
        clock.now += 1
    assert (meter.figures.busy_s, meter.figures.held_s, meter.since) == (3, 2, None)
    with HoldTimer(None), Working(None):
        clock.now += 1


def test_a_hold_that_lasts_counts_as_one(clock: Clock) -> None:
    meters = Meters(100.0)
    meter = meters.stage("decode", "map", 0)
    with HoldTimer(meter):
        clock.now = 105.0
        assert stats_of(meters).stages[0].held_s == 5
    with Working(meter):
        clock.now = 107.0
        assert stats_of(meters).stages[0].busy_s == 7
        assert stats_of(meters).stages[0].held_s == 5


async def test_calls_that_are_given_up_are_over() -> None:
    async def wait(item: int) -> int:
        if item >= 5:
            await anyio.sleep_forever()
        return item

    async with sl.from_items(range(40)).map(wait, concurrency=4).take(5).repeat(3).open() as stream:
        assert [item async for item in stream] == [*range(5)] * 3
        session: Any = stream._session
        (meter,) = [meter for meter in session.meters.stages.values() if meter.figures.kind == "map"]
        assert not any(meter.slots)


def test_only_a_long_hold_is_reported() -> None:
    meter, told = StageMeter("decode", "map", 0), []
    meter.hooks.on_hold = lambda meter, held_s: told.append((meter, held_s))
    meter.count_hold(0, HOLD_S / 2)
    meter.count_work(0, 10)
    meter.count_hold(0, 2 * HOLD_S)
    assert told == [(meter, 2 * HOLD_S)]


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_bytes_are_estimated_from_a_few_items(size: int) -> None:
    meter = StageMeter("read", "read_lines", 0)
    looked_at = 0

    class Item:
        @property
        def nbytes(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return size

    for _ in range(1000):
        meter.count([Item()] * 4)
    assert meter.figures.items == 4000
    assert meter.figures.bytes == 4000 * size
    assert looked_at < 50


def test_an_item_that_can_not_be_measured_ends_no_run() -> None:
    meter = StageMeter("read", "read_lines", 0)
    endless: list[Any] = []
    endless.append(endless)
    meter.count([endless])
    assert meter.figures.bytes > 0
    meter.count([])
    assert meter.figures.items == 1


def test_a_consumer_waits_from_asking_to_getting(clock: Clock) -> None:
    consumer = ConsumerMeter(100.0)
    consumer.wait_begins(101.0)
    since = [consumer.waiting_since]
    consumer.wait_ends(104.0)
    consumer.wait_ends(110.0)
    since.append(consumer.waiting_since)
    assert (consumer.wait_s, since) == (3.0, [101.0, None])


def test_what_a_body_held_is_less_what_the_stages_held_meanwhile(clock: Clock) -> None:
    meters = Meters(100.0)
    consumer, stage = meters.consumer, meters.stage("decode", "map", 0)
    consumer.body_begins(100.0)
    clock.now = 105.0
    stage.count_hold(101.0, 104.0)
    consumer.body_ends()
    clock.now = 200.0
    consumer.body_ends()  # the event loop turns later: the body's end was seen
    assert consumer.held_s == 2.0


def test_a_stage_goes_on_with_its_meter() -> None:
    meters = Meters(0.0)
    meter = meters.stage("decode", "map", 1)
    assert meters.stage("decode", "map", 1) is meter
    assert meters.stage("decode", "map", 2) is not meter
    assert meters.channel("decode", 1, 8) is meters.channel("decode", 1, 8)


def test_stats_stand_in_the_plans_order_with_workers_added_up(clock: Clock) -> None:
    meters = Meters(90.0)
    meters.order = ["lines", "decode", "merge", "batch"]
    for name, kind in (("batch", "batch"), ("merge", "merge")):
        meters.stage(name, kind, 0)
    for shard in (1, 0):
        stage = meters.stage("decode", "map", shard, 4)
        stage.count_hold(0, 1 + shard)
        stage.figures.items = 10 * (1 + shard)
        channel = meters.channel("decode", shard, 8)
        channel.items, channel.depth, channel.peak = 5, 1 + shard, 3 + shard
    meters.stage("lines", "read_lines", 0)
    meters.consumer.items = 30
    stats = stats_of(meters, at_hand=4)

    assert [stage.name for stage in stats.stages] == ["lines", "decode", "merge", "batch"]
    decode = stats.stages[1]
    assert (decode.workers, decode.concurrency, decode.slots, decode.items) == (2, 4, 8, 30)
    assert (decode.busy_s, decode.held_s) == (3, 3)
    assert [(worker.shard, worker.busy_s, worker.items) for worker in decode.per_worker] == [(0, 1, 10), (1, 2, 20)]
    (channel_stats,) = stats.channels
    assert (channel_stats.items, channel_stats.depth, channel_stats.peak, channel_stats.channels) == (10, 3, 4, 2)
    assert (stats.elapsed_s, stats.items) == (10.0, 26)
    with pytest.raises(FrozenInstanceError):
        stats.items = 3  # type: ignore[misc]


def test_the_cpus_are_those_that_the_control_group_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "_quota", lambda: 0.5)
    assert stats_of(Meters(0.0)).cpus == cpus.usable_cpus() == 1


def test_a_host_that_is_gone_is_shown_as_it_was_last_seen(clock: Clock) -> None:
    process: tuple[int | None, int] = 4711, 2**20
    host = HostMeter(0, "process", lambda: process[0], lambda: process[1])
    host.figures.alive = True
    host.note_end()
    process = None, 0
    shown = host_stats(host, ())
    assert (shown.pid, shown.resident_bytes, shown.alive) == (4711, 2**20, False)


def test_a_closed_stream_takes_no_more_time(clock: Clock) -> None:
    meters = Meters(90.0)
    meters.consumer.items = 10
    meters.consumer.close(3)
    clock.now = 500.0
    meters.consumer.close()
    assert (stats_of(meters).elapsed_s, stats_of(meters).items) == (10.0, 7)


def test_a_window_is_the_difference_of_two_stats(clock: Clock) -> None:
    meters = Meters(90.0)
    meters.on_first_list = collect
    stage = meters.stage("decode", "map", 0)
    meters.end_warm_up()
    stage.count_hold(0, 3)
    stage.figures.items = 10
    earlier = stats_of(meters)
    clock.now = 104.0
    stage.count_hold(3, 5)
    stage.figures.items = 25
    meters.consumer.items = 20
    window = stats_of(meters).since(earlier)
    assert isinstance(window, Stats)
    assert (window.elapsed_s, window.items) == (4.0, 20)
    (decode,) = window.stages
    assert (decode.items, decode.busy_s, decode.held_s) == (15, 2, 2)
    assert (decode.per_worker[0].items, decode.per_worker[0].busy_s) == (15, 2)


def test_the_verdict_leaves_the_warm_up_out(clock: Clock) -> None:
    """The consumer waited for ten seconds, then never: since its first list, it is what limits."""
    meters = Meters(90.0)
    meters.on_first_list = collect
    before = stats_of(meters)
    assert before.verdict is None
    meters.consumer.wait_begins(90.0)
    meters.consumer.wait_ends(100.0)
    meters.end_warm_up()
    clock.now, meters.consumer.items = 110.0, 100
    stats = stats_of(meters)
    for each in (stats, stats.since(before)):
        assert each.verdict is not None
        assert each.verdict.rule == "consumer"
        assert str(each).endswith(each.verdict.line)


def test_a_table_is_aligned_and_has_units(clock: Clock) -> None:
    meters = Meters(90.0)
    stage = meters.stage("decode", "map", 0)
    stage.count(["four"] * 12_345)
    stage.count_hold(0, 5)
    stage.figures.errors = 2
    meters.channel("decode", 0, 8)
    lines = str(stats_of(meters)).splitlines()
    assert lines == [
        "0 items in 10.00 s (0.0 items/s); the consumer waits 0 % of its time",
        "stage        at once   items  errors  items/s    bytes  busy  no input  no room",
        "map(decode)        1  12,345       2    1,234  49.4 kB  50 %       0 %      0 %",
        "channel after  channels  items  held now  peak  capacity",
        "decode                1      0         0     0         8",
    ]
