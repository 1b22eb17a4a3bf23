"""States: JSON, choices between two of them, and columns that make them when they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.core.state import (
    At,
    CountedStates,
    Joined,
    NumberedStates,
    Over,
    Picked,
    Reference,
    Shifted,
    Since,
    Skipped,
    State,
    States,
    Tally,
    Tree,
    trimmed,
    with_skips,
)


class Chosen(State):
    """A choosing flow's state: how many choices were made, out of a fixed log."""

    def __init__(self, number: int) -> None:
        self.number = number

    def json(self, until: State | None = None) -> Tree:
        stop = self.number
        if until is not None:
            latest = until.latest
            assert isinstance(latest, Chosen)
            stop = latest.number
        return {"merge": {"number": self.number, "replay": list(range(self.number, stop))}}

    def tally(self, found: Tally) -> None:
        """It has left nothing out."""

    def where(self) -> str:
        return f"choice {self.number}"


def column(length: int, name: str = "s") -> list[State]:
    return [At(name, index) for index in range(length)]


def own(state: State) -> Any:
    """Return the only entry of a state."""
    (value,) = state.json().values()
    return value


# JSON


def test_a_source_keeps_its_position_under_its_name() -> None:
    assert At("items", 3).json() == {"items": 3}


def test_a_stage_adds_its_own_part_to_its_upstreams() -> None:
    state = Over("take", 2, Over("skip", 1, At("items", 3)))
    assert state.json() == {"items": 3, "skip": 1, "take": 2}


def test_every_reading_is_a_tree_of_its_own() -> None:
    state = Over("take", 2, At("items", 3))
    state.json()["items"] = "changed"
    assert state.json() == {"items": 3, "take": 2}


def test_an_empty_own_part_is_a_part() -> None:
    """One well-known loader loses a legitimately empty state to `if state:`."""
    assert Over("a", {}, Over("b", 0, At("c", None))).json() == {"a": {}, "b": 0, "c": None}


# Choices since a mark


def test_a_mark_carries_the_choices_made_since() -> None:
    assert Since(Chosen(2), Chosen(5)).json() == {"merge": {"number": 2, "replay": [2, 3, 4]}}


def test_without_choices_since_there_is_nothing_to_repeat() -> None:
    assert Since(Chosen(2), Chosen(2)).json() == Chosen(2).json() == {"merge": {"number": 2, "replay": []}}


def test_the_walk_goes_through_the_stages_between() -> None:
    state = Since(Over("map", 1, Chosen(2)), Over("map", 4, Chosen(5)))
    assert state.json() == {"merge": {"number": 2, "replay": [2, 3, 4]}, "map": 1}


def test_a_mark_inside_a_mark_repeats_up_to_the_outer_now() -> None:
    """shuffle after flat_map after a choosing merge: the outer mark's inner mark needs all choices up to the end."""
    inner_then = Over("flat_map", 1, Since(Chosen(2), Chosen(3)))
    inner_now = Over("flat_map", 5, Since(Chosen(6), Chosen(9)))
    state = Over("shuffle", 4, Since(inner_then, inner_now))
    assert state.json() == {"merge": {"number": 2, "replay": list(range(2, 9))}, "flat_map": 1, "shuffle": 4}


def test_the_latest_state_after_marks_is_where_the_flow_stands() -> None:
    now = Chosen(9)
    assert Since(Chosen(1), Since(Chosen(2), now)).latest is now
    assert now.latest is now


@given(numbers=st.lists(st.integers(0, 30), min_size=2, max_size=6).map(sorted))
def test_marks_nested_to_any_depth_repeat_everything_from_the_oldest(numbers: list[int]) -> None:
    *marks, latest = numbers
    state: State = Chosen(latest)
    for mark in reversed(marks):
        state = Since(Chosen(mark), state)
    assert state.json()["merge"] == {"number": marks[0], "replay": list(range(marks[0], latest))}
    for depth, mark in enumerate(marks):  # and so does a stage at any depth
        state = Over(
            f"stage {depth}",
            depth,
            Since(Over(f"stage {depth}", 0, Chosen(mark)), Over(f"stage {depth}", 1, Chosen(latest))),
        )
        assert state.json()["merge"] == {"number": mark, "replay": list(range(mark, latest))}


