"""What runs where: the tasks of a plan, what each of them pulls, and the channels between them. Nothing is looked up.

It says what `open_worker` and `ResolvedRun.flow` do, for a person: for a printed plan, and for a picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from streamline.core.blame import stage_name
from streamline.core.text import in_bytes
from streamline.merge.best_effort import BestEffort
from streamline.plan.plan import READ_AHEAD_ITEMS, Plan
from streamline.sources.live import Live
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.bucket import BucketByLength
from streamline.transforms.collate import as_list, stack, stack_tensors
from streamline.transforms.custom import CAPACITY, Through
from streamline.transforms.map import ConcurrentMap, Numbering
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.repeat import Repeat

__all__ = ["Part", "PlannedChannel", "Task", "Topology", "merge_line", "sources", "topology", "written"]


AnyStage = Stage[Any, Any]


SHORT_CHARS = 24
"""A parameter of a custom stage or source is printed if it takes no more than these; else its type is."""


PASSES_ON = (("passes items on", 0),)
"""What a task does that stands between two channels."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task: the stages that it pulls as a chain, the first one first.

    Attributes:
      stages: as they were written, and what each of them holds: ("shuffle(window=8, seed=0)", 16).
      calls: of the user's function that may be at work at once; 1: one follows another.
      threads: whether they are in threads.
    """

    stages: tuple[tuple[str, int], ...]
    calls: int = 1
    threads: bool = False

    @property
    def at_once(self) -> str:
        """Say how many calls are at work at once: "64 threads"; nothing where one follows another."""
        if self.calls == 1 and not self.threads:
            return ""
        kind = "thread" if self.threads else "call"
        return f"{self.calls:,} {kind}{'s' * (self.calls != 1)}"


@dataclass(frozen=True, kw_only=True)
class PlannedChannel:
    """A channel.

    Attributes:
      items: that it holds at the most.
      each: the source's items in one of them; 1 unless they are batches.
      bytes: that it holds at the most; None: nobody counts.
    """

    items: int
    each: int = 1
    bytes: int | None = None

    def __str__(self) -> str:
        unit = "items" if self.each == 1 else "batches"
        budget = "" if self.bytes is None else f", {in_bytes(self.bytes)}"
        return f"{self.items:,} {unit}{budget}"


Part = Task | PlannedChannel


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The parts of a plan, in the order in which items go through them.

    Attributes:
      feed: of a live source, what reads it, and each worker's channel from there; else nothing.
      worker: of one worker; the last one is its channel.
      workers: how many there are in the whole job.
      merge: "merge (strict)".
      after: behind the merge: a task that pulls it, and a channel; nothing: whoever consumes pulls the merge.
      border: what may be between the event loop's thread and a plain loop's; None: it is counted before.
    """

    feed: tuple[Part, ...]
    worker: tuple[Part, ...]
    workers: int
    merge: str
    after: tuple[Part, ...]
    border: PlannedChannel | None


def topology(plan: Plan) -> Topology:
    """Return what runs where."""
    workers = plan.shard.num_shards
    feed: list[Part] = []
    source = f"{plan.source.kind}({plan.source.name})" if plan.source.kind == "source" else plan.source.kind
    head: list[tuple[str, int]] = [(source, 0)]
    replicated = plan.mode == "replicated"
    head += [
        (text, stage.in_flight)
        for stage, text in written(plan.before)
        if replicated or (isinstance(stage, Repeat) and not plan.source.indexable)
    ]
    if isinstance(plan.source, Live):
        feed, head = (
            [Task(stages=tuple(head)), PlannedChannel(items=min(plan.feed_capacity, plan.source.max_ahead))],
            [],
        )
    if replicated and workers > 1:
        head.append((f"one item in {workers:,}", 0))
    cut: list[Part] = []
    if plan.source.waits:
        cut, head = [Task(stages=tuple(head)), PlannedChannel(items=READ_AHEAD_ITEMS)], []
    worker = [*cut, *_section(plan.worker, head, 1)] or [Task(stages=PASSES_ON)]
    if not isinstance(worker[-1], PlannedChannel):
        worker.append(PlannedChannel(items=plan.worker_widest(workers), each=_each(plan.worker)))
    after: list[Part] = []
    each = _each(plan.worker + plan.after)
    border: PlannedChannel | None = PlannedChannel(items=plan.border_capacity, each=each)
    if plan.after:
        last = plan.after[-1] if plan.owns_output_channel else None
        after = _section(
            plan.after[:-1] if last is not None else plan.after, [(merge_line(plan), 0)], _each(plan.worker)
        )
        if isinstance(after[-1], PlannedChannel):
            after.append(Task(stages=PASSES_ON))
        after.append(PlannedChannel(items=plan.end_widest, each=each))
        if last is not None:
            after += [
                Task(stages=tuple((text, 0) for _, text in written([last]))),
                PlannedChannel(items=last.in_flight, each=each),
            ]
            border = None
    return Topology(
        feed=tuple(feed),
        worker=tuple(worker),
        workers=workers,
        merge=merge_line(plan),
        after=tuple(after),
        border=border,
    )


