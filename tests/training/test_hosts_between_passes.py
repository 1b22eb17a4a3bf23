"""Other numbers of hosts in the passes of a loader: nothing is different but where workers run."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

import pytest

import streamline as sl
from streamline.backends.hosts.pool import HostPool
from streamline.backends.threads import ThreadHost
from streamline.core.knobs import Knob
from streamline.errors import PlanError
from streamline.observe import tuner
from streamline.observe.tuner import Measurement, PassLooks, TuningStep
from streamline.runtime import tuning
from streamline.runtime.tuning import StreamTuning, knobs_of
from tests.page_kit import update

SHARDS = 5
COUNTS = (1, 4, 2, 5, 1, 3)


class ScriptedHosts:
    """Gives each pass the next number of hosts, whatever was seen."""

    counts: Iterator[int] = cycle(COUNTS)
    asked = 0

    def __init__(self, knob: Knob, label: str) -> None:
        self.value = knob.written
        self.resting = "it goes by a script"

    @property
    def settled(self) -> dict[str, int]:
        return {"hosts": self.value}

    def next_pass(self, seen: PassLooks, most: int) -> TuningStep:
        ScriptedHosts.asked += 1
        before, self.value = self.value, next(ScriptedHosts.counts)
        return TuningStep(
            at_s=0.0, stage="Threads", name="hosts", kind="hosts", before=before, after=self.value, why="the script"
        )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedHosts.counts, ScriptedHosts.asked = cycle(COUNTS), 0
    monkeypatch.setattr(tuning, "HostTuner", ScriptedHosts)


def plus(item: int) -> int:
    return item + 1000


def halves(item: int) -> list[int]:
    return [2 * item, 2 * item + 1]


PIPE = sl.from_items(range(23)).shuffle(seed=3).shard(SHARDS).map(plus).shuffle(window=3).flat_map(halves).merge()


def threads_of_hosts() -> list[threading.Thread]:
    found = [thread for thread in threading.enumerate() if thread.name.startswith("streamline host")]
    return sorted(found, key=lambda thread: thread.name)


def hosts() -> list[str]:
    return [thread.name for thread in threads_of_hosts()]


def seen_of(loader: sl.Loader[Any], passes: int) -> list[tuple[Any, Any]]:
    """Return each item of some passes, with the state after it."""
    return [(item, loader.snapshot().flow_state) for _ in range(passes) for item in loader]


def untuned(passes: int) -> list[tuple[Any, Any]]:
    with PIPE.loader() as loader:
        return seen_of(loader, passes)


# Exactness ------------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("stay", [True, False])
def test_items_order_and_states_are_those_of_an_untuned_loader(stay: bool) -> None:
    with PIPE.loader(backend=sl.Threads(2), tune=True, persistent=stay) as loader:
        counts: list[int] = []
        for expected in (untuned(4)[at : at + 46] for at in range(0, 184, 46)):
            assert seen_of(loader, 1) == expected
            counts.append(len(loader.stats().hosts))  # type: ignore[union-attr]
        assert counts == list(COUNTS[:4])


@pytest.mark.one_in(2, 1)
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("stop", [1, 45, 70])
def test_a_resume_in_the_middle_goes_on_with_another_number(stop: int) -> None:
    with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
        items = _taken(loader, stop)
        state = loader.state_dict()
    with PIPE.loader(backend=sl.Threads(3), tune=True) as loader:
        loader.load_state_dict(state)
        while loader.epoch < 3:
            items += loader
    assert items == [item for item, _ in untuned(3)]


def _taken(loader: sl.Loader[Any], count: int) -> list[Any]:
    items: list[Any] = []
    while len(items) < count:
        items += islice(loader, count - len(items))
    return items


@pytest.mark.usefixtures("scripted")
def test_a_pass_that_is_left_and_one_that_is_jumped_to_get_a_number_too() -> None:
    with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
        assert len(list(loader)) == 46
        next(iter(loader))
        assert loader.epoch == 2
        loader.set_epoch(0)  # what was opened ahead isn't used
        assert list(loader) == [item for item, _ in untuned(1)]
    assert ScriptedHosts.asked >= 3


# Hosts ----------------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("scripted")
def test_hosts_that_the_next_pass_does_not_need_end_with_the_pass_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = ThreadHost.close

    def noted(host: ThreadHost) -> None:
        closed.append(host.name)
        close(host)

    monkeypatch.setattr(ThreadHost, "close", noted)
    ScriptedHosts.counts = iter([4, 1, 3, 3])
    with PIPE.loader(backend=sl.Threads(2), tune=True, steps_per_epoch=46) as loader:  # nothing is opened ahead
        assert len(list(loader)) == 46
        before = threads_of_hosts()
        assert len(before) == 4
        iteration = iter(loader)
        next(iteration)
        for thread in before[1:]:
            thread.join(100)
        assert threads_of_hosts() == before[:1]
        assert len([*iteration, next(iter(loader))]) == 46
        assert len(threads_of_hosts()) == 3
        assert closed == ["thread 1", "thread 2", "thread 3"]
    assert not hosts()


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("counts", [(1, 5), (5, 1)])
def test_a_loader_that_is_closed_at_the_boundary_leaves_no_host(counts: tuple[int, int]) -> None:
    ScriptedHosts.counts = cycle(counts)
    for taken in (45, 46):
        with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
            assert len(list(islice(loader, taken))) == taken
        assert not hosts()


@pytest.mark.long
@pytest.mark.usefixtures("scripted")
def test_processes_killed_at_the_boundary_are_replaced() -> None:
    ScriptedHosts.counts = iter([1, 2, 2])
    with PIPE.loader(backend=sl.Processes(2), tune=True) as loader:
        iteration = iter(loader)
        items = list(islice(iteration, 45))
        for host in _wait_for_the_next(loader).stats().hosts:  # the present one is among them
            assert host.pid is not None
            os.kill(host.pid, signal.SIGKILL)
        items += [*iteration, *loader]
    assert items == [item for item, _ in untuned(2)]


@pytest.mark.usefixtures("scripted")
def test_a_next_pass_that_begins_as_the_pool_closes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closing = threading.Event()
    begin = HostPool.begin

    def late(pool: HostPool, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and hosts():
            assert closing.wait(100)
        return begin(pool, *args)

    monkeypatch.setattr(HostPool, "begin", late)
    with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
        assert len(list(islice(loader, 46))) == 46
        closing.set()
    assert not hosts()


@pytest.mark.usefixtures("scripted")
def test_a_host_that_is_still_used_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass opened ahead with fewer hosts begins while the items of the present one are on their way."""
    left: list[tuple[str, int]] = []
    leave = ThreadHost.leave

    def noted(host: ThreadHost) -> None:
        left.append((host.name, len(taken)))
        leave(host)

    monkeypatch.setattr(ThreadHost, "leave", noted)
    ScriptedHosts.counts = iter([5, 1, 1, 1])
    taken: list[Any] = []
    with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
        for item in loader:
            taken.append(item)
            if len(taken) == 40:
                _wait_for_the_next(loader)
        assert len(taken) == 46
        assert {name for name, _ in left} == {f"thread {number}" for number in range(1, 5)}
        assert {count for _, count in left} == {46}


