"""Serves a pass from the files of `.cache(path=)`; draws, and writes to files, the items that aren't in them yet.

What a cache keeps is a *drawing*, with a number; a reset of a folder begins the next number. All passes of a run serve
one drawing, and a resume goes on with that of its snapshot, so what a stage downstream reads again is what it was.

A block is written and synced before a later item leaves the stage. So a state refers to blocks that exist: the last
one, the items up to its end, the upstream's state after it (a mark); and to the block that is being drawn, by its
future id. A resume finds that block, or draws it again from the mark.

A file that is damaged or gone is drawn again, with all later blocks, and the log says so. Where that can't be exact (in
the middle of a block, downstream of a stage that chooses an order), a ResumeError names the folder.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, Site, StageRun
from streamline.core.pace import Pace
from streamline.core.state import Json, Over, Since, State, States, Tally, Tree, read_again, skips_in, with_skips
from streamline.core.tree import nbytes
from streamline.errors import ResumeError, printable
from streamline.transforms.cache_files import ROOT, BlockInfo, CacheBlock, CacheFiles, FoundBlocks, new_id, whole

logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

BLOCK_BYTES = 8 * 2**20
"""Size of a block's items: large compared to a sync to disk (some milliseconds); one block is in memory."""

BLOCK_ITEMS = 16384
"""The most items of a block: packing takes a microsecond each, so some 20 ms in a thread."""

LOST = "lost"
"""In place of a block's id: the upstream is open in the middle of a pass whose files are gone, and must be reopened."""

BLOCK_S = 30.0
"""Seconds after which a block is written, however small: after a kill, what wasn't written is drawn again."""


def open_on_disk(
    name: str,
    chosen: bool,
    files: CacheFiles,
    run_over: Callable[[Flow[T]], StageRun[T]],
    history: PassHistory,
    upstream: Opener[T],
    state: Tree | None,
) -> Flow[T]:
    """Return the flow of a cache on disk called `name`, at `state` or at the beginning of a pass.

    Args:
      chosen: a stage upstream chooses an order that another run would choose differently.
    """
    site = upstream.site
    own = None if state is None else state.get(name)
    epoch = site.epoch if own is None else tuple(own["epoch"])
    flow = upstream.at(replace(site, epoch=epoch))(state)
    chosen = chosen or bool(own is not None and own.get("chosen"))  # as it was then, whatever is upstream now
    place = PassPlace(name=name, epoch=epoch, number=site.epoch, drawing=history.drawing, chosen=chosen)
    if own is None:  # a stage that was added in the middle of a pass keeps none of it
        place = replace(place, files=(ROOT if state is None else None, 0, ""))
    else:
        stands = own.get("tip"), own.get("kept", 0), own.get("next", "")
        place = replace(place, files=stands, reached=own.get("reached", own["served"]))
        if place.reached:  # perhaps nothing more of this pass is pulled, and the next one serves the same drawing
            history.epoch = epoch
    serving = _DiskPass(files, run_over(flow), history, place, upstream, 0 if own is None else own["served"])
    return ListsFlow(serving.state(flow.state), serving.lists(), serving.run, flow)


