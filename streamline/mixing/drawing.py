"""One running of a mixture in one worker: a list of draws, and the items for them.

Of each component a list is at hand. They are served in the order of the draws, as far as they go; then another list
is waited for, of the component that is drawn next. Those whose items are there for the asking are asked before, so
that lists are long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

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

Ended: TypeAlias = tuple[str, ...]
"""Names of components that have ended, in order."""

NOTHING: Picks = np.empty(0, np.intp)
EMPTY = iter(())


class MixState(SeveralState):
    """Where a mixture stands.

    Attributes:
      over: what had ended when a stage behind came to the mixture's end, if that is ahead and will be read again.
      end: what has ended, if this is the mixture's end.
      of_pass: of the pass that this is in.
    """

    __slots__ = ("draws", "end", "of_pass", "over")

    def __init__(
        self,
        name: str,
        own: Tree,
        parts: Mapping[str, Reference],
        draws: tuple[Span, ...],
        over: Ended | None,
        end: Ended | None,
        of_pass: _Pass,
    ) -> None:
        super().__init__(name, own, parts)
        self.draws, self.over, self.end, self.of_pass = draws, over, end, of_pass

    def own_until(self, later: Any) -> Tree:
        """Beyond those that were given at the opening, which stand until they are made, up to the later state.

        If that is in a later pass, all that is between is drawn anew: by the same, or a resume is refused.
        """
        elsewhere = later is not None and later.of_pass.epoch != self.of_pass.epoch
        passes = self.of_pass.drawn_by if elsewhere or self.of_pass.again else None
        later = None if elsewhere else later
        over = self.over if later is None else later.end if later.over is None else later.over
        n = self.own["n"]
        until = n if later is None else later.own["n"]
        drawn, before = [], n
        for at, (stop, draws) in enumerate(self.draws):
            given = at < len(self.draws) - 1
            stop = stop if given else until
            if stop > before:
                drawn.append({"until": stop, **draws.json()})
                before = stop
        return {**self.own, "drawn": drawn, "over": None if over is None else list(over), "passes": passes}


@dataclass(frozen=True)
class _Pass:
    """A pass of a repeated mixture.

    Attributes:
      epoch: as its site has it.
      drawn_by: weights, seed, end and components.
      again: whether a stage behind stood in a later one when this was opened, and goes back to here.
    """

    epoch: tuple[int, ...]
    drawn_by: Tree
    again: bool


class Drawing:
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
        self._hands = [_Hand(flow, int(own["taken"].get(one, 0))) for one, flow in flows.items()]
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
        if self._over is not None and self._left(draws, self._again, self._over, stop):
            raise ResumeError(
                f"a stage behind {name!r} goes back to items before its end, where there would be more now: keep "
                "components, stop= and weights of 0 as they were until a snapshot behind them, or begin anew"
            )
        then, drawn_by = own.get("passes"), {**draws.json(), "stop": stop, "of": sorted(flows)}
        self._pass = _Pass(site.epoch, drawn_by, then is not None)
        if then not in (None, drawn_by):
            raise ResumeError(
                f"a stage behind {name!r} goes back to an earlier pass of it: keep weights, seed, stop= and components "
                "as they were until a snapshot behind that pass"
            )
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
        while weights := self._weights():
            picks, at = self._draw(weights), 0
            while at < len(picks):
                most = min(demand.want, LIST_ITEMS)
                drawn = picks[at : at + most]
                if count := await self._reach(drawn, most):
                    at += count
                    chunk = self._serve(drawn[:count])
                    self._told.now = chunk.behind
                    yield chunk
                    del chunk
                    await pace.breathe()
                    continue
                name, hand = list(self._number)[drawn[0]], self._hands[drawn[0]]
                if not await hand.pull(most):
                    self._ended |= {name}
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

    def _draw(self, weights: Mapping[str, float]) -> Picks:
        """Return for the next items which component each comes from, by number."""
        change = self._now.change(self._served(self._n)) - self._site.shard
        room = min(next(until for until, _ in self._spans if until > self._n), -(-change // self._site.num_shards))
        count = int(min(BLOCK, room - self._n))
        bounds = np.cumsum(list(weights.values()))
        numbers = self._numbers.of(self._now.seed, self._n, count) * bounds[-1]
        picks = bounds[:-1].searchsorted(numbers, "right")  # a number may have been rounded up to the last bound
        drawn: Picks = np.array([self._number[name] for name in weights])[picks]
        return drawn

    async def _reach(self, drawn: Picks, most: int) -> int:
        """Return how many of these draws can be served from what is at hand, and from what is there for the asking.

        Whatever has to be waited for, or calls a function of the user's, is asked for when it is drawn next and not
        before: no item waits for another one that comes later.
        """
        reach = len(drawn)
        for number, count in enumerate(self._counts(drawn)):
            hand = self._hands[number]
            while len(hand.items) < count and hand.flow.at_once:
                try:
                    if not await hand.pull(most):
                        break
                except Exception:  # it comes again when its item is due
                    break
            if len(hand.items) < count:
                reach = min(reach, int(np.flatnonzero(drawn == number)[len(hand.items)]))
        return reach

    def _counts(self, drawn: Picks) -> list[int]:
        counts: list[int] = np.bincount(drawn, minlength=len(self._hands)).tolist()
        return counts

    def _serve(self, drawn: Picks) -> Chunk[Any]:
        """Return items for draws that are all at hand."""
        column = _Drawn(self._behind, self._n, self._hands, drawn)
        counts = self._counts(drawn)
        parts = [iter(hand.take(count)) if count else EMPTY for hand, count in zip(self._hands, counts, strict=True)]
        self._n += len(drawn)
        return Chunk([next(parts[pick]) for pick in drawn.tolist()], column)

    def _made_behind(self, *, at_end: bool = False) -> _Behind:
        before = {name: self._hands[number].before for name, number in self._number.items()}
        ended = tuple(sorted(self._ended))
        over, end = (None, ended) if at_end else (self._over, None)
        return _Behind(self._name, ended, self._spans, before, over, end, self._pass)


class _Hand:
    """What is at hand of one component.

    Attributes:
      before: items of it that were served before this running.
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

    def take(self, count: int) -> list[Any]:
        """Return the next `count` items; nothing here refers to them any more."""
        taken = self.items[:count]
        del self.items[:count]
        self.served += count
        if not self.items and self._after is not None:
            self.ground = (self.served, Reference.to(self._after), ())
            self._after = None
        return taken

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
            self.items.extend(chunk.items)
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
      over, end, of_pass: as those of a `MixState`.
    """

    __slots__ = ("_before", "_end", "_ended", "_name", "_of_pass", "_over", "_spans")

    def __init__(
        self,
        name: str,
        ended: Ended,
        spans: tuple[Span, ...],
        before: Mapping[str, int],
        over: Ended | None,
        end: Ended | None,
        of_pass: _Pass,
    ) -> None:
        self._name, self._ended, self._spans, self._before = name, ended, spans, before
        self._over, self._end, self._of_pass = over, end, of_pass

    def __call__(self, n: int, served: Sequence[int], grounds: Sequence[_Ground]) -> MixState:
        taken = {name: before + more for (name, before), more in zip(self._before.items(), served, strict=True)}
        parts = {name: part_of(*one) for name, one in zip(taken, zip(grounds, served, strict=True), strict=True)}
        own = {"n": n, "ended": list(self._ended), "taken": taken}
        spans = tuple(span for span in self._spans if span[0] > n)
        return MixState(self._name, own, parts, spans, self._over, self._end, self._of_pass)


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
