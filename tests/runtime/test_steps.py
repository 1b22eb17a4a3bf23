"""Steps: what was recorded of each is right or missing, a replay gives the very items, and left-out ones never come."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.core.atomic_file import write_all
from streamline.errors import PlanError, PlanTypeError, RecordError, ResumeError
from streamline.runtime.run import BeginOptions
from streamline.snapshot import recorder
from streamline.snapshot.recorder import MARKER, RecordName
from streamline.snapshot.steps import StepRecords
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE
from tests.kit import later
from tests.laws.profile import examples, short

PIPE = sl.from_items(range(60)).shard(3).shuffle(window=4).merge().batch(2, collate=None)
ALL = list(PIPE)


def record(path: Path, pipe: sl.Pipeline[Any] = PIPE, count: int | None = None, **options: Any) -> list[Any]:
    """Run a pipeline, or its first items, with a record; return what it gave."""
    with pipe.open(record=sl.Recorder(path), **options) as stream:
        return list(stream) if count is None else [next(stream) for _ in range(count)]


def told(path: Path, rank: int = 0) -> dict[int, tuple[Any, Any]]:
    """Return the states before and after each step that a record has."""
    return {step.number: (step.before, step.after) for step in StepRecords(path).read(rank, 0, 10**6)}


async def feed() -> AsyncIterator[int]:
    yield 1


# Laws -----------------------------------------------------------------------------------------------------------------


@examples(30)
@given(
    compositions(),
    st.integers(0, 1000),
    st.sampled_from([1, 3, 256]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 6),
)
def test_any_range_of_steps_is_given_again(
    tmp_path_factory: pytest.TempPathFactory, composition: Composition, seed: int, most: int, place: float, more: int
) -> None:
    DICE.seed(seed)
    pipe, path = composition.pipeline, tmp_path_factory.mktemp("steps")
    with short(LIST_ITEMS=most):
        given_items = record(path, pipe)
        if not given_items:
            return
        assert sorted(told(path)) == list(range(len(given_items)))
        first = int(place * len(given_items))
        last = min(first + more, len(given_items) - 1)
        if any(step.again is None for step in StepRecords(path).read(0, first, last)):
            with pytest.raises(RecordError, match=r"began another pass of a \.repeat"):
                pipe.replay_steps(path, first, last)
            return
        again = list(pipe.replay_steps(path, first, last))
    assert repr(again) == repr(given_items[first : last + 1])


@examples(30)
@given(compositions(choosing=False), st.data())
def test_any_range_is_left_out_after_any_resume(composition: Composition, data: st.DataObject) -> None:
    pipe = composition.pipeline
    whole = [repr(item) for item in pipe]
    at = data.draw(st.integers(0, len(whole)))
    first = data.draw(st.integers(at, len(whole) + 1))
    skipped = range(first, data.draw(st.integers(first + 1, len(whole) + 3)))
    expected = [item for number, item in enumerate(whole) if number >= at and number not in skipped]
    with pipe.open() as stream:
        for _ in range(at):
            next(stream)
        snapshot = stream.snapshot()
    got, stops = [], data.draw(st.sets(st.integers(0, len(whole)), max_size=2))
    steps: Any = skipped
    while True:
        with pipe.open(resume=snapshot, skip_steps=steps) as stream:
            for item in stream:
                got.append(repr(item))
                if len(got) in stops:
                    break
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            if len(got) not in stops:
                break
        stops.discard(len(got))
        steps = ()  # the snapshot knows
    assert got == expected
    assert snapshot.step == len(whole)


# Leaving steps out ----------------------------------------------------------------------------------------------------


def test_a_snapshot_has_the_number_of_the_next_step() -> None:
    with PIPE.open() as stream:
        assert stream.snapshot().step == 0
        next(stream), next(stream)
        assert stream.snapshot().step == 2
        assert stream.snapshot(1).step == 1
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with PIPE.open(resume=snapshot) as stream:
        next(stream)
        assert stream.snapshot().step == 3
    assert sl.Snapshot.from_json(replace(snapshot, step=None).to_json()).step is None


def test_steps_are_left_out_of_an_async_stream_and_while_it_is_debugged() -> None:
    expected = [*ALL[:3], *ALL[5:]]

    async def run() -> list[Any]:
        async with PIPE.open(skip_steps={3, 4}) as stream:
            found = [item async for item in stream]
            assert stream.snapshot().left_out == [[3, 5]]
            return found

    assert anyio.run(run) == expected
    with PIPE.open(skip_steps={3, 4}) as stream:
        snapshot = stream.snapshot()
    with PIPE.debug(resume=snapshot) as debugged:
        assert list(debugged) == expected


def test_peek_knows_that_all_that_is_left_is_left_out() -> None:
    with PIPE.open(skip_steps=range(1, len(ALL) + 5)) as stream:
        assert stream.peek()
        assert next(stream) == ALL[0]
        assert stream.peek() is False


def test_more_steps_are_left_out_at_a_later_resume() -> None:
    with PIPE.open(skip_steps=[9, 2, 3]) as stream:
        next(stream)
        snapshot = stream.snapshot()
    with PIPE.open(resume=snapshot, skip_steps=range(4, 6)) as stream:
        assert list(stream) == [item for number, item in enumerate(ALL) if number not in (0, 2, 3, 4, 5, 9)]
        assert stream.snapshot().left_out == [[2, 6], [9, 10]]


@pytest.mark.parametrize(
    ("steps", "ranges"),
    [(range(3, 5), [[3, 5]]), ([5, 3, 4, 4], [[3, 6]]), (range(0), []), (range(1, 4, 2), [[1, 2], [3, 4]])],
)
def test_steps_may_be_any_collection_of_numbers(steps: Any, ranges: list[list[int]]) -> None:
    assert BeginOptions(skip_steps=steps).left_out == ranges


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (3, "numbers of steps"),
        ("34", "numbers of steps"),
        ([1.5], "a number in"),
        ([-1], "least 0"),
        (range(-2, 3), "least 0"),
    ],
)
def test_other_steps_are_refused(steps: Any, message: str) -> None:
    with pytest.raises((PlanError, PlanTypeError), match=message):
        PIPE.open(skip_steps=steps)


def test_what_can_not_be_left_out_is_refused_and_says_the_way_out() -> None:
    with PIPE.open() as stream:
        [next(stream) for _ in range(5)]
        snapshot = stream.snapshot()
    with pytest.raises(PlanError, match="step 4 was given before the snapshot, which stands before step 5"):
        PIPE.open(resume=snapshot, skip_steps=range(4, 9))
    unknown = replace(snapshot, step=None)
    with pytest.raises(ResumeError, match=r"doesn't say at which step .* dataclasses.replace\(snapshot, step=number\)"):
        PIPE.open(resume=unknown, skip_steps=[7])
    with PIPE.open(resume=unknown) as stream:
        assert stream.snapshot().step is None
    with pytest.raises(TypeError, match=r"loader has no skip_steps=: leave them out in \.open"):
        PIPE.loader(skip_steps=[7])  # type: ignore[call-arg]
    with PIPE.open(resume=snapshot, skip_steps=[7]) as stream, pytest.raises(PlanError, match="a loader counts"):
        PIPE.loader(resume=stream.snapshot())


# Recording ------------------------------------------------------------------------------------------------------------


def test_a_step_is_said_to_be_where_its_item_was(tmp_path: Path) -> None:
    pipe = sl.from_items(range(6)).shard(2)
    record(tmp_path, pipe)
    (step,) = StepRecords(tmp_path).read_all(0, 3, 3)
    assert step.snapshot_before.worker_states == [{"items": 2}, {"items": 1}]
    assert step.snapshot_after.worker_states == [{"items": 2}, {"items": 2}]
    with pipe.open(resume=step.snapshot_before) as stream:
        assert next(stream) == 3
        assert stream.snapshot().step == 4


def test_a_later_opening_counts_from_its_first_step_on(tmp_path: Path) -> None:
    with PIPE.open(record=sl.Recorder(tmp_path)) as stream:
        [next(stream) for _ in range(8)]
        snapshot = stream.snapshot()
        [next(stream) for _ in range(8)]
    assert StepRecords(tmp_path).extent(0) == "0..15"
    record(tmp_path, count=3, resume=snapshot, skip_steps=[9])
    assert StepRecords(tmp_path).extent(0) == "0..11"
    runs = [(step.run.run, step.left_out) for step in StepRecords(tmp_path).read_all(0, 6, 10)]
    assert runs == [(1, False), (1, False), (2, False), (2, True), (2, False)]
    assert list(PIPE.replay_steps(tmp_path, 6, 11)) == ALL[6:12], "also what was left out"
    with pytest.raises(RecordError, match=r"lacks the steps 12, 13 of rank 0, epoch 0: it has 0\.\.11"):
        PIPE.replay_steps(tmp_path, 10, 13)


def test_epochs_and_ranks_have_records_of_their_own(tmp_path: Path) -> None:
    given_items = {
        (epoch, rank): record(tmp_path, epoch=epoch, rank=rank, world_size=3) for epoch in (0, 1) for rank in (0, 1)
    }
    with pytest.raises(RecordError, match=r"steps of epochs 0, 1: say of which, epoch=1"):
        PIPE.replay_steps(tmp_path, 0, 1)
    with pytest.raises(PlanError, match=r"of ranks 0, 1: say whose, rank=0"):
        PIPE.replay_steps(tmp_path, 0, 1, epoch=0)
    for (epoch, rank), items in given_items.items():
        assert list(PIPE.replay_steps(tmp_path, 2, 4, epoch=epoch, rank=rank)) == items[2:5]
    record(tmp_path, epoch=1, count=2)
    assert StepRecords(tmp_path, 1).ranks == [0], "another number of ranks has begun anew"


def test_a_loader_records_each_epoch(tmp_path: Path) -> None:
    with PIPE.loader(record=sl.Recorder(tmp_path)) as loader:
        epochs = [list(loader), list(loader)]
    for epoch, items in enumerate(epochs):
        assert list(PIPE.replay_steps(tmp_path, 0, len(items) - 1, epoch=epoch)) == items


def test_an_async_loop_gives_steps_again(tmp_path: Path) -> None:
    record(tmp_path)

    async def run() -> list[Any]:
        return [item async for item in PIPE.replay_steps(tmp_path, 5, 9)]

    assert anyio.run(run) == ALL[5:10]


def test_a_replay_by_another_plan_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    other = sl.from_items(range(60)).shard(3).shuffle(window=5).merge().batch(2, collate=None)
    with pytest.raises(ResumeError, match="window=5"):
        list(other.replay_steps(tmp_path, 5, 9))
    refused: list[Any] = [{"world_size": 2}, {"ends": "pad"}, {"record": sl.Recorder(tmp_path)}]
    for options in (*refused, {"resume": None}, {"skip_steps": [5]}):
        with pytest.raises(PlanError, match="it is as the steps were recorded"):
            PIPE.replay_steps(tmp_path, 5, 9, **options)
    with pytest.raises(PlanError, match="the first and the last step, in this order"):
        PIPE.replay_steps(tmp_path, 9, 5)


def test_a_step_that_begins_another_pass_is_given_again_unless_an_order_is_chosen(tmp_path: Path) -> None:
    numbers = sl.from_items(range(6))
    for name, pipe, fixed in (
        ("fixed", numbers.map(abs).repeat(2).batch(4, collate=None), True),
        ("chosen", numbers.map(later, concurrency=2, ordered=False).repeat(2).batch(4, collate=None), False),
        ("merged", numbers.shard(2).map(abs).merge("best_effort").repeat(2).batch(4, collate=None), False),
    ):
        given_items = record(tmp_path / name, pipe)
        for step, item in enumerate(given_items):
            if fixed or step != 1:
                assert list(pipe.replay_steps(tmp_path / name, step, step)) == [item]
            else:
                with pytest.raises(RecordError, match=r"step 1 of rank 0 began another pass of a \.repeat"):
                    pipe.replay_steps(tmp_path / name, 0, 2)


@pytest.mark.parametrize("hosts", [sl.Inline(), sl.Threads(1)], ids=str)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("group_by", {"key": lambda item: item // 10}),
        ("batch", {"max_cost": 3, "cost": lambda item: 1 + item // 10, "collate": None}),
    ],
)
def test_a_list_is_given_again_whatever_item_follows_it_this_time(
    tmp_path: Path, method: str, options: dict[str, Any], hosts: Any
) -> None:
    paces = {2: 9}

    async def erratic(item: int) -> int:
        for _ in range(paces.get(item, 0)):
            await anyio.lowlevel.checkpoint()
        return item

    numbers = sl.from_items([0, 1, 2, 10, 11, 12]).shard(1).map(erratic, concurrency=2, ordered=False)
    for name, before in (("worker", numbers), ("after", numbers.merge())):
        pipe = getattr(before, method)(**options)
        paces[2] = 9  # so that 10 comes after 1
        items = record(tmp_path / name, pipe, backend=hosts)
        paces.clear()  # and now 2, which would be in the same list
        again = [list(pipe.replay_steps(tmp_path / name, step, step)) for step in range(3)]
        assert repr(again) == repr([[item] for item in items[:3]])


def test_padding_is_not_given_again(tmp_path: Path) -> None:
    pipe = sl.from_items(range(5)).shard(2)
    items = record(tmp_path, pipe, rank=1, world_size=2, ends="pad")
    assert len(items) == 3
    assert list(pipe.replay_steps(tmp_path, 0, 1)) == items[:2]
    with pytest.raises(RecordError, match="step 2 of rank 1 was padding"):
        pipe.replay_steps(tmp_path, 0, 2)


def test_what_can_not_be_recorded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="can't write a record of steps"):
        PIPE.open(record=sl.Recorder(tmp_path / "file"))
    with pytest.raises(PlanTypeError, match="is a recorder"):
        PIPE.open(record="steps/")  # type: ignore[arg-type]
    with pytest.raises(PlanTypeError, match="path of a directory"):
        sl.Recorder(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="got an empty one"):
        sl.Recorder("")
    with pytest.raises(PlanTypeError, match="record of steps is the path of a directory, got NoneType"):
        PIPE.replay_steps(None, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a feed's items can't be read again"):
        sl.from_stream(feed).open(record=sl.Recorder(tmp_path))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordError):
            StepRecords(path)


# What can go wrong ----------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_says_less_and_nothing_wrong(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "CHANGES_PER_HEAD", 0)  # so that each step has a block
        record(tmp_path, count=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "CHANGES_PER_HEAD", 1)
        (snapshot,) = (step.snapshot_after for step in StepRecords(tmp_path).read_all(0, 1, 1))
        record(tmp_path, count=7, resume=snapshot)
    truth, path = told(tmp_path), max(tmp_path.iterdir())
    content = path.read_bytes()
    assert len(truth) == 9
    assert content.count(MARKER) >= 1
    known = 2
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        found = told(tmp_path)
        assert found == {number: truth[number] for number in range(len(found))}
        assert len(found) >= known
        known = len(found)
    assert known == len(truth)


@examples(40)
@given(st.data())
def test_a_damaged_stretch_costs_its_block_at_the_most(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "CHANGES_PER_HEAD", 1)
        record(path)
    truth, (file,) = told(path), list(path.iterdir())
    content = bytearray(file.read_bytes())
    starts = [block.first for block in recorder.blocks(bytes(content))]
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    found = told(path)
    assert all(truth[number] == states for number, states in found.items())
    lost = {max(start for start in starts if start <= number) for number in truth.keys() - found.keys()}
    assert len(lost) == 1


class _Torn:
    """Writes as `write_all`, until call `at`: then a part, and an exception, before or after the rest."""

    def __init__(self, at: int, written: float, error: BaseException) -> None:
        self._at, self._written, self._error = at, written, error
        self._inner = write_all
        self.calls = 0

    def __call__(self, descriptor: int, content: bytes) -> None:
        self.calls += 1
        if self.calls != self._at:
            self._inner(descriptor, content)
            return
        self._inner(descriptor, content[: int(len(content) * self._written)])
        raise self._error


@pytest.mark.one_in(3)
@pytest.mark.parametrize("written", [0, 0.5, 1])
@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_ctrl_c_while_a_step_is_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, written: float
) -> None:
    monkeypatch.setattr(recorder, "write_all", _Torn(at, written, KeyboardInterrupt()))
    got: list[Any] = []
    interrupts = 0
    with PIPE.open(record=sl.Recorder(tmp_path)) as stream:
        while len(got) < len(ALL):
            try:
                got.extend(stream)
            except KeyboardInterrupt:
                interrupts += 1
    assert got == ALL
    assert interrupts == 1
    assert len(told(tmp_path)) == len(ALL)
    assert list(PIPE.replay_steps(tmp_path, 0, len(ALL) - 1)) == ALL


def test_a_step_that_ctrl_c_kept_from_being_given_is_not_said_to_have_been(tmp_path: Path) -> None:
    with PIPE.open(record=sl.Recorder(tmp_path)) as stream:
        [next(stream) for _ in range(3)]
        stream.part()  # as far as `next` goes before it takes the item
        assert StepRecords(tmp_path).extent(0) == "0..3"
        assert stream.snapshot().step == 3
    assert StepRecords(tmp_path).extent(0) == "0..2"


def test_a_full_disk_ends_the_record_with_a_warning_and_not_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "write_all", _Torn(5, 0.5, OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING, "streamline.recorder"):
        assert record(tmp_path) == ALL
    assert [one.getMessage().partition(": ")[2] for one in caplog.records] == [
        "steps from 3 on can't be recorded, and the stream goes on without: [Errno 28] No space left on device"
    ]
    assert StepRecords(tmp_path).extent(0) == "0..2"


def test_a_first_step_that_can_not_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "write_all", _Torn(1, 0, OSError(28, "No space left on device")))
    with PIPE.open(record=sl.Recorder(tmp_path)) as stream:
        with pytest.raises(RecordError, match="No space left on device"):
            next(stream)
        assert list(stream) == ALL, "nothing was lost; the disk has room again"


def test_names_of_other_files_are_passed_over(tmp_path: Path) -> None:
    record(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert [str(name) for name in RecordName.all_in(tmp_path)] == ["run-00001-epoch-0-rank-00000-of-00001-from-0.steps"]


def test_a_stream_that_is_dropped_closes_its_record(tmp_path: Path) -> None:
    def first(items: Iterator[Any]) -> Any:
        return next(items)

    assert first(PIPE.open(record=sl.Recorder(tmp_path)).sync_stream()) == ALL[0]
    assert StepRecords(tmp_path).extent(0) == "0..0"


def test_a_usual_step_takes_few_bytes(tmp_path: Path) -> None:
    """The bound that docs/steps.md gives: 100 bytes."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"n": n, "t": "x" * (n * 7919 % 200)}) + "\n" for n in range(4000))
    )
    pipe = sl.read_jsonl(tmp_path / "a.jsonl").shard(4).shuffle(window=64).merge().batch(16, collate=None)
    steps = len(record(tmp_path / "steps", pipe))
    assert sum(path.stat().st_size for path in (tmp_path / "steps").iterdir()) < 100 * steps
