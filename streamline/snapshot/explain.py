"""What a resume will do, for a person, before it is done: `pipe.explain(snapshot)`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from html import escape

from streamline.plan.plan import Plan
from streamline.snapshot.compatibility import Fit, NewFiles, accepting, check_snapshot, checked, fitted, refusal
from streamline.snapshot.replay_cost import behind_merge, of_worker
from streamline.snapshot.snapshot import Snapshot
from streamline.snapshot.state_checks import check_stages

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What a resume of a snapshot by a plan will do; `print` it.

    Attributes:
      fits: whether the plan may go on from the snapshot.
      lines: the words. Of a snapshot that doesn't fit, only why.
    """

    fits: bool
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"


def explain(
    plan: Plan, snapshot: Snapshot, accept: Collection[str] = (), new_files: NewFiles = "refuse"
) -> Explanation:
    """Say where each worker would read on, what would be read and computed again, and what differs.

    Nothing is read but the list of files.

    Raises:
      PlanError: `accept` names what the plan doesn't have.
      SnapshotError: the snapshot is damaged.
      ReadError: a file of the source is missing.
    """
    check_snapshot(".explain(snapshot)", snapshot)
    check_stages(snapshot)
    accepted = checked(accept, plan) | accepting(new_files, plan)
    plan = replace(plan, source=plan.source.resolved())
    now = plan.source.listing()
    fits = [fitted(plan, part, now, accepted) for part in snapshot.parts or (snapshot,)]
    for fit in fits:
        if fit.open:
            return Explanation(False, ("the snapshot doesn't fit this plan:", *refusal(fit).splitlines()))
    return Explanation(True, tuple(line for fit in fits for line in (*_head(fit), *_workers(fit), *_behind(fit))))


def _head(fit: Fit) -> Iterator[str]:
    snapshot = fit.snapshot
    yield (
        f"epoch {snapshot.epoch}, rank {snapshot.rank} of {snapshot.world_size}: continues after "
        f"{(items := sum(snapshot.produced)):,} item{'s' * (items != 1)} of the workers"
    )
    for difference in fit.differences:
        yield f"  accepted {difference.argument}: {difference.then}"
    for name in fit.changed_code:
        yield f"  changed code: {name}"
    for sentence in fit.unsteady:
        yield f"  {sentence}"


def _workers(fit: Fit) -> Iterator[str]:
    snapshot, source = fit.snapshot, fit.plan.source
    for worker, (shard, tree) in enumerate(zip(snapshot.shards, snapshot.worker_states, strict=True)):
        next_one = ", next" if worker == snapshot.next_worker else ""
        yield f"shard {shard}{next_one}: reads on at {source.reads_on(tree.get(source.name))}"
        lines = list(of_worker(snapshot, tree))
        yield from (f"  {line}" for line in lines or ["nothing that was delivered is computed again"])


def _behind(fit: Fit) -> Iterator[str]:
    if lines := list(behind_merge(fit.snapshot)):
        yield "behind the merge:"
        yield from (f"  {line}" for line in lines)
