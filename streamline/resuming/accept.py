"""What `open(accept=)` may say: which names there are in a plan, and what of them can be accepted at all.

An entry is "NAME.what": an option ("batch.size"), "name", "added" or "removed" of a stage, or a change of the source's
data ("read_jsonl.new_files"). Names are those of the plan that is opened; of a stage that was removed, its old one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Literal, get_args

from streamline.core.options import given
from streamline.errors import PlanError, PlanTypeError
from streamline.plan.plan import Plan
from streamline.snapshot import Snapshot

__all__ = ["NewFiles", "accepting", "check_snapshot", "checked"]

NewFiles = Literal["refuse", "next_epoch"]
"""What a resume does when files have come since its snapshot."""

SHARD = ("num_shards", "mode", "drop_remainder", "interleave")


def checked(accept: Collection[str], plan: Plan) -> frozenset[str]:
    """Return the entries, each of which must name something that this plan has; whether it is needed is no matter.

    Raises:
      PlanTypeError: not a list of strings.
      PlanError: a name or an option that the plan doesn't have; the message says which was meant, perhaps.
    """
    if isinstance(accept, str) or not isinstance(accept, Iterable):
        raise PlanTypeError(f'open(accept=) is a list of strings, accept=["batch.size"]; got {accept!r}')
    known, uncounted = _known(plan)
    for entry in accept:
        if not isinstance(entry, str):
            raise PlanTypeError(f'open(accept=) is a list of strings, accept=["batch.size"]; got {entry!r} in it')
        name, dot, what = entry.rpartition(".")
        if entry in known or (name and what == "removed"):
            continue
        if entry in uncounted:
            raise PlanError(f"open(accept=): {entry!r} is never compared, so it may change as it likes: leave it out")
        raise PlanError(_unknown(entry, name if dot else entry, known))
    return frozenset(accept)


def accepting(new_files: str, plan: Plan) -> frozenset[str]:
    """Return what `open(new_files=)` accepts in this plan.

    Raises:
      PlanTypeError: it is no string.
      PlanError: it means nothing; the plan's source reads no files.
    """
    options = get_args(NewFiles)
    if not isinstance(new_files, str):
        raise PlanTypeError(f"open(new_files=) is one of {', '.join(map(repr, options))}, got {given(new_files)}")
    if new_files not in options:
        raise PlanError(f"open(new_files=) is one of {', '.join(map(repr, options))}, got {new_files!r}")
    if new_files == "refuse":
        return frozenset()
    if "new_files" not in plan.source.changeable:
        raise PlanError(f"open(new_files={new_files!r}): {plan.source.kind} reads no list of files: leave it out")
    return frozenset({f"{plan.source.name}.new_files"})


def _known(plan: Plan) -> tuple[set[str], set[str]]:
    """Return what may be accepted in this plan, and what is never compared."""
    source = plan.source
    known = {f"{source.name}.{what}" for what in ("name", *source.changeable, *source.options())}
    known |= {f"shard.{what}" for what in SHARD}
    uncounted = {f"{source.name}.{field.name}" for field in fields(source)}
    uncounted |= {f"{plan.merge.name}.{what}" for what in ("kind", "max_skips_per_round", "max_lead")}
    for stage in (*plan.before, *plan.worker, *plan.after):
        mine = {stage.argument(stage.name, field.name) for field in fields(stage)}
        uncounted |= mine | {stage.argument(stage.name, "executor")}
        if stage.counted:
            refusable = ("name", "added", *stage.options, *stage.survives, *stage.refuses)
            known |= {stage.argument(stage.name, what) for what in refusable}
    return known, uncounted - known


def _unknown(entry: str, name: str, known: set[str]) -> str:
    of_name = sorted(one for one in known if one.rpartition(".")[0] == name)
    close = get_close_matches(entry, known, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else ""
    if of_name:
        return f"open(accept=): {entry!r} is nothing that {name!r} has{hint} (it has {', '.join(of_name)})"
    names = sorted({one.rpartition(".")[0] for one in known})
    return f"open(accept=): no part of this plan is called {name!r}{hint} (there are {', '.join(names)})"


def check_snapshot(option: str, snapshot: object) -> None:
    """Insist on a snapshot.

    Raises:
      PlanTypeError: it is something else.
    """
    if isinstance(snapshot, Snapshot):
        return
    way = "Snapshot.from_json() makes one of JSON"
    if isinstance(snapshot, str | os.PathLike):
        way = f"load it: sl.Snapshot.load({os.fspath(snapshot)!r})"
    raise PlanTypeError(f"{option} is a Snapshot, got {given(snapshot)}: {way}")
