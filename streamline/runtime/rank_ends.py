"""How ranks agree where their streams end: on a number of items beforehand, or round by round over a store.

If lengths are known, every rank computes the same number, without a message; that is exact unless the plan changes, or
items are skipped because of errors. Otherwise ranks exchange over a store who has more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamline.core.state import Tree
from streamline.errors import PlanError, RanksError
from streamline.plan.length import all_known, num_left_on_ranks
from streamline.plan.plan import Plan
from streamline.sharding.ends import NAME, Agreement, Ends, nothing_to_pad
from streamline.sharding.rank_sync import store_of_torch
from streamline.sharding.ranks import Rank
from streamline.snapshot.snapshot import Snapshot

ENDLESS = 2**53
"""Stands for infinity in a state, which JSON lacks."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The snapshot that a run resumes."""

    part: Snapshot  # this rank's, as the plan reads it
    job: Snapshot  # the snapshot that was given: of all ranks, or of this one
    same_plan: bool  # nothing has changed since


def agree_on_end(plan: Plan, ends: Ends, rank: Rank, epoch: int, resumed: Resumed | None, *, skips: bool) -> Agreement:
    """Return how a rank's stream is to end, if all ranks are opened alike; `skips`: items may be skipped.

    Raises `PlanError`: the number of items is unknown and there is no store, or padding can't be read again;
    `RanksError`, on all ranks: one has nothing to pad with.
    """
    if rank.world_size == 1 or ends.policy == "allow":
        return Agreement(ends=ends, rank=rank)
    if ends.policy == "pad" and plan.source.is_live:
        raise PlanError('ends="pad" gives first items again, and a feed is read once: ends="drop", or "allow"')
    own = _saved_part(resumed, ends)
    padding: dict[str, Any] = {"padded": own.get("padded", 0), "again": own.get("again")}
    left = None if skips else _items_left(plan, rank, resumed, own)
    if left is not None and resumed is None and ends.policy == "pad" and min(left.of_ranks) == 0 < max(left.of_ranks):
        raise RanksError(nothing_to_pad(left.of_ranks.index(0), rank.world_size))
    if left is not None and (left.even or (count := _end_count(left.of_ranks, ends)) == math.inf):
        return Agreement(ends=ends, rank=rank)
    if left is not None:
        spare: float = 0
        if left.saved:
            spare = own.get("spare", 0)
        elif ends.policy == "drop":
            spare = left.of_ranks[rank.rank] - count
        return Agreement(ends=ends, rank=rank, left=int(count), spare=int(min(spare, ENDLESS)), **padding)
    store = ends.store or store_of_torch(rank)
    if store is None:
        raise PlanError(_no_store_message(ends, rank, skips))
    return Agreement(ends=ends, rank=rank, store=store, key=_key(plan, ends, rank, epoch), **padding)


def with_items_left(agreement: Agreement, part: Snapshot) -> Snapshot:
    """Return a rank's snapshot with how many items are left, for a run that opens it without the other ranks."""
    if agreement.left is None:
        return part
    own = {"policy": agreement.ends.policy, "left": agreement.left, "spare": agreement.spare}
    return replace(part, state={**part.state, NAME: {**part.state.get(NAME, {}), **own}})


def _saved_part(resumed: Resumed | None, ends: Ends) -> Tree:
    """Return the entry of the snapshot about ends, unless the plan or the policy has changed."""
    if resumed is None or not resumed.same_plan:
        return {}
    own: Tree = resumed.part.state.get(NAME) or {}
    return own if own.get("policy") == ends.policy else {}


@dataclass(frozen=True)
class _ItemsLeft:
    """How many items are left on each rank."""

    of_ranks: Sequence[float]
    even: bool = False  # all ranks have the same number, even after a resume that knows of one rank only
    saved: bool = False  # these are numbers of the snapshot


def _end_count(left: Sequence[float], ends: Ends) -> float:
    return (min if ends.policy == "drop" else max)(left)


def _items_left(plan: Plan, rank: Rank, resumed: Resumed | None, own: Tree) -> _ItemsLeft | None:
    """Return how many items are left on each rank; None: unknown."""
    if resumed is not None and not resumed.same_plan:
        return None
    whole = all_known(num_left_on_ranks(plan, rank.world_size, lambda _: 0))
    if resumed is None or whole is None:
        return None if whole is None else _ItemsLeft(whole, even=len(set(whole)) == 1)
    parts = resumed.job.parts or (resumed.job,)
    if "left" in own and all(part.state.get(NAME, {}).get("left") == own["left"] for part in parts):
        return _ItemsLeft([own["left"]] * rank.world_size, saved=True)
    same_ranks = resumed.job.world_size == rank.world_size
    even = same_ranks and len(set(whole)) == 1
    is_job = resumed.job.rank is None or resumed.job.world_size == 1
    if is_job and _at_beginning(plan, parts, same_ranks=same_ranks):
        counts = {shard: count for part in parts for shard, count in zip(part.shards, part.produced, strict=True)}
        state = None if same_ranks else resumed.part.state
        left = all_known(num_left_on_ranks(plan, rank.world_size, counts.__getitem__, state))
        return None if left is None else _ItemsLeft(left, even=even and len(set(left)) == 1)
    return _ItemsLeft(whole, even=True) if even else None


def _at_beginning(plan: Plan, parts: Sequence[Snapshot], *, same_ranks: bool) -> bool:
    """Whether the stages after the merge begin at this resume, so that plain arithmetic tells what they give."""
    kept = {stage.name for stage in plan.after if stage.own_state_counts}
    return not same_ranks or not any(name in kept for part in parts for name in part.state)


def _key(plan: Plan, ends: Ends, rank: Rank, epoch: int) -> str:
    """Return a name for this stream's keys in the store, the same on all ranks."""
    stages = [[stage.kind, stage.name] for stage in (*plan.before, *plan.worker, *plan.after)]
    said = [plan.source.kind, plan.source.name, stages, plan.shard.num_shards, ends.policy, epoch]
    said += [rank.world_size, list(rank.members)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _no_store_message(ends: Ends, rank: Rank, skips: bool) -> str:
    why = "how many items each of them has isn't known before they are read"
    if skips:
        why = "with on_error=, how many items each of them gives isn't known before they are read"
    return (
        f'ends="{ends.policy}": the {rank.world_size} ranks ({rank.found_in}) are to end together, {why}, and there is '
        "nothing over which they could tell each other: call torch.distributed.init_process_group() before this (with "
        "ranks of a part of the job, give mesh=), or give a store, ends=sl.Ends(store=TCPStore(…)); or say "
        'ends="allow", if they may end one after the other'
    )
