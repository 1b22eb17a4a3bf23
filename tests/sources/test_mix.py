"""Mixtures: which component is drawn, when they end, what a resume may change, and what no component is."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Flow, Site
from streamline.core.tasks import Tasks
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.pipeline import Pipeline
from streamline.sources.base import Part
from streamline.sources.sampler import BLOCK, Numbers
from streamline.testing import oracle
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition, continued
from streamline.testing.steps import DICE, steps
from tests.laws.profile import examples, sampled

AnyPipeline = Pipeline[Any]


def numbers(length: int, start: int = 0, name: str = "items") -> Pipeline[int]:
    return sl.from_items(range(start, start + length), name=name)


def where(item: int) -> str:
    return "abcdefgh"[item // 1000]


def mixture(lengths: Mapping[str, int], **options: Any) -> Pipeline[int]:
    """Component "a" has 0, 1, 2, …; "b" 1000, 1001, …"""
    return sl.mix({name: numbers(lengths[name], 1000 * at) for at, name in enumerate(lengths)}, **options)


def iterated(items: range) -> Pipeline[int]:
    return sl.from_iterable(lambda: items)


@st.composite
def mixtures(draw: st.DrawFn) -> Composition:
    """Random components, weights and schedules, sharded or not; then random stages."""
    parts = {}
    for at in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 9))
        source = sl.from_items if draw(st.booleans()) else iterated
        part = Composition(source(range(100 * at, 100 * at + length)), "", length)
        parts["abc"[at]] = part.with_steps(draw(st.lists(steps(), max_size=2)), choosing=False).pipeline
    weight = st.sampled_from([0, 1, 2, 5.5])
    drawn = st.fixed_dictionaries(dict.fromkeys(parts, weight)).filter(lambda found: any(found.values()))
    schedule = [(0, draw(drawn)), *((start, draw(drawn)) for start in draw(st.sampled_from([[], [5], [3, 9]])))]
    stop: Any = draw(st.sampled_from(["all", "first"]))
    shards = draw(st.sampled_from([0, 1, 3]))
    pipe: AnyPipeline = sl.mix(parts, schedule, seed=draw(st.integers(0, 9)), stop=stop)
    pipe = pipe.shard(shards) if shards else pipe
    return draw(continued(Composition(pipe, f"{pipe!r} {schedule} {stop}", 40), choosing=False, stages=2))


@pytest.mark.long
@examples(15)
@given(mixtures(), st.integers(0, 99))
def test_random_mixtures_are_the_oracles_and_resume_exactly_after_each_item(made: Composition, seed: int) -> None:
    DICE.seed(seed)
    check_resume(made.pipeline, seed=seed, generations=3)


def test_the_same_items_wherever_workers_run(processes: Backend) -> None:
    parts = {"a": numbers(7).map(abs), "b": numbers(3, 1000).map(abs).shuffle(window=3).repeat(2)}
    pipe = sl.mix(parts, {"a": 1, "b": 3}, seed=4).shard(3).shuffle(window=4).merge()
    whole = list(pipe)
    for backend in (sl.Threads(2), processes):
        with pipe.open(backend=backend) as stream:
            first, snapshot = [next(stream) for _ in range(5)], sl.Snapshot.from_json(stream.snapshot().to_json())
            assert first + list(stream) == whole
        with pipe.open(backend=backend, resume=snapshot) as stream:
            assert first + list(stream) == whole


def test_item_n_depends_on_the_seed_and_n_alone() -> None:
    lengths = {"a": 1000, "b": 1000, "c": 1000}
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    items = mixture(lengths, weights=weights, seed=1).first(1500)
    counts = Counter(map(where, items))
    assert {name: round(count / 1500, 1) for name, count in counts.items()} == weights
    assert mixture(lengths, weights=weights, seed=1).first(100) == items[:100]
    assert mixture(lengths, weights=weights, seed=2).first(100) != items[:100]


def test_the_order_in_which_components_are_written_does_not_matter() -> None:
    one, other = numbers(50), numbers(50, 1000)
    pipes = [sl.mix({"a": one, "b": other}), sl.mix({"b": other, "a": one})]
    assert list(pipes[0]) == list(pipes[1])


def test_shards_are_those_of_each_component_and_draw_apart() -> None:
    pipe = mixture({"a": 100, "b": 100})
    assert sorted(pipe.shard(4)) == sorted(pipe)
    ranks = [list(pipe.shard(4).open(rank=rank, world_size=2).sync_stream()) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(pipe)
    firsts = [
        "".join(map(where, list(pipe.shard(2).open(rank=rank, world_size=2).sync_stream())[:20])) for rank in (0, 1)
    ]
    assert firsts[0] != firsts[1]


def test_stop_first_ends_with_the_first_and_all_gives_its_weight_to_the_others() -> None:
    lengths = {"a": 5, "b": 200}
    first = list(mixture(lengths, stop="first"))
    counts = Counter(map(where, first))
    assert counts["a"] == 5
    assert counts["b"] < 50
    assert sorted(mixture(lengths)) == [*range(5), *range(1000, 1200)]
    assert list(mixture(lengths))[: len(first)] == first


def test_a_component_of_weight_0_is_not_read() -> None:
    assert list(mixture({"a": 3, "b": 3}, weights={"a": 1, "b": 0})) == [0, 1, 2]


def test_a_schedule_counts_the_items_of_all_workers() -> None:
    weights = [(0, {"a": 1, "b": 0}), (41, {"a": 0, "b": 1}), (63, {"a": 1, "b": 0})]
    expected = "a" * 41 + "b" * 22 + "a" * 17
    for shards in (1, 2, 4):
        assert "".join(map(where, mixture({"a": 200, "b": 200}, weights=weights).shard(shards).first(80))) == expected
    short = mixture({"a": 5, "b": 7}, weights=[(0, {"a": 1, "b": 0}), (40, {"a": 0, "b": 1})])
    assert "".join(map(where, short)) == "a" * 5 + "b" * 7


def test_passes_of_a_component_are_its_own() -> None:
    parts = {"a": numbers(3).shuffle(seed=1).repeat(), "b": numbers(6, 1000)}
    items = list(sl.mix(parts, stop="first"))
    own = [item for item in items if item < 1000]
    assert len(own) >= 3
    assert sorted(own[:3]) == [0, 1, 2]
    with sl.mix(parts).open() as stream:
        for _ in range(30):
            next(stream)
        state = stream.snapshot().worker_states[0]["mix"]
        rows = {stage.name: stage.items for stage in stream.stats().stages}
    assert sum(state["taken"].values()) == 30
    assert state["taken"]["b"] == 6
    assert rows["b/items"] == 6


def test_a_take_before_the_shard_counts_for_all_workers_of_an_index_or_one_stream() -> None:
    parts = {"a": numbers(50).take(10), "b": sl.from_iterable(lambda: range(1000, 1050)).take(10)}
    assert Counter(map(where, sl.mix(parts).shard(4))) == {"a": 10, "b": 10}


# What a resume may change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", [0, 1, 7, 18])
def test_weights_seed_and_stop_change_at_a_resume_and_nothing_is_lost(served: int) -> None:
    lengths = {"a": 30, "b": 30}
    with mixture(lengths, weights={"a": 9, "b": 1}).shard(2).open() as stream:
        first = [next(stream) for _ in range(served)]
        snapshot = stream.snapshot()
    other = mixture(lengths, weights={"a": 0.001, "b": 1}, seed=3).shard(2)
    rest = list(other.open(resume=snapshot).sync_stream())
    assert sorted(first + rest) == [*range(30), *range(1000, 1030)]
    assert Counter(map(where, rest[:15]))["b"] >= 14


@pytest.mark.one_in(2)
@pytest.mark.parametrize("served", sampled(range(8), 3))
def test_other_weights_leave_what_a_later_stage_reads_again_as_it_was(served: int) -> None:
    """Five times in a row, each time with other weights; the shuffle is in the middle of a window nearly always."""
    parts = {"a": numbers(40), "b": numbers(40, 1000)}
    found: list[int] = []
    snapshot = None
    for generation in range(5):
        weights = {"a": 1 + 5 * (generation % 2), "b": 1 + generation}
        pipe = sl.mix(parts, weights, seed=generation).shard(2).shuffle(window=5).merge().shuffle(window=7)
        with pipe.open(resume=snapshot) as stream:
            if generation == 4:
                found += list(stream)
                break
            found += [next(stream) for _ in range(served % 8 + generation)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert sorted(found) == [*range(40), *range(1000, 1040)]


def test_components_come_and_go_and_go_on_by_name() -> None:
    with mixture({"a": 20, "b": 20}).open() as stream:
        first = [next(stream) for _ in range(12)]
        snapshot = stream.snapshot()
    taken = Counter(map(where, first))
    later = sl.mix({"b": numbers(20, 1000), "c": numbers(5, 2000)})
    rest = list(later.open(resume=snapshot).sync_stream())
    assert sorted(rest) == [*range(1000 + taken["b"], 1020), *range(2000, 2005)]


def test_a_component_that_is_read_again_must_stay() -> None:
    with mixture({"a": 20, "b": 20}).shuffle(window=8).open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    with pytest.raises(ResumeError, match="goes back to items of 'b', which is no component any more"):
        list(mixture({"a": 20}).shuffle(window=8).open(resume=snapshot).sync_stream())


def test_another_plan_or_other_data_of_a_component_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with sl.mix({"a": numbers(20).map(abs), "b": numbers(20)}).open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    changed: AnyPipeline = sl.mix({"a": numbers(20).map(int), "b": numbers(20)})
    with pytest.raises(ResumeError, match="says nothing about another plan: give the new one a name of its own"):
        changed.open(resume=snapshot)
    longer = sl.mix({"a": numbers(20).map(abs), "b": numbers(25)})
    with pytest.raises(ResumeError, match=r'accept=\["mix.b.length"\]'):
        longer.open(resume=snapshot)
    assert len(list(longer.open(resume=snapshot, accept=["mix.b.length"]).sync_stream())) == 44


@pytest.mark.long
def test_files_are_bound_by_component(tmp_path: Path) -> None:
    for name in ("one", "two"):
        for part in range(2):
            text = "".join(f"{name} {part} {line}\n" for line in range(6))
            (tmp_path / f"{name}-{part}.txt").write_text(text, encoding="utf-8")
    parts = {name: sl.read_lines(f"{tmp_path}/{name}-*.txt") for name in ("one", "two")}
    pipe = sl.mix(parts).shard(2)
    check_resume(pipe)
    assert len(oracle(pipe)) == 24
    assert pipe.check().ok
    assert "read_lines" in repr(pipe)
    assert "mix of one" in pipe.draw().mermaid
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    assert "one: " in str(pipe.explain(snapshot))
    (tmp_path / "one-2.txt").write_text("new\n", encoding="utf-8")
    with pytest.raises(ResumeError, match=r'accept=\["mix.one.new_files"\]'):
        pipe.open(resume=snapshot)
    rest = list(pipe.open(resume=snapshot, accept=["mix.one.new_files"]).sync_stream())
    assert len(rest) == 23


def test_skipped_items_of_components_are_counted_by_stage_also_over_a_resume() -> None:
    def picky(item: int) -> int:
        if item % 5 == 0:
            raise ValueError(item)
        return item

    pipe = sl.mix({"a": numbers(20).map(picky), "b": numbers(20, 1000).map(picky)}).shard(2)
    for stop in range(0, 33, 4):
        with pipe.open(on_error="skip") as stream:
            first = [next(stream) for _ in range(stop)]
            snapshot = stream.snapshot()
        with pipe.open(resume=snapshot, on_error="skip") as stream:
            assert len(first + list(stream)) == 32
            assert dict(stream.errors.stages) == {"a/picky": 4, "b/picky": 4}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("options", "mapped"), [({}, False), ({"bytes": 1000}, True)], ids=["items", "bytes"])
def test_several_components_may_wait_for_room_at_once(options: dict[str, int], mapped: bool) -> None:
    """Their strides have one meter, whose waits are told apart by the channels that they wait for."""

    def part(start: int) -> Pipeline[int]:
        pipe = iterated(range(start, start + 60)).prefetch(4, **options)
        return pipe.map(int) if mapped else pipe

    pipe = sl.mix({"a": part(0), "b": part(1000)}).shard(3)
    whole = list(pipe)
    assert sorted(whole) == [*range(60), *range(1000, 1060)]
    for stop in (0, 7, 55):
        with pipe.open() as stream:
            assert [next(stream) for _ in range(stop)] == whole[:stop]
            snapshot = stream.snapshot()
        with pipe.open(resume=snapshot) as stream:
            assert list(stream) == whole[stop:]


def test_a_failing_component_fails_in_its_turn() -> None:
    def fail(item: int) -> int:
        raise ValueError("no")

    parts: dict[str, Pipeline[int]] = {"a": numbers(30), "b": numbers(30, 1000).map(fail)}
    whole = list(sl.mix({"a": numbers(30), "b": numbers(30, 1000)}))
    before = next(at for at, item in enumerate(whole) if item >= 1000)
    with sl.mix(parts).open() as stream:
        assert [next(stream) for _ in range(before)] == whole[:before]
        with pytest.raises(ValueError, match="no") as error:
            next(stream)
    assert "in map(b/fail)" in error.value.__notes__[0]


async def test_no_item_waits_for_one_of_another_component_that_comes_later() -> None:
    taken = anyio.Event()

    async def wait(item: int) -> int:
        await taken.wait()
        return item

    weights = {"a": 9.0, "b": 1.0}
    whole = list(sl.mix({"a": numbers(90), "b": numbers(90, 1000)}, weights))
    before = next(at for at, item in enumerate(whole) if item >= 1000)
    assert before > 0
    async with sl.mix({"a": numbers(90), "b": numbers(90, 1000).map(wait)}, weights).open() as stream:
        with anyio.fail_after(200):
            assert [await anext(stream) for _ in range(before)] == whole[:before]
        taken.set()
        assert [item async for item in stream] == whole[before:]


async def test_a_list_goes_beyond_the_end_of_a_components_list_where_more_is_there() -> None:
    pipe = sl.mix({str(at): numbers(5000, at * 5000) for at in range(8)})
    async with anyio.create_task_group() as group:
        flow = pipe.plan.source.open(Site(Tasks(group)), Part(mode="custom"))
        lengths = [len(chunk.items) async for chunk in pulled(flow)]
        await flow.aclose()
    assert sum(lengths) == 8 * 5000
    full = lengths[: 30_000 // LIST_ITEMS]
    assert full == [LIST_ITEMS] * len(full), "a list ended where a component's did"


async def pulled(flow: Flow[int]) -> AsyncIterator[Chunk[int]]:
    while (chunk := await flow.pull()) is not None:
        yield chunk


def test_numbers_are_the_same_whether_they_are_asked_for_in_turn_or_not() -> None:
    site = Site(cast(Tasks, None), 1, 3)
    in_turn, blocks = Numbers(site), range(5)
    asked = [in_turn.of(7, block * BLOCK, BLOCK).tolist() for block in blocks]
    assert asked == [Numbers(site).of(7, block * BLOCK, BLOCK).tolist() for block in blocks]
    assert [in_turn.of(7, block * BLOCK, BLOCK).tolist() for block in (3, 4, 1)] == [asked[at] for at in (3, 4, 1)]


class Record:
    """A data set that knows how many of its items were asked for."""

    asked = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index


@pytest.mark.parametrize("shards", [1, 3])
def test_a_consumer_that_stops_stops_all_components_within_their_bound(shards: int) -> None:
    records = {"a": Record(), "b": Record()}
    pipe = sl.mix({name: sl.from_items(record) for name, record in records.items()}).shard(shards)

    async def work() -> None:
        async with pipe.open() as stream:
            for _ in range(7):
                await anext(stream)
            await anyio.wait_all_tasks_blocked()

    anyio.run(work)
    assert 7 < sum(record.asked for record in records.values()) <= 7 + pipe.max_in_flight
    one = Record()
    assert sl.mix({"a": sl.from_items(one)}).first(3) == [0, 1, 2]
    assert one.asked <= 9


# What is refused ----------------------------------------------------------------------------------------------------


make: Any = sl.mix  # what a type checker would refuse, too


async def feed() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sl.mix({}), "needs one pipeline at least"),
        (lambda: make(numbers(3)), "takes pipelines by name"),
        (lambda: make({"a": [1]}), "takes pipelines, got list"),
        (lambda: sl.mix({"a": numbers(3).shard(2)}), "'a' has a .shard or a .merge: put them after sl.mix"),
        (lambda: sl.mix({"a": numbers(3).merge()}), "put them after"),
        (lambda: sl.mix({"a": sl.from_stream(feed)}), "'a' is a live feed"),
        (lambda: sl.mix([numbers(3).batch(2, max_wait_s=1)]), "chooses an order"),
        (lambda: mixture({"a": 1, "b": 1}, weights={"a": 1}), r"names each component once \(a, b\), got a"),
        (lambda: mixture({"a": 1}, weights={"a": -1}), "finite and at least 0"),
        (lambda: mixture({"a": 1}, weights={"a": 0}), "they are all 0"),
        (lambda: mixture({"a": 1}, weights={"a": "1"}), "is a number"),
        (lambda: mixture({"a": 1}, weights=3), "a dict by name, or a schedule"),
        (lambda: mixture({"a": 1}, weights=[(1, {"a": 1})]), "begins at 0 and rises"),
        (lambda: mixture({"a": 1}, weights=[(0, {"a": 1}), (0, {"a": 1})]), "begins at 0 and rises"),
        (lambda: mixture({"a": 1}, weights=[{"a": 1}]), "as a schedule is"),
        (lambda: mixture({"a": 1}, stop="last"), "is one of 'first', 'all'"),
        (lambda: mixture({"a": 1}).shard(2, mode="contiguous"), "one of custom"),
        (lambda: mixture({"a": 1}).shuffle(), "has none"),
    ],
)
def test_what_can_not_be_mixed_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises((PlanError, PlanTypeError), match=words):
        make()
