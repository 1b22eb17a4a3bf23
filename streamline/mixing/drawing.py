"""One running of a mixture in one worker: a list of draws, and the items for them.

Of each component a list is at hand. They are served in the order of the draws, as far as they go; then another list
is waited for, of the component that is drawn next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamline.errors import ResumeError
from streamline.flow import LIST_ITEMS, Chunk, Demand, Flow, Lists, Site
from streamline.mixing.components import SeveralState
from streamline.mixing.draws import BLOCK, Draws, Numbers, Span
from streamline.mixing.told import PassOf, Stand, Told
from streamline.pace import Pace
from streamline.states import Json, Reference, State, States, Tree

__all__ = ["Drawing"]


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
      passes: tells in which pass they are, of those that are repeated.

    Attributes:
      told: what is counted.

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
        self._name, self._stop, self._site, self._flows = name, stop, site, flows
        self._n: int = own["n"]
        self._ended = frozenset(one for one in own["ended"] if one in flows)
        self._taken = {one: int(own["taken"].get(one, 0)) for one in flows}
        self._spans: tuple[Span, ...] = (*((one["until"], Draws.of(one)) for one in own["drawn"]), (math.inf, draws))
        self._parts = {one: Reference.to(flow.state) for one, flow in flows.items()}
        self._at_hand: dict[str, _Hand] = {}
        self._numbers = Numbers(site)
        self.told = Told(self._stand, self._spans, site, passes)
        for _, before in self._spans[:-1]:
            gone = sorted({one for one in before.names if one not in flows})
            if gone:
                raise ResumeError(
                    f"a stage behind {name!r} goes back to items of {', '.join(map(repr, gone))}, which is no "
                    "component any more: keep it, with weight 0, until a snapshot behind them"
                )

    @property
    def state(self) -> State:
        """The state behind what was served."""
        return self._behind(self._n, self._taken, self._parts)

    @property
    def _stand(self) -> Stand:
        return Stand(self._n, self._taken, self._parts, self._ended)

    async def lists(self, demand: Demand) -> Lists[Any]:
        """Yield items until those that there is weight for have ended; or the first of them."""
        pace = Pace()
        for flow in self._flows.values():
            flow.reader = demand.meter
        if demand.meter is not None:
            demand.meter.tells(self.told.details)
        while weights := self._weights():
            names, picks = self._draw(weights)
            at = 0
            while at < len(picks):
                name = names[picks[at]]
                if name in self._at_hand:
                    chunk = self._serve(names, picks, at, min(demand.want, LIST_ITEMS))
                    at += len(chunk.items)
                    self.told.now = self._stand
                    yield chunk
                    del chunk
                    await pace.breathe()
                elif (ahead := await self._flows[name].pull(min(demand.want, LIST_ITEMS))) is None:
                    self._ended |= {name}
                    self._parts[name] = Reference.to(self._flows[name].state)
                    self.told.now = self._stand
                    yield Chunk((), (), self.state)
                    break
                elif ahead.items:
                    self._at_hand[name] = _Hand(ahead)
                elif ahead.after is not None:
                    self._parts[name] = Reference.to(ahead.after)
                    yield Chunk((), (), self.state)

    def _weights(self) -> dict[str, float]:
        """Return the weights of what may be drawn now; none at the end.

        If all that has a weight has ended, those to which a later schedule gives one go on.
        """
        if self._stop == "first" and self._ended:
            return {}
        for weights in self._now.onward(self._served):
            left = {name: weight for name, weight in weights if weight and name in self._flows}
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

    def _draw(self, weights: Mapping[str, float]) -> tuple[list[str], list[int]]:
        """Return the components by name, and for the next items which of these it is."""
        change = self._now.change(self._served) - self._site.shard
        room = min(next(until for until, _ in self._spans if until > self._n), -(-change // self._site.num_shards))
        count = int(min(BLOCK, room - self._n))
        bounds = np.cumsum(list(weights.values()))
        numbers = self._numbers.of(self._now.seed, self._n, count) * bounds[-1]
        picks: list[int] = np.minimum(np.searchsorted(bounds, numbers, side="right"), len(bounds) - 1).tolist()
        return list(weights), picks

    def _serve(self, names: Sequence[str], drawn: Sequence[int], at: int, most: int) -> Chunk[Any]:
        """Return items for the draws from `at` on, as far as they are at hand."""
        hands = [self._at_hand.get(name) for name in names]
        left = [0 if hand is None else len(hand) for hand in hands]
        picks = drawn[at : at + most]
        counts = Counter(picks)
        if any(left[pick] < count for pick, count in counts.items()):
            picks = picks[: _reach(picks, left)]
            counts = Counter(picks)
        rest = [iter(()) if hand is None else hand.rest for hand in hands]
        items = [next(rest[pick]) for pick in picks]
        columns = {name: (hand.states, hand.start) for name, hand in zip(names, hands, strict=True) if hand is not None}
        column = _Drawn(self._behind, self._n, self._taken, self._parts, names, picks, columns)
        taken, parts = dict(self._taken), dict(self._parts)
        for pick, count in counts.items():
            name, hand = names[pick], hands[pick]
            assert hand is not None
            taken[name] += count
            parts[name] = hand.take(count)
            if not len(hand):
                del self._at_hand[name]
        self._n, self._taken, self._parts = self._n + len(picks), taken, parts
        return Chunk(items, column)

    @property
    def _behind(self) -> _Behind:
        return _Behind(self._name, tuple(sorted(self._ended)), self._spans)


def _reach(picks: Sequence[int], left: list[int]) -> int:
    """Return how many of the draws can be served, if there is so much left of each component."""
    for at, pick in enumerate(picks):
        if not left[pick]:
            return at
        left[pick] -= 1
    return len(picks)


class _Hand:
    """Items of one component that came together."""

    __slots__ = ("_count", "after", "rest", "start", "states")

    def __init__(self, chunk: Chunk[Any]) -> None:
        self.rest, self._count = iter(chunk.items), len(chunk.items)
        self.states, self.after, self.start = chunk.states, chunk.after, 0

    def __len__(self) -> int:
        return self._count - self.start

    def take(self, count: int) -> Reference:
        """Let `count` items go, and return the component's state behind them."""
        self.start += count
        if not len(self) and self.after is not None:
            return Reference.to(self.after)
        return Reference(self.states, self.start - 1)


