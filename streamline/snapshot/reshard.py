"""A job's snapshot on another number of ranks: each shard's place stays, and each rank takes the shards that are its.

The number of shards stays, so what was consumed of each is what it was. What stands after the merge is a rank's own:
a stage that holds items there, or counts them, says so by name, and the change is refused. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from streamline.core.state import Json
from streamline.errors import ResumeError
from streamline.plan.fingerprint import sections
from streamline.sharding.ranks import Rank
from streamline.snapshot.snapshot import Snapshot
from streamline.transforms.base import stage_class

OURS = ("errors", "ends")
"""Entries of a rank's state that are no stage's: skipped items, and where the ranks end together."""


def resharded(job: Snapshot, found: Rank) -> Snapshot:
    """Return a rank's part of a job's snapshot that was taken on another number of ranks.

    Args:
      job: of all ranks; or of one that was alone.

    Raises:
      ResumeError: it is of a live source, or something after the merge holds what can't be divided anew.
    """
    parts = job.parts or (job,)
    if any(part.journal is not None for part in parts):
        raise ResumeError(_refusal(job, found, "a feed's items that are on their way are its own rank's"))
    if any(part.state[part.merge].get("replay") for part in parts):  # `strict_to` says what any strict merge does
        raise ResumeError(
            _refusal(job, found, f"{job.merge!r} is to repeat choices that were made between the shards of a rank")
        )
    produced = {shard: count for part in parts for shard, count in zip(part.shards, part.produced, strict=True)}
    workers = {shard: tree for part in parts for shard, tree in zip(part.shards, part.worker_states, strict=True)}
    shards = found.shards(job.num_shards)
    own: dict[str, Json] = {
        "next_worker": min(range(len(shards)), key=lambda at: (produced[shards[at]], at), default=0),
        "produced": {str(shard): produced[shard] for shard in shards},
        "replay": [],
        "workers": {str(shard): workers[shard] for shard in shards},
    }
    after = dict(_after_merge(job, parts, found))
    skipped = Counter[str]()
    for part in parts if found.rank == 0 else ():
        skipped.update(part.state.get("errors", {}))
    state = {job.merge: own, **after, **({"errors": dict(skipped)} if skipped else {})}
    return replace(parts[0], rank=found.rank, world_size=found.world_size, state=state, parts=(), keepers=())


def _after_merge(job: Snapshot, parts: tuple[Snapshot, ...], found: Rank) -> Iterator[tuple[str, Json]]:
    """Yield what the stages after the merge go on with, by name."""
    entries = {entry.get("name"): entry for entry in sections(job.fingerprint)[2]}
    for name in dict.fromkeys(name for part in parts for name in part.stages if name not in OURS):
        entry = entries.get(name, {})
        stage = stage_class(str(entry.get("kind")), entry.get("options") or {})
        try:
            own = stage.reshard([part.state.get(name) for part in parts])
        except ResumeError as why:
            raise ResumeError(_refusal(job, found, f"{name!r}, after the merge, {why}")) from None
        if own is not None:
            yield name, own


def _refusal(job: Snapshot, found: Rank, why: str) -> str:
    return (
        f"the snapshot is of {job.world_size} ranks, and there are {found.world_size} ({found.found_in}); {why}: "
        f"resume with world_size={job.world_size}"
    )
