"""One pass of `.cache`: serves what is kept of a *drawing*, draws the rest, and keeps it.

A drawing is one read of the upstream that is kept. All passes of a run serve one drawing, and a resume goes on with
that of its snapshot, so what a stage downstream reads again is what it was. In memory, it belongs to one shard of the
run (a service of it), and a pass that was left before its end is drawn again, from the same state. On disk
(`streamline.transforms.cache_disk`) it belongs to the folder, and has a number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec

from streamline.core.flow import Chunk, Flow, Lists, Opener, Site, StageRun
from streamline.core.pace import Pace
from streamline.core.state import (
    MadeStates,
    Over,
    Since,
    SkipCounts,
    State,
    Tree,
    consumed_count,
    counts_to_replay,
    part_json,
    skips_in,
    with_skips,
)
from streamline.core.state_types import Count, FileName, Unsigned
from streamline.core.tree import nbytes
from streamline.errors import CacheFull, ResumeError

T = TypeVar("T")


class CachePass(ABC, Generic[T]):
    """One pass over a drawing; a subclass keeps it.

    Attributes:
      served: items delivered.
      drawn: items before the next one that `flow` gives.
      mark: its state from which a resume draws.
      place: what the states of this pass have in common.
    """

    def __init__(self, stage: str, run: StageRun[T], place: PassPlace, served: int) -> None:
        self.stage, self.run, self.place, self.served = stage, run, place, served
        self.flow: Flow[T] = run.upstream
        self.mark: State = self.flow.state
        self.drawn = 0

    async def find(self) -> None:
        """Find what is kept, and open the upstream after it."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether all items of the pass are kept."""

    @abstractmethod
    async def kept_items(self) -> Sequence[T]:
        """Return the next items that are kept; none: they must be drawn."""

    @abstractmethod
    async def draw(self, limit: int) -> Chunk[T] | None:
        """Draw the next items, up to `limit`, and keep them; None: there are no more."""

    async def write(self, *, end: bool = False) -> None:
        """Write what was drawn, if that is enough, or the end of the pass. All of it has been delivered."""

    def state(self) -> State:
        """Return the state after what was served, with the upstream where it is."""
        return CacheState(self.place, self.served, Since(self.mark, self.flow.state))

    async def lists(self) -> Lists[T]:
        """Yield the items that are kept, then those drawn."""
        pace, run = Pace(), self.run
        try:
            await self.find()
            if self.served and (
                self.place.files is not None or self.served <= self.drawn
            ):  # no later item may come to report what was skipped among these
                yield Chunk((), (), self.state())
            while items := await self.kept_items():
                stop = self.served + len(items)
                while self.served < stop:
                    at, first = len(items) - (stop - self.served), self.served
                    part = items[at : at + run.max_items]
                    self.served += len(part)
                    now = Since(self.mark, self.flow.state)
                    yield Chunk(part, MadeStates(_kept_state, self.place.name, self.place, now, first=first + 1))
                    await pace.maybe_yield()
                del items, part
            if self.complete:
                if not self.served:  # a pass without items, all of which may have been skipped
                    yield Chunk((), (), self.state())
                return
            if self.drawn < self.served:
                await self._draw_again(pace)
                yield Chunk((), (), self.state())
            while (chunk := await self.draw(run.max_items)) is not None:
                first = self.served
                self.served += len(chunk.items)
                shared = self.place.name, self.place, self.mark
                states = MadeStates(_drawn_state, *shared, first=first + 1, states=chunk.states)
                after = None if chunk.progress is None else _drawn_state(*shared, self.served, chunk.progress)
                yield Chunk(chunk.items, states, after)
                del chunk
                await self.write()
                await pace.maybe_yield()
            await self.write(end=True)
        finally:
            await self.flow.aclose()

    async def _draw_again(self, pace: Pace) -> None:
        """Draw what was served before a resume."""
        while self.drawn < self.served:
            if await self.draw(self.served - self.drawn) is None:
                raise ResumeError(
                    f"{self.stage} had served {self.served:,} items of a pass, and only {self.drawn:,} of them can be "
                    "drawn again: what is before it gives fewer than it did"
                )
            await self.write()
            await pace.maybe_yield()


# In memory ------------------------------------------------------------------------------------------------------------


class MemoryDrawing(Generic[T]):
    """A drawing in memory.

    Attributes:
      opener: of the upstream, in the epoch of the drawing.
      mark: where that is opened; None: at the beginning.
      begin: its state there.
    """

    def __init__(self, opener: Opener[T], mark: Tree | None, max_bytes: int | None) -> None:
        self.opener, self.mark, self.max_bytes = opener, mark, max_bytes
        self.flow = opener(mark)
        self.begin = self.flow.state
        self.items: list[T] = []
        self.nbytes = 0
        self.complete = False

    def again(self, skipped: Mapping[tuple[int, str], SkipCounts]) -> MemoryDrawing[T]:
        """Return a drawing of the same items, of which so many were skipped before: they are only tried again."""
        site, mark = self.opener.site, self.mark
        before = site.skipped if mark is None else {(site.shard, name): n for name, n in skips_in(mark).items()}
        counts = counts_to_replay(before, {key: consumed_count(count) for key, count in skipped.items()})
        if mark is not None:
            mark = with_skips(mark, {name: count for (_, name), count in counts.items()})
        return MemoryDrawing(self.opener.at(replace(site, skipped=counts)), mark, self.max_bytes)


