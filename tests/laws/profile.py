"""How many examples the property tests of this folder run: STREAMLINE_EXAMPLES multiplies them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("STREAMLINE_EXAMPLES", "1"))

SHARE = 0.25
"""Of the counts that tests are written with, so that the whole suite takes six minutes: `make laws` searches deeper."""

SEEDS = range(max(2, int(2 * FACTOR)))
"""For tests that are run with several seeds."""


def examples(count: int) -> Callable[[Any], Any]:
    """Return the settings of a property test of `count` examples: always the same, unless there are to be more."""
    return settings(
        max_examples=max(1, int(count * SHARE * FACTOR)),
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
