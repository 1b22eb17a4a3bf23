"""Items in buckets, numbered, and the state behind those that have left.

Items are numbered from where the flow was opened. What a bucket holds is noted in lists that only grow, and are left to
the states that know them when its batch leaves: a state costs nothing but a list of these until it is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from streamline.core.flow import Chunk
from streamline.core.state import Json, Over, Reference, Since, State, States
from streamline.core.state_types import Count, Range, total
from streamline.errors import ResumeError
from streamline.transforms.batch import TOGETHER_ITEMS
from streamline.transforms.unordered import ranges

__all__ = ["Buckets", "Held", "own_part"]


In = TypeVar("In")


class Held(msgspec.Struct):
    """The stage's part of a saved state, as `own_part` writes it."""

    read: Count
    held: list[Range]

    def __post_init__(self) -> None:
        total(self.held)
        if any(one.stop > self.read for one in self.held):
            raise ValueError(f"Expected positions of {self.read} items that were read, got {self.held[-1]}")


def own_part(read: int, held: list[list[int]]) -> dict[str, Json]:
    """Return the stage's part of a state.

    Args:
      read: items that were read from the mark on.
      held: those of them that were in no batch, as ranges [first, stop).
    """
    return {"read": read, "held": held}


@dataclass(slots=True)
class _Arrived:
    """A list of items of the upstream's: the number of the first, the state before it, and those behind each."""

    first: int
    before: Reference
    states: States

    def state_before(self, position: int) -> State:
        return self.states[position - self.first - 1] if position > self.first else self.before.get()


class _Bucket(Generic[In]):
    """Items of one bucket that are in no batch, their numbers, and the list that the first one came in."""

    __slots__ = ("came", "items", "positions")

    def __init__(self) -> None:
        self.items: list[In] = []
        self.positions: list[int] = []
        self.came: _Arrived | None = None


class Buckets(Generic[In]):
    """The buckets of a stage.

    Args:
      name: the stage's.
      measured: returns the length of an item.
      own: the stage's part of the state that it is opened at; None at the beginning.
      begin: the upstream's state there.

    Attributes:
      count: items in them.
    """

    def __init__(
        self,
        name: str,
        boundaries: Sequence[int],
        sizes: Sequence[int],
        measured: Callable[[In], int],
        own: Any,
        begin: State,
    ) -> None:
        self._name, self._boundaries, self._sizes, self._measured = name, boundaries, sizes, measured
        self._buckets = [_Bucket[In]() for _ in sizes]
        self._next = 0  # the number of the next item
        self._again: int = own["read"] if own else 0  # items before this one are read again
        self._due = tuple(at for first, stop in (own["held"] if own else ()) for at in range(first, stop))
        self._waiting = frozenset(self._due)
        self._arrived = _Arrived(0, Reference.to(begin), ())
        self._behind = self._arrived.before
        self.count = 0

    @property
    def room(self) -> int:
        """How many items may come: with those that are here, no more than fill all buckets."""
        return min(TOGETHER_ITEMS, sum(self._sizes) - self.count)

    @property
    def rests(self) -> list[int]:
        """The buckets in which there are items."""
        return [number for number, bucket in enumerate(self._buckets) if bucket.items]

    def arrive(self, chunk: Chunk[In]) -> None:
        """These items are the next to be taken."""
        self._arrived = _Arrived(self._next, self._behind, chunk.states)
        self._behind = chunk.behind

    def take(self, items: Sequence[In], start: int) -> tuple[int, int | None, BaseException | None]:
        """Take items from `start` on, until a bucket is full.

        Returns:
          Where to go on, the bucket that is full, if one is, and what is wrong with the last item taken.
        """
        boundaries, sizes, measured = self._boundaries, self._sizes, self._measured
        for at in range(start, len(items)):
            position = self._next
            self._next += 1
            if position < self._again and position not in self._waiting:
                continue
            try:
                number = bisect_left(boundaries, measured(items[at]))
            except BaseException as error:
                return at + 1, None, error
            bucket = self._buckets[number]
            if not bucket.items:
                bucket.came = self._arrived
            bucket.items.append(items[at])
            bucket.positions.append(position)
            self.count += 1
            if len(bucket.items) >= sizes[number]:
                return at + 1, number, None
        return len(items), None, None

    def empty(self, number: int) -> list[In]:
        """Return the items of a bucket, which are in a batch now."""
        items = self._buckets[number].items
        self._buckets[number] = _Bucket()
        self.count -= len(items)
        return items

    def states(self, now: Reference) -> _Left:
        """Return the state behind what was taken so far; `now` is the upstream's."""
        held = [(bucket.positions, bucket.came) for bucket in self._buckets if bucket.came is not None]
        return _Left(self._name, held, self._next, self._again, self._due, now)

    def check_end(self, stage: str) -> None:
        """Insist that what had been read has been read again; `stage` as printed.

        Raises:
          ResumeError: there is less now.
        """
        if self._next < self._again:
            raise ResumeError(
                f"{stage} had read {self._again:,} items from the oldest one that was in no batch, and only "
                f"{self._next:,} of them are left to be read again: what is before it gives fewer than it did"
            )


class _Left:
    """The state behind a batch: the items before `end` that are left in the buckets.

    Args:
      held: the numbers of the items in each bucket, to which later ones may be added, and the list of its first one.
      again: items before this one had been read before a resume; those of `due` were in no batch then.
    """

    __slots__ = ("_again", "_due", "_end", "_held", "_name", "_now")

    def __init__(
        self,
        name: str,
        held: list[tuple[list[int], _Arrived]],
        end: int,
        again: int,
        due: tuple[int, ...],
        now: Reference,
    ) -> None:
        self._name, self._held, self._end, self._again, self._due, self._now = name, held, end, again, due, now

    def __getitem__(self, index: int, /) -> State:
        end, now = self._end, self._now.get()
        positions = [at for held, _ in self._held for at in held if at < end]
        positions += [at for at in self._due if at >= end]
        upstream, low = now, end
        if self._held:
            low, came = min((held[0], number) for number, (held, _) in enumerate(self._held))
            upstream = Since(self._held[came][1].state_before(low), now)
        return Over(self._name, own_part(max(end, self._again) - low, ranges(positions, low)), upstream)
