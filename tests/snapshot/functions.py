"""Functions of stages, of which only what kind of function they are matters."""

from __future__ import annotations

from typing import Any

import numpy as np


async def later(x: Any) -> Any:
    return x


def twice(x: Any) -> list[Any]:
    return [x, x]


def noisy(x: Any, *, rng: np.random.Generator) -> Any:
    return x


def tokens(x: Any) -> Any:
    return np.arange(3)


def size_of(x: Any) -> int:
    return 1
