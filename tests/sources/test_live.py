"""Live sources in memory: read once, handed out in turn, resumed from the snapshot's journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.core.item_codec import from_json, read
from streamline.snapshot.inspection import report
from streamline.sources.journal import LEAST_ITEMS, MemoryJournal
from tests.laws.profile import sampled

from .live_kit import Pipe, Tape, rest, some


async def later(x: int) -> int:
    for _ in range(x * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return x


def halves(x: int) -> list[int]:
    return [x, -x - 1]


@sl.stage(state=dict, snapshot_every=3)
async def delayed(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
    async for x in items:
        held = state.setdefault("held", [])
        held.append(x)
        if len(held) == 2:
            state["held"] = []
            for y in held:
                yield y
    for y in state.get("held", ()):
        yield y


STAGES: dict[str, Any] = {
    "map": lambda pipe: pipe.map(later, concurrency=3),
    "unordered": lambda pipe: pipe.map(later, concurrency=3, ordered=False),
    "flat_map": lambda pipe: pipe.flat_map(halves),
    "shuffle": lambda pipe: pipe.shuffle(window=5),
    "filter": lambda pipe: pipe.filter(lambda x: x % 3),
    "batch": lambda pipe: pipe.batch(4, collate=None).unbatch(),
    "custom": lambda pipe: pipe.through(delayed),
    "prefetch": lambda pipe: pipe.prefetch(3),
}


def built(tape: Tape, before: list[str], kind: Any, after: list[str], shards: int) -> Pipe:
    pipe: Pipe = sl.from_stream(tape).shard(shards)
    for name in before:
        pipe = STAGES[name](pipe)
    pipe = pipe.merge(kind)
    for name in after:
        pipe = STAGES[name](pipe)
    return pipe


def expected(length: int, names: list[str]) -> list[int]:
    items = list(range(length))
    for name in names:
        if name == "flat_map":
            items = [y for x in items for y in halves(x)]
        elif name == "filter":
            items = [x for x in items if x % 3]
    return items


@settings(deadline=None, max_examples=25, database=None)
@given(
    before=st.lists(st.sampled_from(sorted(STAGES)), max_size=3),
    kind=st.sampled_from(["strict", "best_effort"]),
    after=st.lists(st.sampled_from(sorted(STAGES)), max_size=2),
    shards=st.integers(1, 4),
    length=st.integers(0, 40),
    parts=st.lists(st.integers(0, 15), min_size=1, max_size=5),
    uvloop=st.booleans(),
)
def test_interrupted_up_to_five_times_nothing_is_lost_or_doubled(
    before: list[str], kind: str, after: list[str], shards: int, length: int, parts: list[int], uvloop: bool
) -> None:
    async def main() -> None:
        tape = Tape(length)
        pipe = built(tape, before, kind, after, shards)
        seen: list[int] = []
        snapshot = None
        for count in parts:
            more, snapshot = await some(pipe, count, snapshot)
            seen += more
        seen += await rest(pipe, snapshot)
        assert sorted(seen) == sorted(expected(length, before + after))
        assert tape.opened == tape.closed

    anyio.run(main, backend_options={"use_uvloop": uvloop})


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("names", [[], ["map"], ["filter"], ["map", "prefetch"]])
async def test_interrupted_at_every_point_a_strict_merge_goes_on_in_the_order_of_the_feed(names: list[str]) -> None:
    for shards in (1, 3):
        whole = [x async for x in built(Tape(25), names, "strict", [], shards)]
        if "filter" not in names:
            assert whole == list(range(25))
        for k in sampled(range(len(whole) + 1), 4):
            pipe = built(Tape(25), names, "strict", [], shards)
            head, snapshot = await some(pipe, k)
            assert head + await rest(pipe, snapshot) == whole


async def test_after_the_end_of_a_worker_the_others_are_fed_in_turn() -> None:
    @sl.stage(stateless=True)
    async def up_to_three(items: AsyncIterator[int]) -> AsyncIterator[int]:
        async for item in items:
            yield item
            if item == 3:
                return

    found = await rest(sl.from_stream(Tape(60), max_ahead=2).shard(3).through(up_to_three).merge(), None)
    assert found[:5] == [0, 1, 2, 3, 4]
    assert found == sorted(found)


def test_a_plain_loop_is_resumed_from_the_snapshot_after_it() -> None:
    tape = Tape(100)
    pipe = sl.from_stream(tape).shard(3).filter(lambda x: x % 2).merge().batch(3, collate=None)
    seen: list[list[int]] = []
    snapshot = None
    for _ in range(5):
        with pipe.open(resume=snapshot) as stream:
            seen += [next(stream) for _ in range(2)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with pipe.open(resume=snapshot) as stream:
        seen += list(stream)
    assert sorted(x for batch in seen for x in batch) == list(range(1, 100, 2))


async def test_a_snapshot_inside_the_loop_has_all_that_was_read_so_far() -> None:
    tape = Tape(40, hold_at=30)
    pipe = sl.from_stream(tape).shard(2).merge()
    async with pipe.open() as stream:
        seen = [await anext(stream) for _ in range(7)]
        await tape.held.wait()
        snapshot = stream.snapshot()
    assert snapshot.journal is not None
    assert snapshot.journal["read"] == 30
    tape.hold_at = None
    assert seen + await rest(pipe, snapshot) == list(range(40))


async def test_a_snapshot_resumed_twice_has_its_journal_both_times() -> None:
    tape = Tape(40, hold_at=20)
    pipe = sl.from_stream(tape).shard(2).merge()
    async with pipe.open() as stream:
        for _ in range(5):
            await anext(stream)
        await tape.held.wait()
    snapshot = stream.snapshot()
    tape.hold_at = None
    assert await rest(pipe, snapshot) == list(range(5, 40))
    assert await rest(pipe, snapshot) == list(range(5, 20))


async def test_the_end_of_the_feed_ends_all_workers_and_a_resume_reads_on() -> None:
    tape = Tape(10)
    pipe = sl.from_stream(tape).shard(3).merge()
    seen, snapshot = await some(pipe, 100)
    assert seen == list(range(10))
    assert snapshot.journal is not None
    assert [worker["items"] for worker in snapshot.journal["workers"]] == [[], [], []]
    tape.length = 15  # the feed has more by now
    assert await rest(pipe, snapshot) == list(range(10, 15))


async def test_a_map_that_changes_items_in_place_is_resumed_with_the_items_as_they_came() -> None:
    def spoil(record: dict[str, Any]) -> dict[str, Any]:
        record["x"].append("seen")
        return record

    tape = Tape(12, lambda x: {"x": [x]})
    pipe = sl.from_stream(tape).shard(2).map(spoil).shuffle(window=4).merge()
    head, snapshot = await some(pipe, 5)
    items = head + await rest(pipe, snapshot)
    assert sorted(item["x"][0] for item in items) == list(range(12))
    assert all(item["x"][1:] == ["seen"] for item in items)


# Whose turn -----------------------------------------------------------------------------------------------------------


async def test_items_are_handed_out_in_turn_and_read_once() -> None:
    tape = Tape(9)
    pipe = sl.from_stream(tape).shard(3).batch(3, collate=None).merge()
    assert [batch async for batch in pipe] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert tape.opened == 1


async def test_a_worker_that_has_taken_its_share_is_passed_over_from_then_on() -> None:
    tape = Tape(1000)
    pipe = sl.from_stream(tape).shard(2).filter(lambda x: x % 2 or x > 20).take(5).merge()
    seen = [x async for x in pipe]
    assert len(seen) == 10
    assert len(set(seen)) == 10
    assert tape.at < 1000
    assert tape.closed == 1


async def test_when_all_workers_have_ended_the_reader_ends_though_the_feed_is_quiet() -> None:
    tape = Tape(100, hold_at=50)
    seen = [x async for x in sl.from_stream(tape).shard(2).take(3).merge()]
    assert seen == list(range(6))
    assert tape.closed == 1


async def test_a_resume_hands_nothing_to_a_worker_that_had_ended() -> None:
    def even_or_late(x: int) -> bool:
        return x % 2 == 0 or x > 30

    tape = Tape(1000)
    pipe = sl.from_stream(tape, max_ahead=8).shard(2).filter(even_or_late).take(10).merge("best_effort", max_lead=50)
    seen = []
    async with pipe.open() as stream:
        while True:
            seen.append(await anext(stream))
            snapshot = stream.snapshot()
            assert snapshot.journal is not None
            if any(ended := [worker["ended"] for worker in snapshot.journal["workers"]]):
                break
    assert not all(ended)
    read = tape.at
    more = await rest(pipe, snapshot)
    assert len(seen + more) == 20
    fresh = [x for x in more if x >= read]
    assert fresh == [x for x in range(read, 1000) if even_or_late(x)][: len(fresh)]  # all of them, not every second one
    assert fresh


async def test_a_reader_whose_consumer_stops_stops_too() -> None:
    tape = Tape(100_000)
    async with sl.from_stream(tape).shard(2).map(lambda x: x).merge().open() as stream:
        assert await anext(stream) == 0
        for _ in range(5_000):
            await anyio.lowlevel.checkpoint()
        assert tape.at <= 2 * (512 + 512 + 256) + 1


# Starvation -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("kind", ["strict", "best_effort"])
@pytest.mark.parametrize("dropped", [1_500])
async def test_a_worker_that_drops_many_in_a_row_holds_no_other_up(kind: Any, dropped: int) -> None:
    length = 4 * dropped
    pipe = sl.from_stream(Tape(length, pause=100)).shard(2).filter(lambda x: x % 2 or x >= 2 * dropped).merge(kind)
    with anyio.fail_after(200):
        seen = [x async for x in pipe]
    assert sorted(seen) == [x for x in range(length) if x % 2 or x >= 2 * dropped]


async def test_the_reader_waits_at_a_full_queue_while_no_worker_starves() -> None:
    release = asyncio.Event()

    async def hold(x: int) -> int:
        if x == 0:
            await release.wait()
        return x

    tape = Tape(50_000)
    pipe = sl.from_stream(tape).shard(2).map(hold).merge()
    async with pipe.open() as stream:
        with anyio.move_on_after(0.05):
            await anext(stream)
        for _ in range(2_000):
            await anyio.lowlevel.checkpoint()
        stopped = tape.at
        assert stopped <= 2 * 512 + 2 * 512 + 256  # worker 0 is busy: it doesn't starve
        release.set()
        assert [await anext(stream) for _ in range(10)] == list(range(10))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"max_ahead": 50}, {"max_ahead_bytes": 50 * 16}])
async def test_beyond_max_ahead_the_worker_that_starves_is_named_and_nothing_is_lost(options: dict[str, Any]) -> None:
    def drop_even(x: int) -> bool:
        return x % 2 == 1 or x >= 2_000

    tape = Tape(2_100)
    pipe = sl.from_stream(tape, **options).shard(2).filter(drop_even).merge()
    async with pipe.open() as stream:
        with pytest.raises(
            sl.errors.WorkerStarved, match=r"shard 0 \(filter\(drop_even\)\).*5\d read ahead.*best_effort"
        ):
            await anext(stream)
        snapshot = stream.snapshot()
    assert isinstance(snapshot, sl.Snapshot)
    wider = sl.from_stream(tape).shard(2).filter(drop_even).merge()
    assert sorted(await rest(wider, snapshot)) == [x for x in range(2_100) if drop_even(x)]


async def test_every_worker_may_have_one_item_however_large() -> None:
    pipe = sl.from_stream(Tape(20, lambda x: bytes([x]) * 1000), max_ahead_bytes=1).shard(3).merge()
    assert [x[0] async for x in pipe] == list(range(20))


# The journal in memory ------------------------------------------------------------------------------------------------


@pytest.fixture
def journal_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries in the journal in memory after each that was added."""
    lengths: list[int] = []
    append = MemoryJournal.append

    def watched(self: MemoryJournal, entry: Any) -> None:
        append(self, entry)
        lengths.append(len(self))

    monkeypatch.setattr(MemoryJournal, "append", watched)
    return lengths


