"""A mixture of pipelines: item n comes from the component that is drawn for (seed, n), by weights.

Each component has a buffer. Draws are served in order, as far as the buffers go; then the component that is drawn next
is awaited. Before, what other components give without waiting is pulled, so that lists are long.

State: n, and the state of each component. Weights belong to no state, so a resume may change them. Where a downstream
stage goes back to an older state and must see the same items again, that state also says by which weights they were
drawn ("drawn"), which components had ended if it was the mixture's end ("over"), and by what all is drawn if the stage
was in a later pass ("passes").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from streamline.core.figures import Detail, Details
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.lazy_numpy import np
from streamline.core.pace import Pace
from streamline.core.state import Joined, Json, Reference, State, States, Tree
from streamline.core.state_types import Count, Unsigned
from streamline.errors import ResumeError
from streamline.sources.base import Part
from streamline.sources.composite import PassOf, Several, SeveralState, grown
from streamline.sources.sampler import BLOCK, Draws, Numbers, Span

if TYPE_CHECKING:
    import numpy.typing as npt

Ground: TypeAlias = tuple[int, Reference, States]
"""A number of items served, the component's state after them, and its states after the items that follow, by the number
of items served before each."""

Picks: TypeAlias = "npt.NDArray[np.intp]"
"""For each of some items, the number of its component."""

Ended: TypeAlias = tuple[str, ...]
"""Names of components that have ended, in order."""


class MixRun:
    """One run of a mixture in one worker.

    Args:
      draws: from here on; the items that `own` says will be read again come first.
      flows: of the components, by name.
      passes: the pass of a component, of those that are repeated.

    Raises:
      ResumeError: a downstream stage goes back to items of a component that is gone, to items before an end that is no
        longer one, or to an earlier pass by other weights.
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
        self._buffers = [ComponentBuffer(flow, int(own["taken"].get(one, 0))) for one, flow in flows.items()]
        self._number = {one: number for number, one in enumerate(flows)}
        self._spans: tuple[Span, ...] = (*((one["until"], Draws.of(one)) for one in own["drawn"]), (math.inf, draws))
        self._again: int = own["drawn"][-1]["until"] if own["drawn"] else self._n  # items before this one were drawn
        over = own.get("over")
        self._over: Ended | None = None if over is None else tuple(over)
        self._numbers = Numbers(site)
        self._table: _DrawTable | None = None
        then, drawn_by = own.get("passes"), {**draws.json(), "stop": stop, "of": sorted(flows)}
        self._pass = MixPass(site.epoch, drawn_by, then is not None)
        self._check_again(draws, then in (None, drawn_by))
        self._context = self._made_context()
        self._metrics = ComponentMetrics(self.state, self._spans, site, passes)

    def _check_again(self, draws: Draws, same_pass: bool) -> None:
        """Check that what a downstream stage reads again comes again."""
        after = f"a stage after {self._name!r} goes back to"
        for _, before in self._spans[:-1]:
            if gone := sorted(before.names - self._number.keys()):
                raise ResumeError(
                    f"{after} items of {', '.join(map(repr, gone))}, which is no component any more: keep it, with "
                    "weight 0, until a snapshot after them"
                )
        if self._over is not None and self._weights_left(draws, self._again, self._over, self._stop):
            raise ResumeError(
                f"{after} items before its end, where there would be more now: keep components, stop= and weights of 0 "
                "as they were until a snapshot after them, or begin anew"
            )
        if not same_pass:
            raise ResumeError(
                f"{after} an earlier pass of it: keep weights, seed, stop= and components as they were until a "
                "snapshot after that pass"
            )

    @property
    def state(self) -> MixState:
        """The state after what was served."""
        return MixedStates(self._context, self._n, self._buffers, np.empty(0, np.intp)).after(0)

    async def lists(self, context: StageContext) -> Lists[Any]:
        """Yield items until all components that have a weight have ended; or the first of them."""
        pace = Pace()
        for buffer in self._buffers:
            buffer.flow.reader = context.meter
        if context.meter is not None:
            context.meter.details_from(self._metrics.details)
        while (table := self._draw_table()) is not None:
            picks, at = self._draw(table), 0
            while at < len(picks):
                drawn = picks[at : at + context.max_items]
                counts = self._counts(drawn)
                if reach := await self._reach(drawn, counts, context.max_items):
                    at += reach
                    drawn, whole = drawn[:reach], reach == len(drawn)
                    chunk = self._serve(drawn, counts if whole else self._counts(drawn))
                    self._metrics.now = chunk.end_reference
                    yield chunk
                    del chunk
                    await pace.maybe_yield()
                    continue
                name, buffer = list(self._number)[drawn[0]], self._buffers[drawn[0]]
                if not await buffer.pull(context.max_items):
                    self._ended |= {name}
                    self._table = None
                    self._context = self._made_context()
                    yield self._progress()
                    break
                if not buffer.items:
                    yield self._progress()
        self._ended |= {name for name in self._over or () if name in self._number}
        self._context = self._made_context(at_end=True)
        yield self._progress()

    def _progress(self) -> Chunk[Any]:
        state = self.state
        self._metrics.now = Reference.to(state)
        return Chunk((), (), state)

    def _weights(self) -> dict[str, float]:
        """Return the weights of what may be drawn now; none at the end."""
        if self._n < self._again:
            return self._weights_left(self._now, self._n, self._ended, "all")  # they were drawn, whatever had ended
        return {} if self._over is not None else self._weights_left(self._now, self._n, self._ended, self._stop)

    def _weights_left(self, draws: Draws, n: int, ended: Collection[str], stop: str) -> dict[str, float]:
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
        """Items that all workers have served after n of this one, as a strict merge takes them in turn."""
        return n * self._site.num_shards + self._site.shard

    def _draw_table(self) -> _DrawTable | None:
        """Return what the next items are drawn with; None at the end."""
        table = self._table
        if table is not None and self._n < table.until:
            return table
        if not (weights := self._weights()):
            return None
        numbers: Picks = np.array([self._number[name] for name in weights], np.intp)
        change = self._now.change(self._served(self._n)) - self._site.shard
        until = min(next(until for until, _ in self._spans if until > self._n), -(-change // self._site.num_shards))
        self._table = _DrawTable(numbers, np.cumsum(list(weights.values())), self._now.seed, until)
        return self._table

    def _draw(self, table: _DrawTable) -> Picks:
        """Return for the next items which component each comes from, by number."""
        count = int(min(BLOCK, table.until - self._n))
        numbers = self._numbers.of(table.seed, self._n, count) * table.bounds[-1]
        drawn: Picks = table.numbers[table.bounds[:-1].searchsorted(numbers, "right")]
        return drawn

    async def _reach(self, drawn: Picks, counts: Sequence[int], most: int) -> int:
        """Return how many of these draws, so many of each component, can be served without waiting.

        Args:
          most: items of one component to buffer.
        """
        reach = len(drawn)
        for number, (buffer, count) in enumerate(zip(self._buffers, counts, strict=True)):
            if count > len(buffer.items) and not await buffer.fill(count, most):
                reach = min(reach, int(np.flatnonzero(drawn == number)[len(buffer.items)]))
        return reach

    def _counts(self, drawn: Picks) -> list[int]:
        counts: list[int] = np.bincount(drawn, minlength=len(self._buffers)).tolist()
        return counts

    def _serve(self, drawn: Picks, counts: Sequence[int]) -> Chunk[Any]:
        """Return the buffered items for these draws, so many of each component."""
        column = MixedStates(self._context, self._n, self._buffers, drawn)
        nexts = [buffer.items.pop for buffer in self._buffers]
        items = [nexts[pick]() for pick in drawn.tolist()]
        for buffer, count in zip(self._buffers, counts, strict=True):
            buffer.gave(count)
        self._n += len(drawn)
        return Chunk(items, column)

    def _made_context(self, *, at_end: bool = False) -> MixContext:
        before = {name: self._buffers[number].before for name, number in self._number.items()}
        ended = tuple(sorted(self._ended))
        over, end = (None, ended) if at_end else (self._over, None)
        return MixContext(self._name, ended, self._spans, before, over, end, self._pass)


class _DrawTable(NamedTuple):
    """What items are drawn with while the weights stay the same.

    Attributes:
      numbers: of the components that may be drawn.
      bounds: running sums of their weights: a component's numbers are below its bound, and not below the one before.
        One that was rounded up to the last bound is the last one's.
      until: the first item that is drawn with another table.
    """

    numbers: Picks
    bounds: npt.NDArray[np.float64]
    seed: int
    until: float


T = TypeVar("T")

Weight: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

Stop = Literal["first", "all"]


class DrawnUntil(msgspec.Struct):
    """By what items up to `until` were drawn, in a saved state: as `Draws.json` writes it."""

    seed: Unsigned
    weights: Annotated[list[tuple[Count, dict[str, Weight]]], msgspec.Meta(min_length=1)]
    until: Count


class Mixed(msgspec.Struct):
    """Its part of a saved state."""

    n: Count
    ended: list[str]
    taken: dict[str, Count]
    drawn: list[DrawnUntil]
    over: list[str] | None
    passes: dict[str, Any] | None
    of: dict[str, Tree]


@dataclass(frozen=True, kw_only=True)
class Mix(Several[T]):
    """Draws each item from one of its components. State: items drawn, components that have ended, where each stands."""

    kind: ClassVar[str] = "mix"
    state_type: ClassVar[Any] = Mixed

    draws: Draws
    stop: Stop = "all"

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
        weights = {name: " → ".join(f"{entry[name]:g}" for entry in schedule) for name, _ in self.components}
        return [(name, f"weight {weights[name]}, ", component.plan) for name, component in self.components]

    def drawn(self) -> Json:
        return {"draws": self.draws.json(), "stop": self.stop}

    def migrate_state(self, own: Json, listing: Json, now: Json) -> Json:
        found, known = super().migrate_state(own, listing, now), self._known_components(listing)
        more = {name for name, component in known.items() if grown(component, listing[name]["data"], now[name]["data"])}
        return {**found, "ended": [name for name in found["ended"] if name not in more]} if more else found

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        begin = {"n": 0, "ended": [], "taken": {}, "drawn": [], "over": None, "passes": None}
        own = begin if state is None else state[self.name]
        flows, context = self.flows(site, state), self.context(site, state)
        passes = {name: found for name, component in self.components if (found := component.pass_of(site)) is not None}
        run = MixRun(self.name, self.draws, self.stop, site, own, flows, passes)
        return ListsFlow(run.state, run.lists(context), context, *flows.values())

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        found = self.outputs(part, shard, num_shards)
        if self.stop == "first" and len(found) > 1:
            return math.inf if all(count == math.inf for count in found) else None
        return None if None in found else sum(count for count in found if count is not None)


class ComponentMetrics:
    """What the mixture's meter reports of each component in one worker: items, pass, weight.

    `now`, the state, is replaced once a list; all else is computed when the meter is read.
    """

    __slots__ = ("_before", "_passes", "_site", "_spans", "now")

    def __init__(self, begin: SeveralState, spans: Sequence[Span], site: Site, passes: Mapping[str, PassOf]) -> None:
        self.now = Reference.to(begin)
        self._before = begin.own["taken"]
        self._spans = spans
        self._site = site.shard, site.num_shards
        self._passes = passes

    def details(self) -> Details:
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


# States ---------------------------------------------------------------------------------------------------------------


class ComponentBuffer:
    """Items of one component that are there but not served yet.

    Attributes:
      before: its items that were served before this run.
      items: the next one last. A served one is the reader's: nothing here refers to it any more.
      served: its items that were served in this run.
      ground: what its states are made of.
    """

    __slots__ = ("_after", "_lists", "before", "flow", "ground", "items", "served")

    def __init__(self, flow: Flow[Any], before: int) -> None:
        self.flow, self.before, self.served = flow, before, 0
        self.items: list[Any] = []
        self.ground: Ground = (0, Reference.to(flow.state), ())
        self._lists: list[tuple[int, States]] = []
        self._after: State | None = None

    def gave(self, count: int) -> None:
        self.served += count
        if self._after is not None and not self.items:
            self._rest_at(self._after)

    async def fill(self, count: int, most: int) -> bool:
        """Pull what comes without waiting, until there are `count` items; return whether there are.

        Anything that waits or calls a user's function is pulled when it is drawn: no item waits for a later one.
        """
        while len(self.items) < count and self.flow.is_ready:
            try:
                if not await self.pull(most):
                    break
            except Exception:  # it is raised again when its item is due
                break
        return len(self.items) >= count

    async def pull(self, most: int) -> bool:
        """Pull more items, up to `most` in all, or progress; False at the end."""
        chunk = await self.flow.pull(most - len(self.items))
        if chunk is None:
            if not self.items:
                self._rest_at(self.flow.state)
            return False
        end = self.served + len(self.items)
        if chunk.items:
            part = _part_of(self.ground, self.served)
            self._lists = [one for one, after in pairwise([*self._lists, (end, ())]) if after[0] > self.served]
            self._lists.append((end, chunk.states))
            column = Joined()
            for start, states in self._lists:
                column.add(start, states)
            self.items = [*reversed(chunk.items), *self.items]
            self.ground = (self.served, part, column)
            self._after = chunk.progress
        elif chunk.progress is not None and self.items:
            self._after = chunk.progress
        elif chunk.progress is not None:
            self._rest_at(chunk.progress)
        return True

    def _rest_at(self, state: State) -> None:
        """All items are served, and the component stands at this state."""
        self.ground, self._after = (self.served, Reference.to(state), ()), None


def _part_of(ground: Ground, served: int) -> Reference:
    """Return a component's state after so many items served."""
    floor, part, column = ground
    return part if served == floor else Reference(column, served - 1)


@dataclass(frozen=True)
class MixPass:
    """A pass of a repeated mixture.

    Attributes:
      epoch: as its site has it.
      drawn_by: weights, seed, end and components.
      again: a downstream stage was in a later pass when this one was opened, and goes back to it.
    """

    epoch: tuple[int, ...]
    drawn_by: Tree
    again: bool


@dataclass(frozen=True)
class MixContext:
    """What states have in common until another component ends. Holds nothing that runs: columns of states are pickled.

    Attributes:
      before: items served of each component before this run.
      over: which components had ended when a downstream stage reached the mixture's end, if that is later than here and
        will be read again.
      end: which components have ended, if this is the mixture's end.
    """

    name: str
    ended: Ended
    spans: tuple[Span, ...]
    before: Mapping[str, int]
    over: Ended | None
    end: Ended | None
    of_pass: MixPass


class MixState(SeveralState):
    """The state of a mixture after `n` items."""

    __slots__ = ("context",)

    def __init__(self, context: MixContext, n: int, served: Sequence[int], grounds: Sequence[Ground]) -> None:
        taken = {name: before + more for (name, before), more in zip(context.before.items(), served, strict=True)}
        parts = {name: _part_of(*one) for name, one in zip(taken, zip(grounds, served, strict=True), strict=True)}
        super().__init__(context.name, {"n": n, "ended": list(context.ended), "taken": taken}, parts)
        self.context = context

    def own_until(self, later: Any) -> Tree:
        """Add how the items up to the later state were drawn, and those that the opening's state says were.

        If the later state is in another pass, all items between are drawn anew: by the same, or a resume is refused.
        """
        own, elsewhere = self.context, later is not None and later.context.of_pass.epoch != self.context.of_pass.epoch
        passes = own.of_pass.drawn_by if elsewhere or own.of_pass.again else None
        later = None if elsewhere else later
        over = own.over if later is None else later.context.end if later.context.over is None else later.context.over
        before = self.own["n"]
        until = before if later is None else later.own["n"]
        drawn = []
        for stop, draws in (*own.spans[:-1], (until, own.spans[-1][1])):
            if stop > before:
                drawn.append({"until": stop, **draws.json()})
                before = stop
        return {**self.own, "drawn": drawn, "over": None if over is None else list(over), "passes": passes}


class MixedStates:
    """The states after the items of one list: made of the components' states before it, and of its draws."""

    __slots__ = ("_context", "_drawn", "_grounds", "_n", "_served")

    def __init__(self, context: MixContext, n: int, buffers: Sequence[ComponentBuffer], drawn: Picks) -> None:
        self._context, self._n, self._drawn = context, n, drawn
        self._grounds = [buffer.ground for buffer in buffers]
        self._served = [buffer.served for buffer in buffers]

    def __getitem__(self, index: int, /) -> State:
        return self.after(index + 1)

    def after(self, count: int) -> MixState:
        """Return the state after so many items of the list."""
        counts = np.bincount(self._drawn[:count], minlength=len(self._served)).tolist()
        served = [before + more for before, more in zip(self._served, counts, strict=True)]
        return MixState(self._context, self._n + count, served, self._grounds)
