"""How many bytes an item holds."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from streamline.core.tree import nbytes


@dataclass
class Sample:
    image: Any
    label: str


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (b"abc", 3),
        (bytearray(10), 10),
        ("abcd", 4),
        (memoryview(b"abcdef"), 6),
        (np.zeros((2, 3), "f4"), 24),
        (np.zeros(10)[::2], 40),
        (np.float32(1), 4),
        (["ab", b"c"], 3),
        (("ab", "c"), 3),
        ({"ab", "c"}, 3),
        (frozenset(["ab"]), 2),
        ({"key": b"value"}, 8),
        ({"x": [np.zeros(4, "u1")] * 3}, 13),
        (Pair(b"abc", "de"), 5),
        (Sample(np.zeros(8, "u1"), "cat"), 11),
        ([Sample(b"abc", "d")] * 2, 8),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_the_payload_is_counted(item: Any, expected: int) -> None:
    assert nbytes(item) == expected


@pytest.mark.parametrize("item", [b"", "", [], (), {}, set(), np.zeros(0)], ids=repr)
def test_nothing_is_one_byte(item: Any) -> None:
    """An item without bytes must fill a budget at last."""
    assert nbytes(item) == 1


@pytest.mark.parametrize("item", [None, 3, 1.5, True, object(), Sample, 2**200], ids=lambda value: type(value).__name__)
def test_all_else_is_as_large_as_python_says(item: Any) -> None:
    assert nbytes(item) == sys.getsizeof(item)


def test_an_nbytes_that_is_no_number_is_not_believed() -> None:
    class Tensor:
        def nbytes(self) -> int:
            return 5

    assert nbytes(Tensor()) == sys.getsizeof(Tensor())
