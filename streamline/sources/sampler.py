"""Which component item n comes from: a draw for (seed, n), by weights that may change with n. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from streamline.core.flow import Site
from streamline.core.lazy_numpy import np
from streamline.core.options import type_and_repr
from streamline.core.state import Json
from streamline.errors import PlanError, PlanTypeError

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK = 1024
"""Numbers that are drawn together: item n has number n mod BLOCK of block n div BLOCK."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The seed and the weights of a mix.

    Attributes:
      schedule: (items served, weights by name from there on), the first one from 0 on.
    """

    seed: int
    schedule: tuple[tuple[int, tuple[tuple[str, float], ...]], ...]

    def json(self) -> Json:
        return {"seed": self.seed, "weights": [[start, dict(weights)] for start, weights in self.schedule]}

    @classmethod
    def of(cls, found: Json) -> Draws:
        schedule = tuple((start, tuple(weights.items())) for start, weights in found["weights"])
        return cls(seed=found["seed"], schedule=schedule)

    @property
    def names(self) -> set[str]:
        """The components with a weight above 0."""
        return {name for _, weights in self.schedule for name, weight in weights if weight}

    def onward(self, served: int) -> Iterator[tuple[tuple[str, float], ...]]:
        """Yield the weights after so many items served, then the later ones."""
        at = bisect_right(self.schedule, served, key=lambda entry: entry[0])
        yield from (weights for _, weights in self.schedule[at - 1 :])

    def change(self, served: int) -> float:
        """Return the number of items served at which the weights change next."""
        return next((start for start, _ in self.schedule if start > served), math.inf)


Span = tuple[float, Draws]
"""The draws of the items before this number."""


class Numbers:
    """Numbers in [0, 1) for the items of a shard, the same however many are asked for at once."""

    def __init__(self, site: Site) -> None:
        self._where = [site.num_shards, site.shard, *site.epoch]
        self._last: tuple[int, int] = (-1, -1)
        self._block: npt.NDArray[np.float64] = np.empty(0)
        self._generator = np.random.Generator(np.random.Philox(key=0))

    def of(self, seed: int, first: int, count: int) -> npt.NDArray[np.float64]:
        """Return the numbers of 1 to `count` items from `first` on: as far as they are drawn together."""
        block, start = divmod(first, BLOCK)
        if self._last != (seed, block):
            if self._last != (seed, block - 1):  # else they are next; to make a generator takes as long as a block
                key = np.random.SeedSequence([seed, *self._where]).generate_state(2, np.uint64)
                philox = np.random.Philox(key=key, counter=block * (BLOCK // 4))  # it counts by fours
                self._generator = np.random.Generator(philox)
            self._block, self._last = self._generator.random(BLOCK), (seed, block)
        return self._block[start : start + count]


def draws_of(weights: object, names: Sequence[str], seed: int) -> Draws:
    weights = dict.fromkeys(names, 1.0) if weights is None else weights
    schedule = weights if isinstance(weights, list | tuple) else [(0, weights)]
    if schedule and all(isinstance(entry, int | float) for entry in schedule):
        pairs = ", ".join(f"{name!r}: {weight}" for name, weight in zip(names, schedule, strict=False))
        raise PlanTypeError(
            f"sl.mix(weights=) is a dict by name, {{{pairs}}}, got the list {list(schedule)}; pipelines in a list are "
            "called '0', '1', …"
        )
    found: list[tuple[int, tuple[tuple[str, float], ...]]] = []
    for entry in schedule:
        if not isinstance(entry, list | tuple) or len(entry) != 2 or type(entry[0]) is not int:
            raise PlanTypeError(
                f"sl.mix(weights=) as a schedule is [(0, {{...}}), (100_000, {{...}})], got {type_and_repr(entry)} in "
                "it"
            )
        found.append((entry[0], tuple(sorted(_weights(entry[1], names).items()))))
    starts = [start for start, _ in found]
    if not starts or starts[0] != 0 or any(one >= other for one, other in pairwise(starts)):
        raise PlanError(f"sl.mix(weights=) as a schedule begins at 0 and rises, got {starts}")
    return Draws(seed=seed, schedule=tuple(found))


def _weights(weights: object, names: Sequence[str]) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        raise PlanTypeError(f"sl.mix(weights=) is a dict by name, or a schedule of these, got {type_and_repr(weights)}")
    if set(weights) != set(names):
        raise PlanError(
            f"sl.mix(weights=) names each component once ({', '.join(names)}), got {', '.join(map(str, weights))}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise PlanTypeError(f"sl.mix(weights=): that of {name!r} is a number, got {type_and_repr(weight)}")
        if not (weight >= 0 and math.isfinite(weight)):
            raise PlanError(f"sl.mix(weights=): that of {name!r} is finite and at least 0, got {weight}")
    if not any(weights.values()):
        raise PlanError("sl.mix(weights=): they are all 0, so nothing could be drawn")
    return {name: float(weight) for name, weight in weights.items()}
