"""Drawing the cycles of a `.regenerate`, one behind the other: from its upstream, or from their files."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from streamline.caching.cycle import Cycle, Held, Kept, Place, drawn_own
from streamline.caching.rows import Rows, part
from streamline.caching.spill import Found, Spill
from streamline.core.counters import Detail, Details
from streamline.core.flow import Chunk, Flow, Site
from streamline.core.pace import Pace
from streamline.core.state import Over, State
from streamline.errors import ResumeError

__all__ = ["Drawing", "Recipe", "Turns"]


class Recipe:
    """How cycles are drawn.

    Attributes:
      name: the stage as messages call it.
      size: items of a cycle, or rows.
      block: rows of an output; None: items are served as they are.
    """

    __slots__ = ("block", "name", "reuse", "seed", "size")

    def __init__(self, name: str, size: int, block: int | None, seed: int | None, reuse: int) -> None:
        self.name, self.size, self.block, self.seed, self.reuse = name, size, block, seed, reuse


class Turns:
    """What is counted of the cycles of one opening.

    Attributes:
      cycle: that is served, from 0; `served` of its `of` outputs were, `each` in one serving.
      drawn: cycles, from the upstream.
      generating_s: that the upstream took for their items.
      waited_s: that there was nothing to serve until the next cycle came.
    """

    __slots__ = ("cycle", "drawn", "each", "generating_s", "of", "served", "waited_s")

    def __init__(self, cycle: int, served: int) -> None:
        self.cycle, self.served = cycle, served
        self.of = self.each = self.drawn = 0
        self.generating_s = self.waited_s = 0.0

    def serves(self, place: Place, served: int) -> None:
        """So many outputs of a cycle were served."""
        self.cycle, self.served, self.of, self.each = place.number, served, place.total, place.outputs

    def details(self) -> Details:
        """Tell the stage's meter."""
        return (
            Detail("cycle", self.cycle, how="now"),
            Detail("served", self.served, how="total"),
            Detail("of", self.of, how="total"),
            Detail("reuse", -(-self.served // self.each) if self.each else 0, how="now"),
            Detail("drawn", self.drawn),
            Detail("generating_s", self.generating_s),
            Detail("waited_s", self.waited_s),
        )


class Drawing(Flow[Cycle]):
    """A flow of cycles. A cycle that was begun before a failure isn't handed out: a part of one has no order.

    Args:
      own: the stage's part of the state to begin at; None: at the beginning.
      spill: where cycles are kept; None: nowhere.
      upstream: opened at that state; closed by this flow.

    Attributes:
      begin: the stage's state before the first output.
      served: outputs of the first cycle that were served before.
      turns: what is counted.
    """

    def __init__(self, recipe: Recipe, own: Any, spill: Spill | None, upstream: Flow[Any], site: Site) -> None:
        here = upstream.state
        super().__init__(here)
        own = own or drawn_own(0)
        self._recipe, self._spill, self._upstream, self._site = recipe, spill, upstream, site
        self._number: int = own["cycle"]
        self._mark: State = here
        self._skip: int = own.get("skip", 0)
        self._left: Any = None  # the last block, if the cycle before had no room for all of it
        self._spare: list[Rows] = []
        self._dry = False
        self.served: int = own["served"]
        self.turns = Turns(self._number, self.served)
        self._again = own if self.served and not own.get("files") else None
        given = tuple(own.get("files") or ())
        self._names = None if spill is None else spill.names(site.epoch, self._number, given)
        self._files = self._places_of(given)
        self.begin: State = Over(recipe.name, own, here)
        if spill is not None and ("files" in own or (not self.served and not self._skip)):
            self.begin = Kept(
                recipe.name, self._files[0] if self._files else self._place(self._number - 1), self.served
            )

    def _place(self, number: int, **more: Any) -> Place:
        here = self._upstream.state
        states = {"begin": here, "end": here, "now": here}
        return Place(number=number, epoch=self._site.epoch, names=self._names, **{**states, **more})

    def _places_of(self, files: tuple[str, ...]) -> list[Place]:
        """Return the places of cycles that are to be read from files."""
        if files and self._spill is None:
            raise ResumeError(
                f"the snapshot's cycle of {self._recipe.name} is kept in a folder, in {files[0]}: resume it with "
                ".regenerate(spill=) as it was"
            )
        return [self._place(self._number + at, file=file) for at, file in enumerate(files)]

    @property
    def behind(self) -> State:
        """The stage's state behind everything, once the upstream has ended."""
        if self._spill is None:
            return Over(self._recipe.name, drawn_own(self._number), self._upstream.state)
        return Kept(self._recipe.name, self._place(self._number - 1), 0)

    def done_with(self, cycle: Cycle) -> None:
        """Take back the memory of a cycle that was served to its end."""
        rows = cycle.held
        if isinstance(rows, Rows) and rows.size == self._recipe.size:
            rows.clear()
            self._spare.append(rows)

    async def aclose(self) -> None:
        await super().aclose()
        self._left = None
        self._spare.clear()
        await self._upstream.aclose()

    async def _next(self, limit: int) -> Chunk[Cycle] | None:
        if self._files:
            cycle = await self._read(self._files.pop(0))
        else:
            cycle = await self._drawn()
            if not cycle.place.of:
                return None
        return Chunk([cycle], [cycle.place.now])

    async def _read(self, place: Place) -> Cycle:
        """Return the cycle that is in a file, and let its place know about it."""
        assert self._spill is not None
        assert place.file is not None
        found = await self._spill.read(place.file, self._site.tasks.threads)
        block = self._recipe.block
        held: Held = found.items if block is None else Rows.holding(found.items[0], block)
        place.of, place.seed, place.reuse = found.of, found.seed, found.reuse
        place.outputs = found.of if isinstance(held, list) else held.outputs
        self._left, self._skip, self._number = found.rest, 0, place.number + 1
        place.used = 0 if found.rest is None else 1
        return Cycle(place, held)

    async def _drawn(self) -> Cycle:
        """Return the next cycle; at the end, one of nothing."""
        recipe, again, begin, skip = self._recipe, self._again, self._mark, self._skip
        size = recipe.size if again is None else again["of"]
        held: Held
        if recipe.block is None:
            held, used = await self._items(size), 0
            count = outputs = len(held)
        else:
            held, used = await self._rows(size, recipe.block)
            count, outputs = held.filled, held.outputs
        if again is not None and count < size:
            raise ResumeError(
                f"{recipe.name} was serving a cycle of {size:,}, and only {count:,} of them are left to be drawn "
                "again: what is before it gives fewer than it did"
            )
        seed, reuse = (recipe.seed, recipe.reuse) if again is None else (again["seed"], again["reuse"])
        place = self._place(
            self._number, begin=begin, skip=skip, end=self._mark, used=used, of=count, outputs=outputs, seed=seed,
            reuse=reuse,
        )  # fmt: skip
        if not count:
            return Cycle(place, held)
        self._again, self._number = None, self._number + 1
        self.turns.drawn += 1
        if self._spill is not None:
            rest = None if self._left is None else part(self._left, used)
            kept = Found(held if isinstance(held, list) else [held.whole()], rest, count, seed, reuse)
            assert self._names is not None
            file = self._names.of(place.number)
            assert file is not None
            await self._spill.write(file, kept, self._site.tasks.threads)
            place.file = file
        return Cycle(place, held)

    async def _pulled(self, limit: int) -> Chunk[Any] | None:
        began = perf_counter()
        try:
            return await self._upstream.pull(limit)
        finally:
            self.turns.generating_s += perf_counter() - began

    async def _items(self, size: int) -> list[Any]:
        items: list[Any] = []
        pace = Pace()
        try:
            while len(items) < size and not self._dry:
                if (chunk := await self._pulled(size - len(items))) is None:
                    self._dry = True
                    break
                items.extend(chunk.items)
                del chunk
                await pace.breathe()
        except BaseException:
            items.clear()  # a failure's frames are kept with it
            raise
        self._mark = self._upstream.state
        return items

    async def _rows(self, size: int, block: int) -> tuple[Rows, int]:
        """Return the rows of a cycle, and how many of the last block are its own, if that isn't used up."""
        rows = self._spare.pop() if self._spare and size == self._recipe.size else Rows(size, block)
        try:
            return rows, await self._fill(rows)
        except BaseException:
            rows.drop()  # likewise
            raise

    async def _fill(self, rows: Rows) -> int:
        pace, before = Pace(), self._mark
        while rows.missing:
            if self._left is None:
                before = self._upstream.state
                if self._dry or (chunk := await self._pulled(1)) is None:
                    self._dry = True
                    break
                if chunk.items:
                    self._left = chunk.items[0]
                del chunk
            if self._left is not None:
                room = rows.missing
                has = rows.add(self._left, self._skip)
                if has - self._skip > room:
                    self._skip += room
                    self._mark = before
                    return self._skip
                self._left, self._skip = None, 0
            await pace.breathe()
        self._mark = self._upstream.state
        return 0
