"""Digests: equal for equal items, in any process; different for different ones; none of what isn't known."""

from __future__ import annotations

import copy
import datetime
import enum
import subprocess
import sys
import uuid
from collections import namedtuple
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamline.core import duplicate_check as digests
from streamline.core.duplicate_check import digest

Point = namedtuple("Point", "x y")


@dataclass
class Sample:
    name: str
    pixels: Any


class Record(msgspec.Struct):
    name: str
    label: int


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Own:
    def __repr__(self) -> str:
        raise AssertionError("user code was called")

    __reduce__ = __array__ = __repr__


ITEMS: list[Any] = [
    None, True, False, 1, 0, -1, 2**60, 1.0, 0.5, 1j, 2j, "", "1", "a", b"", b"a", b"1", (), [1], [[1]], [2, 1],
    [1, [2]], [[1], 2], ["ab"], ["a", "b"], {}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": {"b": 1}}, {3}, frozenset({4}),
    Point(1, 2), Point(2, 2), Sample("a", 1), Sample("a", [1]), Record("a", 1), Record("b", 1), Colour.RED, Colour.BLUE,
    Decimal("1.5"), datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), uuid.UUID(int=1), Path("A"), Path("B"),
    np.int64(1), np.int32(1), np.zeros(3), np.zeros(3, np.float32), np.zeros((3, 1)), np.array([0, 0, 1.0]),
    np.array(["a", None], object), np.array(["a", "c"], object), np.array([(1, 2.0)], "i4,f8"),
    np.array(["2020-01-01"], "datetime64[D]"), Sample("a", np.zeros(2)), Sample("a", np.ones(2)),
]  # fmt: skip


def test_different_items_have_different_digests() -> None:
    made = [digest(item) for item in ITEMS]
    assert None not in made
    assert len(set(made)) == len(ITEMS)


def test_equal_items_have_equal_digests() -> None:
    for item in ITEMS:
        assert digest(item) == digest(copy.deepcopy(item))
    assert digest(np.arange(10)[::2]) == digest(np.arange(0, 10, 2))


def test_they_are_the_same_in_another_process_whatever_its_hashes() -> None:
    script = (
        "from streamline.core.duplicate_check import digest; print(digest(({1, 2.5}, {'x': b'y', 'z': 'é'})).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    known = digest(({1, 2.5}, {"x": b"y", "z": "é"}))
    assert known is not None
    assert found == {known.hex() + "\n"}


def test_what_is_not_known_has_none_and_its_code_is_not_called() -> None:
    itself: list[Any] = []
    itself.append(itself)
    objects = np.empty(1, object)
    objects[0] = Own()
    unknown: list[Any] = [
        Own(), object(), [1, Own()], {"a": Own()}, {Own()}, Sample("a", Own()), lambda: 1, iter([1]), itself,
        objects, 10**5000,
    ]  # fmt: skip
    for item in unknown:
        assert digest(item) is None


def test_of_what_is_long_the_edges_count_and_the_length() -> None:
    edge = digests.EDGE_BYTES
    for make in (bytearray, lambda n: np.zeros(n, np.uint8), lambda n: "0" * n):
        assert digest(make(100 * edge)) != digest(make(100 * edge + 1))
    for at, differs in [(0, True), (-1, True), (50 * edge, False)]:
        data, pixels = bytearray(100 * edge), np.zeros((100, edge), np.uint8)
        plain, black = digest(data), digest(pixels)
        data[at] = pixels.flat[at] = 1
        assert (digest(data) != plain) is differs
        assert (digest(pixels) != black) is differs


def test_the_middle_of_a_large_array_is_not_read() -> None:
    """A view of one number that stands for 8 TB."""
    assert digest(np.broadcast_to(np.float64(1), (10**6, 10**6))) is not None


def test_tensors_are_compared_by_their_content() -> None:
    torch = pytest.importorskip("torch")
    assert digest(torch.zeros(3)) == digest(torch.zeros(3, requires_grad=True)) == digest(np.zeros(3, np.float32))
    assert digest(torch.zeros(3)) != digest(torch.ones(3))
    assert digest(torch.zeros(3, device="meta")) is None
