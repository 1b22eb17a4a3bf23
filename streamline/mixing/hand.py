"""What is at hand of one component of a mixture, and where the component stands behind each item of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

from streamline.core.flow import Flow
from streamline.core.state import Joined, Reference, State, States

__all__ = ["Ground", "Hand", "part_of"]


Ground: TypeAlias = tuple[int, Reference, States]
"""A number of items served, the component's state behind them, and the states behind the items that follow, by the
number of items served before each."""


class Hand:
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
