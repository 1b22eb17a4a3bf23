"""What the meters of a running say at one moment, put together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

from streamline.meters.channel_meter import ChannelMeter
from streamline.meters.consumer_meter import ConsumerMeter
from streamline.meters.details import together
from streamline.meters.figures import ChannelStats, Figures, HostStats, ReadStats, StageStats
from streamline.meters.host_meter import HostMeter
from streamline.meters.names import BORDER
from streamline.meters.stage_meter import StageMeter
from streamline.meters.traffic import Traffic

__all__ = ["picture"]


def picture(
    consumer: ConsumerMeter,
    order: Sequence[str],
    stages: dict[tuple[str, int], StageMeter],
    channels: dict[tuple[str, int], ChannelMeter],
    hosts: Sequence[HostMeter],
    traffics: Mapping[tuple[str, int | None], Traffic],
) -> Figures:
    """Return what the meters of a running say now; see `Meters`. From any thread."""
    now = perf_counter() if consumer.closed_at is None else consumer.closed_at
    places = {name: place for place, name in enumerate(order)}
    meters = list(stages.copy().values())  # copied in one go, whatever other threads add
    return Figures(
        elapsed_s=max(0.0, now - consumer.opened_at),
        items=consumer.items,
        consumer_wait_s=consumer.waited_until(now),
        stages=tuple(_stage(each, now) for each in _by_name(meters, places)),
        hosts=tuple(_host(host, [meter for meter in meters if meter.host is host], now) for host in _numbered(hosts)),
        cpus=_usable_cpus(),
        channels=tuple(_channel(each) for each in _by_name(list(channels.copy().values()), places)),
        consumer_held_s=consumer.held_s,
        reads=_reads(dict(traffics)),
    )


def _reads(traffics: Mapping[tuple[str, int | None], Traffic]) -> tuple[ReadStats, ...]:
    """Return what each source has asked of servers, all hosts together; of those that have."""
    found: dict[str, ReadStats] = {}
    for (name, _), traffic in traffics.items():
        if any(counts := traffic.counts()):
            found[name] = found.get(name, ReadStats(name=name)).plus(*counts)
    return tuple(found[name] for name in sorted(found))


def _numbered(hosts: Sequence[HostMeter]) -> list[HostMeter]:
    return sorted(hosts, key=lambda host: host.number)


def _host(host: HostMeter, meters: Sequence[StageMeter], now: float) -> HostStats:
    """Return what is known of a host, with what its stages did."""
    workers = [meter.figures(now) for meter in meters]
    return replace(
        host.figures(),
        busy_s=sum(meter.held_until(now) for meter in meters),
        wait_input_s=sum(worker.wait_input_s for worker in workers),
        wait_output_s=sum(worker.wait_output_s for worker in workers),
    )


def _usable_cpus() -> int:
    """Return how many CPUs this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


M = TypeVar("M", StageMeter, ChannelMeter)


def _by_name(meters: Sequence[M], places: Mapping[str, int]) -> list[list[M]]:
    """Return the meters of each name together, by shard, in the plan's order."""
    found: dict[str, list[M]] = {}
    last = len(places)
    for meter in sorted(meters, key=lambda meter: (places.get(meter.name.removesuffix(BORDER), last), meter.shard)):
        found.setdefault(meter.name, []).append(meter)
    return list(found.values())


def _stage(meters: Sequence[StageMeter], now: float) -> StageStats:
    workers = tuple(meter.figures(now) for meter in meters)
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
