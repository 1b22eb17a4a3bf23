"""How many items a plan delivers on its ranks, computed stage by stage, without I/O.

Unknown after a stage that decides by the items themselves (filter, flat_map, unbatch, custom stages), and of sources
that must be read to be counted (files, iterables).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from streamline.core.state import Json
from streamline.plan.plan import Plan
from streamline.sharding.ends import EndsPolicy
from streamline.sharding.split import shards_of_rank
from streamline.transforms.base import Stage

N = TypeVar("N", int, float)


def num_outputs_of_rank(plan: Plan, rank: int, world_size: int, policy: EndsPolicy) -> float | None:
    """Return how many items a rank gives in an epoch that ends by `policy`; infinity: endless; None: unknown."""
    on_ranks = num_left_on_ranks(plan, world_size, lambda _: 0)
    if policy == "allow":
        return on_ranks[rank]
    known = all_known(on_ranks)
    return None if known is None else (min if policy == "drop" else max)(known)


def num_left_on_ranks(
    plan: Plan, world_size: int, consumed: Callable[[int], int], state: Mapping[str, Json] | None = None
) -> list[float | None]:
    """Return how many items are left on each rank, if the stages after the merge hold none.

    `consumed` returns what the merge has taken of a shard; `state` has these stages' parts; None: at their beginning.
    """
    of_shards = [outputs_of_shard(plan, shard) for shard in range(plan.shard.num_shards)]
    found: list[float | None] = []
    for rank in range(world_size):
        mine = shards_of_rank(plan.shard.num_shards, rank, world_size)
        known = all_known([of_shards[shard] for shard in mine])
        whole = None if known is None else sum(known)
        left = None if whole is None else whole - sum(map(consumed, mine))
        for stage in plan.after:
            if whole is not None and left is not None:
                own = stage.read_part((state or {}).get(stage.name))
                left, whole = stage.num_left(left, whole, own), stage.num_outputs(whole)
        found.append(left)
    return found


def all_known(numbers: Sequence[N | None]) -> list[N] | None:
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def outputs_of_shard(plan: Plan, shard: int) -> float | None:
    if plan.before and not plan.source.indexable:
        return None  # what stands before the shard is not in the part, and acts on what isn't counted
    num_shards = plan.shard.num_shards
    return _downstream(plan.worker, plan.source.num_outputs(plan.part((0,)), shard, num_shards))


def _downstream(stages: Sequence[Stage[Any, Any]], items: float | None) -> float | None:
    for stage in stages:
        if items is None:
            return None
        items = stage.num_outputs(items)
    return items
