"""The orders and numbers that a resume draws again are those that were drawn, whichever version of NumPy runs.

NumPy doesn't promise this of its generators (NEP 19). Where one of these fails, a new NumPy draws otherwise: a snapshot
taken under an older one in the middle of a window, a cycle or a mixture would resume with other items, and say nothing.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

import streamline as sl
from streamline.core.flow import Site
from streamline.core.tasks import Session, Tasks
from streamline.sharding.index import Bijection
from streamline.sources.sampler import Numbers
from streamline.transforms.regenerate_cycle import order_of
from streamline.transforms.shuffle import permutation

SITE = Site(Tasks(None, Session()), shard=3, num_shards=8, epoch=(2,))  # type: ignore[arg-type]


def digest(order: Any) -> str:
    return sha256(np.asarray(order, dtype="<i8").tobytes()).hexdigest()[:16]


def noisy(x: int, *, rng: np.random.Generator) -> int:
    return int(rng.integers(10**9))


def test_a_windows_order() -> None:
    assert permutation(12, 5, SITE, 7) == [1, 10, 6, 4, 11, 3, 8, 7, 0, 9, 5, 2]
    assert digest(permutation(5000, 5, SITE, 7)) == "f9cbe46a56bd7bc3"


def test_a_cycles_order() -> None:
    assert order_of(12, 5, SITE, 7, 1).tolist() == [10, 1, 8, 4, 0, 11, 2, 7, 6, 5, 3, 9]
    assert digest(order_of(5000, 5, SITE, 7, 1)) == "d7ac9ddcba26b084"


def test_the_order_of_an_index() -> None:
    assert Bijection(12, [5, 2])(np.arange(12)).tolist() == [2, 0, 3, 4, 1, 5, 11, 10, 7, 6, 8, 9]


def test_what_a_mixture_draws() -> None:
    assert Numbers(SITE).of(5, 300, 3).tolist() == [0.858450615996059, 0.3886140583331795, 0.8679438519909992]


def test_what_the_function_of_a_map_with_a_seed_draws() -> None:
    assert list(sl.from_items(range(3)).map(noisy, seed=1)) == [800427848, 609506464, 324821360]
