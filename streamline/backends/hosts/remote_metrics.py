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
from streamline.core.counters import FROM_HOST, ChannelMeter, Doing, HostMeter, StageCounts, StageMeter
from streamline.core.meters import Meters, Traffic
from streamline.core.tasks import Session
from streamline.core.threads import start_thread
from streamline.errors import HostError

Key = tuple[str, int]
M = TypeVar("M", StageMeter, ChannelMeter)


class RemoteMetrics(HostPart):
    """Meters of the consumer that show what one host counts."""

    def __init__(self, meters: Meters, host: HostMeter) -> None:
        self._meters = meters
        self._host = host
        self._shown: dict[Key, StageMeter] = {}
        self._counted: dict[Key, StageCounts] = {}  # what the host said last
        self._earlier: dict[Key, StageCounts] = {}
        self._earlier_items: dict[Key, int] = {}  # of channels
        self._counted_items: dict[Key, int] = {}
        self._earlier_traffic: dict[str, tuple[int, ...]] = {}
        self._ahead = math.inf  # of the host's clock, with the least time on the way that was seen

    def handlers(self) -> Handlers:
        return {MetricsUpdate: self.show}

    def join(self, link: Link, hello: Hello) -> Hello:
        self._host.alive = True
        return super().join(link, hello)

    def show(self, counts: MetricsUpdate) -> None:
        """Show a host's update."""
        if counts.clock is not None:
            self._ahead = min(self._ahead, perf_counter() - counts.clock)
            counts = _by_own_clock(counts, self._ahead)
        meters = self._meters
        for counted in counts.stages:
            key = counted.name, counted.shard
            meter = self._shown.get(key)
            if meter is None:
                meter = self._shown[key] = meters.stage(counted.name, counted.kind, counted.shard, counted.concurrency)
                meter.host = self._host
            self._counted[key] = counted
            meter.shows(counted, self._earlier.get(key))
        for name, shard, capacity, items, depth, peak in counts.channels:
            channel = meters.channel(name, shard, capacity)
            self._counted_items[name, shard] = items
            channel.items = items + self._earlier_items.setdefault((name, shard), 0)
            channel.depth, channel.peak = depth, max(channel.peak, peak)
        for name, *traffic in counts.traffics:
            before = self._earlier_traffic.get(name, Traffic().counts())
            summed = [one + more for one, more in zip(traffic, before, strict=True)]
            meters.traffics[name, self._host.number] = Traffic(*summed)
        for key, doing, began, ended in counts.spans:
            meter = self._shown.get(key)
            if meter is not None and meter.observer is not None:
                meter.observer(meter, doing, began, ended)

    def take_over(self, shard: int) -> None:
        """Go on from what other hosts have counted of a worker, which this one runs now, and may have run before."""
        now, meters = perf_counter(), self._meters
        for key in [(name, shard) for name in meters.names]:
            meter, channel = meters.stages.get(key), meters.channels.get(key)
            if meter is not None and meter.host is not None:
                meter.host = self._host
                self._shown[key] = meter
                self._earlier[key] = meter.stopped(now).without(self._counted.get(key))
            if channel is not None and not key[0].endswith(FROM_HOST):
                self._earlier_items[key] = channel.items - self._counted_items.get(key, 0)

    def on_lost(self) -> None:
        """Keep the counts of a host that has ended; nothing is in progress in it."""
        super().on_lost()
        self._host.gone()
        now = perf_counter()
        self._ahead = math.inf
        self._counted.clear()
        self._counted_items.clear()
        for key, meter in self._shown.items():
            if meter.host is self._host:
                self._earlier[key] = meter.stopped(now)
        for key in self._earlier_items:
            channel = self._meters.channel(*key, 0)
            self._earlier_items[key], channel.depth = channel.items, 0
        traffics = list(self._meters.traffics.items())
        mine = {name: traffic for (name, number), traffic in traffics if number == self._host.number}
        for traffic in mine.values():
            traffic.in_flight = 0
        self._earlier_traffic = {name: traffic.counts() for name, traffic in mine.items()}


def _by_own_clock(counts: MetricsUpdate, ahead: float) -> MetricsUpdate:
    """Return an update of another machine with this one's times."""
    spans = tuple((key, doing, began + ahead, ended + ahead) for key, doing, began, ended in counts.spans)
    return counts._replace(stages=tuple(stage.shifted(ahead) for stage in counts.stages), spans=spans)


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
        """Send what is new; return whether anything was. Thread-safe.

        Args:
          shard: of whose worker; None: of all.
        """
        meters = self._meters
        with self._lock:
            stages = [(key, meter.counted()) for key, meter in _of(shard, meters.stages, meters)]
            channels = [
                (key, (channel.name, channel.shard, channel.capacity, channel.items, channel.depth, channel.peak))
                for key, channel in _of(shard, meters.channels, meters)
            ]
            traffics = [(name, (name, *traffic.counts())) for (name, _), traffic in list(meters.traffics.items())]
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
        self._meters.observe(partial(_note, self) if observed else None)

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
    reporter.note(((meter.name, meter.shard), doing, began, ended))
