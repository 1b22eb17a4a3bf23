"""Caches: one pass is drawn once, however often it is served, and what is kept is bounded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import CacheFull, PlanError
from streamline.testing.checks import check_resume
from tests.laws.stages import erratic


def test_later_passes_read_nothing() -> None:
    read = Counter[int]()

    def look(item: int) -> int:
        read[item] += 1
        return item

    pipe = sl.from_items(range(100)).shard(3).shuffle(window=10).map(look).cache().repeat(4).merge()
    found = Counter(pipe)
    assert set(found.values()) == {4}
    assert set(read.values()) == {1}
    assert len(read) == 100


def test_every_pass_is_the_first_one_again() -> None:
    pipe = sl.from_items(range(50)).shard(1).shuffle(window=50).cache().repeat(3)
    found = list(pipe)
    assert found[:50] == found[50:100] == found[100:]
    again = sl.from_items(range(50)).shard(1).shuffle(window=50).cache().shuffle(window=50).repeat(2)
    assert len({tuple(list(again)[start : start + 50]) for start in (0, 50)}) == 2  # shuffle after it


def test_a_pass_that_was_chosen_is_repeated_as_it_was_chosen() -> None:
    pipe = sl.from_items(range(30)).map(erratic, concurrency=4, ordered=False).cache().repeat(3)
    found = list(pipe)
    assert found[:30] == found[30:60] == found[60:]
    for stop in (5, 30, 37, 64):
        with pipe.open() as stream:
            first = [next(stream) for _ in range(stop)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            rest = list(stream)
        with pipe.open(resume=snapshot) as stream:
            after = list(stream)
        whole = first + after
        assert Counter(whole) == Counter(first + rest)
        if stop >= 30:
            assert after == rest
            assert whole[:30] == whole[30:60] == whole[60:]


def test_a_cache_after_the_merge_and_after_a_best_effort_one() -> None:
    check_resume(sl.from_items(range(12)).shard(3).merge().cache().repeat(2))
    check_resume(sl.from_items(range(12)).shard(3).merge("best_effort", max_skips_per_round=2).cache().repeat(2))


def test_a_resume_draws_again_what_it_needs_and_no_more() -> None:
    read: list[int] = []

    def look(item: int) -> int:
        read.append(item)
        return item

    pipe = sl.from_items(range(20)).map(look).cache().repeat(3)
    with pipe.open() as stream:
        for _ in range(27):
            next(stream)
        snapshot = stream.snapshot()
    read.clear()
    with pipe.open(resume=snapshot) as stream:
        assert list(stream) == [*range(7, 20), *range(20)]
    assert read == list(range(20))


def test_a_bound_holds_and_says_what_to_do() -> None:
    held = 0

    def make(number: int) -> Any:
        nonlocal held
        held = max(held, number)
        return np.zeros(1000, np.uint8)

    pipe = sl.from_items(range(100)).map(make).cache(max_bytes=10_000)
    message = r"cache of shard 0 holds \d+ items of [\d,]+ bytes, .* into max_bytes=10,000\. Raise it"
    with pytest.raises(CacheFull, match=message):
        list(pipe)
    assert len(list(sl.from_items(range(10)).map(make).cache(max_bytes=10_000).repeat(2))) == 20


def test_a_live_source_has_no_second_pass() -> None:
    async def feed() -> Any:
        yield 1

    with pytest.raises(PlanError, match=r"\.cache keeps a pass for the next one, and from_stream has only one"):
        sl.from_stream(feed).cache()


def test_two_caches_of_one_pipeline_keep_their_own() -> None:
    pipe = sl.from_items(range(4)).map(str).cache().map(int).repeat(2).cache().repeat(2)
    assert list(pipe) == [0, 1, 2, 3] * 4
