"""Indices: maps from positions, 0 to `length`, to the items of a source, before it is sharded. Arithmetic, no items.

`.shuffle` is a bijection computed on the fly in O(1) memory: a Feistel network over the next power of four, walked
until it falls inside the length. Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002
(cycle walking); the idea of an index shuffle without an index in memory is grain's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from streamline.core.lazy_numpy import np
from streamline.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Positions: TypeAlias = "NDArray[np.int64]"

ROUNDS = 6
"""Feistel rounds. 4 suffice against an adversary (Luby and Rackoff); two more for the simple round function."""


class Bijection:
    """A permutation of range(length), by seed."""

    def __init__(self, length: int, entropy: Sequence[int]) -> None:
        self.length = length
        bits = max(1, (max(0, length - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(bits)
        self._mask = np.uint64((1 << bits) - 1)
        self._keys = np.random.SeedSequence(entropy).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: Positions) -> Positions:
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():  # less than four walks each on average: the domain is at most four times the length
            values[outside] = self._rounds(values[outside])
            outside = values >= np.uint64(self.length)
        return values.astype(np.int64)

    def _rounds(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._shift) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers. Source: splitmix64's finaliser (S. Vigna, public domain)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Index(ABC):
    """A map from positions to a source's items."""

    length: int | None  # None: endless

    @abstractmethod
    def __call__(self, positions: Positions) -> Positions:
        """Return the item of each position; positions are in [0, length)."""

    @property
    def identity(self) -> bool:
        """Whether every position is its own item."""
        return False

    @property
    def passes(self) -> int | None:
        """Passes over the items; None: endless."""
        return 1

    def pass_of(self, position: int) -> int:
        """Return the pass over the items that a position is in, from 0 on. From any thread."""
        return 0


@dataclass(frozen=True)
class WholeIndex(Index):
    """Every item at its own position."""

    length: int

    def __call__(self, positions: Positions) -> Positions:
        return positions

    @property
    def identity(self) -> bool:
        return True


@dataclass(frozen=True)
class IndexSlice(Index):
    """`count` positions of another index, from `start` on; None: all the rest."""

    inner: Index
    start: int = 0
    count: int | None = None

    @property
    def length(self) -> int | None:  # type: ignore[override]
        rest = None if self.inner.length is None else max(0, self.inner.length - self.start)
        return rest if self.count is None else self.count if rest is None else min(self.count, rest)

    def __call__(self, positions: Positions) -> Positions:
        return self.inner(positions + self.start)

    @property
    def passes(self) -> int | None:
        length = self.length
        return None if length is None else self.pass_of(max(0, length - 1)) + 1

    def pass_of(self, position: int) -> int:
        return self.inner.pass_of(position + self.start)


class Shuffled(Index):
    """Another, finite index, permuted."""

    def __init__(self, inner: Index, entropy: Sequence[int]) -> None:
        if inner.length is None:
            raise PlanError("an endless index can't be shuffled as a whole: put .shuffle before .repeat")
        self.length = inner.length
        self._inner = inner
        self._bijection = Bijection(inner.length, entropy)

    def __call__(self, positions: Positions) -> Positions:
        return self._inner(self._bijection(positions))

    @property
    def passes(self) -> int | None:
        return self._inner.passes

    def pass_of(self, position: int) -> int:
        """Of several passes, shuffled as one, each is as long as it was."""
        return self._inner.pass_of(position)


class Repeated(Index):
    """Pass after pass, each with an index of its own, of the same length; `times` None: endless."""

    def __init__(self, index_of_pass: Callable[[int], Index], times: int | None) -> None:
        self._index_of_pass = index_of_pass
        self._pass = (0, index_of_pass(0))
        each = self._pass[1].length
        if each is None:
            raise PlanError("a .repeat() after an endless .repeat() would never begin its second pass")
        self._each = each
        self._times = times
        self.length = 0 if not each else None if times is None else each * times

    def __call__(self, positions: Positions) -> Positions:
        passes = positions // self._each
        found = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            inside = passes == number
            found[inside] = self._of_pass(number)(positions[inside] - number * self._each)
        return found

    @property
    def passes(self) -> int | None:
        inner = self._pass[1].passes
        return None if inner is None or self._times is None else inner * self._times

    def pass_of(self, position: int) -> int:
        inner = self._pass[1]  # of whichever pass: all are made alike
        number, rest = divmod(position, self._each) if self._each else (0, 0)
        return number * (inner.passes or 1) + inner.pass_of(rest)

    def _of_pass(self, number: int) -> Index:
        if number != self._pass[0]:  # passes go by: keep one
            self._pass = (number, self._index_of_pass(number))
        return self._pass[1]


class Sampled(Index):
    """Draws with replacement from another, finite index, by weights of its positions; None: equal ones.

    What a position is, depends on the entropy and on it alone.
    """

    def __init__(self, inner: Index, weights: NDArray[np.float64] | None, length: int, entropy: Sequence[int]) -> None:
        self.length = length
        self._inner = inner
        self._entropy = entropy
        self._ends = None if weights is None else np.cumsum(weights)

    def __call__(self, positions: Positions) -> Positions:
        return self._inner(self.draw(uniform(positions, self._entropy)))

    def draw(self, numbers: NDArray[np.float64]) -> Positions:
        """Return the inner position for each number in [0, 1)."""
        if self._ends is None:
            assert self._inner.length is not None
            return (numbers * self._inner.length).astype(np.int64)
        found: Positions = np.searchsorted(self._ends, numbers * self._ends[-1], side="right")
        found[found == len(self._ends)] = np.searchsorted(self._ends, self._ends[-1])  # a product was rounded up
        return found


def uniform(positions: Positions, entropy: Sequence[int]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position, which depends on the entropy and on it alone."""
    first, second = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
    scrambled = _mix(_mix(positions.astype(np.uint64) ^ first) ^ second)
    return (scrambled >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SampledOnce(Index):
    """Draws without replacement from another, finite index; each draw is by the weights of what is left.

    Source: P. Efraimidis and P. Spirakis, "Weighted random sampling with a reservoir", 2006: the order of exponential
    variables over the weights.
    """

    def __init__(self, inner: Index, weights: NDArray[np.float64], length: int, entropy: Sequence[int]) -> None:
        self.length = length
        self._inner = inner
        numbers = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy))).exponential(size=len(weights))
        with np.errstate(divide="ignore", over="ignore"):
            keys = np.where(weights > 0, numbers / weights, np.inf)
        self._order = np.argsort(keys, kind="stable")[:length]

    def __call__(self, positions: Positions) -> Positions:
        return self._inner(self._order[positions])
