"""Figures as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from streamline.core.figures import FROM_HOST, ChannelStats, Detail, Figures, HostStats, ReadStats, StageStats
from streamline.core.text import shorten

STAGES = ("stage", "at once", "items", "items/s", "bytes", "busy", "no input", "no room")

CHANNELS = ("channel after", "channels", "items", "held now", "peak", "capacity")

HOSTS = ("host", "workers", "items", "items/s", "bytes", "busy", "restarts", "memory")

READS = ("asked of servers by", "requests", "requests/s", "retries", "bytes")

CACHES = ("cache", "hits", "misses", "bytes from disk")

WIDEST_NAME = 20
"""Longer names are cut, so that a line fits into 80 columns."""

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def table(figures: Figures) -> str:
    """Return a line on the consumer, then tables of stages, of what only some kinds of stages count, of channels, hosts
    and requests; errors only if there are any.

    Percentages are of the time in which all calls that a stage may have at work at once could have been busy: at work,
    waiting for an item ("no input"), waiting for room downstream. Of a host, of the time: its event loop was held.
    """
    elapsed_s = figures.elapsed_s
    lines = [
        f"{figures.items:,} items in {elapsed_s:.2f} s ({_rate(figures.items, elapsed_s)} items/s); "
        f"the consumer waits {100 * figures.waits:.0f} % of its time"
    ]
    if figures.dropped or figures.padded:
        lines.append(f"so that all ranks end together: {figures.dropped:,} dropped, {figures.padded:,} padded")
    if figures.stages:
        rows = [STAGES, *(_stage(stage, elapsed_s) for stage in figures.stages)]
        if any(stage.errors for stage in figures.stages):
            errors = ["errors", *(f"{stage.errors:,}" for stage in figures.stages)]
            rows = [(*row[:3], count, *row[3:]) for row, count in zip(rows, errors, strict=True)]
        lines += _aligned(rows)
    lines += _details([stage for stage in figures.stages if stage.details])
    if figures.channels:
        lines += _aligned([CHANNELS, *map(_channel, figures.channels)])
    if figures.hosts:
        seen = [host for host in figures.hosts if host.alive or host.pid or host.items]
        lines += _aligned([HOSTS, *(_host(host, elapsed_s) for host in seen)])
        if len(seen) < len(figures.hosts):
            lines.append(f"({len(figures.hosts) - len(seen)} more hosts have not come yet)")
    if cached := [read for read in figures.reads if read.cache_hits or read.cache_misses]:
        lines += _aligned([CACHES, *map(_cache, cached)])
    if figures.reads:
        lines += _aligned([READS, *(_read(read, elapsed_s) for read in figures.reads)])
    return "\n".join(lines)


def brief(stage: StageStats) -> str:
    """Return the details of a stage in a line: "regenerate  cycle 3  served 6  …", "mix served  web 120  code 40"."""
    if stage.details and stage.details[0].part:
        name = stage.details[0].name
        parts = [f"{each.part} {_shown(stage, each)}" for each in stage.details if each.name == name]
        return "  ".join([f"{stage} {_heading(name)}", *parts])
    return "  ".join([str(stage), *(f"{_heading(each.name)} {_shown(stage, each)}" for each in stage.details)])


def _details(stages: Sequence[StageStats]) -> list[str]:
    """Return a table for each kind of stage: a row for each stage, or each part of it."""
    found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for stage in stages:
        parts: dict[str, list[Detail]] = {}
        for detail in stage.details:
            parts.setdefault(detail.part, []).append(detail)
        for part, details in parts.items():
            whose = stage.name if not part else part if stage.name == stage.kind else f"{stage.name}/{part}"
            head = stage.kind, *(_heading(detail.name) for detail in details)
            found.setdefault(head, []).append((_cut(whose), *(_shown(stage, detail) for detail in details)))
    return [line for head, rows in found.items() for line in _aligned([head, *rows])]


def _shown(stage: StageStats, detail: Detail) -> str:
    """Return a detail of a stage with its unit: "1.50 s", "3"; where workers stand differently, "3-5"."""
    values = [detail.value]
    if detail.how == "now":
        mine = (each for worker in stage.per_worker for each in worker.details)
        values += [each.value for each in mine if (each.part, each.name) == (detail.part, detail.name)]
    least, most = (_value(detail.name, value) for value in (min(values), max(values)))
    return least if least == most else f"{least}-{most}"


def _value(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{value:,.2f} s"
    if name.endswith("_bytes"):
        return _size(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _heading(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


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
    name = channel.name.removesuffix(FROM_HOST)
    return (_cut(name) + channel.name[len(name) :], *(f"{count:,}" for count in counts))


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
    return shorten(name, WIDEST_NAME)


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
