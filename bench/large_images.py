"""Images as training reads them, in memory already: what a benchmark of large batches starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bench.suite import Tally

POOL = 8
ROWS = 64
"""Images of a batch, of 588 KiB each: 37 MiB."""


@dataclass(frozen=True)
class Rows:
    """A data set of images as training reads them, 588 KiB each: row n is full of n % 8."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)
        return {"image": images()[index % POOL], "label": np.int64(index % POOL)}


@cache
def images() -> list[Any]:
    return [np.full((3, 224, 224), level, np.float32) for level in range(POOL)]


def row(index: int) -> dict[str, Any]:
    return Rows(index + 1)[index]


def tally_of_images(n: int) -> Tally:
    """What `n` images add up to: a number of each, and its label."""
    return Tally(n, float(sum(2 * (at % POOL) for at in range(n))))
