"""The index before the shard: a bijection, and what take, skip, repeat and shuffle do to it, compared with lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import PlanError
from streamline.sharding.index import Bijection, Index, IndexSlice, Positions, Repeated, Shuffled, WholeIndex

ENTROPY = st.lists(st.integers(0, 2**40), min_size=1, max_size=4)


def positions(*numbers: int) -> Positions:
    return np.asarray(numbers, np.int64)


def whole(index: Index) -> list[int]:
    """Return the items of a finite index."""
    assert index.length is not None
    found: list[int] = index(np.arange(index.length, dtype=np.int64)).tolist()
    return found


# The bijection


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_it_is_a_permutation_of_every_small_length(seed: int) -> None:
    for length in range(301):
        found = Bijection(length, [seed])(np.arange(length, dtype=np.int64))
        assert sorted(found.tolist()) == list(range(length)), f"length {length}"


@given(length=st.integers(301, 30_000), entropy=ENTROPY)
def test_it_is_a_permutation_of_a_random_length(length: int, entropy: list[int]) -> None:
    found = Bijection(length, entropy)(np.arange(length, dtype=np.int64))
    assert np.array_equal(np.sort(found), np.arange(length))


@given(length=st.integers(2**32, 2**61), entropy=ENTROPY, data=st.data())
def test_it_stays_inside_a_huge_length_and_keeps_positions_apart(length: int, entropy: list[int], data: Any) -> None:
    asked = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=50, unique=True))
    found = Bijection(length, entropy)(positions(*asked)).tolist()
    assert all(0 <= item < length for item in found)
    assert len(set(found)) == len(asked)


@given(length=st.integers(1, 500), entropy=ENTROPY, data=st.data())
def test_a_position_goes_to_the_same_place_however_it_is_asked_for(length: int, entropy: list[int], data: Any) -> None:
    asked = data.draw(st.lists(st.integers(0, length - 1), max_size=40))
    cut = data.draw(st.integers(0, len(asked)))
    bijection = Bijection(length, entropy)
    together = bijection(positions(*asked)).tolist()
    apart = bijection(positions(*asked[:cut])).tolist() + bijection(positions(*asked[cut:])).tolist()
    one_by_one = [int(Bijection(length, entropy)(positions(position))[0]) for position in asked]
    assert together == apart == one_by_one


def test_asking_does_not_change_what_was_asked_for() -> None:
    asked = np.arange(10, dtype=np.int64)
    Bijection(10, [0])(asked)
    assert asked.tolist() == list(range(10))


def test_another_seed_or_epoch_is_another_permutation() -> None:
    found = {
        tuple(Bijection(100, entropy)(np.arange(100)).tolist())
        for entropy in ([0, 0], [0, 1], [1, 0], [0, 0, 1], [7, 0])
    }
    assert len(found) == 5


def test_its_numbers_never_change() -> None:
    """A snapshot of an older version is resumed by this one: what it calls item 3 must be item 3."""
    assert Bijection(10, [0, 0])(np.arange(10)).tolist() == [0, 5, 3, 7, 6, 1, 9, 8, 4, 2]
    assert Bijection(1_000_003, [7, 1])(np.arange(5)).tolist() == [240177, 753290, 83331, 786815, 707395]


def test_it_leaves_few_items_where_they_were() -> None:
    moved = [Bijection(1000, [seed])(np.arange(1000)) for seed in range(50)]
    fixed = sum(int((one == np.arange(1000)).sum()) for one in moved)
    assert fixed < 50 * 4  # one each is what a random permutation leaves


def test_every_item_comes_first_about_equally_often() -> None:
    firsts = np.bincount([int(Bijection(10, [seed])(positions(0))[0]) for seed in range(2000)], minlength=10)
    assert firsts.min() > 130
    assert firsts.max() < 270  # 200 each; a deviation of 13.4 is normal, 70 is five of them


# IndexSlice, Shuffled, Repeated, against lists


@st.composite
def indices(draw: st.DrawFn) -> tuple[Index, list[int], list[int]]:
    """Draw a composition of operations, the list that it should be, and the pass that each position is in."""
    length = draw(st.integers(0, 25))
    index: Index = WholeIndex(length)
    model = list(range(length))
    passes = [0] * length
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["take", "skip", "shuffle", "repeat"]))
        count = draw(st.integers(0, 30))
        if kind == "take":
            index, model, passes = IndexSlice(index, 0, count), model[:count], passes[:count]
        elif kind == "skip":
            index, model, passes = IndexSlice(index, count), model[count:], passes[count:]
        elif kind == "shuffle":
            order = Bijection(len(model), [count])(np.arange(len(model), dtype=np.int64)).tolist()
            index, model = Shuffled(index, [count]), [model[at] for at in order]
        else:
            times, inner = count % 4, index
            index, model = Repeated(lambda number, inner=inner: inner, times), model * times  # type: ignore[misc]
            each = passes[-1] + 1 if passes else 1
            passes = [number * each + one for number in range(times) for one in passes]
    return index, model, passes


@given(made=indices(), data=st.data())
def test_compositions_are_what_lists_would_be(made: tuple[Index, list[int], list[int]], data: Any) -> None:
    index, model, passes = made
    assert [index.pass_of(at) for at in range(len(model))] == passes
    assert not passes or index.passes == passes[-1] + 1
    assert index.length == len(model)
    assert whole(index) == model
    if model:
        asked = data.draw(st.lists(st.integers(0, len(model) - 1), max_size=20))
        assert index(positions(*asked)).tolist() == [model[at] for at in asked]


@given(length=st.integers(1, 12), passes=st.integers(1, 5), data=st.data())
def test_each_pass_of_an_endless_repeat_has_an_order_of_its_own(length: int, passes: int, data: Any) -> None:
    index = Repeated(lambda number: Shuffled(WholeIndex(length), [0, number]), None)
    assert index.length is index.passes is None
    assert [index.pass_of(at) for at in range(3 * length)] == [at // length for at in range(3 * length)]
    model = [item for number in range(passes) for item in whole(Shuffled(WholeIndex(length), [0, number]))]
    assert index(np.arange(len(model), dtype=np.int64)).tolist() == model
    asked = data.draw(st.lists(st.integers(0, len(model) - 1), max_size=20))
    assert index(positions(*asked)).tolist() == [model[at] for at in asked]


def test_a_slice_of_an_endless_index_is_finite() -> None:
    endless = Repeated(lambda _: WholeIndex(3), None)
    assert whole(IndexSlice(endless, 2, 5)) == [2, 0, 1, 2, 0]
    assert IndexSlice(endless, 2).length is None


@pytest.mark.parametrize("times", [None, 0, 3])
def test_passes_without_items_are_none(times: int | None) -> None:
    assert Repeated(lambda _: WholeIndex(0), times).length == 0


def test_an_endless_index_can_not_be_shuffled_or_repeated() -> None:
    endless = Repeated(lambda _: WholeIndex(3), None)
    with pytest.raises(PlanError, match=r"put \.shuffle before \.repeat"):
        Shuffled(endless, [0])
    with pytest.raises(PlanError, match="would never begin its second pass"):
        Repeated(lambda _: endless, 2)


def test_only_the_whole_is_known_to_be_the_identity() -> None:
    assert WholeIndex(3).identity
    assert not IndexSlice(WholeIndex(3), 0, 3).identity
    assert not Shuffled(WholeIndex(3), [0]).identity
