"""A stage outside the package: every n-th item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.state import NumberedStates, Over, Picked
from streamline.core.state_types import Count
from streamline.testing.oracle import Upstream, reference
from streamline.transforms.base import Stage

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EveryNth(Stage[T, T]):
    """The items 0, n, 2n, … State: items seen."""

    state_type: ClassVar[Any] = Count
    initial_state = 0

    name: str = "every_nth"
    n: int

    async def lists(self, run: StageRun[T]) -> Lists[T]:
        seen: int = run.own
        while (chunk := await run.upstream.pull(run.max_items)) is not None:
            picked = range(-seen % self.n, len(chunk.items), self.n)
            states = Picked(NumberedStates(self.name, seen + 1, chunk.states), picked)
            seen += len(chunk.items)
            yield Chunk([chunk.items[at] for at in picked], states, Over(self.name, seen, chunk.end))


@reference(EveryNth)
def every_nth(stage: EveryNth[T], upstream: Upstream) -> Iterator[T]:
    return islice(upstream, 0, None, stage.n)
