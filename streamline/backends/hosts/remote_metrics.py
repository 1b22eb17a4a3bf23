"""What a host that is a process tells of its meters, so that they can be read at the other end as if they were there.

With the first items of a worker, at its end, and at the host's; in between by a thread, which looks some times a second
while anything is at work, and sends what is new. A thread, since a function that is stuck holds the event loop, and is
just what has to be seen. What was sent before that function was called and the socket didn't take, it pushes, too.
While nothing is at work, it waits.

What is counted in a host that is a process, shown by meters of the running as if it were counted here.

When the host dies, what it has counted stays, and what its successor counts comes on top: work that is done again
counts again.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from time import perf_counter

from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import Counts, Span
from streamline.core.counters import Doing, HostMeter, StageCounts, StageMeter
from streamline.core.meters import Meters, Traffic
from streamline.core.session import Session

__all__ = ["MetricsReporter", "RemoteMetrics"]


Key = tuple[str, int]


class RemoteMetrics:
    """The meters of one host's part of a running."""

    def __init__(self, meters: Meters, host: HostMeter) -> None:
        self._meters = meters
        self._host = host
        self._shown: dict[Key, StageMeter] = {}
        self._before: dict[Key, StageCounts] = {}
        self._passed: dict[Key, int] = {}  # items through channels of hosts that have died
        self._seen: dict[Key, int] = {}
        self._asked: dict[str, tuple[int, int, int, int, int, int]] = {}  # of servers, by hosts that have died

    def show(self, counts: Counts) -> None:
        """Show what the host has counted."""
        meters = self._meters
        for counted in counts.stages:
            key = counted.name, counted.shard
            meter = self._shown.get(key)
            if meter is None:
                meter = self._shown[key] = meters.stage(counted.name, counted.kind, counted.shard, counted.concurrency)
                meter.host = self._host
            meter.shows(counted, self._before.get(key))
        for name, shard, capacity, items, depth, peak in counts.channels:
            channel = meters.channel(name, shard, capacity)
            self._seen[name, shard] = items
            channel.items = items + self._passed.get((name, shard), 0)
            channel.depth, channel.peak = depth, max(channel.peak, peak)
        for name, *asked in counts.traffics:
            before = self._asked.get(name, Traffic().counts())
            summed = (one + more for one, more in zip(asked, before, strict=True))
            meters.traffics[name, self._host.number] = Traffic(*summed)
        for key, doing, began, ended in counts.spans:
            meter = self._shown.get(key)
            if meter is not None and meter.observer is not None:
                meter.observer(meter, doing, began, ended)

    def lost(self) -> None:
        """The host is gone: what went on in it doesn't any more."""
        now = perf_counter()
        for key, meter in self._shown.items():
            self._before[key] = meter.stopped(now)
        for key, items in self._seen.items():
            self._passed[key] = self._passed.get(key, 0) + items
            self._meters.channel(*key, 0).depth = 0
        self._seen.clear()
        self._asked = {
            name: traffic.counts()
            for (name, number), traffic in list(self._meters.traffics.items())
            if number == self._host.number
        }


TICK_S = 0.1
"""Between two looks: a progress display draws every 0.25 s."""


SLOWEST_S = 1.0
"""Between two looks at what is at work, and says nothing new."""


MOST_SPANS = 10_000
"""Between two looks; what comes beyond that isn't drawn."""


EXIT_S = 1.0


class MetricsReporter:
    """The meters of one running in one host."""

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._meters = session.meters
        self._gate = session.gate
        self._lock = threading.Lock()
        self._told: dict[tuple[str, int], StageCounts] = {}
        self._told_channels: dict[tuple[str, int], tuple[str, int, int, int, int, int]] = {}
        self._told_traffics: dict[str, tuple[str, int, int, int, int, int, int]] = {}
        self._spans: list[Span] = []
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Something may be at work from now on: look."""
        if not self._news.is_set():
            self._news.set()
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="streamline counts", daemon=True)
                with suppress(RuntimeError, MemoryError):  # no room for it: then nothing is told before the end
                    thread.start()
                    self._thread = thread

    def tell(self) -> bool:
        """Send what is new, and say whether anything was. From any thread."""
        with self._lock:
            stages = []
            for key, meter in list(self._meters.stages.items()):
                counted = meter.counted()
                if counted != self._told.get(key):
                    self._told[key] = counted
                    stages.append(counted)
            channels = []
            for key, channel in list(self._meters.channels.items()):
                says = (channel.name, channel.shard, channel.capacity, channel.items, channel.depth, channel.peak)
                if says != self._told_channels.get(key):
                    self._told_channels[key] = says
                    channels.append(says)
            traffics = self._new_traffics()
            spans, self._spans = self._spans, []
            new = bool(stages or channels or spans or traffics)
            if new:
                self._link.tell(Counts(tuple(stages), tuple(channels), tuple(spans), traffics))
            return new

    def _new_traffics(self) -> tuple[tuple[str, int, int, int, int, int, int], ...]:
        says = {name: (name, *traffic.counts()) for (name, _), traffic in list(self._meters.traffics.items())}
        new = tuple(one for name, one in says.items() if one != self._told_traffics.get(name))
        self._told_traffics = says
        return new

    def observe(self, observed: bool) -> None:
        """Tell of every stretch of work and of waiting from now on, or don't."""
        self._meters.observe(partial(_note, self) if observed else None)

    def note(self, span: Span) -> None:
        """Keep a stretch until the next look."""
        if len(self._spans) < MOST_SPANS:
            self._spans.append(span)

    def close(self) -> None:
        """Tell for the last time. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            self._news.set()
            if self._thread is not None:
                self._thread.join(EXIT_S)
            self.tell()

    def _main(self) -> None:
        while not self._over.is_set():
            self._news.wait()
            self._news.clear()
            pause_s = TICK_S
            while not self._over.wait(pause_s):
                self._link.push()
                pause_s = TICK_S if self.tell() else min(SLOWEST_S, 2 * pause_s)
                if pause_s > TICK_S and not self._gate.at_work:
                    break


def _note(telling: MetricsReporter, meter: StageMeter, doing: Doing, began: float, ended: float) -> None:
    telling.note(((meter.name, meter.shard), doing, began, ended))
