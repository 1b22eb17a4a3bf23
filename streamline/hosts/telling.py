"""What a host that is a process tells of its meters, so that they can be read at the other end as if they were there.

With the first items of a worker, at its end, and at the host's; in between by a thread, which looks some times a second
while anything is at work, and sends what is new. A thread, since a function that is stuck holds the event loop, and is
just what has to be seen. What was sent before that function was called and the socket didn't take, it pushes, too.
While nothing is at work, it waits.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial

from streamline.border.link import Link
from streamline.border.messages import Counts, Span
from streamline.core.counters import Doing, StageCounts, StageMeter
from streamline.core.session import Session

__all__ = ["Telling"]


TICK_S = 0.1
"""Between two looks: a progress display draws every 0.25 s."""


SLOWEST_S = 1.0
"""Between two looks at what is at work, and says nothing new."""


MOST_SPANS = 10_000
"""Between two looks; what comes beyond that isn't drawn."""


EXIT_S = 1.0


class Telling:
    """The meters of one running in one host."""

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._meters = session.meters
        self._gate = session.gate
        self._lock = threading.Lock()
        self._told: dict[tuple[str, int], StageCounts] = {}
        self._told_channels: dict[tuple[str, int], tuple[str, int, int, int, int, int]] = {}
        self._told_traffics: dict[str, tuple[str, int, int, int, int, int, int, int]] = {}
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

    def _new_traffics(self) -> tuple[tuple[str, int, int, int, int, int, int, int], ...]:
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


def _note(telling: Telling, meter: StageMeter, doing: Doing, began: float, ended: float) -> None:
    telling.note(((meter.name, meter.shard), doing, began, ended))
