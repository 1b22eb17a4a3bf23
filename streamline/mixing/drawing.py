"""One running of a mixture in one worker: a list of draws, and the items for them.

Of each component a list is at hand. They are served in the order of the draws, as far as they go; then another list
is waited for, of the component that is drawn next. Those whose items are there for the asking are asked before, so
that lists are long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamline.errors import ResumeError
from streamline.flow import LIST_ITEMS, Chunk, Demand, Flow, Lists, Site
from streamline.mixing.components import SeveralState
from streamline.mixing.draws import BLOCK, Draws, Numbers, Span
from streamline.mixing.told import PassOf, Told
from streamline.pace import Pace
from streamline.states import Joined, Json, Reference, State, States, Tree

__all__ = ["Drawing"]

Picks: TypeAlias = "npt.NDArray[np.intp]"
"""For each of some items, the number of its component."""

NOTHING: Picks = np.empty(0, np.intp)


class MixState(SeveralState):
    """Where a mixture stands."""

    __slots__ = ("draws",)

    def __init__(self, name: str, own: Tree, parts: Mapping[str, Reference], draws: tuple[Span, ...]) -> None:
        super().__init__(name, own, parts)
        self.draws = draws

    def own_until(self, later: Any) -> Tree:
        """Beyond those that were given at the opening, which stand until they are made, up to the later state."""
        n = self.own["n"]
        until = n if later is None else later.own["n"]
        drawn, before = [], n
        for at, (stop, draws) in enumerate(self.draws):
            given = at < len(self.draws) - 1
            stop = stop if given else until
            if stop > before:
                drawn.append({"until": stop, **draws.json()})
                before = stop
        return {**self.own, "drawn": drawn}


class Drawing:
    """One running of a mixture.

    Args:
      draws: from here on; what `own` says of items that will be read again comes first.
      stop: "first" or "all".
      own: the mixture's part of the state.
      flows: of the components, by name.
      passes: tells the pass that a component is in, of those that are repeated.

    Raises:
      ResumeError: items will be read again of a component that there is no more.
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
        self._hands = [_Hand(flow, int(own["taken"].get(one, 0))) for one, flow in flows.items()]
        self._number = {one: number for number, one in enumerate(flows)}
        self._spans: tuple[Span, ...] = (*((one["until"], Draws.of(one)) for one in own["drawn"]), (math.inf, draws))
        self._numbers = Numbers(site)
        for _, before in self._spans[:-1]:
            gone = sorted({one for one in before.names if one not in flows})
            if gone:
                raise ResumeError(
                    f"a stage behind {name!r} goes back to items of {', '.join(map(repr, gone))}, which is no "
                    "component any more: keep it, with weight 0, until a snapshot behind them"
                )
        self._wheel: _Wheel | None = None
        self._behind = self._made_behind()
        self._told = Told(self.state, self._spans, site, passes)

    @property
    def state(self) -> MixState:
        """The state behind what was served."""
        return _Drawn(self._behind, self._n, self._hands, NOTHING).behind(0)

    async def lists(self, demand: Demand) -> Lists[Any]:
        """Yield items until those that there is weight for have ended; or the first of them."""
        pace = Pace()
        for hand in self._hands:
            hand.flow.reader = demand.meter
        if demand.meter is not None:
            demand.meter.tells(self._told.details)
        while (wheel := self._turned()) is not None:
            picks, at = self._draw(wheel), 0
            while at < len(picks):
                most = min(demand.want, LIST_ITEMS)  # ahead of what is drawn
                drawn = picks[at : at + demand.want]
                counts = self._counts(drawn)
                if reach := await self._reach(drawn, counts, most):
                    at += reach
                    chunk = self._serve(drawn, counts) if reach == len(drawn) else self._serve_some(drawn[:reach])
                    self._told.now = chunk.behind
                    yield chunk
                    del chunk
                    await pace.breathe()
                    continue
                name, hand = list(self._number)[drawn[0]], self._hands[drawn[0]]
                if not await hand.pull(most):
                    self._ended |= {name}
                    self._wheel = None
                    self._behind = self._made_behind()
                    self._told.now = Reference.to(self.state)
                    yield Chunk((), (), self.state)
                    break
                if not hand.items:
                    yield Chunk((), (), self.state)

    def _weights(self) -> dict[str, float]:
        """Return the weights of what may be drawn now; none at the end.

        If all that has a weight has ended, those to which a later schedule gives one go on.
        """
        if self._stop == "first" and self._ended:
            return {}
        for weights in self._now.onward(self._served):
            left = {name: weight for name, weight in weights if weight and name in self._number}
            if left := {name: weight for name, weight in left.items() if name not in self._ended}:
                return left
        return {}

    @property
    def _now(self) -> Draws:
        return next(draws for until, draws in self._spans if until > self._n)

    @property
    def _served(self) -> int:
        """Items that all workers have served, as a strict merge takes them in turn."""
        return self._n * self._site.num_shards + self._site.shard

    def _turned(self) -> _Wheel | None:
        """Return what is drawn with from here on; None at the end."""
        wheel = self._wheel
        if wheel is None or self._n >= wheel.until:
            wheel = self._wheel = self._made_wheel()
        return wheel

    def _made_wheel(self) -> _Wheel | None:
        weights = self._weights()
        if not weights:
            return None
        numbers: Picks = np.array([self._number[name] for name in weights], np.intp)
        change = self._now.change(self._served) - self._site.shard
        until = min(next(until for until, _ in self._spans if until > self._n), -(-change // self._site.num_shards))
        return _Wheel(numbers, np.cumsum(list(weights.values())), self._now.seed, until)

    def _draw(self, wheel: _Wheel) -> Picks:
        """Return for the next items which component each comes from, by number."""
        count = int(min(BLOCK, wheel.until - self._n))
        numbers = self._numbers.of(wheel.seed, self._n, count) * wheel.bounds[-1]
        drawn: Picks = wheel.numbers[wheel.bounds[:-1].searchsorted(numbers, "right")]
        return drawn

    async def _reach(self, drawn: Picks, counts: Sequence[int], most: int) -> int:
        """Return how many of these draws can be served from what is at hand, and from what is there for the asking.

        Args:
          counts: of each component.
          most: items of one component to be at hand, if no more of it are drawn.
        """
        reach = len(drawn)
        for number, (hand, count) in enumerate(zip(self._hands, counts, strict=True)):
            if count > len(hand.items) and not await hand.fill(count, max(count, most)):
                reach = min(reach, int(np.flatnonzero(drawn == number)[len(hand.items)]))
        return reach

    def _counts(self, drawn: Picks) -> list[int]:
        counts: list[int] = np.bincount(drawn, minlength=len(self._hands)).tolist()
        return counts

    def _serve_some(self, drawn: Picks) -> Chunk[Any]:
        return self._serve(drawn, self._counts(drawn))

    def _serve(self, drawn: Picks, counts: Sequence[int]) -> Chunk[Any]:
        """Return items for draws that are all at hand, so many of each component."""
        column = _Drawn(self._behind, self._n, self._hands, drawn)
        nexts = [hand.items.pop for hand in self._hands]
        items = [nexts[pick]() for pick in drawn.tolist()]
        for hand, count in zip(self._hands, counts, strict=True):
            hand.gave(count)
        self._n += len(drawn)
        return Chunk(items, column)

    def _made_behind(self) -> _Behind:
        before = {name: self._hands[number].before for name, number in self._number.items()}
        return _Behind(self._name, tuple(sorted(self._ended)), self._spans, before)


class _Wheel(NamedTuple):
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


class _Hand:
    """What is at hand of one component.

    Attributes:
      before: items of it that were served before this running.
      items: the next one last. One that was served is the reader's: nothing here refers to it any more.
      served: items of it that were served in this running.
      ground: what its states are made of, see `_Ground`.
    """

    __slots__ = ("_after", "_lists", "before", "flow", "ground", "items", "served")

    def __init__(self, flow: Flow[Any], before: int) -> None:
        self.flow, self.before, self.served = flow, before, 0
        self.items: list[Any] = []
        self.ground: _Ground = (0, Reference.to(flow.state), ())
        self._lists: list[tuple[int, States]] = []
        self._after: State | None = None

    def gave(self, count: int) -> None:
        """Take note that `count` items were served."""
        self.served += count
        if self._after is not None and not self.items:
            self.ground = (self.served, Reference.to(self._after), ())
            self._after = None

    async def fill(self, count: int, most: int) -> bool:
        """Get what is there for the asking, until there are `count` items at hand; say whether there are.

        Whatever has to be waited for, or calls a function of the user's, is asked for when it is drawn next and not
        before: no item waits for another one that comes later.
        """
        while len(self.items) < count and self.flow.at_once:
            try:
                if not await self.pull(most):
                    break
            except Exception:  # it comes again when its item is due
                break
        return len(self.items) >= count

    async def pull(self, most: int) -> bool:
        """Get more items, so that there are up to `most`, or progress; False at the end."""
        chunk = await self.flow.pull(most - len(self.items))
        if chunk is None:
            if not self.items:
                self.ground = (self.served, Reference.to(self.flow.state), ())
            return False
        end = self.served + len(self.items)
        if chunk.items:
            part = part_of(self.ground, self.served)
            self._lists = [one for one, after in pairwise([*self._lists, (end, ())]) if after[0] > self.served]
            self._lists.append((end, chunk.states))
            column = Joined()
            for start, states in self._lists:
                column.add(start, states)
            self.items = [*reversed(chunk.items), *self.items]
            self.ground = (self.served, part, column)
            self._after = chunk.after
        elif chunk.after is not None and self.items:
            self._after = chunk.after
        elif chunk.after is not None:
            self.ground = (self.served, Reference.to(chunk.after), ())
        return True


_Ground: TypeAlias = tuple[int, Reference, States]
"""A number of items served, the component's state behind them, and the states behind the items that follow, by the
number of items served before each."""


def part_of(ground: _Ground, served: int) -> Reference:
    """Return a component's state behind so many items served."""
    floor, part, column = ground
    return part if served == floor else Reference(column, served - 1)


class _Behind:
    """Makes states; holds nothing that runs, so that columns can be sent.

    Args:
      before: items that were served of each component before this running.
    """

    __slots__ = ("_before", "_ended", "_name", "_spans")

    def __init__(self, name: str, ended: tuple[str, ...], spans: tuple[Span, ...], before: Mapping[str, int]) -> None:
        self._name, self._ended, self._spans, self._before = name, ended, spans, before

    def __call__(self, n: int, served: Sequence[int], grounds: Sequence[_Ground]) -> MixState:
        taken = {name: before + more for (name, before), more in zip(self._before.items(), served, strict=True)}
        parts = {name: part_of(*one) for name, one in zip(taken, zip(grounds, served, strict=True), strict=True)}
        own = {"n": n, "ended": list(self._ended), "taken": taken}
        return MixState(self._name, own, parts, tuple(span for span in self._spans if span[0] > n))


class _Drawn:
    """The states behind the items of one list: made of where the components stood before it, and of its draws."""

    __slots__ = ("_behind", "_drawn", "_grounds", "_n", "_served")

    def __init__(self, behind: _Behind, n: int, hands: Sequence[_Hand], drawn: Picks) -> None:
        self._behind, self._n, self._drawn = behind, n, drawn
        self._grounds = [hand.ground for hand in hands]
        self._served = [hand.served for hand in hands]

    def __getitem__(self, index: int, /) -> State:
        return self.behind(index + 1)

    def behind(self, count: int) -> MixState:
        """Return the state behind so many items of the list."""
        counts = np.bincount(self._drawn[:count], minlength=len(self._served)).tolist()
        served = [before + more for before, more in zip(self._served, counts, strict=True)]
        return self._behind(self._n + count, served, self._grounds)
