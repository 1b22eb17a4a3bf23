"""How many items a plan delivers on one rank, before anything is read. Pure: each stage says what it makes of a number.

Unknown behind whatever decides by the items themselves (filter, flat_map, unbatch, custom stages), and of what must be
read to be counted (files, iterables).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamline.plan import Plan
from streamline.sharding import shards_of_rank
from streamline.transforms.base import Stage

__all__ = ["num_items"]


def num_items(plan: Plan, rank: int, world_size: int) -> float | None:
    """Return how many items come out of `plan` on one rank, in any epoch.

    Returns:
      A whole number; `math.inf` for no end; None if nobody knows before they have been read.
    """
    if plan.before and not plan.source.indexable:
        return None  # what stands before the shard is not in the part, and acts on what isn't counted
    num_shards, part = plan.shard.num_shards, plan.part((0,))
    merged: float = 0
    for shard in shards_of_rank(num_shards, rank, world_size):
        items = _behind(plan.worker, plan.source.num_outputs(part, shard, num_shards))
        if items is None:
            return None
        merged += items
    return _behind(plan.after, merged)


def _behind(stages: Sequence[Stage[Any, Any]], items: float | None) -> float | None:
    for stage in stages:
        if items is None:
            return None
        items = stage.num_outputs(items)
    return items
