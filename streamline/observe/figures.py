"""Figures of a stream at one moment, or between two: with units; nothing in them changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from streamline.core.counters import ChannelStats, HostStats, ReadStats, StageStats, Summable

__all__ = ["ChannelStats", "ContentionStats", "Figures", "HostStats", "ReadStats", "StageStats", "ThreadStats", "per_s"]


@dataclass(frozen=True, kw_only=True)
class ThreadStats(Summable):
    """A thread of this process, since it was started.

    Attributes:
      number: the system's.
      name: Python's.
      cpu_s: that it has computed, in Python or outside of it.
      core_wait_s: that it could have, and no core was free.
    """

    number: int
    name: str
    cpu_s: float = 0.0
    core_wait_s: float = 0.0

    @property
    def runnable_s(self) -> float:
        """For how long it computed, or could have."""
        return self.cpu_s + self.core_wait_s


@dataclass(frozen=True, kw_only=True)
class ContentionStats(Summable):
    """What slows all stages of this process alike; not those in processes of their own.

    Attributes:
      looked_s: when that was seen, by `time.perf_counter`; between two moments: how long that was.
      collecting_s: in which Python's garbage collector stopped all threads.
      gil_looks: how many times it was looked whether a thread holds the GIL.
      gil_waits: how many times one did.
      quota_periods: of the control group's CPU quota, since it was made; 0: there is none.
      quota_throttled: of those, in which the quota was used up.
      memory_wait_s: in which programs waited for memory that the kernel had to free, in this process's control group,
        or on this machine; 0 where the kernel doesn't tell.
      threads: of Python's, each with its times; none where the system doesn't tell them.
      loop: the number of the thread of the pipeline's event loop.
    """

    looked_s: float = 0.0
    collecting_s: float = 0.0
    gil_looks: int = 0
    gil_waits: int = 0
    quota_periods: int = 0
    quota_throttled: int = 0
    memory_wait_s: float = 0.0
    threads: tuple[ThreadStats, ...] = ()
    loop: int | None = None


@dataclass(frozen=True, kw_only=True)
class Figures(Summable):
    """A stream at one moment, or between two.

    Attributes:
      elapsed_s: since it was opened; it stops at the end, or when the stream is closed.
      items: that the consumer got.
      consumer_wait_s: that it waited for them.
      stages: in the plan's order, the source first, the merge where it stands.
      channels: likewise.
      consumer_held_s: with `async for`: how long the loop's body held the event loop, as far as it can be seen: from
        the first item of a list until it first awaits something.
      ranks_wait_s: of its waits, those for other ranks to say whether they have another item, where all end together.
      hosts: threads or processes in which workers run, by number, those that aren't there yet among them; none where
        workers run in the stream's event loop.
      cpus: that this process may use, within its control group's quota.
      reads: what sources have asked of servers, by name; of those that have asked any.
      dropped: items of this rank that are not given, so that all ranks end together; as `stream.ends` has it.
      padded: items that were given again for that; a resume goes on counting.
      contention: what slows all stages of this process alike.
    """

    elapsed_s: float
    items: int
    consumer_wait_s: float
    stages: tuple[StageStats, ...] = ()
    channels: tuple[ChannelStats, ...] = ()
    consumer_held_s: float = 0.0
    ranks_wait_s: float = 0.0
    hosts: tuple[HostStats, ...] = ()
    cpus: int = 1
    reads: tuple[ReadStats, ...] = ()
    dropped: int = 0
    padded: int = 0
    contention: ContentionStats = ContentionStats()

    def __sub__(self, earlier: Figures) -> Self:  # type: ignore[override]
        """Return what was added since an earlier moment of the same stream; depths and peaks are those of now."""
        return replace(super().__sub__(earlier), contention=self.contention - earlier.contention)

    @property
    def waits(self) -> float:
        """The share of the time for which the consumer waited."""
        return min(1.0, max(0.0, self.consumer_wait_s / self.elapsed_s)) if self.elapsed_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """Items that the consumer got, per second."""
        return self.items / self.elapsed_s if self.elapsed_s > 0 else 0.0


def per_s(rate: float) -> str:
    """Return a number of items per second as text."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
