"""Statistics of a stream at one moment, collected from the meters of its run; frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from streamline.core.counters import FROM_HOST, ChannelMeter, HostMeter, StageMeter, together
from streamline.core.cpus import usable_cpus
from streamline.core.meters import Meters, Traffic
from streamline.errors import printable_lines
from streamline.observe.contention import CONTENTION
from streamline.observe.figures import ChannelStats, Figures, HostStats, ReadStats, StageStats, WorkerStats, between
from streamline.observe.tables import table
from streamline.observe.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from streamline.observe.tuner import TuningStep


def collect(meters: Meters) -> Figures:
    """Return what the meters of a run say now. From any thread."""
    consumer = meters.consumer
    now = perf_counter() if consumer.closed_at is None else consumer.closed_at
    places = {name: place for place, name in enumerate(meters.order)}
    stages = list(meters.stages.copy().values())  # copied in one go, whatever other threads add
    channels = list(meters.channels.copy().values())
    return Figures(
        elapsed_s=max(0.0, now - consumer.opened_at),
        items=consumer.items,
        consumer_wait_s=consumer.waited_until(now),
        stages=tuple(_stage(each, now) for each in _by_name(stages, places)),
        hosts=tuple(
            host_stats(host, [stage for stage in stages if stage.host is host], now)
            for host in sorted(meters.hosts, key=lambda host: host.number)
        ),
        cpus=usable_cpus(),
        channels=tuple(_channel(each) for each in _by_name(channels, places)),
        consumer_held_s=consumer.held_s,
        ranks_wait_s=consumer.ranks_wait_s,
        reads=_reads(dict(meters.traffics)),
        contention=replace(CONTENTION.read(), loop=meters.loop.thread),
    )


def _reads(traffics: Mapping[tuple[str, int | None], Traffic]) -> tuple[ReadStats, ...]:
    """Return what each source has asked of servers, all hosts together; of those that have."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for (name, _), traffic in traffics.items():
        found.setdefault(name, []).append(traffic.counts())
    return tuple(
        ReadStats(name, *summed)
        for name, counts in sorted(found.items())
        if any(summed := [sum(column) for column in zip(*counts, strict=True)])
    )


def host_stats(host: HostMeter, stages: Sequence[StageMeter], now: float) -> HostStats:
    """Return what was counted of a host up to `now`, with what its stages did."""
    return HostStats(
        number=host.number,
        kind=host.kind,
        pid=host.pid,
        node=host.node,
        shared=host.shared,
        shards=tuple(sorted(host.shards)),
        items=host.items,
        bytes=host.bytes,
        copied_bytes=host.copied_bytes,
        slabs_made=host.slabs_made,
        slabs_reused=host.slabs_reused,
        busy_s=sum(stage.held_until(now) for stage in stages),
        wait_input_s=sum(stage.waited_until("wait_input", now) for stage in stages),
        wait_output_s=sum(stage.waited_until("wait_output", now) for stage in stages),
        arrival_s=host.arrival_s,
        restarts=host.restarts,
        resident_bytes=host.resident_bytes,
        alive=host.alive,
    )


def worker_stats(stage: StageMeter, now: float) -> WorkerStats:
    """Return what was counted of a stage in one worker up to `now`, with what is going on."""
    return WorkerStats(
        shard=stage.shard,
        items=stage.items,
        busy_s=stage.busy_until(now),
        wait_input_s=stage.waited_until("wait_input", now),
        wait_output_s=stage.waited_until("wait_output", now),
        details=stage.details,
    )


M = TypeVar("M", StageMeter, ChannelMeter)


def _by_name(meters: Sequence[M], places: Mapping[str, int]) -> list[list[M]]:
    """Return the meters of each name together, by shard, in the plan's order."""
    found: dict[str, list[M]] = {}
    last = len(places)
    for meter in sorted(meters, key=lambda meter: (places.get(meter.name.removesuffix(FROM_HOST), last), meter.shard)):
        found.setdefault(meter.name, []).append(meter)
    return list(found.values())


def _stage(meters: Sequence[StageMeter], now: float) -> StageStats:
    workers = tuple(worker_stats(meter, now) for meter in meters)
    first = meters[0]
    return StageStats(
        name=first.name,
        kind=first.kind,
        workers=len(meters),
        concurrency=first.concurrency,
        items=sum(worker.items for worker in workers),
        bytes=sum(meter.bytes for meter in meters),
        busy_s=sum(worker.busy_s for worker in workers),
        wait_input_s=sum(worker.wait_input_s for worker in workers),
        wait_output_s=sum(worker.wait_output_s for worker in workers),
        errors=sum(meter.errors for meter in meters),
        held_s=sum(meter.held_until(now) for meter in meters),
        executor=first.executor,
        ordered=first.ordered,
        per_worker=workers,
        hosts=len({meter.host for meter in meters if meter.host is not None}),
        details=together(worker.details for worker in workers),
    )


def _channel(meters: Sequence[ChannelMeter]) -> ChannelStats:
    return ChannelStats(
        name=meters[0].name,
        items=sum(meter.items for meter in meters),
        depth=sum(meter.depth for meter in meters),
        peak=max(meter.peak for meter in meters),
        capacity=meters[0].capacity,
        channels=len(meters),
    )


@dataclass(frozen=True, kw_only=True)
class Stats(Figures):
    """A stream at one moment, since it was opened; `str` is a table with the verdict.

    Attributes:
      first: as it stood when the consumer got its first list, or when a knob was last turned; None: before. The
        verdict leaves out what was before.
      tuning: what `open(tune=True)` has turned, and why, the last steps.
    """

    first: Figures | None = field(default=None, repr=False, compare=False)
    tuning: tuple[TuningStep, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """What limits the stream, since its first list; None: nothing does, or it is too early to say."""
        return None if self.first is None else verdict_of(self.warm)

    @cached_property
    def warm(self) -> Figures:
        """These without what was before the first list; nothing, where there was none yet."""
        return between(self if self.first is None else self.first, self)

    def since(self, earlier: Stats) -> Stats:
        """Return what was added since `earlier`, a picture of the same stream: a window.

        Depths and peaks of channels are those of now.
        """
        begin = None if earlier.first is None else Figures(elapsed_s=0, items=0, consumer_wait_s=0)
        if self.first is not None and (begin is None or self.first.elapsed_s > earlier.elapsed_s):
            begin = between(earlier, self.first)
        return replace(between(earlier, self), first=begin)

    def __str__(self) -> str:
        verdict = self.verdict
        return printable_lines(table(self) + (f"\n{verdict}" if verdict is not None else ""))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def stats_of(meters: Meters, at_hand: int = 0) -> Stats:
    """Return what was counted so far.

    Args:
      meters: with `collect` as their `on_first_list`.
      at_hand: items of the consumer's list that it has not seen yet.
    """
    figures = collect(meters)
    return Stats(**(vars(figures) | {"items": figures.items - at_hand}), first=meters.first)
