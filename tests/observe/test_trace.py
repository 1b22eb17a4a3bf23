"""Traces: what a viewer finds in them, and that they are bounded."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.core.figures import Doing
from streamline.core.meters import Meters
from streamline.errors import PlanError
from streamline.observe.trace import LEAST_BYTES, MOST_LANES, Trace

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """Return the events of a trace as its viewers take it: its end may be missing. Each must be as the format says."""
    text = path.read_text()
    events: list[Event] = json.loads(text if text.endswith("]\n") else f"{text}]")
    check(events)
    return events


def check(events: list[Event]) -> None:
    """Insist on what the trace-event format asks for, and on spans of one track that nest."""
    last: dict[int, float] = defaultdict(lambda: float("-inf"))
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in "XCM"
        if event["ph"] != "M":
            assert isinstance(event["ts"], float)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        assert event["dur"] >= 0
        assert event["ts"] >= last[event["tid"]] - 0.0005, "two spans of a track overlap"
        last[event["tid"]] = event["ts"] + event["dur"]


def tracks(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def spans(events: list[Event]) -> dict[str, list[tuple[str, float, float]]]:
    """Return (name, ts, dur) of the spans of each track, in µs."""
    found: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    names = tracks(events)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append((event["name"], event["ts"], event["dur"]))
    return dict(found)


@pytest.fixture
def meters() -> Meters:
    return Meters(0.0)


def test_each_stage_of_each_worker_is_a_track_with_its_work_and_its_waits(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters, rank=2, after_merge={"batch"}):
        decode = meters.stage("decode", "map", 3)
        decode.count_wait("wait_input", 1.0, 1.5)
        decode.count_work(1.5, 2.0)
        decode.count_wait("wait_output", 2.0, 2.25)
        meters.stage("batch", "batch", 2).count_work(2.0, 2.5)
    events = load(tmp_path / "run.json")
    assert events[0]["args"] == {"name": "streamline, rank 2"}
    assert spans(events) == {
        "shard 3 · map(decode)": [
            ("waits for input", 1e6, 5e5),
            ("work", 1.5e6, 5e5),
            ("waits for room", 2e6, 2.5e5),
        ],
        "rank 2 · batch": [("work", 2e6, 5e5)],
    }


def test_meters_that_are_there_already_are_traced_and_none_is_afterwards(meters: Meters, tmp_path: Path) -> None:
    early = meters.stage("early", "map", 0)
    trace = Trace(tmp_path / "run.json", meters)
    early.count_work(1.0, 2.0)
    late = meters.stage("late", "map", 0)
    late.count_work(1.0, 2.0)
    trace.stop()
    size = trace.path.stat().st_size
    early.count_work(2.0, 3.0)
    late.count_work(2.0, 3.0)
    trace.stop()
    assert early.hooks.observer is late.hooks.observer is meters.hooks.observer is None
    assert trace.path.stat().st_size == size
    assert set(spans(load(trace.path))) == {"shard 0 · early", "shard 0 · late"} or set(spans(load(trace.path))) == {
        "shard 0 · map(early)",
        "shard 0 · map(late)",
    }


def test_calls_side_by_side_are_drawn_side_by_side(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters):
        stage = meters.stage("fetch", "map", 0, concurrency=3)
        for began, ended in ((0.0, 1.0), (0.5, 1.5), (0.7, 1.7), (1.2, 2.0)):
            stage.count_work(began, ended)
    found = spans(load(tmp_path / "run.json"))
    assert {name: len(lane) for name, lane in found.items()} == {
        "shard 0 · map(fetch)": 2,
        "shard 0 · map(fetch) #2": 1,
        "shard 0 · map(fetch) #3": 1,
    }


STRETCHES = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0, 2), st.sampled_from(["work", "wait_input", "wait_output"])), max_size=60
)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(STRETCHES)
def test_spans_of_a_track_never_overlap(stretches: list[tuple[float, float, Doing]]) -> None:
    """Whatever the meters are told, in whatever order: a viewer drops what overlaps."""
    meters = Meters(0.0)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"streamline-trace-{os.getpid()}.json"
    try:
        with Trace(path, meters) as trace:
            stage = meters.stage("map", "map", 0)
            for began, took, doing in stretches:
                trace._observer(stage, doing, began, began + took)
        total = sum(dur for lane in spans(load(path)).values() for _, _, dur in lane)
        assert total + 0.1 >= 1e6 * max((took for _, took, _ in stretches), default=0)
    finally:
        path.unlink()


def test_what_is_going_on_when_it_stops_is_shown(meters: Meters, tmp_path: Path) -> None:
    """A call that never returns is what somebody who looks at a trace is looking for."""
    with Trace(tmp_path / "run.json", meters):
        stage = meters.stage("fetch", "map", 0)
        stage.count_work(0.0, 1.0)
        stage.begun = 1.0
    [first, last] = spans(load(tmp_path / "run.json"))["shard 0 · map(fetch)"]
    assert first[0] == "work"
    assert last[:2] == ("work, not done yet", 1e6)
    assert last[2] > 0


def test_how_full_channels_are_and_how_long_the_consumer_waits_is_counted(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters):
        stage = meters.stage("map", "map", 0)
        for shard in range(2):
            meters.channel("worker", shard, 64).depth = 10 + shard
        for shard in range(9):
            meters.channel("source", shard, 64).depth = 1
        for second in range(1, 4):
            meters.consumer.items = 100 * second
            meters.consumer.wait_s = 0.25 * second
            stage.count_work(second - 0.5, float(second))
    counters = [
        (event["name"], event["ts"], event["args"]) for event in load(tmp_path / "run.json") if event["ph"] == "C"
    ]
    assert counters[:4] == [
        ("channel after worker", 1e6, {"items": 21}),
        ("channel after source", 1e6, {"items": 9}),
        ("consumer waits", 1e6, {"%": 25.0}),
        ("consumer takes", 1e6, {"items/s": 100.0}),
    ]
    assert len(counters) == 4  # nothing changed in the seconds that followed


def test_at_every_moment_the_file_can_be_loaded(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters) as trace:
        assert load(trace.path)
        stage = meters.stage("map", "map", 0)
        for number in range(3000):
            began, ended = number * 0.01, number * 0.01 + 0.01
            stage.count_work(began, ended) if number % 2 else stage.count_wait("wait_input", began, ended)
            if number % 100 == 0:
                load(trace.path)
        before = len(load(trace.path))
    assert before > 100  # it is written while it runs
    assert trace.path.read_text().endswith("\n]\n")


def test_weeks_leave_two_files_of_bounded_size_with_the_newest_in_them(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters, max_bytes=LEAST_BYTES) as trace:
        stage = meters.stage("map", "map", 0)
        for second in range(20_000):
            stage.count_wait("wait_input", second, second + 0.5)
            stage.count_work(second + 0.5, second + 1)
    sizes = [path.stat().st_size for path in (trace.path, trace.previous)]
    assert sorted(tmp_path.iterdir()) == sorted([trace.path, trace.previous])
    assert max(sizes) <= LEAST_BYTES // 2 + 1000  # more than an observation takes
    older, newer = load(trace.previous), load(trace.path)
    assert tracks(older) == tracks(newer) == {1: "shard 0 · map"}
    assert max(event["ts"] for event in newer if event["ph"] == "X") == 19_999.5e6
    assert max(event["ts"] for event in older if "ts" in event) <= min(event["ts"] for event in newer if "ts" in event)


def test_more_parallel_calls_than_a_viewer_can_show_are_left_out(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters) as trace:
        stage = meters.stage("fetch", "map", 0, concurrency=1000)
        for number in range(1000):
            stage.count_work(number * 1e-3, 10.0)
    assert len(tracks(load(trace.path))) == MOST_LANES


def test_threads_may_tell_it_at_the_same_time(meters: Meters, tmp_path: Path) -> None:
    with Trace(tmp_path / "run.json", meters) as trace:
        start = threading.Barrier(4)

        def work(shard: int) -> None:
            start.wait()
            stage = meters.stage("map", "map", shard)
            for number in range(500):
                stage.count_work(number * 0.01, number * 0.01 + 0.009)

        threads = [threading.Thread(target=work, args=(shard,)) for shard in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = spans(load(trace.path))
    assert set(found) == {f"shard {shard} · map" for shard in range(4)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_file_has_begun_before_other_threads_write_to_it(meters: Meters, tmp_path: Path) -> None:
    stage = meters.stage("map", "map", 0)
    meters.hooks.on_observed.append(lambda: stage.count_work(0.0, 1.0))  # as a thread does that runs meanwhile
    with Trace(tmp_path / "run.json", meters) as trace:
        pass
    assert load(trace.path)[0]["name"] == "process_name"


def test_a_disk_full_from_the_start_ends_the_trace_with_a_warning_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sl.from_items(range(100)).map(lambda x: x).open() as stream, stream.trace("/dev/full"):
        assert list(stream) == list(range(100))
    assert [record.getMessage() for record in caplog.records] == [
        "the trace /dev/full ends here, and the run goes on: [Errno 28] No space left on device"
    ]


def test_a_full_disk_ends_the_trace_with_a_warning_and_nothing_else(
    meters: Meters, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(tmp_path / "run.json", meters)
    stage = meters.stage("map", "map", 0)
    file = trace._file
    assert file is not None
    real = file._file
    full = _Full(real)
    monkeypatch.setattr(file, "_file", full)
    for second in range(2000):
        stage.count_work(second, second + 0.5)
        stage.count_wait("wait_input", second + 0.5, second + 1)
    stage.count_work(2000, 2001)
    trace.stop()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "run.json ends here, and the run goes on" in record.getMessage()
    assert load(trace.path)  # no half event
    assert real.closed


class _Full:
    """A file that takes half of a write, then nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._written = False

    def write(self, data: Any) -> int:
        if self._written:
            raise OSError(28, "No space left on device")
        self._written = True
        return int(self._file.write(data[: len(data) // 2]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_file_that_cant_be_made_is_an_error_at_once(meters: Meters, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace(tmp_path / "nowhere" / "run.json", meters)
    assert meters.hooks.observer is None
    Trace(tmp_path / "run.json", meters).stop()


def test_options_are_checked(meters: Meters, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"\.trace\(max_bytes=\) is at least 1048576, got 10"):
        Trace(tmp_path / "run.json", meters, max_bytes=10)
    with Trace(tmp_path / "run.json", meters), pytest.raises(PlanError, match="traced already"):
        Trace(tmp_path / "other.json", meters)


# With streams -------------------------------------------------------------------------------------------------------


def test_a_trace_ends_with_its_stream(tmp_path: Path) -> None:
    with sl.from_items(range(100)).shard(2).map(str).open() as stream:
        trace = stream.trace(tmp_path / "run.json")
        assert len(list(stream)) == 100
    assert trace.path.read_text().endswith("\n]\n")
    load(trace.path)


async def test_a_trace_may_begin_and_end_in_the_middle(tmp_path: Path) -> None:
    async with sl.from_items(range(1000)).map(str).open() as stream:
        await anext(stream)
        with stream.trace(tmp_path / "run.json") as trace:
            await anext(stream)
        assert trace.path.read_text().endswith("\n]\n")
        with stream.trace(tmp_path / "again.json"):
            await anext(stream)
    load(tmp_path / "again.json")


def test_a_stream_that_is_dropped_ends_its_trace(tmp_path: Path) -> None:
    stream = iter(sl.from_items(range(1000)))
    next(stream)
    path = stream.trace(tmp_path / "run.json").path
    del stream
    gc.collect()
    assert path.read_text().endswith("\n]\n")


def test_a_trace_of_a_stream_that_has_ended_is_whole(tmp_path: Path) -> None:
    with sl.from_items(range(3)).open() as stream:
        assert list(stream) == [0, 1, 2]
    stream.trace(tmp_path / "run.json")
    assert load(tmp_path / "run.json")[0]["name"] == "process_name"


def test_a_trace_of_a_stream_that_was_never_begun_is_closed_with_it(tmp_path: Path) -> None:
    stream = sl.from_items(range(3)).open().stream()
    path = stream.trace(tmp_path / "run.json").path
    del stream
    gc.collect()
    assert path.read_text().endswith("\n]\n")


def test_a_stream_fills_its_trace(tmp_path: Path) -> None:
    """With the meters that the engine fills: each stage of each worker, and the consumer."""
    pipe = sl.from_items(range(20_000)).shard(2).map(slow).merge().batch(100, collate=None)
    with pipe.open() as stream, stream.trace(tmp_path / "run.json"):
        assert len(list(stream)) == 200
    events = load(tmp_path / "run.json")
    found = set(tracks(events).values())
    assert {"shard 0 · map(slow)", "shard 1 · map(slow)", "rank 0 · batch"} <= found
    assert {"consumer waits", "consumer takes"} <= {event["name"] for event in events if event["ph"] == "C"}


def test_tracks_stand_in_the_plans_order_and_a_feed_is_the_ranks(tmp_path: Path) -> None:
    traced = threading.Event()

    async def feed() -> AsyncIterator[int]:
        await anyio.to_thread.run_sync(traced.wait)  # else all may have been read ahead before the trace begins
        for item in range(40):
            yield item
            await anyio.lowlevel.checkpoint()

    pipe = sl.from_stream(feed).shard(3).map(slow).merge().batch(5, collate=None)
    with pipe.open() as stream, stream.trace(tmp_path / "run.json"):
        traced.set()
        assert len(list(stream)) == 8
    events = load(tmp_path / "run.json")
    sorts = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    names = [name for _, name in sorted((sorts[tid], name) for tid, name in tracks(events).items())]
    first = [name for name in names if "#" not in name]
    assert first[0] == "rank 0 · from_stream"
    maps = [f"shard {shard} · map(slow)" for shard in range(3)]
    assert [name for name in first if "map(slow)" in name] == maps
    assert first.index(maps[-1]) < first.index("rank 0 · batch")


def slow(item: int) -> int:
    return sum(range(item % 50))
