"""A plan for a person."""

from __future__ import annotations

from typing import Any

import pytest

import streamline as sl
from streamline.describe import describe, max_in_flight
from streamline.plan import BORDER_ITEMS
from streamline.transforms.map import AHEAD, WAITING_EACH, WAITING_ITEMS


def tokenize(x: Any) -> Any:
    return x


async def fetch(x: Any) -> Any:
    return x


def test_a_plan_reads_from_top_to_bottom() -> None:
    pipe = (
        sl.from_items(range(10_000))
        .shuffle(seed=1)
        .shard(16)
        .map(tokenize)
        .shuffle(window=8)
        .merge("best_effort")
        .batch(4)
    )
    assert repr(pipe).splitlines()[:-1] == [
        "from_items (10,000 items)",
        "  shuffle(seed=1)",
        "shard into 16 (interleaved)",
        "  map(tokenize)",
        "  shuffle(window=8, seed=0)",
        "merge (best effort)",
        "  batch(size=4, drop_remainder=False)",
    ]
    assert repr(pipe) == describe(pipe.plan)


def test_the_last_line_says_how_much_is_held() -> None:
    pipe = sl.from_items(range(10)).shard(2)
    assert repr(pipe).splitlines()[-1] == "at most 1,024 items in flight; in a quick plain loop 4,096 more"
    assert pipe.max_in_flight == max_in_flight(pipe.plan) == 2 * 512 + BORDER_ITEMS


def test_what_a_take_in_every_worker_gives_in_all_is_said() -> None:
    assert "take(count=100): up to 1,600 in all" in repr(sl.from_items(range(9)).shard(16).take(100))
    assert "in all" not in repr(sl.from_items(range(9)).shard(16).merge().take(100))
    assert "in all" not in repr(sl.from_items(range(9)).map(tokenize).take(100))


def test_that_every_worker_reads_everything_is_said() -> None:
    assert "shard into 16 (replicated): everything is read 16 times" in repr(sl.from_iterable(lambda: [1]).shard(16))
    assert "is read" not in repr(sl.from_iterable(lambda: [1]))


@pytest.mark.parametrize(
    ("more", "by"),
    [
        (lambda p: p.map(tokenize), 0),
        (lambda p: p.shuffle(window=100), 200),
        (lambda p: p.prefetch(50), 50),
        (lambda p: p.map(fetch, concurrency=4), 4 + WAITING_ITEMS),
        (lambda p: p.map(fetch, concurrency=100), 100 + WAITING_EACH * 100),
        (lambda p: p.map(fetch, concurrency=4, ordered=False), 4 + WAITING_ITEMS + AHEAD * 4),
    ],
)
def test_each_stage_adds_what_it_may_hold_in_every_worker(more: Any, by: int) -> None:
    pipe = sl.from_items(range(10)).shard(3)
    assert more(pipe).max_in_flight - pipe.max_in_flight == 3 * by


def test_items_in_a_batch_count_each() -> None:
    pipe = sl.from_items(range(10)).batch(8)
    assert pipe.prefetch(5).max_in_flight - pipe.max_in_flight == 5 * 8
