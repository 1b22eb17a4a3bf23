"""Duplicates can't be silent: sources that split themselves are watched; of others, no two workers read the same.

Seed 002: with an iterable that every worker reads from its beginning, "No error or warning is raised - training appears
normal while the model trains on duplicated data."
"""

from __future__ import annotations

import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import combinations, count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.duplicate_check import FIRST_ITEMS, MIN_DISTINCT, digest
from streamline.errors import ClosedError, DuplicateWarning, PlanError
from streamline.testing.checks import check_resume
from tests.laws.profile import examples

Shares = Callable[[int, int], Sequence[Any]]
"""From shard and num_shards to the items that a function makes of it."""


def source_of(shares: Shares, *, is_async: bool = False) -> sl.Pipeline[Any]:
    """Return a source that keeps its place, and whose shard is what `shares` says."""

    def rows(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[Any]:
        items = shares(shard, num_shards)
        for n in range(state.get("next", 0), len(items)):
            state["next"] = n + 1
            yield items[n]

    async def later(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[Any]:
        for item in rows(state=state, shard=shard, num_shards=num_shards):
            yield item

    pipe: sl.Pipeline[Any] = sl.source(state=dict)(later if is_async else rows)(name="rows")
    return pipe


def everything(n: int = 100) -> sl.Pipeline[Any]:
    """The mistake: each shard is the whole."""
    return source_of(lambda shard, num_shards: range(n))


def read(pipe: sl.Pipeline[Any], **options: Any) -> tuple[list[Any], list[str]]:
    """Return the items of a pipeline, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pipe.open(**options) as stream:
            items = list(stream)
    assert all(warning.category is DuplicateWarning for warning in caught)
    return items, [str(warning.message) for warning in caught]


# A source that splits itself ------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_source_whose_shards_are_all_the_same_warns_wherever_it_runs(backend: Backend, is_async: bool) -> None:
    """Also behind a shuffle, by which the workers' items are not the same any more."""
    pipe = source_of(lambda shard, num_shards: range(100), is_async=is_async).shard(3).shuffle(window=16).merge()
    items, (warning,) = read(pipe, backend=backend)
    assert sorted(items) == sorted([*range(100)] * 3)
    assert "rows: the first 8 items of shard " in warning
    assert "num_shards" in warning
    assert ("(" in warning.partition("are the same")[0]) is not isinstance(backend, sl.Inline)


def test_a_source_that_splits_itself_does_not_warn(backend: Backend) -> None:
    pipe = source_of(lambda shard, num_shards: range(shard, 100, num_shards)).shard(3)
    items, warned = read(pipe, backend=backend)
    assert (sorted(items), warned) == ([*range(100)], [])


def alarms(shares: Shares, num_shards: int) -> bool:
    """Say what the check should, from its words."""
    heads = [list(shares(shard, num_shards))[:FIRST_ITEMS] for shard in range(num_shards)]
    return any(
        one == other and len(one) == FIRST_ITEMS and len({repr(item) for item in one}) >= MIN_DISTINCT
        for one, other in combinations(heads, 2)
    )


leaves = st.integers(0, 5) | st.sampled_from(["a", "b", b"a", None, 0.5])
rows = st.lists(leaves | st.tuples(leaves, leaves) | st.lists(leaves, max_size=2), max_size=40)


@examples(60)
@given(rows, st.integers(2, 4), st.sampled_from(["splits", "blocks", "ignores", "two ignore"]), st.booleans())
def test_it_warns_if_and_only_if_two_shards_begin_alike(data: list[Any], n: int, how: str, is_async: bool) -> None:
    def shares(shard: int, num_shards: int) -> Sequence[Any]:
        if how == "splits" or (how == "two ignore" and shard not in (0, n - 1)):
            return data[shard::num_shards]
        return data[shard * len(data) // num_shards :][: len(data) // num_shards] if how == "blocks" else data

    _, warned = read(source_of(shares, is_async=is_async).shard(n))
    assert len(warned) == alarms(shares, n)


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("values", [4, 10, 1000])
def test_random_data_with_repetitions_do_not_warn(values: int) -> None:
    drawn = random.Random(values)
    for _ in range(20):
        data = [drawn.randrange(values) for _ in range(100)]
        shares: Shares = lambda shard, num_shards, data=data: data[shard::num_shards]  # type: ignore[misc]  # noqa: E731
        assert read(source_of(shares).shard(8))[1] == []


@pytest.mark.parametrize(
    "items",
    [[0] * 100, [0, 1] * 50, [*range(FIRST_ITEMS - 1)], [object() for _ in range(100)], []],
    ids=["constant", "labels", "short", "unknown", "empty"],
)
def test_what_says_nothing_does_not_warn(items: list[Any]) -> None:
    assert read(source_of(lambda shard, num_shards: items).shard(4))[1] == []


def test_one_shard_alone_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr("streamline.core.duplicate_check.digest", looked.append)
    assert read(everything(20))[0] == [*range(20)]
    assert looked == []


def test_only_the_first_items_of_the_first_pass_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def look(item: object) -> bytes | None:
        looked.append(item)
        return digest(item)

    monkeypatch.setattr("streamline.core.duplicate_check.digest", look)
    pipe = source_of(lambda shard, num_shards: range(shard, 100, num_shards)).shard(2).repeat(3)
    assert len(read(pipe)[0]) == 300
    assert sorted(looked) == [*range(2 * FIRST_ITEMS)]


def test_each_source_warns_once_a_stream_however_often_it_repeats() -> None:
    for pipe in (everything().repeat(3).shard(4), everything().shard(4).repeat(3)):
        items, warned = read(pipe)
        assert (len(items), len(warned)) == (1200, 1)


def test_each_rank_compares_its_own_shards() -> None:
    assert len(read(everything().shard(4), rank=1, world_size=2, ends="allow")[1]) == 1
    assert read(everything().shard(2), rank=1, world_size=2, ends="allow")[1] == []  # the other one is elsewhere


# Resumes --------------------------------------------------------------------------------------------------------------


def test_a_resume_does_not_warn_where_shards_come_alike_later_on(backend: Backend) -> None:
    """Behind a few items of its own, each shard reads what all others do: nothing of that is a beginning."""
    pipe = source_of(lambda shard, num_shards: [-shard - 1, *range(60)]).shard(2)
    with pipe.open(backend=backend) as stream:
        items = [next(stream) for _ in range(2)]
        snapshot = stream.snapshot()
    rest, warned = read(pipe, resume=snapshot, backend=backend)
    assert items == [-1, -2]
    assert (len(rest), warned) == (120, [])


@pytest.mark.long
def test_a_source_with_the_mistake_resumes_exactly_and_silently() -> None:
    """It looks, and changes nothing: the laws hold, and behind a resume nothing begins."""
    check_resume(everything(12).shard(2))
    for pipe in (everything(12).shard(2), everything(12).shard(2).shuffle(window=4)):
        whole, _ = read(pipe)
        for taken in range(1, len(whole), 5):
            with warnings.catch_warnings(), pipe.open() as stream:
                warnings.simplefilter("ignore")
                first = [next(stream) for _ in range(taken)]
                snapshot = stream.snapshot()
            rest, warned = read(pipe, resume=snapshot)
            assert (first + rest, warned) == (whole, [])


# How it comes out -----------------------------------------------------------------------------------------------------


def test_it_names_the_line_of_the_consumers_loop() -> None:
    with pytest.warns(DuplicateWarning) as caught, everything().shard(2).open() as stream:
        for _ in stream:
            pass
    assert [warning.filename for warning in caught] == [__file__]


async def test_it_names_the_line_of_an_async_consumers_loop() -> None:
    with pytest.warns(DuplicateWarning) as caught:
        async for _ in everything().shard(2).merge():
            pass
    assert [warning.filename for warning in caught] == [__file__]


def test_as_an_error_it_comes_out_of_the_loop_and_a_resume_goes_on(backend: Backend) -> None:
    pipe, items = everything().shard(2), list[int]()
    with pipe.open(backend=backend) as stream:
        with pytest.raises(DuplicateWarning, match="are the same"):
            items.extend(stream)
        with pytest.raises(DuplicateWarning, match="are the same"):  # a stream that has failed, as any other
            next(stream)
        snapshot = stream.snapshot()
    rest, warned = read(pipe, resume=snapshot, backend=backend)
    assert sorted(items + rest) == sorted([*range(100)] * 2)
    assert warned == []


async def test_as_an_error_it_comes_out_of_an_async_loop_and_nothing_is_left(backend: Backend) -> None:
    async with everything().shard(2).merge().open(backend=backend) as stream:
        with pytest.raises(DuplicateWarning, match="are the same"):
            async for _ in stream:
                pass
        with pytest.raises(ClosedError):
            await anext(stream)


def test_a_loader_and_a_debugger_warn_too() -> None:
    with pytest.warns(DuplicateWarning):
        assert len(list(everything().shard(2).loader())) == 200
    with pytest.warns(DuplicateWarning):
        assert len(list(everything().shard(2).debug())) == 200


# Impossible by construction -------------------------------------------------------------------------------------------


@examples(15)
@given(st.integers(0, 40), st.integers(1, 8), st.sampled_from([1, 2, 3, 8]))
def test_an_iterable_is_given_once_however_many_workers_and_ranks_open_it(length: int, each: int, ranks: int) -> None:
    """All of them iterate everything, and each keeps its stride: there is no way to have it without."""
    opened = count()

    def rows() -> Iterator[int]:
        next(opened)
        yield from range(length)

    pipe = sl.from_iterable(rows).shard(each * ranks)
    found = [item for rank in range(ranks) for item in read(pipe, rank=rank, world_size=ranks, ends="allow")[0]]
    assert sorted(found) == [*range(length)]
    assert next(opened) == each * ranks


def test_an_iterable_is_given_once_wherever_its_workers_run(backend: Backend) -> None:
    assert read(sl.from_iterable(lambda: range(100)).shard(4), backend=backend) == ([*range(100)], [])


@pytest.mark.parametrize("mode", ["interleaved", "contiguous", "file", "custom", "shared"])
def test_an_iterable_takes_no_mode_in_which_it_has_no_stride(mode: Any) -> None:
    with pytest.raises(PlanError, match=mode):
        sl.from_iterable(lambda: range(100)).shard(4, mode=mode)


@pytest.mark.parametrize("make", [lambda: everything(), lambda: sl.from_iterable(lambda: range(9))])
def test_what_is_not_sharded_is_refused_on_several_ranks(make: Callable[[], sl.Pipeline[Any]]) -> None:
    with pytest.raises(PlanError, match=r"each of the 2 ranks would read everything"):
        make().open(rank=0, world_size=2)


def test_a_stream_has_one_reader_however_many_workers(backend: Backend) -> None:
    reads = []

    async def feed() -> AsyncIterator[int]:
        reads.append("begun")
        for n in range(100):
            yield n

    pipe = sl.from_stream(feed).shard(4)
    assert sorted(read(pipe, backend=backend)[0]) == [*range(100)]
    assert reads == ["begun"]
    with pytest.raises(PlanError, match=r"each of the 2 ranks would read the same feed"):
        pipe.open(rank=0, world_size=2)
