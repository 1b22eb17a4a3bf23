"""States cross as bytes that are loaded when they are read; choices are known at both ends as long as they matter."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

import streamline as sl
from streamline.backends.ipc.state_codec import ColumnDecoder, ColumnEncoder
from streamline.core.choices import Log, LogSegment
from streamline.core.flow import Chunk, Site
from streamline.core.state import At, CountedStates, Over, Since, State, Tally, Tree
from streamline.core.tasks import Tasks
from streamline.errors import PlanTypeError, ResumeError
from streamline.plan.worker import open_worker
from streamline.testing.steps import erratic
from streamline.testing.subjects import run
from streamline.transforms import completion_order as unordered
from streamline.transforms.batch import BatchState
from streamline.transforms.completion_order import DeliverySegment, UnorderedState
from tests.backends.ipc.crossing_kit import Crossing


def far(columns: int = 3) -> Chunk[int]:
    return Chunk(range(columns), CountedStates("items", 5), At("items", 9))


def test_a_column_and_progress_arrive() -> None:
    states, after = ColumnDecoder(False).load(ColumnEncoder(False).dump(far()), 3)
    assert [states[index].json() for index in range(3)] == [{"items": 5}, {"items": 6}, {"items": 7}]
    assert after is not None
    assert (after.json(), after.where()) == ({"items": 9}, At("items", 9).where())
    assert after.latest.json() == {"items": 9}


def test_progress_alone_and_items_alone_arrive() -> None:
    columns, dumper = ColumnDecoder(False), ColumnEncoder(False)
    assert columns.load(dumper.dump(Chunk([1], [At("items", 1)])), 1)[1] is None
    states, after = columns.load(dumper.dump(Chunk((), (), At("items", 2))), 0)
    assert states == ()
    assert after is not None
    assert after.json() == {"items": 2}


class CountsLoads(At):
    """A state of a user's own."""

    loads = 0

    def __setstate__(self, state: Any) -> None:
        CountsLoads.loads += 1
        self.name, self.own, self.item = (state[1][part] for part in ("name", "own", "item"))


def test_nothing_is_loaded_before_a_state_is_read_and_then_once() -> None:
    CountsLoads.loads = 0
    data = ColumnEncoder(False).dump(Chunk([1], [CountsLoads("mine", 3)], CountsLoads("mine", 4)))
    states, after = ColumnDecoder(False).load(data, 1)
    assert CountsLoads.loads == 0
    assert after is not None
    assert [states[0].json(), after.json(), states[0].where()] == [
        {"mine": 3},
        {"mine": 4},
        "item 3 of mine, counted from 1",
    ]
    assert CountsLoads.loads == 2


def test_only_the_states_of_a_chunks_own_items_are_sent() -> None:
    many = [At("items", number) for number in range(10_000)]
    part = Chunk(range(10_000), many).part(5000, 3)
    data = ColumnEncoder(False).dump(part)
    assert len(data) < 300
    assert ColumnDecoder(False).load(data, 3)[0][2].json() == {"items": 5002}


class Locked(State):
    def __init__(self, name: str, upstream: State) -> None:
        self.name, self.upstream, self.lock = name, upstream, threading.Lock()

    def json(self, until: State | None = None) -> Tree:
        return {self.name: 0}

    def tally(self, found: Tally) -> None:
        """Nothing."""


@pytest.mark.parametrize("with_log", [False, True])
def test_a_state_that_cannot_be_pickled_is_refused_by_the_name_of_its_stage(with_log: bool) -> None:
    state = Over("outer", 1, Since(At("items", 0), Over("between", 2, Locked("theirs", At("items", 1)))))
    dumper = ColumnEncoder(with_log)
    with pytest.raises(PlanTypeError, match=r"the state of 'theirs' .* got a _thread\.lock\.") as refused:
        dumper.dump(Chunk([1], [state]))
    assert isinstance(refused.value.__cause__, TypeError)
    with pytest.raises(PlanTypeError, match="'theirs'"):
        dumper.dump_state(state)


def test_a_state_of_a_class_that_cannot_be_imported_arrives() -> None:
    class Local(At):
        pass

    dumper, columns = ColumnEncoder(False), ColumnDecoder(False)
    for number in range(2):
        state = columns.load_state(dumper.dump_state(Local("mine", number)))
        assert isinstance(state, Local)
        assert state.own == number


