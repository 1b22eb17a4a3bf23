"""What ranks agree on before a stream begins: how many items each gives; or that they find it out on the way.

By arithmetic where lengths are known: every rank does the same sum, without a message. It is exact as long as the
plan is the one that was counted, and no item is left out because of an error. Otherwise over a store, round by round.
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
from streamline.plan.length import all_known, left_on_ranks
from streamline.plan.plan import Plan
from streamline.sharding.ends import NAME, Agreement, Ends, nothing_to_pad
from streamline.sharding.rank_sync import store_of_torch
from streamline.sharding.ranks import Rank
from streamline.snapshot.snapshot import Snapshot

ENDLESS = 2**53
"""What is said of items without end that others have an end of."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run goes on from."""

    part: Snapshot  # this rank's, as the plan reads it
    job: Snapshot  # the snapshot that was given: of all ranks, or of this one
    same_plan: bool  # nothing has changed since


def agreed(plan: Plan, ends: Ends, rank: Rank, epoch: int, resumed: Resumed | None, *, skips: bool) -> Agreement:
    """Return how a rank's stream is to end, if all ranks are opened in the same way.

    Args:
      skips: items may be left out because of an error.

    Raises:
      PlanError: it can't be known beforehand, and there is no store; or padding of what can't be read again.
      RanksError: a rank is known to have nothing to pad with; all ranks raise it.
    """
    if rank.world_size == 1 or ends.policy == "allow":
        return Agreement(ends=ends, rank=rank)
    if ends.policy == "pad" and plan.source.is_live:
        raise PlanError('ends="pad" gives first items again, and a feed is read once: ends="drop", or "allow"')
    own = _own(resumed, ends)
    padding: dict[str, Any] = {"padded": own.get("padded", 0), "again": own.get("again")}
    left = None if skips else _left(plan, rank, resumed, own)
    if left is not None and resumed is None and ends.policy == "pad" and min(left.of_ranks) == 0 < max(left.of_ranks):
        raise RanksError(nothing_to_pad(left.of_ranks.index(0), rank.world_size))
    if left is not None and (left.even or (count := _end(left.of_ranks, ends)) == math.inf):
        return Agreement(ends=ends, rank=rank)
    if left is not None:
        spare = own.get("spare", 0) if left.kept else left.of_ranks[rank.rank] - count if ends.policy == "drop" else 0
        return Agreement(ends=ends, rank=rank, left=int(count), spare=int(min(spare, ENDLESS)), **padding)
    store = ends.store or store_of_torch(rank)
    if store is None:
        raise PlanError(_nothing_to_talk_over(ends, rank, skips))
    return Agreement(ends=ends, rank=rank, store=store, key=_key(plan, ends, rank, epoch), **padding)


def begun_at(agreement: Agreement, part: Snapshot) -> Snapshot:
    """Return a rank's part of a state to begin at, with how many items are left: a run that begins there may know of
    no other rank."""
    if agreement.left is None:
        return part
    own = {"policy": agreement.ends.policy, "left": agreement.left, "spare": agreement.spare}
    return replace(part, state={**part.state, NAME: {**part.state.get(NAME, {}), **own}})


def _own(resumed: Resumed | None, ends: Ends) -> Tree:
    """Return what the snapshot says of this, if it still means something."""
    if resumed is None or not resumed.same_plan:
        return {}
    own: Tree = resumed.part.state.get(NAME) or {}
    return own if own.get("policy") == ends.policy else {}


@dataclass(frozen=True)
class _ItemsLeft:
    """How many items are left on each rank."""

    of_ranks: Sequence[float]
    even: bool = False  # all come to their end together by themselves, also after a resume that knows of one rank only
    kept: bool = False  # these are numbers of the snapshot


def _end(left: Sequence[float], ends: Ends) -> float:
    return (min if ends.policy == "drop" else max)(left)


def _left(plan: Plan, rank: Rank, resumed: Resumed | None, own: Tree) -> _ItemsLeft | None:
    """Return how many items are left on each rank; None: that isn't known."""
    if resumed is not None and not resumed.same_plan:
        return None
    whole = all_known(left_on_ranks(plan, rank.world_size, lambda _: 0))
    if resumed is None or whole is None:
        return None if whole is None else _ItemsLeft(whole, even=len(set(whole)) == 1)
    parts = resumed.job.parts or (resumed.job,)
    if "left" in own and all(part.state.get(NAME, {}).get("left") == own["left"] for part in parts):
        return _ItemsLeft([own["left"]] * rank.world_size, kept=True)
    same_ranks = resumed.job.world_size == rank.world_size
    even = same_ranks and len(set(whole)) == 1
    is_job = resumed.job.rank is None or resumed.job.world_size == 1
    if is_job and _at_beginning(plan, parts, same_ranks=same_ranks):
        counts = {shard: count for part in parts for shard, count in zip(part.shards, part.produced, strict=True)}
        state = None if same_ranks else resumed.part.state
        left = all_known(left_on_ranks(plan, rank.world_size, counts.__getitem__, state))
        return None if left is None else _ItemsLeft(left, even=even and len(set(left)) == 1)
    return _ItemsLeft(whole, even=True) if even else None


def _at_beginning(plan: Plan, parts: Sequence[Snapshot], *, same_ranks: bool) -> bool:
    """Whether the stages after the merge begin at this resume, so that they make of a number what they always do."""
    kept = {stage.name for stage in plan.after if stage.own_state_counts}
    return not same_ranks or not any(name in kept for part in parts for name in part.state)


def _key(plan: Plan, ends: Ends, rank: Rank, epoch: int) -> str:
    """Return what all ranks call this stream, and no other stream is called."""
    stages = [[stage.kind, stage.name] for stage in (*plan.before, *plan.worker, *plan.after)]
    said = [plan.source.kind, plan.source.name, stages, plan.shard.num_shards, ends.policy, epoch]
    said += [rank.world_size, list(rank.members)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _nothing_to_talk_over(ends: Ends, rank: Rank, skips: bool) -> str:
    why = "how many items each of them has isn't known before they are read"
    if skips:
        why = "with on_error=, how many items each of them gives isn't known before they are read"
    return (
        f'ends="{ends.policy}": the {rank.world_size} ranks ({rank.found_in}) are to end together, {why}, and there is '
        "nothing over which they could tell each other: call torch.distributed.init_process_group() before this (with "
        "ranks of a part of the job, give mesh=), or give a store, ends=sl.Ends(store=TCPStore(…)); or say "
        'ends="allow", if they may end one after the other'
    )