@pytest.mark.long
async def test_a_filter_that_passes_hardly_anything_keeps_the_journal_small(journal_lengths: list[int]) -> None:
    length = 15_000
    pipe = sl.from_stream(Tape(length, pause=100)).shard(2).filter(lambda x: x == length - 2).merge()
    assert [x async for x in pipe] == [length - 2]
    assert max(journal_lengths) <= 2 * (512 + 512 + 256) * 4 + LEAST_ITEMS


@pytest.mark.long
async def test_without_a_snapshot_the_journal_stays_as_short_as_what_is_in_flight(journal_lengths: list[int]) -> None:
    count = 0
    async for _ in sl.from_stream(Tape(12_000)).shard(2).merge():
        count += 1
    assert count == 12_000
    assert max(journal_lengths) <= 10_000


ITEMS: list[Any] = [
    None, True, 0, -(2**200), 2**63, 1.5, float("inf"), "text \udc80 \0", "", b"\0bytes", [], {}, [1, [2, {"a": None}]],
    {"x": 1e300, "big": 2**100},
]  # fmt: skip


async def test_items_of_all_kinds_come_back_as_they_were() -> None:
    pipe = sl.from_stream(Tape(len(ITEMS), lambda x: ITEMS[x]))
    async with pipe.prefetch(100).open() as stream:
        first = await anext(stream)
        snapshot = stream.snapshot()
        while snapshot.journal is None or snapshot.journal["read"] < len(ITEMS):
            await anyio.lowlevel.checkpoint()
            snapshot = stream.snapshot()
    again = await rest(pipe.prefetch(100), sl.Snapshot.from_json(snapshot.to_json()))
    assert [first, *again] == ITEMS
    assert [type(x) for x in [first, *again]] == [type(x) for x in ITEMS]