class _Behind:
    """Makes states; holds nothing that runs, so that columns can be sent."""

    __slots__ = ("_ended", "_name", "_spans")

    def __init__(self, name: str, ended: tuple[str, ...], spans: tuple[Span, ...]) -> None:
        self._name, self._ended, self._spans = name, ended, spans

    def __call__(self, n: int, taken: Mapping[str, int], parts: Mapping[str, Reference]) -> State:
        own = {"n": n, "ended": list(self._ended), "taken": dict(taken)}
        return MixState(self._name, own, dict(parts), tuple(span for span in self._spans if span[0] > n))


class _Drawn:
    """The states behind the items of one list."""

    __slots__ = ("_behind", "_columns", "_n", "_names", "_parts", "_picks", "_taken")

    def __init__(
        self,
        behind: _Behind,
        n: int,
        taken: Mapping[str, int],
        parts: Mapping[str, Reference],
        names: Sequence[str],
        picks: Sequence[int],
        columns: Mapping[str, tuple[States, int]],
    ) -> None:
        self._behind, self._n, self._taken, self._parts = behind, n, taken, parts
        self._names, self._picks, self._columns = names, picks, columns

    def __getitem__(self, index: int, /) -> State:
        taken, parts = dict(self._taken), dict(self._parts)
        for pick, count in Counter(self._picks[: index + 1]).items():
            name = self._names[pick]
            states, start = self._columns[name]
            taken[name] += count
            parts[name] = Reference(states, start + count - 1)
        return self._behind(self._n + index + 1, taken, parts)
