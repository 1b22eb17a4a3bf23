"""What both kinds of stream are made from: a plan, where it runs, and where it begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from streamline.backends.base import Backend
from streamline.driver import behind_channel
from streamline.errors import ResumeError
from streamline.fingerprint import Entry, compare, fingerprint
from streamline.flow import Flow, Opener, Site
from streamline.gate import Event, Gate, Phase
from streamline.plan import Plan
from streamline.ranks import Rank
from streamline.sharding import shards_of_rank
from streamline.snapshot import FORMAT_VERSION, Snapshot
from streamline.states import State, Tree
from streamline.tasks import Tasks
from streamline.worker import StageOpener

__all__ = ["Opening"]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A plan about to run.

    Attributes:
      rank: which rank's part of the plan.
      epoch: what shuffles and random generators see as the epoch.
      resume: the state to begin at; None: at the beginning.
      listing: what the source reads, bound into snapshots.
    """

    plan: Plan
    backend: Backend
    rank: Rank
    epoch: int
    resume: Snapshot | None
    listing: Any

    @cached_property
    def fingerprint(self) -> list[Entry]:
        """What the plan is; shared by all snapshots of the run."""
        return fingerprint(self.plan)

    def check(self) -> None:
        """Insist that the snapshot belongs to this plan, these data and this rank.

        Raises:
          ResumeError: it doesn't; the message says what differs.
        """
        snapshot = self.resume
        if snapshot is None:
            return
        compare(self.fingerprint, snapshot.fingerprint)
        if (snapshot.rank, snapshot.world_size) != (self.rank.rank, self.rank.world_size):
            raise ResumeError(
                f"the snapshot is of rank {snapshot.rank} of {snapshot.world_size}, this is rank {self.rank.rank} of "
                f"{self.rank.world_size}: resume with the ranks that it was taken with"
            )
        if snapshot.listing != self.listing:
            raise ResumeError(f"the data changed since the snapshot: {_difference(snapshot.listing, self.listing)}")

    def flow(self, tasks: Tasks) -> Flow[Any]:
        """Return the last flow of the plan; its tasks belong to `tasks`."""
        site = Site(tasks, self.rank.rank, self.rank.world_size, (self.epoch,))
        opener: Opener[Any] = _MergeOpener(self.plan, self.backend, site)
        for stage in self.plan.after:
            opener = StageOpener(stage, opener)
        flow = opener(self._state)
        if self.plan.after:  # user code never runs in the consumer's task
            return behind_channel(flow, site, "the last stage", self.plan.end_capacity)
        return flow

    @property
    def _state(self) -> Tree | None:
        return None if self.resume is None else self.resume.state

    def snapshot(self, state: State, gate: Gate) -> Snapshot:
        """Return the state of the run as it is now: closes the gate, copies, and opens it again, in one step."""
        if gate.phase is Phase.CLOSED:
            return self._snapshot_of(state.json())
        if gate.phase is Phase.RUNNING:
            gate.on(Event.QUIESCE)
        before = gate.on(Event.CAPTURE)
        try:
            return self._snapshot_of(state.json())
        finally:
            gate.on(Event.PAUSE if before is Phase.PAUSED else Event.RESUME)

    def _snapshot_of(self, state: Tree) -> Snapshot:
        return Snapshot(
            version=FORMAT_VERSION,
            fingerprint=self.fingerprint,
            listing=self.listing,
            epoch=self.epoch,
            rank=self.rank.rank,
            world_size=self.rank.world_size,
            num_shards=self.plan.shard.num_shards,
            state=state,
            merge=self.plan.merge.name,
        )


@dataclass(frozen=True)
class _MergeOpener:
    """Opens a rank's workers, and the merge over them."""

    plan: Plan
    backend: Backend
    site: Site

    def __call__(self, state: Tree | None = None) -> Flow[Any]:
        plan, site = self.plan, self.site
        own = None if state is None else state[plan.merge.name]
        inboxes = []
        for at, shard in enumerate(shards_of_rank(plan.shard.num_shards, site.shard, site.num_shards)):
            worker_site = replace(site, shard=shard, num_shards=plan.shard.num_shards)
            worker_state = None if own is None else own["workers"][at]
            inboxes.append(self.backend.open_worker(plan, worker_site, worker_state))
        return plan.merge.open(inboxes, own)

    def at(self, site: Site) -> _MergeOpener:
        return replace(self, site=site)


def _difference(theirs: Any, ours: Any) -> str:
    """Say how two listings differ, file by file where they list files."""
    if not isinstance(theirs, list) or not isinstance(ours, list):
        return f"it had {theirs}, now there is {ours}"
    before = {entry["path"]: entry for entry in theirs}
    now = {entry["path"]: entry for entry in ours}
    new = [f"new file {path}" for path in now if path not in before]
    gone = [f"file {path} is gone" for path in before if path not in now]
    changed = [f"{path} was {before[path]}, is {now[path]}" for path in now if before.get(path, now[path]) != now[path]]
    return "; ".join(gone + new + changed) or "the same files are listed in another order"
