"""Windows: which items are in them, what a resume reads again, and windows of what another run chooses otherwise."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.testing.checks import check_resume
from tests.kit import later, stopped
from tests.laws.profile import examples

sizes = st.integers(1, 6)


@examples(20)
@given(st.integers(0, 20), sizes, sizes)
def test_windows_begin_at_each_stride_and_are_full(length: int, size: int, stride: int) -> None:
    expected = [list(range(at, at + size)) for at in range(0, length, stride) if at + size <= length]
    pipe = sl.from_items(range(length)).window(size, stride)
    assert list(pipe) == expected
    assert len(pipe.loader()) == len(expected)


@examples(10)
@given(st.integers(0, 20), sizes, sizes)
def test_windows_of_what_is_filtered_are_resumed_at_each(length: int, size: int, stride: int) -> None:
    check_resume(sl.from_items(range(length)).filter(lambda item: item % 3 != 1).window(size, stride).unbatch())


@examples(15)
@given(st.integers(2, 5), st.integers(1, 4), st.booleans())
def test_over_a_stage_that_chooses_windows_overlap_as_before_across_resumes(
    size: int, stride: int, shuffled: bool
) -> None:
    """Each window begins with what it has in common with the last one, also if that was delivered by another run."""
    items = sl.from_items(range(40)).shard(2).map(later, concurrency=3, ordered=False).merge("best_effort")
    pipe = (items.shuffle(window=4) if shuffled else items).window(size, stride)
    windows, snapshot = stopped(pipe, 2)
    for _ in range(40):
        more, snapshot = stopped(pipe, 2, snapshot)
        if not more:
            break
        windows += more
    common = max(0, size - stride)
    for before, after in pairwise(windows):
        assert after[:common] == before[size - common :]
    if stride <= size:
        seen = [item for at, window in enumerate(windows) for item in (window[common:] if at else window)]
        assert len(seen) == len(set(seen)), "no item comes twice"
        assert len(seen) > 40 - size, "none is lost but those that fill no window"


def test_a_resume_reads_again_what_the_next_window_has_in_common_and_no_more() -> None:
    read: list[int] = []

    def seen(item: int) -> int:
        read.append(item)
        return item

    pipe = sl.from_items(range(100)).map(seen).window(5, 2)
    windows, snapshot = stopped(pipe, 3)
    assert windows[-1] == [4, 5, 6, 7, 8]
    read.clear()
    assert stopped(pipe, 1, snapshot)[0] == [[6, 7, 8, 9, 10]]
    assert read[0] == 6
    assert stopped(sl.from_items(range(100)).window(2, 5), 2)[1].worker_states[0]["window"] == 3


def test_other_sizes_are_taken_at_a_resume() -> None:
    before = sl.from_items(range(12)).window(4, 2)
    snapshot = stopped(before, 2)[1]  # [0 … 3], [2 … 5]
    longer = sl.from_items(range(12)).window(5, 3)
    with pytest.raises(sl.errors.ResumeError, match=r'accept=\["window.size", "window.stride"\]'):
        longer.open(resume=snapshot)
    with longer.open(resume=snapshot, accept=["window.size", "window.stride"]) as stream:
        assert list(stream) == [[4, 5, 6, 7, 8], [7, 8, 9, 10, 11]]


def test_what_is_no_size_is_refused() -> None:
    pipe = sl.from_items(range(3))
    with pytest.raises(PlanError, match=r"\.window\(size\) is at least 1, got 0"):
        pipe.window(0)
    with pytest.raises(PlanError, match=r"\.window\(stride\) is at least 1, got 0"):
        pipe.window(2, 0)
    with pytest.raises(PlanTypeError, match=r"\.window\(size\) is an integer"):
        pipe.window(1.5)  # type: ignore[arg-type]
