"""Item by item through lists: which state goes with each item, and who holds on to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from streamline.core.cursor import FlowReader
from streamline.core.flow import Chunk, Flow
from streamline.core.state import At, CountedStates

Lists = Sequence[tuple[Sequence[Any], "int | None"]]


class Listed(Flow[Any]):
    """A flow of given lists; a number after a list is its progress."""

    def __init__(self, *lists: tuple[Sequence[Any], int | None], failure: Exception | None = None) -> None:
        super().__init__(At("s", 0))
        self._lists = list(lists)
        self._error = failure
        self._count = 0
        self.released = 0

    async def _next(self, limit: int) -> Chunk[Any] | None:
        if not self._lists:
            if self._error is not None:
                raise self._error
            return None
        items, after = self._lists.pop(0)
        states = CountedStates("s", self._count + 1)
        self._count = self._count + len(items) if after is None else after
        return Chunk(items, states, None if after is None else At("s", after))

    def release(self) -> None:
        self.released += 1


def place(reader: FlowReader[Any]) -> int:
    number: int = reader.state.json()["s"]
    return number


async def places(reader: FlowReader[Any]) -> list[tuple[Any, int]]:
    return [(item, place(reader)) async for item in reader]


async def test_each_item_goes_with_the_state_right_after_it() -> None:
    reader = FlowReader(Listed(("abc", None), ("d", None), ("ef", None)))
    assert place(reader) == 0
    assert await places(reader) == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("f", 6)]
    assert place(reader) == 6


async def test_progress_is_adopted_after_the_last_item_of_its_list() -> None:
    reader = FlowReader(Listed(("ab", 10), ("c", None)))
    assert await places(reader) == [("a", 1), ("b", 10), ("c", 11)]


async def test_progress_without_items_is_adopted_on_the_way() -> None:
    reader = FlowReader(Listed(("a", None), ((), 7), ((), 9), ("b", None), ((), 20)))
    assert await anext(reader) == "a"
    assert place(reader) == 1, "the state changed while no pull was in progress"
    assert await anext(reader) == "b"
    assert place(reader) == 10
    assert await anext(reader, None) is None
    assert place(reader) == 20


async def test_none_is_an_item_like_any_other() -> None:
    assert await places(FlowReader(Listed(([None, None], None), ([0], None)))) == [(None, 1), (None, 2), (0, 3)]


async def test_an_empty_flow_ends_at_once_and_for_ever() -> None:
    reader = FlowReader(Listed())
    for _ in range(3):
        assert await anext(reader, None) is None
    assert place(reader) == 0


async def test_a_failure_comes_after_the_items_before_it_and_for_ever() -> None:
    error = LookupError("3")
    reader = FlowReader(Listed(("ab", None), failure=error))
    assert [await anext(reader), await anext(reader)] == ["a", "b"]
    for _ in range(3):
        with pytest.raises(LookupError) as found:
            await anext(reader)
        assert found.value is error
        assert place(reader) == 2


class Item:
    """Something that can be referred to weakly."""


async def test_an_item_that_was_taken_is_the_takers() -> None:
    reader = FlowReader(Listed(([Item() for _ in range(3)], None), ([Item()], None)))
    for _ in range(4):
        item = await anext(reader)
        seen = weakref.ref(item)
        del item
        gc.collect()
        assert seen() is None, "something still holds on to an item that was taken"


async def test_the_flow_is_notified_when_a_list_is_consumed() -> None:
    flow = Listed(("ab", None), ("c", None))
    reader = FlowReader(flow)
    await anext(reader)
    assert flow.released == 0
    await anext(reader)
    assert flow.released == 1
    await anext(reader)
    assert flow.released == 2


async def test_a_state_that_was_handed_out_does_not_change() -> None:
    reader = FlowReader(Listed(("abc", None), ("de", 9)))
    states = [(reader.state, place(reader))]
    states += [(reader.state, place(reader)) async for _ in reader]
    assert [state.json()["s"] for state, _ in states] == [number for _, number in states]


async def test_what_was_taken_is_counted_across_lists() -> None:
    reader = FlowReader(Listed(("ab", 10), ((), 12), ("c", None)))
    assert [(item, reader.count) async for item in reader] == [("a", 1), ("b", 2), ("c", 3)]
    assert reader.count == 3
    reader._forget()
    assert reader.count == 3


async def test_a_dropped_list_is_empty_for_iterators_taken_before() -> None:
    reader = FlowReader(Listed((range(5), None), ("b", None)))
    assert await anext(reader) == 0
    current = reader._current
    many = current.many
    reader._forget()
    assert list(many) == []
    assert (list(current.rest), reader.at_hand, place(reader)) == ([], 0, 1)
    assert await anext(reader) == "b"


async def test_a_list_that_is_taken_whole_counts_as_one_taken_item_by_item() -> None:
    flow = Listed((range(5), 9), ("b", None))
    reader = FlowReader(flow)
    assert await anext(reader) == 0
    assert (reader.take_rest(), reader.take_rest()) == ([1, 2, 3, 4], [])
    assert (reader.count, place(reader), flow.released) == (5, 9, 1)
    assert (await anext(reader), reader.count, place(reader)) == ("b", 6, 10)
