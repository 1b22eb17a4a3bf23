"""What a resume does, and what it does again, as text: `pipe.explain(snapshot)`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from streamline.core.state import Tree
from streamline.core.text import Entry, quantity
from streamline.errors import printable
from streamline.plan.fingerprint import sections
from streamline.plan.plan import Plan
from streamline.snapshot.compatibility import (
    Fit,
    NewFiles,
    accepted_new_files,
    check_accept,
    check_snapshot,
    fit_plan,
    refusal,
)
from streamline.snapshot.snapshot import Snapshot
from streamline.snapshot.state_checks import check_stages
from streamline.transforms.base import stage_class


@dataclass(frozen=True)
class Explanation:
    """What a resume of a snapshot by a plan does; `print` it.

    Attributes:
      fits: whether the plan can resume the snapshot.
      lines: of text. If the snapshot doesn't fit, only why.
    """

    fits: bool
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def explain(
    plan: Plan, snapshot: Snapshot, accept: Collection[str] = (), new_files: NewFiles = "refuse"
) -> Explanation:
    """Say where each worker would continue, what would be read and computed again, and what differs.

    Only the source's list of files is read.

    Raises:
      PlanError: `accept` names what the plan doesn't have.
      SnapshotError: the snapshot is damaged.
      ReadError: a file of the source is missing.
    """
    check_snapshot(".explain(snapshot)", snapshot)
    check_stages(snapshot)
    accepted = check_accept(accept, plan) | accepted_new_files(new_files, plan)
    plan = replace(plan, source=plan.source.resolved())
    now = plan.source.listing()
    fits = [fit_plan(plan, part, now, accepted) for part in snapshot.parts or (snapshot,)]
    for fit in fits:
        if fit.open:
            lines = ["the snapshot doesn't fit this plan:", *refusal(fit).split("\n")]
            return Explanation(False, tuple(map(printable, lines)))
    return Explanation(True, tuple(printable(line) for fit in fits for line in _lines(fit)))


def _lines(fit: Fit) -> Iterator[str]:
    snapshot, source = fit.snapshot, fit.plan.source
    items = sum(snapshot.produced)
    yield (
        f"epoch {snapshot.epoch}, rank {snapshot.rank} of {snapshot.world_size}: continues after "
        f"{quantity(items, 'item')} of the workers"
    )
    yield from (f"  accepted {one.argument}: {one.then}" for one in fit.differences)
    yield from (f"  changed code: {name}" for name in fit.changed_code)
    yield from (f"  {sentence}" for sentence in fit.unsteady)
    for worker, (shard, tree) in enumerate(zip(snapshot.shards, snapshot.worker_states, strict=True)):
        next_one = ", next" if worker == snapshot.next_worker else ""
        yield f"shard {shard}{next_one}: reads on at {source.reads_on(tree.get(source.name))}"
        lines = list(worker_replays(snapshot, tree))
        yield from (f"  {line}" for line in lines or ["nothing that was delivered is computed again"])
    if lines := list(merge_replays(snapshot)):
        yield "after the merge:"
        yield from (f"  {line}" for line in lines)


def worker_replays(snapshot: Snapshot, tree: Tree) -> Iterator[str]:
    """Yield what the stages of a worker do again after a resume at its state, in the plan's order."""
    before, worker, _ = sections(snapshot.fingerprint)
    return _replays([*before, *worker], tree)


def merge_replays(snapshot: Snapshot) -> Iterator[str]:
    """Yield what the merge and the stages after it do again after a resume."""
    own = snapshot.state[snapshot.merge]
    if count := sum(own["strict_to"]) - sum(snapshot.produced) if "strict_to" in own else len(own.get("replay", ())):
        yield f"{snapshot.merge}: takes {quantity(count, 'item')} again, in the order in which it took them before"
    *before, after = sections(snapshot.fingerprint)
    callers = [str(entry.get("name")) for section in before for entry in section if _calls(entry)]
    yield from _replays(after, snapshot.stages, callers)


def _replays(stages: Sequence[Entry], tree: Tree, callers: Sequence[str] = ()) -> Iterator[str]:
    """Yield what stages do again; `callers` are the upstream stages that call functions of the user."""
    callers = list(callers)
    for entry in stages:
        name = str(entry.get("name"))
        if name in tree and (again := _replay_cost(entry, tree)):
            calls = "computes them again" if len(callers) == 1 else "compute them again"
            yield f"{name}: {again}" + (f"; before it, {', '.join(callers)} {calls}" if callers else "")
        if _calls(entry):
            callers.append(name)


def _replay_cost(entry: Entry, tree: Tree) -> str | None:
    """Return what the stage says; None if the state isn't of its type, as of another version."""
    try:
        stage = stage_class(str(entry.get("kind")), _options(entry))
        return stage.replay_cost(stage.read_part(tree[str(entry.get("name"))]))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _calls(entry: Entry) -> bool:
    return not {"fn", "collate"}.isdisjoint(_options(entry))


def _options(entry: Entry) -> Tree:
    options = entry.get("options")
    return options if isinstance(options, dict) else {}
