"""What is counted in a host that is a process, shown by meters of the running as if it were counted here.

When the host dies, what it has counted stays, and what its successor counts comes on top: work that is done again
counts again.
"""

from __future__ import annotations

from time import perf_counter

from streamline.border.messages import Counts
from streamline.core.counters import HostMeter, StageCounts, StageMeter
from streamline.core.meters import Meters, Traffic

__all__ = ["Mirror"]


Key = tuple[str, int]


class Mirror:
    """The meters of one host's part of a running."""

    def __init__(self, meters: Meters, host: HostMeter) -> None:
        self._meters = meters
        self._host = host
        self._shown: dict[Key, StageMeter] = {}
        self._before: dict[Key, StageCounts] = {}
        self._passed: dict[Key, int] = {}  # items through channels of hosts that have died
        self._seen: dict[Key, int] = {}
        self._asked: dict[str, tuple[int, int, int, int, int, int, int]] = {}  # of servers, by hosts that have died

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
