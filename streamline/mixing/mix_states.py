"""Where a mixture stands, and the states behind the items of one of its lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamline.core.state import Reference, State, Tree
from streamline.mixing.components import SeveralState
from streamline.mixing.draws import Span
from streamline.mixing.hand import Ground, Hand, part_of

__all__ = ["Behind", "Drawn", "Ended", "MixState", "Pass", "Picks"]


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
        of_pass: Pass,
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
class Pass:
    """A pass of a repeated mixture.

    Attributes:
      epoch: as its site has it.
      drawn_by: weights, seed, end and components.
      again: whether a stage behind stood in a later one when this was opened, and goes back to here.
    """

    epoch: tuple[int, ...]
    drawn_by: Tree
    again: bool


class Behind:
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
        of_pass: Pass,
    ) -> None:
        self._name, self._ended, self._spans, self._before = name, ended, spans, before
        self._over, self._end, self._of_pass = over, end, of_pass

    def __call__(self, n: int, served: Sequence[int], grounds: Sequence[Ground]) -> MixState:
        taken = {name: before + more for (name, before), more in zip(self._before.items(), served, strict=True)}
        parts = {name: part_of(*one) for name, one in zip(taken, zip(grounds, served, strict=True), strict=True)}
        own = {"n": n, "ended": list(self._ended), "taken": taken}
        spans = tuple(span for span in self._spans if span[0] > n)
        return MixState(self._name, own, parts, spans, self._over, self._end, self._of_pass)


class Drawn:
    """The states behind the items of one list: made of where the components stood before it, and of its draws."""

    __slots__ = ("_behind", "_drawn", "_grounds", "_n", "_served")

    def __init__(self, behind: Behind, n: int, hands: Sequence[Hand], drawn: Picks) -> None:
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
