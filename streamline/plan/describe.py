"""A plan for a person: what is read, by whom, what a resume reads again, and how much is held at the most.

Nothing is looked up for it: paths stand as they were written until a plan is opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from streamline.core.flow import LIST_ITEMS
from streamline.core.text import in_bytes
from streamline.plan.plan import READ_AHEAD_ITEMS, Plan
from streamline.plan.topology import Part, PlannedChannel, Task, Topology, merge_line, sources, topology, written
from streamline.sources.live import Live
from streamline.transforms.base import Stage
from streamline.transforms.limit import Take
from streamline.transforms.repeat import Repeat

__all__ = ["describe", "max_in_flight"]


LABEL_CHARS = 12


WIDTH_CHARS = 110
"""A line of tasks and channels is broken behind so many characters."""


def max_in_flight(plan: Plan) -> int:
    """Return how many of the source's items a rank may have taken and not yet handed to the consumer.

    Channel capacities, windows, batches, concurrency; items of a batch count each. With one rank: all workers; with
    several, fewer workers, and the channel behind the flow that ends together with the others.
    """
    return _held(plan, plan.shard.num_shards) + on_several_ranks(plan) + at_the_border(plan)


def on_several_ranks(plan: Plan) -> int:
    """Return how many more than on one rank that may be. Two have the most workers each."""
    n = plan.shard.num_shards
    if n == 1 or plan.after:  # there is only one rank; that channel is there anyway
        return 0
    channel = plan.end_widest * math.prod(stage.inputs_per_output for stage in plan.worker)
    return max(0, _held(plan, (n + 1) // 2) + channel - _held(plan, n))


def _held(plan: Plan, workers: int) -> int:
    """Return how many a rank with so many of the workers holds."""
    weight = 1
    # A list is read before anybody asks how many; of each file that is read in turn.
    held = READ_AHEAD_ITEMS + LIST_ITEMS * plan.shard.interleave if plan.source.waits else 0
    if isinstance(plan.source, Live):
        n, most = plan.shard.num_shards, plan.source.max_ahead
        held = most if n > 1 else min(plan.feed_capacity, most)  # while another worker starves
    held += plan.source.in_flight
    for stage in plan.worker:
        held += stage.in_flight * weight
        weight *= stage.inputs_per_output
    held += plan.worker_widest(plan.shard.num_shards) * weight
    held *= workers
    for stage in plan.after:
        held += stage.in_flight * weight
        weight *= stage.inputs_per_output
    if plan.after:
        held += plan.end_widest * weight
    return held


def at_the_border(plan: Plan) -> int:
    """Return how many of those are between the two threads of a plain `for` loop; with `async for`, none.

    None either where the last stage counts what the consumer hasn't taken yet.
    """
    if plan.owns_output_channel:
        return 0
    return plan.border_capacity * math.prod(stage.inputs_per_output for stage in plan.worker + plan.after)


def describe(plan: Plan) -> str:
    """Return a plan as lines: its stages in the order in which items go, then what that means."""
    n = plan.shard.num_shards
    lines = list(sources(plan))
    lines += [f"  {text}" for _, text in written(plan.before)]
    lines.append(f"shard into {n:,} ({plan.mode}){_how_read(plan)}")
    for stage, text in written(plan.worker):
        lines.append(f"  {text}{_in_all(stage, n)}")
    lines.append(merge_line(plan))
    lines += [f"  {text}" for _, text in written(plan.after)]
    parts = topology(plan)
    lines.append(f"{'reads':<{LABEL_CHARS}}{_reads(plan)}")
    lines += _way("reader", parts.feed, _starving(plan))
    lines += _way(f"worker{f' x{n:,}' * (n > 1)}", parts.worker)
    lines += _way("rank", parts.after)
    lines.append(f"{'memory':<{LABEL_CHARS}}{_bytes(parts)}")
    border, ranks = at_the_border(plan), on_several_ranks(plan)
    more = f"; on several ranks {ranks:,} more" if ranks else ""
    more += f"; in a quick plain loop {border:,} more" if border else ""
    lines.append(f"at most {_held(plan, n):,} items in flight{more}")
    return "\n".join(lines)


def _in_all(stage: Stage[Any, Any], workers: int) -> str:
    """Say what a stage of one worker comes to in all workers, where that isn't obvious."""
    calls = getattr(stage, "concurrency", 1)
    if workers > 1 and isinstance(stage, Take):
        return f": up to {stage.count * workers:,} in all"
    if workers > 1 and calls > 1:
        return f": up to {calls * workers:,} calls at once ({calls:,} x {workers:,} shards)"
    return ""


