"""`.shuffle` of a flow, window by window; of an index, or of a list of files, as a whole.

While one window is served, the next is drawn, one for one, so that the trainer never waits for a window to fill
(after the first). State: the upstream's at the served window's start (a mark, `Since`), the window's number, how much
of it was served, of how many items, and by which seed: a resume reads that window again, and the next one while it
serves. A window keeps the length and the seed that it was begun with; the next ones may have others.

The idea of "start state + position" is grain's WindowShuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from streamline.core.flow import Chunk, Lists, Site, StageRun
from streamline.core.lazy_numpy import np
from streamline.core.state import HeldSince, MadeStates, Over, State
from streamline.core.state_types import Count, Unsigned
from streamline.errors import ResumeError
from streamline.sharding.index import Index, Shuffled
from streamline.sources.base import Part
from streamline.transforms.base import Stage

T = TypeVar("T")


def permutation(length: int, seed: int, site: Site, window: int) -> list[int]:
    """Return a permutation of `range(length)` that depends on (seed, epoch, shard, window) alone."""
    entropy = np.random.SeedSequence([seed, site.num_shards, site.shard, window, *site.epoch])
    order: list[int] = np.random.Generator(np.random.PCG64(entropy)).permutation(length).tolist()
    return order


class WindowPart(msgspec.Struct, frozen=True):
    """The stage's part of a saved state: `served` items of window number `window`, which has `of`."""

    window: Count
    served: Count
    of: Count
    seed: Unsigned

    def __post_init__(self) -> None:
        if self.served > self.of:
            raise ValueError(f"Expected at most {self.of} items served of a window of {self.of}, got {self.served}")


@dataclass(frozen=True, kw_only=True)
class Shuffle(Stage[T, T]):
    """Permutes each `window` items by (seed, epoch, shard, number of the window)."""

    kind: ClassVar[str] = "shuffle"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "window": "the window that is being served is served to its end, the next ones have the new length",
        "seed": "the window that is being served is served to its end, the next ones are shuffled by the new seed",
        "added": "the items from here on are shuffled, beginning with window 0",
        "removed": "the items from here on come in their order",
    }
    state_type: ClassVar[Any] = WindowPart
    keeps_only_held: ClassVar[bool] = True
    one_to_one = True
    rewinds = True

    window: int
    seed: int = 0

    @classmethod
    def answers(cls, options: Mapping[str, Any]) -> bool:
        return "window" in options

    @classmethod
    def replay_cost(cls, own: WindowPart) -> str | None:
        if not own.served:
            return None
        return (
            f"reads the {own.of:,} items of window {own.window:,} again, and passes over the {own.served:,} of them "
            "that were delivered"
        )

    @property
    def in_flight(self) -> int:
        return 2 * self.window

    @property
    def initial_state(self) -> WindowPart:
        return WindowPart(0, 0, 0, self.seed)

    async def lists(self, run: StageRun[T]) -> Lists[T]:
        drawing = await self._first(run)
        number, served = run.own.window, run.own.served
        while drawing.items:
            serving, drawing = drawing, _DrawnWindow[T](self.window, self.seed, drawing.now)
            order = permutation(len(serving.items), serving.seed, run.site, number)
            while served < len(order):
                # One for one; after a resume two for one, until the next window is as full as it would have been.
                await drawing.catch_up(run, served)
                picked = order[served : served + run.max_items]
                shared = number, len(order), serving.seed, serving.mark, serving.now
                states = MadeStates(_state_in, self.name, *shared, first=served + 1)
                served += len(picked)
                yield Chunk([serving.items[index] for index in picked], states)
            await drawing.fill(run)  # a failure comes after the last whole window: a part of one has no order yet
            number, served = number + 1, 0
        yield Chunk(
            (), (), Over(self.name, WindowPart(number, 0, 0, self.seed), drawing.now)
        )  # what was dropped at the end

    async def _first(self, run: StageRun[T]) -> _DrawnWindow[T]:
        """Return the first window: as it was, if some of it was served."""
        own: WindowPart = run.own
        size, seed = (own.of, own.seed) if own.served else (self.window, self.seed)
        window = _DrawnWindow[T](size, seed, run.upstream.state)
        await window.fill(run)
        if own.served and len(window.items) < own.of:
            raise ResumeError(
                f"{self} was serving a window of {own.of:,} items, and only {len(window.items):,} of them are left to "
                "be read again: what is before it gives fewer than it did"
            )
        return window


class _DrawnWindow(Generic[T]):
    """The items of one window, and the upstream's states before and after them."""

    def __init__(self, size: int, seed: int, mark: State) -> None:
        self._size = size
        self.seed = seed
        self._ended = False
        self.failure: Exception | None = None
        self.items: list[T] = []
        self.mark = mark
        self.now = mark

    @property
    def complete(self) -> bool:
        return self._ended or len(self.items) == self._size

    async def fill(self, run: StageRun[T]) -> None:
        """Draw the rest."""
        while not self.complete:
            await self.draw(run, self._size - len(self.items))
        if self.failure is not None:
            raise self.failure

    async def draw(self, run: StageRun[T], count: int) -> None:
        """Add 1 to `count` items, or learn that there are no more, or none to be had."""
        try:
            chunk = await run.upstream.pull(count)
        except Exception as failure:
            self.failure = failure
            chunk = None
        if chunk is None:
            self._ended = True
        else:
            self.items.extend(chunk.items)
            self.now = chunk.end

    async def catch_up(self, run: StageRun[T], served: int) -> None:
        """Draw until as many are here as were served of the window before, but at most two for one."""
        enough = min(served, self._size, len(self.items) + 2 * run.max_items)  # the one before may have been longer
        while not self.complete and len(self.items) < enough:
            await self.draw(run, enough - len(self.items))


def _state_in(name: str, number: int, length: int, seed: int, mark: State, now: State, served: int) -> State:
    """Return the state after some items of a window: after its last one, there is nothing to go back to."""
    if served == length:
        return Over(name, WindowPart(number + 1, 0, 0, seed), now)
    return Over(name, WindowPart(number, served, length, seed), HeldSince(mark, now))


@dataclass(frozen=True, kw_only=True)
class IndexShuffle(Stage[T, T]):
    """Permutes the whole index of a source before it is sharded, by (seed, epoch); see `streamline.sharding.index`."""

    kind: ClassVar[str] = "shuffle"
    refuses: ClassVar[Mapping[str, str]] = {
        "seed": "every item would be at another place, so that some came twice and others never: the next epoch can "
        "have another seed"
    }
    before_shard = frozenset({"index"})
    moves_items: ClassVar[bool] = True

    seed: int = 0

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        return Shuffled(inner(epoch), [self.seed, *epoch])

    @classmethod
    def answers(cls, options: Mapping[str, Any]) -> bool:
        return "window" not in options


@dataclass(frozen=True, kw_only=True)
class ShuffleFiles(Stage[T, T]):
    """Permutes the list of files before it is sharded, by (seed, epoch)."""

    kind: ClassVar[str] = "shuffle_files"
    refuses: ClassVar[Mapping[str, str]] = {
        "seed": "every file would be in another shard, so that some were read twice and others never: the next epoch "
        "can have another seed"
    }
    before_shard = frozenset({"files"})

    seed: int = 0

    def in_part(self, part: Part) -> Part:
        return replace(part, shuffle_seed=self.seed)
