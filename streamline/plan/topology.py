"""The tasks of a plan, their stages, and the channels between them, as `open_worker` and `ResolvedRun.flow` make them.

For the printed plan and the pictures; without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from streamline.core.limits import Limit
from streamline.core.text import in_bytes, quantity
from streamline.plan.plan import READ_AHEAD_ITEMS, AnyStage, Plan, weights

PASSES_ON = (("passes items on", 0),)
"""The only work of a task between two channels."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task: the stages that it pulls as a chain, as they were written, each with the items that it holds.

    `calls` of the user's function run at once, in `threads` perhaps; `limit` bounds them with those of other tasks.
    """

    stages: tuple[tuple[str, int], ...]
    calls: int = 1
    threads: bool = False
    limit: Limit | None = None

    @property
    def at_once(self) -> str:
        """The calls that run at once: "64 threads, of Limit(16)"; "": one."""
        if self.calls == 1 and not self.threads and self.limit is None:
            return ""
        calls = quantity(self.calls, "thread" if self.threads else "call")
        return calls if self.limit is None else f"{calls}, of {self.limit}"


@dataclass(frozen=True, kw_only=True)
class PlannedChannel:
    items: int  # that it holds at most
    each: int = 1  # the source's items in one of them; 1 unless they are batches
    bytes: int | None = None  # that it holds at most; None: not counted

    def __str__(self) -> str:
        unit = "items" if self.each == 1 else "batches"
        budget = "" if self.bytes is None else f", {in_bytes(self.bytes)}"
        return f"{self.items:,} {unit}{budget}"


Part = Task | PlannedChannel


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The parts of a plan, in the order in which items pass them.

    Attributes:
      feed: of a live source, its reader and each worker's queue; else empty.
      worker: of one worker, up to its last channel, `worker_end`.
      after: from the merge on; empty: the consumer pulls the merge.
      bridge: to a plain loop's thread, at most; None: it is in `after` already.
    """

    feed: tuple[Part, ...]
    worker: tuple[Part, ...]
    worker_end: PlannedChannel
    after: tuple[Part, ...]
    bridge: PlannedChannel | None


def topology(plan: Plan) -> Topology:
    workers = plan.shard.num_shards
    source = f"{plan.source.kind}({plan.source.name})" if plan.source.kind == "source" else plan.source.kind
    head = [(source, 0), *((text, stage.in_flight) for stage, text in stage_lines(plan.in_workers))]
    feed: tuple[Part, ...] = ()
    if plan.source.is_live:
        feed, head = (Task(stages=tuple(head)), PlannedChannel(items=plan.feed_capacity)), []
    if plan.mode == "replicated" and workers > 1:
        head.append((f"one item in {workers:,}", 0))
    worker: list[Part] = []
    if plan.source.waits:
        worker, head = [Task(stages=tuple(head)), PlannedChannel(items=READ_AHEAD_ITEMS)], []
    worker = [*worker, *_section(plan.worker, head, 1)] or [Task(stages=PASSES_ON)]
    last = worker.pop() if isinstance(worker[-1], PlannedChannel) else None
    end = PlannedChannel(items=plan.worker_widest(workers), each=_each(plan.worker)[-1])
    return Topology(
        feed=feed,
        worker=tuple(worker),
        worker_end=last if isinstance(last, PlannedChannel) else end,
        after=tuple(_after(plan)) if plan.after else (),
        bridge=None if plan.owns_output_channel else PlannedChannel(items=plan.bridge_capacity, each=plan.output_items),
    )


def _after(plan: Plan) -> Iterator[Part]:
    """Yield the parts from the merge on."""
    last = plan.after[-1:] if plan.owns_output_channel else ()
    parts = _section(plan.after[: len(plan.after) - len(last)], [(str(plan.merge), 0)], _each(plan.worker)[-1])
    yield from parts
    if isinstance(parts[-1], PlannedChannel):
        yield Task(stages=PASSES_ON)
    yield PlannedChannel(items=plan.end_widest, each=plan.output_items)
    for stage, text in stage_lines(last):
        yield Task(stages=((text, 0),))
        yield PlannedChannel(items=stage.in_flight, each=plan.output_items)


def _section(stages: Sequence[AnyStage], chain: list[tuple[str, int]], each: int) -> list[Part]:
    """Return the parts of a section whose first task pulls `chain` first; a stage's channels divide it."""
    parts: list[Part] = []
    for (stage, text), (of_input, of_output) in zip(stage_lines(stages), pairwise(_each(stages, each)), strict=True):
        layout = stage.layout
        if layout.before is not None and (chain or not layout.adopts):
            parts += [Task(stages=tuple(chain) or PASSES_ON), PlannedChannel(items=layout.before, each=of_input)]
            chain = []
        if layout.holds is not None:
            chain = [*chain, (text, layout.holds)]
        if layout.after is not None:
            made = Task(
                stages=tuple(chain) or PASSES_ON, calls=layout.calls, threads=layout.threads, limit=layout.limit
            )
            parts.append(made)
            parts.append(PlannedChannel(items=layout.after, each=of_output, bytes=layout.after_bytes))
            chain = []
    return [*parts, Task(stages=tuple(chain))] if chain else parts


def _each(stages: Iterable[AnyStage], weight: int = 1) -> list[int]:
    """Return how many of the source's items are in one before each stage that is shown, and after all."""
    shown = [stage for stage, _ in stage_lines(stages)]
    return list(weights(shown, lambda stage: stage.inputs_per_output, weight))


def stage_lines(stages: Iterable[AnyStage]) -> Iterator[tuple[AnyStage, str]]:
    """Yield each stage with its line, about as it was written: "shuffle(window=4096, seed=0)"."""
    more: list[str] = []
    for stage in stages:
        if stage.part_of_next:
            more = stage.shown_options()
        else:
            yield stage, stage.line(more)
            more = []


def sources(plan: Plan, indent: str = "") -> Iterator[str]:
    """Yield the line of the source; of one that is made of several, also its branches, with weights and stages."""
    yield f"{indent}{plan.source}"
    for name, note, branch in plan.source.made_of:
        head, *more = sources(branch, f"{indent}  ")
        yield f"{indent}  {name}: {note}{head.strip()}"
        yield from more
        stages = [replace(stage, name=stage.name.removeprefix(f"{name}/")) for stage in branch.stages]
        yield from (f"{indent}    {text}" for _, text in stage_lines(stages))