def _how_read(plan: Plan) -> str:
    """Say what is not obvious of how the shards are read."""
    n, source = plan.shard.num_shards, plan.source
    if isinstance(source, Live):
        kept = "in memory" if source.journal is None else f"in {source.journal}"
        whom = f"handed out to {n:,} workers in turn" if n > 1 else "for one worker"
        return f": read once by one reader, {whom}; journalled {kept}"
    if plan.shard.interleave > 1:
        return f": {plan.shard.interleave:,} files of each in turn, item by item"
    return f": everything is read {n:,} times" if _all_by_all(plan) else ""


def _all_by_all(plan: Plan) -> bool:
    return plan.mode == "replicated" and plan.shard.num_shards > 1


def _reads(plan: Plan) -> str:
    """Say how often the data is read, by whom, and from where a resume reads on."""
    n = plan.shard.num_shards
    unit = "byte" if plan.source.listed else "item"
    if _all_by_all(plan):
        how = f"each {unit} is read {n:,} times: by every worker, which keeps one item in {n:,}"
    else:
        how = f"each {unit} once" + (SPLIT[plan.mode].format(n=n) if n > 1 and plan.mode in SPLIT else "")
    passes = [stage.times for stage in plan.before + plan.worker + plan.after if isinstance(stage, Repeat)]
    if passes:
        how += ", again in each pass"
    again = plan.source.reread
    return f"{how}; a resume {again}" if again else how


SPLIT = {
    "interleaved": ", item i by worker i mod {n}",
    "contiguous": ", in {n} blocks",
    "file": ", file i by worker i mod {n}",
}


def _starving(plan: Plan) -> str:
    """Say what a worker's queue may grow to."""
    if not isinstance(plan.source, Live) or plan.shard.num_shards == 1:
        return ""
    most = plan.source.max_ahead
    return " for each worker" + (f", {most:,} while another starves" if most > plan.feed_capacity else "")


def _way(title: str, parts: Sequence[Part], note: str = "") -> list[str]:
    """Return a section's tasks and channels as lines, with a note in its channels; nothing of an empty one."""
    lines: list[str] = []
    for part in parts:
        words = f"[{part}{note}]" if isinstance(part, PlannedChannel) else _task(part)
        if lines and len(lines[-1]) + len(words) + 3 <= WIDTH_CHARS:
            lines[-1] += f" → {words}"
        else:
            lines.append(f"{' ' * LABEL_CHARS}→ {words}" if lines else f"{title:<{LABEL_CHARS}}{words}")
    return lines


def _task(task: Task) -> str:
    names = ", ".join(_short(text) + (f" (holds {held:,})" if held else "") for text, held in task.stages)
    return f"{names}: {task.at_once}" if task.at_once else names


def _short(text: str) -> str:
    """Return a stage without its options: they stand above."""
    head, _, rest = text.partition("(")
    name = rest.partition(",")[0].rstrip(")")
    return f"{head}({name})" if name and "=" not in name and not head.endswith(" ") else head.strip()


def _bytes(parts: Topology) -> str:
    """Say what is bounded in bytes."""
    each = [tube for tube in parts.worker if isinstance(tube, PlannedChannel) and tube.bytes is not None]
    once = [tube for tube in parts.after if isinstance(tube, PlannedChannel) and tube.bytes is not None]
    if not each and not once:
        return "bounded in items, as above; .prefetch(n, bytes=) bounds a channel in bytes"
    size = sum(tube.bytes or 0 for tube in each) * parts.workers + sum(tube.bytes or 0 for tube in once)
    count = len(each) * parts.workers + len(once)
    return f"{in_bytes(size)} in {count:,} channel{'s' * (count != 1)} with a byte budget; the rest is bounded in items"
