"""Ranks with unequal shards end together: by arithmetic or over a store, in one go or over resumes."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
import streamline.core.pace
from streamline.core.state import CountedStates, trimmed
from streamline.errors import PlanError, PlanTypeError, RanksError
from streamline.runtime.thread_bridge import ConsumerCapacity
from streamline.sharding.end_flow import _Leaving
from streamline.sharding.rank_sync import far
from streamline.testing.scripted import to_elsewhere
from tests.kit import LONGEST_S
from tests.laws.profile import examples
from tests.sharding.kit import MemoryStore, on_ranks, together

Policy = Literal["drop", "pad"]

TEN = sl.from_items(range(10)).shard(4)


def kept(item: int) -> bool:
    return item % 7 not in (1, 3)


def pipeline(length: int, shards: int, *, known: bool, size: int = 0) -> sl.Pipeline[Any]:
    pipe: sl.Pipeline[Any] = sl.from_items(range(length)).shard(shards)
    pipe = pipe if known else pipe.filter(kept)
    return pipe.merge().batch(size, collate=None) if size else pipe


def of_rank(pipe: sl.Pipeline[Any], rank: int, ranks: int) -> list[Any]:
    with pipe.open(rank=rank, world_size=ranks, ends="allow") as stream:
        return list(stream)


def test_waits_for_other_ranks_are_told_from_those_for_a_rank_s_own_items() -> None:
    streams: dict[int, Any] = {}
    go_on = threading.Event()

    class Watched(MemoryStore):
        waits = 0

        def check(self, keys: list[str]) -> bool:
            if 0 in streams and streams[0]._session.meters.consumer.waiting_since is not None:
                self.waits += 1
            if self.waits > 3:  # rank 0 has waited from one look to the next
                go_on.set()
            return super().check(keys)

    ends = sl.Ends("drop", Watched())

    def work(rank: int) -> sl.Stats:
        if rank == 1:
            assert go_on.wait(LONGEST_S)
        with pipeline(30, 2, known=False).open(rank=rank, world_size=2, ends=ends) as stream:
            streams[rank] = stream
            list(stream)
            return stream.stats()

    stats = on_ranks(2, work)[0]
    assert 0 < stats.ranks_wait_s <= stats.consumer_wait_s


@examples(15)
@given(
    st.integers(0, 40),
    st.sampled_from([2, 3, 8]),
    st.booleans(),
    st.sampled_from([0, 0, 3]),
    st.sampled_from(["drop", "pad"]),
    st.lists(st.integers(0, 5), max_size=2),
)
def test_all_ranks_give_as_many_items_however_they_are_interrupted(
    length: int, ranks: int, known: bool, size: int, policy: Policy, stops: list[int]
) -> None:
    pipe = pipeline(length, ranks + 1, known=known, size=size)
    own = [of_rank(pipe, rank, ranks) for rank in range(ranks)]
    counts = [len(items) for items in own]
    count = min(counts) if policy == "drop" else max(counts)
    if policy == "pad" and not min(counts) and count:
        return  # refused: see below
    ends = sl.Ends(policy, MemoryStore())
    found: list[list[Any]] = [[] for _ in range(ranks)]
    padding: list[list[bool]] = [[] for _ in range(ranks)]
    snapshot: sl.Snapshot | None = None
    for most in (*stops, None):
        given = together(pipe, ranks, ends, most, snapshot)
        for rank, (items, padded, _, _) in enumerate(given):
            found[rank] += items
            padding[rank] += padded
        snapshot = sl.Snapshot.of_job([part for _, _, part, _ in given])
    for rank in range(ranks):
        again = [own[rank][at % counts[rank]] for at in range(count - counts[rank])]
        assert found[rank] == own[rank][:count] + again
        assert padding[rank] == [False] * min(count, counts[rank]) + [True] * len(again)
        report = given[rank][3]
        assert report.padded == len(again)
        if known:
            assert report.dropped == max(0, counts[rank] - count)
        else:
            assert report.dropped <= max(0, counts[rank] - count)
            assert report.more or report.dropped == max(0, counts[rank] - count)


@examples(15)
@given(st.integers(9, 40), st.booleans(), st.sampled_from(["drop", "pad"]), st.data())
def test_ranks_that_become_more_or_fewer_end_together_too(
    length: int, known: bool, policy: Policy, data: st.DataObject
) -> None:
    """Nothing twice but padding, nothing lost but what is dropped in the last part."""
    pipe = pipeline(length, 9, known=known)
    ends = sl.Ends(policy, MemoryStore())
    found: list[Any] = []
    snapshot: sl.Snapshot | None = None
    several = [
        ranks for ranks in (1, 2, 3, 8) if policy == "drop" or all(of_rank(pipe, r, ranks) for r in range(ranks))
    ]
    for ranks in data.draw(st.lists(st.sampled_from(several), min_size=1, max_size=3), "ranks"):  # else it is refused
        given = together(pipe, ranks, ends, data.draw(st.integers(0, 3), "most"), snapshot)
        assert len({len(items) for items, _, _, _ in given}) == 1
        found += [item for items, padded, _, _ in given for item, again in zip(items, padded, strict=True) if not again]
        snapshot = sl.Snapshot.of_job([part for _, _, part, _ in given])
    rest, _, _, _ = together(pipe, 1, ends, None, snapshot)[0]
    expected = of_rank(pipe, 0, 1)
    assert Counter(found + rest) == Counter(expected)


def test_ranks_go_on_as_long_as_one_that_counts_has_more() -> None:
    """▲ Of those with the fewest items, under "drop"; of all, under "pad"."""
    assert far("drop", [(3, True), (5, False)]) == (3, True)
    assert far("drop", [(3, False), (3, True)]) == (3, True)
    assert far("drop", [(3, False), (5, True)]) == (3, False)
    assert far("pad", [(3, True), (5, False)]) == (5, False)
    assert far("pad", [(3, True), (5, True)]) == (5, True)


def test_a_rank_that_has_many_lists_more_is_padded_up_to_its_end() -> None:
    pipe = sl.from_items(range(1400)).shard(2).filter(lambda item: item % 2 == 1 or item < 20)
    few, many = [*range(0, 20, 2)], [*range(1, 1400, 2)]
    (mine, padding, *_), (others, *_) = together(pipe, 2, sl.Ends("pad", MemoryStore()))
    assert others == many
    assert mine == (few * 70)[: len(many)]
    assert padding == [at >= len(few) for at in range(len(many))]
    (mine, *_), (others, *_) = together(pipe, 2, sl.Ends("drop", MemoryStore()))
    assert (mine, others) == (few, many[: len(few)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["drop", "pad"])
@pytest.mark.parametrize(
    ("stop", "passes", "pipe"),
    [
        (4, 1, sl.from_items(range(23)).shard(6)),
        (4, 2, sl.from_items(range(23)).shard(6).repeat(2)),
        (0, 2, sl.from_items(range(23)).shard(6).merge().repeat(2)),
        (4, 2, sl.from_items(range(23)).shard(6).merge().repeat(2)),
        (14, 3, sl.from_items(range(23)).shard(6).merge().repeat(3)),
    ],
)
def test_after_another_number_of_ranks_what_is_left_is_counted_exactly(
    stop: int, passes: int, pipe: sl.Pipeline[int], policy: Policy
) -> None:
    first = together(pipe, 2, sl.Ends(policy), stop)
    snapshot = sl.Snapshot.of_job([part for _, _, part, _ in first])
    rest = together(pipe, 3, sl.Ends(policy), None, snapshot)
    counts = [len(of_rank_resumed(pipe, rank, snapshot)) for rank in range(3)]
    assert sum(counts) == 23 * passes - 2 * stop
    end = (min if policy == "drop" else max)(counts)
    for (items, padding, _, report), count in zip(rest, counts, strict=True):
        assert report.agreed == "beforehand"
        assert report.left == len(items) == end
        assert (report.dropped, report.padded) == (max(0, count - end), max(0, end - count))
        assert sum(padding) == report.padded


def of_rank_resumed(pipe: sl.Pipeline[Any], rank: int, snapshot: sl.Snapshot) -> list[Any]:
    with pipe.open(rank=rank, world_size=3, resume=snapshot, ends="allow") as stream:
        return list(stream)


def test_ranks_that_were_saved_at_different_steps_end_together() -> None:
    pipe = sl.from_items(range(21)).shard(2)
    parts = [together(pipe, 2, sl.Ends("drop"), most)[rank][2] for rank, most in enumerate((1, 3))]
    rests = together(pipe, 2, sl.Ends("drop"), None, sl.Snapshot.of_job(parts))
    assert [len(items) for items, *_ in rests] == [7, 7]


def test_each_rank_alone_knows_the_end_from_its_own_snapshot() -> None:
    """As loaders' states are: nobody has the others'."""
    pipe = TEN.merge().shuffle(window=3)
    whole = together(pipe, 3, sl.Ends("drop"))
    first = together(pipe, 3, sl.Ends("drop"), 1)
    for rank, (items, _, part, _) in enumerate(first):
        with pipe.open(rank=rank, world_size=3, resume=part) as stream:
            assert items + list(stream) == whole[rank][0]
            assert stream.ends.left == len(whole[rank][0]) - 1
    assert [len(items) for items, _, _, _ in whole] == [2, 2, 2]


def test_what_ends_together_by_itself_is_left_alone() -> None:
    with sl.from_items(range(12)).shard(4).open(rank=1, world_size=4) as stream:
        assert list(stream) == [1, 5, 9]
        assert stream.ends == sl.EndsReport(policy="drop", agreed="alone")
        assert "ends" not in stream.snapshot().state


def test_a_rank_that_is_alone_gives_everything() -> None:
    for policy in ("drop", "pad", "allow"):
        with TEN.filter(kept).open(ends=policy) as stream:
            assert len(list(stream)) == 7


def test_endless_ranks_have_nothing_to_agree_on() -> None:
    with TEN.merge().repeat().open(rank=0, world_size=3) as stream:
        assert [next(stream) for _ in range(9)]
        assert stream.ends.agreed == "alone"


def test_items_that_are_left_out_because_of_an_error_are_not_counted_beforehand() -> None:
    def check(item: int) -> int:
        if item == 5:
            raise ValueError(item)
        return item

    options: dict[str, Any] = {"on_error": "skip", "max_errors": None}
    pipe = sl.from_items(range(8)).shard(2).map(check)
    with pytest.raises(PlanError, match=r"with on_error=, how many items .* isn't known"):
        pipe.open(rank=0, world_size=2, **options)
    found = together(pipe, 2, sl.Ends("drop", MemoryStore()), **options)
    assert [items for items, _, _, _ in found] == [[0, 2, 4], [1, 3, 7]]


def test_with_nothing_to_talk_over_an_unknown_end_is_refused_with_the_ways_out() -> None:
    with pytest.raises(PlanError, match=r"init_process_group\(\).*mesh=.*sl\.Ends\(store=.*ends=\"allow\""):
        TEN.filter(kept).open(rank=0, world_size=2)


def test_a_rank_without_items_has_nothing_to_pad_with_as_all_ranks_say() -> None:
    """▲ The others gave their items, and waited for ever in their first step."""
    for rank in range(3):
        with pytest.raises(RanksError, match=r"rank 2 of 3 has no items at all"):
            sl.from_items(range(2)).shard(3).open(rank=rank, world_size=3, ends="pad")


def test_a_source_that_has_fewer_items_than_it_says_is_no_end() -> None:
    """▲ The other ranks would wait for its gradients."""

    class Liar:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index

    pipe = sl.from_items(Liar()).shard(3)
    plan = pipe.take(2)
    with plan.open(rank=0, world_size=3) as stream:
        assert list(stream) == [0, 3]
    from streamline.runtime import rank_ends as agreement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "num_left_on_ranks", lambda *_: [4.0, 5.0, 6.0])
        with plan.open(rank=0, world_size=3) as stream, pytest.raises(RanksError, match="2 items fewer came"):
            list(stream)


def test_a_feed_is_not_padded() -> None:
    async def feed() -> Any:
        yield 1

    with pytest.raises(PlanError, match="a feed is read once"):
        sl.from_stream(feed, partitioned=True).shard(2).open(rank=0, world_size=2, ends="pad")


def test_what_is_dropped_or_padded_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pipe = sl.from_items(range(3)).shard(2)
    with caplog.at_level(logging.INFO, "streamline.ending"):
        together(pipe, 2, sl.Ends("drop"))
        together(pipe, 2, sl.Ends("pad"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", 'ends="drop", epoch 0: rank 0 of 2 drops 1 surplus item: another rank has fewer'),
        ("INFO", 'ends="pad", epoch 0: rank 1 of 2 gave 1 item again'),
    ]


@pytest.mark.parametrize("known", [True, False], ids=["beforehand", "on the way"])
@pytest.mark.parametrize("policy", ["drop", "pad"])
def test_stats_tell_what_was_dropped_and_padded_at_every_item(policy: Policy, known: bool) -> None:
    pipe = pipeline(11, 2, known=known)
    ends = sl.Ends(policy, MemoryStore())

    def one(rank: int) -> list[tuple[int, int]]:
        found = []
        with pipe.open(rank=rank, world_size=2, ends=ends) as stream:
            for _ in stream:
                told, stats = stream.ends, stream.stats()
                while told != stream.ends:  # the loop's thread goes on meanwhile
                    told, stats = stream.ends, stream.stats()
                assert (stats.dropped, stats.padded) == (told.dropped, told.padded)
                found.append((stats.dropped, stats.padded))
            stats = stream.stats()
            assert (stats.dropped, stats.padded) == (stream.ends.dropped, stream.ends.padded)
            assert f"{stats.dropped} dropped, {stats.padded} padded" in str(stats) or not stats.dropped + stats.padded
            assert stats.since(stats).padded == 0
        return [*found, (stats.dropped, stats.padded)]

    found = on_ranks(2, one)
    last = [each[-1] for each in found]
    assert sum(dropped for dropped, _ in last) == (1 if policy == "drop" else 0)
    assert sum(padded for _, padded in last) == (1 if policy == "pad" else 0)
    assert [padded for _, padded in found[last.index(max(last))]][-3:] == ([0, 1, 1] if policy == "pad" else [0, 0, 0])


def test_a_loader_tells_in_each_epoch_what_was_dropped_or_padded(caplog: pytest.LogCaptureFixture) -> None:
    pipe = sl.from_items(range(5)).shard(2)
    with caplog.at_level(logging.INFO, "streamline.ending"):
        policies: tuple[tuple[Policy, int], ...] = (("drop", 0), ("pad", 1))
        for policy, rank in policies:
            with pipe.loader(rank=rank, world_size=2, ends=policy, backend=sl.Threads(1)) as loader:
                for _ in range(2):
                    assert len(list(loader)) == (2 if policy == "drop" else 3)
                    stats = loader.stats()
                    assert stats is not None
                    assert (stats.dropped, stats.padded) == ((1, 0) if policy == "drop" else (0, 1))
    said = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert sorted(line for line in said if "epoch 2" not in line) == [  # opened ahead, and perhaps ended
        'ends="drop", epoch 0', 'ends="drop", epoch 1', 'ends="pad", epoch 0', 'ends="pad", epoch 1',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TEN.open(ends="stop"), PlanError, r'is one of "drop", "pad", "allow".*got "stop"'),  # type: ignore[arg-type]
        (lambda: TEN.open(ends=3), PlanTypeError, "got int 3"),  # type: ignore[arg-type]
        (lambda: sl.Ends("drop", object()), PlanTypeError, r"has no set\(\)"),  # type: ignore[arg-type]
        (lambda: sl.Ends(timeout_s=0), PlanError, "more than 0"),
        (lambda: sl.Ends(timeout_s="1"), PlanTypeError, "in seconds"),  # type: ignore[arg-type]
        (lambda: TEN.loader(ends="pad", steps_per_epoch=3), PlanError, "as many items on every rank anyway"),
    ],
)
def test_what_ends_can_not_be_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_rank_whose_items_are_all_given_can_pad_after_a_resume() -> None:
    pipe = sl.from_items(range(3)).shard(2)
    first = together(pipe, 2, sl.Ends("pad"), 1)
    rest = together(pipe, 2, sl.Ends("pad"), None, sl.Snapshot.of_job([part for _, _, part, _ in first]))
    assert [items for items, *_ in rest] == [[2], [1]]


# Over a store -------------------------------------------------------------------------------------------------------


def test_a_rank_that_says_nothing_is_named() -> None:
    ends = sl.Ends("drop", MemoryStore(), timeout_s=0.05)
    with (
        TEN.filter(kept).open(rank=1, world_size=4, ends=ends) as stream,
        pytest.raises(RanksError, match=r"rank 0, 2, 3 of 4 has not said whether .*; rank 1 has waited 0.05 s"),
    ):
        next(stream)


def failures_of(pipe: sl.Pipeline[Any], ends: sl.Ends) -> list[tuple[int, Exception]]:
    """Return of each of three ranks how many items it gave before it failed, and how it did."""

    def work(rank: int) -> tuple[int, Exception]:
        given = 0
        with pipe.open(rank=rank, world_size=3, ends=ends) as stream:
            try:
                for _ in stream:
                    given += 1
            except (RanksError, ValueError) as error:
                return given, error
        raise AssertionError(f"rank {rank} came to an end")

    return on_ranks(3, work)


def test_the_other_ranks_learn_that_one_has_nothing_to_pad_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """▲ They waited for it until their time was out, ten minutes."""
    monkeypatch.setattr(streamline.core.pace, "SLICE_S", math.inf)  # else they may learn it within their items
    for name in ("begin", "note_consumed"):  # nor are the first lists short
        monkeypatch.setattr(ConsumerCapacity, name, lambda capacity, *_, **__: capacity.read_ahead())
    pipe = sl.from_items(range(9)).shard(3).filter(lambda item: item % 3 != 1)
    failures = failures_of(pipe, sl.Ends("pad", MemoryStore()))
    said = 'ends="pad": rank 1 of 3 has no items at all'
    assert [given for given, _ in failures] == [3, 0, 3]
    assert [type(error) for _, error in failures] == [RanksError] * 3
    assert str(failures[1][1]).startswith(said)
    for rank in (0, 2):
        assert str(failures[rank][1]).startswith(
            f'ends="pad": rank 1 of 3 has failed, so that rank {rank} can\'t end together with it: RanksError: {said}'
        )


def test_a_rank_that_fails_tells_the_others_why() -> None:
    def check(item: int) -> int:
        if item == 5:
            raise ValueError("item 5")
        return item

    failures = failures_of(sl.from_items(range(3000)).shard(3).map(check).filter(bool), sl.Ends("drop", MemoryStore()))
    assert failures[2][0] == 1
    assert str(failures[2][1]) == "item 5"
    for rank in (0, 1):
        assert "rank 2 of 3 has failed" in str(failures[rank][1])
        assert str(failures[rank][1]).endswith("ValueError: item 5")


def test_a_failure_that_cannot_be_reported_is_still_that_failure() -> None:
    class Full(MemoryStore):
        def set(self, key: str, value: str) -> None:
            if key.endswith("failed"):
                raise ConnectionError("connection reset")
            super().set(key, value)

    def broken(item: int) -> int:
        raise ValueError(item)

    pipe = sl.from_items(range(4)).shard(2).map(broken).filter(bool)
    with (
        pipe.open(rank=0, world_size=2, ends=sl.Ends("drop", Full())) as stream,
        pytest.raises(ValueError, match="0") as failure,
    ):
        next(stream)
    assert any("the other ranks don't know of it" in note for note in failure.value.__notes__)


def test_time_passes_only_while_the_consumer_waits() -> None:
    """▲ One rank evaluates, or saves, while the others wait for it elsewhere: nobody is late then."""
    store = MemoryStore()
    pipe = TEN.filter(kept)
    with pipe.open(rank=0, world_size=2, ends=sl.Ends("drop", store, timeout_s=0.2)) as early:

        async def later() -> None:
            await anyio.sleep(0.3)

        anyio.run(later)
        late = pipe.open(rank=1, world_size=2, ends=sl.Ends("drop", store)).sync_stream()
        assert next(early) == 0
        late.close()


def test_a_store_that_fails_is_an_error_and_no_end() -> None:
    class Gone(MemoryStore):
        def add(self, key: str, amount: int) -> int:
            raise ConnectionError("connection reset")

    with (
        TEN.filter(kept).open(rank=0, world_size=2, ends=sl.Ends("drop", Gone())) as stream,
        pytest.raises(RanksError, match="can't be asked: connection reset"),
    ):
        next(stream)


def test_a_stream_that_waits_for_others_can_be_left() -> None:
    stream = TEN.filter(kept).open(rank=0, world_size=2, ends=sl.Ends("drop", MemoryStore())).sync_stream()
    stream.close()


def test_little_is_left_in_the_store_and_long_lists_take_few_rounds() -> None:
    store = MemoryStore()
    found = together(sl.from_items(range(20_000)).shard(2).filter(kept), 2, sl.Ends("pad", store))
    assert len({len(items) for items, _, _, _ in found}) == 1
    assert len(store.values) <= 4


def test_epochs_of_loaders_agree_each_anew_and_are_counted_in_their_length() -> None:
    store = MemoryStore()
    pipe = TEN.filter(kept)

    def work(rank: int) -> list[list[Any]]:
        with pipe.loader(rank=rank, world_size=2, ends=sl.Ends("drop", store), backend=sl.Threads(1)) as loader:
            return [list(loader) for _ in range(3)]

    first, second = on_ranks(2, work)
    assert [len(epoch) for epoch in first] == [len(epoch) for epoch in second] == [3] * 3
    assert [len(TEN.loader(rank=rank, world_size=4)) for rank in range(4)] == [2] * 4
    assert [len(TEN.loader(rank=rank, world_size=4, ends="pad")) for rank in range(4)] == [3] * 4
    assert [len(TEN.loader(rank=rank, world_size=4, ends="allow")) for rank in range(4)] == [3, 3, 2, 2]


def test_a_loader_marks_what_is_padding() -> None:
    with TEN.loader(rank=3, world_size=4, ends="pad") as loader:
        assert [(item, loader.padding) for item in loader] == [(3, False), (7, False), (3, True)]
        assert loader.ends is not None
        assert loader.ends.padded == 1


def test_an_async_consumer_is_given_the_same() -> None:
    store = MemoryStore()

    async def one(rank: int, found: list[Any]) -> None:
        async with TEN.filter(kept).open(rank=rank, world_size=2, ends=sl.Ends("pad", store)) as stream:
            async for item in stream:
                found.append((item, stream.padding))  # noqa: PERF401 - of the moment at which it comes

    async def work() -> list[list[Any]]:
        found: list[list[Any]] = [[], []]
        async with anyio.create_task_group() as group:
            for rank in range(2):
                group.start_soon(one, rank, found[rank])
        return found

    assert anyio.run(work) == [
        [(0, False), (2, False), (4, False), (6, False)],
        [(5, False), (7, False), (9, False), (5, True)],
    ]


def test_rank_0_may_look_for_another_item_while_the_others_save(tmp_path: Any) -> None:
    """▲ `state_dict()` of one rank only, between two steps, while the others stand at a barrier."""
    store = MemoryStore()
    pipe = TEN.filter(kept)
    loaders = [pipe.loader(rank=rank, world_size=2, ends=sl.Ends("drop", store)) for rank in range(2)]
    iterators = on_ranks(2, lambda rank: iter(loaders[rank]))
    on_ranks(2, lambda rank: next(iterators[rank]))
    assert loaders[0].state_dict()["at"] == "inside"
    assert on_ranks(2, lambda rank: list(iterators[rank])) == [[2, 4], [7, 9]]
    assert on_ranks(2, lambda rank: loaders[rank].state_dict()["at"]) == ["begin", "begin"]
    for loader in loaders:
        loader.close()


def without_surplus(of_rank: tuple[*tuple[Any, ...], sl.EndsReport]) -> list[Any]:
    """Return what is known of a rank, without how many surplus items had come when it ended, if there may be more."""
    *known, report = of_rank
    return [*known, replace(report, dropped=0) if report.more else report]


@pytest.mark.parametrize("policy", ["drop", "pad"])
def test_ranks_end_together_before_what_goes_to_a_device(policy: Literal["drop", "pad"]) -> None:
    store = MemoryStore()
    known = sl.from_items(range(7)).shard(2, mode="contiguous")  # 4 and 3
    for pipe in (known.merge(), known.filter(lambda item: item < 5 or item == 6).merge()):
        whole = together(pipe, 2, sl.Ends(policy, store=store))
        for transferred in (pipe.transfer("host"), to_elsewhere(pipe)):
            found = together(transferred, 2, sl.Ends(policy, store=store))
            assert list(map(without_surplus, found)) == list(map(without_surplus, whole))
        assert len({len(items) for items, *_ in whole}) == 1


def test_a_stream_that_one_rank_left_before_its_first_item_is_one_that_it_opened() -> None:
    """▲ It had asked for nothing yet: its next stream waited for ever for a rank that was one stream further on."""
    store, pipe = MemoryStore(), TEN.filter(kept)

    def opened(rank: int) -> sl.Opened[int]:
        return pipe.open(rank=rank, world_size=2, ends=sl.Ends("drop", store, timeout_s=3))

    async def rest(rank: int, found: list[Any]) -> None:
        async with opened(rank) as stream:
            found += [item async for item in stream]

    async def work() -> list[list[Any]]:
        found: list[list[Any]] = [[], []]
        async with opened(0) as asking, opened(1), anyio.create_task_group() as group:
            group.start_soon(anext, asking)
            await anyio.to_thread.run_sync(store.called.wait)
            group.cancel_scope.cancel()
        async with anyio.create_task_group() as group:
            for rank in range(2):
                group.start_soon(rest, rank, found[rank])
        return found

    assert anyio.run(work) == [[0, 2, 4], [5, 7, 9]]


def test_a_slice_of_the_states_of_a_list_is_that_slice() -> None:
    """▲ As a list is cut where it crosses to another process: what is left after each item stays the same."""
    column = _Leaving({"policy": "drop", "left": 9}, CountedStates("items", 1))
    states = [column[index].json() for index in range(6)]
    assert [state["ends"]["left"] for state in states] == [8, 7, 6, 5, 4, 3]
    assert [trimmed(column, 2, 3)[index].json() for index in range(3)] == states[2:5]
