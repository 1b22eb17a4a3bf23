"""The printed plan: what is read, by whom, what a resume reads again, and how much is held at most. Without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamline.core.capacity import LIST_ITEMS
from streamline.core.text import in_bytes, quantity
from streamline.errors import printable
from streamline.plan.plan import READ_AHEAD_ITEMS, Plan, in_flight, stages_of
from streamline.plan.topology import Part, PlannedChannel, Task, sources, stage_lines, topology

LABEL_CHARS = 12

WIDTH_CHARS = 110
"""Of a line of tasks and channels."""


def max_in_flight(plan: Plan) -> int:
    """Return how many of the source's items a rank may have taken and not yet given to the consumer.

    Channel capacities, windows, batches, concurrency; items of a batch count each. With one rank: all workers; with
    several, fewer workers, and the channel after the flow that ends together with the others.
    """
    return _held_items(plan, plan.shard.num_shards) + on_several_ranks(plan) + in_bridge(plan)


def on_several_ranks(plan: Plan) -> int:
    """Return how many more that may be on two ranks, each of which has the most workers, than on one."""
    n = plan.shard.num_shards
    if n == 1 or plan.after:  # there is only one rank; that channel is there anyway
        return 0
    return max(0, _held_items(plan, (n + 1) // 2) + plan.end_widest * plan.output_items - _held_items(plan, n))


def _held_items(plan: Plan, workers: int) -> int:
    """Return how many items a rank with so many workers holds."""
    # A source reads a list more than its channel holds, of each file that is read in turn.
    held = READ_AHEAD_ITEMS + LIST_ITEMS * plan.shard.interleave if plan.source.waits else 0
    if plan.source.most_ahead is not None:  # while another worker starves
        held = plan.source.most_ahead if plan.shard.num_shards > 1 else plan.feed_capacity
    of_stages, weight = in_flight(plan.worker)
    held += plan.source.in_flight + of_stages + plan.worker_widest(plan.shard.num_shards) * weight
    of_rank, weight = in_flight(plan.after, weight)
    return held * workers + of_rank + (plan.end_widest * weight if plan.after else 0)


def in_bridge(plan: Plan) -> int:
    """Return how many of those are between the two threads of a plain `for` loop.

    None with `async for`, and where the last stage counts what the consumer hasn't taken.
    """
    if plan.owns_output_channel:
        return 0
    return plan.bridge_capacity * plan.output_items


def describe(plan: Plan) -> str:
    """Return a plan as lines: its stages in order, then what runs where."""
    n = plan.shard.num_shards
    lines = list(sources(plan))
    lines += [f"  {text}" for _, text in stage_lines(plan.before)]
    lines.append(f"shard into {n:,} ({plan.mode}){_how_read(plan)}")
    for stage, text in stage_lines(plan.worker):
        note = stage.in_all(n) if n > 1 else ""
        lines.append(f"  {text}: {note}" if note else f"  {text}")
    lines.append(str(plan.merge))
    lines += [f"  {text}" for _, text in stage_lines(plan.after)]
    lines += _limits(plan)
    parts = topology(plan)
    lines.append(f"{'reads':<{LABEL_CHARS}}{_reads(plan)}")
    lines += _section_lines("reader", parts.feed, _starvation_note(plan))
    lines += _section_lines(f"worker x{n:,}" if n > 1 else "worker", (*parts.worker, parts.worker_end))
    lines += _section_lines("rank", parts.after)
    lines.append(f"{'memory':<{LABEL_CHARS}}{_bytes((*parts.worker, parts.worker_end), n, parts.after)}")
    bridge, ranks = in_bridge(plan), on_several_ranks(plan)
    more = f"; on several ranks {ranks:,} more" if ranks else ""
    more += f"; in a quick plain loop {bridge:,} more" if bridge else ""
    lines.append(f"at most {_held_items(plan, n):,} items in flight{more}")
    return "\n".join(map(printable, lines))


def _limits(plan: Plan) -> Iterator[str]:
    """Yield the limits of calls over several shards or stages."""
    for limit in plan.limits:
        stages = [str(stage) for stage in stages_of(plan) if stage.call_limit is limit]
        shards = f", all {plan.shard.num_shards:,} shards together" if plan.shard.num_shards > 1 else ""
        yield f"{'limits':<{LABEL_CHARS}}{limit} for {' and '.join(stages)}{shards}"


def _how_read(plan: Plan) -> str:
    n = plan.shard.num_shards
    if plan.shard.interleave > 1:
        return f": {plan.shard.interleave:,} files of each in turn, item by item"
    return f": everything is read {n:,} times" if _all_by_all(plan) else plan.source.how_read(n)


def _all_by_all(plan: Plan) -> bool:
    return plan.mode == "replicated" and plan.shard.num_shards > 1


def _reads(plan: Plan) -> str:
    """Say how often the data is read, by whom, and where a resume begins to read."""
    n = plan.shard.num_shards
    unit = "byte" if plan.source.listed else "item"
    if _all_by_all(plan):
        how = f"each {unit} is read {n:,} times: by every worker, which keeps one item in {n:,}"
    else:
        how = f"each {unit} once" + (SPLIT[plan.mode].format(n=n) if n > 1 and plan.mode in SPLIT else "")
    again = f"; a resume {plan.source.reread}" if plan.source.reread else ""
    return f"{how}{', again in each pass' if plan.repeats else ''}{again}"


SPLIT = {
    "interleaved": ", item i by worker i mod {n}",
    "contiguous": ", in {n} blocks",
    "file": ", file i by worker i mod {n}",
}


def _starvation_note(plan: Plan) -> str:
    """Say how long a worker's queue may get."""
    most = plan.source.most_ahead
    if most is None or plan.shard.num_shards == 1:
        return ""
    return " for each worker" + (f", {most:,} while another starves" if most > plan.feed_capacity else "")


def _section_lines(title: str, parts: Sequence[Part], note: str = "") -> list[str]:
    """Return a section's tasks and channels as lines, with a note in its channels; none of an empty one."""
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
    """Return a stage without its options."""
    head, _, rest = text.partition("(")
    name = rest.partition(",")[0].rstrip(")")
    return f"{head}({name})" if name and "=" not in name and not head.endswith(" ") else head.strip()


def _bytes(worker: Sequence[Part], workers: int, after: Sequence[Part]) -> str:
    parts = [*worker] * workers + [*after]
    sizes = [part.bytes for part in parts if isinstance(part, PlannedChannel) and part.bytes is not None]
    if not sizes:
        return "bounded in items, as above; .prefetch(n, bytes=) bounds a channel in bytes"
    return (
        f"{in_bytes(sum(sizes))} in {quantity(len(sizes), 'channel')} with a byte budget; the rest is bounded in items"
    )
