"""A pass of `.cache(path=)`, whose drawing is in files: blocks of items, which other runs and passes serve, too.

A drawing has a number; a reset of the folder begins the next one. A block is written and synced before a later item
leaves the stage. So a state refers to blocks that exist: the last one, the items up to its end, the upstream's state
after it (a mark); and to the block that is being drawn, by its future id. A resume finds that block, or draws it again
from the mark.

A file that is damaged or gone is drawn again, with all later blocks, and the log says so. Where that can't be exact (in
the middle of a block, downstream of a stage that chooses an order), a ResumeError names the folder.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from streamline.core.flow import Chunk, Flow, Opener, StageRun
from streamline.core.state import Tally, Tree, counts_to_replay, skips_in, with_skips
from streamline.core.tree import nbytes
from streamline.errors import ResumeError, printable
from streamline.transforms.cache_files import ROOT, BlockInfo, CacheBlock, CacheFiles, FoundBlocks, new_id, whole
from streamline.transforms.cache_pass import CachePass, PassHistory, PassPart, PassPlace

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


class DiskPass(CachePass[T]):
    """A pass over a drawing in files.

    Args:
      run_over: makes the run over the upstream, opened.
      chosen: a stage upstream chooses an order that another run would choose differently.
      state: where to begin; None: at the beginning of a pass. `own` is the stage's part of it.
    """

    def __init__(
        self,
        name: str,
        files: CacheFiles,
        history: PassHistory,
        run_over: Callable[[Flow[T]], StageRun[T]],
        upstream: Opener[T],
        state: Tree | None,
        own: PassPart | None,
        chosen: bool,
    ) -> None:
        site = upstream.site
        epoch = site.epoch if own is None else tuple(own.epoch)
        chosen = chosen or (own is not None and own.chosen)  # as it was then, whatever is upstream now
        place = PassPlace(name=name, epoch=epoch, number=site.epoch, drawing=history.drawing, chosen=chosen)
        if own is None:  # a stage that was added in the middle of a pass keeps none of it
            place = replace(place, files=(ROOT if state is None else None, 0, ""))
        else:
            stands = own.tip or None, own.kept or 0, own.next or ""
            place = replace(place, files=stands, reached=own.reached or own.served)
            if place.reached:  # perhaps nothing more of this pass is pulled, and the next one serves the same drawing
                history.epoch = epoch
        run = run_over(upstream.at(replace(site, epoch=epoch))(state))
        super().__init__(files.stage, run, place, 0 if own is None else own.served)
        self._files, self._history, self._upstream = files, history, upstream
        self._open_at: str | None = None  # the id of the block after which the flow is open
        self._keeps = True
        self._chain: list[CacheBlock] = []
        self._read: tuple[CacheBlock, BlockInfo] | None = None
        self._block: list[T] = []
        self._bytes = 0
        self._since = 0.0

    @property
    def complete(self) -> bool:
        return bool(self._chain) and self._chain[-1].end

    # Finding --------------------------------------------------------------------------------------------------------

    async def find(self) -> None:
        """Find the drawing that the pass serves and its blocks, and open the upstream after them."""
        found = await self._call(self._files.look)
        history, (tip, kept, following) = self._history, self._files_place
        self._open_at, self.drawn = tip, kept
        drawing = history.drawing = found.newest if history.drawing is None else history.drawing
        self._keeps = drawing >= found.newest
        self.place = replace(self.place, drawing=drawing)
        chain: list[CacheBlock] | None = None
        if tip == ROOT and not self.place.reached:
            chain = self._blocks_from_start(found, drawing)
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

    def _blocks_from_start(self, found: FoundBlocks, drawing: int) -> list[CacheBlock]:
        """Return the blocks of a pass that begins: those of the pass before it, or the longest chain in the folder."""
        tip: str = self._history.kept or ROOT
        chain = found.chain(tip)
        return [*(chain or []), *found.beyond(tip if chain else ROOT, drawing)]

    def _later_blocks(self, found: FoundBlocks, tip: str, following: str, drawing: int) -> list[CacheBlock]:
        """Return the blocks after the one that a state refers to; `following` was being drawn there."""
        if self.place.reached > self.drawn and (known := found.blocks.get(following)) is not None:
            return [known, *found.beyond(following, drawing)]
        if self.place.reached <= self.drawn:
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
            counts = counts_to_replay(skips_in(state), {name: count for (_, name), count in tally.skipped.items()})
            state = with_skips(state, counts)
        await self.flow.aclose()
        self.flow = self._upstream.at(replace(self.run.site, epoch=epoch))(state)
        self.flow.reader = self.run.meter
        self.mark = self.flow.state
        self.place = replace(self.place, epoch=epoch)

    def _settle(self, tip: str | None, kept: int) -> None:
        """Let later states refer to this block."""
        self.place = replace(self.place, files=(tip, kept, new_id() if tip else ""))
        self.drawn = kept

    async def _drop(self, chain: list[CacheBlock], at: int, why: str) -> None:
        """Remove a damaged block, and all later ones."""
        logger.warning("%s %s: drawing it again, and all later ones", printable(str(chain[at].path)), why)
        await self._call(partial(self._files.remove, chain[at:]))

    # Serving --------------------------------------------------------------------------------------------------------

    async def kept_items(self) -> Sequence[T]:
        at = bisect_right(self._chain, self.served, key=lambda block: block.stop)
        read, self._read = self._read, None  # one block in memory, and only if it is the next
        if at < len(self._chain):
            block = self._chain[at]
            info: BlockInfo | str | None = read[1] if read is not None and read[0] is block else None
            del read
            if info is None:
                info = await self._call(partial(whole, partial(self._files.read, block)))
            if not isinstance(info, str):
                return info.items[len(info.items) - (block.stop - self.served) :]
            await self._drop(self._chain, at, info)
            await self._open_after(self._chain[:at])
        if not (self._keeps or self.complete):
            self._settle(None, self.drawn)
        return []

    async def draw(self, limit: int) -> Chunk[T] | None:
        chunk = await self.flow.pull(min(limit, BLOCK_ITEMS - len(self._block)))
        if chunk is None:
            return None
        self.drawn += len(chunk.items)
        if self._keeps:
            if not self._block:
                self._since = monotonic()
            self._block.extend(chunk.items)
            self._bytes += sum(map(nbytes, chunk.items))
        return chunk

    async def write(self, *, end: bool = False) -> None:
        if self._keeps and (end or self._is_full):
            await self._write(end)

    @property
    def _is_full(self) -> bool:
        """Whether the block is long enough to be written."""
        if not self._block:
            return False
        most, room = BLOCK_BYTES, self._files.max_bytes
        if room is not None:
            most = min(most, room - self._written_bytes)
        return self._bytes >= most or len(self._block) >= BLOCK_ITEMS or monotonic() - self._since >= BLOCK_S

    async def _write(self, end: bool) -> None:
        place, now, items, self._block, self._bytes = self.place, self.flow.state, self._block, [], 0
        tip, _, following = self._files_place
        assert tip is not None
        block = CacheBlock(Path(), place.drawing or 0, self.drawn, tip, following, end, 0, place.chosen)
        info = BlockInfo(items, place.epoch, now.json())
        written = await self._call(partial(self._files.write, block, info, self._written_bytes))
        if tip == ROOT and block.drawing:
            await self._call(partial(self._files.remove_before, block.drawing))
        self._chain.append(written)
        self.mark = now
        self._history.kept = following
        self._settle(following, self.drawn)

    @property
    def _written_bytes(self) -> int:
        return sum(block.nbytes for block in self._chain)

    @property
    def _files_place(self) -> tuple[str | None, int, str]:
        assert self.place.files is not None
        return self.place.files

    async def _call(self, work: Callable[[], R]) -> R:
        return await self.run.site.tasks.threads.run(work, "a file")