ARRAYS: list[Any] = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.ones((2, 3), np.int8)),
    np.array(3.5),
    np.zeros((0, 4), np.uint16),
    np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array(["2026-01-01"], dtype="datetime64[D]"),
]


async def test_arrays_come_back_as_they_were_though_a_map_changes_them() -> None:
    def zero(array: Any) -> Any:
        if array.dtype == np.float32:
            array[:] = 0
        return array

    pipe = sl.from_stream(Tape(len(ARRAYS), lambda x: ARRAYS[x].copy(order="K"))).map(zero).shuffle(window=10)
    _, snapshot = await some(pipe, 0)
    async with pipe.open(resume=snapshot) as stream:
        _ = await anext(stream)
    snapshot = stream.snapshot()
    assert snapshot.journal is not None
    forms = snapshot.journal["workers"][0]["items"]
    assert [form[0] for form in forms] == ["a"] * len(ARRAYS)
    for form, array in zip(forms, ARRAYS, strict=True):
        back = read(from_json(form))
        assert back.dtype == array.dtype
        assert back.flags.f_contiguous == array.flags.f_contiguous
        np.testing.assert_array_equal(back, array)


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


async def test_with_encode_and_decode_anything_is_journalled() -> None:
    pipe = sl.from_stream(Tape(20, Point), encode=lambda p: {"x": p.x}, decode=lambda form: Point(form["x"]))
    sharded = pipe.shard(2).shuffle(window=3).merge()
    head, snapshot = await some(sharded, 6)
    items = head + await rest(sharded, snapshot)
    assert all(isinstance(item, Point) for item in items)
    assert sorted(item.x for item in items) == list(range(20))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ((1, 2), "tuple"),
        ({"a": [1, (2,)]}, r"\['a'\], \[1\]: expected .* got tuple"),
        ({1: 2}, "key 1"),
        (Point(1), "Point"),
        (np.float64(1), "float64"),
        ({"a": np.zeros(1)}, "ndarray"),
        (np.array([Point(1)]), "object"),
        (bytearray(b"x"), "bytearray"),
        ({1}, "set"),
        ({"x": 10**5000}, "digits"),
    ],
)
async def test_an_item_that_would_come_back_as_something_else_is_refused_with_the_way_out(
    item: Any, words: str
) -> None:
    with pytest.raises(sl.errors.PlanTypeError, match=f"(?s){words}.*encode=.*decode=") as caught:
        _ = [x async for x in sl.from_stream(Tape(3, lambda x: item if x == 1 else x))]
    assert "at item 2" in caught.value.__notes__[0]


