"""`.bucket_by_length`: batches of items of about one length.

State: the upstream's before the oldest item that is in no batch yet (a mark, `Since`), how many items were read from
there, and which of them are in no batch, as ranges. A resume rereads them all and skips the others. An item of a rare
length waits long for its batch, so these may be many.

Items are numbered from where the flow was opened. The numbers of a bucket's items are in a list that only grows, and
that the states share once its batch has left: until it is read, a state costs a list of these lists.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from streamline.core.blame import blame, saved_as
from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.meters import HoldTimer
from streamline.core.options import check_flag, check_function, check_int, is_async, type_and_repr
from streamline.core.pace import Pace
from streamline.core.replay import FailedCall
from streamline.core.state import MadeStates, Over, Reference, Since, State, States
from streamline.core.state_types import Count, Range, total
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.transforms.base import Stage
from streamline.transforms.batch import TOGETHER_ITEMS, collate_of, make_batch
from streamline.transforms.collate import shown_collate
from streamline.transforms.completion_order import ranges

In = TypeVar("In")
Out = TypeVar("Out")


class BucketPart(msgspec.Struct, frozen=True):
    """The stage's part of a saved state: items `read` since the mark, and of them those in no batch."""

    read: Count
    held: list[Range]
    dropped: Count | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        total(self.held)
        if any(one.stop > self.read for one in self.held):
            raise ValueError(f"Expected positions of {self.read} items that were read, got {self.held[-1]}")


@dataclass(frozen=True, kw_only=True)
class BucketByLength(Stage[In, Out]):
    """Collates items of one range of lengths; `batch_size` has one for each bucket: one more than `boundaries`."""

    kind: ClassVar[str] = "bucket_by_length"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "boundaries": "the items that were in no batch delivered are put into the new buckets",
        "batch_size": "the batches from here on have the new sizes, from the items that were in no batch delivered",
        "length": "the items that were in no batch delivered are put into the buckets that the new function says",
        "collate": "the batches from here on are made by the new function",
        "drop_remainder": "the rests at the end are treated as it says now",
        "added": "the items from here on come in batches",
        "removed": "the items from here on come one by one",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset({"drop_remainder", "collate"})
    state_type: ClassVar[Any] = BucketPart
    initial_state = BucketPart(0, [])
    keeps_only_held: ClassVar[bool] = True
    rewinds = True
    depth_change: ClassVar[int] = 1

    boundaries: tuple[int, ...]
    batch_size: tuple[int, ...]
    length: Callable[[In], int]
    collate: Callable[[list[In]], Out]
    drop_remainder: bool = False

    @classmethod
    def replay_cost(cls, own: BucketPart) -> str | None:
        if not own.read:
            return None
        return (
            f"reads {own.read:,} items again, from the oldest one that was in no batch, and passes over the "
            f"{own.read - total(own.held):,} of them that were delivered"
        )

    def shown_options(self) -> list[str]:
        return [*super().shown_options(), *shown_collate(self.collate)]

    def num_outputs(self, items: float) -> float | None:
        return items if items == math.inf else None

    @property
    def in_flight(self) -> int:
        return sum(self.batch_size)

    @property
    def inputs_per_output(self) -> int:
        return max(self.batch_size)

    @property
    def output_weight(self) -> int:
        return max(self.batch_size)

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        held = Buckets(self.name, self.boundaries, self.batch_size, self.check_length, run.own, run.upstream.state)
        pace = Pace()
        while (chunk := await run.upstream.pull(held.room)) is not None:
            held.arrive(chunk)
            start = 0
            while start < len(chunk.items):
                with HoldTimer(run.meter):
                    start, full, error = held.take(chunk.items, start)
                if error is not None:
                    item, now = chunk.items[start - 1], chunk.states[start - 1]
                    run.skip_or_raise(
                        blame(error, str(self), run.site, now, FailedCall(self.check_length, item)), item, now
                    )
                    yield Chunk((), (), held.states(Reference.to(now))[0])
                elif full is not None:
                    batch = self._batch(held, full, run, Reference(chunk.states, start - 1))
                    del full
                    yield batch
                    del batch
                    await pace.maybe_yield()
            if chunk.progress is not None and not held.count:
                yield Chunk((), (), held.states(Reference.to(chunk.progress))[0])
            del chunk  # release the items while the next are made
        held.check_end(str(self))
        end = run.upstream.state
        if self.drop_remainder:
            yield Chunk((), (), Over(self.name, BucketPart(0, [], held.count), end))
            return
        for bucket in held.rests:
            yield self._batch(held, bucket, run, Reference.to(end))

    def check_length(self, item: In) -> int:
        found: Any = self.length(item)
        if type(found) is int and found >= 0:
            return found
        try:
            length = index(found) if not isinstance(found, bool) else None
        except TypeError:
            length = None
        if length is None:
            raise PlanTypeError(
                f"expected a length from .bucket_by_length(length=), an integer, got {type_and_repr(found)}"
            )
        if length < 0:
            raise PlanError(f"expected a length of at least 0 from .bucket_by_length(length=), got {length}")
        return length

    def _batch(self, held: Buckets[In], bucket: int, run: StageRun[In], now: Reference) -> Chunk[Out]:
        made = make_batch(self, self.collate, held.empty(bucket), run, now.get())
        states = held.states(now)
        return Chunk(made, states) if made else Chunk((), (), states[0])


