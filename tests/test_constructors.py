"""Where pipelines start: what each function takes, and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError


class Dataset:
    """A map-style dataset that counts how it is asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return 10 * index


class Batched(Dataset):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.lists: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.lists.append(indices)
        return [10 * index for index in indices]


@pytest.mark.parametrize("items", [[1, 2, 3], (1, 2, 3), range(1, 4), np.arange(1, 4)], ids=str)
def test_whatever_has_a_length_and_an_index_can_be_read(items: Any) -> None:
    assert list(sl.from_items(items)) == [1, 2, 3]


def test_a_string_is_read_by_its_characters() -> None:
    assert sl.from_items("abc").first(9) == ["a", "b", "c"]


def test_a_map_style_dataset_is_asked_for_each_index_once() -> None:
    dataset = Dataset(300)
    assert list(sl.from_items(dataset).shard(3)) == [10 * index for index in range(300)]
    assert sorted(dataset.asked) == list(range(300))


def test_a_dataset_that_takes_lists_is_given_lists() -> None:
    dataset = Batched(500)
    assert list(sl.from_items(dataset)) == [10 * index for index in range(500)]
    assert not dataset.asked
    assert sorted(index for indices in dataset.lists for index in indices) == list(range(500))
    assert len(dataset.lists) < 100


def test_a_dataset_that_returns_another_number_of_items_is_an_error() -> None:
    class Short(Batched):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [0]

    with pytest.raises(PlanError, match=r"expected \d+ items from __getitems__ for the indices .*, got 1"):
        list(sl.from_items(Short(5)))


def test_a_resume_reads_nothing_again() -> None:
    dataset = Dataset(100)
    pipe = sl.from_items(dataset).shuffle(seed=3)
    expected = list(pipe)
    with pipe.open() as stream:
        head = [next(stream) for _ in range(60)]
        snapshot = stream.snapshot()
    dataset.asked.clear()
    with pipe.open(resume=snapshot) as stream:
        assert head + list(stream) == expected
    assert len(dataset.asked) == 40


def test_an_iterable_is_made_anew_for_every_pass() -> None:
    made = []

    def factory() -> Iterator[int]:
        made.append(1)
        return iter(range(3))

    pipe = sl.from_iterable(factory).repeat(2)
    assert not made, "a plan is read when it runs, not before"
    assert list(pipe) == [0, 1, 2, 0, 1, 2]
    assert list(pipe) == [0, 1, 2, 0, 1, 2]
    assert len(made) == 4


def test_an_async_iterable_is_read_as_well() -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    assert sorted(sl.from_iterable(numbers).shard(2)) == list(range(5))


@pytest.mark.parametrize("factory", [[1, 2], iter([1]), None], ids=lambda value: type(value).__name__)
def test_an_iterable_itself_is_refused(factory: Any) -> None:
    with pytest.raises(PlanTypeError, match=r"from_iterable\(factory\) is a function"):
        sl.from_iterable(factory)


def test_a_factory_of_something_else_is_an_error() -> None:
    with pytest.raises(PlanTypeError, match="expected from_iterable's factory to return an iterable, got int"):
        list(sl.from_iterable(lambda: 3))  # type: ignore[arg-type, return-value]


def test_each_source_has_a_name_of_its_own() -> None:
    assert [
        pipe.source.name for pipe in (sl.from_items([]), sl.from_iterable(list), sl.read_lines("a"), sl.read_jsonl("a"))
    ] == [
        "items",
        "iterable",
        "read_lines",
        "read_jsonl",
    ]
    assert sl.from_items([1], name="mine").source.name == "mine"


# Order: with interleaved shards and 1:1 stages, it is the dataset's


@pytest.mark.parametrize("shards", [1, 2, 3, 9])
def test_a_shuffled_index_comes_in_one_order_whatever_the_shards(shards: int) -> None:
    pipe = sl.from_items(range(50)).shuffle(seed=5)
    assert list(pipe.shard(shards)) == list(pipe)
    assert sorted(pipe) == list(range(50)) != list(pipe)
