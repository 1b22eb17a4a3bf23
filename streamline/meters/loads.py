"""How loaded the parts of a stream are: its figures as shares of the time.

A *load* is the share of the time for which something was at work: an event loop, which all inline functions in it
share, or the calls that a stage may have at work at once.
"""

from __future__ import annotations

from streamline.meters.figures import Figures, StageStats

__all__ = ["FULL", "Loads"]

FULL = 0.85
"""An event loop with this load delays all that is awaited, so it is looked at before what is awaited."""


class Loads:
    """Figures as shares of the time that has passed."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.stages = figures.stages
        self.elapsed_s = figures.elapsed_s
        self.waits = min(1.0, figures.consumer_wait_s / self.elapsed_s)
        self.body_holds = min(1.0, figures.consumer_held_s / self.elapsed_s)
        self.arrivals_hold = sum(host.arrival_s for host in figures.hosts) / self.elapsed_s
        self.stages_hold = self.arrivals_hold + sum(self.holds(stage) for stage in self.stages if not stage.hosts)
        self.hosted_hold = sum(self.holds(stage) for stage in self.stages if stage.hosts)

    def holds(self, stage: StageStats) -> float:
        """The share of the time for which a stage held the event loop; the event loops of its hosts, on average."""
        return stage.held_s / (self.elapsed_s * max(1, stage.hosts))

    def loop_of(self, stage: StageStats) -> float:
        """The share of the time for which the event loop that a stage runs in was held by stages."""
        return self.hosted_hold if stage.hosts else self.stages_hold

    def load(self, stage: StageStats) -> float:
        """The load of a stage's calls."""
        return stage.busy_s / (self.elapsed_s * stage.slots)

    def awaited(self, stage: StageStats) -> float:
        """The load of a stage that doesn't hold the loop, or the part of it that doesn't."""
        return (stage.busy_s - stage.held_s) / (self.elapsed_s * stage.slots)

    def full(self, stage: StageStats) -> float:
        """The share for which a stage's results found no room."""
        return stage.wait_output_s / (self.elapsed_s * stage.slots)

    def call_s(self, stage: StageStats) -> float:
        """Seconds that a call of an inline function takes."""
        at = self.stages.index(stage)
        calls = self.stages[at - 1].items if at and stage.kind in ("filter", "flat_map", "unbatch") else stage.items
        return stage.held_s / max(1, calls)

    @property
    def heaviest(self) -> StageStats | None:
        """The stage that holds the loop most."""
        return max(self.stages, key=self.holds, default=None)

    def next_limit(self, but: StageStats, *, loop: bool = False) -> float:
        """The highest load when a stage is out of the way: of the consumer, another stage, or the loop without it.

        Args:
          but: the stage.
          loop: whether it is the loop that it is to be taken off.
        """
        full = self.loop_of(but) if loop and self.loop_of(but) >= FULL else 0.0
        delays = {bool(but.hosts): full}  # what is awaited in the same loop lasts longer by it
        others = [self.awaited(stage) - delays.get(bool(stage.hosts), 0.0) for stage in self.stages if stage is not but]
        out = self.holds(but) if loop else 0.0
        own, hosted = (
            (self.stages_hold, self.hosted_hold - out) if but.hosts else (self.stages_hold - out, self.hosted_hold)
        )
        return max([0.01, 1 - self.waits, own, hosted, *others])

    def rest_of_rank(self, but: StageStats) -> float:
        """The highest load that stays when all that workers do goes elsewhere."""
        at = next((at for at, stage in enumerate(self.stages) if stage.kind == "merge"), len(self.stages))
        behind = [max(self.holds(stage), self.awaited(stage)) for stage in self.stages[at:] if stage is not but]
        return max([0.01, 1 - self.waits, sum(map(self.holds, self.stages[at:])), *behind])

    def in_workers(self, stage: StageStats) -> bool:
        """Whether a stage stands before the merge."""
        at = self.stages.index(stage)
        return not any(before.kind == "merge" for before in self.stages[:at])
