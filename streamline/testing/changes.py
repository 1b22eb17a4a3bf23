"""What may change between a snapshot and its resume with nothing to accept ("none needed" in docs/resume.md)."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from streamline.core.limits import Limit
from streamline.errors import PlanError
from streamline.merge.base import Merge
from streamline.merge.best_effort import BestEffort
from streamline.merge.strict import Strict
from streamline.pipeline import Pipeline
from streamline.testing.scripted import to_elsewhere
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.custom import Declared, Through
from streamline.transforms.map import ConcurrentMap, Map
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.retry import Retry

AnyStage = Stage[Any, Any]


def changed(pipeline: Pipeline[Any], dice: Random) -> Pipeline[Any]:
    """Return a pipeline that takes `pipeline`'s snapshots: same items; the same order too, unless that one chooses it.

    What changes: the kind of merge and its options, concurrency, executor, retries, limits, prefetch, transfer,
    `max_wait_s`, `overlap`, `snapshot_every`. A stage chooses in the result only where the order that reaches it in
    `pipeline`, or its own, is open already.
    """
    try:
        found = _changed(pipeline, dice)
        found.plan  # noqa: B018 - a choice that a .repeat passes on, say
    except PlanError:
        return pipeline
    return found


def _changed(pipe: Pipeline[Any], dice: Random) -> Pipeline[Any]:
    merging, merged_at = pipe.merging, len(pipe.stages) if pipe.merging is None else pipe.merged_at
    stages: list[AnyStage] = []
    is_open = False
    for at, stage in enumerate(pipe.stages):
        is_open |= stage.chooses or (at >= merged_at and merging is not None and merging.chooses)
        stages.append(_other(stage, is_open, dice))
    last = stages.pop() if stages and stages[-1].last else None
    for at in sorted({len(stages), min(merged_at, len(stages))}, reverse=True):
        if dice.random() < 0.3:
            stages.insert(at, Prefetch[Any](name=f"ahead at {at}", items=dice.randint(1, 6)))
            merged_at += at <= merged_at
    merged_at = 0 if merging is None else merged_at
    made = replace(pipe, stages=tuple(stages), merging=_other_merge(merging, dice), merged_at=merged_at)
    if dice.random() < 0.3:
        return to_elsewhere(made, depth=dice.randint(1, 3))
    return made if last is None or dice.random() < 0.5 else made._with(last)


def _other_merge(merge: Merge | None, dice: Random) -> Merge | None:
    if not isinstance(merge, BestEffort):
        return merge
    kinds: list[Merge] = [
        merge,
        Strict(name=merge.name),
        BestEffort(name=merge.name, max_skips_per_round=dice.randrange(4), max_lead=dice.randint(1, 5)),
    ]
    return dice.choice(kinds)


def _other(stage: AnyStage, is_open: bool, dice: Random) -> AnyStage:
    """Return a stage with other options; one that chooses only if the order of its outputs is open anyway."""
    match stage:
        case ConcurrentMap(executor="thread", ordered=True, retry=None) if dice.random() < 0.3:
            return Map(name=stage.name, fn=stage.fn)
        case ConcurrentMap():
            retry = dice.choice((stage.retry, Retry(retries=99, timeout_s=None, backoff=0, retry_on=Exception)))
            limit = dice.choice((stage.limit, None, Limit(2)))
            return replace(stage, concurrency=dice.choice((1, 2, 5, 40)), retry=retry, limit=limit)
        case Map() if dice.random() < 0.3:
            return ConcurrentMap(name=stage.name, fn=stage.fn, concurrency=1, executor="thread")
        case Batch(kind="batch") if is_open:
            return replace(stage, max_wait_s=dice.choice((None, 1e-9, 0.001)))
        case Regenerate():
            return replace(stage, overlap=dice.random() < 0.5)
        case Through(fn=Declared(fn=fn, state=state)):
            return replace(stage, fn=Declared(fn, state, dice.randint(1, 6)))
        case Prefetch():
            return replace(stage, items=dice.randint(1, 9), bytes=dice.choice((None, 1, 100)))
    return stage