def _section(stages: Sequence[AnyStage], chain: list[tuple[str, int]], each: int) -> list[Part]:
    """Return the parts of a section whose first task pulls `chain` first; cut where a stage opens a channel."""
    parts: list[Part] = []
    chain = list(chain)
    for stage, text in written(stages):
        if isinstance(stage, Batch) and stage.max_wait_s is not None:
            held, taken = stage.size, stage.in_flight - stage.size
            if chain:  # else it reads the channel that is there
                parts += [Task(stages=tuple(chain)), PlannedChannel(items=taken, each=each)]
            chain = [(text, held)]
            each *= stage.size
            continue
        if isinstance(stage, Prefetch):
            parts += [
                Task(stages=tuple(chain) or PASSES_ON),
                PlannedChannel(items=stage.items, each=each, bytes=stage.bytes),
            ]
            chain = []
            continue
        if isinstance(stage, Regenerate) and stage.overlap:
            parts += [Task(stages=tuple(chain) or PASSES_ON), PlannedChannel(items=stage.size, each=each)]
            chain = [(text, stage.size)]
            continue
        chain.append((text, 0 if isinstance(stage, ConcurrentMap | Through) else stage.in_flight))
        each *= stage.inputs_per_output
        if isinstance(stage, ConcurrentMap):
            parts.append(Task(stages=tuple(chain), calls=stage.concurrency, threads=stage.executor == "thread"))
            parts.append(PlannedChannel(items=stage.capacity, each=each))
            chain = []
        elif isinstance(stage, Through):
            parts += [Task(stages=tuple(chain)), PlannedChannel(items=CAPACITY, each=each)]
            chain = []
    if chain:
        parts.append(Task(stages=tuple(chain)))
    return parts


def _each(stages: Iterable[AnyStage]) -> int:
    return math.prod(stage.inputs_per_output for stage in stages)


def merge_line(plan: Plan) -> str:
    """Return the merge as it was written: "merge (best effort: max_skips_per_round=2, max_lead=8)"."""
    if isinstance(plan.merge, BestEffort):
        return (
            f"merge (best effort: max_skips_per_round={plan.merge.max_skips_per_round}, max_lead={plan.merge.max_lead})"
        )
    return "merge (strict)"


def written(stages: Iterable[AnyStage]) -> Iterator[tuple[AnyStage, str]]:
    """Yield each stage with its line, as it was written, more or less: "shuffle(window=4096, seed=0)".

    What is as it is by default is left out, but for seeds, and so are functions: a stage is called after its own. What
    numbers the inputs of a map with a seed is part of that.
    """
    seed: list[str] = []
    for stage in stages:
        if isinstance(stage, Numbering):
            seed = [f"seed={stage.seed!r}"]
            continue
        yield stage, _line(stage, seed)
        seed = []


def sources(plan: Plan, indent: str = "") -> Iterator[str]:
    """Yield the source; of one that is made of several, also its branches, each with its weight and its stages."""
    yield f"{indent}{plan.source}"
    for name, note, branch in plan.source.made_of:
        head, *more = sources(branch, f"{indent}  ")
        yield f"{indent}  {name}: {note}{head.strip()}"
        yield from more
        stages = [replace(stage, name=stage.name.removeprefix(f"{name}/")) for stage in branch.before + branch.worker]
        yield from (f"{indent}    {text}" for _, text in written(stages))


COLLATES: dict[object, str] = {as_list: "None", stack_tensors: "'torch'"}
"""How they are written."""


def _line(stage: AnyStage, more: Sequence[str]) -> str:
    names = [] if stage.name.startswith(stage.kind) else [stage.name]
    options = [
        f"{field.name}={value!r}"
        for field in fields(stage)
        if field.repr and field.name not in ("name", "params") and not callable(value := getattr(stage, field.name))
        if field.name == "seed" or value != field.default
    ]
    options += more
    if isinstance(stage, Through):
        options += [f"{key}={_short(value)}" for key, value in stage.params]
    if isinstance(stage, Batch | BucketByLength) and stage.collate is not stack:
        options.append(f"collate={COLLATES.get(stage.collate) or stage_name(stage.collate)}")
    return f"{stage.kind}({', '.join(names + options)})"


def _short(value: object) -> str:
    """Return what a parameter is, in a few characters."""
    try:
        text = repr(value)
    except Exception:  # a user's own: no reason not to see the plan
        text = ""
    return text if 0 < len(text) <= SHORT_CHARS else f"<{type(value).__name__}>"
