"""`.map(batched=)`: the same lists in every run, one result for each item, exact in the midst of a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ResumeError

SIZE = 4


def doubled(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def doubled_later(items: list[int]) -> list[int]:
    return doubled(items)


class Kept:
    """Doubles lists, and keeps what it was given."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.lists.append(items)
        return doubled(items)


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "inline": (doubled, {}),
    "async": (doubled_later, {"concurrency": 3}),
    "a lambda around an async function": (lambda items: doubled_later(items), {"concurrency": 3}),
    "threads": (doubled, {"executor": "thread", "concurrency": 2}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE + 3])
def test_each_item_has_its_result(way: str, count: int) -> None:
    fn, options = WAYS[way]
    assert list(sl.from_items(range(count)).map(fn, batched=SIZE, **options)) == list(range(0, 2 * count, 2))


@pytest.mark.parametrize("want", [1, 3, 64])
def test_a_list_is_full_whoever_reads(want: int) -> None:
    fn = Kept()
    for _ in sl.from_items(range(10)).map(fn, batched=SIZE).batch(want, collate=None):
        pass
    assert fn.lists == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_no_list_has_items_of_two_shards() -> None:
    fn = Kept()
    assert sorted(sl.from_items(range(10)).shard(3).map(fn, batched=SIZE)) == list(range(0, 20, 2))
    assert sorted(fn.lists) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("at", [0, 3, 4, 7, 11])
def test_a_resume_makes_the_very_list_again(at: int) -> None:
    fn = Kept()
    pipe = sl.from_items(range(11)).map(fn, batched=SIZE)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(min(at, 11))]
        snapshot = stream.snapshot()
    fn.lists.clear()
    with pipe.open(resume=snapshot) as stream:
        assert first + list(stream) == list(range(0, 22, 2))
    rest = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]][min(at, 11) // SIZE if at < 11 else 3 :]
    assert fn.lists[len(fn.lists) - len(rest) :] == rest
    assert len(fn.lists) <= len(rest) + (at in (SIZE, 2 * SIZE, 11))  # its end may not have been seen


def test_rows_of_an_array_and_of_columns_are_items() -> None:
    rows = list(sl.from_items(range(5)).map(lambda items: np.outer(items, [1, 10]), batched=2))
    assert [row.tolist() for row in rows] == [[item, 10 * item] for item in range(5)]
    named = sl.from_items(range(5)).map(lambda items: {"n": items, "text": list(map(str, items))}, batched=2)
    assert list(named) == [{"n": item, "text": str(item)} for item in range(5)]


@pytest.mark.parametrize(
    ("fn", "gave"),
    [
        (lambda items: items[1:], "gave 2 results for 3 items"),
        (lambda items: [*items, 0], "gave 4 results for 3 items"),
        (lambda items: np.zeros(2), "gave 2 results for 3 items"),
        (lambda items: {"a": items, "b": items[1:]}, "gave dict"),
        (sum, "gave int"),
        (lambda items: None, "gave NoneType"),
        (lambda items: "abc", "gave str"),
        (lambda items: (item for item in items), "gave generator"),
        (lambda items: items.clear(), "gave NoneType"),
    ],
)
def test_another_number_of_results_is_an_error_that_says_so(fn: Callable[..., Any], gave: str) -> None:
    with pytest.raises(PlanTypeError, match=f"{gave}.*a list of as many results as there are items"):
        list(sl.from_items(range(3)).map(fn, batched=SIZE))


def test_a_function_may_change_its_list() -> None:
    def emptied(items: list[int]) -> list[int]:
        made = doubled(items)
        items.clear()
        return made

    assert list(sl.from_items(range(5)).map(emptied, batched=SIZE)) == [0, 2, 4, 6, 8]


def test_a_list_whose_call_fails_is_skipped_whole_and_replayed() -> None:
    def inverse(items: list[int]) -> list[float]:
        return [1 / (item - 5) for item in items]

    pipe = sl.from_items(range(10)).map(inverse, batched=SIZE)
    with pipe.open(on_error="skip") as stream:
        assert list(stream) == inverse([0, 1, 2, 3]) + inverse([8, 9])
    with pytest.raises(ZeroDivisionError) as caught:
        list(pipe)
    assert sl.replay(caught.value, fn=doubled) == [8, 10, 12, 14]


def test_a_failed_call_is_made_again_with_the_whole_list() -> None:
    given: list[list[int]] = []

    def stumbles(items: list[int]) -> list[int]:
        given.append(list(items))
        items.pop()
        if len(given) < 3:
            raise ConnectionError
        return doubled([*items, 3])

    pipe = sl.from_items(range(4)).map(stumbles, batched=SIZE, executor="thread", retries=3, backoff=0)
    assert list(pipe) == [0, 2, 4, 6]
    assert given == [[0, 1, 2, 3]] * 3


def test_a_seeded_function_has_one_generator_for_a_list() -> None:
    def noisy(items: list[int], *, rng: np.random.Generator) -> list[float]:
        return [item + value for item, value in zip(items, rng.random(len(items)), strict=True)]

    pipe = sl.from_items(range(10)).shard(2).map(noisy, batched=3, seed=1)
    whole = list(pipe)
    assert sorted(map(int, whole)) == list(range(10))
    assert len({value % 1 for value in whole}) == 10
    with pipe.open() as stream:
        first = [next(stream) for _ in range(5)]
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot) as stream:
        assert first + list(stream) == whole