def _wait_for_the_next(loader: sl.Loader[Any]) -> sl.SyncStream[Any]:
    """Return the stream that is opened when the workers of the present one are done."""
    done, now = threading.Event(), loader._now.run
    assert now is not None
    now.spent.add_done_callback(lambda _: done.set())  # called after the loader's own
    assert done.wait(100)
    coming = loader._passes._next
    assert coming is not None
    run = coming.wait()
    assert run is not None
    return run.stream


# When passes begin ----------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("scripted")
def test_epochs_of_steps_get_another_number_where_the_pipeline_begins_anew() -> None:
    with PIPE.loader(backend=sl.Threads(2), tune=True, steps_per_epoch=30) as loader:
        found = [list(loader) for _ in range(3)]  # 90 of 92 items: two passes
        assert ScriptedHosts.asked == 2
    assert [item for part in found for item in part] == [item for item, _ in untuned(2)][:90]
    with PIPE.repeat().loader(backend=sl.Threads(2), tune=True, steps_per_epoch=30) as loader:
        assert [len(list(loader)) for _ in range(3)] == [30, 30, 30]
        assert ScriptedHosts.asked == 3  # it has no other boundary than its beginning


@pytest.mark.usefixtures("scripted")
def test_streams_that_are_opened_one_after_the_other_are_passes_too() -> None:
    tune: bool | StreamTuning = True
    counts: list[int] = []
    for _ in range(3):
        with PIPE.open(backend=sl.Threads(2), tune=tune) as stream:
            assert list(stream) == [item for item, _ in untuned(1)]
        counts.append(len(stream.stats().hosts))
        tune = stream.tuning
    assert counts == list(COUNTS[:3])


