"""The state of a mixture, and the buffers of its components.

A state is made when someone asks for it: out of what all states of a run have in common (`MixContext`), the number of
items served of each component, and each component's own states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from streamline.core.flow import Flow
from streamline.core.lazy_numpy import np
from streamline.core.state import Joined, Reference, State, States, Tree
from streamline.sources.composite import SeveralState
from streamline.sources.sampler import Span

if TYPE_CHECKING:
    import numpy.typing as npt

Ground: TypeAlias = tuple[int, Reference, States]
"""A number of items served, the component's state after them, and its states after the items that follow, by the number
of items served before each."""

Picks: TypeAlias = "npt.NDArray[np.intp]"
"""For each of some items, the number of its component."""

Ended: TypeAlias = tuple[str, ...]
"""Names of components that have ended, in order."""


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
      ended: the components that have ended.
      spans: how the items of this run are drawn.
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