def test_threads_call_it_apart_from_the_loop() -> None:
    def where(items: list[int]) -> list[int]:
        return [threading.get_ident()] * len(items)

    pipe = sl.from_items(range(8)).map(where, batched=SIZE, executor="thread")
    assert threading.get_ident() not in set(pipe)


def test_the_length_stays_known() -> None:
    for count, size in [(0, 3), (1, 49), (1, 3), (1000, 3), (1001, 256), (10**15 + 1, 7)]:
        assert len(sl.from_items(range(count)).map(doubled, batched=size).loader()) == count
    assert len(sl.from_items(range(10)).shard(3).map(doubled, batched=3).merge().batch(4).loader()) == 3


def test_the_printed_plan_says_so() -> None:
    text = str(sl.from_items(range(9)).shard(2).map(doubled, batched=3))
    assert [line.strip() for line in text.splitlines()[2:5]] == [
        "gather(doubled.lists, size=3)",
        "map(doubled)",
        "scatter(doubled.results)",
    ]


@pytest.mark.parametrize("size", [0, -1, True, "3", 2.0])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(PlanError, match=r"\.map\(batched=\) is"):
        sl.from_items(range(9)).map(doubled, batched=size)


def test_before_the_shard_it_is_refused_by_the_name_that_was_written() -> None:
    with pytest.raises(PlanError, match=r"`\.map\(batched=\)` before `\.shard\(2\)`"):
        sl.from_items(range(9)).map(doubled, batched=3).shard(2)
    with pytest.raises(PlanError, match=r"`\.map\(seed=\)` before `\.shard\(2\)`"):
        sl.from_items(range(9)).map(lambda item, rng: item, seed=3).shard(2)


def both(given: Any) -> Any:
    return doubled(given) if isinstance(given, list) else 2 * given


@pytest.mark.parametrize("at", [0, 3, 4, 6])
def test_batched_may_be_added_at_any_item_and_changed_between_lists_only(at: int) -> None:
    numbers = sl.from_items(range(10))
    one = numbers.map(both, name="both")
    many, more = (numbers.map(both, name="both", batched=size) for size in (4, 5))
    with one.open() as stream:
        first = [next(stream) for _ in range(at)]
        snapshot = stream.snapshot()
    with pytest.raises(ResumeError, match=r"both\.batched"):
        many.open(resume=snapshot)
    with many.open(resume=snapshot, accept=["both.batched"]) as stream:
        assert first + list(stream) == list(range(0, 20, 2))
    with many.open() as stream:
        first = [next(stream) for _ in range(at)]
        snapshot = stream.snapshot()
    if at % 4:
        with pytest.raises(ResumeError, match=r"both\.batched"):
            more.open(resume=snapshot, accept=["both.batched"])
        with pytest.raises(ResumeError, match=rf"both\.removed: at this snapshot it has delivered {at % 4} results"):
            one.open(resume=snapshot)
    else:
        with more.open(resume=snapshot, accept=["both.batched"]) as stream:
            assert first + list(stream) == list(range(0, 20, 2))
        with one.open(resume=snapshot, accept=["both.removed"]) as stream:
            assert first + list(stream) == list(range(0, 20, 2))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_list_that_is_delivered_is_not_computed_again(size: int) -> None:
    """A batch that ends where a list does, or within one."""
    called = []

    def counted(items: list[int]) -> list[int]:
        called.append(items)
        return items

    pipe = sl.from_items(range(12)).map(counted, batched=4).batch(size, collate=None)
    for taken in range(size, 12, size):
        with pipe.debug() as stream:
            for _ in range(taken // size):
                next(stream)
            snapshot = stream.snapshot()
        called.clear()
        with pipe.debug(resume=snapshot) as stream:
            assert next(stream)[0] == taken
        assert called[0][0] == taken - taken % 4
