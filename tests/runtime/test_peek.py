"""Looking whether another item follows takes none, and loses none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import ClosedError


def odd(item: int) -> bool:
    return item % 2 == 1


def fragile(item: int) -> int:
    if item == 5:
        raise ZeroDivisionError("item 5")
    return item


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=13, max_size=13))
def test_it_takes_nothing_and_the_state_resumes_behind_the_last_item(length: int, looks: list[int]) -> None:
    pipe = sl.from_items(range(length)).shard(2).filter(odd).merge()
    whole = list(pipe)
    seen: list[int] = []
    with pipe.open() as stream:
        while True:
            for _ in range(looks[len(seen)]):
                assert stream.peek() == (len(seen) < len(whole))
                assert stream.count == len(seen)
            with pipe.open(resume=stream.snapshot()) as other:
                assert seen + list(other) == whole
            try:
                seen.append(next(stream))
            except StopIteration:
                break
        assert seen == whole
        assert stream.peek() is False
    assert stream.peek() is False


def test_a_failure_is_for_whoever_asks_for_the_item() -> None:
    with sl.from_items(range(9)).map(fragile).open() as stream:
        assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert stream.peek() is stream.peek() is None
        with pytest.raises(ZeroDivisionError, match="item 5"):
            next(stream)


def test_nobody_knows_what_followed_in_a_stream_that_was_closed() -> None:
    with sl.from_items(range(9)).open() as stream:
        assert stream.peek() is True
    assert stream.peek() is None
    with pytest.raises(ClosedError):
        next(stream)
