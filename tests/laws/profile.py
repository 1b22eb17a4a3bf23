"""How large the property tests of this folder are: examples (STREAMLINE_EXAMPLES multiplies them), lists, bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, cycle, product
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

S = TypeVar("S")
T = TypeVar("T")

FACTOR = float(os.environ.get("STREAMLINE_EXAMPLES", "1"))

SHARE = 0.12
"""Of the counts that tests are written with, so that the whole suite takes minutes: `make deep` searches deeper."""

SEEDS = range(max(2, int(2 * FACTOR)))
"""For tests that are run with several seeds, and of what is killed several times."""

GENERATIONS = 5 if FACTOR > 1 else 3
"""Resumes in a row, of tests whose pipelines are resumed at each item anyway."""


def in_turn(names: Iterable[S], values: Sequence[T]) -> list[tuple[S, T]]:
    """Return each name with one of the values, in turn; with all of them, if there is time."""
    return list(product(names, values) if FACTOR > 1 else zip(names, cycle(values)))


def sampled(points: Sequence[T], step: int) -> Sequence[T]:
    """Return the last of all points, and each of `step` before; all, if there is time."""
    return points if FACTOR > 1 else points[::-step][::-1]


def covering(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows of one value of each axis, in which any two values of two axes meet; the product, if there is time.

    Greedy, and always the same: of the product, the rows that have the most pairs that are still to come.
    """
    rows = list(product(*axes))
    if FACTOR > 1:
        return rows
    wanted, found = {pair for row in rows for pair in combinations(enumerate(row), 2)}, []
    while wanted:
        found.append(max(rows, key=lambda row: len(wanted.intersection(combinations(enumerate(row), 2)))))
        wanted.difference_update(combinations(enumerate(found[-1]), 2))
    return found


def long_but(quick: Iterable[S], values: Iterable[S]) -> list[Any]:
    """Return values as parameters of a test, of which all but the quick ones are marked as long."""
    kept = list(quick)

    def marked(value: S) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)

    return [value if value in kept else marked(value) for value in values]


def mostly_long(values: Iterable[S], step: int) -> list[Any]:
    """Return values as parameters of a test, of which all but each `step`-th are marked as long."""
    given = list(values)
    return long_but(given[::step], given)


def examples(count: int) -> Callable[[Any], Any]:
    """Return the settings of a property test of `count` examples: always the same, unless there are to be more.

    And one more: what Hypothesis tries first is the simplest there is, an empty list, say.
    """
    return settings(
        max_examples=1 + max(1, int(count * SHARE * FACTOR)),
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def short(**constants: float) -> Iterator[None]:
    """Let lists, segments and bounds be so small that a few items reach them."""
    import streamline.core.capacity  # here: a host process that imports this module has no need of them
    import streamline.plan.plan
    import streamline.runtime.thread_bridge
    import streamline.transforms.completion_order
    import streamline.transforms.concurrent
    import streamline.transforms.map

    places: dict[str, list[Any]] = {
        "LIST_ITEMS": [
            streamline.core.capacity,
            streamline.transforms.concurrent,
            streamline.transforms.completion_order,
        ],
        "LONG_LIST_ITEMS": [streamline.core.capacity, streamline.runtime.thread_bridge],
        "QUICK_ITEM_S": [streamline.core.capacity],
        "READ_AHEAD_ITEMS": [streamline.plan.plan],
        "SEGMENT_ITEMS": [streamline.transforms.completion_order],
        "AHEAD": [streamline.transforms.map],
        "WAITING_ITEMS": [streamline.transforms.map],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            for module in places[name]:
                patch.setattr(module, name, value)
        yield
