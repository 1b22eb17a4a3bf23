"""Letting go of what `.cache` keeps: the passes that have not begun for the consumer are drawn anew.

A stream runs ahead of its consumer, and passes that the consumer hasn't seen may have begun. So a reset goes back to
the consumer: it closes the flows, says in the state behind the last item from which pass on another drawing is served,
and opens them there. What follows is what any resume of that state gives.
"""

from __future__ import annotations

from dataclasses import replace

from streamline.ending.agreement import Resumed, agreed
from streamline.errors import PlanError
from streamline.opening import Opening
from streamline.resuming.bound import caches_of
from streamline.snapshot import Snapshot
from streamline.transforms.cache_course import reset
from streamline.transforms.cache_files import CacheFiles

__all__ = ["reset_from", "reset_kept"]


def reset_kept(opening: Opening) -> int:
    """Let passes that begin from now on, of any stream, find nothing of what this rank keeps on disk.

    Returns:
      The number of the drawing that they will be of.

    Raises:
      PlanError: the plan keeps nothing.
      ReadError: a folder can't be written.
    """
    plan, rank = opening.plan, opening.rank
    if not caches_of(plan):
        raise PlanError("reset_cache() draws anew what .cache keeps, and there is no .cache in this pipeline")
    least = 0
    of_rank = {stage.name for stage in plan.after}
    for cache in caches_of(plan):
        if cache.path is None:
            continue
        behind = cache.name in of_rank
        of = rank.world_size if behind else plan.shard.num_shards
        for shard in [rank.rank] if behind else rank.shards(of):
            least = CacheFiles(cache.path, str(cache), cache.name, cache.of, shard, of).reset(least)
    return least


def reset_from(opening: Opening, snapshot: Snapshot | None) -> Opening:
    """Return what goes on from a snapshot of this rank, and draws the passes behind it anew; None: from the beginning.

    Raises:
      PlanError: the plan keeps nothing; the ranks agree on their end on the way, and this one can't go back.
      ReadError: a folder can't be written.
    """
    agreement = opening.ending
    if agreement is not None and agreement.store is not None:
        raise PlanError(
            "reset_cache() goes back to where the consumer is, and these ranks find out on the way how they end "
            "together: call it between two epochs of a loader, or say ends=\"allow\""
        )
    least = reset_kept(opening)
    if snapshot is None:
        return opening
    names = {cache.name for cache in caches_of(opening.plan)}
    snapshot = replace(snapshot, state=reset(snapshot.state, names, least))
    if agreement is not None:
        resumed = Resumed(part=snapshot, job=snapshot, same_plan=True)
        agreement = agreed(
            opening.plan, agreement.ends, opening.rank, opening.epoch, resumed, skips=opening.policy.skips
        )
    return replace(opening, resume=snapshot, ending=agreement)