class MemoryPass(CachePass[T]):
    def __init__(self, stage: str, run: StageRun[T], place: PassPlace, served: int, drawing: MemoryDrawing[T]) -> None:
        super().__init__(stage, run, place, served)
        self._drawing = drawing
        self._full: CacheFull | None = None
        self.mark, self.drawn = drawing.begin, len(drawing.items)

    @property
    def complete(self) -> bool:
        return self._drawing.complete

    async def kept_items(self) -> Sequence[T]:
        return self._drawing.items[self.served : self.served + self.run.max_items]

    async def draw(self, limit: int) -> Chunk[T] | None:
        if self._full is not None:
            raise self._full
        chunk = await self.flow.pull(limit)
        if chunk is None:
            self._drawing.complete = True
            return None
        if self._drawing.max_bytes is not None:
            chunk = self._fitting(chunk, self._drawing.max_bytes)
        self._drawing.items.extend(chunk.items)
        self.drawn += len(chunk.items)
        return chunk

    def _fitting(self, chunk: Chunk[T], max_bytes: int) -> Chunk[T]:
        """Return the items that there is room for, and count their bytes; `draw` raises at the one after them."""
        drawing = self._drawing
        for count, item in enumerate(chunk.items):
            size = nbytes(item)
            if drawing.nbytes + size > max_bytes:
                self._full = CacheFull(
                    f"{self.stage} of shard {self.run.site.shard} holds {len(drawing.items) + count:,} items of "
                    f"{drawing.nbytes:,} bytes, and the next one has {size:,}: a pass doesn't fit into "
                    f"max_bytes={max_bytes:,}. {MAKE_ROOM}"
                )
                if not count:
                    raise self._full
                return chunk.part(0, count)
            drawing.nbytes += size
        return chunk


MAKE_ROOM = "Raise it, put .cache before what makes items large, or leave it out: each pass is read anew then"


# States ---------------------------------------------------------------------------------------------------------------


class PassPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stage's part of a saved state, as `PassPlace` has it: from `tip` on, of a cache on disk."""

    served: Count
    epoch: Annotated[list[Unsigned], msgspec.Meta(min_length=1)]
    drawing: Count | None
    tip: FileName | msgspec.UnsetType | None = msgspec.UNSET
    kept: Count | msgspec.UnsetType = msgspec.UNSET
    next: FileName | msgspec.UnsetType = msgspec.UNSET
    reached: Count = 0
    chosen: bool = False


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
        tip, kept, following = place.files or (msgspec.UNSET,) * 3
        reached = max(last._served, end.reached)
        if place.files is None or end.number != self._place.number or reached <= self._served:
            reached = 0
        own = PassPart(self._served, list(place.epoch), drawing, tip, kept, following, reached, place.chosen)
        tree[self.name] = part_json(own)
        return tree


def _kept_state(name: str, place: PassPlace, now: State, served: int) -> State:
    """Return the state after an item that was kept before."""
    return CacheState(place, served, now)


def _drawn_state(name: str, place: PassPlace, mark: State, served: int, now: State) -> State:
    """Return the state after an item that was drawn just now."""
    return CacheState(place, served, Since(mark, now))


@dataclass
class PassHistory:
    """One cache of one shard in a run.

    Attributes:
      drawing: what its passes serve; None: not known yet.
      epoch: of a cache on disk: in which it was drawn.
      kept: what the next pass needs of the one before: the drawing, or the id of its last block on disk.
    """

    drawing: int | None = None
    epoch: tuple[int, ...] | None = None
    kept: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, site: Site, own: PassPart | None) -> PassHistory:
        """Return the history in this run; where a state is given, as it was there."""
        key, shares = (name, site.shard), site.tasks.session.services.get(_PassHistories)
        first = key not in shares
        if first or own is not None:
            shares[key] = cls(None if own is None else own.drawing)
        if first:
            site.tasks.session.hooks.at_close(lambda: shares.pop(key, cls()).end())
        return shares[key]

    def end(self) -> None:
        """Release the items: a stream that has ended, or its error, must not keep a pass in memory."""
        if isinstance(self.kept, MemoryDrawing):
            self.kept.items.clear()


class _PassHistories(dict[tuple[str, int], PassHistory]):
    """Those of a run, by the cache's name and the shard."""
