"""A stage that turns the knobs of its run at random, with every item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from streamline.core.flow import Flow, Lists, Opener, StageRun
from streamline.core.knobs import KnobValues, Turnable
from streamline.core.state import Tree
from streamline.core.tasks import Session
from streamline.pipeline import Pipeline
from streamline.testing.oracle import Upstream, reference
from streamline.transforms.base import Stage


class RestlessWidths(KnobValues):
    """Knobs of which any may change at any time, from 1 to `most`."""

    def __init__(self, dice: Random, most: int) -> None:
        super().__init__()
        self._dice = dice
        self._most = most
        self._stages: set[str] = set()

    def join(self, stage: str, running: Turnable) -> None:
        self._stages.add(stage)
        self.set({stage: self._dice.randint(1, self._most)})
        super().join(stage, running)

    def turn(self) -> None:
        """Turn some knobs."""
        self.set(
            {stage: self._dice.randint(1, self._most) for stage in sorted(self._stages) if self._dice.random() < 0.7}
        )


def restless(session: Session, dice: Random, most: int) -> RestlessWidths:
    """Return the knobs of a run, which are turned at random from now on."""
    found = session.services.find(KnobValues)
    if not isinstance(found, RestlessWidths):
        found = RestlessWidths(dice, most)
        session.services.add(KnobValues, found)
    return found


@dataclass(frozen=True, kw_only=True)
class Turning(Stage[Any, Any]):
    """Gives what it gets, one by one, and turns all knobs of the run before and after each.

    Attributes:
      most: the highest value.
      seed: of the values.
    """

    kind: ClassVar[str] = "turning"
    one_to_one = True

    most: int
    seed: int = 0

    def open(self, upstream: Opener[Any], state: Tree | None = None) -> Flow[Any]:
        restless(upstream.site.tasks.session, Random(self.seed), self.most)
        return super().open(upstream, state)

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        widths = restless(run.site.tasks.session, Random(self.seed), self.most)
        while (chunk := await run.upstream.pull(1)) is not None:
            widths.turn()
            yield chunk
            widths.turn()


@reference(Turning)
def _turning(stage: Turning, upstream: Upstream) -> Iterator[Any]:
    yield from upstream


def turned(pipe: Pipeline[Any], most: int, seed: int = 0) -> Pipeline[Any]:
    """Add a stage that turns the knobs of all stages that are added after it, and of those before it."""
    return replace(pipe, stages=(*pipe.stages, Turning(name=f"turning{len(pipe.stages)}", most=most, seed=seed)))
