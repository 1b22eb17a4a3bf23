"""The snapshot coordinator: what happens when a snapshot is taken, step by step, at each backend alike.

1. The stream picks the state right after the last item that its consumer received, or right before it. Every chunk
   carries the states of its items, from worker threads, processes and hosts, too: no backend is asked for anything, and
   from here on Inline, Threads, Processes, remote hosts and Ray are alike.
2. What that state counts as skipped is written to the dead letters (`BaseStream._snapshot`).
3. The gate of the consumer's event loop goes to CAPTURED: nothing is handed out during the copy, which doesn't wait for
   items in work. A plain loop passes no gate: nothing else moves in its thread.
4. The state is evaluated to a tree of JSON, keyed by stage name; the journal of a live source adds its entry.
5. Skip counts of stages that this plan no longer has are added, and the merge's lists are keyed by shard.
6. Fingerprint, listing, epoch and rank make a `Snapshot` of it, in memory.
7. The gate returns to the phase that it had.
8. Later, `Snapshot.save` writes the file and notifies the keepers, which release what only earlier snapshots needed;
   `LastSnapshot` is one of them, and remembers where that was, for those who look on.
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

BACK = {Phase.RUNNING: Event.RESUME, Phase.QUIESCING: Event.QUIESCE, Phase.PAUSED: Event.PAUSE}
"""How a snapshot leaves a stream as it found it."""


@dataclass(frozen=True, kw_only=True)
class SnapshotCoordinator:
    """Takes the snapshots of one run."""

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
        """What the plan is; shared by all snapshots of the run."""
        return fingerprint(self.plan)

    def take(
        self, state: State, gate: Gate | None, journal: Journal | None = None, step: int | None = None
    ) -> Snapshot:
        """Return the snapshot of a state of the run, and leave the gate as it was; without a wait.

        Args:
          gate: of the event loop that this is called in; None: in a plain loop's thread, where nothing else moves.
          journal: the items of a live source that a resume needs.
          step: items that were given up to there; None: that isn't known.
        """
        if gate is None or (before := gate.phase) in (Phase.CLOSED, Phase.CAPTURED):
            return self._assemble(state, journal, step)  # captured: a signal's handler takes one inside another
        if before is Phase.RUNNING:
            gate.on(Event.QUIESCE)
        gate.on(Event.CAPTURE)
        try:
            return self._assemble(state, journal, step)
        finally:
            gate.on(BACK[before])

    def _assemble(self, state: State, journal: Journal | None, step: int | None) -> Snapshot:
        self.last.taken_at = time.time()
        return self.written(self.tree(state), journal, step)

    def tree(self, state: State, until: State | None = None) -> Tree:
        """Return a state as flows write it, with what this run adds; `until` as in `State.json`."""
        return self._with_gone(state.json(until))

    def written(self, tree: Tree, journal: Journal | None, step: int | None) -> Snapshot:
        """Return the snapshot of a state that `tree` has returned."""
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
        """What removes the cycles on disk that no snapshot needs any more."""
        plan = self.plan
        kept = {stage.name: folder for stage in stages_of(plan) if (folder := stage.spills_to) is not None}
        if not kept:
            return None
        shards = self.rank.shards(plan.shard.num_shards)
        return SpillKeeper(kept, plan.merge.name, shards, plan.shard.num_shards, self.rank.rank, self.rank.world_size)

    def _with_gone(self, state: Tree) -> Tree:
        """Return a state with the counts of stages that had skipped items, and that this plan has no more."""
        if not self._any_gone:
            return state
        own = state[self.plan.merge.name]
        workers = [
            with_skips(tree, {**gone, **skips_in(tree)}) for tree, gone in zip(own["workers"], self._gone, strict=True)
        ]
        state = with_skips(state, {**self._gone_merged, **skips_in(state)})
        return {**state, self.plan.merge.name: {**own, "workers": workers}}

    @cached_property
    def _any_gone(self) -> bool:
        return any((self._gone_merged, *self._gone))

    @cached_property
    def _gone(self) -> list[dict[str, int]]:
        """Of each worker, the items skipped in stages that were renamed or removed since: they count all the same."""
        state = self.begun_from
        trees = [] if state is None else state[self.plan.merge.name]["workers"]
        return [_counts_of_others(tree, self.plan.worker_names) for tree in trees]

    @cached_property
    def _gone_merged(self) -> dict[str, int]:
        """Likewise, of the merge and the stages after it."""
        merged = {self.plan.merge.name, *(stage.name for stage in self.plan.after)}
        return {} if self.begun_from is None else _counts_of_others(self.begun_from, merged)


class LastSnapshot:
    """When the last snapshot was taken, and where the last one that was saved is. May be read in any thread.

    Attributes:
      taken_at: in seconds since 1970; None: there is none.
      saved_at: likewise.
      where: it was saved: its file, or another place.
      bytes: of the file; 0: it is another place.
    """

    def __init__(self) -> None:
        self.taken_at: float | None = None
        self.saved_at: float | None = None
        self.where = ""
        self.bytes = 0

    def storing(self) -> None:
        """Nothing has to be durable before."""

    def stored(self, _: Tree, where: str) -> None:
        try:
            self.bytes = Path(where).stat().st_size
        except (OSError, ValueError):  # it is no file, or has gone
            self.bytes = 0
        self.where, self.saved_at = where, time.time()


def _counts_of_others(tree: Tree, names: Collection[str]) -> dict[str, int]:
    return {name: count for name, count in counts_in(tree).items() if name not in names}