# For a person


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (At("items", 3), "item 3 of items, counted from 1"),
        (At("rows", {"file": "a.jsonl", "line": 18}), "file a.jsonl, line 18"),
        (Over("map", None, At("items", 3)), "item 3 of items, counted from 1"),
        (Since(At("items", 3), At("items", 7)), "item 7 of items, counted from 1"),
        (Over("shuffle", 0, Since(Chosen(1), Over("x", 1, Chosen(4)))), "choice 4"),
    ],
)
def test_where_names_the_source_position(state: State, expected: str) -> None:
    assert state.where() == expected


def test_a_state_without_a_position_says_nothing() -> None:
    class Silent(State):
        def json(self, until: State | None = None) -> Tree:
            return {}

        def tally(self, found: Tally) -> None:
            raise NotImplementedError

    assert Silent().where() == ""


# Columns


def test_a_source_that_counts_needs_one_number() -> None:
    assert [own(CountedStates("items", 5)[index]) for index in range(3)] == [5, 6, 7]


def test_numbers_go_over_the_upstreams_states() -> None:
    assert NumberedStates("take", 3, column(2))[1].json() == {"s": 1, "take": 4}


def test_a_reference_makes_its_state_when_asked() -> None:
    made = []

    class Making:
        def __getitem__(self, index: int, /) -> State:
            made.append(index)
            return At("s", index)

    reference = Reference(Making(), 4)
    assert not made
    assert own(reference.get()) == 4
    there = At("s", 9)
    assert Reference.to(there).get() is there


@given(length=st.integers(1, 20), data=st.data())
def test_shifted_and_picked_columns_are_what_lists_would_be(length: int, data: Any) -> None:
    states: States = column(length)
    model = list(range(length))
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            by = data.draw(st.integers(0, len(model) - 1))
            states, model = Shifted(states, by), model[by:]
        else:
            indices = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=8))
            states, model = Picked(states, indices), [model[index] for index in indices]
    assert [own(states[index]) for index in range(len(model))] == model


def test_shifting_again_and_again_stays_flat() -> None:
    states: States = column(2000)
    for _ in range(1999):  # deep chains would end in a RecursionError
        states = Shifted(states, 1)
    assert own(states[0]) == 1999


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_joined_columns_stand_end_to_end(lengths: list[int]) -> None:
    joined, start = Joined(), 0
    expected = []
    for number, length in enumerate(lengths):
        joined.add(start, column(length, f"column {number}"))
        expected += [{f"column {number}": index} for index in range(length)]
        start += length
    assert [joined[index].json() for index in range(start)] == expected


def test_a_trimmed_column_has_the_same_states_and_its_own_numbers() -> None:
    joined = Joined()
    for start, length in ((0, 3), (3, 2), (5, 4)):
        joined.add(start, column(length, f"column {start}"))
    shifted = Joined()
    shifted.add(0, Shifted(column(9), 2))
    for states, length in ((Picked(column(9), [1, 2, 5, 8]), 4), (joined, 9), (shifted, 7), (CountedStates("s", 3), 6)):
        for first in range(length):
            for count in range(1, length - first + 1):
                found = trimmed(states, first, count)
                expected = [states[first + index].json() for index in range(count)]
                assert [found[index].json() for index in range(count)] == expected


def test_no_states_of_any_column_are_nothing_to_send() -> None:
    for column in (Picked((At("s", 1),), ()), Picked((At("s", 1),), range(1)), Joined(), CountedStates("s", 1)):
        assert trimmed(column, 0, 0) == ()


# Skipped items --------------------------------------------------------------------------------------------------------


def test_counts_come_first_and_sorted_wherever_they_were_counted() -> None:
    items, window = At("items", 3), {"window": 1}
    ours = Over("shuffle", window, Skipped("map", 0, 2, Skipped("filter", 0, 1, items)))
    theirs = Skipped("filter", 0, 1, Over("shuffle", window, Skipped("map", 0, 2, items)))
    for state in (ours, theirs, Since(ours, theirs)):
        assert json.dumps(state.json()) == ('{"errors": {"filter": 1, "map": 2}, "items": 3, "shuffle": {"window": 1}}')
    later = Since(Over("shuffle", window, items), theirs)
    assert json.dumps(later.json()) == (
        '{"errors": {"filter": [0, 1], "map": [0, 2]}, "items": 3, "shuffle": {"window": 1}}'
    )


def test_counts_of_a_copy_leave_the_state_as_it_was() -> None:
    tree: Tree = {"items": 3, "errors": {"map": 2}}
    assert [*with_skips(tree, {"map": 3, "filter": 1})["errors"]] == ["filter", "map"]
    assert with_skips(tree, {}) == {"items": 3}
    assert tree == {"items": 3, "errors": {"map": 2}}