async def test_what_encode_makes_is_checked_too() -> None:
    with pytest.raises(sl.errors.PlanTypeError, match=r"encode= made of int can't be kept.*tuple"):
        _ = [x async for x in sl.from_stream(Tape(3), encode=lambda x: (x,), decode=lambda form: form)]


async def test_an_item_in_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(sl.errors.PlanTypeError, match="in itself"):
        _ = [x async for x in sl.from_stream(Tape(1, lambda x: loop))]


# Failure and leaving --------------------------------------------------------------------------------------------------


class MineError(Exception):
    pass


async def test_a_failure_of_the_feed_comes_after_all_items_before_it_and_a_resume_goes_on() -> None:
    tape = Tape(30)

    async def failing() -> AsyncIterator[int]:
        async for x in tape():
            yield x
            if x == 16:
                raise MineError("gone")

    seen = []
    with pytest.raises(MineError) as caught:  # noqa: PT012 - the loop is what raises
        async with sl.from_stream(failing).shard(3).map(lambda x: x).merge().open() as stream:
            async for x in stream:
                seen.append(x)  # noqa: PERF401 - a comprehension would lose them
    assert seen == list(range(17))
    assert "in stream, read for all workers" in caught.value.__notes__[0]
    assert "at item 18" in caught.value.__notes__[0]
    mended = sl.from_stream(tape).shard(3).map(lambda x: x).merge()
    assert await rest(mended, stream.snapshot()) == list(range(17, 30))


