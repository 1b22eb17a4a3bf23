"""Permuting a flow, window by window.

While one window is served, the next is drawn, one for one, so that the trainer never waits for a window to fill
(after the first). State: the upstream's at the served window's start (a mark, `Since`), the window's number and how
much of it was served: a resume reads that window again, and the one behind it while it serves.

The idea of "start state + position" is grain's WindowShuffle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from streamline.flow import Chunk, Lists, Run, Site, Stage
from streamline.states import Over, Since, State

__all__ = ["IndexShuffle", "Shuffle", "ShuffleFiles", "permutation"]

T = TypeVar("T")


def permutation(length: int, seed: int, site: Site, window: int) -> list[int]:
    """Return a permutation of `range(length)` that depends on (seed, epoch, shard, window) alone."""
    entropy = np.random.SeedSequence([seed, site.num_shards, site.shard, window, *site.epoch])
    order: list[int] = np.random.Generator(np.random.PCG64(entropy)).permutation(length).tolist()
    return order


@dataclass(frozen=True, kw_only=True)
class Shuffle(Stage[T, T]):
    """Permutes each `window` items by (seed, epoch, shard, number of the window)."""

    window: int
    seed: int = 0

    @property
    def rewinds(self) -> bool:
        return True

    @property
    def in_flight(self) -> int:
        return 2 * self.window

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, own or {"window": 0, "served": 0}, upstream)

    async def lists(self, run: Run[T]) -> Lists[T]:
        number, served = (run.own["window"], run.own["served"]) if run.own else (0, 0)
        drawing = _Window[T](self.window, run.upstream.state)
        while not drawing.complete:
            await drawing.draw(run, self.window - len(drawing.items))
        if drawing.failure is not None:
            raise drawing.failure
        while drawing.items:
            serving, drawing = drawing, _Window[T](self.window, drawing.now)
            order = permutation(len(serving.items), self.seed, run.site, number)
            while served < len(order):
                # One for one; behind a resume two for one, until the next window is as full as it would have been.
                await drawing.catch_up(run, served)
                picked = order[served : served + run.want]
                states = _Served(self.name, number, served, len(order), serving)
                served += len(picked)
                yield Chunk([serving.items[index] for index in picked], states)
            while not drawing.complete:
                await drawing.draw(run, self.window - len(drawing.items))
            if drawing.failure is not None:
                raise drawing.failure  # behind the last whole window: a part of one has no order yet
            number, served = number + 1, 0


class _Window(Generic[T]):
    """The items of one window, and where the upstream stood before and behind them."""

    def __init__(self, size: int, mark: State) -> None:
        self._size = size
        self._ended = False
        self.failure: Exception | None = None
        self.items: list[T] = []
        self.mark = mark
        self.now = mark

    @property
    def complete(self) -> bool:
        return self._ended or len(self.items) == self._size

    async def draw(self, run: Run[T], count: int) -> None:
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

    async def catch_up(self, run: Run[T], served: int) -> None:
        """Draw until as many are here as were served of the window before, but at most two for one."""
        enough = min(served, len(self.items) + 2 * run.want)
        while not self.complete and len(self.items) < enough:
            await self.draw(run, enough - len(self.items))


class _Served:
    """The states of a served list: behind a window's last item, nothing is left to go back to."""

    __slots__ = ("_length", "_name", "_number", "_served", "_window")

    def __init__(self, name: str, number: int, served: int, length: int, window: _Window[Any]) -> None:
        self._name, self._number, self._served, self._length = name, number, served, length
        self._window = (window.mark, window.now)

    def __getitem__(self, index: int, /) -> State:
        mark, now = self._window
        served = self._served + index + 1
        if served == self._length:
            return Over(self._name, {"window": self._number + 1, "served": 0}, now)
        return Over(self._name, {"window": self._number, "served": served}, Since(mark, now))


@dataclass(frozen=True, kw_only=True)
class IndexShuffle(Stage[T, T]):
    """Permutes the whole index of a source before it is sharded, by (seed, epoch); see `streamline.index`."""

    seed: int = 0

    @property
    def kind(self) -> str:
        return "shuffle"


@dataclass(frozen=True, kw_only=True)
class ShuffleFiles(Stage[T, T]):
    """Permutes the list of files before it is sharded, by (seed, epoch)."""

    seed: int = 0
