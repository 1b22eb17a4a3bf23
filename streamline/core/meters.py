"""All meters of one run: of its stages, channels, hosts, consumer, and of what its sources ask of servers.

Meters count once a list, or once an awaited call, never once an item. Each counter has one writer, the event loop's
thread or the consumer's, and may be read in any thread: it is exact but for the list that is being counted. Times are
those of `time.perf_counter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from streamline.core.counters import ChannelStats, HostMeter, LoopMeter, MeterHooks, ReadStats, StageMeter

QUICK_S = 0.001
"""Of bodies of the consumer's loop that take less, one in `BODIES_PER_SAMPLE` is timed."""

BODIES_PER_SAMPLE = 8


class ConsumerMeter:
    """The training loop, as seen from the pipeline.

    Attributes:
      items: that it was given, in whole lists: up to a list more than it has seen.
      ranks_wait_s: the part of its waits in which other ranks had not said whether they have another item.
      waiting_since: when the current wait began; None: it doesn't wait.
      held_s: how long its loop's body blocked the event loop that it shares with the pipeline.
      closed_at: when the stream ended or was closed; None: it is open.
    """

    __slots__ = (
        "_body", "_quick", "_unseen", "closed_at", "held_s", "items", "loop", "opened_at", "ranks_wait_s", "wait_s",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, opened_at: float, loop: LoopMeter | None = None) -> None:
        self.opened_at = opened_at
        self.items = 0
        self.wait_s = 0.0
        self.ranks_wait_s = 0.0
        self.waiting_since: float | None = None
        self.held_s = 0.0
        self.closed_at: float | None = None
        self.loop = loop or LoopMeter()
        self._body: tuple[float, float] | None = None
        self._quick = False
        self._unseen = 0

    def wait_begins(self, now: float) -> None:
        self.waiting_since = now

    def wait_ends(self, now: float) -> None:
        if self.waiting_since is not None:
            self.wait_s += now - self.waiting_since
            self.waiting_since = None

    def wait_s_until(self, now: float) -> float:
        """Return how long it has waited up to `now`, the current wait included."""
        since = self.waiting_since
        return self.wait_s + (0.0 if since is None else max(0.0, now - since))

    def body_begins(self, now: float) -> bool:
        """Begin to time its loop's body, in the pipeline's event loop; return whether this one is timed.

        Of quick bodies, one in `BODIES_PER_SAMPLE` is, and stands for the others: timing one costs as much as it takes.
        """
        self._unseen += 1
        if self._quick and self._unseen < BODIES_PER_SAMPLE:
            return False
        self._body = now, self.loop.held_s
        return True

    def body_ends(self) -> None:
        """End the timing: the body asks for more, or the event loop runs other tasks, which don't count."""
        if self._body is not None:
            (began, held_s), self._body = self._body, None
            spent = max(0.0, perf_counter() - began - (self.loop.held_s - held_s))
            self.held_s += spent * self._unseen
            self._unseen = 0
            self._quick = spent < QUICK_S

    def close(self, unseen: int = 0) -> None:
        """Stop the clock, and don't count items that it will never see. Idempotent."""
        self.items -= unseen
        if self.closed_at is None:
            self.closed_at = perf_counter()


class Meters:
    """All meters of one run. A stage that is opened again (by a repeat, say) keeps its meter.

    Attributes:
      names: of all stages and channels that have a meter.
      order: names of the stages in the plan's order; others come after them.
      on: False: stages and channels aren't counted; for measuring what that costs.
      hosts: in which workers run.
      on_first_list: called with these meters when the consumer gets its first list; None: not called.
      first: what it returned, the figures of the warm-up; None: the consumer has no list yet.
    """

    def __init__(self, opened_at: float, *, on: bool = True) -> None:
        self.stages: dict[tuple[str, int], StageMeter] = {}
        self.channels: dict[tuple[str, int], ChannelStats] = {}
        self.traffics: dict[tuple[str, int | None], Traffic] = {}
        self.names: set[str] = set()
        self.consumer = ConsumerMeter(opened_at)
        self.order: list[str] = []
        self.on = on
        self.hosts: list[HostMeter] = []
        self.hooks = MeterHooks()
        self._host: HostMeter | None = None
        self.on_first_list: Callable[[Meters], Any] | None = None
        self.first: Any = None

    def within(self, host: HostMeter) -> Meters:
        """Return meters for a host that is a thread of this process; they count into these.

        Each stage in each worker has a meter of its own, so each still has one writer.
        """
        part = Meters(self.consumer.opened_at, on=self.on)
        part.stages, part.channels, part.traffics = self.stages, self.channels, self.traffics
        part.hooks, part._host = self.hooks, host
        return part

    @property
    def loop(self) -> LoopMeter:
        """The event loop in which all inline functions run, and the body of an `async for`."""
        return self.consumer.loop

    def stage(self, name: str, kind: str, shard: int, concurrency: int = 1) -> StageMeter:
        meter = self.stages.get((name, shard))
        if meter is None:
            self.names.add(name)
            meter = StageMeter(name, kind, shard, concurrency, self.loop, self.hooks, self._host)
            self.stages[name, shard] = meter
        return meter

    def channel(self, name: str, shard: int, capacity: int) -> ChannelStats:
        """Return the meter of the channel that the stage `name` of a worker fills."""
        meter = self.channels.get((name, shard))
        if meter is None:
            self.names.add(name)
            meter = self.channels[name, shard] = ChannelStats(name=name, shard=shard, capacity=capacity)
        return meter

    def traffic(self, name: str) -> Traffic:
        """Return the counter of what the source `name` asks of servers, in this host."""
        number = None if self._host is None else self._host.figures.number
        return self.traffics.setdefault((name, number), Traffic(name))

    def end_warm_up(self) -> None:
        """Let figures count from now on: what was before was the warm-up."""
        self.first = None if self.on_first_list is None else self.on_first_list(self)

    def count_list(self, items: int) -> None:
        if items and not self.consumer.items:
            self.end_warm_up()
        self.consumer.items += items


class Traffic(ReadStats):
    """What one source asks of servers, in one event loop, its only writer. May be read in any thread."""

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request, which is in flight meanwhile."""
        self.requests += 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