class _DiskPass(Generic[T]):
    """One pass.

    Attributes:
      served: items delivered.
      place: what the states have in common.
      flow: the upstream, opened after the blocks found, at `mark`.
    """

    def __init__(
        self,
        files: CacheFiles,
        run: StageRun[T],
        history: PassHistory,
        place: PassPlace,
        upstream: Opener[T],
        served: int,
    ) -> None:
        self.run, self.served, self.place, self.flow = run, served, place, run.upstream
        self.mark: State = self.flow.state
        self._files, self._history, self._upstream = files, history, upstream
        self._open_at: str | None = None  # the id of the block after which the flow is open
        self._keeps = True
        self._chain: list[CacheBlock] = []
        self._read: tuple[CacheBlock, BlockInfo] | None = None
        self._block: list[T] = []
        self._bytes = 0
        self._since = 0.0
        self._drawn = 0

    def state(self, now: State) -> State:
        """Return the state after what was served, with the upstream at `now`."""
        return CacheState(self.place, self.served, Since(self.mark, now))

    async def lists(self) -> Lists[T]:
        """Yield the items in files, then those drawn."""
        pace, run = Pace(), self.run
        try:
            await self._find()
            if self.served:  # no later item may come to report what was skipped among these
                yield Chunk((), (), self.state(self.mark))
            while items := await self._in_files():
                stop = self.served + len(items)
                while self.served < stop:
                    at, first = len(items) - (stop - self.served), self.served
                    part = items[at : at + run.want]
                    self.served += len(part)
                    yield Chunk(part, ServedStates(self.place, first, Since(self.mark, self.mark)))
                    await pace.maybe_yield()
                del items, part
            if self._chain and self._chain[-1].end:
                if not self.served:  # a pass without items, all of which may have been skipped
                    yield Chunk((), (), self.state(self.mark))
                return
            if not self._keeps:
                self._settle(None, self._drawn)
            if self.served > self._drawn:
                await self._draw_again(pace)
                yield Chunk((), (), self.state(self.flow.state))
            while (drawn := await self.flow.pull(min(run.want, self._room))) is not None:
                first = self.served
                self._add(drawn.items)
                self.served += len(drawn.items)
                after = None if drawn.progress is None else self.state(drawn.progress)
                yield Chunk(drawn.items, ServedStates(self.place, first, self.mark, drawn.states), after)
                del drawn
                await self._write_full()
                await pace.maybe_yield()
            await self._write(end=True)
        finally:
            await self.flow.aclose()

    # Finding --------------------------------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Find the drawing that the pass serves and its blocks, and open the upstream after them."""
        found = await self._call(self._files.look)
        history, (tip, kept, following) = self._history, self._files_place
        self._open_at, self._drawn = tip, kept
        drawing = history.drawing = found.newest if history.drawing is None else history.drawing
        self._keeps = drawing >= found.newest
        self.place = replace(self.place, drawing=drawing)
        chain: list[CacheBlock] | None = None
        if tip == ROOT and not self.place.reached:
            chain = self._followed(found, drawing)
            if history.epoch is not None:  # perhaps no file of it is written yet
                self._open_at, self.place = LOST, replace(self.place, epoch=history.epoch)
        elif tip is not None and (chain := found.chain(tip)) is not None:
            chain += self._later_blocks(found, tip, following, drawing)
        if chain is not None and tip is not None:
            await self._open_after(chain)
        elif self.served >= kept:  # the rest can be drawn, but later passes would lack the beginning
            self._keeps = False
        else:
            which = printable(f"{self._files.stage}: its files in {self._files.folder}")
            logger.warning("%s are gone, drawing anew", which)
            self._open_at, self._keeps = LOST, drawing >= found.newest
            await self._open_after([])
        history.epoch = self.place.epoch

    def _followed(self, found: FoundBlocks, drawing: int) -> list[CacheBlock]:
        """Return the blocks of a pass that begins: those of the pass before it, or the longest chain in the folder."""
        tip: str = self._history.kept or ROOT
        chain = found.chain(tip)
        return [*(chain or []), *found.beyond(tip if chain else ROOT, drawing)]

    def _later_blocks(self, found: FoundBlocks, tip: str, following: str, drawing: int) -> list[CacheBlock]:
        """Return the blocks after the one that a state refers to; `following` was being drawn there."""
        if self.place.reached > self._drawn and (known := found.blocks.get(following)) is not None:
            return [known, *found.beyond(following, drawing)]
        if self.place.reached <= self._drawn:
            return found.beyond(tip, drawing)
        if self.place.chosen:
            return []  # another run may have chosen another order
        return found.beyond(tip, drawing, chosen=False)

    async def _open_after(self, chain: list[CacheBlock]) -> None:
        """Open the upstream after these blocks, without the last ones if they are damaged or gone.

        Raises:
          ResumeError: from there, the pass can't be drawn again exactly.
        """
        begun = self._open_at
        if any(block.chosen for block in chain):
            self.place = replace(self.place, chosen=True)
        while (tip := chain[-1].id if chain else ROOT) != begun:
            if not chain:
                await self._open(self.place.epoch, None)
                break
            info = await self._call(partial(whole, partial(self._files.read, chain[-1])))
            if not isinstance(info, str):
                self._read = chain[-1], info
                await self._open(info.epoch, info.state)
                break
            await self._drop(chain, len(chain) - 1, info)
            chain = chain[:-1]
        self._chain, kept = chain, chain[-1].stop if chain else 0
        if tip != begun and max(self.served, self.place.reached) > kept and self.place.chosen:
            raise ResumeError(
                f"{self._files.stage} can't go on in the middle of its pass: files of it in {self._files.folder} are "
                "damaged or gone, and what is before it chooses an order that is another one now. Put them back, or "
                "begin anew, without resume="
            )
        self._open_at, self._history.kept = tip, tip
        self._settle(tip, kept)

    async def _open(self, epoch: tuple[int, ...], state: Tree | None) -> None:
        if state is not None:  # what was skipped on the way is only tried again
            tally = Tally()
            self.flow.state.tally(tally)
            counts = read_again(skips_in(state), {name: count for (_, name), count in tally.skipped.items()})
            state = with_skips(state, counts)
        await self.flow.aclose()
        self.flow = self._upstream.at(replace(self.run.site, epoch=epoch))(state)
        self.flow.reader = self.run.meter
        self.mark = self.flow.state
        self.place = replace(self.place, epoch=epoch)

    def _settle(self, tip: str | None, kept: int) -> None:
        """Let later states refer to this block."""
        self.place = replace(self.place, files=(tip, kept, new_id() if tip else ""))
        self._drawn = kept

    async def _drop(self, chain: list[CacheBlock], at: int, why: str) -> None:
        """Remove a damaged block, and all later ones."""
        logger.warning("%s %s: drawing it again, and all later ones", printable(str(chain[at].path)), why)
        await self._call(partial(self._files.remove, chain[at:]))

    # Serving --------------------------------------------------------------------------------------------------------

    async def _in_files(self) -> list[T]:
        """Return the next items that are in a block; none: they must be drawn."""
        at = bisect_right(self._chain, self.served, key=lambda block: block.stop)
        read, self._read = self._read, None  # one block in memory, and only if it is the next
        if at == len(self._chain):
            return []
        block = self._chain[at]
        info: BlockInfo | str | None = read[1] if read is not None and read[0] is block else None
        del read
        if info is None:
            info = await self._call(partial(whole, partial(self._files.read, block)))
        if not isinstance(info, str):
            return info.items[len(info.items) - (block.stop - self.served) :]
        await self._drop(self._chain, at, info)
        await self._open_after(self._chain[:at])
        return []

    async def _draw_again(self, pace: Pace) -> None:
        while self._drawn < self.served:
            if (chunk := await self.flow.pull(min(self.served - self._drawn, self._room))) is None:
                raise ResumeError(gives_fewer(self._files.stage, self.served, self._drawn))
            self._add(chunk.items)
            del chunk
            await self._write_full()
            await pace.maybe_yield()

    def _add(self, items: Sequence[T]) -> None:
        self._drawn += len(items)
        if not self._keeps:
            return
        if not self._block:
            self._since = monotonic()
        self._block.extend(items)
        self._bytes += sum(map(nbytes, items))

    async def _write_full(self) -> None:
        """Write the block if it is long enough."""
        most, room = BLOCK_BYTES, self._files.max_bytes
        if room is not None:
            most = min(most, room - self._written)
        full = self._bytes >= most or len(self._block) >= BLOCK_ITEMS or monotonic() - self._since >= BLOCK_S
        if self._block and full:
            await self._write()

    async def _write(self, *, end: bool = False) -> None:
        if not self._keeps:
            return
        place, now, items, self._block, self._bytes = self.place, self.flow.state, self._block, [], 0
        tip, _, following = self._files_place
        assert tip is not None
        block = CacheBlock(Path(), place.drawing or 0, self._drawn, tip, following, end, 0, place.chosen)
        info = BlockInfo(items, place.epoch, now.json())
        written = await self._call(partial(self._files.write, block, info, self._written))
        if tip == ROOT and block.drawing:
            await self._call(partial(self._files.remove_before, block.drawing))
        self._chain.append(written)
        self.mark = now
        self._history.kept = following
        self._settle(following, self._drawn)

    @property
    def _room(self) -> int:
        """Items that the current block has room for."""
        return BLOCK_ITEMS - len(self._block)

    @property
    def _written(self) -> int:
        return sum(block.nbytes for block in self._chain)

    @property
    def _files_place(self) -> tuple[str | None, int, str]:
        assert self.place.files is not None
        return self.place.files

    async def _call(self, work: Callable[[], R]) -> R:
        return await self.run.site.tasks.threads.run(work, "a file")


# A drawing and its states, in memory too -----------------------------------------------------------------------------


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
        key, shares = (name, site.shard), site.tasks.session.services.get(_PassHistories)
        first = key not in shares
        if first or own is not None:
            shares[key] = cls(None if own is None else own["drawing"])
        if first:
            site.tasks.session.at_close(partial(_end, shares, key))
        return shares[key]


class _PassHistories(dict[tuple[str, int], PassHistory]):
    """Those of a run, by the cache's name and the shard."""


def _end(shares: _PassHistories, key: tuple[str, int]) -> None:
    history = shares.pop(key, None)
    if history is not None:
        history.clear()
