"""What a benchmark says: its cases, what they must deliver, what they must reach. Nothing in here runs or prints."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Unit = Literal["items/s", "samples/s", "calls/s", "ms", "MB"]


class WrongItemsError(Exception):
    """A run was fast but wrong: it delivered other items than it had to."""


@dataclass(frozen=True)
class Tally:
    """What one run delivered.

    Args:
      count: items that reached the consumer.
      checksum: of their values; exact (integers, or floats that add up without rounding).
      seconds: what is reported, where that is not the whole run (None: the whole run is).
      mb: what is reported, where it is no time at all.
    """

    count: int
    checksum: float
    seconds: float | None = None
    mb: float | None = None

    def check(self, expected: Tally) -> None:
        """Raise WrongItemsError unless the same items were delivered; times don't count."""
        if (self.count, self.checksum) != (expected.count, expected.checksum):
            raise WrongItemsError(
                f"expected {expected.count} items with checksum {expected.checksum}, "
                f"got {self.count} with checksum {self.checksum}"
            )


@dataclass(frozen=True)
class Target:
    """A bound on a case: absolute on its median, in `unit`, or on its ratio to another case of the same run."""

    sense: Literal["≥", "≤"]
    bound: float
    of: str | None
    unit: Unit = "ms"

    def holds(self, reached: float) -> bool:
        return reached >= self.bound if self.sense == "≥" else reached <= self.bound


def at_least(ratio: float, of: str) -> Target:
    return Target("≥", ratio, of)


def at_most(ratio: float, of: str) -> Target:
    return Target("≤", ratio, of)


def within_ms(bound: float) -> Target:
    return Target("≤", bound, None)


def within_mb(bound: float) -> Target:
    return Target("≤", bound, None, "MB")


def items_per_second(bound: float) -> Target:
    return Target("≥", bound, None, "items/s")


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Args:
      name: unique in its suite.
      run: takes the number of items, delivers them, says what it delivered. An async one runs on a fresh event loop.
        Picklable, because every case has a process of its own.
      items: per run; enough for a run of some tenths of a second, so slow peers get fewer.
      targets: what the median must reach.
      peers: modules it imports; one that is not installed is reported as such.
      prepare: called before every run, untimed, outside of any event loop; caches what it makes.
    """

    name: str
    run: Callable[[int], Tally] | Callable[[int], Awaitable[Tally]]
    items: int
    targets: tuple[Target, ...] = ()
    peers: tuple[str, ...] = ()
    prepare: Callable[[int], object] | None = None

    def missing(self) -> str | None:
        """Return the first module this case needs that is not installed."""
        return next((name for name in self.peers if importlib.util.find_spec(name) is None), None)


@dataclass(frozen=True)
class Suite:
    """One table.

    Args:
      question: what the table answers.
      unit: of the reported figures; everything but ms and MB (1e6 bytes) is a rate.
      cases: in the table's order.
      smoke_items: per run, when only correctness is asked.
      floor: name of the case that the ratio column refers to.
      expected: what every run of n items must deliver (None: the cases check themselves).
      note: what a reader must know to read the figures.
    """

    question: str
    unit: Unit
    cases: tuple[Case, ...]
    smoke_items: int
    floor: str | None = None
    expected: Callable[[int], Tally] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        referred = {target.of for case in self.cases for target in case.targets} | {self.floor}
        if len(set(names)) < len(names) or not referred <= {None, *names}:
            raise ValueError(f"{self.question!r}: names are not unique, or one of {referred} is not among {names}")


@dataclass(frozen=True)
class Result:
    """What came out of one case: its measured rounds (rates, ms, or MB), or why there are none."""

    rounds: tuple[float, ...] = ()
    problem: str = ""
    failed: bool = False

    def ratio_to(self, other: Result) -> float | None:
        """Return the median of the rounds' own ratios, None where one of the two has no rounds.

        Not the ratio of the medians: what slows a machine down for seconds slows both halves of a round.
        """
        if not self.rounds or not other.rounds:
            return None
        return median(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))


def peer(module: str) -> Any:
    """Import another library, untyped. In a call and not at a file's top, so that a missing one costs one row only."""
    return importlib.import_module(module)
