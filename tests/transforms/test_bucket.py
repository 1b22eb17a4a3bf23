"""Batches by length: what is in them, where a resume goes on, and what is no length."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError, ResumeError
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from streamline.testing.scripted import Script
from tests.kit import stopped
from tests.laws.profile import examples

Item = tuple[int, int]
"""The ordinal, and the length that it is said to have."""

lengths = st.lists(st.integers(0, 12), max_size=40)
edges = st.lists(st.integers(0, 11), unique=True, max_size=4).map(sorted)


def size_of(item: Item) -> int:
    return item[1]


def expected(items: list[Item], bounds: list[int], sizes: list[int], drop: bool) -> list[list[Item]]:
    """Return the batches, worked out bucket by bucket rather than item by item."""
    members: dict[int, list[Item]] = defaultdict(list)
    for item in items:
        members[min([at for at, bound in enumerate(bounds) if item[1] <= bound], default=len(bounds))].append(item)
    full: list[list[Item]] = []
    rests: list[list[Item]] = []
    for bucket in sorted(members):
        for start in range(0, len(members[bucket]), sizes[bucket]):
            batch = members[bucket][start : start + sizes[bucket]]
            (full if len(batch) == sizes[bucket] else rests).append(batch)
    return sorted(full, key=lambda batch: batch[-1][0]) + ([] if drop else rests)


@examples(15)
@given(lengths, edges, st.data(), st.booleans())
def test_batches_are_those_of_each_bucket_also_resumed_several_times_in_a_row(
    found: list[int], bounds: list[int], data: st.DataObject, drop: bool
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    items = list(enumerate(found))
    pipe = sl.from_items(items).bucket_by_length(bounds, sizes, length=size_of, collate=None, drop_remainder=drop)
    wanted = expected(items, bounds, sizes, drop)
    assert list(pipe) == wanted
    for every in (1, 2, 5):
        batches, snapshot = stopped(pipe, every)
        for _ in range(len(wanted) // every + 1):
            more, snapshot = stopped(pipe, every, snapshot)
            batches += more
        assert batches == wanted
        assert stopped(pipe, 9, snapshot)[0] == []


@examples(8)
@given(lengths, edges, st.integers(1, 4), st.integers(0, 1000))
def test_a_resume_is_exact_after_a_merge_that_chooses(
    found: list[int], bounds: list[int], size: int, seed: int
) -> None:
    shards = tuple(tuple(enumerate(found[shard::3], 100 * shard)) for shard in range(3))
    source: Pipeline[Any] = Pipeline(Script(shards=shards, schedule=(0, 2, 1)))
    merged = source.shard(3).merge("best_effort", max_lead=3)
    pipe = merged.bucket_by_length(bounds, size, length=size_of, collate=None)
    check_resume(pipe, seed=seed, generations=2)
    batches, snapshot = stopped(pipe, 2)
    for _ in range(len(found) + 1):  # a few times more often than there are batches
        more, snapshot = stopped(pipe, 2, snapshot)
        batches += more
        if not more:
            break
    assert Counter(item for batch in batches for item in batch) == Counter(item for shard in shards for item in shard)


@examples(5)
@given(lengths, edges)
def test_after_an_unordered_map_and_before_stages_that_rewind(found: list[int], bounds: list[int]) -> None:
    items = sl.from_items(list(enumerate(found))).shard(2).map(late, concurrency=3, ordered=False).merge()
    check_resume(items.bucket_by_length(bounds, 3, length=size_of, collate=None).unbatch())


async def late(item: Item) -> Item:
    return item


def test_a_state_says_what_is_held_and_a_resume_reads_back_to_the_oldest() -> None:
    read: list[int] = []

    def seen(n: int) -> int:
        read.append(n)
        return n

    pipe = sl.from_items(range(100)).map(seen).bucket_by_length([0], 4, length=lambda n: int(n != 7), collate=None)
    batches, snapshot = stopped(pipe, 6)
    assert batches[-1] == [21, 22, 23, 24]
    assert snapshot.worker_states[0]["bucket_by_length"] == {"read": 18, "held": [[0, 1]]}
    assert "reads 18 items again, from the oldest one that was in no batch, and passes over the 17 of them" in str(
        pipe.explain(snapshot)
    )
    read.clear()
    assert stopped(pipe, 1, snapshot)[0] == [[25, 26, 27, 28]]
    assert read[0] == 7


def test_a_state_is_as_small_as_the_buckets_however_long_one_item_waits() -> None:
    items = [1] + [0] * 20_000
    pipe = sl.from_items(items).bucket_by_length([0], 64, length=int, collate=None)
    batches, snapshot = stopped(pipe, 300)
    assert snapshot.worker_states[0]["bucket_by_length"] == {"read": 300 * 64 + 1, "held": [[0, 1]]}
    assert len(batches) + len(stopped(pipe, 1000, snapshot)[0]) == 20_000 // 64 + 2


def test_at_the_end_the_rests_come_by_bucket_and_nothing_is_reread_after_the_last() -> None:
    pipe = sl.from_items(["aaa", "b", "cc", "d", "eeee"]).bucket_by_length([1, 3], 9, collate=None)
    batches, snapshot = stopped(pipe, 9)
    assert batches == [["b", "d"], ["aaa", "cc"], ["eeee"]]
    assert snapshot.worker_states[0]["bucket_by_length"] == {"read": 0, "held": []}
    dropping = sl.from_items(["a", "bb", "c"]).bucket_by_length([1], 2, collate=None, drop_remainder=True)
    assert stopped(dropping, 9)[1].worker_states[0]["bucket_by_length"]["dropped"] == 1


def test_long_items_come_in_small_batches_and_arrays_are_stacked() -> None:
    arrays = [np.full(size, size) for size in (2, 5, 2, 5, 2, 2)]
    batches = list(sl.from_items(arrays).bucket_by_length([2], [4, 1]))
    assert [batch.shape for batch in batches] == [(1, 5), (1, 5), (4, 2)]
    with pytest.raises(DataError, match="a batch needs arrays of one shape"):
        list(sl.from_items(arrays).bucket_by_length([8], 6))


def test_the_plan_counts_what_all_buckets_hold() -> None:
    items = sl.from_items(range(9))
    pipe = items.bucket_by_length([3, 5], [8, 4, 2], length=int, collate=None)
    wider = items.plan.worker_widest(1) - items.plan.worker_capacity(1)  # as no channel of batches is
    assert pipe.max_in_flight - (items.max_in_flight - wider) == 14
    assert "bucket_by_length(boundaries=(3, 5), batch_size=(8, 4, 2), collate=None)" in str(pipe)


def failing(item: Any) -> Any:
    return {"a": 1, "b": 1 / 0 if item == "b" else 2}[item] if isinstance(item, str) else item


@pytest.mark.parametrize(
    ("bad", "length", "error", "words"),
    [
        ("b", failing, ZeroDivisionError, "division by zero"),
        (-1, failing, PlanError, r"a length of at least 0 from \.bucket_by_length\(length=\), got -1"),
        (1.5, failing, PlanTypeError, r"a length from \.bucket_by_length\(length=\), an integer, got float 1\.5"),
        (True, failing, PlanTypeError, "an integer, got bool True"),
        (None, failing, PlanTypeError, "an integer, got NoneType None"),
        (5, None, PlanTypeError, r"an item with a length, got a int: say how long it is with \.bucket_by_length"),
        ({"ids": [1]}, None, PlanTypeError, "an item with a length, got a dict"),
        (np.zeros(()), None, PlanTypeError, "an item with a length, got a ndarray"),
    ],
)
def test_what_has_no_length_fails_after_the_batches_before_it_and_can_be_left_out(
    bad: Any, length: Callable[[Any], int] | None, error: type[Exception], words: str
) -> None:
    pipe = sl.from_items(["a", "a", "a", bad, "a"]).bucket_by_length([4], 2, length=length, collate=None)
    with pipe.open() as stream:
        assert next(stream) == ["a", "a"]
        snapshot = stream.snapshot()
        with pytest.raises(error, match=words) as caught:
            next(stream)
    assert "in bucket_by_length, shard 0 of 1" in caught.value.__notes__[-1]
    assert "at index 3 of items: " in caught.value.__notes__[-1]
    with pytest.raises(error, match=words):
        sl.replay(caught.value)
    with pipe.open(resume=snapshot, on_error="skip") as stream:
        assert list(stream) == [["a", "a"]]
        assert stream.errors.total == 1


def test_what_was_left_out_is_counted_once_though_it_is_read_again() -> None:
    items = ["aaaaa", "a", None, "a", "a", None, "a", "aaaaa", "a"]
    pipe: Pipeline[Any] = sl.from_items(items).bucket_by_length([2], 2, collate=sorted)
    wanted = [["a", "a"], ["a", "a"], ["aaaaa", "aaaaa"], ["a"]]
    for stop in range(5):
        first, snapshot = stopped(pipe, stop, on_error="skip")
        with pipe.open(resume=snapshot, on_error="skip") as stream:
            assert first + list(stream) == wanted
            assert stream.errors.total == 2


def test_a_batch_that_cannot_be_collated_is_left_out_as_one() -> None:
    def picky(batch: list[int]) -> list[int]:
        return batch if 3 not in batch else [1 // 0]

    pipe = sl.from_items(range(8)).bucket_by_length([0], [1, 2], length=int, collate=picky)
    for stop in range(5):
        first, snapshot = stopped(pipe, stop, on_error="skip")
        with pipe.open(resume=snapshot, on_error="skip") as stream:
            assert first + list(stream) == [[0], [1, 2], [5, 6], [7]]
            assert stream.errors.total == 2


@pytest.mark.long
def test_other_buckets_may_be_accepted_and_lose_nothing() -> None:
    items = list(range(40))
    old = sl.from_items(items).bucket_by_length([4, 6], [3, 7, 9], length=lambda n: n % 9, collate=None)
    new = sl.from_items(items).bucket_by_length([2], 2, length=lambda n: n % 9, collate=None)
    accept = [f"bucket_by_length.{option}" for option in ("boundaries", "batch_size")]
    for stop in range(8):
        first, snapshot = stopped(old, stop)
        with pytest.raises(
            ResumeError, match=r'accept=\["bucket_by_length\.boundaries", "bucket_by_length\.batch_size'
        ):
            new.open(resume=snapshot)
        for again in range(4):  # also stopped while the items that were held are still being read again
            more, later = stopped(new, again, snapshot, accept=accept)
            rest = list(new.open(resume=later).sync_stream())
            assert sorted(item for batch in first + more + rest for item in batch) == items


def test_less_than_was_there_is_refused() -> None:
    kept = [9]
    source = sl.from_items(range(9)).filter(lambda n: n < kept[0], name="kept")
    pipe = source.bucket_by_length([0], 2, length=lambda n: int(n > 0), collate=None)
    _, snapshot = stopped(pipe, 2)
    kept[0] = 2
    with pytest.raises(ResumeError, match=r"had read 5 items from the oldest one .* only 2 of them are left"):
        list(pipe.open(resume=snapshot).sync_stream())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([3, 3], 2), r"\(boundaries\) increase from each to the next, got \[3, 3\]"),
        (([-1], 2), r"each of \.bucket_by_length\(boundaries\) is at least 0"),
        (([1.5], 2), r"each of .*\(boundaries\) is an integer, got float"),
        ((3, 2), r"\(boundaries\) is a sequence of integers, got int 3"),
        (([3], 0), r"\(batch_size\) is at least 1"),
        (([3], True), r"\(batch_size\) is an integer, got bool"),
        (([3], 1.5), r"\(batch_size\) is a sequence of integers, or one integer, got float"),
        (([3], [2, 0]), r"each of .*\(batch_size\) is at least 1"),
        (([3, 5], [2, 2]), r"a size for each bucket, 3 of 2 boundaries.* got 2"),
    ],
)
def test_options_are_checked_where_they_are_written(given: tuple[Any, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sl.from_items(["a"]).bucket_by_length(*given)


def test_functions_are_checked_where_they_are_written() -> None:
    items: Pipeline[Any] = sl.from_items(["a"])
    for options, words in (
        ({"length": 3}, r"\(length=\) is a function"),
        ({"length": late}, r"\(length=\) is a sync function"),
        ({"collate": "pad"}, r"\(collate=\) is 'stack', 'torch', None or a function"),
        ({"collate": late}, r"\(collate=\) takes a sync function.* \.bucket_by_length\(collate=None\)"),
    ):
        with pytest.raises(PlanError, match=words):
            items.bucket_by_length([3], 2, **options)
