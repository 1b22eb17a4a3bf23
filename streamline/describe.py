"""A plan for a person: what is read, by whom, and how much is held in memory at the most."""

from __future__ import annotations

import math
from typing import Any

from streamline.flow import LIST_ITEMS, Stage
from streamline.merge import BestEffort
from streamline.plan import READ_AHEAD_ITEMS, Plan
from streamline.transforms.batch import Batch
from streamline.transforms.limit import Take

__all__ = ["describe", "line", "max_in_flight"]


def max_in_flight(plan: Plan) -> int:
    """Return how many of the source's items a rank may have taken and not yet handed to the consumer.

    Channel capacities, windows, batches, concurrency; items of a batch count each. With one rank: all workers.
    """
    weight = 1
    held = READ_AHEAD_ITEMS + LIST_ITEMS if plan.source.waits else 0  # a list is read before anybody asks how many
    for stage in plan.worker:
        held += stage.in_flight * weight
        weight *= stage.size if isinstance(stage, Batch) else 1
    held += plan.worker_capacity(plan.shard.num_shards) * weight
    held *= plan.shard.num_shards
    for stage in plan.after:
        held += stage.in_flight * weight
        weight *= stage.size if isinstance(stage, Batch) else 1
    if plan.after:
        held += plan.capacity(READ_AHEAD_ITEMS, plan.worker + plan.after) * weight
    return held + at_the_border(plan)


def at_the_border(plan: Plan) -> int:
    """Return how many of those are between the two threads of a plain `for` loop; with `async for`, none."""
    return plan.border_capacity * math.prod(s.size for s in plan.worker + plan.after if isinstance(s, Batch))


def describe(plan: Plan) -> str:
    """Return a plan as lines, in the order in which items go."""
    n = plan.shard.num_shards
    lines = [str(plan.source)]
    lines += [f"  {line(stage)}" for stage in plan.before]
    lines.append(
        f"shard into {n} ({plan.mode}){f': everything is read {n} times' * (plan.mode == 'replicated' and n > 1)}"
    )
    for stage in plan.worker:
        note = f": up to {stage.count * n:,} in all" if isinstance(stage, Take) and n > 1 else ""
        lines.append(f"  {line(stage)}{note}")
    kind = "best effort" if isinstance(plan.merge, BestEffort) else "strict"
    lines.append(f"merge ({kind})")
    lines += [f"  {line(stage)}" for stage in plan.after]
    border = at_the_border(plan)
    lines.append(f"at most {max_in_flight(plan) - border:,} items in flight; in a quick plain loop {border:,} more")
    return "\n".join(lines)


def line(stage: Stage[Any, Any]) -> str:
    """Return a stage as it was written, more or less: "shuffle(window=4096, seed=0)"."""
    names = [] if stage.name.startswith(stage.kind) else [stage.name]
    options = [f"{key}={value!r}" for key, value in vars(stage).items() if key != "name" and not callable(value)]
    return f"{stage.kind}({', '.join(names + options)})"