@pytest.mark.usefixtures("scripted")
def test_a_failure_of_the_tuner_leaves_hosts_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(ScriptedHosts, "next_pass", fails)
    with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
        assert [item for _ in range(2) for item in loader] == [item for item, _ in untuned(2)]
        assert len(loader.stats().hosts) == 2  # type: ignore[union-attr]
    assert "hosts stay as many as they are" in caplog.text
    assert "a mistake" in caplog.text


class Looks(PassLooks):
    """Notes what it is told."""

    told: ClassVar[list[str]] = []

    def look(self, look: Measurement) -> None:
        Looks.told.append("look")

    def pause(self) -> None:
        Looks.told.append("pause")

    def forget(self) -> None:
        Looks.told.append("forget")


class Turning:
    """Turns a knob at every look."""

    settled: ClassVar = {"calls": 3}
    resting = "it turns"

    def __init__(self, knobs: Any, values: Any, *, memory_bytes: float) -> None: ...

    def look(self, look: Measurement) -> TuningStep:
        return TuningStep(at_s=0, stage="", name="calls", kind="concurrency", before=2, after=3, why="")

    def forget(self) -> None: ...


@pytest.mark.usefixtures("scripted")
def test_of_a_pass_that_is_tuned_and_paused_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"Tuner": Turning, "PassLooks": Looks, "LOOK_S": 0.0, "MOST_TIME_SHARE": 1e9}.items():
        monkeypatch.setattr(tuning, name, value)
    ScriptedHosts.counts = cycle([4])
    Looks.told.clear()
    endless = sl.from_items(range(10**9)).shard(SHARDS).map(same, concurrency=2, name="calls")
    with endless.open(backend=sl.Threads(2), tune=True) as stream:
        while len(Looks.told) < 6:
            next(stream)
        assert set(zip(Looks.told[::2], Looks.told[1::2], strict=False)) == {("look", "forget")}
        assert stream.tuning.values == {"calls": 3, "hosts": 4}
        with stream.paused():
            while Looks.told[-1] != "pause":
                time.sleep(0)


async def same(item: int) -> int:
    return item


# What it finds --------------------------------------------------------------------------------------------------------
def slow(item: int) -> int:
    time.sleep(0.002)
    return item


def test_the_tuner_itself_gives_the_next_pass_more_hosts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamline.tuning")
    monkeypatch.setattr(tuning, "LOOK_S", 0.01)
    monkeypatch.setattr(tuning, "MOST_TIME_SHARE", 1.0)
    monkeypatch.setattr(tuner, "PASS_S", 0.1)
    monkeypatch.setattr("streamline.backends.hosts.pool.cpus_here", lambda: 8)
    monkeypatch.setattr("streamline.observe.stats.usable_cpus", lambda: 8)
    items = list(range(160))
    with sl.from_items(items).shard(8).map(slow).loader(backend=sl.Threads(1), tune=True) as loader:
        while not loader.tuning.steps:
            assert list(loader) == items
        step = loader.tuning.steps[0]
        assert (str(step.stage), step.name, step.kind, step.before, step.after) == (
            "Threads(1)", "hosts", "hosts", 1, 2,
        )  # fmt: skip
        assert list(loader) == items
        assert loader.stats().tuning[0] == step  # type: ignore[union-attr]
    assert "Threads(1): hosts 1 -> 2: the consumer waits" in caplog.text
    assert str(loader.tuning).startswith("Threads(1): hosts ")


@pytest.mark.usefixtures("scripted")
def test_the_live_page_has_it_among_its_events() -> None:
    with PIPE.loader(backend=sl.Threads(2), page=True, tune=True) as loader:
        iteration = iter(loader)
        next(iteration)
        events = update(str(loader.page))["events"]
    assert "Threads: hosts 2 -> 1: the script" in {event["text"] for event in events if event["level"] == "info"}


