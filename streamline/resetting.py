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
from streamline.plan.cache_key import caches_of
from streamline.snapshot.snapshot import Snapshot
from streamline.transforms.cache_files import CacheFiles
from streamline.transforms.pass_history import reset

__all__ = ["Going", "check_reset", "reset_from", "reset_kept"]


def check_reset(opening: Opening) -> None:
    """Insist on a run that can be reset.

    Raises:
      PlanError: its plan keeps nothing; its ranks agree on their end on the way, so that none can go back.
    """
    if not caches_of(opening.plan):
        raise PlanError("reset_cache() draws anew what .cache keeps, and there is no .cache in this pipeline")
    if opening.ending is not None and opening.ending.store is not None:
        raise PlanError(
            "reset_cache() goes back to where the consumer is, and these ranks find out on the way how they end "
            'together: call it between two epochs of a loader, or say ends="allow"'
        )


def reset_kept(opening: Opening) -> int:
    """Let passes that begin from now on, of any stream, find nothing of what this rank keeps on disk.

    Returns:
      The number of the drawing that they will be of.

    Raises:
      PlanError: the plan keeps nothing.
      ReadError: a folder can't be written.
    """
    plan, rank, least = opening.plan, opening.rank, 0
    if not caches_of(plan):
        check_reset(opening)
    of_rank = {stage.name for stage in plan.after}
    for cache in caches_of(plan):
        if cache.path is None:
            continue
        behind = cache.name in of_rank
        of = rank.world_size if behind else plan.shard.num_shards
        for shard in [rank.rank] if behind else rank.shards(of):
            least = CacheFiles(cache.path, str(cache), cache.name, cache.of, shard, of).reset(least)
    return least


def reset_from(opening: Opening, snapshot: Snapshot, *, begun: bool = True) -> Opening:
    """Return what goes on from a snapshot of the same run, and draws the passes behind it anew.

    While nothing of it runs: a pass that is read ahead might be of the new drawing otherwise.

    Args:
      begun: whether the snapshot is behind an item.

    Raises:
      ReadError: a folder can't be written.
    """
    names = {cache.name for cache in caches_of(opening.plan)}
    state = reset(snapshot.state, names, reset_kept(opening), begun=begun)
    return _opening_at(opening, replace(snapshot, state=state))


class Going:
    """A run that is reset: from its opening to the one that it goes on with.

    Args:
      opening: the run's.
      snapshot: where its consumer is.
      begun: whether it has received an item.
    """

    def __init__(self, opening: Opening, snapshot: Snapshot, *, begun: bool) -> None:
        self.opening = opening
        self._snapshot = snapshot
        self._begun = begun or opening.resume is not None
        self._failure: Exception | None = None

    def reset(self) -> Opening:
        """Return the opening to go on with; where it can't be reset, as it was. While nothing of it runs."""
        try:
            self.opening = reset_from(self.opening, self._snapshot, begun=self._begun)
        except Exception as failure:
            self._failure = failure
            self.opening = _opening_at(self.opening, self._snapshot)
        return self.opening

    def raise_if_failed(self) -> None:
        """Say what went wrong."""
        if self._failure is not None:
            raise self._failure


def _opening_at(opening: Opening, snapshot: Snapshot) -> Opening:
    """Return what goes on from a snapshot of the same run."""
    agreement = opening.ending
    if agreement is not None:
        resumed = Resumed(part=snapshot, job=snapshot, same_plan=True)
        agreement = agreed(
            opening.plan, agreement.ends, opening.rank, opening.epoch, resumed, skips=opening.policy.skips
        )
    return replace(opening, resume=snapshot, ending=agreement)
