"""One cycle of a `.regenerate`: what was drawn, in which order it is served, and the states of what was served.

A `Cycle` has the items, or the rows of a block form; a `Place` is what the states need to know of it, and holds none of
them, so that a state which somebody keeps never keeps a cycle in memory. Both cross to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from streamline.caching.rows import Rows
from streamline.core.flow import Site
from streamline.core.state import Json, Over, Since, State, Tally, Tree

__all__ = ["Cycle", "Held", "Kept", "Names", "Place", "Served", "drawn_own", "order_of"]


Order: TypeAlias = "npt.NDArray[np.intp]"


Held: TypeAlias = "list[Any] | Rows"


KIND = 0x7E6E
"""Apart from a shuffle's: one behind the other, with the same seed, they must not undo one another."""


def order_of(length: int, seed: int | None, site: Site, cycle: int, serving: int) -> Order:
    """Return the order of a serving of a cycle: by (seed, epoch, shard, cycle, serving); no seed: as drawn."""
    if seed is None:
        return np.arange(length)
    entropy = np.random.SeedSequence([KIND, seed, site.num_shards, site.shard, cycle, serving, *site.epoch])
    return np.random.Generator(np.random.PCG64(entropy)).permutation(length)


@dataclass(frozen=True)
class Names:
    """How the files of one drawing are called, so that a state can tell those between two cycles.

    Attributes:
      whose: how they begin.
      token: random: another drawing overwrites nothing.
      first: the cycle that `given[0]` holds; cycles behind the given ones were written by this drawing.
      given: files that the state had at which it began. What is known of the upstream is its state behind the last.
    """

    whose: str
    token: str
    first: int
    given: tuple[str, ...] = ()

    @property
    def given_to(self) -> int:
        """The first cycle that this drawing wrote itself."""
        return self.first + len(self.given)

    def of(self, cycle: int) -> str | None:
        """Return the file of a cycle; None: it was written by an earlier drawing."""
        if cycle < self.first:
            return None
        if cycle < self.given_to:
            return self.given[cycle - self.first]
        return f"{self.whose}.cycle-{cycle}.{self.token}.cycle"


@dataclass(eq=False, kw_only=True)
class Place:
    """Where a cycle lies in its upstream, and how it is served.

    Attributes:
      number: of the cycle, from 0.
      begin: the upstream's state at its beginning, a mark; `skip` rows of what comes then were the cycle's before.
      end: the upstream's state behind it; where the last block wasn't used up, the one before that block, of which
        `used` rows are its own.
      now: the upstream's state behind all that was read for it.
      of: items of the cycle, or rows; 0: there is no cycle yet, or its file wasn't read yet.
      outputs: of one serving.
      seed: None: in the order in which they came.
      reuse: servings.
      epoch: in which it is served.
      file: where it is kept; None: it isn't, a resume draws it again.
      names: of the files; None: there are none.
    """

    number: int
    epoch: tuple[int, ...]
    begin: State
    end: State
    now: State
    skip: int = 0
    used: int = 0
    of: int = 0
    outputs: int = 0
    seed: int | None = None
    reuse: int = 1
    file: str | None = None
    names: Names | None = None

    @property
    def total(self) -> int:
        """Outputs of all servings."""
        return self.outputs * self.reuse

    def state(self, name: str, served: int) -> State:
        """Return the state of the stage called `name` behind so many outputs of this cycle."""
        if self.file is not None:
            return Kept(name, self, served)
        if served == self.total:
            behind = self.end if not self.used else _Serving(self.end, self.now)
            return Over(name, drawn_own(self.number + 1, skip=self.used), behind)
        own = drawn_own(self.number, served, self.of, self.seed, self.reuse, self.skip)
        return Over(name, own, _Serving(self.begin, self.now))


def drawn_own(
    cycle: int, served: int = 0, of: int = 0, seed: int | None = None, reuse: int = 1, skip: int = 0
) -> dict[str, Json]:
    """Return the stage's own part of a state from which the cycle is drawn again."""
    own = {"cycle": cycle, "served": served, "of": of, "seed": seed, "reuse": reuse}
    return {**own, "skip": skip} if skip else own


class _Serving(Since):
    """Inside a cycle: what was skipped in it counts when it is served."""

    __slots__ = ()

    def tally(self, found: Tally) -> None:
        self.mark.tally(found)


class Kept(Over):
    """Behind some outputs of a cycle that is in a file: the upstream's part is its state behind what is in files.

    A flow that goes back to here from a later cycle finds the files of all that lie between.
    """

    __slots__ = ("_place", "_served")

    def __init__(self, name: str, place: Place, served: int) -> None:
        super().__init__(name, None, place.now)
        self._place = place
        self._served = served

    def json(self, until: State | None = None) -> Tree:
        place, last = self._place, (self if until is None else cast(Kept, until.latest))._place
        number, served = place.number, self._served
        if place.file is None or (served == place.total and not place.used and place.of):
            number, served = number + 1, 0
        assert place.names is not None
        assert last.names is not None
        between = range(number, max(last.number, last.names.given_to - 1) + 1)
        files = [last.names.of(cycle) or place.names.of(cycle) for cycle in between]
        tree = last.now.json()
        tree[self.name] = {
            "cycle": number,
            "served": served,
            "epoch": list(place.epoch),
            "files": list(filter(None, files)),
        }
        return tree


class Cycle:
    """What was drawn, and its place."""

    def __init__(self, place: Place, held: Held) -> None:
        self.place = place
        self.held = held
        self._served: tuple[int, Order] | None = None
        self._items: npt.NDArray[np.object_] | None = None

    def outputs(self, first: int, most: int, site: Site) -> Sequence[Any]:
        """Return up to `most` outputs from number `first` on, of one serving."""
        place, held = self.place, self.held
        serving, start = divmod(first, place.outputs)
        stop = min(place.outputs, start + most)
        if isinstance(held, list) and place.seed is None:
            return held[start:stop]
        if self._served is None or self._served[0] != serving:
            self._served = serving, order_of(place.of, place.seed, site, place.number, serving)
        order = self._served[1]
        if isinstance(held, Rows):
            return [held.block(order, number) for number in range(start, stop)]
        if self._items is None:  # references that NumPy gathers, three times as fast as a list's
            self._items, self.held = np.fromiter(held, object, len(held)), []
        picked: list[Any] = self._items.take(order[start:stop]).tolist()
        return picked


class Served:
    """The states of a list that was served."""

    __slots__ = ("_name", "_place", "_served")

    def __init__(self, name: str, place: Place, served: int) -> None:
        self._name, self._place, self._served = name, place, served

    def __getitem__(self, index: int, /) -> State:
        return self._place.state(self._name, self._served + index + 1)
