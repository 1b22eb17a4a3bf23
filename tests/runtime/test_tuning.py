"""`open(tune=)`: knobs are turned while a stream runs, and nothing but its pace changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import streamline as sl
from streamline.core.cpus import free_bytes
from streamline.core.figures import Figures
from streamline.core.knobs import Knob
from streamline.errors import PlanError, PlanTypeError
from streamline.observe.stats import Stats
from streamline.observe.tuner import Measurement, Tuner, TuningStep
from streamline.runtime import tuning
from streamline.runtime.tuning import SavedKnob, StreamTuning, knobs_of
from streamline.testing.checks import Jitter
from tests.kit import streamline_tasks
from tests.page_kit import update

ITEMS = 120

jitter = Jitter(Random(0))


class RestlessTuner:
    """Turns any knob to anything at every look, up to 12."""

    turns = 0

    def __init__(self, knobs: Sequence[Knob], values: Mapping[str, int], *, memory_bytes: float) -> None:
        self._knobs = list(knobs)
        self._dice = Random(1)
        self.settled = {knob.stage: knob.written for knob in knobs} | dict(values)
        self.resting = "it is restless"

    def look(self, look: Measurement) -> TuningStep:
        knob, after = self._dice.choice(self._knobs), self._dice.randint(1, 12)
        before, self.settled[knob.stage] = self.settled[knob.stage], after
        RestlessTuner.turns += 1
        return TuningStep(
            at_s=look.figures.elapsed_s, stage=knob.stage, name=knob.stage, kind=knob.kind, before=before, after=after,
            why="restlessness",
        )  # fmt: skip

    def forget(self) -> None: ...


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    RestlessTuner.turns = 0
    _looks_at_once(monkeypatch, RestlessTuner)


def _looks_at_once(monkeypatch: pytest.MonkeyPatch, tuner: Any) -> None:
    monkeypatch.setattr(tuning, "Tuner", tuner)
    monkeypatch.setattr(tuning, "LOOK_S", 0.0)
    monkeypatch.setattr(tuning, "MOST_TIME_SHARE", 1e9)


async def turned(item: int) -> int:
    """Return the item; half-way, wait until knobs have been turned."""
    while item == ITEMS // 2 and RestlessTuner.turns < 30:
        await anyio.lowlevel.checkpoint()
    await jitter(item)
    return item


async def at_once(item: int) -> int:
    return item


def plus(item: int) -> int:
    return item + 1000


def pipe(fn: Callable[[int], Any] = turned, **options: Any) -> sl.Pipeline[Any]:
    calls = sl.from_items(range(ITEMS)).shard(2).map(fn, concurrency=3, name="calls", **options)
    return calls.map(plus, executor="thread", concurrency=2, name="threads").merge().batch(4, collate=None).prefetch(2)


def untuned(**options: Any) -> Iterator[tuple[Any, str]]:
    with pipe(at_once, **options).open() as stream:
        for item in stream:
            yield item, stream.snapshot().to_json()


# What it gives --------------------------------------------------------------------------------------------------------
@pytest.mark.one_in(2)
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
def test_items_order_and_states_are_the_same_whatever_is_turned(backend: Any) -> None:
    with pipe().open(backend=backend, tune=True) as stream:
        found = [(item, _state(stream.snapshot())) for item in stream]
        steps = stream.stats().tuning
    assert found == [(item, _state(sl.Snapshot.from_json(text))) for item, text in untuned()]
    assert {step.name for step in steps} == {"calls", "threads", "prefetch"}
    assert stream.tuning.steps == steps


def _state(snapshot: sl.Snapshot) -> Any:
    """Return where all stages stand."""
    return snapshot.flow_state


@pytest.mark.usefixtures("restless")
def test_a_stream_that_is_tuned_resumes_where_it_was_tuned_or_not() -> None:
    with pipe(ordered=False).open(tune=True) as stream:
        first = list(islice(stream, ITEMS // 8))
        snapshot = stream.snapshot()
    for tune in (True, False):
        with pipe(ordered=False).open(resume=snapshot, tune=tune) as stream:
            rest = list(stream)
        assert sorted(item for batch in first + rest for item in batch) == [plus(item) for item in range(ITEMS)]


@pytest.mark.usefixtures("restless")
def test_an_async_stream_is_tuned_and_leaves_no_task() -> None:
    async def main() -> None:
        async with pipe().open(tune=True) as stream:
            assert "streamline tuning" in {task.get_name() for task in streamline_tasks()}
            assert [item async for item in stream] == [item for item, _ in expected]
        assert not streamline_tasks()
        assert stream.tuning.steps

    expected = list(untuned())
    anyio.run(main)


def test_the_tuner_may_ask_the_system_for_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Asking(RestlessTuner):
        def look(self, look: Measurement) -> TuningStep:
            found.append(look.free_bytes())
            return super().look(look)

    RestlessTuner.turns = 0
    _looks_at_once(monkeypatch, Asking)
    monkeypatch.setattr(tuning, "free_bytes", lambda: 123.0)
    with pipe().open(tune=True) as stream:
        assert len(list(stream)) == ITEMS // 4
    assert set(found) == {123.0}


def test_without_tune_nothing_runs_and_there_is_nothing_to_ask() -> None:
    async def main() -> None:
        async with pipe(at_once).open() as stream:
            await anext(stream)
            assert "streamline tuning" not in {task.get_name() for task in streamline_tasks()}
            assert stream.stats().tuning == ()
            with pytest.raises(PlanError, match="open\\(tune=True\\) tunes it"):
                _ = stream.tuning

    anyio.run(main)
    with pipe(at_once).loader() as loader, pytest.raises(PlanError, match="tune=True"):
        _ = loader.tuning


def test_the_tuner_itself_turns_what_limits_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow(item: int) -> int:
        await anyio.sleep(0.002)
        return item

    caplog.set_level(logging.INFO, "streamline.tuning")
    monkeypatch.setattr(tuning, "LOOK_S", 0.01)
    with sl.from_items(range(10**9)).map(slow, concurrency=2).open(tune=True) as stream:
        for _ in stream:
            if stream.stats().tuning:
                break
    step = stream.stats().tuning[0]
    assert (step.name, step.kind, step.before, step.after) == ("slow", "concurrency", 2, 3)
    assert "map(slow): concurrency 2 -> 3: the consumer waits" in caplog.text
    assert str(stream.tuning).startswith("slow: concurrency ")


def test_the_verdict_of_a_window_begins_where_a_knob_was_turned_in_it() -> None:
    def at(elapsed_s: float, first_s: float | None) -> Stats:
        first = None if first_s is None else Figures(elapsed_s=first_s, items=0, consumer_wait_s=0)
        return Stats(elapsed_s=elapsed_s, items=0, consumer_wait_s=0, first=first)

    def begins(window: Stats) -> float | None:
        return None if window.first is None else window.first.elapsed_s

    assert begins(at(9, 5).since(at(4, 1))) == 1  # a second of the window was before
    assert begins(at(9, 1).since(at(4, 1))) == 0
    assert begins(at(9, 6).since(at(4, None))) == 2
    assert begins(at(9, None).since(at(4, None))) is None


@pytest.mark.usefixtures("restless")
def test_the_live_page_has_turns_among_its_events() -> None:
    with pipe().repeat().open(page=True, tune=True) as stream:
        while not stream.tuning.steps:
            next(stream)
        events = update(str(stream.page))["events"]
        said = {str(step) for step in stream.tuning.steps}
    assert said & {event["text"] for event in events if event["level"] == "info"}


# When it fails, pauses, or finds nothing ------------------------------------------------------------------------------
class FailingTuner(RestlessTuner):
    def look(self, look: Measurement) -> TuningStep:
        RestlessTuner.turns = 99
        raise ZeroDivisionError("a mistake")


def test_a_failure_of_the_tuner_ends_the_tuning_and_not_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    RestlessTuner.turns = 0
    _looks_at_once(monkeypatch, FailingTuner)
    with pipe().open(tune=True) as stream:
        assert list(stream) == [item for item, _ in untuned()]
    assert "tuning has ended" in caplog.text
    assert "a mistake" in caplog.text


class WatchedTuner(RestlessTuner):
    forgotten = 0

    def forget(self) -> None:
        WatchedTuner.forgotten += 1


def test_nothing_is_turned_during_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sl.from_items(range(10**9)).map(at_once, concurrency=2).open(tune=True) as stream:
            while not stream.tuning.steps:
                await anext(stream)
            async with stream.paused():
                steps, WatchedTuner.forgotten = stream.tuning.steps, 0
                while WatchedTuner.forgotten < 5:
                    await anyio.lowlevel.checkpoint()
                assert len(stream.tuning.steps) <= len(steps) + 1  # a look that was at work
            before = len(stream.tuning.steps)
            while len(stream.tuning.steps) == before:
                await anext(stream)

    _looks_at_once(monkeypatch, WatchedTuner)
    anyio.run(main)


def test_a_pipeline_without_knobs_says_so() -> None:
    with sl.from_items(range(9)).map(plus).open(tune=True) as stream:
        assert len(list(stream)) == 9
    assert stream.tuning.values == {}
    assert "no stage has a knob" in str(stream.tuning)
    assert "no stage has a knob" in stream.tuning.resting


# Passes and hosts -----------------------------------------------------------------------------------------------------
@pytest.mark.one_in(2)
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
def test_a_loader_goes_on_with_what_earlier_passes_have_found(backend: Any) -> None:
    begun: list[dict[str, int]] = []
    init = RestlessTuner.__init__

    def seen(tuner: RestlessTuner, knobs: Any, values: Any, **options: Any) -> None:
        init(tuner, knobs, values, **options)
        begun.append(dict(tuner.settled))

    expected = [item for item, _ in untuned()]
    with pytest.MonkeyPatch.context() as patch, pipe().loader(backend=backend, tune=True) as loader:
        patch.setattr(RestlessTuner, "__init__", seen)
        for _ in range(2):
            RestlessTuner.turns = 0
            assert list(loader) == expected
            left = loader.tuning.values
        assert begun[0] == {"calls": 3, "threads": 2, "prefetch": 2}
        assert begun[1] != begun[0]
        assert left == loader.tuning.values


@pytest.mark.long
def test_hosts_are_told_of_turns_and_later_ones_of_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneStep(RestlessTuner):
        def look(self, look: Measurement) -> TuningStep:
            self.settled["at_once"] = 9
            return TuningStep(at_s=0, stage="", name="at_once", kind="concurrency", before=4, after=9, why="")

    _looks_at_once(monkeypatch, OneStep)
    endless = sl.from_items(range(10**9)).shard(2).map(at_once, concurrency=4)
    with sl.Processes(1) as pool:
        with endless.open(backend=pool, tune=True) as stream:
            while _calls(stream) != 9:
                next(stream)
        monkeypatch.setattr(tuning, "Tuner", Tuner)
        with endless.open(backend=pool, tune=stream.tuning) as again:
            while (calls := _calls(again)) == 4:  # no figures have come
                next(again)
    assert calls == 9


def _calls(stream: sl.SyncStream[Any]) -> int:
    return next((stage.concurrency for stage in stream.stats().stages if stage.name == "at_once"), 4)


def test_knobs_are_those_of_the_plan_shared_by_its_shards() -> None:
    def knobs(backend: Any = sl.Inline(), workers: int = 1) -> dict[str, tuple[str, int]]:  # noqa: B008
        mixed = sl.mix({"a": sl.from_items(range(9)).map(at_once, concurrency=6, name="of_a"), "b": sl.from_items([1])})
        whole = mixed.shard(64).map(plus, executor="thread", concurrency=2, name="threads")
        plan = whole.map(at_once, concurrency=1, name="one").merge().map(at_once, concurrency=2, name="after").plan
        return {knob.stage: (knob.kind, knob.most) for knob in knobs_of(plan, backend, workers)}

    assert knobs() == {
        "a/of_a": ("concurrency", 1024), "threads": ("threads", 64), "after": ("concurrency", 1024)
    }  # fmt: skip
    assert knobs(workers=64) == {
        "a/of_a": ("concurrency", 16), "threads": ("threads", 2), "after": ("concurrency", 1024)
    }  # fmt: skip
    assert knobs(sl.Processes(2, shared="node")) == {"after": ("concurrency", 1024)}
    remote = sl.read_files(["http://127.0.0.1:1/a", "http://127.0.0.1:1/b"], concurrency=8).plan
    assert [(knob.kind, knob.written) for knob in knobs_of(remote, sl.Inline(), 4)] == [("reads", 8)]


# Files ----------------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("restless")
def test_what_was_found_is_saved_and_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe().open(tune=True) as stream:
        list(stream)
        stream.tuning.save(tmp_path / "tune.json")
        found = stream.tuning.values
    made: list[object] = []  # the last look of the stream before may go on behind its close, in its thread
    monkeypatch.setattr(tuning, "Tuner", lambda *knobs, **_: made.append(knobs))
    with pipe(at_once).open(tune=tmp_path / "tune.json") as pinned:
        assert list(pinned) == [item for item, _ in untuned()]
        assert pinned.tuning.values == found
        calls = {stage.name: stage.concurrency for stage in pinned.stats().stages}
    assert {stage: calls[stage] for stage in ("calls", "threads")} == {k: found[k] for k in ("calls", "threads")}
    assert (made, pinned.tuning.steps) == ([], ())
    assert "tune.json says so" in pinned.tuning.resting
    text = json.loads((tmp_path / "tune.json").read_text())
    assert text["knobs"]["calls"] == {"kind": "concurrency", "value": found["calls"], "written": 3}


KNOBS = {"calls": {"kind": "concurrency", "value": 9}, "threads": {"kind": "threads", "value": 3}}
WHOLE = KNOBS | {"prefetch": {"kind": "prefetch", "value": 4}}


def file(knobs: Mapping[str, Any], version: int = 1) -> str:
    return json.dumps({"streamline tuning": version, "knobs": knobs})


def calls(kind: str, value: object) -> dict[str, Any]:
    return {"calls": {"kind": kind, "value": value}}


BAD_FILES: dict[str, tuple[str, str]] = {
    "empty": ("", "expected what stream.tuning.save"),
    "no JSON": ("{", "expected what stream.tuning.save"),
    "a list": ("[]", "expected what stream.tuning.save"),
    "deep": ("[" * 200_000, "expected what stream.tuning.save"),
    "a snapshot": ('{"version": 7}', "expected what stream.tuning.save"),
    "a later version": (file(WHOLE, 2), "expected version 1 of such a file, got 2"),
    "no number": (file(WHOLE | calls("concurrency", "9")), "Expected `int`, got `str`"),
    "nothing at once": (file(WHOLE | calls("concurrency", 0)), "Expected `int` >= 1"),
    "a missing stage": (
        file(KNOBS),
        "Expected a value for 'calls' (concurrency), 'threads' (threads), 'prefetch' (prefetch), got 'calls' "
        "(concurrency), 'threads' (threads): tune this one",
    ),
    "another stage": (file(WHOLE | {"more": KNOBS["calls"]}), "'more' (concurrency)"),
    "another kind": (file(WHOLE | calls("threads", 3)), "got 'calls' (threads)"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_says_nothing_of_the_pipeline_is_refused(name: str, tmp_path: Path) -> None:
    text, said = BAD_FILES[name]
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(PlanError) as refused:
        pipe(at_once).open(tune=tmp_path / "tune.json")
    assert said in str(refused.value)
    assert "tune.json" in str(refused.value)


def test_what_is_no_tuning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"No such file or directory; expected what stream\.tuning\.save"):
        pipe(at_once).open(tune=str(tmp_path / "none.json"))
    with pytest.raises(PlanError, match="Is a directory"):
        pipe(at_once).open(tune=tmp_path)
    bad: list[Any] = [1, None, [], 2.5]
    for tune in bad:
        with pytest.raises(PlanTypeError, match=r"is True, False, the path of what stream\.tuning\.save"):
            pipe(at_once).open(tune=tune)
        with pytest.raises(PlanTypeError):
            pipe(at_once).loader(tune=tune)


def test_values_beyond_what_fewer_shards_may_have_are_bounded() -> None:
    found = StreamTuning({"at_once": SavedKnob("concurrency", 5000)}, "tune.json")
    with sl.from_items(range(9)).shard(4).map(at_once, concurrency=2).open(tune=found) as stream:
        next(stream)
        assert stream.tuning.values == {"at_once": 256}


# Memory ---------------------------------------------------------------------------------------------------------------
MEMINFO = "MemTotal: 100 kB\nMemAvailable:   64 kB\n"

GROUPS: dict[str, tuple[dict[str, str], float]] = {
    "nothing is told": ({}, float("inf")),
    "the machine": ({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/a\n"}, 64 * 1024),
    "a group": (
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
            "/sys/fs/cgroup/a/memory.max": "5000\n",
            "/sys/fs/cgroup/a/memory.current": "4000\n",
            "/sys/fs/cgroup/a/memory.stat": "anon 3000\ninactive_file 700\nactive_file 1\n",
        },
        1700,
    ),
    "the first version of groups": (
        {
            "/proc/self/cgroup": "3:cpu,cpuacct:/a\n2:memory:/a\n",
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "3000\n",
            "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "2900\n",
            "/sys/fs/cgroup/memory/a/memory.stat": "inactive_file 5\ntotal_inactive_file 50\n",
        },
        105,
    ),
    "more than there may be": (
        {
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/memory.max": "10",
            "/sys/fs/cgroup/memory.current": "11",
        },
        0,
    ),
    "nonsense": ({"/proc/meminfo": "?", "/proc/self/cgroup": "\n:\n0::\n0::x\n"}, float("inf")),
}


@pytest.mark.parametrize("name", GROUPS)
def test_memory_is_what_the_machine_and_control_groups_have_left(name: str) -> None:
    files, left = GROUPS[name]
    assert free_bytes(files.get) == left
