"""A mixture of pipelines: item n comes from the one that is drawn for (seed, n), by weights.

The draw needs nothing but n, so the state is n, and where each component stands. Weights belong to no state: a resume
may have others. A stage behind that goes back to an older state must see the same items again, though: there the state
says, under "drawn", by which weights the items up to where that stage stands were drawn; and under "over", if that is
the end, which components had ended there; and under "passes", if it stands in a later pass, by what all is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from streamline.core.flow import Flow, ListsFlow, Site
from streamline.core.state import Json, Tree
from streamline.core.state_types import Count, Unsigned
from streamline.mixing.components import Several, grown
from streamline.mixing.drawing import Drawing
from streamline.mixing.draws import Draws
from streamline.mixing.told import pass_of
from streamline.plan import Plan
from streamline.sources.base import Part

__all__ = ["Mix", "Stop"]

T = TypeVar("T")

Weight: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

Stop = Literal["first", "all"]


class By(msgspec.Struct):
    """By what items were drawn, in a saved state: as `Draws.json` writes it."""

    seed: Unsigned
    weights: Annotated[list[tuple[Count, dict[str, Weight]]], msgspec.Meta(min_length=1)]


class ByUntil(By):
    """Likewise, up to an item."""

    until: Count


class Mixed(msgspec.Struct):
    """Its part of a saved state; see above."""

    n: Count
    ended: list[str]
    taken: dict[str, Count]
    drawn: list[ByUntil]
    over: list[str] | None
    passes: dict[str, Any] | None
    of: dict[str, Tree]


@dataclass(frozen=True, kw_only=True)
class Mix(Several[T]):
    """Draws each item from one of its components. State: items drawn, components that have ended, where each stands."""

    state_type: ClassVar[Any] = Mixed

    draws: Draws
    stop: Stop = "all"

    @property
    def kind(self) -> str:
        return "mix"

    @property
    def reread(self) -> str:
        return "draws on, by the number of items served"

    def __str__(self) -> str:
        changes = "".join(f", other weights from {start:,} on" for start, _ in self.draws.schedule[1:])
        stop = "" if self.stop == "all" else f", stop={self.stop!r}"
        return f"{super().__str__()} (seed={self.draws.seed}{stop}{changes})"

    @property
    def made_of(self) -> Sequence[tuple[str, str, Plan]]:
        schedule = [dict(weights) for _, weights in self.draws.schedule]
        weights = {name: " → ".join(f"{entry.get(name, 0):g}" for entry in schedule) for name, _ in self.components}
        return [(name, f"weight {weights[name]}, ", plan) for name, plan in self.components]

    def drawn(self) -> Json:
        return {"draws": self.draws.json(), "stop": self.stop}

    def fitted(self, own: Json, listing: Json, now: Json) -> Json:
        found, known = super().fitted(own, listing, now), self._known(listing)
        more = {name for name, plan in known.items() if grown(plan, listing[name]["data"], now[name]["data"])}
        return {**found, "ended": [name for name in found["ended"] if name not in more]} if more else found

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        own = (
            {"n": 0, "ended": [], "taken": {}, "drawn": [], "over": None, "passes": None}
            if state is None
            else state[self.name]
        )
        flows = self.flows(site, state)
        demand = self.demand(site, state)
        passes = {name: found for name, plan in self.components if (found := pass_of(plan, site)) is not None}
        drawing = Drawing(self.name, self.draws, self.stop, site, own, flows, passes)
        return ListsFlow(drawing.state, drawing.lists(demand), demand, *flows.values())

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        found = self.outputs(part, shard, num_shards)
        if self.stop == "first" and len(found) > 1:
            return math.inf if all(count == math.inf for count in found) else None
        return None if None in found else sum(count for count in found if count is not None)
