"""The drawing that a run's passes of one cache serve, and the states of its items.

What a cache keeps is a *drawing*, with a number; a reset of a folder begins the next number. All passes of a run serve
one drawing, and a resume goes on with that of its snapshot, so what a stage downstream reads again is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from streamline.core.flow import Site
from streamline.core.state import Json, Over, Since, State, States, Tree


@dataclass(frozen=True, kw_only=True)
class PassPlace:
    """What the states of a pass have in common; all but `name` and `number` is saved.

    Attributes:
      epoch: in which the items were drawn.
      number: of the pass: its epoch (`Site.epoch`), which only grows in a run.
      drawing: None: not known yet, as nothing was read.
      files: of a cache on disk: the id of the last block written (None in a pass that isn't kept), the items up to
        its end, and the id of the block that is being drawn. None: of a cache in memory.
      reached: items handed out before a resume, from where a stage downstream went back.
      chosen: of a cache on disk: whether the order of the pass was chosen, by this run or the one that it resumes.
    """

    name: str
    epoch: tuple[int, ...]
    number: tuple[int, ...]
    drawing: int | None
    files: tuple[str | None, int, str] | None = None
    reached: int = 0
    chosen: bool = False


class CacheState(Over):
    """After some items of a pass, over the upstream's state."""

    __slots__ = ("_place", "_served")

    def __init__(self, place: PassPlace, served: int, upstream: State) -> None:
        super().__init__(place.name, None, upstream)
        self._place, self._served = place, served

    def json(self, until: State | None = None) -> Tree:
        place, last = self._place, self if until is None else cast(CacheState, until.latest)
        end = last._place
        if end.files is not None and end.files[0] is not None:  # more is in files by now
            place, tree = end, last.upstream.json()
        else:
            tree = self.upstream.json(None if until is None else last.upstream)
        drawing = end.drawing if place.drawing is None else place.drawing
        own: Tree = {"served": self._served, "epoch": list(place.epoch), "drawing": drawing}
        if place.files is not None:
            own["tip"], own["kept"], own["next"] = place.files
            if end.number == self._place.number and (reached := max(last._served, end.reached)) > self._served:
                own["reached"] = reached
        if place.chosen:
            own["chosen"] = True
        tree[self.name] = own
        return tree


class ServedStates:
    """The states of a list: of items that were kept before, all over `now`; of items just drawn, over a mark."""

    __slots__ = ("_first", "_now", "_place", "_states")

    def __init__(self, place: PassPlace, first: int, now: State, states: States | None = None) -> None:
        self._place, self._first, self._now, self._states = place, first, now, states

    def __getitem__(self, index: int, /) -> State:
        now = self._now if self._states is None else Since(self._now, self._states[index])
        return CacheState(self._place, self._first + index + 1, now)


def gives_fewer(stage: str, served: int, drawn: int) -> str:
    """Return the message for an upstream with fewer items than were served."""
    return (
        f"{stage} had served {served:,} items of a pass, and only {drawn:,} of them can be drawn again: what is before "
        "it gives fewer than it did"
    )


@dataclass
class PassHistory:
    """One cache of one shard in a run.

    Attributes:
      drawing: what its passes serve; None: not known yet.
      epoch: of a cache on disk: in which it was drawn.
      kept: the cache's own record of it.
      clear: releases it when the run ends: a stream that has ended, or its error, must not keep a pass in memory.
    """

    drawing: int | None = None
    epoch: tuple[int, ...] | None = None
    kept: Any = field(default=None, repr=False)
    clear: Callable[[], None] = field(default=lambda: None, repr=False)

    @classmethod
    def of(cls, name: str, site: Site, own: Json) -> PassHistory:
        """Return the history in this run; where a state is given, as it was there."""
        key, shares = f"cache {name} of shard {site.shard}", site.tasks.session.shares
        first = key not in shares
        if first or own is not None:
            shares[key] = cls(None if own is None else own["drawing"])
        if first:
            site.tasks.session.at_close(partial(_end, shares, key))
        found: PassHistory = shares[key]
        return found


def _end(shares: dict[str, Any], key: str) -> None:
    history: PassHistory | None = shares.pop(key, None)
    if history is not None:
        history.clear()
