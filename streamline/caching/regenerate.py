"""Serving a cache that is drawn anew, cycle by cycle: exactly `size` items of the upstream, shuffled, then dropped.

The next cycle is drawn when the last item of one has been served, never by a clock, so that ranks which have served as
many items stand at the same one. State: the upstream's at the cycle's start (a mark, `Since`), the cycle, and how much
of it was served: a resume draws it again. With `spill`, the upstream's behind the cycle, and the file that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, TypeVar

import msgspec

from streamline.caching.cycle import Cycle, Served
from streamline.caching.drawing import Drawing, Recipe, Turns
from streamline.caching.spill import Spill
from streamline.core.driver import behind_channel
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, Run
from streamline.core.pace import Pace
from streamline.core.state import Json, Tree
from streamline.core.state_types import Count, FileName, Size, Unsigned
from streamline.transforms.base import Stage

__all__ = ["Regenerate"]

T = TypeVar("T")

TOGETHER_ROWS = 4096
"""Rows that are gathered together at the most, if a block is no larger: the consumer may want only one block."""

ROWS_AN_ITEM = 8
"""Rows that count as one item in a channel: where one holds 512 items, that is as many as are gathered together."""


class Cycled(msgspec.Struct):
    """The stage's part of a saved state: outputs served of a cycle that is drawn again, or that is in files."""

    cycle: Count
    served: Count
    of: Count | msgspec.UnsetType = msgspec.UNSET
    seed: Unsigned | msgspec.UnsetType | None = msgspec.UNSET
    reuse: Size | msgspec.UnsetType = msgspec.UNSET
    skip: Count = 0
    epoch: list[Unsigned] = []
    files: list[FileName] | None = None

    def __post_init__(self) -> None:
        if self.files is not None:
            return
        if self.of is msgspec.UNSET or self.seed is msgspec.UNSET or self.reuse is msgspec.UNSET:
            raise ValueError("Expected `files`, or `of`, `seed` and `reuse`")
        if self.served > self.of * self.reuse:
            raise ValueError(f"Expected at most {self.of * self.reuse} outputs of a cycle, got {self.served} served")


@dataclass(frozen=True, kw_only=True)
class Regenerate(Stage[T, T]):
    """Draws `size` items, serves each of them `reuse` times, drops them, and draws the next.

    Attributes:
      shuffle: each serving by (seed, epoch, shard, cycle, serving).
      block: items are blocks of rows; `size` counts rows, and blocks of so many come out. None: they are no blocks.
      overlap: the next cycle is drawn while one is served.
      spill: a folder for the cycles that saved snapshots may need.
    """

    survives: ClassVar[Mapping[str, str]] = {
        "size": "the cycle that is being served is served to its end, the next ones have the new size",
        "shuffle": "the cycle that is being served is served as it was begun, the next ones as it says now",
        "seed": "the cycle that is being served is served as it was begun, the next ones are shuffled by the new seed",
        "reuse": "the cycle that is being served is served as often as it was begun, the next ones as it says now",
        "added": "the items from here on come in cycles, beginning with cycle 0",
        "removed": "the items from here on come in their order, once",
    }
    state_type: ClassVar[Any] = Cycled

    size: int
    shuffle: bool = True
    seed: int = 0
    reuse: int = 1
    block: int | None = None
    overlap: bool = False
    spill: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options.items() if name not in ("overlap", "spill")}

    def num_outputs(self, items: float) -> float | None:
        return items * self.reuse if self.block is None else None

    @classmethod
    def again(cls, own: Json) -> str | None:
        if not own or own.get("files") is not None:
            return None
        if not own["served"]:
            return "draws one block again, of which a part was served" if own.get("skip") else None
        return (
            f"draws the {own['of']:,} items of cycle {own['cycle']:,} again, and passes over the {own['served']:,} "
            "outputs of it that were delivered"
        )

    @classmethod
    def holds(cls, own: Json) -> str | None:
        if own and own.get("files"):
            return f"has served {own['served']:,} outputs of cycle {own['cycle']:,}, and the rest is in its file alone"
        return cls.again(own)

    @property
    def rewinds(self) -> bool:
        return self.spill is None

    @property
    def in_flight(self) -> int:
        return 2 * self.size if self.overlap else self.size

    @property
    def bulk(self) -> int:
        return 1 if self.block is None else max(1, self.block // ROWS_AN_ITEM)

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        own = None if state is None else state.get(self.name)
        site = upstream.site
        recipe = Recipe(self.name, self.size, self.block, self.seed if self.shuffle else None, self.reuse)
        spill = None if self.spill is None else Spill(self.spill, self.name, site)
        drawing = Drawing(recipe, own, spill, upstream(state), site)
        cycles: Flow[Cycle] = drawing
        if self.overlap:
            cycles = behind_channel(drawing, site, f"cycles of {self}", 1)
        run = Run(cycles, own, site, site.meter(self.name, self.kind), site.skips(self.name, self.kind, state))
        return ListsFlow(drawing.begin, self._serve(run, drawing), run, cycles)

    async def _cycle(self, run: Run[Cycle], turns: Turns) -> Chunk[Cycle] | None:
        """Return the next cycle. The time until it is there is a wait; an inbox tells of its own."""
        meter = None if self.overlap else run.meter
        if meter is not None:
            meter.wait_begins("wait_input")
        began = perf_counter()
        try:
            return await run.upstream.pull(1)
        finally:
            turns.waited_s += perf_counter() - began
            if meter is not None:
                meter.wait_ends()

    async def _serve(self, run: Run[Cycle], drawing: Drawing) -> Lists[T]:
        served, turns, pace = drawing.served, drawing.turns, Pace()
        if run.meter is not None:
            run.meter.tells(turns.details)
        most = 2**31 if self.block is None else max(1, TOGETHER_ROWS // self.block)
        while (chunk := await self._cycle(run, turns)) is not None:
            (cycle,) = chunk.items
            del chunk
            run.upstream.release()  # so that the next one may be drawn
            while served < cycle.place.total:
                items = cycle.outputs(served, min(run.want, most), run.site)
                first, served = served, served + len(items)
                turns.serves(cycle.place, served)
                yield Chunk(items, Served(self.name, cycle.place, first))
                del items
                await pace.breathe()
            drawing.done_with(cycle)
            del cycle  # before the next one is drawn
            served = 0
        yield Chunk((), (), drawing.behind)  # what was dropped at the end
