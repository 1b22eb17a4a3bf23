"""From what a user wrote to a plan: sections are told apart, and what doesn't fit together is refused.

Apart from the plan itself, since this needs all kinds of stages, and a host process, which is handed a plan that is
done, starts sooner without those that aren't in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streamline.errors import PlanError
from streamline.merge.best_effort import Merge
from streamline.merge.strict import Strict
from streamline.plan.component import PlanComponent
from streamline.plan.plan import Plan, Shard, index_of
from streamline.plan.rules import (
    INDEX_OPS,
    check_before,
    check_choices,
    check_interleave,
    check_last,
    check_mode,
    check_names,
    check_placed,
    check_shared,
)
from streamline.sharding.index import Index
from streamline.sources.base import Mode, Source
from streamline.sources.live import Live
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.bucket import BucketByLength
from streamline.transforms.flat_map import Unbatch
from streamline.transforms.limit import Skip, Take
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import ShuffleFiles

__all__ = ["compiled", "component", "merged_size"]


AnyStage = Stage[Any, Any]


def merged_size(plan: Plan) -> int:
    """Return how many of the source's items are in one that the merge takes: more than one where workers batch."""
    sizes: list[int] = []
    for stage in plan.worker:
        if isinstance(stage, Batch | BucketByLength):
            sizes.append(stage.inputs_per_output)
        elif isinstance(stage, Unbatch) and sizes:
            sizes.pop()
    return math.prod(sizes)


def compiled(
    source: Source[Any],
    stages: tuple[AnyStage, ...],
    sharding: Shard | None,
    sharded_at: int,
    merging: Merge | None,
    merged_at: int,
) -> Plan:
    """Return the plan of a pipeline, section by section.

    Raises:
      PlanError: the stages don't fit together; the message says which, and what to do.
    """
    stages = _counting(stages)
    end = len(stages) if merging is None else merged_at
    start = sharded_at if sharding is not None else _leading(source, stages[:end])
    plan = Plan(
        source=source,
        before=stages[:start],
        shard=sharding or Shard(),
        worker=stages[start:end],
        merge=merging or Strict(name="merge"),
        after=stages[end:],
        sharded=sharding is not None,
    )
    check_names([*source.names, *(stage.name for stage in stages)])
    check_interleave(source, plan.mode, plan.shard.interleave)
    check_mode(source, plan.mode, plan.shard.drop_remainder)
    if plan.mode == "shared":
        check_shared(source, stages, drop_remainder=plan.shard.drop_remainder)
    check_before(source, plan.before, plan.mode, plan.shard.num_shards)
    check_last(plan.worker + plan.after)
    check_placed(source, plan.worker + plan.after)
    if source.indexable:
        _check_index(index_of(plan.before, source.length or 0, (0,)), plan.mode)
    check_choices(plan.worker + plan.after, plan.merge.chooses, len(plan.worker))
    return plan


def _counting(stages: tuple[AnyStage, ...]) -> tuple[AnyStage, ...]:
    """Let those stages count their batches that have a stage downstream which may read them again."""
    return tuple(
        replace(stage, counts=any(later.rewinds for later in stages[at:])) if isinstance(stage, Batch) else stage
        for at, stage in enumerate(stages, 1)
    )


def _check_index(index: Index, mode: Mode) -> None:
    """Insist on an index that can be split so."""
    if index.length is None and mode == "contiguous":
        raise PlanError("an endless .repeat() has no contiguous blocks: put .repeat() behind .shard")


def _leading(source: Source[Any], stages: Sequence[AnyStage]) -> int:
    """Without a shard: how many stages act on the source itself."""
    ops = INDEX_OPS if source.indexable else (ShuffleFiles,) if source.listed else ()
    return next((at for at, stage in enumerate(stages) if not isinstance(stage, ops)), len(stages))


def component(
    option: str, name: str, source: Source[Any], stages: Sequence[Stage[Any, Any]], *, whole: bool
) -> PlanComponent:
    """Return a component, its parts named after it.

    Args:
      option: how the user wrote it: "sl.mix".
      whole: whether it has neither shard nor merge.

    Raises:
      PlanError: it can't be a component; with the way out.
    """
    if not whole:
        raise PlanError(
            f"{option}: {name!r} has a .shard or a .merge: put them behind {option}, which splits each part"
        )
    if isinstance(source, Live):
        raise PlanError(
            f"{option}: {name!r} is a live feed, which can be read once, by one reader: merge feeds into one"
        )
    if chooser := next((stage for stage in stages if stage.chooses), None):
        raise PlanError(
            f"{option}: {chooser} of {name!r} chooses an order that another run would choose differently: move it "
            f"behind {option}"
        )
    source = replace(source, name=f"{name}/{source.name}")
    stages = tuple(replace(stage, name=f"{name}/{stage.name}") for stage in stages)
    if source.default_mode != "replicated":
        return PlanComponent(compiled(source, stages, None, 0, None, 0))
    ops = (Take, Skip, Repeat)  # of all, before each worker keeps its stride
    at = next((at for at, stage in enumerate(stages) if not isinstance(stage, ops)), len(stages))
    return PlanComponent(compiled(source, stages, Shard(), at, None, 0))
