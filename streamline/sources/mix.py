"""One running of a mixture in one worker: a list of draws, and the items for them.

Of each component a list is at hand. They are served in the order of the draws, as far as they go; then another list
is waited for, of the component that is drawn next. Those whose items are there for the asking are asked before, so
that lists are long.

A mixture of pipelines: item n comes from the one that is drawn for (seed, n), by weights.

The draw needs nothing but n, so the state is n, and where each component stands. Weights belong to no state: a resume
may have others. A stage behind that goes back to an older state must see the same items again, though: there the state
says, under "drawn", by which weights the items up to where that stage stands were drawn; and under "over", if that is
the end, which components had ended there; and under "passes", if it stands in a later pass, by what all is drawn.

What is counted of a mixture's components, in one worker: how much each gave, in which pass it is, and its weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from streamline.core.counters import Detail, Details
from streamline.core.flow import Chunk, Demand, Flow, Lists, ListsFlow, Site
from streamline.core.pace import Pace
from streamline.core.state import Json, Reference, Tree
from streamline.core.state_types import Count, Unsigned
from streamline.errors import ResumeError
from streamline.sources.base import Part
from streamline.sources.composite import PassOf, Several, SeveralState, grown
from streamline.sources.mix_state import ComponentBuffer, Ended, MixedStates, MixPass, MixState, MixStateFactory, Picks
from streamline.sources.sampler import BLOCK, Draws, Numbers, Span

__all__ = ["ComponentMetrics", "Mix", "MixRun", "Stop"]


NOTHING: Picks = np.empty(0, np.intp)


class MixRun:
    """One running of a mixture.

    Args:
      draws: from here on; what `own` says of items that will be read again comes first.
      stop: "first" or "all".
      own: the mixture's part of the state.
      flows: of the components, by name.
      passes: tells the pass that a component is in, of those that are repeated.

    Raises:
      ResumeError: items will be read again of a component that there is no more, before an end where there would be
        more, or of an earlier pass by other weights.
    """

    def __init__(
        self,
        name: str,
        draws: Draws,
        stop: str,
        site: Site,
        own: Json,
        flows: Mapping[str, Flow[Any]],
        passes: Mapping[str, PassOf],
    ) -> None:
        self._name, self._stop, self._site = name, stop, site
        self._n: int = own["n"]
        self._ended = frozenset(one for one in own["ended"] if one in flows)
        self._hands = [ComponentBuffer(flow, int(own["taken"].get(one, 0))) for one, flow in flows.items()]
        self._number = {one: number for number, one in enumerate(flows)}
        self._spans: tuple[Span, ...] = (*((one["until"], Draws.of(one)) for one in own["drawn"]), (math.inf, draws))
        self._again: int = own["drawn"][-1]["until"] if own["drawn"] else self._n  # items before this one were drawn
        over = own.get("over")
        self._over: Ended | None = None if over is None else tuple(over)
        self._numbers = Numbers(site)
        for _, before in self._spans[:-1]:
            gone = sorted({one for one in before.names if one not in flows})
            if gone:
                raise ResumeError(
                    f"a stage behind {name!r} goes back to items of {', '.join(map(repr, gone))}, which is no "
                    "component any more: keep it, with weight 0, until a snapshot behind them"
                )
        self._wheel: _AliasTable | None = None
        if self._over is not None and self._left(draws, self._again, self._over, stop):
            raise ResumeError(
                f"a stage behind {name!r} goes back to items before its end, where there would be more now: keep "
                "components, stop= and weights of 0 as they were until a snapshot behind them, or begin anew"
            )
        then, drawn_by = own.get("passes"), {**draws.json(), "stop": stop, "of": sorted(flows)}
        self._pass = MixPass(site.epoch, drawn_by, then is not None)
        if then not in (None, drawn_by):
            raise ResumeError(
                f"a stage behind {name!r} goes back to an earlier pass of it: keep weights, seed, stop= and components "
                "as they were until a snapshot behind that pass"
            )
        self._behind = self._made_behind()
        self._told = ComponentMetrics(self.state, self._spans, site, passes)

    @property
    def state(self) -> MixState:
        """The state behind what was served."""
        return MixedStates(self._behind, self._n, self._hands, NOTHING).behind(0)

    async def lists(self, demand: Demand) -> Lists[Any]:
        """Yield items until those that there is weight for have ended; or the first of them."""
        pace = Pace()
        for hand in self._hands:
            hand.flow.reader = demand.meter
        if demand.meter is not None:
            demand.meter.details_from(self._told.details)
        while (wheel := self._turned()) is not None:
            picks, at = self._draw(wheel), 0
            while at < len(picks):
                drawn = picks[at : at + demand.want]
                counts = self._counts(drawn)
                if reach := await self._reach(drawn, counts, demand.want):
                    at += reach
                    chunk = self._serve(drawn, counts) if reach == len(drawn) else self._serve_some(drawn[:reach])
                    self._told.now = chunk.end_reference
                    yield chunk
                    del chunk
                    await pace.breathe()
                    continue
                name, hand = list(self._number)[drawn[0]], self._hands[drawn[0]]
                if not await hand.pull(demand.want):
                    self._ended |= {name}
                    self._wheel = None
                    self._behind = self._made_behind()
                    self._told.now = Reference.to(self.state)
                    yield Chunk((), (), self.state)
                    break
                if not hand.items:
                    yield Chunk((), (), self.state)
        self._ended |= {name for name in self._over or () if name in self._number}
        self._behind = self._made_behind(at_end=True)
        self._told.now = Reference.to(self.state)
        yield Chunk((), (), self.state)

    def _weights(self) -> dict[str, float]:
        """Return the weights of what may be drawn now; none at the end."""
        if self._n < self._again:
            return self._left(self._now, self._n, self._ended, "all")  # they were drawn, whatever had ended
        return {} if self._over is not None else self._left(self._now, self._n, self._ended, self._stop)

    def _left(self, draws: Draws, n: int, ended: Collection[str], stop: str) -> dict[str, float]:
        """Return the weights by which item n may be drawn when some components have ended.

        If all that has a weight has ended, those to which a later schedule gives one go on.
        """
        if stop == "first" and any(name in self._number for name in ended):
            return {}
        for weights in draws.onward(self._served(n)):
            left = {name: weight for name, weight in weights if weight and name in self._number}
            if left := {name: weight for name, weight in left.items() if name not in ended}:
                return left
        return {}

    @property
    def _now(self) -> Draws:
        return next(draws for until, draws in self._spans if until > self._n)

    def _served(self, n: int) -> int:
        """Items that all workers have served behind n of this one, as a strict merge takes them in turn."""
        return n * self._site.num_shards + self._site.shard

    def _turned(self) -> _AliasTable | None:
        """Return what is drawn with from here on; None at the end."""
        wheel = self._wheel
        if wheel is None or self._n >= wheel.until:
            wheel = self._wheel = self._made_wheel()
        return wheel

    def _made_wheel(self) -> _AliasTable | None:
        weights = self._weights()
        if not weights:
            return None
        numbers: Picks = np.array([self._number[name] for name in weights], np.intp)
        change = self._now.change(self._served(self._n)) - self._site.shard
        until = min(next(until for until, _ in self._spans if until > self._n), -(-change // self._site.num_shards))
        return _AliasTable(numbers, np.cumsum(list(weights.values())), self._now.seed, until)

    def _draw(self, wheel: _AliasTable) -> Picks:
        """Return for the next items which component each comes from, by number."""
        count = int(min(BLOCK, wheel.until - self._n))
        numbers = self._numbers.of(wheel.seed, self._n, count) * wheel.bounds[-1]
        drawn: Picks = wheel.numbers[wheel.bounds[:-1].searchsorted(numbers, "right")]
        return drawn

    async def _reach(self, drawn: Picks, counts: Sequence[int], most: int) -> int:
        """Return how many of these draws can be served from what is at hand, and from what is there for the asking.

        Args:
          counts: of each component.
          most: items of one component to be at hand.
        """
        reach = len(drawn)
        for number, (hand, count) in enumerate(zip(self._hands, counts, strict=True)):
            if count > len(hand.items) and not await hand.fill(count, most):
                reach = min(reach, int(np.flatnonzero(drawn == number)[len(hand.items)]))
        return reach

    def _counts(self, drawn: Picks) -> list[int]:
        counts: list[int] = np.bincount(drawn, minlength=len(self._hands)).tolist()
        return counts

    def _serve_some(self, drawn: Picks) -> Chunk[Any]:
        return self._serve(drawn, self._counts(drawn))

    def _serve(self, drawn: Picks, counts: Sequence[int]) -> Chunk[Any]:
        """Return items for draws that are all at hand, so many of each component."""
        column = MixedStates(self._behind, self._n, self._hands, drawn)
        nexts = [hand.items.pop for hand in self._hands]
        items = [nexts[pick]() for pick in drawn.tolist()]
        for hand, count in zip(self._hands, counts, strict=True):
            hand.gave(count)
        self._n += len(drawn)
        return Chunk(items, column)

    def _made_behind(self, *, at_end: bool = False) -> MixStateFactory:
        before = {name: self._hands[number].before for name, number in self._number.items()}
        ended = tuple(sorted(self._ended))
        over, end = (None, ended) if at_end else (self._over, None)
        return MixStateFactory(self._name, ended, self._spans, before, over, end, self._pass)


class _AliasTable(NamedTuple):
    """What is drawn with, as long as weights stay as they are.

    Attributes:
      numbers: of the components that may be drawn.
      bounds: sums of their weights, from the first one on: a number below a bound, and not below the one before, is
        that component's. One may have been rounded up to the last bound, and is the last one's.
      until: the item from which on it is another wheel.
    """

    numbers: Picks
    bounds: npt.NDArray[np.float64]
    seed: int
    until: float


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
    def made_of(self) -> Sequence[tuple[str, str, Any]]:
        schedule = [dict(weights) for _, weights in self.draws.schedule]
        weights = {name: " → ".join(f"{entry.get(name, 0):g}" for entry in schedule) for name, _ in self.components}
        return [(name, f"weight {weights[name]}, ", component.plan) for name, component in self.components]

    def drawn(self) -> Json:
        return {"draws": self.draws.json(), "stop": self.stop}

    def migrate_state(self, own: Json, listing: Json, now: Json) -> Json:
        found, known = super().migrate_state(own, listing, now), self._known(listing)
        more = {name for name, component in known.items() if grown(component, listing[name]["data"], now[name]["data"])}
        return {**found, "ended": [name for name in found["ended"] if name not in more]} if more else found

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        own = (
            {"n": 0, "ended": [], "taken": {}, "drawn": [], "over": None, "passes": None}
            if state is None
            else state[self.name]
        )
        flows = self.flows(site, state)
        demand = self.demand(site, state)
        passes = {name: found for name, component in self.components if (found := component.pass_of(site)) is not None}
        drawing = MixRun(self.name, self.draws, self.stop, site, own, flows, passes)
        return ListsFlow(drawing.state, drawing.lists(demand), demand, *flows.values())

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        found = self.outputs(part, shard, num_shards)
        if self.stop == "first" and len(found) > 1:
            return math.inf if all(count == math.inf for count in found) else None
        return None if None in found else sum(count for count in found if count is not None)


class ComponentMetrics:
    """Tells the mixture's meter. Once a list, `now` is replaced; all else is done when somebody asks.

    Args:
      begin: where the mixture was opened.
      spans: by what items are drawn, and up to which number.
      passes: tells the pass that a state of a component is in, of those that are repeated.

    Attributes:
      now: where it stands.
    """

    __slots__ = ("_before", "_passes", "_site", "_spans", "now")

    def __init__(self, begin: SeveralState, spans: Sequence[Span], site: Site, passes: Mapping[str, PassOf]) -> None:
        self.now = Reference.to(begin)
        self._before = begin.own["taken"]
        self._spans = spans
        self._site = site.shard, site.num_shards
        self._passes = passes

    def details(self) -> Details:
        """Tell of each component, by name."""
        state: Any = self.now.get()
        n, taken, ended, parts = state.own["n"], state.own["taken"], state.own["ended"], state.parts
        shard, num_shards = self._site
        draws = next(draws for until, draws in self._spans if until > n)
        weights = dict(next(draws.onward(n * num_shards + shard)))
        found: list[Detail] = []
        for name, count in taken.items():
            number = self._passes[name](parts[name].get()) if name in self._passes else 0
            found += (
                Detail("served", count - self._before[name], name),
                Detail("taken", count, name, "total"),
                Detail("epoch", number, name, "now"),
                Detail("ended", int(name in ended), name, "total"),
                Detail("weight", weights.get(name, 0.0), name, "now"),
            )
        return tuple(found)
