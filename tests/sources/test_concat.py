"""Pipelines one after the other: order, shards, resumes in each of them, and what can't be one of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.testing.checks import check_resume
from tests.kit import stopped
from tests.laws.profile import examples

lengths = st.lists(st.integers(0, 7), min_size=1, max_size=4)


@examples(15)
@given(lengths, st.integers(1, 4))
def test_each_begins_where_the_one_before_ends(found: list[int], shards: int) -> None:
    parts = [range(100 * at, 100 * at + length) for at, length in enumerate(found)]
    pipe = sl.concat(*(sl.from_items(part).shuffle(window=2) for part in parts))
    assert [item // 100 for item in pipe] == [at for at, part in enumerate(parts) for _ in part]
    assert Counter(pipe.shard(shards)) == Counter(item for part in parts for item in part)
    assert len(pipe.loader()) == sum(found)
    check_resume(pipe.shard(shards).merge())


def test_files_are_opened_when_their_turn_comes_and_not_again_once_they_are_read(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{line}\n" for line in range(3)))
    pipe = sl.concat(sl.read_lines(tmp_path / "a"), sl.from_items(["x"]), sl.read_lines(tmp_path / "b"))
    first, snapshot = stopped(pipe, 5)
    assert first == ["a0", "a1", "a2", "x", "b0"]
    assert stopped(pipe, 9, snapshot)[0] == ["b1", "b2"]


def test_a_resume_may_have_more_pipelines_after_those_that_it_had() -> None:
    snapshot = stopped(sl.concat(sl.from_items("ab"), sl.from_items("cd")), 3)[1]
    longer = sl.concat(sl.from_items("ab"), sl.from_items("cd"), sl.from_items("ef"))
    fits = longer.explain(snapshot)
    with longer.open(resume=snapshot, accept=[] if fits.fits else ["concat.components"]) as stream:
        assert list(stream) == ["d", "e", "f"]


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("into", [sl.concat, sl.zip, lambda *pipes: sl.mix([*pipes], seed=3)])
def test_what_is_nested_five_deep_is_one_pipeline(into: Any) -> None:
    pipe, count = sl.from_items(range(2)), 2
    for at in range(1, 6):
        pipe = into(pipe, sl.from_items(range(10 * at, 10 * at + 2))).map(same)
        count += 0 if into is sl.zip else 2
    assert len(list(pipe)) == count
    if into is sl.concat:
        assert list(pipe) == [*range(2), *(10 * at + n for at in range(1, 6) for n in range(2))]
    check_resume(pipe)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("into", [sl.concat, sl.zip, lambda *pipes: sl.mix([*pipes])])
def test_opening_many_takes_calls_in_proportion_to_them(into: Any) -> None:
    def calls(parts: int) -> int:
        count = 0

        def counted(frame: object, event: str, _: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            with into(*(sl.from_items([part]).map(same) for part in range(parts))).debug() as stream:
                next(iter(stream))
        finally:
            sys.setprofile(None)
        return count

    calls(2)  # imports
    few = calls(100)
    assert calls(300) < 3.3 * few


def same(item: Any) -> Any:
    return item


def test_an_error_says_in_which_of_them_it_is() -> None:
    pipe = sl.concat(sl.from_items([1, 2]), sl.from_items([1, 0])).map(lambda item: 1 // item)
    with pytest.raises(ZeroDivisionError) as failure:
        list(pipe)
    assert "at 1: index 1 of" in failure.value.__notes__[0]


def test_pipelines_of_several_are_parts_of_others_without_names_of_their_own() -> None:
    def numbers(first: int) -> sl.Pipeline[int]:
        return sl.from_items(range(first, first + 2)).map(abs).shuffle(window=2)

    both = sl.concat(numbers(10), numbers(20)).map(abs).shuffle(window=2)
    nested = sl.concat(both, sl.zip(both, sl.mix([numbers(30), both])).map(max), numbers(40))
    assert len(list(nested)) == 4 + 4 + 2
    assert len(set(nested.plan.names)) == len(nested.plan.names)
    check_resume(nested, generations=2)


def test_names_of_nested_parts_that_differ_stay_as_snapshots_have_them() -> None:
    inner = sl.mix({"a": sl.from_items("ab"), "b": sl.from_items("cd")})
    pipe = sl.mix({"x": inner, "y": sl.from_items("ef")})
    assert pipe.plan.names == ["a/items", "b/items", "x/mix", "y/items", "mix", "shard", "merge"]


def test_what_is_no_pipeline_or_has_shards_of_its_own_is_refused() -> None:
    with pytest.raises(PlanTypeError, match=r"sl\.concat takes pipelines, got"):
        sl.concat(sl.from_items("ab"), "cd")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"sl\.concat needs one pipeline at least"):
        sl.concat()
    with pytest.raises(PlanError, match="shard"):
        sl.concat(sl.from_items("ab").shard(2))
