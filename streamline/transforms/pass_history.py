"""Which drawing each pass of a cache serves, and the states of its items.

What a cache keeps is a *drawing*, with a number. A reset is an entry (F, d) in a log: passes later than F serve
drawings from number d on. States carry the log from the pass on that a resume goes back to, so a stage that
rereads what was served before a reset finds the old drawing there, and the new one after it, as the first time.

A pass is identified by its epoch (`Site.epoch`), which only grows in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from streamline.core.flow import Site
from streamline.core.state import Json, Over, Since, State, States, Tree

__all__ = ["CacheState", "PassHistory", "PassPlace", "ServedStates", "gives_fewer", "reset"]

Pass = tuple[int, ...]

Log = tuple[tuple[Pass, int], ...]


@dataclass(frozen=True, kw_only=True)
class PassPlace:
    """What the states of a pass have in common; all but `name` is saved.

    Attributes:
      epoch: in which the items were drawn.
      number: of the pass: its epoch.
      known: the last pass up to which the log says which drawing is served.
      log: of resets, up to this pass.
      drawing: None: not known yet, as nothing was read.
      base: the drawing of the run's first pass.
      files: of a cache on disk: the id of the last block written (None in a pass that isn't kept), the items up to
        its end, and the id of the block that is being drawn. None: of a cache in memory.
      reached: items handed out before a resume, from where a stage downstream went back.
      chosen: of a cache on disk: whether the order of the pass was chosen, by this run or the one that it resumes.
    """

    name: str
    epoch: Pass
    number: Pass
    known: Pass
    log: Log
    drawing: int | None
    base: int | None
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
        drawing = end.base if place.drawing is None else place.drawing
        same = drawing == end.drawing
        if same and end.files is not None and end.files[0] is not None:  # more is in files by now
            place, tree = end, last.upstream.json()
        else:
            tree = self.upstream.json(last.upstream if same and until is not None else None)
        own: Tree = {"served": self._served, "epoch": list(place.epoch), "drawing": drawing}
        own["pass"] = list(end.known)
        if log := [[list(last), number] for last, number in end.log if last >= self._place.number]:
            own["resets"] = log
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
      base: the drawing of its first pass.
      log: of resets.
      known: the last pass that the log covers; for a later one, a folder may have a newer drawing.
      drawn: the drawing that is kept, and the epoch that it was drawn in.
      kept: the cache's own record of it.
      clear: releases it when the run ends: a stream that has ended, or its error, must not keep a pass in memory.
    """

    base: int | None = None
    log: Log = ()
    known: Pass | None = None
    drawn: tuple[int, Pass] | None = None
    kept: Any = field(default=None, repr=False)
    clear: Callable[[], None] = field(default=lambda: None, repr=False)

    @classmethod
    def of(cls, name: str, site: Site, own: Json) -> PassHistory:
        """Return the history in this run; where a state is given, as it was there."""
        key, shares = f"cache {name} of shard {site.shard}", site.tasks.session.shares
        first = key not in shares
        if own is not None:
            log = tuple((tuple(last), number) for last, number in own.get("resets", ()))
            known = None if own["drawing"] is None else tuple(own["pass"])
            shares[key] = cls(own["drawing"], log, known)
        found: PassHistory = shares.setdefault(key, cls())
        if first:
            site.tasks.session.at_close(partial(_end, shares, key))
        return found

    def wanted(self, number: Pass) -> int:
        """Return the oldest drawing that may be served in a pass."""
        return max([self.base or 0, *(drawing for last, drawing in self.log if last < number)])

    def begin(self, number: Pass, drawing: int) -> None:
        """Note that a pass serves this drawing."""
        if self.base is None:
            self.base = drawing
        elif drawing > self.wanted(number) and self.known is not None and self.known < number:
            self.log = (*self.log, (self.known, drawing))
        self.known = number if self.known is None else max(self.known, number)

    def place(self, name: str, number: Pass, epoch: Pass, drawing: int | None) -> PassPlace:
        """Return the place of a pass, for its states."""
        known = number if self.known is None else max(number, self.known)
        return PassPlace(
            name=name, epoch=epoch, number=number, known=known, log=self.log, drawing=drawing, base=self.base
        )


def _end(shares: dict[str, Any], key: str) -> None:
    history: PassHistory = shares.pop(key)
    history.clear()


def reset(tree: Json, names: Collection[str], least: int, *, begun: bool) -> Json:
    """Return a state in which all passes of these caches that have not begun, in any shard, serve a new drawing.

    Args:
      least: the lowest number of that drawing.
      begun: whether the state's own pass has begun: an item was delivered.
    """
    owns = [(name, own) for name, own in _owns(tree, names) if own["drawing"] is not None]  # else nothing was read
    last: dict[str, Json] = {}
    for name, own in owns:
        last[name] = max(own["pass"], last.get(name, []))

    def changed(part: Json) -> Json:
        if isinstance(part, list):
            return [changed(one) for one in part]
        if not isinstance(part, dict):
            return part
        return {
            key: _reset(one, last[key], least, begun) if any(one is own for _, own in owns) else changed(one)
            for key, one in part.items()
        }

    return changed(tree)


def _owns(tree: Json, names: Collection[str]) -> Iterator[tuple[str, Tree]]:
    """Yield the parts of the stages with these names, anywhere in a state."""
    for name, part in tree.items() if isinstance(tree, dict) else (("", part) for part in tree):
        if name in names and isinstance(part, dict):
            yield name, part
        elif isinstance(part, dict | list):
            yield from _owns(part, names)


def _reset(own: Tree, last: Json, least: int, begun: bool) -> Tree:
    log = own.get("resets", [])
    number = max([least, 1 + own["drawing"], *(1 + drawn for _, drawn in log)])
    return {**own, "pass": last, "resets": [*log, [last, number]]} if begun else {**own, "drawing": number}
