"""What is counted while a pipeline runs.

A stage's run in one worker counts in a `StageMeter`, a channel in a `ChannelMeter`, the consumer in a `ConsumerMeter`:
once a list, or once an awaited call, never once an item. `collect` in `streamline.meters.picture` puts
together what they say at one moment.

Each counter has one writer, the event loop's thread or the consumer's. They may be read in any thread: what is read is
right but for the list that is being counted.

Times are those of `time.perf_counter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamline.meters.channel_meter import ChannelMeter
from streamline.meters.consumer_meter import ConsumerMeter
from streamline.meters.host_meter import HostMeter
from streamline.meters.stage_meter import LoopMeter, Observer, StageMeter
from streamline.meters.traffic import Traffic

__all__ = ["Meters"]


class Meters:
    """All meters of one running. A stage that is opened again (by a repeat, say) goes on with its meter.

    Attributes:
      order: names of the stages as they stand in the plan; others come behind them.
      on: False: nothing is counted of stages and channels; for measuring what that costs.
      on_hold: given to every meter made from now on.
      hosts: in which workers run.
      on_first_list: makes `first` of these meters as soon as the consumer is given its first list; None: nobody asks.
      first: what it has made: where the warm-up ended. None: the consumer has no list yet.
      on_observed: called, in the thread of whoever traces, when a trace begins and when it ends.
    """

    def __init__(self, opened_at: float, *, on: bool = True) -> None:
        self.stages: dict[tuple[str, int], StageMeter] = {}
        self.channels: dict[tuple[str, int], ChannelMeter] = {}
        self.traffics: dict[tuple[str, int | None], Traffic] = {}
        self.loop = LoopMeter()
        self.consumer = ConsumerMeter(opened_at, self.loop)
        self.order: list[str] = []
        self.on = on
        self.observer: Observer | None = None
        self.on_hold: Callable[[StageMeter, float], None] | None = None
        self.hosts: list[HostMeter] = []
        self.on_observed: list[Callable[[], None]] = []
        self._host: HostMeter | None = None
        self._whole = self
        self.on_first_list: Callable[[Meters], Any] | None = None
        self.first: Any = None

    def within(self, host: HostMeter) -> Meters:
        """Return what counts, into these meters, what runs in a host that is a thread of this process.

        Each stage in each worker has a meter of its own, so each still has one writer.
        """
        part = Meters(self.consumer.opened_at, on=self.on)
        part.stages, part.channels, part.traffics = self.stages, self.channels, self.traffics
        part._host, part._whole = host, self
        return part

    def observe(self, observer: Observer | None) -> None:
        """Let `observer` be told of every stretch of work and of waiting; None: nobody."""
        self.observer = observer
        for meter in list(self.stages.values()):
            meter.observer = observer
        for told in list(self.on_observed):
            told()

    def stage(self, name: str, kind: str, shard: int, concurrency: int = 1) -> StageMeter:
        """Return the meter of a stage in a worker."""
        meter = self.stages.get((name, shard))
        if meter is None:
            meter = self.stages[name, shard] = StageMeter(name, kind, shard, concurrency)
            meter.loop = self.loop
            meter.host = self._host
            meter.on_hold = self.on_hold
            meter.observer = self._whole.observer  # once it is among the stages: a trace that begins now misses none
        return meter

    def channel(self, name: str, shard: int, capacity: int) -> ChannelMeter:
        """Return the meter of the channel that the stage `name` of a worker fills."""
        meter = self.channels.get((name, shard))
        if meter is None:
            meter = self.channels[name, shard] = ChannelMeter(name, shard, capacity)
        return meter

    def traffic(self, name: str) -> Traffic:
        """Return the counter of what the source `name` asks of servers, in this host."""
        return self.traffics.setdefault((name, None if self._host is None else self._host.number), Traffic())

    def began(self) -> None:
        """The consumer gets its first list: what was before was the warm-up."""
        self.first = None if self.on_first_list is None else self.on_first_list(self)

    def gave(self, items: int) -> None:
        """The consumer gets a list."""
        if items and not self.consumer.items:
            self.began()
        self.consumer.items += items
