"""Figures as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from streamline.meters.figures import ChannelStats, Figures, HostStats, ReadStats, StageStats
from streamline.meters.names import BORDER

__all__ = ["table"]

STAGES = ("stage", "at once", "items", "items/s", "bytes", "busy", "no input", "no room")
CHANNELS = ("channel behind", "channels", "items", "held now", "peak", "capacity")
HOSTS = ("host", "workers", "items", "items/s", "bytes", "busy", "restarts", "memory")
READS = ("asked of servers by", "requests", "requests/s", "retries", "bytes")
CACHES = ("cache", "hits", "misses", "bytes from disk")

WIDEST_NAME = 20
"""Longer names are cut, so that a line fits into 80 columns."""
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def table(figures: Figures) -> str:
    """Return a line on the consumer, then tables of stages, channels, hosts and requests; errors only if there are any.

    Percentages are of the time in which all calls that a stage may have at work at once could have been busy: at work,
    waiting for an item ("no input"), waiting for room behind it. Of a host, of the time: its event loop was held.
    """
    elapsed_s = figures.elapsed_s
    waits = figures.consumer_wait_s / elapsed_s if elapsed_s else 0.0
    lines = [
        f"{figures.items:,} items in {elapsed_s:.2f} s ({_rate(figures.items, elapsed_s)} items/s); "
        f"the consumer waits {100 * waits:.0f} % of its time"
    ]
    if figures.stages:
        rows = [STAGES, *(_stage(stage, elapsed_s) for stage in figures.stages)]
        if any(stage.errors for stage in figures.stages):
            errors = ["errors", *(f"{stage.errors:,}" for stage in figures.stages)]
            rows = [(*row[:3], count, *row[3:]) for row, count in zip(rows, errors, strict=True)]
        lines += _aligned(rows)
    if figures.channels:
        lines += _aligned([CHANNELS, *map(_channel, figures.channels)])
    if figures.hosts:
        lines += _aligned([HOSTS, *(_host(host, elapsed_s) for host in figures.hosts)])
    if cached := [read for read in figures.reads if read.cache_hits or read.cache_misses]:
        lines += _aligned([CACHES, *map(_cache, cached)])
    if figures.reads:
        asked = [READS, *(_read(read, elapsed_s) for read in figures.reads)]
        if any(read.hedged for read in figures.reads):
            hedged = ["hedged", *(f"{read.hedged:,}" for read in figures.reads)]
            asked = [(*row[:4], count, *row[4:]) for row, count in zip(asked, hedged, strict=True)]
        lines += _aligned(asked)
    return "\n".join(lines)


def _cache(read: ReadStats) -> tuple[str, ...]:
    return _cut(read.name), f"{read.cache_hits:,}", f"{read.cache_misses:,}", _size(read.cache_bytes)


def _read(read: ReadStats, elapsed_s: float) -> tuple[str, ...]:
    rate = _rate(read.requests, elapsed_s)
    return (_cut(read.name), f"{read.requests:,}", rate, f"{read.retries:,}", _size(read.bytes))


def _stage(stage: StageStats, elapsed_s: float) -> tuple[str, ...]:
    most_s = elapsed_s * stage.slots
    return (
        _cut(str(stage)),
        str(stage.slots),
        f"{stage.items:,}",
        _rate(stage.items, elapsed_s),
        _size(stage.bytes),
        *(f"{100 * seconds / most_s:.0f} %" if most_s else "0 %"
          for seconds in (stage.busy_s, stage.wait_input_s, stage.wait_output_s)),
    )  # fmt: skip


def _channel(channel: ChannelStats) -> tuple[str, ...]:
    counts = (channel.channels, channel.items, channel.depth, channel.peak, channel.capacity)
    name = _cut(channel.name.removesuffix(BORDER)) + BORDER if channel.name.endswith(BORDER) else _cut(channel.name)
    return (name, *(f"{count:,}" for count in counts))


def _host(host: HostStats, elapsed_s: float) -> tuple[str, ...]:
    return (
        host.name if host.alive else f"{host.name} (ended)",
        str(len(host.shards)),
        f"{host.items:,}",
        _rate(host.items, elapsed_s),
        _size(host.bytes),
        f"{100 * host.busy_s / elapsed_s:.0f} %" if elapsed_s else "0 %",
        str(host.restarts),
        _size(host.resident_bytes) if host.resident_bytes else "-",
    )


def _cut(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else f"{name[: WIDEST_NAME - 1]}…"


def _rate(items: int, elapsed_s: float) -> str:
    rate = items / elapsed_s if elapsed_s else 0.0
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _size(count: float) -> str:
    for unit in UNITS[:-1]:
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {UNITS[-1]}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
