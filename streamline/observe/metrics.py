"""Metrics of a stream: names, units and values, for OpenTelemetry, Prometheus, TensorBoard and whatever takes numbers.

`METRICS` is the whole list. Names and units follow OpenTelemetry's conventions: dots, no unit in the name, UCUM units;
`Metric.prometheus_name` is what its specification makes of them for Prometheus. Counters grow while a stream is open;
a loader's begin anew with each epoch, which Prometheus's `rate()` and its kin expect.

The exposed wait of a stage is the share of the time for which the consumer waited for it: work that isn't hidden behind
the consumer's own. It is found by a walk from the consumer up: while the consumer waits, the task that gives it items
works in one of its stages, or has no input; the latter is divided over the task before it in the same way. Exposed
waits add up to the consumer's, less what no stage accounts for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from streamline.core.figures import FROM_HOST, Figures, HostStats, StageStats
from streamline.errors import printable_lines
from streamline.observe.stats import Stats
from streamline.observe.verdict import CONTENTION, OTHER_RANKS

Labels: TypeAlias = tuple[str, ...]

Points: TypeAlias = Iterable[tuple[Labels, float]]
"""Values of a metric, each with what tells it from the others."""

Kind: TypeAlias = Literal["counter", "gauge"]

PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
      name: as OpenTelemetry has it: "streamline.stage.items".
      kind: "counter": it grows. "gauge": it stands as it stands.
      unit: in UCUM: "s", "By" (bytes), "1" (a share), "{item}".
      labels: the names of what tells its values apart, besides `stream` and `rank`.
      description: for a person.
      points: returns the values: of the stream since it was opened, and of its last seconds.
    """

    name: str
    kind: Kind
    unit: str
    labels: Labels
    description: str
    points: Callable[[Stats, Stats], Points]

    @property
    def prometheus_name(self) -> str:
        """Its name in Prometheus: "streamline_stage_items_total"."""
        total = "_total" if self.kind == "counter" else ""
        return self.name.replace(".", "_") + PROMETHEUS_UNITS.get(self.unit, "") + total

    def read(self, stream: Mapping[str, str], stats: Stats, lately: Stats) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the values of a stream, each with all of its labels."""
        for labels, value in self.points(stats, lately):
            found = {**stream, **dict(zip(self.labels, labels, strict=True))}
            yield {name: printable_lines(label) for name, label in found.items()}, float(value)


def scalars(stats: Stats) -> dict[str, float]:
    """Return all values in a flat dict: {"streamline.stage.items/decode": 400.0, ...}.

    For what logs numbers by name, as TensorBoard and Weights & Biases do: docs/metrics.md. Give it
    `stats.since(earlier)` for those of a window.
    """
    return {
        "/".join((metric.name, *labels.values())): value
        for metric in METRICS
        for labels, value in metric.read({}, stats, stats)
    }


def _field(name: str, kind: Kind, unit: str, field: str, description: str) -> Metric:
    return Metric(f"streamline.{name}", kind, unit, (), description, lambda stats, _: [((), getattr(stats, field))])


def _limit(_: Stats, lately: Stats) -> Points:
    verdict = lately.verdict
    if verdict is None:
        return []
    alike = "process" if verdict.rule in CONTENTION else OTHER_RANKS if verdict.rule == OTHER_RANKS else "consumer"
    return [((verdict.stage or alike, verdict.rule), 1.0)]


def _exposed(_: Stats, lately: Stats) -> Points:
    return [((stage,), share) for stage, share in exposed_waits(lately.warm).items()]


PARTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "stage": ("stages", lambda stage: stage.name),
    "channel": ("channels", lambda channel: channel.name),
    "host": ("hosts", lambda host: f"{host.kind} {host.number}"),
    "source": ("reads", lambda read: read.name),
}
"""Parts of a stream: the field of `Stats` that has them, and the label of one."""


def _each(
    name: str, kind: Kind, unit: str, value: str | Callable[[Any], Points], description: str, *labels: str
) -> Metric:
    """Return a metric of all parts of a kind, "stage.items" of stages.

    Args:
      value: a field of a part; or a function of it, whose points have further `labels`.
    """
    part = name.partition(".")[0]
    field, label = PARTS[part]

    def points(stats: Stats, _: Stats) -> Points:
        for one in getattr(stats, field):
            own = value(one) if callable(value) else [((), getattr(one, value))]
            yield from (((label(one), *more), number) for more, number in own)

    return Metric(f"streamline.{name}", kind, unit, (part, *labels), description, points)


def _times(one: StageStats | HostStats) -> Points:
    return [(("busy",), one.busy_s), (("no_input",), one.wait_input_s), (("no_room",), one.wait_output_s)]


def _details(stage: StageStats) -> Points:
    return [((detail.name, detail.part), detail.value) for detail in stage.details]


METRICS = (
    _field("stream.time", "counter", "s", "elapsed_s", "Since it was opened."),
    _field("consumer.items", "counter", "{item}", "items", "Items that the loop was given."),
    _field("consumer.wait.time", "counter", "s", "consumer_wait_s", "For which the loop waited."),
    _field(
        "consumer.ranks.wait.time", "counter", "s", "ranks_wait_s",
        "Of that, for other ranks to have another item, where all end together.",
    ),
    Metric(
        "streamline.consumer.wait.share", "gauge", "1", (), "Of the last seconds.",
        lambda _, lately: [((), lately.waits)],
    ),
    Metric(
        "streamline.limit", "gauge", "{stream}", ("by", "rule"),
        "1: what has limited the stream in the last seconds, and by which rule of the verdict.", _limit,
    ),
    _each("stage.items", "counter", "{item}", "items", "Items that came out of it."),
    _each("stage.io", "counter", "By", "bytes", "Bytes of those, estimated from samples."),
    _each(
        "stage.time", "counter", "s", _times,
        "That it was busy, had no input, or no room for its output; all workers and calls together.", "state",
    ),
    Metric(
        "streamline.stage.exposed.share", "gauge", "1", ("stage",),
        "Of the last seconds, in which the loop waited for this stage.", _exposed,
    ),
    _each("stage.held.time", "counter", "s", "held_s", "For which it held an event loop."),
    _each("stage.errors", "counter", "{item}", "errors", "Items that it skipped."),
    _each("stage.slots", "gauge", "{call}", "slots", "Calls that it may make at once, all workers together."),
    _each("stage.detail", "gauge", "{count}", _details, "What only some kinds of stages count.", "detail", "part"),
    _each("channel.items", "counter", "{item}", "items", "Items that went through."),
    _each("channel.depth", "gauge", "{item}", "depth", "Items in it now, all workers together."),
    _each(
        "channel.capacity", "gauge", "{item}", lambda channel: [((), channel.capacity * channel.channels)],
        "Items that it holds at the most, all workers together.",
    ),
    _each("host.up", "gauge", "{host}", "alive", "1: it has been started, and hasn't ended."),
    _each("host.items", "counter", "{item}", "items", "Items that have come from it."),
    _each("host.io", "counter", "By", "bytes", "Bytes of those, pickled."),
    _each(
        "host.time", "counter", "s", _times,
        "That its event loop was held, or its stages waited for input, or for room.", "state",
    ),
    _each("host.restarts", "counter", "{restart}", "restarts", "Times that it was replaced."),
    _each("host.memory.usage", "gauge", "By", "resident_bytes", "Its resident memory; 0 of a thread."),
    _each("source.requests", "counter", "{request}", "requests", "Requests that were sent to servers."),
    _each("source.requests.active", "gauge", "{request}", "in_flight", "Requests that wait for an answer now."),
    _each("source.retries", "counter", "{request}", "retries", "Requests that were repeated after a failure."),
    _each("source.io", "counter", "By", "bytes", "Bytes that arrived from servers."),
    _each("source.cache.hits", "counter", "{read}", "cache_hits", "Objects, or ranges, found in cache_dir=."),
    _each("source.cache.misses", "counter", "{read}", "cache_misses", "Objects, or ranges, not found there."),
    _each("source.cache.io", "counter", "By", "cache_bytes", "Bytes that were read from there."),
)  # fmt: skip
"""All metrics, in the order of docs/metrics.md."""


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
    return min(1.0, (stage.busy_s + stage.limited_s) / (elapsed_s * max(1, stage.slots)))