# Files, and whose hosts they are --------------------------------------------------------------------------------------
@pytest.mark.usefixtures("scripted")
def test_a_number_that_was_found_is_saved_and_pinned(tmp_path: Path) -> None:
    ScriptedHosts.counts = cycle([4])
    with PIPE.loader(backend=sl.Threads(2), tune=True) as loader:
        next(iter(loader))
        assert loader.tuning.values == {"hosts": 4}
        assert str(loader.tuning) == "Threads(2): hosts 4 (written: 2)\nnow: hosts: it goes by a script"
        loader.tuning.save(tmp_path / "tune.json")
    saved = json.loads((tmp_path / "tune.json").read_text())
    assert saved["knobs"] == {"hosts": {"kind": "hosts", "value": 4, "written": 2}}
    asked = ScriptedHosts.asked
    with PIPE.open(backend=sl.Threads(2), tune=tmp_path / "tune.json") as stream:
        next(stream)
        assert len(stream.stats().hosts) == 4
        assert stream.tuning.values == {"hosts": 4}
    with PIPE.loader(backend=sl.Threads(3), tune=tmp_path / "tune.json") as loader:
        assert len([item for _ in range(2) for item in loader]) == 92
        assert len(loader.stats().hosts) == 4  # type: ignore[union-attr]
    with PIPE.open(tune=tmp_path / "tune.json") as stream:  # nothing to go by it here
        assert stream.tuning.values == {}
    assert ScriptedHosts.asked == asked


@pytest.mark.parametrize(("value", "hosts"), [(9, SHARDS), (1, 1), (None, 2)])
def test_a_file_gives_as_many_as_there_are_shards_for(value: int | None, hosts: int, tmp_path: Path) -> None:
    knobs = {} if value is None else {"hosts": {"kind": "hosts", "value": value}}  # None: a file from before
    (tmp_path / "tune.json").write_text(json.dumps({"streamline tuning": 1, "knobs": knobs}))
    with PIPE.open(backend=sl.Threads(2), tune=tmp_path / "tune.json") as stream:
        next(stream)
        assert len(stream.stats().hosts) == hosts


@pytest.mark.parametrize("knobs", [{"all": {"kind": "hosts", "value": 3}}, {"hosts": {"kind": "threads", "value": 3}}])
def test_a_file_with_hosts_of_another_name_or_kind_is_refused(knobs: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text(json.dumps({"streamline tuning": 1, "knobs": knobs}))
    with pytest.raises(PlanError, match="the file is of another pipeline"):
        PIPE.open(backend=sl.Threads(2), tune=tmp_path / "tune.json")


def test_only_hosts_that_are_a_loaders_own_have_a_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    def knob(backend: Any, workers: int = 6, pipe: sl.Pipeline[Any] = PIPE) -> tuple[int, int] | None:
        found = [knob for knob in knobs_of(pipe.plan, backend, workers) if knob.kind == "hosts"]
        return (found[0].written, found[0].most) if found else None

    monkeypatch.setattr("streamline.backends.hosts.pool.cpus_here", lambda: 8)
    assert knob(sl.Processes(2)) == knob(sl.Threads(2)) == (2, 6)
    assert knob(sl.Processes(2), workers=99) == (2, 8)
    assert knob(sl.Processes(12)) == (12, 12)
    assert knob(sl.Processes()) is knob(sl.Inline()) is None
    assert knob(sl.Processes(2, shared="node")) is None
    assert knob(sl.Remote(2)) is knob(sl.Remote((2, 8))) is knob(sl.Ray(2)) is None
    with sl.Threads(2) as pool, closing(sl.Threads(2).pool(hints=True)) as own:
        assert knob(pool) is None
        assert knob(own) == (2, 6)
    named = sl.from_items(range(9)).shard(2).map(plus, executor="thread", concurrency=2, name="hosts")
    assert knob(sl.Threads(2), pipe=named) is None


@pytest.mark.usefixtures("scripted")
def test_a_pool_of_the_users_own_keeps_its_hosts() -> None:
    with sl.Threads(2) as pool:
        with PIPE.loader(backend=pool, tune=True) as loader:
            assert [item for _ in range(2) for item in loader] == [item for item, _ in untuned(2)]
        assert ScriptedHosts.asked == 0
        assert len(hosts()) == 2
        with sl.from_items(range(3)).open(backend=pool) as stream:
            assert list(stream) == [0, 1, 2]
        assert len(hosts()) == 2
