"""Sharding: union = the dataset, intersection = empty, at any number of shards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import PlanError
from streamline.sharding.split import byte_range, contiguous, files_of, interleaved, shards_of_rank

LENGTHS = st.integers(0, 5000)
SHARDS = st.integers(1, 300)
Split = Callable[..., range]
BOTH = pytest.mark.parametrize("split", [interleaved, contiguous])


@pytest.mark.parametrize(
    ("length", "num_shards", "drop_remainder", "expected"),
    [
        (10, 3, False, [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        (10, 3, True, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        (2, 4, False, [[0], [1], [], []]),
        (2, 4, True, [[], [], [], []]),
        (0, 2, False, [[], []]),
        (5, 1, True, [[0, 1, 2, 3, 4]]),
    ],
)
def test_interleaved_gives_every_nth(
    length: int, num_shards: int, drop_remainder: bool, expected: list[list[int]]
) -> None:
    found = [list(interleaved(length, num_shards, shard, drop_remainder=drop_remainder)) for shard in range(num_shards)]
    assert found == expected


@pytest.mark.parametrize(
    ("length", "num_shards", "drop_remainder", "expected"),
    [
        (10, 3, False, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (11, 3, False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
        (11, 3, True, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (2, 4, False, [[0], [1], [], []]),
        (2, 4, True, [[], [], [], []]),
        (0, 2, False, [[], []]),
    ],
)
def test_contiguous_gives_one_block_each(
    length: int, num_shards: int, drop_remainder: bool, expected: list[list[int]]
) -> None:
    found = [list(contiguous(length, num_shards, shard, drop_remainder=drop_remainder)) for shard in range(num_shards)]
    assert found == expected


@BOTH
@given(length=LENGTHS, num_shards=SHARDS)
def test_every_item_is_in_exactly_one_shard(split: Split, length: int, num_shards: int) -> None:
    owned = [index for shard in range(num_shards) for index in split(length, num_shards, shard)]
    assert sorted(owned) == list(range(length))


@BOTH
@given(length=LENGTHS, num_shards=SHARDS)
def test_shards_differ_by_one_item_at_most(split: Split, length: int, num_shards: int) -> None:
    sizes = [len(split(length, num_shards, shard)) for shard in range(num_shards)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@BOTH
@given(length=LENGTHS, num_shards=SHARDS)
def test_drop_remainder_makes_shards_equal_and_drops_only_the_last_items(
    split: Split, length: int, num_shards: int
) -> None:
    shards = [split(length, num_shards, shard, drop_remainder=True) for shard in range(num_shards)]
    assert {len(shard) for shard in shards} == {length // num_shards}
    assert sorted(index for shard in shards for index in shard) == list(range(length - length % num_shards))


@given(length=LENGTHS, num_shards=SHARDS)
def test_contiguous_shards_stand_in_order(length: int, num_shards: int) -> None:
    joined = [index for shard in range(num_shards) for index in contiguous(length, num_shards, shard)]
    assert joined == list(range(length))


@given(size=st.integers(0, 2**50), num_shards=SHARDS)
def test_byte_ranges_join_without_a_gap(size: int, num_shards: int) -> None:
    ranges = [byte_range(size, num_shards, shard) for shard in range(num_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@given(count=st.integers(0, 300), num_shards=SHARDS)
def test_every_file_is_read_by_one_shard(count: int, num_shards: int) -> None:
    for shard in range(num_shards):
        assert all(file % num_shards == shard for file in files_of(count, num_shards, shard))
    assert sum(len(files_of(count, num_shards, shard)) for shard in range(num_shards)) == count


@given(num_shards=SHARDS, world_size=st.integers(1, 64))
def test_every_shard_runs_on_one_rank(num_shards: int, world_size: int) -> None:
    ranks = [shards_of_rank(num_shards, rank, world_size) for rank in range(world_size)]
    assert sorted(shard for shards in ranks for shard in shards) == list(range(num_shards))
    assert all(shard % world_size == rank for rank, shards in enumerate(ranks) for shard in shards)


@pytest.mark.parametrize("split", [interleaved, contiguous, files_of, byte_range])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 0), "a length is 0 or more, got -1"),
        ((5, 0, 0), "at least 1 shard, got 0"),
        ((5, 3, 3), "shard 3 is not among 0 ... 2"),
        ((5, 3, -1), "shard -1 is not among 0 ... 2"),
    ],
)
def test_what_is_out_of_range_is_refused(
    split: Callable[..., object], arguments: tuple[int, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as found:
        split(*arguments)
    assert isinstance(found.value, ValueError)


def test_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError):
        shards_of_rank(8, 2, 2)