def bucket_of(
    boundaries: Sequence[int],
    batch_size: int | Sequence[int],
    length: Callable[[Any], int] | None,
    collate: object,
    drop_remainder: bool,
    *,
    name: str,
) -> BucketByLength[Any, Any]:
    method = ".bucket_by_length"
    check_flag(f"{method}(drop_remainder=)", drop_remainder)
    bounds = _ints(f"{method}(boundaries)", boundaries, 0)
    if any(bound <= before for before, bound in pairwise(bounds)):
        raise PlanError(f"{method}(boundaries) increase from each to the next, got {list(bounds)}")
    if hasattr(batch_size, "__index__"):
        batch_size = check_int(f"{method}(batch_size)", batch_size, 1)
        sizes = (batch_size,) * (len(bounds) + 1)
    else:
        sizes = _ints(f"{method}(batch_size)", batch_size, 1)
    if len(sizes) != len(bounds) + 1:
        raise PlanError(
            f"{method}(batch_size) has a size for each bucket, {len(bounds) + 1} of {len(bounds)} boundaries, since "
            f"the last bucket takes what is longer, got {len(sizes)}"
        )
    fn = length_of if length is None else length
    check_function(f"{method}(length=)", fn)
    if is_async(fn):
        raise PlanError(f"{method}(length=) is a sync function: await what it needs in a .map before")
    return BucketByLength(
        name=name,
        boundaries=bounds,
        batch_size=sizes,
        length=fn,
        collate=collate_of(f"{method}(collate=)", collate),
        drop_remainder=drop_remainder,
    )


@saved_as("length_of")
def length_of(item: Any) -> int:
    """Return how long an item is: `len` of it, which is an array's first axis."""
    unsized: TypeError | None = None
    if not isinstance(item, Mapping):
        try:
            return len(item)
        except TypeError as error:
            unsized = error
    raise PlanTypeError(
        f"expected an item with a length, got a {type(item).__name__}: say how long it is with "
        ".bucket_by_length(length=)"
    ) from unsized


def _ints(option: str, values: object, least: int) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise PlanTypeError(
            f"{option} is a sequence of integers{'' if least == 0 else ', or one integer'}, got {type_and_repr(values)}"
        )
    return tuple(check_int(f"each of {option}", value, least) for value in values)


@dataclass(slots=True)
class _UpstreamChunk:
    """A list from the upstream: the number of its first item, the state before it, and the states after each item."""

    first: int
    before: Reference
    states: States

    def state_before(self, position: int) -> State:
        return self.states[position - self.first - 1] if position > self.first else self.before.get()


class _Bucket(Generic[In]):
    """Items of one bucket that are in no batch, their numbers, and the upstream's list with the first of them."""

    __slots__ = ("chunk", "items", "positions")

    def __init__(self) -> None:
        self.items: list[In] = []
        self.positions: list[int] = []
        self.chunk: _UpstreamChunk | None = None


