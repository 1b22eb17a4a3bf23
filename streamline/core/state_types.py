"""The types of saved states, which stages and sources declare, and their check.

Types are as `msgspec.convert` takes them; a struct checks how values go together in `__post_init__`. Unknown entries
are ignored: a later version may write more.
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
"""Likewise, at least 1."""

FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\0]*$")]
"""The name of a file in a folder that the plan names: no path that would lead elsewhere."""

Unsigned: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""An epoch, or what a random generator begins with: users may give integers of any length."""

MOST_POSITIONS = 2**24
"""Positions that the ranges of one state may hold: stages make sets of them. An unordered map with concurrency=10_000
keeps at most 640,000."""


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
    """Check the counts up to which a merge repeats strict order: they follow those of its choices."""
    counts = Counter(replay)
    if len(strict_to) != len(produced) or any(
        stop < count + counts[worker] for worker, (stop, count) in enumerate(zip(strict_to, produced, strict=True))
    ):
        raise ValueError(f"Expected counts from {list(produced)} and the choices on, got {list(strict_to)}")
    if sum(strict_to) - sum(produced) > MOST_REPEATED:
        raise ValueError(f"Expected at most {MOST_REPEATED:,} items to be read again")


def total(ranges: Iterable[Range]) -> int:
    """Return how many positions some ranges hold. Raises `ValueError`: more than any stage keeps."""
    found = sum(one.stop - one.first for one in ranges)
    if found > MOST_POSITIONS:
        raise ValueError(f"Expected ranges of at most {MOST_POSITIONS:,} positions, got {found:,}")
    return found


def check_type(value: Json, expected: Any, where: str) -> Any:
    """Return a part of a saved state as the type that its owner declares. Raises `SnapshotError`, with `where`."""
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
