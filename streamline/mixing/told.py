"""What is counted of a mixture's components, in one worker: how much each gave, in which pass it is, and its weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamline.core.counters import Detail, Details
from streamline.core.flow import Site
from streamline.core.state import Reference, State, Tally
from streamline.mixing.components import SeveralState
from streamline.mixing.draws import Span
from streamline.plan import Plan
from streamline.sources.items import positions_of
from streamline.transforms.repeat import Repeat

__all__ = ["PassOf", "Told", "pass_of"]


PassOf = Callable[[State], int]


class Told:
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


def pass_of(plan: Plan, site: Site) -> PassOf | None:
    """Return what tells the pass over a component's data that its state is in, from 0 on; None: it isn't repeated.

    A repeat that acts on an index is arithmetic on the items taken there; the others say it in their state.
    """
    repeats = [stage for stage in (*plan.before, *plan.worker) if isinstance(stage, Repeat)]
    if not repeats:
        return None
    part, name = plan.part((0,)), plan.source.name
    index = part.index
    positions = None if index is None else positions_of(index, site.shard, site.num_shards, part)

    def found(state: State) -> int:
        tally = Tally()
        state.tally(tally)
        number = 0
        for stage in reversed(repeats):
            own: Any = tally.stands.get(stage.name)
            if own is not None:
                number = number * (stage.times or 1) + own["pass"]
        if index is None or index.passes == 1:
            return number
        at = max(0, tally.stands[name] - 1)
        position = site.shard + at * site.num_shards if positions is None else positions[at] if positions else 0
        return number * (index.passes or 1) + index.pass_of(position)

    return found