class Buckets(Generic[In]):
    """The buckets of one run of a stage.

    Args:
      own: the stage's part of the state to begin at.
      begin: the upstream's state there.
    """

    def __init__(
        self,
        name: str,
        boundaries: Sequence[int],
        sizes: Sequence[int],
        check_length: Callable[[In], int],
        own: BucketPart,
        begin: State,
    ) -> None:
        self._name, self._boundaries, self._sizes, self._check_length = name, boundaries, sizes, check_length
        self._buckets = [_Bucket[In]() for _ in sizes]
        self._next = 0  # the number of the next item
        self._replay_end = own.read  # items before this one are read again
        self._due = tuple(at for one in own.held for at in range(one.first, one.stop))
        self._waiting = frozenset(self._due)
        self._current = _UpstreamChunk(0, Reference.to(begin), ())
        self._upstream_end = self._current.before
        self.count = 0

    @property
    def room(self) -> int:
        """Items to pull next: with those held, no more than fill all buckets."""
        return min(TOGETHER_ITEMS, sum(self._sizes) - self.count)

    @property
    def rests(self) -> list[int]:
        """The numbers of the buckets that hold items."""
        return [number for number, bucket in enumerate(self._buckets) if bucket.items]

    def arrive(self, chunk: Chunk[In]) -> None:
        """Make these items the next to be taken."""
        self._current = _UpstreamChunk(self._next, self._upstream_end, chunk.states)
        self._upstream_end = chunk.end_reference

    def take(self, items: Sequence[In], start: int) -> tuple[int, int | None, BaseException | None]:
        """Take items from `start` on, until a bucket is full.

        Returns:
          Where to go on; the number of the full bucket, if any; the error of the last item taken, if any.
        """
        boundaries, sizes, check_length = self._boundaries, self._sizes, self._check_length
        for at in range(start, len(items)):
            position = self._next
            self._next += 1
            if position < self._replay_end and position not in self._waiting:
                continue
            try:
                number = bisect_left(boundaries, check_length(items[at]))
            except BaseException as error:
                return at + 1, None, error
            bucket = self._buckets[number]
            if not bucket.items:
                bucket.chunk = self._current
            bucket.items.append(items[at])
            bucket.positions.append(position)
            self.count += 1
            if len(bucket.items) >= sizes[number]:
                return at + 1, number, None
        return len(items), None, None

    def empty(self, number: int) -> list[In]:
        """Empty a bucket, and return its items."""
        items = self._buckets[number].items
        self._buckets[number] = _Bucket()
        self.count -= len(items)
        return items

    def states(self, now: Reference) -> States:
        """Return the state after what was taken so far; `now` is the upstream's."""
        held = [(bucket.positions, bucket.chunk) for bucket in self._buckets if bucket.chunk is not None]
        return MadeStates(_state_after, self._name, held, self._next, self._replay_end, self._due, now)

    def check_end(self, stage: str) -> None:
        """Check that all items that had been read before a resume were read again."""
        if self._next < self._replay_end:
            raise ResumeError(
                f"{stage} had read {self._replay_end:,} items from the oldest one that was in no batch, and only "
                f"{self._next:,} of them are left to be read again: what is before it gives fewer than it did"
            )


def _state_after(
    name: str,
    held: list[tuple[list[int], _UpstreamChunk]],
    end: int,
    replay_end: int,
    due: tuple[int, ...],
    now: Reference,
) -> State:
    """Return the state after a batch: the items before `end` that are left in the buckets.

    Args:
      held: for each bucket, the numbers of its items (later ones may be added) and the list with the first of them.
      replay_end: items before this one had been read before a resume; those of `due` were in no batch then.
    """
    positions = [at for numbers, _ in held for at in numbers if at < end]
    positions += [at for at in due if at >= end]
    upstream, low = now.get(), end
    if held:
        low, came = min((numbers[0], bucket) for bucket, (numbers, _) in enumerate(held))
        upstream = Since(held[came][1].state_before(low), upstream)
    return Over(name, BucketPart(max(end, replay_end) - low, ranges(positions, low)), upstream)
