"""How a snapshot is taken, with any backend:

1. The stream picks the state right after the last item that its consumer received, or right before it. Every chunk
   carries the states of its items, also from worker processes and hosts: no backend is asked for anything.
2. The skips that the state counts are written to the dead letters (`BaseStream._snapshot`).
3. The gate of the consumer's event loop goes to CAPTURED: nothing moves during the copy, which waits for nothing. A
   plain loop has no gate: nothing else runs in its thread.
4. The state is evaluated to a tree of JSON, keyed by stage name; the journal of a live source adds its entry.
5. Skip counts of stages that the plan no longer has are added, and the merge's lists are keyed by shard.
6. Fingerprint, listing, epoch and rank make a `Snapshot` of it, in memory.
7. The gate returns to its phase.
8. Later, `Snapshot.save` writes the file and notifies the keepers, which release what only earlier snapshots needed.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from streamline.core.error_policy import counts_in
from streamline.core.gate import Event, Gate, Phase
from streamline.core.state import State, Tree, skips_in, with_skips
from streamline.core.text import Entry
from streamline.plan.fingerprint import fingerprint
from streamline.plan.plan import Plan, stages_of
from streamline.sharding.ranks import Rank
from streamline.snapshot.file_format import FORMAT_VERSION
from streamline.snapshot.snapshot import Snapshot, by_shard
from streamline.sources.journal import Journal
from streamline.transforms.regenerate_cycle import SpillKeeper

RETURN_EVENTS = {Phase.RUNNING: Event.RESUME, Phase.QUIESCING: Event.QUIESCE, Phase.PAUSED: Event.PAUSE}
"""The event that returns to a phase after a snapshot."""


@dataclass(frozen=True, kw_only=True)
class SnapshotCoordinator:
    plan: Plan
    rank: Rank
    epoch: int
    listing: Any  # what the source reads, bound into snapshots
    begun_from: Tree | None  # the state that the run began at, as flows write it; None: at the beginning
    left_out: list[list[int]] = field(default_factory=list)

    @cached_property
    def last(self) -> LastSnapshot:
        return LastSnapshot()

    @cached_property
    def fingerprint(self) -> list[Entry]:
        """Of the plan; shared by all snapshots of the run."""
        return fingerprint(self.plan)

    def take(
        self, state: State, gate: Gate | None, journal: Journal | None = None, step: int | None = None
    ) -> Snapshot:
        """Return the snapshot of a state of the run, without a wait; the gate returns to its phase.

        `gate`: of this event loop; None: in a plain loop's thread. `step`: items given up to the state; None: unknown.
        """
        if gate is None or (before := gate.phase) in (Phase.CLOSED, Phase.CAPTURED):
            return self._assemble(state, journal, step)  # captured: by the snapshot that a signal's handler interrupts
        if before is Phase.RUNNING:
            gate.on(Event.QUIESCE)
        gate.on(Event.CAPTURE)
        try:
            return self._assemble(state, journal, step)
        finally:
            gate.on(RETURN_EVENTS[before])

    def _assemble(self, state: State, journal: Journal | None, step: int | None) -> Snapshot:
        self.last.taken_at = time.time()
        return self.snapshot_of(self.tree(state), journal, step)

    def tree(self, state: State, until: State | None = None) -> Tree:
        """Return a state as flows write it, with the counts of removed stages; `until` as in `State.json`."""
        return self._with_removed(state.json(until))

    def snapshot_of(self, tree: Tree, journal: Journal | None, step: int | None) -> Snapshot:
        """Return the snapshot of what `tree` has returned."""
        return Snapshot(
            version=FORMAT_VERSION,
            fingerprint=self.fingerprint,
            listing=self.listing,
            epoch=self.epoch,
            rank=self.rank.rank,
            world_size=self.rank.world_size,
            num_shards=self.plan.shard.num_shards,
            state=by_shard(tree, self.plan.merge.name, self.rank.shards(self.plan.shard.num_shards)),
            merge=self.plan.merge.name,
            journal=None if journal is None else journal.entry(tree),
            step=step,
            left_out=self.left_out,
            keepers=tuple(filter(None, (getattr(journal, "keeper", None), self._spills, self.last))),
        )

    @cached_property
    def _spills(self) -> SpillKeeper | None:
        """Removes the cycles on disk that no snapshot needs any more."""
        plan = self.plan
        kept = {stage.name: folder for stage in stages_of(plan) if (folder := stage.spills_to) is not None}
        if not kept:
            return None
        shards = self.rank.shards(plan.shard.num_shards)
        return SpillKeeper(kept, plan.merge.name, shards, plan.shard.num_shards, self.rank.rank, self.rank.world_size)

    def _with_removed(self, state: Tree) -> Tree:
        """Return a state with the counts of stages that had skipped items, and that the plan no longer has."""
        if not any((self._removed_after_merge, *self._removed)):
            return state
        own = state[self.plan.merge.name]
        workers = [
            with_skips(tree, {**gone, **skips_in(tree)})
            for tree, gone in zip(own["workers"], self._removed, strict=True)
        ]
        state = with_skips(state, {**self._removed_after_merge, **skips_in(state)})
        return {**state, self.plan.merge.name: {**own, "workers": workers}}

    @cached_property
    def _removed(self) -> list[dict[str, int]]:
        """By worker, the skip counts of stages that were renamed or removed since the snapshot."""
        state = self.begun_from
        trees = [] if state is None else state[self.plan.merge.name]["workers"]
        return [_counts_of_others(tree, self.plan.worker_names) for tree in trees]

    @cached_property
    def _removed_after_merge(self) -> dict[str, int]:
        """Likewise, of the merge and the stages after it."""
        merged = {self.plan.merge.name, *(stage.name for stage in self.plan.after)}
        return {} if self.begun_from is None else _counts_of_others(self.begun_from, merged)


class LastSnapshot:
    """A keeper that remembers the last snapshot, for the page. May be read in any thread.

    Times are in seconds since 1970; `bytes`: of its file; 0: it was saved elsewhere.
    """

    def __init__(self) -> None:
        self.taken_at: float | None = None
        self.saved_at: float | None = None
        self.where = ""
        self.bytes = 0

    def before_store(self) -> None:
        """Do nothing: it keeps nothing durable."""

    def after_store(self, _: Tree, where: str) -> None:
        try:
            self.bytes = Path(where).stat().st_size
        except (OSError, ValueError):  # it is no file, or has gone
            self.bytes = 0
        self.where, self.saved_at = where, time.time()


def _counts_of_others(tree: Tree, names: Collection[str]) -> dict[str, int]:
    return {name: count for name, count in counts_in(tree).items() if name not in names}
