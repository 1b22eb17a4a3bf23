"""`from_items`: what a dataset's own `__getitems__` may do wrong, and which item failed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_failure, check_resume


class Table:
    """Items that are had by lists of indices; 1,000 more than their index."""

    def __init__(self, length: int = 40, broken: int | None = None, error: Exception | None = None) -> None:
        self.length = length
        self.broken = broken
        self.error = error or LookupError("row is gone")
        self.lists: list[list[int]] = []
        self.singles = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.singles += 1
        return 1000 + index

    def __getitems__(self, indices: list[int]) -> Any:
        assert isinstance(indices, list)
        assert all(type(index) is int for index in indices)
        self.lists.append(indices)
        if self.broken in indices:
            raise self.error
        return [1000 + index for index in indices]


def test_it_is_asked_for_lists() -> None:
    table = Table(600)
    assert list(sl.from_items(table)) == list(range(1000, 1600))
    assert len(table.lists) < 20
    assert table.singles == 0


def test_it_is_asked_for_nothing_where_there_is_nothing() -> None:
    table = Table(0)
    assert list(sl.from_items(table).shard(3)) == []
    assert table.lists == []


@pytest.mark.parametrize("pipe", [sl.from_items(range(10)).repeat(10**30), sl.from_items(range(10)).sample(10**30)])
def test_more_items_than_can_be_counted_are_refused(pipe: Pipeline[int]) -> None:
    for many in (pipe, pipe.shard(3).merge()):
        with pytest.raises(PlanError, match=r"more than can be counted: \.repeat\(\) without a number"):
            next(iter(many))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shards", [1, 3])
def test_it_resumes_exactly(shards: int) -> None:
    check_resume(sl.from_items(Table(20)).shuffle(seed=1).shard(shards))
    check_resume(sl.from_items(Table(10)).repeat(2).shard(shards, "contiguous"), generations=2)


@pytest.mark.parametrize("broken", [0, 17])
def test_items_before_a_failing_one_are_delivered_and_a_resume_goes_on_after_a_fix(broken: int) -> None:
    error = LookupError("row is gone")
    check_failure(sl.from_items(Table(broken=broken, error=error)), error, mended=sl.from_items(Table()))


def test_a_failure_names_the_index() -> None:
    pipe: Pipeline[int] = sl.from_items(Table(broken=17)).shuffle(seed=4).shard(2)
    with pipe.open() as stream, pytest.raises(LookupError, match="row is gone") as failed:
        list(stream)
    assert "at index 17 of items" in failed.value.__notes__[0]
    assert len(failed.value.__notes__) == 1


def test_a_failure_of_getitem_names_the_index_too() -> None:
    class Plain:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise LookupError("no")
            return index

    with sl.from_items(Plain()).shard(2).open() as stream:
        assert list(islice(stream, 5)) == [0, 1, 2, 3, 4]
        with pytest.raises(LookupError, match="no") as failed:
            next(stream)
    assert "shard 1 of 2" in failed.value.__notes__[0]
    assert failed.value.__notes__[0].endswith("at index 5 of items")


class Answers(Table):
    """Answers with something else."""

    def __init__(self, answer: Any) -> None:
        super().__init__(10)
        self.answer = answer

    def __getitems__(self, indices: list[int]) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ([1, 2], PlanError, "expected 10 items from __getitems__ for the indices 0 ... 9, got 2"),
        (list(range(11)), PlanError, "expected 10 items from __getitems__ for the indices 0 ... 9, got 11"),
        ([], PlanError, "expected 10 items .*, got 0"),
        ({"a": 1}, PlanTypeError, "expected a list of items from __getitems__ for the indices 0 ... 9, got a dict"),
        ("0123456789", PlanTypeError, "got a str"),
        (iter([]), PlanTypeError, "got a list_iterator"),
        (None, PlanTypeError, "got a NoneType"),
    ],
    ids=["few", "many", "none", "columns", "text", "iterator", "nothing"],
)
def test_another_number_of_items_or_something_else_is_an_error(answer: Any, kind: type, message: str) -> None:
    with sl.from_items(Answers(answer)).open() as stream, pytest.raises(kind, match=message):
        next(stream)


@pytest.mark.parametrize("answer", [np.arange(10), tuple(range(10)), range(10)], ids=["array", "tuple", "range"])
def test_any_sequence_of_items_will_do(answer: Sequence[Any]) -> None:
    assert [int(item) for item in sl.from_items(Answers(answer))] == list(range(10))
