"""A change says all of what has changed, and nothing else: it makes the new tree of the old one, to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.snapshot.changes import apply_change, change, pack_changes, unpack_changes

numbers = st.integers() | st.sampled_from([0, 1, True, False, 0.0, -0.0, 1.0, 2**70])
leaves = numbers | st.none() | st.text(max_size=2) | st.sampled_from(["=", "-", "+", "*", "\udc80"])
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab-="), inner, max_size=3),
    max_leaves=12,
)
rows = st.lists(st.fixed_dictionaries({"line": numbers, "byte": st.integers()}), min_size=3, max_size=6)


def test_changes_that_an_earlier_version_packed_can_be_read() -> None:
    assert unpack_changes(b'[{"line":1},null]') == [{"line": 1}, None]
    assert unpack_changes(pack_changes([{"line": 1}, None])) == [{"line": 1}, None]


@pytest.mark.parametrize("data", [b"", b"[", b"\x81\xa1a\x01", b"\x92\x01", b"\xc1", b"\x91\x01\x02"])
def test_what_was_not_packed_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expect|truncated|malformed"):
        unpack_changes(data)


def text(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True)


@given(st.tuples(trees, trees) | st.tuples(rows, rows))
def test_a_change_makes_the_new_tree_of_the_old_one(both: tuple[Any, Any]) -> None:
    old, new = both
    (written,) = unpack_changes(pack_changes([change(old, new)]))
    before = text(old)
    assert text(apply_change(old, written)) == text(new)
    assert text(old) == before, "the old tree stays as it is"
    assert (written is None) == (text(old) == text(new))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 5, "b": [1]}, {"a": 7, "b": [1]}, {"a": 2}),
        ({"a": 1}, {"a": True}, {"a": ["=", True]}),
        ({"a": 0.0}, {"a": -0.0}, {"a": ["=", -0.0]}),
        ({"a": 1, "b": None}, {"b": None, "c": 2}, {"a": ["-"], "c": ["=", 2]}),
        ([1, 2, 3], [2, 3], ["+", 1, []]),
        ([1, 2], [1, 2, 5], ["+", 0, [5]]),
        ([1, 2], [7, 8, 9], ["=", [7, 8, 9]]),
        ([1, True], [1, 1, 1], ["=", [1, 1, 1]]),
        ([4, 4, 4, 4], [4, 5, 6, 4], ["*", [1, 2], [1, 2]]),
        (
            [{"line": 1, "byte": 10}, {"line": 1, "byte": 10}],
            [{"line": 2, "byte": 30}, {"line": 2, "byte": 31}],
            ["*", [0, 2], {"line": [1, 1], "byte": [20, 21]}],
        ),
        (
            [{"line": 1}, {"line": 1}],
            [{"line": 2}, {"line": 1, "byte": 3}],
            ["*", [0, 2], [{"line": 1}, {"byte": ["=", 3]}]],
        ),
    ],
)
def test_what_a_change_is_written_as(old: Any, new: Any, expected: Any) -> None:
    assert change(old, new) == expected
    assert text(apply_change(old, expected)) == text(new)


@pytest.mark.parametrize(
    ("old", "found"),
    [
        ("a", 1), ({"a": 1}, ["*", [0, 1], [1]]), ([1], ["*", [0, 2], [1, 1]]), ([1], ["?"]), ({}, {"a": ["-"]}),
        ({}, {"a": 3}), ([1], ["*", [0, 1], {"a": [1]}]),
    ],
)  # fmt: skip
def test_a_change_of_something_else_is_an_error(old: Any, found: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        apply_change(old, found)
