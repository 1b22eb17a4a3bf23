"""Statistics of a stream at one moment, collected from the meters of its run; frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from streamline.core.cpus import usable_cpus
from streamline.core.figures import FROM_HOST, ChannelStats, Figures, HostStats, ReadStats, StageStats, total
from streamline.core.meters import HostMeter, Meters
from streamline.errors import printable_lines
from streamline.observe.contention import CONTENTION
from streamline.observe.tables import table
from streamline.observe.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from streamline.observe.tuner import TuningStep


def collect(meters: Meters) -> Figures:
    """Return what the meters of a run say now. From any thread."""
    consumer = meters.consumer
    now = perf_counter() if consumer.closed_at is None else consumer.closed_at
    workers = [(meter.host, meter.until(now)) for meter in meters.stages.copy().values()]  # copied in one go
    homes: dict[str, set[HostMeter | None]] = {}
    for home, stats in workers:
        homes.setdefault(stats.name, set()).add(home)
    stages = _by_name([stats for _, stats in workers], meters.order)
    return Figures(
        elapsed_s=max(0.0, now - consumer.opened_at),
        items=consumer.items,
        consumer_wait_s=consumer.wait_s_until(now),
        stages=tuple(
            replace(total(each), workers=len(each), per_worker=tuple(each), hosts=len(homes[each[0].name] - {None}))
            for each in stages
        ),
        hosts=tuple(
            host_stats(host, [stats for home, stats in workers if home is host])
            for host in sorted(meters.hosts, key=lambda host: host.figures.number)
        ),
        cpus=usable_cpus(),
        channels=tuple(
            replace(
                total(each),
                depth=sum(one.depth for one in each),
                peak=max(one.peak for one in each),
                channels=len(each),
            )
            for each in _by_name(list(meters.channels.copy().values()), meters.order)
        ),
        consumer_held_s=consumer.held_s,
        ranks_wait_s=consumer.ranks_wait_s,
        reads=_reads(list(meters.traffics.copy().values())),
        contention=replace(CONTENTION.read(), loop=meters.loop.thread),
    )


S = TypeVar("S", StageStats, ChannelStats)


def _by_name(figures: Sequence[S], order: Sequence[str]) -> list[list[S]]:
    """Return the figures of each name together, by shard, in the plan's order."""
    found: dict[str, list[S]] = {}
    places = {name: place for place, name in enumerate(order)}
    for each in sorted(
        figures, key=lambda each: (places.get(each.name.removesuffix(FROM_HOST), len(order)), each.shard)
    ):
        found.setdefault(each.name, []).append(each)
    return list(found.values())


def host_stats(host: HostMeter, workers: Sequence[StageStats]) -> HostStats:
    """Return what was counted of a host, with what its workers' stages did."""
    host.see()
    return replace(
        host.figures,
        shards=tuple(sorted(host.shards)),
        busy_s=sum(stage.held_s for stage in workers),
        wait_input_s=sum(stage.wait_input_s for stage in workers),
        wait_output_s=sum(stage.wait_output_s for stage in workers),
    )


def _reads(traffics: Sequence[ReadStats]) -> tuple[ReadStats, ...]:
    """Return what each source has asked of servers, all hosts together; of those that have."""
    found: dict[str, ReadStats] = {}
    for traffic in traffics:
        reads = found.setdefault(traffic.name, ReadStats(traffic.name))
        reads.add(traffic)
        reads.in_flight += traffic.in_flight
    return tuple(reads for name, reads in sorted(found.items()) if reads != ReadStats(name))


@dataclass(frozen=True, kw_only=True)
class Stats(Figures):
    """A stream at one moment, since it was opened; `str` is a table with the verdict.

    Attributes:
      first: as it stood when the consumer got its first list, or when a knob was last turned; None: before. The
        verdict leaves out what was before.
      tuning: what `open(tune=True)` has turned, and why, the last steps.
    """

    first: Figures | None = field(default=None, repr=False, compare=False)
    tuning: tuple[TuningStep, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """What limits the stream, since its first list; None: nothing does, or it is too early to say."""
        return None if self.first is None else verdict_of(self.warm)

    @cached_property
    def warm(self) -> Figures:
        """These without what was before the first list; nothing, where there was none yet."""
        return self - (self if self.first is None else self.first)

    def since(self, earlier: Stats) -> Stats:
        """Return what was added since `earlier`, a picture of the same stream: a window.

        Depths and peaks of channels are those of now.
        """
        begin = None if earlier.first is None else Figures(elapsed_s=0, items=0, consumer_wait_s=0)
        if self.first is not None and (begin is None or self.first.elapsed_s > earlier.elapsed_s):
            begin = self.first - earlier
        return replace(self - earlier, first=begin)

    def __str__(self) -> str:
        verdict = self.verdict
        return printable_lines(table(self) + (f"\n{verdict}" if verdict is not None else ""))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def stats_of(meters: Meters, at_hand: int = 0) -> Stats:
    """Return what was counted so far.

    Args:
      meters: with `collect` as their `on_first_list`.
      at_hand: items of the consumer's list that it has not seen yet.
    """
    figures = collect(meters)
    return Stats(**(vars(figures) | {"items": figures.items - at_hand}), first=meters.first)
