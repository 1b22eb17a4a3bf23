"""Pipelines side by side: where the tuples end, where they resume, and how they are split."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.core.tasks import Tasks
from streamline.errors import DataError, PlanError, PlanTypeError, TooManyErrors
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition
from streamline.testing.steps import DICE, steps
from streamline.testing.subjects import ChainSubject, run
from tests.laws.profile import examples


def numbers(length: int, start: int = 0) -> Pipeline[int]:
    return sl.from_items(range(start, start + length))


@st.composite
def zips(draw: st.DrawFn) -> Pipeline[Any]:
    parts = []
    for at in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 12))
        source = numbers(length, 100 * at) if draw(st.booleans()) else sl.from_iterable(range(length).__iter__)
        parts.append(Composition(source, "", length).with_steps(draw(st.lists(steps(), max_size=2)), False).pipeline)
    return sl.zip(*parts).map(str)


@examples(10)
@given(zips(), st.integers(0, 99))
def test_random_zips_are_the_oracles_and_resume_exactly_after_each_tuple(pipe: Pipeline[Any], seed: int) -> None:
    DICE.seed(seed)
    check_resume(pipe, seed=seed, generations=2)


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("shards", [1, 3, 9])
def test_shards_hold_the_same_tuples(shards: int) -> None:
    pipe = sl.zip(numbers(7).map(abs), numbers(7, 100).shuffle(seed=3), sl.from_items("abcdefg"))
    whole = list(zip(range(7), numbers(7, 100).shuffle(seed=3), "abcdefg", strict=True))
    assert list(pipe) == whole
    assert sorted(pipe.shard(shards)) == sorted(whole)
    check_resume(pipe.shard(shards).merge(), generations=1)


def test_it_ends_with_the_shortest_or_says_which_has_ended_first() -> None:
    assert list(sl.zip(numbers(3), numbers(5))) == [(0, 0), (1, 1), (2, 2)]
    assert list(sl.zip(numbers(0), numbers(5))) == []
    assert list(sl.zip(numbers(4), numbers(4), strict=True)) == [(n, n) for n in range(4)]
    for one, other, words in ((3, 5, "part 0 has ended, and part 1 has"), (5, 3, "part 1 has ended, and part 0 has")):
        with sl.zip(numbers(one), numbers(other), strict=True).open() as stream:
            assert list(islice(stream, 3)) == [(0, 0), (1, 1), (2, 2)]
            snapshot = stream.snapshot()
            with pytest.raises(DataError, match=words):
                next(stream)
        with pytest.raises(DataError, match=words):
            list(sl.zip(numbers(one), numbers(other), strict=True).open(resume=snapshot).sync_stream())


def picky(item: int) -> int:
    if item % 5 == 4:
        raise ValueError(item)
    return item


def refuse(item: int) -> int:
    raise ValueError(item)


@pytest.mark.parametrize("stop", range(9))
def test_items_left_out_after_the_last_tuple_are_counted_too_also_over_a_resume(stop: int) -> None:
    pipe = sl.zip(numbers(10).map(picky), numbers(10, 100).map(picky))
    with pipe.open(on_error="skip", max_errors=None) as stream:
        first = list(islice(stream, stop))
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot, on_error="skip", max_errors=None) as stream:
        assert len(first + list(stream)) == 8
        assert dict(stream.errors.stages) == {"0/picky": 2, "1/picky": 1}  # part 0 ends it


def test_a_part_of_which_everything_is_left_out_is_no_empty_one() -> None:
    for pipe in (sl.zip(numbers(9).map(refuse), numbers(9)), sl.zip(numbers(9), numbers(3).repeat().map(refuse))):
        with pipe.open(on_error="skip", max_errors=5) as stream, pytest.raises(TooManyErrors, match="/refuse"):
            list(stream)


def test_what_a_part_drops_is_not_read_again_by_a_resume() -> None:
    asked: list[int] = []

    def late(item: int) -> bool:
        asked.append(item)
        return item >= 2000

    pipe = sl.zip(numbers(3000).filter(late), numbers(10))
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    assert snapshot.worker_states[0]["zip"]["of"]["0"]["0/items"] == 2001
    only = sl.zip(numbers(2000).filter(late), numbers(10))
    with only.open() as stream:
        assert list(stream) == []
        snapshot = stream.snapshot()
    asked.clear()
    assert list(only.open(resume=snapshot).sync_stream()) == []
    assert asked == []


def test_while_a_part_drops_items_the_others_stay_after_their_last_tuple() -> None:
    pipe = sl.zip(numbers(10), numbers(10).filter(lambda n: not 3 <= n < 7))
    subject = ChainSubject(pipe.source, pipe.stages)

    async def work(tasks: Tasks) -> None:
        flow = subject.open(tasks, None)
        found: list[Any] = []
        places: list[tuple[int, str]] = []
        while (chunk := await flow.pull(5)) is not None:
            found += chunk.items
            places.append((len(found), subject.write(flow.state)))
        assert found == [(0, 0), (1, 1), (2, 2), (3, 7), (4, 8), (5, 9)]
        assert [count for count, _ in places].count(3) == 2  # after the tuple, and after what was dropped
        for count, text in places:
            assert [item async for item in subject.open(tasks, text)] == found[count:]

    run(work)


def test_an_endless_part_waits_for_the_others() -> None:
    assert list(sl.zip(numbers(2).repeat(), numbers(5))) == [(n % 2, n) for n in range(5)]


def test_parts_that_can_not_be_split_alike_are_refused_with_the_way_out() -> None:
    iterable: Pipeline[int] = sl.from_iterable(lambda: range(9))
    for other in (iterable, numbers(9).filter(bool), numbers(9).shuffle(window=3), numbers(9).batch(2)):
        assert sl.zip(numbers(9), other).first(2)
        with pytest.raises(PlanError, match=r"part 1 can't be: .*\. Leave .shard out, or zip what is indexed"):
            sl.zip(numbers(9), other).shard(2).open()


def test_what_is_no_part_is_refused_where_it_is_written() -> None:
    with pytest.raises(PlanTypeError, match="takes pipelines, got list"):
        sl.zip(numbers(3), [1, 2])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"'1' has a \.shard or a \.merge"):
        sl.zip(numbers(3), numbers(3).shard(2))
    with pytest.raises(PlanError, match="needs one pipeline at least"):
        sl.zip()
