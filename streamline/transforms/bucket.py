"""Items of about one length into batches.

State: the upstream's before the oldest item that is in no batch yet (a mark, `Since`), how many items were read from
there, and which of them are in no batch, as ranges. A resume reads them all again, and passes over the others. A length
that is rare keeps its item for long, so that may be many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, ClassVar, TypeVar

from streamline.core.blame import blame
from streamline.core.counters import HoldTimer
from streamline.core.flow import Chunk, Lists, Run
from streamline.core.options import check_function, check_int, given, is_async
from streamline.core.pace import Pace
from streamline.core.replay import FailedCall
from streamline.core.state import Json, Over, Reference, State
from streamline.errors import PlanError, PlanTypeError
from streamline.transforms.base import Stage
from streamline.transforms.batch import collate_of, collated
from streamline.transforms.buckets import Buckets, Held, own_part

__all__ = ["BucketByLength", "bucket_of"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True)
class BucketByLength(Stage[In, Out]):
    """Collates items out of one bucket of lengths; see `Pipeline.bucket_by_length`.

    Attributes:
      batch_size: one for each bucket, of which there is one more than boundaries.
    """

    survives: ClassVar[Mapping[str, str]] = {
        "boundaries": "the items that were in no batch delivered are put into the new buckets",
        "batch_size": "the batches from here on have the new sizes, from the items that were in no batch delivered",
        "length": "the items that were in no batch delivered are put into the buckets that the new function says",
        "collate": "the batches from here on are made by the new function",
        "drop_remainder": "the rests at the end are treated as it says now",
        "added": "the items from here on come in batches",
        "removed": "the items from here on come one by one",
    }
    steady: ClassVar[frozenset[str]] = frozenset({"drop_remainder", "collate"})
    state_type: ClassVar[Any] = Held

    boundaries: tuple[int, ...]
    batch_size: tuple[int, ...]
    length: Callable[[In], int]
    collate: Callable[[list[In]], Out]
    drop_remainder: bool = False

    @classmethod
    def again(cls, own: Json) -> str | None:
        if not own or not own["read"]:
            return None
        held = sum(stop - first for first, stop in own["held"])
        return (
            f"reads {own['read']:,} items again, from the oldest one that was in no batch, and passes over the "
            f"{own['read'] - held:,} of them that were delivered"
        )

    @classmethod
    def regrouped(cls, owns: Sequence[Json]) -> Json:
        return super().regrouped([own if own and own["read"] else None for own in owns])

    @property
    def rewinds(self) -> bool:
        return True

    def num_outputs(self, items: float) -> float | None:
        return items if items == math.inf else None

    @property
    def in_flight(self) -> int:
        return sum(self.batch_size)

    @property
    def gathers(self) -> int:
        return max(self.batch_size)

    @property
    def bulk(self) -> int:
        return max(self.batch_size)

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, own or own_part(0, []), upstream)

    async def lists(self, run: Run[In]) -> Lists[Out]:
        held = Buckets(self.name, self.boundaries, self.batch_size, self.measured, run.own, run.upstream.state)
        pace = Pace()
        while (chunk := await run.upstream.pull(held.room)) is not None:
            held.arrive(chunk)
            start = 0
            while start < len(chunk.items):
                with HoldTimer(run.meter):
                    start, full, error = held.take(chunk.items, start)
                if error is not None:
                    item, now = chunk.items[start - 1], chunk.states[start - 1]
                    run.judge(blame(error, str(self), run.site, now, FailedCall(self.measured, item)), item, now)
                    yield Chunk((), (), held.states(Reference.to(now))[0])
                elif full is not None:
                    batch = self._batch(held, full, run, Reference(chunk.states, start - 1))
                    del full
                    yield batch
                    del batch
                    await pace.breathe()
            if chunk.after is not None and not held.count:
                yield Chunk((), (), held.states(Reference.to(chunk.after))[0])
            del chunk  # items are not kept while the next are made
        held.check_end(str(self))
        end = run.upstream.state
        if self.drop_remainder:
            yield Chunk((), (), Over(self.name, {**own_part(0, []), "dropped": held.count}, end))
            return
        for bucket in held.rests:
            yield self._batch(held, bucket, run, Reference.to(end))

    def measured(self, item: In) -> int:
        """Return how long an item is.

        Raises:
          PlanError: the function said what is no length; a `PlanTypeError` if it is no integer.
          What the function raises.
        """
        found: Any = self.length(item)
        if type(found) is int and found >= 0:
            return found
        try:
            length = index(found) if not isinstance(found, bool) else None
        except TypeError:
            length = None
        if length is None:
            raise PlanTypeError(f"expected a length from .bucket_by_length(length=), an integer, got {given(found)}")
        if length < 0:
            raise PlanError(f"expected a length of at least 0 from .bucket_by_length(length=), got {length}")
        return length

    def _batch(self, held: Buckets[In], bucket: int, run: Run[In], now: Reference) -> Chunk[Out]:
        made = collated(self, self.collate, held.empty(bucket), run, now.get())
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
    """Return the stage.

    Raises:
      PlanError: an option out of range or, a `PlanTypeError`, of the wrong type.
    """
    method = ".bucket_by_length"
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


def length_of(item: Any) -> int:
    """Return how long an item is: `len` of it, which is an array's first axis.

    Raises:
      PlanTypeError: it has none; or it is a dict, which has as many parts as it has fields.
    """
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
            f"{option} is a sequence of integers{'' if least == 0 else ', or one integer'}, got {given(values)}"
        )
    return tuple(check_int(f"each of {option}", value, least) for value in values)
