"""Metrics of a stream: names, units and values, for OpenTelemetry, Prometheus, TensorBoard and whatever takes numbers.

`METRICS` is the whole list. Names and units follow OpenTelemetry's conventions: dots, no unit in the name, UCUM units;
`Metric.prometheus_name` is what its specification makes of them for Prometheus. Counters grow while a stream is open;
a loader's begin anew with each epoch, which Prometheus's `rate()` and its kin expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from streamline.errors import printable_lines
from streamline.observe.exposed_wait import exposed_waits
from streamline.observe.stats import Stats
from streamline.observe.verdict import CONTENTION, OTHER_RANKS

Labels: TypeAlias = tuple[str, ...]

Points: TypeAlias = Iterable[tuple[Labels, float]]
"""Values of a metric, each with what tells it from the others."""

Kind: TypeAlias = Literal["counter", "gauge"]

PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}

STATES = {"busy": "busy_s", "no_input": "wait_input_s", "no_room": "wait_output_s"}
"""What a stage does, and the field that has the time of it."""


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
        return self.name.replace(".", "_") + PROMETHEUS_UNITS.get(self.unit, "") + "_total" * (self.kind == "counter")


def scalars(stats: Stats) -> dict[str, float]:
    """Return all values in a flat dict: {"streamline.stage.items/decode": 400.0, ...}.

    For what logs numbers by name, as TensorBoard and Weights & Biases do: docs/metrics.md. Give it
    `stats.since(earlier)` for those of a window.
    """
    return {
        printable_lines("/".join((metric.name, *labels))): float(value)
        for metric in METRICS
        for labels, value in metric.points(stats, stats)
    }


Of: TypeAlias = tuple[str, Callable[[Any], str]]
"""Parts of a stream: the field of `Stats` that has them, and the label of one."""

PARTS: dict[str, Of] = {
    "stage": ("stages", lambda stage: stage.name),
    "channel": ("channels", lambda channel: channel.name),
    "host": ("hosts", lambda host: f"{host.kind} {host.number}"),
    "source": ("reads", lambda read: read.name),
}


def _of_stream(name: str, kind: Kind, unit: str, field: str, description: str) -> Metric:
    """Return a metric that is a field of `Stats`."""
    return Metric(name, kind, unit, (), description, lambda stats, _: [((), getattr(stats, field))])


def _of_each(
    part: str, name: str, kind: Kind, unit: str, value: str | Callable[[Any], float], description: str
) -> Metric:
    """Return a metric of all parts of a kind; `value` is a field of one, or a function of it."""
    field, label = PARTS[part]

    def points(stats: Stats, _: Stats) -> Iterator[tuple[Labels, float]]:
        for one in getattr(stats, field):
            yield (label(one),), value(one) if callable(value) else getattr(one, value)

    return Metric(f"streamline.{part}.{name}", kind, unit, (part,), description, points)


def _times(part: str, description: str) -> Metric:
    """Return the times of all parts of a kind, by what they did."""
    of, label = PARTS[part]

    def points(stats: Stats, _: Stats) -> Iterator[tuple[Labels, float]]:
        for one in getattr(stats, of):
            yield from (((label(one), state), getattr(one, field)) for state, field in STATES.items())

    return Metric(f"streamline.{part}.time", "counter", "s", (part, "state"), description, points)


def _details(stats: Stats, _: Stats) -> Iterator[tuple[Labels, float]]:
    for stage in stats.stages:
        yield from (((stage.name, detail.name, detail.part), detail.value) for detail in stage.details)


def _wait_share(_: Stats, lately: Stats) -> Points:
    return [((), lately.consumer_wait_s / lately.elapsed_s if lately.elapsed_s > 0 else 0.0)]


def _exposed(_: Stats, lately: Stats) -> Points:
    return [((stage,), share) for stage, share in exposed_waits(lately.warm).items()]


def _limit(_: Stats, lately: Stats) -> Points:
    verdict = lately.verdict
    if verdict is None:
        return []
    if verdict.rule == OTHER_RANKS:
        by = OTHER_RANKS
    else:
        by = verdict.stage or ("process" if verdict.rule in CONTENTION else "consumer")
    return [((by, verdict.rule), 1.0)]


METRICS = (
    _of_stream("streamline.stream.time", "counter", "s", "elapsed_s", "Since it was opened."),
    _of_stream("streamline.consumer.items", "counter", "{item}", "items", "Items that the loop was given."),
    _of_stream("streamline.consumer.wait.time", "counter", "s", "consumer_wait_s", "For which the loop waited."),
    _of_stream(
        "streamline.consumer.ranks.wait.time", "counter", "s", "ranks_wait_s",
        "Of that, for other ranks to have another item, where all end together.",
    ),
    Metric("streamline.consumer.wait.share", "gauge", "1", (), "Of the last seconds.", _wait_share),
    Metric(
        "streamline.limit", "gauge", "{stream}", ("by", "rule"),
        "1: what has limited the stream in the last seconds, and by which rule of the verdict.", _limit,
    ),
    _of_each("stage", "items", "counter", "{item}", "items", "Items that came out of it."),
    _of_each("stage", "io", "counter", "By", "bytes", "Bytes of those, estimated from samples."),
    _times("stage", "That it was busy, had no input, or no room for its output; all workers and calls together."),
    Metric(
        "streamline.stage.exposed.share", "gauge", "1", ("stage",),
        "Of the last seconds, in which the loop waited for this stage.", _exposed,
    ),
    _of_each("stage", "held.time", "counter", "s", "held_s", "For which it held an event loop."),
    _of_each("stage", "errors", "counter", "{item}", "errors", "Items that it skipped."),
    _of_each("stage", "slots", "gauge", "{call}", "slots", "Calls that it may make at once, all workers together."),
    Metric(
        "streamline.stage.detail", "gauge", "{count}", ("stage", "detail", "part"),
        "What only some kinds of stages count.", _details,
    ),
    _of_each("channel", "items", "counter", "{item}", "items", "Items that went through."),
    _of_each("channel", "depth", "gauge", "{item}", "depth", "Items in it now, all workers together."),
    _of_each(
        "channel", "capacity", "gauge", "{item}", lambda channel: channel.capacity * channel.channels,
        "Items that it holds at the most, all workers together.",
    ),
    _of_each("host", "up", "gauge", "{host}", "alive", "1: it has been started, and hasn't ended."),
    _of_each("host", "items", "counter", "{item}", "items", "Items that have come from it."),
    _of_each("host", "io", "counter", "By", "bytes", "Bytes of those, pickled."),
    _times("host", "That its event loop was held, or its stages waited for input, or for room."),
    _of_each("host", "restarts", "counter", "{restart}", "restarts", "Times that it was replaced."),
    _of_each("host", "memory.usage", "gauge", "By", "resident_bytes", "Its resident memory; 0 of a thread."),
    _of_each("source", "requests", "counter", "{request}", "requests", "Requests that were sent to servers."),
    _of_each("source", "requests.active", "gauge", "{request}", "in_flight", "Requests that wait for an answer now."),
    _of_each("source", "retries", "counter", "{request}", "retries", "Requests that were repeated after a failure."),
    _of_each("source", "io", "counter", "By", "bytes", "Bytes that arrived from servers."),
    _of_each("source", "cache.hits", "counter", "{read}", "cache_hits", "Objects, or ranges, found in cache_dir=."),
    _of_each("source", "cache.misses", "counter", "{read}", "cache_misses", "Objects, or ranges, not found there."),
    _of_each("source", "cache.io", "counter", "By", "cache_bytes", "Bytes that were read from there."),
)  # fmt: skip
"""All metrics, in the order of docs/metrics.md."""
