from __future__ import annotations

import pytest

import streamline as sl
from streamline.io.storage.base import FoundObject
from streamline.runtime.check import Load, idle, loads_of, ranks_of, spread, uneven

FILES = [FoundObject(f"{at}.txt", 100 * at) for at in range(1, 6)]


def test_whole_files_go_round() -> None:
    plan = sl.read_lines(["a", "b"]).shard(2, mode="file").plan
    assert loads_of(plan, FILES) == (Load(items=3, bytes=900), Load(items=2, bytes=600))


def test_an_unknown_size_makes_a_shards_unknown() -> None:
    plan = sl.read_lines(["a", "b"]).shard(2, mode="file").plan
    assert loads_of(plan, [*FILES, FoundObject("x")])[1] == Load(items=3, bytes=None)


def test_one_file_is_split_by_bytes() -> None:
    plan = sl.read_lines("a").shard(4, mode="contiguous").plan
    loads = loads_of(plan, [FoundObject("a", 102)])
    assert sum(load.bytes or 0 for load in loads) == 102
    assert {load.bytes for load in loads} <= {25, 26}
    assert loads_of(plan, [FoundObject("a")]) == (Load(items=None, bytes=None),) * 4


def test_replicated_shards_read_everything() -> None:
    plan = sl.read_lines(["a", "b"]).shard(3, mode="replicated").plan
    assert loads_of(plan, FILES) == (Load(items=5, bytes=1500),) * 3


def test_items_are_counted() -> None:
    assert [load.items for load in loads_of(sl.from_items(range(10)).shard(4).plan, None)] == [3, 3, 2, 2]
    assert [load.items for load in loads_of(sl.from_iterable(list).shard(2).plan, None)] == [None, None]
    assert [load.items for load in loads_of(sl.from_items(range(3)).repeat().shard(2).plan, None)] == [None, None]


def test_ranks_have_the_sum_of_their_shards() -> None:
    shards = [Load(items=at, bytes=10 * at) for at in range(5)]
    assert ranks_of(shards, 2) == (Load(items=6, bytes=60), Load(items=4, bytes=40))
    assert ranks_of([*shards, Load(items=1, bytes=None)], 2)[1] == Load(items=5, bytes=None)


def test_idle_workers_are_named_with_the_way_out() -> None:
    plan = sl.read_lines(["a", "b"]).shard(8, mode="file").plan
    (problem,) = idle(plan, loads_of(plan, FILES), 5, "files")
    assert problem.message == (
        "8 shards for 5 files: 3 workers would have nothing to read: write .shard(5) or fewer, "
        "or split the data into more files"
    )
    plan = sl.read_lines(["a", "b"]).shard(5, mode="file").plan
    assert idle(plan, loads_of(plan, FILES), 5, "files") == []


@pytest.mark.parametrize(("sizes", "notes"), [([1, 2], 1), ([3, 4, 5], 0), ([5], 0), ([0, 5], 0), ([], 0)])
def test_uneven_shards_are_noted(sizes: list[int], notes: int) -> None:
    assert len(uneven([Load(items=1, bytes=size) for size in sizes], "shard")) == notes


@pytest.mark.parametrize(("count", "most"), [(0, 8), (1, 8), (8, 8), (9, 8), (1000, 8), (3, 2)])
def test_samples_are_spread_from_the_first_to_the_last(count: int, most: int) -> None:
    found = spread(count, most)
    assert len(found) == min(count, most)
    assert found == sorted(set(found))
    if count:
        assert (found[0], found[-1]) == (0, count - 1)
