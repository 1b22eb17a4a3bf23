"""Who has how much to read, and who has nothing. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from streamline.io.storage.base import FoundObject
from streamline.plan.plan import Plan
from streamline.preflight.report import Load, Problem
from streamline.sharding.split import byte_range, files_of, shards_of_rank

__all__ = ["UNEVEN", "idle", "loads_of", "ranks_of", "uneven"]

UNEVEN = 2.0
"""How many times the least shard's bytes the largest has before that is worth a note: the run takes as long as it."""


def loads_of(plan: Plan, found: Sequence[FoundObject] | None) -> tuple[Load, ...]:
    """Return what each shard has to read.

    Args:
      found: the source's files, as they are listed; None: it has none.
    """
    num_shards = plan.shard.num_shards
    if found is None:
        part = plan.part((0,))
        counts = [plan.source.num_outputs(part, shard, num_shards) for shard in range(num_shards)]
        return tuple(Load(items=int(n) if n is not None and n < math.inf else None, bytes=None) for n in counts)
    if plan.mode == "contiguous" and num_shards > 1 and len(found) == 1:
        size = found[0].size
        spans = [(0, 0) if size is None else byte_range(size, num_shards, shard) for shard in range(num_shards)]
        return tuple(Load(items=None, bytes=None if size is None else stop - start) for start, stop in spans)
    if plan.mode == "file" and num_shards > 1:
        return tuple(_load([found[at] for at in files_of(len(found), num_shards, s)]) for s in range(num_shards))
    return (_load(found),) * num_shards


def ranks_of(shards: Sequence[Load], world_size: int) -> tuple[Load, ...]:
    """Return what each rank has to read, all its shards together."""
    return tuple(
        _sum([shards[shard] for shard in shards_of_rank(len(shards), rank, world_size)]) for rank in range(world_size)
    )


def idle(plan: Plan, shards: Sequence[Load], objects: int, kind: str) -> list[Problem]:
    """Return what is wrong if some shards have nothing to read."""
    empty = sum(load.items == 0 or load.bytes == 0 for load in shards)
    if not objects or not empty or len(shards) == 1:
        return []
    if any(load.items is None for load in shards):
        message = f"{empty:,} of {len(shards):,} shards have nothing to read: the file has too few bytes to be split so"
        return [Problem(what="shards", message=message)]
    message = (
        f"{len(shards):,} shards for {objects:,} {kind}: {empty:,} workers would have nothing to read: "
        f"write .shard({objects}) or fewer"
    )
    ways = [] if plan.source.listed is False else ["or split the data into more files"]
    return [Problem(what="shards", message=", ".join([message, *ways]))]


def uneven(loads: Sequence[Load], who: str) -> list[str]:
    """Return a note if some have much more to read than others."""
    sizes = [load.bytes for load in loads if load.bytes is not None]
    counts = [load.items for load in loads if load.items is not None]
    amounts = sizes if len(sizes) == len(loads) else counts
    if len(amounts) < max(2, len(loads)) or not min(amounts) or max(amounts) < UNEVEN * min(amounts):
        return []
    return [
        f"the largest {who} has {max(amounts) / min(amounts):.1f} times as much to read as the smallest: "
        "the run takes as long as the largest"
    ]


def _load(found: Sequence[FoundObject]) -> Load:
    return _sum([Load(items=1, bytes=one.size) for one in found])


def _sum(loads: Sequence[Load]) -> Load:
    items = [load.items for load in loads if load.items is not None]
    sizes = [load.bytes for load in loads if load.bytes is not None]
    return Load(
        items=sum(items) if len(items) == len(loads) else None, bytes=sum(sizes) if len(sizes) == len(loads) else None
    )
