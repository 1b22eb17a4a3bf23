"""What saved states are made of: the types that stages and sources declare, and insisting on them.

Types are as `msgspec.convert` takes them. Where one value says something about another, a struct says so in
`__post_init__`. Entries that it doesn't name are let pass: a later version may write more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from streamline.core.state import Json, Tree
from streamline.errors import SnapshotError

MOST_COUNT = 2**63 - 1

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
"""A number of items, bytes or passes in a saved state."""

Counts: TypeAlias = Count | Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)]
"""As `streamline.core.state.SkipCounts`."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
"""Likewise, of what there is one of at least."""

FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\0]*$")]
"""The name of a file in a folder that the plan names: no path that would lead elsewhere."""

Unsigned: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""An epoch, or what a random generator begins with: users may give integers of any length."""

MOST_IN_RANGES = 2**24
"""Positions that the ranges of one state may hold: stages make sets of them. An unordered map with concurrency=10_000
keeps 640,000 at the most."""


class Range(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The positions from `first` to `stop` - 1; in a state, `[first, stop]`."""

    first: Count
    stop: Count

    def __post_init__(self) -> None:
        if self.first >= self.stop:
            raise ValueError(f"Expected a range that holds something, got [{self.first}, {self.stop}]")


MOST_REPEATED = 2**31
"""Items of a merge that a stage downstream may read again: a pass that it keeps, say."""


def check_strict_to(produced: Sequence[int], replay: Sequence[int], strict_to: Sequence[int]) -> None:
    """Insist that the counts up to which a merge repeats strict order go on from those of its choices."""
    counts = Counter(replay)
    if len(strict_to) != len(produced) or any(
        stop < count + counts[worker] for worker, (stop, count) in enumerate(zip(strict_to, produced, strict=True))
    ):
        raise ValueError(f"Expected counts from {list(produced)} and the choices on, got {list(strict_to)}")
    if sum(strict_to) - sum(produced) > MOST_REPEATED:
        raise ValueError(f"Expected at most {MOST_REPEATED:,} items to be read again")


def total(ranges: Iterable[Range]) -> int:
    """Return how many positions some ranges hold; `ValueError`: more than any stage keeps."""
    found = sum(one.stop - one.first for one in ranges)
    if found > MOST_IN_RANGES:
        raise ValueError(f"Expected ranges of at most {MOST_IN_RANGES:,} positions, got {found:,}")
    return found


def check_type(value: Json, expected: Any, where: str) -> Any:
    """Return a part of a saved state as the type that its owner declares.

    Args:
      where: for the message: "the state of 'shuffle' of shard 3".

    Raises:
      SnapshotError: it is of another type.
    """
    try:
        return msgspec.convert(value, expected)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SnapshotError(f"the snapshot is damaged, or was edited: {where}: {error}; use an earlier one") from None


class MergePart(msgspec.Struct):
    """The merge's part of a state, by shard."""

    next_worker: Count
    produced: dict[str, Unsigned]
    workers: dict[str, Tree]
    replay: list[Unsigned] = []
    strict_to: list[Count] | None = None


class FingerprintEntry(msgspec.Struct):
    kind: str
    name: str
    options: dict[str, Any] = {}
    code: dict[str, str] = {}
