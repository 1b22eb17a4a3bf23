"""Pipelines on a virtual clock, whose rates follow from a few numbers, so that the best knobs are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

from streamline.core.figures import Detail, Figures, HostStats, StageStats
from streamline.core.knobs import Knob, KnobKind
from streamline.observe.tuner import Measurement, Tuner, TuningStep

TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class SimulatedStage:
    """One stage.

    Attributes:
      call_s: that a call takes when there are few at once.
      cpu_s: of that, on a core.
      loop_s: that a call takes of the event loop besides, one after the other.
      gil: calls compute in Python, so only one at a time does.
      crowds_at: calls at once, in all shards, from which on each takes longer, with their number to the power of 1.5.
      most_per_s: that what it calls gives.
      limited: its limit= lets so many calls at once.
      written: its knob in the plan; None: it has none.
      told_every: ticks after which its figures are told, where it is in a process.
      burst: of a prefetch: the items that hide all of the pauses upstream.
    """

    name: str
    kind: KnobKind = "concurrency"
    call_s: float = 0.0
    cpu_s: float = 0.0
    loop_s: float = 0.0
    gil: bool = False
    crowds_at: float = math.inf
    most_per_s: float = math.inf
    limited: float = math.inf
    written: int | None = 8
    most: int = 256
    item_bytes: int = 1000
    told_every: int = 0
    burst: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SimulatedPipeline:
    """Stages one after the other, and a consumer that takes `consumer_s` for an item."""

    stages: tuple[SimulatedStage, ...]
    consumer_s: float = 0.0
    cpus: int = 8
    workers: int = 1
    memory: float = math.inf

    @property
    def knobs(self) -> list[Knob]:
        return [
            Knob(stage=one.name, kind=one.kind, written=one.written, most=one.most)
            for one in self.stages
            if one.written is not None
        ]

    @property
    def written(self) -> dict[str, int]:
        return {knob.stage: knob.written for knob in self.knobs}

    def call_s(self, stage: SimulatedStage, at_once: float) -> float:
        """Return what a call takes with so many at once, in all shards."""
        return stage.call_s * math.pow(max(1.0, at_once / stage.crowds_at), 1.5)

    @property
    def cpu_s(self) -> float:
        """CPU time that an item takes."""
        return sum(one.cpu_s for one in self.stages)

    def rate_of(self, one: SimulatedStage, at_once: float) -> float:
        """Return the items per second that a stage could do with so many calls at once."""
        each_s = self.call_s(one, at_once) / at_once + one.loop_s
        rates = [1 / each_s if each_s else math.inf, one.most_per_s]
        rates += [self.cpus / self.cpu_s] if one.cpu_s else []
        rates += [1 / sum(each.cpu_s for each in self.stages if each.gil)] if one.gil else []
        return min(rates)

    def rate(self, values: Mapping[str, int]) -> float:
        """Return the items per second that the consumer gets."""
        rates = [1 / self.consumer_s if self.consumer_s else math.inf]
        smooth = 1.0
        for one in self.stages:
            if one.kind == "prefetch":
                smooth *= min(1.0, values[one.name] / one.burst)
            else:
                rates.append(self.rate_of(one, min(one.limited, values.get(one.name, 1) * self.workers)))
        return min(rates) * smooth

    def taken_bytes(self, values: Mapping[str, int]) -> float:
        """Return the bytes in flight beyond those of the knobs as written."""
        return sum(
            max(0, values[one.name] - one.written) * self.workers * one.item_bytes
            for one in self.stages
            if one.written is not None
        )

    @property
    def best(self) -> float:
        """The highest rate of a grid of knobs that fit into the memory."""
        grid = [sorted({*(2**power for power in range(9) if 2**power <= k.most), k.written}) for k in self.knobs]
        tried = [dict(zip(self.written, values, strict=True)) for values in product(*grid)]
        return max(self.rate(values) for values in tried if self.taken_bytes(values) <= self.memory)


@dataclass
class Simulation:
    """A run of a pipeline with a tuner, on a virtual clock."""

    pipeline: SimulatedPipeline
    noise: float = 0.0
    dice: Random = field(default_factory=lambda: Random(0))
    steps: list[TuningStep] = field(default_factory=list)
    free_bytes: float = math.inf

    def __post_init__(self) -> None:
        self.tuner = Tuner(self.pipeline.knobs, memory_bytes=self.pipeline.memory)
        self.figures = Figures(elapsed_s=0.0, items=0, consumer_wait_s=0.0, cpus=self.pipeline.cpus)
        self.given = self.cpu_s = 0.0
        self.told: dict[str, StageStats] = {}
        self.ticked = self.asked = 0
        self.busy_s = {one.name: 0.0 for one in self.pipeline.stages}
        self.limited_s = {one.name: 0.0 for one in self.pipeline.stages}

    def run(self, seconds: float) -> Simulation:
        """Go on for so long."""
        for _ in self.ticks(seconds):
            pass
        return self

    def ticks(self, seconds: float) -> Iterator[TuningStep | None]:
        """Likewise; yield what the tuner says after each tick."""
        for _ in range(round(seconds / TICK_S)):
            self._pass(TICK_S)
            step = self.tuner.look(Measurement(figures=self.figures, cpu_s=self.cpu_s, free_bytes=self._free))
            self.steps += [] if step is None else [step]
            yield step

    def _free(self) -> float:
        self.asked += 1
        return self.free_bytes

    def _pass(self, seconds: float) -> None:
        pipeline, before = self.pipeline, self.figures
        self.ticked += 1
        full = pipeline.rate(self.tuner.values)
        rate = full
        if not pipeline.consumer_s or rate < 0.999 / pipeline.consumer_s:
            rate *= max(0.05, 1 + self.noise * self.dice.gauss(0, 1))
        self.given += rate * seconds
        self.cpu_s += rate * seconds * pipeline.cpu_s
        stages = [self._stage(one, full, rate, seconds) for one in pipeline.stages if one.kind != "prefetch"]
        self.figures = replace(
            before,
            elapsed_s=before.elapsed_s + seconds,
            items=round(self.given),
            consumer_wait_s=before.consumer_wait_s + seconds * max(0.0, 1 - rate * pipeline.consumer_s),
            stages=tuple(stages),
            hosts=tuple(HostStats(number=0, kind="process", items=round(self.given)) for one in stages if one.hosts),
        )

    def _stage(self, one: SimulatedStage, full: float, rate: float, seconds: float) -> StageStats:
        """Return a stage's figures: all of its calls are at work where it is what limits, whatever they wait for."""
        pipeline, width = self.pipeline, self.tuner.values.get(one.name, 1)
        slots = width * pipeline.workers
        at_once = min(one.limited, slots)
        limits = not one.loop_s and pipeline.rate_of(one, at_once) <= 1.001 * full
        self.busy_s[one.name] += seconds * (at_once if limits else min(at_once, rate * pipeline.call_s(one, at_once)))
        self.limited_s[one.name] += seconds * (slots - at_once)
        stats = StageStats(
            name=one.name,
            kind="map",
            workers=pipeline.workers,
            concurrency=width,
            items=round(self.given),
            bytes=round(self.given) * one.item_bytes,
            busy_s=self.busy_s[one.name],
            executor="thread" if one.kind == "threads" else "task",
            details=(Detail("limited_s", self.limited_s[one.name]),) if one.limited < math.inf else (),
            hosts=1 if one.told_every else 0,
        )
        if one.told_every and self.ticked % one.told_every:
            return self.told.get(one.name, replace(stats, items=0, bytes=0, busy_s=0.0))
        self.told[one.name] = stats
        return stats
