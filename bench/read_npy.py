"""Do the rows of a local npy file come as fast as out of a loop over NumPy's own memory map?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least

_FOLDER = tempfile.TemporaryDirectory(prefix="streamline-bench-")

SHAPES: dict[str, tuple[int, ...]] = {"scalars": (), "small": (8,), "large": (65_536,)}
"""Of a row of int32: the last is 256 KiB."""


@cache
def path(kind: str, rows: int) -> str:
    """Return the file of so many rows, each of which begins with its number; it is made where it is missing."""
    found = str(Path(_FOLDER.name) / f"{kind}-{rows}.npy")
    data = np.lib.format.open_memmap(found, "w+", np.int32, (rows, *SHAPES[kind]))
    data[:] = np.arange(rows, dtype=np.int32).reshape(rows, *([1] * len(SHAPES[kind])))
    return found


def _scalars(items: Iterable[Any]) -> Tally:
    count = total = 0
    for item in items:
        count += 1
        total += int(item)
    return Tally(count, total)


def _rows(items: Iterable[Any]) -> Tally:
    count = total = 0
    for row in items:
        count += 1
        total += int(row[0])
    return Tally(count, total)


def _all(items: Iterable[Any]) -> Tally:
    count = total = 0
    for row in items:
        count += 1
        total += int(row.max())
    return Tally(count, total)


def numpy_scalars(rows: int) -> Tally:
    return _scalars(np.load(path("scalars", rows), mmap_mode="r"))


def numpy_small(rows: int) -> Tally:
    return _rows(np.load(path("small", rows), mmap_mode="r"))


def numpy_large(rows: int) -> Tally:
    return _all(np.load(path("large", rows), mmap_mode="r"))


def scalars(rows: int) -> Tally:
    with sl.read_npy(path("scalars", rows)).open() as stream:
        return _scalars(stream)


def small(rows: int) -> Tally:
    with sl.read_npy(path("small", rows)).open() as stream:
        return _rows(stream)


def large(rows: int) -> Tally:
    with sl.read_npy(path("large", rows)).open() as stream:
        return _all(stream)


def prepare_scalars(rows: int) -> None:
    path("scalars", rows)


def prepare_small(rows: int) -> None:
    path("small", rows)


def prepare_large(rows: int) -> None:
    path("large", rows)


def expected(rows: int) -> Tally:
    return Tally(rows, rows * (rows - 1) // 2)


OWN = "a loop over np.load(mmap_mode='r')"


def _suite(what: str, note: str, own: Any, ours: Any, prepare: Any, rows: int) -> Suite:
    return Suite(
        question=f"npy: do {what} come as fast as out of NumPy's memory map?",
        unit="items/s",
        floor=OWN,
        expected=expected,
        smoke_items=200,
        note=f"{note} Whole runs, opening and closing included; the file is in the page cache.",
        cases=(
            Case(OWN, own, rows, prepare=prepare),
            Case("streamline", ours, rows, (at_least(0.8, OWN),), prepare=prepare),
        ),
    )


SUITES = (
    _suite("numbers", "One number a row.", numpy_scalars, scalars, prepare_scalars, 2_000_000),
    _suite("small rows", "8 numbers a row.", numpy_small, small, prepare_small, 500_000),
    _suite("large rows", "256 KiB a row, of which the maximum is taken.", numpy_large, large, prepare_large, 2_000),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
