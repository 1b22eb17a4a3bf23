"""A loop goes through lists without a line of Python an item, and means the same as `next`, item by item."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import islice
from operator import length_hint
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import ClosedError, PlanError, PlanTypeError
from streamline.runtime.sync_stream import SyncStream


def fragile(item: int) -> int:
    if item == 300:
        raise ZeroDivisionError("item 300")
    return item


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), max_size=8))
def test_several_iterators_and_next_take_from_the_same_place(turns: list[tuple[int, int]]) -> None:
    with sl.from_items(range(900)).open() as stream:
        takers: list[Iterator[int]] = [iter(stream), iter(stream), stream]
        seen: list[int] = []
        for taker, count in turns:
            seen += islice(takers[taker], count)
            assert stream.count == len(seen)
        assert seen + list(stream) == list(range(900))


def test_each_item_of_a_loop_goes_with_its_state() -> None:
    pipe = sl.from_items(range(600)).filter(lambda item: item % 3 > 0)
    whole = list(pipe)
    with pipe.open() as stream:
        for at, item in enumerate(stream):
            assert (item, stream.count) == (whole[at], at + 1)
            if at % 37 == 0 or at > 390:
                with pipe.open(resume=stream.snapshot()) as other:
                    assert other.peek() is (at + 1 < len(whole))
                    assert whole[: at + 1] + list(other) == whole


def test_a_pipeline_has_no_length_and_what_asks_for_a_hint_goes_on_without() -> None:
    """▲ A DataLoader of torch's asks: `list` does, too, and bears a TypeError only."""
    pipe = sl.from_items(range(5))
    with pytest.raises(PlanTypeError, match=r"no length: len\(pipe.loader\(\)\) has.*DataLoader\(TorchDataset\(pipe\)"):
        len(pipe)
    assert list(pipe) == [*pipe] == sorted(pipe) == list(iter(pipe)) == [0, 1, 2, 3, 4]
    assert (pipe, length_hint(pipe, 7)) == (pipe, 7)
    assert bool(pipe)
    assert len(pipe.loader()) == 5
    with pytest.raises(PlanError, match="from_items needs __len__ and __getitem__"):
        sl.from_items(pipe)  # type: ignore[arg-type]


def test_what_is_raised_while_it_waits_ends_no_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    with sl.from_items(range(600)).open() as stream:
        items, seen = iter(stream), list[int]()
        take, left = stream._loop_thread.take, [KeyboardInterrupt] * 3

        def interrupted(into: list[Any]) -> None:
            if left:
                raise left.pop()
            take(into)

        monkeypatch.setattr(stream._loop_thread, "take", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                next(items)
        seen += items
        assert seen == list(range(600))
        assert next(items, None) is next(iter(stream), None) is None


def test_a_failure_comes_for_ever() -> None:
    with sl.from_items(range(600)).map(fragile).open() as stream:
        items = iter(stream)
        assert [next(items) for _ in range(300)] == list(range(300))
        for taker in (items, items, iter(stream), stream):
            with pytest.raises(ZeroDivisionError, match="item 300"):
                next(taker)


def test_a_stream_that_is_closed_in_its_loop_gives_no_more() -> None:
    with sl.from_items(range(600)).open() as stream:
        items = iter(stream)
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        stream.close()
        for taker in (items, iter(stream), stream):
            with pytest.raises(ClosedError):
                next(taker)
        with sl.from_items(range(600)).open(resume=stream.snapshot()) as other:
            assert next(other) == 3


def test_the_loop_alone_holds_the_stream() -> None:
    def begun() -> tuple[Iterator[int], weakref.ref[SyncStream[int]]]:
        stream = iter(sl.from_items(range(600)))
        items = iter(stream)
        assert next(items) == 0
        return items, weakref.ref(stream)

    gc.disable()
    try:
        items, stream = begun()
        assert (next(items), stream() is None) == (1, False)
        del items
        assert stream() is None, "something else holds it: its thread would run until the collector comes by"
    finally:
        gc.enable()
