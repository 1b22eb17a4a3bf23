"""Where a mixture stands, and the states behind the items of one of its lists.

What is at hand of one component of a mixture, and where the component stands behind each item of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamline.core.flow import Flow
from streamline.core.state import Joined, Reference, State, States, Tree
from streamline.sources.composite import SeveralState
from streamline.sources.sampler import Span

__all__ = [
    "ComponentBuffer",
    "Ended",
    "Ground",
    "MixPass",
    "MixState",
    "MixStateFactory",
    "MixedStates",
    "Picks",
    "part_of",
]


Ground: TypeAlias = tuple[int, Reference, States]
"""A number of items served, the component's state behind them, and the states behind the items that follow, by the
number of items served before each."""


class ComponentBuffer:
    """What is at hand of one component.

    Attributes:
      before: items of it that were served before this running.
      items: the next one last. One that was served is the reader's: nothing here refers to it any more.
      served: items of it that were served in this running.
      ground: what its states are made of, see `Ground`.
    """

    __slots__ = ("_after", "_lists", "before", "flow", "ground", "items", "served")

    def __init__(self, flow: Flow[Any], before: int) -> None:
        self.flow, self.before, self.served = flow, before, 0
        self.items: list[Any] = []
        self.ground: Ground = (0, Reference.to(flow.state), ())
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


def part_of(ground: Ground, served: int) -> Reference:
    """Return a component's state behind so many items served."""
    floor, part, column = ground
    return part if served == floor else Reference(column, served - 1)


Picks: TypeAlias = "npt.NDArray[np.intp]"
"""For each of some items, the number of its component."""


Ended: TypeAlias = tuple[str, ...]
"""Names of components that have ended, in order."""


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
        of_pass: MixPass,
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
class MixPass:
    """A pass of a repeated mixture.

    Attributes:
      epoch: as its site has it.
      drawn_by: weights, seed, end and components.
      again: whether a stage behind stood in a later one when this was opened, and goes back to here.
    """

    epoch: tuple[int, ...]
    drawn_by: Tree
    again: bool


class MixStateFactory:
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
        of_pass: MixPass,
    ) -> None:
        self._name, self._ended, self._spans, self._before = name, ended, spans, before
        self._over, self._end, self._of_pass = over, end, of_pass

    def __call__(self, n: int, served: Sequence[int], grounds: Sequence[Ground]) -> MixState:
        taken = {name: before + more for (name, before), more in zip(self._before.items(), served, strict=True)}
        parts = {name: part_of(*one) for name, one in zip(taken, zip(grounds, served, strict=True), strict=True)}
        own = {"n": n, "ended": list(self._ended), "taken": taken}
        spans = tuple(span for span in self._spans if span[0] > n)
        return MixState(self._name, own, parts, spans, self._over, self._end, self._of_pass)


class MixedStates:
    """The states behind the items of one list: made of where the components stood before it, and of its draws."""

    __slots__ = ("_behind", "_drawn", "_grounds", "_n", "_served")

    def __init__(self, behind: MixStateFactory, n: int, hands: Sequence[ComponentBuffer], drawn: Picks) -> None:
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
