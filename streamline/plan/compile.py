"""Compiles a pipeline to a plan: sorts its stages into sections, and refuses those that don't fit together.

Host processes get a compiled plan, and start sooner without this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streamline.errors import PlanError
from streamline.merge.base import Merge
from streamline.merge.strict import Strict
from streamline.plan.component import PlanComponent
from streamline.plan.plan import AnyStage, Plan, Shard, index_of
from streamline.plan.rules import check_plan
from streamline.sources.base import Source


def merged_size(plan: Plan) -> int:
    """Return how many of the source's items are in one that the merge takes: more where workers make batches."""
    sizes: list[int] = []
    for stage in plan.worker:
        if stage.depth_change > 0:
            sizes.append(stage.inputs_per_output)
        elif stage.depth_change < 0 and sizes:
            sizes.pop()
    return math.prod(sizes)


def compile_plan(
    source: Source[Any],
    stages: tuple[AnyStage, ...],
    sharding: Shard | None,
    sharded_at: int,
    merging: Merge | None,
    merged_at: int,
) -> Plan:
    """Return the plan of a pipeline, section by section. Raises `PlanError`: the stages don't fit together."""
    stages = tuple(stage.before(stages[at:]) for at, stage in enumerate(stages, 1))
    end = len(stages) if merging is None else merged_at
    acts_on = "index" if source.indexable else "files" if source.listed else "nothing"
    start = sharded_at if sharding is not None else _count_leading(stages[:end], acts_on)
    plan = Plan(
        source=source,
        before=stages[:start],
        shard=sharding or Shard(),
        worker=stages[start:end],
        merge=merging or Strict(name="merge"),
        after=stages[end:],
        sharded=sharding is not None,
    )
    check_plan(plan)
    if (
        source.indexable
        and index_of(plan.before, source.length or 0, (0,)).length is None
        and plan.mode == "contiguous"
    ):
        raise PlanError("an endless .repeat() has no contiguous blocks: put .repeat() after .shard")
    return plan


def _count_leading(stages: Sequence[AnyStage], acts_on: str) -> int:
    """Return how many of the first stages act on `acts_on`; see `Stage.before_shard`."""
    return next((at for at, stage in enumerate(stages) if acts_on not in stage.before_shard), len(stages))


def component(
    option: str, name: str, source: Source[Any], stages: Sequence[AnyStage], *, whole: bool, deep: bool
) -> PlanComponent:
    """Return a component, its source and stages named after it. Raises `PlanError`, with the `option`: it can't be one.

    `whole`: it has neither shard nor merge. `deep`: rename the parts of its source, too.
    """
    if not whole:
        raise PlanError(f"{option}: {name!r} has a .shard or a .merge: put them after {option}, which splits each part")
    if source.is_live:
        raise PlanError(
            f"{option}: {name!r} is a live feed, which can be read once, by one reader: merge feeds into one"
        )
    if chooser := next((stage for stage in stages if stage.chooses), None):
        raise PlanError(
            f"{option}: {chooser} of {name!r} chooses an order that another run would choose differently: move it "
            f"after {option}"
        )
    stages = tuple(replace(stage, name=f"{name}/{stage.name}") for stage in stages)
    flat = replace(source, name=f"{name}/{source.name}")
    names = [*flat.names, *(stage.name for stage in stages)]
    source = source.within(name) if deep or len({*names}) < len(names) else flat
    if source.default_mode != "replicated":
        return PlanComponent(compile_plan(source, stages, None, 0, None, 0))
    return PlanComponent(compile_plan(source, stages, Shard(), _count_leading(stages, "whole"), None, 0))
