"""How large the property tests of this folder are: examples (STREAMLINE_EXAMPLES multiplies them), lists, bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations, cycle, product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("STREAMLINE_EXAMPLES", "1"))

SHARE = 0.12
"""Of the counts that tests are written with, so that the whole suite takes six minutes: `make laws` searches deeper."""

SEEDS = range(max(2, int(2 * FACTOR)))
"""For tests that are run with several seeds."""


def seeded(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return each name with all seeds; with one of them, in turn, unless there are to be more examples."""
    if FACTOR > 1:
        return [(name, seed) for name in names for seed in SEEDS]
    return list(zip(names, cycle(SEEDS)))


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
    import streamline.core.channel  # here: a host process that imports this module has no need of them
    import streamline.plan.plan
    import streamline.runtime.thread_bridge
    import streamline.transforms.completion_order
    import streamline.transforms.concurrent
    import streamline.transforms.map

    places: dict[str, list[Any]] = {
        "LIST_ITEMS": [
            streamline.core.channel,
            streamline.transforms.concurrent,
            streamline.transforms.completion_order,
        ],
        "LONG_LIST_ITEMS": [streamline.core.channel, streamline.runtime.thread_bridge],
        "QUICK_ITEM_S": [streamline.core.channel],
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
