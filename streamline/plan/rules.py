"""Which stages may be where in a plan; each refusal names the stage and what to write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from streamline.errors import PlanError, PlanTypeError
from streamline.plan.plan import AnyStage, Plan, acts_on
from streamline.sources.base import Source
from streamline.transforms.base import is_own, stage_class

MOST_STAGES = 64
"""Stages that an item passes, those of pipelines inside pipelines included: a pull nests up to ten calls for each, and
Python allows 1,000."""

RESERVED = ("shard", "merge", "errors", "ends")
"""Keys of a plan's own entries in a state."""


def check_plan(plan: Plan) -> None:
    if (deep := depth(plan)) > MOST_STAGES:
        raise PlanError(
            f"an item would pass {deep} stages, one after the other, and {MOST_STAGES} is the most: do several steps "
            "in one function, and concatenate or mix all pipelines at once"
        )
    _check_names([*plan.source.names, *(stage.name for stage in plan.stages)])
    for stage in plan.stages:
        known = stage_class(stage.kind, stage.options)
        if is_own(known) and not is_own(type(stage)) and not isinstance(stage, known):
            raise PlanError(
                f"{type(stage).__name__} is of the kind {stage.kind!r}, as a stage of streamline's: snapshots couldn't "
                f'tell them apart. Give the class another one: kind = "own_{stage.kind}"'
            )
    _check_split(plan)
    if plan.source.is_live:
        for stage in plan.stages:
            stage.check_live(plan.source)
    for stage in plan.before:
        if acts_on(stage, plan.source, plan.mode) is None:
            raise PlanError(_not_before(stage, plan))
    _check_last(plan.worker + plan.after)
    for stage in plan.worker + plan.after:
        if _is_placeless(stage):
            raise PlanError(_misplacement(stage, plan.source))
    _check_choices(plan)
    _check_spills(plan)


def depth(plan: Plan) -> int:
    """Return how many stages an item passes at most, those of pipelines inside pipelines included."""
    return len(plan.stages) + max((1 + depth(part) for _, _, part in plan.source.made_of), default=0)


def _check_names(names: Sequence[object]) -> None:
    """Check that names are unique in all parts of a plan: they are the keys of states."""
    seen: set[object] = set(RESERVED)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PlanTypeError(f"a name is a string that isn't empty, got {name!r}")
        if name in RESERVED:
            raise PlanError(f"{name!r} is a name that the pipeline uses itself: give another name=")
        if name in seen:
            raise PlanError(f"there are two parts called {name!r}: names keep states apart, give one another name=")
        seen.add(name)


def _check_split(plan: Plan) -> None:
    source, mode, interleave = plan.source, plan.mode, plan.shard.interleave
    if interleave > 1 and not source.listed:
        raise PlanError(f".shard(interleave={interleave}) reads files in turn, and {source.kind} has no list of files")
    if interleave > 1 and mode != "file":
        raise PlanError(
            f'.shard(interleave={interleave}) reads whole files in turn, which is mode="file"; got mode={mode!r}: '
            "leave out one of the two"
        )
    if mode not in source.modes:
        raise PlanError(f".shard(mode=) of {source.kind} is one of {', '.join(source.modes)}; got {mode!r}")
    if plan.shard.drop_remainder and mode == "custom":
        raise PlanError(f".shard(drop_remainder=True): {source} splits itself, so leave out the remainder in there")
    if plan.shard.drop_remainder and source.is_live:
        raise PlanError(
            f".shard(drop_remainder=True) needs to know how many items there are, and {source.kind} doesn't"
        )


def _is_placeless(stage: AnyStage) -> bool:
    """Whether a stage acts on an index or a list of files only, never on items."""
    return bool(stage.before_shard) and stage.before_shard <= {"index", "files"}


def _not_before(stage: AnyStage, plan: Plan) -> str:
    """Say why a stage can't be before the shard."""
    if _is_placeless(stage):
        return _misplacement(stage, plan.source)
    if stage.before_shard:
        return (
            f"`.{stage.kind}` before `.shard` needs to know which items there are, and {plan.source.kind} doesn't "
            "before it has read them: move it after `.shard` (there it counts per shard), or after `.merge`"
        )
    n = plan.shard.num_shards
    return f"`.{stage.method}` before `.shard({n})` would run {n} times per item: move it after `.shard`"


def _misplacement(stage: AnyStage, source: Source[Any]) -> str:
    if "files" in stage.before_shard:
        if not source.listed:
            return f".{stage.kind} permutes a list of files, and {source.kind} has none"
        return f".{stage.kind} permutes the list of files: put it next to the source, before .shard"
    if not source.indexable:
        return (
            f".{stage.kind}() permutes a whole index, and {source.kind} has none: use .shuffle(window=n) after .shard"
            f"{', and .shuffle_files() before it' if source.listed else ''}"
        )
    return (
        f".{stage.kind}() permutes the whole index: put it before .shard, or give it a window= to permute items as "
        "they pass"
    )


def _check_last(stages: Sequence[AnyStage]) -> None:
    for stage, later in pairwise(stages):
        if stage.last:
            raise PlanError(
                f".{stage.kind} is a plan's last stage, and .{later.kind} comes after it: what works on the host's "
                f"memory goes before .{stage.kind}, what works on the device into the loop"
            )


def _check_choices(plan: Plan) -> None:
    """Refuse a .repeat between a stage that chooses an order and one that replays: passes don't keep choices."""
    if plan.repeated_choice is None:
        return
    chooser, later = plan.repeated_choice
    for stage in later:
        if stage.rewinds:
            raise PlanError(
                f".repeat goes through what {chooser} has chosen anew in each pass, so {stage} could not read the same "
                "items again at a resume: move .repeat before .shard"
            )


def _check_spills(plan: Plan) -> tuple[AnyStage | None, AnyStage | None]:
    """Refuse a .repeat between a stage whose states refer to the files of one pass and one that replays.

    Returns such a stage, and one that a .repeat goes through.
    """
    keeping = repeated = None
    for _, _, part in plan.source.made_of:
        found = _check_spills(part)
        keeping, repeated = keeping or found[0], repeated or found[1]
    for stage in plan.stages:
        if repeated is not None and stage.rewinds:
            raise PlanError(
                f".repeat goes through what {repeated} keeps in the files of one pass, so {stage} could not read the "
                f"same items again at a resume: move .repeat before .{repeated.kind}, or leave out spill="
            )
        repeated = repeated or (keeping if stage.repeats else None)
        keeping = stage if stage.spills_to is not None else keeping
    return keeping, repeated