@pytest.mark.parametrize("error", [StopIteration("mine"), asyncio.CancelledError("mine")])
async def test_what_looks_like_an_end_out_of_the_feed_is_a_failure(error: BaseException) -> None:
    class Feed:
        def __aiter__(self) -> Feed:
            return self

        async def __anext__(self) -> int:
            raise error

    with pytest.raises((sl.errors.StageError, RuntimeError)):
        _ = [x async for x in sl.from_stream(Feed())]


async def test_a_failing_stage_leaves_its_items_in_the_journal() -> None:
    tape = Tape(20)

    def fail_at_7(x: int) -> int:
        if x == 7 and not mended:
            raise MineError
        return x

    mended = False
    pipe = sl.from_stream(tape).shard(2).map(fail_at_7).merge()
    seen = []
    with pytest.raises(MineError):  # noqa: PT012 - the loop is what raises
        async with pipe.open() as stream:
            async for x in stream:
                seen.append(x)  # noqa: PERF401
    assert seen == list(range(7))
    mended = True
    assert await rest(pipe, stream.snapshot()) == list(range(7, 20))


@pytest.mark.parametrize("way", ["break", "exception", "cancel", "plain"])
async def test_leaving_in_any_way_closes_the_feed(way: str) -> None:
    tape = Tape(1000, hold_at=20)
    pipe = sl.from_stream(tape).shard(2).merge()
    if way == "plain":
        tape.hold_at = None
        with pipe.open() as plain:
            assert next(plain) == 0
    elif way == "cancel":
        async with asyncio.timeout(None) as timeout:
            try:
                async with pipe.open() as stream:
                    await anext(stream)
                    timeout.reschedule(0)
                    async for _ in stream:
                        await tape.held.wait()
            except asyncio.CancelledError:
                pass
    else:
        try:
            async with pipe.open() as stream:
                async for _ in stream:
                    await tape.held.wait()
                    if way == "exception":
                        raise MineError
                    break
        except MineError:
            assert way == "exception"
    assert tape.opened == tape.closed == 1


async def test_a_timed_out_anext_on_a_quiet_feed_changes_nothing() -> None:
    tape = Tape(10, hold_at=4)
    async with sl.from_stream(tape).shard(2).merge().open() as stream:
        seen = [await anext(stream) for _ in range(4)]
        for _ in range(3):
            with anyio.move_on_after(0.01):
                await anext(stream)
        tape.go.set()
        assert seen + [x async for x in stream] == list(range(10))


async def test_nothing_is_read_before_the_first_item_is_asked_for() -> None:
    tape = Tape(3)
    async with sl.from_stream(tape).open() as stream:
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert tape.opened == 0
        assert stream.snapshot().journal is not None


async def test_an_iterator_can_be_read_by_one_opening_only() -> None:
    pipe = sl.from_stream(Tape(10)())
    _, snapshot = await some(pipe, 3)
    with pytest.raises(sl.errors.PlanError, match=r"an iterator \(async_generator\).*function that makes a new one"):
        pipe.open(resume=snapshot)


