"""`.regenerate`: a cache that is drawn anew, cycle by cycle: `size` items of the upstream, shuffled, then dropped.

The next cycle is drawn when the last item of one has been served, never by a clock, so that ranks which have served as
many items are in the same cycle. State: the upstream's at the cycle's start (a mark, `Since`), the cycle, and how much
of it was served: a resume draws it again. With `spill`, the upstream's after the cycle, and the file that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar, TypeVar, cast

from streamline.core.driver import behind_channel
from streamline.core.figures import Detail, Details
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, Site, StageRun
from streamline.core.pace import Pace
from streamline.core.state import MadeStates, Over, State, Tree
from streamline.errors import ResumeError
from streamline.transforms.base import Stage, StageLayout
from streamline.transforms.regenerate_cycle import (
    Cycle,
    CycleFileState,
    CyclePart,
    CyclePlace,
    Held,
    RowStore,
    Spill,
    SpilledCycle,
    rows_from,
)


class CycleCounts:
    """Counters of one run.

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

    def serves(self, place: CyclePlace, served: int) -> None:
        """Count the outputs served of a cycle."""
        self.cycle, self.served, self.of, self.each = place.number, served, place.total, place.outputs

    def details(self) -> Details:
        """Return the counters for the stage's meter."""
        return (
            Detail("cycle", self.cycle, how="now"),
            Detail("served", self.served, how="total"),
            Detail("of", self.of, how="total"),
            Detail("reuse", -(-self.served // self.each) if self.each else 0, how="now"),
            Detail("drawn", self.drawn),
            Detail("generating_s", self.generating_s),
            Detail("waited_s", self.waited_s),
        )


class CycleDrawing:
    """What is drawn from the upstream for one cycle after the other.

    Attributes:
      mark: the upstream's state where the next cycle begins; `skip` rows of what comes then are of the cycle before.
      rest: the last block, if the cycle before had no room for all of it.
      dry: the upstream has ended.
      spare: memory of cycles that were served to their end.
    """

    def __init__(self, upstream: Flow[Any], skip: int, counts: CycleCounts) -> None:
        self.upstream, self.skip, self._counts = upstream, skip, counts
        self.mark: State = upstream.state
        self.rest: Any = None
        self.dry = False
        self.spare: list[RowStore] = []

    async def _pull(self, limit: int) -> Chunk[Any] | None:
        began = perf_counter()
        try:
            return await self.upstream.pull(limit)
        finally:
            self._counts.generating_s += perf_counter() - began

    async def items(self, size: int) -> list[Any]:
        items: list[Any] = []
        pace = Pace()
        try:
            while len(items) < size and not self.dry:
                if (chunk := await self._pull(size - len(items))) is None:
                    self.dry = True
                    break
                items.extend(chunk.items)
                del chunk
                await pace.maybe_yield()
        except BaseException:
            items.clear()  # the failure's traceback keeps this frame
            raise
        self.mark = self.upstream.state
        return items

    async def rows(self, size: int, block: int) -> tuple[RowStore, int]:
        """Return the rows of a cycle, and how many of the last block are its own, if that isn't used up."""
        rows = self.spare.pop() if self.spare and size == self.spare[-1].size else RowStore(size, block)
        try:
            return rows, await self._fill(rows)
        except BaseException:
            rows.drop()  # likewise
            raise

    async def _fill(self, rows: RowStore) -> int:
        pace, before = Pace(), self.mark
        while rows.missing:
            if self.rest is None:
                before = self.upstream.state
                if self.dry or (chunk := await self._pull(1)) is None:
                    self.dry = True
                    break
                if chunk.items:
                    self.rest = chunk.items[0]
                del chunk
            if self.rest is not None:
                room = rows.missing
                has = rows.add(self.rest, self.skip)
                if has - self.skip > room:
                    self.skip += room
                    self.mark = before
                    return self.skip
                self.rest, self.skip = None, 0
            await pace.maybe_yield()
        self.mark = self.upstream.state
        return 0


class CycleFlow(Flow[Cycle]):
    """A flow of cycles. A cycle that a failure cut short isn't handed out: a part of one has no order.

    Args:
      own: the stage's part of the state to begin at.
      spill: where cycles are kept; None: nowhere.
      upstream: opened at that state; closed by this flow.

    Attributes:
      begin: the stage's state before the first output.
      served: outputs of the first cycle that were served before.
    """

    def __init__(
        self, stage: Regenerate[Any], own: CyclePart, spill: Spill | None, upstream: Flow[Any], site: Site
    ) -> None:
        super().__init__(upstream.state)
        self._stage, self._spill, self._site = stage, spill, site
        self._number, self.served = own.cycle, own.served
        self.counts = CycleCounts(own.cycle, own.served)
        self._drawing = CycleDrawing(upstream, own.skip, self.counts)
        self._replay = own if own.served and not own.files else None
        given = tuple(own.files or ())
        self._names = None if spill is None else spill.names(site.epoch, own.cycle, given)
        self._files = self._places_of(given)
        self.begin: State = Over(stage.name, own, upstream.state)
        if spill is not None and (own.files is not None or (not own.served and not own.skip)):
            place = self._files[0] if self._files else self._place(own.cycle - 1)
            self.begin = CycleFileState(stage.name, place, own.served)

    def _place(self, number: int, **more: Any) -> CyclePlace:
        here = self._drawing.upstream.state
        states = {"begin": here, "end": here, "now": here}
        return CyclePlace(number=number, epoch=self._site.epoch, names=self._names, **{**states, **more})

    def _places_of(self, files: tuple[str, ...]) -> list[CyclePlace]:
        """Return the places of cycles that are to be read from files."""
        if files and self._spill is None:
            raise ResumeError(
                f"the snapshot's cycle of {self._stage.name} is kept in a folder, in {files[0]}: resume it with "
                ".regenerate(spill=) as it was"
            )
        return [self._place(self._number + at, file=file) for at, file in enumerate(files)]

    @property
    def end_state(self) -> State:
        """The stage's state at the end, once the upstream has ended."""
        if self._spill is None:
            return Over(self._stage.name, CyclePart.before(self._number), self._drawing.upstream.state)
        return CycleFileState(self._stage.name, self._place(self._number - 1), 0)

    def recycle(self, cycle: Cycle) -> None:
        """Reuse the memory of a cycle that was served to its end."""
        rows = cycle.held
        if isinstance(rows, RowStore) and rows.size == self._stage.size:
            rows.clear()
            self._drawing.spare.append(rows)

    async def aclose(self) -> None:
        await super().aclose()
        self._drawing.rest = None
        self._drawing.spare.clear()
        await self._drawing.upstream.aclose()

    async def _next(self, limit: int) -> Chunk[Cycle] | None:
        if self._files:
            cycle = await self._read(self._files.pop(0))
        else:
            cycle = await self._draw()
            if not cycle.place.of:
                return None
        return Chunk([cycle], [cycle.place.now])

    async def _read(self, place: CyclePlace) -> Cycle:
        """Return the cycle that is in a file, and let its place know about it."""
        assert self._spill is not None
        assert place.file is not None
        found = await self._spill.read(place.file)
        block = self._stage.block
        held: Held = found.items if block is None else RowStore.holding(found.items[0], block)
        place.of, place.seed, place.reuse = found.of, found.seed, found.reuse
        place.outputs = found.of if isinstance(held, list) else held.outputs
        self._drawing.rest, self._drawing.skip, self._number = found.rest, 0, place.number + 1
        place.used = 0 if found.rest is None else 1
        return Cycle(place, held)

    async def _draw(self) -> Cycle:
        """Return the next cycle; at the end, one of nothing."""
        stage, drawing, again = self._stage, self._drawing, self._replay
        begin, skip = drawing.mark, drawing.skip
        size, seed, reuse = stage.size, stage.order_seed, stage.reuse
        if again is not None:
            size, seed, reuse = cast(Any, (again.of, again.seed, again.reuse))
        held: Held
        if stage.block is None:
            held, used = await drawing.items(size), 0
            count = outputs = len(held)
        else:
            held, used = await drawing.rows(size, stage.block)
            count, outputs = held.filled, held.outputs
        if again is not None and count < size:
            raise ResumeError(
                f"{stage.name} was serving a cycle of {size:,}, and only {count:,} of them are left to be drawn "
                "again: what is before it gives fewer than it did"
            )
        place = self._place(
            self._number, begin=begin, skip=skip, end=drawing.mark, used=used, of=count, outputs=outputs, seed=seed,
            reuse=reuse,
        )  # fmt: skip
        if not count:
            return Cycle(place, held)
        self._replay, self._number = None, self._number + 1
        self.counts.drawn += 1
        if self._spill is not None:
            rest = None if drawing.rest is None else rows_from(drawing.rest, used)
            kept = SpilledCycle(held if isinstance(held, list) else [held.whole()], rest, count, seed, reuse)
            assert self._names is not None
            file = self._names.of(place.number)
            assert file is not None
            await self._spill.write(file, kept)
            place.file = file
        return Cycle(place, held)


T = TypeVar("T")

TOGETHER_ROWS = 4096
"""Rows that are gathered together at the most, if a block is no larger: the consumer may want only one block."""

ROWS_AN_ITEM = 8
"""Rows that count as one item in a channel: where one holds 512 items, that is as many as are gathered together."""


@dataclass(frozen=True, kw_only=True)
class Regenerate(Stage[T, T]):
    """Draws `size` items, serves each of them `reuse` times, drops them, and draws the next.

    Attributes:
      shuffle: each serving by (seed, epoch, shard, cycle, serving).
      block: items are blocks of rows; `size` counts rows, and blocks of so many come out. None: they are no blocks.
      overlap: the next cycle is drawn while one is served.
      spill: a folder for the cycles that saved snapshots may need.
    """

    kind: ClassVar[str] = "regenerate"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "size": "the cycle that is being served is served to its end, the next ones have the new size",
        "shuffle": "the cycle that is being served is served as it was begun, the next ones as it says now",
        "seed": "the cycle that is being served is served as it was begun, the next ones are shuffled by the new seed",
        "reuse": "the cycle that is being served is served as often as it was begun, the next ones as it says now",
        "added": "the items from here on come in cycles, beginning with cycle 0",
        "removed": "the items from here on come in their order, once",
    }
    state_type: ClassVar[Any] = CyclePart
    initial_state = CyclePart.before(0)
    uncounted_options = ("overlap", "spill")

    size: int
    shuffle: bool = True
    seed: int = 0
    reuse: int = 1
    block: int | None = None
    overlap: bool = False
    spill: str | None = None

    def without_disk(self) -> Regenerate[T]:
        return replace(self, spill=None)

    @property
    def order_seed(self) -> int | None:
        """The seed of the orders in which cycles are served; None: as drawn."""
        return self.seed if self.shuffle else None

    def num_outputs(self, items: float) -> float | None:
        return items * self.reuse if self.block is None else None

    @classmethod
    def replay_cost(cls, own: CyclePart) -> str | None:
        if own.files is not None:
            return None
        if not own.served:
            return "draws one block again, of which a part was served" if own.skip else None
        return (
            f"draws the {own.of:,} items of cycle {own.cycle:,} again, and passes over the {own.served:,} outputs of "
            "it that were delivered"
        )

    @classmethod
    def held_items(cls, own: CyclePart) -> str | None:
        if own.files:
            return f"has served {own.served:,} outputs of cycle {own.cycle:,}, and the rest is in its file alone"
        return cls.replay_cost(own)

    @property
    def rewinds(self) -> bool:
        return self.spill is None

    @property
    def in_flight(self) -> int:
        return 2 * self.size if self.overlap else self.size

    @property
    def layout(self) -> StageLayout:
        return StageLayout(holds=self.size, before=self.size if self.overlap else None)

    @property
    def spills_to(self) -> str | None:
        return self.spill

    @property
    def output_weight(self) -> int:
        return 1 if self.block is None else max(1, self.block // ROWS_AN_ITEM)

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        own: CyclePart = self.part_of(state)
        site = upstream.site
        spill = None if self.spill is None else Spill(self.spill, self.name, site)
        drawing = CycleFlow(self, own, spill, upstream(state), site)
        cycles: Flow[Cycle] = drawing
        if self.overlap:
            cycles = behind_channel(drawing, site, f"cycles of {self}", 1)
        run = StageRun(cycles, own, site, site.meter(self.name, self.kind), site.skips(self.name, self.kind, state))
        return ListsFlow(drawing.begin, self._serve(run, drawing), run, cycles)

    async def _cycle(self, run: StageRun[Cycle], counts: CycleCounts) -> Chunk[Cycle] | None:
        """Return the next cycle. The time until it is there is a wait, which an inbox counts itself."""
        meter = None if self.overlap else run.meter
        if meter is not None:
            meter.wait_begins("wait_input")
        began = perf_counter()
        try:
            return await run.upstream.pull(1)
        finally:
            counts.waited_s += perf_counter() - began
            if meter is not None:
                meter.wait_ends()

    async def _serve(self, run: StageRun[Cycle], drawing: CycleFlow) -> Lists[T]:
        served, counts, pace = drawing.served, drawing.counts, Pace()
        if run.meter is not None:
            run.meter.details_from(counts.details)
        most = 2**31 if self.block is None else max(1, TOGETHER_ROWS // self.block)
        while (chunk := await self._cycle(run, counts)) is not None:
            (cycle,) = chunk.items
            del chunk
            run.upstream.release()  # so that the next one may be drawn
            while served < cycle.place.total:
                first, served = served, cycle.stop(served, min(run.max_items, most))
                counts.serves(cycle.place, served)
                states = MadeStates(cycle.place.state, self.name, first=first + 1)
                yield Chunk(cycle.outputs(first, served, run.site), states)  # held by nothing here
                await pace.maybe_yield()
            drawing.recycle(cycle)
            del cycle  # before the next one is drawn
            served = 0
        yield Chunk((), (), drawing.end_state)  # what was dropped at the end
