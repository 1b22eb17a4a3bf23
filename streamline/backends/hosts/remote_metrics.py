"""Metrics of a host process, reported to the consumer and shown there as if counted locally.

`MetricsReporter` (host side) reports what a worker has counted with its first items and at its end, and all at the
host's; in between a thread reports what is new, several times a second while anything is at work. It is a thread since
a stuck function holds the event loop, and is what must be seen; it also flushes what that function keeps the loop from
writing.
`RemoteMetrics` (consumer side) adds up the counts of a host and its replacements: work that is repeated counts again.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from streamline.backends.hosts.parts import Handlers, HostPart
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import Hello, MetricsUpdate, Span
from streamline.core.figures import ChannelStats, Doing, ReadStats, StageStats
from streamline.core.meters import HostMeter, Meters, StageMeter, Traffic
from streamline.core.tasks import Session
from streamline.core.threads import start_thread
from streamline.errors import HostError

Key = tuple[str, int]
M = TypeVar("M", StageMeter, ChannelStats)
F = TypeVar("F", StageStats, ChannelStats, ReadStats)


class RemoteMetrics(HostPart):
    """Meters of the consumer that show what one host counts."""

    def __init__(self, meters: Meters, host: HostMeter) -> None:
        self._meters = meters
        self._host = host
        self._counted: dict[Any, Any] = {}  # what the host said last, by what it is of
        self._ahead = math.inf  # of the host's clock, with the least time on the way that was seen

    def handlers(self) -> Handlers:
        return {MetricsUpdate: self.show}

    def join(self, link: Link, hello: Hello) -> Hello:
        self._host.figures.alive = True
        return super().join(link, hello)

    def show(self, update: MetricsUpdate) -> None:
        """Add what a host's update has more than the one before."""
        ahead, meters = 0.0, self._meters
        if update.clock is not None:
            ahead = self._ahead = min(self._ahead, perf_counter() - update.clock)
        for counted, ongoing in update.stages:
            meter = meters.stage(counted.name, counted.kind, counted.shard, counted.concurrency)
            meter.host = meter.host or self._host
            meter.show(self._gained(counted), ongoing.shifted(ahead))
        for channel in update.channels:
            shown = meters.channel(channel.name, channel.shard, channel.capacity)
            shown.add(self._gained(channel))
            shown.depth, shown.peak = channel.depth, max(shown.peak, channel.peak)
        for reads in update.traffics:
            traffic = meters.traffics.setdefault((reads.name, self._host.figures.number), Traffic(reads.name))
            traffic.add(self._gained(reads))
            traffic.in_flight = reads.in_flight
        for key, doing, began, ended in update.spans:
            if key in meters.stages and meters.hooks.observer is not None:
                meters.hooks.observer(meters.stages[key], doing, began + ahead, ended + ahead)

    def _gained(self, counted: F) -> F:
        key = type(counted), counted.name, getattr(counted, "shard", None)
        before, self._counted[key] = self._counted.get(key), counted
        if before is not None and _count(counted) >= _count(before):  # else another run in the host: from nothing
            counted = counted - before
        return counted

    def take_over(self, shard: int) -> None:
        """Show a worker as this host's, which another may have run before."""
        for name in self._meters.names:
            meter = self._meters.stages.get((name, shard))
            if meter is not None and meter.host is not None:
                meter.host = self._host

    def on_lost(self) -> None:
        """Keep the counts of a host that has ended; nothing is in progress in it."""
        super().on_lost()
        self._host.note_end()
        now, meters = perf_counter(), self._meters
        for kind, name, shard in self._counted:
            if kind is ReadStats:
                meters.traffics[name, self._host.figures.number].in_flight = 0
            elif kind is ChannelStats:
                meters.channels[name, shard].depth = 0
            elif (meter := meters.stages[name, shard]).host is self._host:
                meter.stop(now)
        self._counted.clear()
        self._ahead = math.inf


def _count(figures: StageStats | ChannelStats | ReadStats) -> int:
    return figures.requests if isinstance(figures, ReadStats) else figures.items


TICK_S = 0.1
"""Seconds between reports: a progress display draws every 0.25 s."""

SLOWEST_S = 1.0
"""Seconds between checks while nothing new is counted."""

MOST_SPANS = 10_000
"""Spans in one report; further ones are dropped."""

EXIT_S = 1.0


class MetricsReporter:
    """Reports the meters of one run in one host."""

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._meters = session.meters
        self._gate = session.gate
        self._lock = threading.Lock()
        self._sent: dict[Any, Any] = {}  # the last row of each meter
        self._spans: list[Span] = []
        self._active = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Check for news from now on: something may be at work."""
        if not self._active.is_set():
            self._active.set()
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="streamline counts", daemon=True)
                with suppress(HostError):  # no room for a thread: reports come at the end only
                    start_thread(thread)
                    self._thread = thread

    def report(self, shard: int | None = None) -> bool:
        """Send what is new; return whether anything was. Thread-safe. `shard`: of whose worker; None: of all."""
        meters = self._meters
        with self._lock:
            stages = [(key, (meter.totals(), meter.ongoing)) for key, meter in _of(shard, meters.stages, meters)]
            channels = [(key, channel.copy()) for key, channel in _of(shard, meters.channels, meters)]
            traffics = [(name, ReadStats(**vars(traffic))) for (name, _), traffic in list(meters.traffics.items())]
            spans, self._spans = self._spans, []
            update = MetricsUpdate(self._new(stages), self._new(channels), tuple(spans), self._new(traffics))
            news = any(update)
            if news:
                clock = None if self._link.one_machine else perf_counter()
                self._link.send_threadsafe(update._replace(clock=clock))
            return news

    def _new(self, rows: list[tuple[Any, Any]]) -> tuple[Any, ...]:
        """Return the rows that differ from those sent last; keys are of one kind of meter each."""
        new = [(key, row) for key, row in rows if row != self._sent.get((type(row), key))]
        self._sent.update(((type(row), key), row) for key, row in new)
        return tuple(row for _, row in new)

    def observe(self, observed: bool) -> None:
        """Record spans of work and waiting from now on, or stop."""
        self._meters.hooks.observe(partial(_note, self) if observed else None)

    def note(self, span: Span) -> None:
        """Keep a span until the next report."""
        if len(self._spans) < MOST_SPANS:
            self._spans.append(span)

    def close(self) -> None:
        """Send the last report. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._active.set()
            if self._thread is not None:
                self._thread.join(EXIT_S)
            self.report()

    def _main(self) -> None:
        while not self._closed.is_set():
            self._active.wait()
            self._active.clear()
            pause_s = TICK_S
            while not self._closed.wait(pause_s):
                self._link.push()
                pause_s = TICK_S if self.report() else min(SLOWEST_S, 2 * pause_s)
                if pause_s > TICK_S and not self._gate.at_work:
                    break


def _of(shard: int | None, found: dict[Key, M], meters: Meters) -> list[tuple[Key, M]]:
    """Return the meters of a worker; None: all."""
    if shard is None:
        return list(found.items())
    return [(key, found[key]) for name in sorted(meters.names) if (key := (name, shard)) in found]


def _note(reporter: MetricsReporter, meter: StageMeter, doing: Doing, began: float, ended: float) -> None:
    reporter.note(((meter.figures.name, meter.figures.shard), doing, began, ended))
