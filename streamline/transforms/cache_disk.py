"""Serving a pass from the files of `.cache(path=)`, and drawing on, and keeping, what isn't in them yet.

A block is written, synced and named before an item behind it is handed out. So a state refers to blocks that are there:
the last one, the items up to its end, the upstream's state behind it (a mark); and to the block that is being drawn, by
the id that it will have. A resume finds that block, or draws it again from the mark.

A file that is damaged or gone is drawn again, with what is behind it, and the log says so. Where that can't be done
exactly, in the middle of a block and behind what chooses an order, it is an error that names the file.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, Run
from streamline.core.pace import Pace
from streamline.core.state import Since, State, Tree
from streamline.core.threads import in_thread
from streamline.core.tree import nbytes
from streamline.errors import ResumeError
from streamline.transforms.cache_files import ROOT, BlockInfo, CacheBlock, CacheFiles, FoundBlocks, new_id, whole
from streamline.transforms.pass_history import CacheState, PassHistory, PassPlace, ServedStates, gives_fewer

__all__ = ["DiskCacheSpec", "open_on_disk"]


logger = logging.getLogger(__name__)


R = TypeVar("R")


T = TypeVar("T")


BLOCK_BYTES = 8 * 2**20
"""Of the items of a block: a sync to disk, some milliseconds, is rare beside writing them; memory holds one block."""


BLOCK_ITEMS = 16384
"""Items of a block at the most: packing each costs a microsecond, so that a thread does it in some 20 ms."""


LOST = "lost"
"""Where the upstream stands that is opened in the middle of a pass whose files are gone: it has to be opened anew."""


BLOCK_S = 30.0
"""Behind so many seconds a block is written, however small: what a kill takes with it is drawn again."""


@dataclass(frozen=True)
class DiskCacheSpec:
    """What a stage says of how it keeps.

    Attributes:
      stage: as messages call it.
      of: a digest of what is before it.
      chosen: whether that chooses an order that another run would choose differently.
    """

    stage: str
    name: str
    path: str
    of: str
    chosen: bool
    max_bytes: int | None


def open_on_disk(
    keeping: DiskCacheSpec,
    run_over: Callable[[Flow[T]], Run[T]],
    course: PassHistory,
    upstream: Opener[T],
    state: Tree | None,
) -> Flow[T]:
    """Return the flow of a cache on disk, at `state` or at the beginning of a pass."""
    site = upstream.site
    own = None if state is None else state.get(keeping.name)
    epoch = site.epoch if own is None else tuple(own["epoch"])
    flow = upstream.at(replace(site, epoch=epoch))(state)
    if own is not None and own.get("chosen"):
        keeping = replace(keeping, chosen=True)  # there, whatever is before it now
    place = course.place(keeping.name, site.epoch, epoch, None if own is None else own["drawing"])
    place = replace(place, chosen=keeping.chosen)
    if own is None:  # in the middle of a pass, if the stage wasn't there before: the rest of it isn't a pass
        place = replace(place, files=(ROOT if state is None else None, 0, ""))
    else:
        files = own.get("tip"), own.get("kept", 0), own.get("next", "")
        place = replace(place, files=files, reached=own.get("reached", own["served"]))
        if place.reached:  # nothing more of this pass may be pulled, and the next one is the same
            course.drawn = own["drawing"], epoch
    serving = _DiskPass(keeping, run_over(flow), course, place, upstream, 0 if own is None else own["served"])
    return ListsFlow(serving.state(flow.state), serving.lists(), serving.run, flow)


class _DiskPass(Generic[T]):
    """One pass.

    Attributes:
      served: items handed out.
      place: what states have in common.
      flow: the upstream, opened behind the blocks that there are, at `mark`.
    """

    def __init__(
        self,
        keeping: DiskCacheSpec,
        run: Run[T],
        course: PassHistory,
        place: PassPlace,
        upstream: Opener[T],
        served: int,
    ) -> None:
        self.run, self.served, self.place, self.flow = run, served, place, run.upstream
        self.mark: State = self.flow.state
        self._keeping, self._course, self._upstream = keeping, course, upstream
        self._stands: str | None = None  # the block that the flow stands behind
        self._files = CacheFiles(
            keeping.path, keeping.stage, keeping.name, keeping.of, run.site.shard, run.site.num_shards,
            keeping.max_bytes,
        )  # fmt: skip
        self._keeps = True
        self._chain: list[CacheBlock] = []
        self._read: tuple[CacheBlock, BlockInfo] | None = None
        self._block: list[T] = []
        self._bytes = 0
        self._since = 0.0
        self._drawn = 0

    def state(self, now: State) -> State:
        """Return the state behind what was served, when the upstream stands at `now`."""
        return CacheState(self.place, self.served, Since(self.mark, now))

    async def lists(self) -> Lists[T]:
        """Yield what is in files, then what is drawn."""
        pace, run = Pace(), self.run
        try:
            await self._find()
            if self.served:  # there may be no item behind these to say what was left out among them
                yield Chunk((), (), self.state(self.mark))
            while items := await self._in_files():
                stop = self.served + len(items)
                while self.served < stop:
                    at, first = len(items) - (stop - self.served), self.served
                    part = items[at : at + run.want]
                    self.served += len(part)
                    yield Chunk(part, ServedStates(self.place, first, Since(self.mark, self.mark)))
                    await pace.breathe()
                del items, part
            if self._chain and self._chain[-1].end:
                if not self.served:  # a pass of no items, all of which may have been left out
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
                after = None if drawn.after is None else self.state(drawn.after)
                yield Chunk(drawn.items, ServedStates(self.place, first, self.mark, drawn.states), after)
                del drawn
                await self._write_full()
                await pace.breathe()
            await self._write(end=True)
        finally:
            await self.flow.aclose()

    # Finding --------------------------------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Settle which drawing the pass is of, which blocks of it there are, and stand behind them."""
        found = await self._call(self._files.look)
        place, course, (tip, kept, following) = self.place, self._course, self._where
        self._stands, self._drawn = tip, kept
        drawing = place.drawing
        if drawing is None:
            drawing = course.wanted(place.number)
            if course.known is None or place.number > course.known:
                drawing = max(drawing, found.newest)
        course.begin(place.number, drawing)
        self._keeps = drawing >= found.newest
        now = course.place(place.name, place.number, place.epoch, drawing)
        self.place = replace(now, files=place.files, reached=place.reached, chosen=place.chosen)
        chain: list[CacheBlock] | None = None
        if tip == ROOT and not self.place.reached:
            chain = self._followed(found, drawing)
            if course.drawn is not None and course.drawn[0] == drawing:  # as it was, where there is no file of it yet
                self._stands, self.place = LOST, replace(self.place, epoch=course.drawn[1])
        elif tip is not None and (chain := found.chain(tip)) is not None:
            chain += self._behind(found, tip, following, drawing)
        if chain is not None and tip is not None:
            await self._stand_behind(chain)
        elif self.served >= kept:  # what comes can be drawn; what is before it isn't there for the passes behind
            self._keeps = False
        else:
            logger.warning("%s: its files in %s are gone, drawing anew", self._keeping.stage, self._keeping.path)
            self._stands, self._keeps = LOST, drawing >= found.newest
            await self._stand_behind([])
        course.drawn = drawing, self.place.epoch

    def _followed(self, found: FoundBlocks, drawing: int) -> list[CacheBlock]:
        """Return the blocks of a pass that begins: of the pass before it, or of the run that has come furthest."""
        tip: str = self._course.kept or ROOT
        chain = found.chain(tip) if tip in found.blocks and found.blocks[tip].drawing == drawing else None
        return [*(chain or []), *found.beyond(tip if chain else ROOT, drawing)]

    def _behind(self, found: FoundBlocks, tip: str, following: str, drawing: int) -> list[CacheBlock]:
        """Return the blocks behind the one that a state refers to; `following` was being drawn there."""
        if self.place.reached > self._drawn and (known := found.blocks.get(following)) is not None:
            return [known, *found.beyond(following, drawing)]
        if self.place.reached <= self._drawn:
            return found.beyond(tip, drawing)
        if self.place.chosen:
            return []  # others may have chosen another order
        return found.beyond(tip, drawing, chosen=False)

    async def _stand_behind(self, chain: list[CacheBlock]) -> None:
        """Open the upstream behind blocks; where the last ones are damaged or gone, behind those before them.

        Raises:
          ResumeError: there it can't be drawn again exactly.
        """
        begun = self._stands
        if any(block.chosen for block in chain):
            self.place = replace(self.place, chosen=True)
        while (tip := chain[-1].id if chain else ROOT) != begun:
            if not chain:
                await self._open(self.place.epoch, None)
                break
            held = await self._call(partial(whole, partial(self._files.read, chain[-1])))
            if not isinstance(held, str):
                self._read = chain[-1], held
                await self._open(held.epoch, held.state)
                break
            await self._drop(chain, len(chain) - 1, held)
            chain = chain[:-1]
        self._chain, kept = chain, chain[-1].stop if chain else 0
        if tip != begun and max(self.served, self.place.reached) > kept and self.place.chosen:
            raise ResumeError(
                f"{self._keeping.stage} can't go on in the middle of its pass: files of it in {self._keeping.path} are "
                "damaged or gone, and what is before it chooses an order that is another one now. Put them back, or "
                "begin anew, without resume="
            )
        self._stands, self._course.kept = tip, tip
        self._settle(tip, kept)

    async def _open(self, epoch: tuple[int, ...], state: Tree | None) -> None:
        await self.flow.aclose()
        self.flow = self._upstream.at(replace(self.run.site, epoch=epoch))(state)
        self.flow.reader = self.run.meter
        self.mark = self.flow.state
        self.place = replace(self.place, epoch=epoch)

    def _settle(self, tip: str | None, kept: int) -> None:
        """States are behind this block from now on."""
        self.place = replace(self.place, files=(tip, kept, new_id() if tip else ""))
        self._drawn = kept

    async def _drop(self, chain: list[CacheBlock], at: int, why: str) -> None:
        """Remove a damaged block, and those behind it."""
        logger.warning("%s %s: drawing it again, and what is behind it", chain[at].path, why)
        await self._call(partial(self._files.remove, chain[at:]))

    # Serving --------------------------------------------------------------------------------------------------------

    async def _in_files(self) -> list[T]:
        """Return the next items that are in a block; none: they have to be drawn."""
        at = bisect_right(self._chain, self.served, key=lambda block: block.stop)
        read, self._read = self._read, None  # one block in memory: where it isn't the next, it goes
        if at == len(self._chain):
            return []
        block = self._chain[at]
        held: BlockInfo | str | None = read[1] if read is not None and read[0] is block else None
        del read
        if held is None:
            held = await self._call(partial(whole, partial(self._files.read, block)))
        if not isinstance(held, str):
            return held.items[len(held.items) - (block.stop - self.served) :]
        await self._drop(self._chain, at, held)
        await self._stand_behind(self._chain[:at])
        return []

    async def _draw_again(self, pace: Pace) -> None:
        while self._drawn < self.served:
            if (chunk := await self.flow.pull(min(self.served - self._drawn, self._room))) is None:
                raise ResumeError(gives_fewer(self._keeping.stage, self.served, self._drawn))
            self._add(chunk.items)
            del chunk
            await self._write_full()
            await pace.breathe()

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
        most, room = BLOCK_BYTES, self._keeping.max_bytes
        if room is not None:
            most = min(most, room - self._written)
        full = self._bytes >= most or len(self._block) >= BLOCK_ITEMS or monotonic() - self._since >= BLOCK_S
        if self._block and full:
            await self._write()

    async def _write(self, *, end: bool = False) -> None:
        if not self._keeps:
            return
        place, now, items, self._block, self._bytes = self.place, self.flow.state, self._block, [], 0
        tip, _, following = self._where
        assert tip is not None
        block = CacheBlock(Path(), place.drawing or 0, self._drawn, tip, following, end, 0, place.chosen)
        held = BlockInfo(items, place.epoch, now.json())
        written = await self._call(partial(self._files.write, block, held, self._written))
        if tip == ROOT and block.drawing:
            await self._call(partial(self._files.remove_before, block.drawing))
        self._chain.append(written)
        self.mark = now
        self._course.kept = following
        self._settle(following, self._drawn)

    @property
    def _room(self) -> int:
        """Items that the block may have yet."""
        return BLOCK_ITEMS - len(self._block)

    @property
    def _written(self) -> int:
        return sum(block.nbytes for block in self._chain)

    @property
    def _where(self) -> tuple[str | None, int, str]:
        assert self.place.files is not None
        return self.place.files

    async def _call(self, work: Callable[[], R]) -> R:
        return await in_thread(self.run.site.tasks.threads, work)
