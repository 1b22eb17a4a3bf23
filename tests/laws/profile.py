"""How many examples the property tests of this folder run: STREAMLINE_EXAMPLES multiplies them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("STREAMLINE_EXAMPLES", "1"))

SHARE = 0.15
"""Of the counts that tests are written with, so that the whole suite takes six minutes: `make laws` searches deeper."""

SEEDS = range(max(2, int(2 * FACTOR)))
"""For tests that are run with several seeds."""


def seeded(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return each name with all seeds; with one of them, in turn, unless there are to be more examples."""
    if FACTOR > 1:
        return [(name, seed) for name in names for seed in SEEDS]
    return list(zip(names, cycle(SEEDS)))


def examples(count: int) -> Callable[[Any], Any]:
    """Return the settings of a property test of `count` examples: always the same, unless there are to be more."""
    return settings(
        max_examples=max(1, int(count * SHARE * FACTOR)),
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