def test_first_reads_the_first_items_and_closes_the_feed() -> None:
    tape = Tape(10)
    assert sl.from_stream(tape).shard(2).merge().first(3) == [0, 1, 2]
    assert tape.closed == 1


# Plans ----------------------------------------------------------------------------------------------------------------


def test_a_plan_says_how_a_feed_is_read() -> None:
    pipe = sl.from_stream(Tape(1), max_ahead=100).shard(4).map(later).merge()
    assert (
        "shard into 4 (shared): read once by one reader, handed out to 4 workers in turn; journalled in memory"
        in repr(pipe)
    )
    assert "for one worker; journalled in there" in repr(sl.from_stream(Tape(1), journal="there"))
    assert pipe.max_in_flight >= 400


async def test_several_ranks_need_a_feed_each() -> None:
    pipe = sl.from_stream(Tape(10)).shard(2).merge()
    with pytest.raises(sl.errors.PlanError, match=r"each of the 2 ranks would read the same feed.*partitioned=True"):
        pipe.open(rank=0, world_size=2)
    for rank in (0, 1):
        own = sl.from_stream(Tape(10), partitioned=True).shard(4).merge()
        async with own.open(rank=rank, world_size=2, ends="allow") as stream:
            seen = [await anext(stream) for _ in range(4)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        assert snapshot.journal is not None
        assert [worker["shard"] for worker in snapshot.journal["workers"]] == [rank, rank + 2]
        async with own.open(rank=rank, world_size=2, resume=snapshot, ends="allow") as stream:
            assert seen + [x async for x in stream] == list(range(10))


async def undeclared(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for x in items:
        yield x


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda pipe: pipe.repeat(), r"\.repeat .* reconnect in the stream itself"),
        (lambda pipe: pipe.shard(2).repeat(2), r"\.repeat"),
        (lambda pipe: pipe.repeat(2).shard(2), r"\.repeat"),
        (lambda pipe: pipe.shard(2).merge().repeat(2), r"\.repeat"),
        (lambda pipe: pipe.shuffle_files(), "list of files"),
        (lambda pipe: pipe.shuffle(), r"\.shuffle\(window=n\)"),
        (lambda pipe: pipe.shuffle().shard(2), r"\.shuffle\(window=n\)"),
        (lambda pipe: pipe.take(3).shard(2), r"`.take` before `.shard`"),
        (lambda pipe: pipe.skip(3).shard(2), r"`.skip` before `.shard`"),
        (lambda pipe: pipe.map(later).shard(2), "move it after `.shard`"),
        (lambda pipe: pipe.through(undeclared), r"undeclared from its start.*@sl.stage"),
        (lambda pipe: pipe.shard(2, mode="interleaved"), "shared"),
        (lambda pipe: pipe.shard(2, drop_remainder=True), "how many items"),
        (lambda pipe: sl.from_items([1]).shard(2, mode="shared"), "interleaved"),
        (lambda pipe: pipe.open(epoch=1), "one epoch"),
    ],
)
def test_what_needs_the_feed_twice_is_refused_where_it_is_written(write: Any, words: str) -> None:
    with pytest.raises(sl.errors.PlanError, match=words):
        write(sl.from_stream(Tape(1)))


