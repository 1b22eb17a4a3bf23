from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamline.runtime.check import mismatches


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": None}),
        ({"a": 1}, {"a": 1.5}),
        ("x", "y"),
        (np.zeros(3), np.ones(5)),
        ([1], []),
    ],
)
def test_records_of_a_kind(one: Any, other: Any) -> None:
    assert mismatches([("f", one), ("g", other)], columns=True) == []


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"a": 1}, {"a": "1"}, "the first records of f and g differ: 'a' is int and str"),
        ({"a": 1}, {"b": 1}, "the first records differ: g has no 'a', f has no 'b'"),
        ({"a": 1}, [1], "the first record of f is a mapping, that of g is list"),
        (None, {"a": 1}, "the first record of f is NoneType, that of g is a mapping"),
        ("x", b"x", "the first record of f is str, that of g is bytes"),
        (np.zeros(3), np.zeros(3, int), "is ndarray of float64, that of g is ndarray of int64"),
    ],
)
def test_records_of_two_kinds_fail(one: Any, other: Any, said: str) -> None:
    ((message, fails),) = mismatches([("f", one), ("g", other)], columns=False)
    assert said in message
    assert fails


def test_a_key_that_some_lack_fails_in_tables_only() -> None:
    records = [("f", {"a": 1, "b": 2}), ("g", {"a": 1})]
    assert mismatches(records, columns=False) == [("the first records differ: g has no 'b'", False)]
    assert mismatches(records, columns=True) == [("the first records differ: g has no 'b'", True)]


def test_many_keys_are_cut_short() -> None:
    ((message, _),) = mismatches([("f", {str(at): 1 for at in range(9)}), ("g", {"x": 1})], columns=False)
    assert "and 4 more" in message


def test_nothing_to_compare() -> None:
    assert mismatches([], columns=True) == mismatches([("f", 1)], columns=True) == []
