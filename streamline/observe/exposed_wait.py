"""The exposed wait of each stage: the share of the time for which the consumer waited for it. Pure.

Work that isn't hidden behind the consumer's own is exposed. It is found by a walk from the consumer up: while the
consumer waits, the task that gives it items works in one of its stages, or has no input; the latter is divided over the
task before it in the same way. Exposed waits add up to the consumer's, less what no stage accounts for.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamline.core.counters import FROM_HOST
from streamline.observe.figures import Figures, StageStats

JOINTS = ("mix", "zip")
"""Kinds of sources whose components run side by side, before them in the plan's order."""


def exposed_waits(figures: Figures) -> dict[str, float]:
    """Return the share of the time for which the consumer waited for each stage, by its name."""
    elapsed_s = figures.elapsed_s
    if elapsed_s <= 0:
        return {}
    waits = min(1.0, max(0.0, figures.consumer_wait_s - figures.ranks_wait_s) / elapsed_s)
    found: dict[str, float] = {}
    tasks = list(_tasks(figures))
    if tasks:  # a last stage that has no room while the consumer waits isn't what it waits for
        no_room = tasks[-1][-1].wait_output_s / (elapsed_s * max(1, tasks[-1][-1].workers))
        waits = max(0.0, min(waits, 1.0 - no_room))
    for task in reversed(tasks):
        busy = {stage.name: _work(stage, elapsed_s) for stage in task}
        idle = 0.0 if task is tasks[0] else _idle(task[0], elapsed_s)
        whole = sum(busy.values()) + idle
        if whole <= 0:
            continue
        found |= {name: waits * share / whole for name, share in busy.items()}
        waits *= idle / whole
    return found


def _tasks(figures: Figures) -> Iterator[list[StageStats]]:
    """Yield the stages that run in one task, from the source on; those of components together, as the first."""
    ends = {channel.name.removesuffix(FROM_HOST) for channel in figures.channels}
    joints = [at for at, stage in enumerate(figures.stages) if stage.kind in JOINTS]
    last = joints[-1] if joints else 0
    task = list(figures.stages[:last])
    for stage in figures.stages[last:]:
        if stage.kind == "merge" and task:
            yield task
            task = []
        task.append(stage)
        if stage.name in ends:
            yield task
            task = []
    if task:
        yield task


def _idle(stage: StageStats, elapsed_s: float) -> float:
    """Return the share of the time for which a call of a stage, in a worker, had no input: then its input limits."""
    return min(1.0, stage.wait_input_s / (elapsed_s * max(1, stage.workers)))


def _work(stage: StageStats, elapsed_s: float) -> float:
    limited_s = sum(detail.value for detail in stage.details if detail.name == "limited_s")
    return min(1.0, (stage.busy_s + limited_s) / (elapsed_s * max(1, stage.slots)))