def test_states_of_lines_do_not_carry_their_bytes(tmp_path: Path) -> None:
    lines = [b"x" * 4000 + b"\r" * (number % 3) + b"\n" for number in range(300)]
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    plan = sl.read_lines(str(tmp_path / "a.txt")).shard(1).plan

    async def work(tasks: Tasks) -> None:
        flow, dumper, columns = open_worker(plan, Site(tasks), None), ColumnEncoder(False), ColumnDecoder(False)
        count = 0
        while (chunk := await flow.pull(7)) is not None:
            for way in (chunk, Chunk(chunk.items, [chunk.states[at] for at in range(len(chunk.items))])):
                data = dumper.dump(way)
                assert len(data) < 2000
                states, _ = columns.load(data, len(chunk.items))
                for at in range(len(chunk.items)):
                    assert states[at].json() == chunk.states[at].json()
                    assert states[at].where() == chunk.states[at].where()
            count += len(chunk.items)
        assert count == 300
        await flow.aclose()

    run(work)


# Choices --------------------------------------------------------------------------------------------------------------


def stretches() -> int:
    gc.collect()
    return sum(isinstance(thing, LogSegment) for thing in gc.get_objects())


ITEMS = sl.from_items(range(4000)).shard(1)

PIPES = {
    "unordered map": ITEMS.map(erratic, concurrency=3, ordered=False),
    "two unordered maps": ITEMS.map(erratic, concurrency=2, ordered=False).map(
        erratic, concurrency=3, ordered=False, name="second"
    ),
    "timed batches": ITEMS.batch(2, max_wait_s=1e-9, collate=None),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", PIPES)
@pytest.mark.parametrize("deaths", [0, 1])
def test_the_log_is_as_long_as_the_way_from_a_mark_and_no_longer(
    kind: str, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unordered, "SEGMENT_ITEMS", 20)

    async def work(tasks: Tasks) -> None:
        before = stretches()
        flow = Crossing(PIPES[kind].plan, Site(tasks), None, Random(1), deaths)

        async def take(count: int) -> None:
            while count > 0:
                chunk = await flow.pull(min(count, 100))
                assert chunk is not None
                count -= len(chunk.items)

        await take(500)
        without = stretches() - before
        mark = flow.state
        await take(1200)
        chosen = [own["replay"] for own in mark.json(flow.state).values() if isinstance(own, dict)]
        assert chosen
        assert all(len(replay) >= 1200 for replay in chosen)
        kept = stretches() - before
        del mark
        gc.collect()
        assert kept > without + 40
        assert stretches() - before < without + 20
        await flow.aclose()

    run(work)


def test_choices_given_at_a_restart_count_until_they_are_made() -> None:
    """A mark from before it needs them, also if a state after it has not come as far."""

    def state_of(log: Log, count: int) -> State:
        return BatchState("batch", At("items", 0), log, count)

    columns, dumper = ColumnDecoder(True), ColumnEncoder(True)
    mark = columns.load_state(dumper.dump_state(state_of(Log(0, [], 0, "batch"), 0)))
    assert mark.json() == {"items": 0, "batch": {"replay": []}}
    columns.restart_at(mark)
    again, dumper = Log(0, [2, 1, 2], 3, "batch"), ColumnEncoder(True)
    assert columns.load_state(dumper.dump_state(state_of(again, 0))) is mark
    states, _ = columns.load(dumper.dump(Chunk([1], [state_of(again, 1)])), 1)
    assert states[0].json()["batch"] == {"replay": [1, 2]}
    assert mark.json(states[0])["batch"] == {"replay": [2, 1, 2]}
    later = again.later = Log(3, [7], 3, "batch")
    states, _ = columns.load(dumper.dump(Chunk([1], [state_of(later, 1)])), 1)
    assert mark.json(states[0])["batch"] == {"replay": [2, 1, 2, 7]}
    assert mark.json() == {"items": 0, "batch": {"replay": []}}


class Hidden(State):
    """Over the state of a choosing flow, which it does not tell of."""

    def __init__(self, upstream: State) -> None:
        self.upstream = upstream

    def json(self, until: State | None = None) -> Tree:
        return self.upstream.json(until)

    def tally(self, found: Tally) -> None:
        self.upstream.tally(found)


def test_a_restart_at_a_state_that_hides_choices_is_refused() -> None:
    def begin() -> State:
        return Hidden(UnorderedState("load", DeliverySegment("load", 0, 0, frozenset(), At("items", 0), []), 0, 0))

    columns = ColumnDecoder(True)
    state = columns.load_state(ColumnEncoder(True).dump_state(begin()))
    columns.restart_at(state)
    with pytest.raises(ResumeError, match="'load'"):
        columns.load_state(ColumnEncoder(True).dump_state(begin()))