async def coroutine() -> AsyncIterator[int]:
    return Tape(1)()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ([[1, 2]], {}, "async iterable.*got list"),
        ([iter([1])], {}, r"anyio.to_thread.run_sync\(next"),
        ([coroutine], {}, "async generator that awaits"),
        ([None], {}, "NoneType"),
        ([Tape(1)], {"encode": len}, "encode= and decode= together"),
        ([Tape(1)], {"encode": 3, "decode": len}, r"encode=\) is a function"),
        ([Tape(1)], {"encode": later, "decode": len}, "sync function"),
        ([Tape(1)], {"max_ahead": 0}, "at least 1"),
        ([Tape(1)], {"max_ahead": 1.5}, "integer"),
        ([Tape(1)], {"max_ahead_bytes": 0}, "at least 1"),
        ([Tape(1)], {"partitioned": 1}, "bool"),
        ([Tape(1)], {"journal": 3}, "directory"),
        ([Tape(1)], {"journal": ""}, "directory"),
        ([Tape(1)], {"name": "merge"}, "name"),
    ],
)
def test_options_are_checked_where_they_are_written(arguments: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(sl.errors.PlanError, match=words):
        sl.from_stream(*arguments, **options).map(abs)


@pytest.mark.parametrize("made", [[1, 2], None, iter([1])])
async def test_a_function_that_makes_something_else_is_refused(made: Any) -> None:
    with pytest.raises(sl.errors.PlanTypeError, match="expected from_stream's function to return"):
        _ = [x async for x in sl.from_stream(lambda: made)]


async def test_a_function_that_returns_a_coroutine_is_told_the_way_out() -> None:
    with pytest.raises(sl.errors.PlanTypeError, match="async generator that awaits"):
        await rest(sl.from_stream(lambda: coroutine()), None)  # type: ignore[arg-type, return-value]


async def test_another_plan_or_another_kind_of_journal_is_refused() -> None:
    pipe = sl.from_stream(Tape(10)).shard(2).merge()
    _, snapshot = await some(pipe, 3)
    with pytest.raises(sl.errors.ResumeError, match="another plan"):
        sl.from_stream(Tape(10)).shard(3).merge().open(resume=snapshot)
    with pytest.raises(sl.errors.ResumeError, match="partitioned"):
        sl.from_stream(Tape(10), partitioned=True).shard(2).merge().open(resume=snapshot)
    changes: list[dict[str, Any]] = [{"read": -1}, {"next": 7}, {"workers": []}, {"more": 1}]
    for change in changes:
        body = json.loads(snapshot.to_json())
        body["journal"].update(change)
        damaged = sl.Snapshot.from_json(json.dumps(body))
        with pytest.raises(sl.errors.SnapshotError, match="journal is damaged"):
            await rest(pipe, damaged)
    body = json.loads(snapshot.to_json())
    body["journal"]["workers"][0]["items"] = [["z", "?"]]
    for item in (["j", "{"], ["j", "[" * 100_000], ["j", '{"a": '], ["a", "AAAA"], ["b", "A"]):
        changed = {**body, "journal": {**body["journal"], "workers": [dict(one) for one in body["journal"]["workers"]]}}
        changed["journal"]["workers"][0]["items"] = [item]
        with pytest.raises(sl.errors.SnapshotError, match="the snapshot's journal is damaged, or was edited"):
            await rest(pipe, sl.Snapshot.from_json(json.dumps(changed)))
    with pytest.raises(sl.errors.SnapshotError, match="expected an item"):
        await rest(pipe, sl.Snapshot.from_json(json.dumps(body)))
    del body["journal"]
    with pytest.raises(sl.errors.ResumeError, match="no journal"):
        await rest(pipe, sl.Snapshot.from_json(json.dumps(body)))


async def test_snapshots_of_other_sources_have_no_journal() -> None:
    async with sl.from_items(range(3)).open() as stream:
        snapshot = stream.snapshot()
    assert snapshot.journal is None
    assert "journal" not in json.loads(snapshot.to_json())
    snapshot.saved()  # nothing to do


async def test_inspect_says_what_is_in_the_journal() -> None:
    tape = Tape(30, hold_at=20)
    async with sl.from_stream(tape).shard(2).merge().open() as stream:
        for _ in range(5):
            await anext(stream)
        await tape.held.wait()
        snapshot = stream.snapshot()
    assert "journal  15 items, 25 bytes here, not yet past every stage; 20 read in all, shard 0 is next" in report(
        snapshot
    )


# Pauses ---------------------------------------------------------------------------------------------------------------


async def test_a_quiet_feed_delays_no_pause_and_items_meanwhile_are_handed_out_after_it() -> None:
    tape = Tape(30, hold_at=10)
    async with sl.from_stream(tape).shard(2).merge().open() as stream:
        seen = [await anext(stream) for _ in range(10)]
        await tape.held.wait()
        async with stream.paused() as at_work:
            assert not at_work
            tape.go.set()
            while tape.at == 10:
                await anyio.lowlevel.checkpoint()
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert tape.at == 11
            snapshot = stream.snapshot()
        assert seen + [x async for x in stream] == list(range(30))
    assert snapshot.journal is not None
    assert snapshot.journal["read"] == 11
    assert await rest(sl.from_stream(Tape(0)).shard(2).merge(), snapshot) == [10]
