"""What the tests of live sources share: a feed that can be read once, over many openings, and reading it in parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel

import streamline as sl

Pipe: TypeAlias = "sl.Pipeline[Any]"


class Tape:
    """Items 0 to length - 1 (or what `item` makes of them), each given once, whoever asks, however often it is opened.

    Attributes:
      at: items given so far.
      opened: how often it was opened.
      closed: how often it was closed.
      pause: items between two moments at which other tasks have their turn.
      hold_at: before this item, it waits until `go` is set.
    """

    def __init__(
        self, length: int, item: Callable[[int], Any] = lambda x: x, hold_at: int | None = None, pause: int = 5
    ) -> None:
        self.length = length
        self.item = item
        self.pause = pause
        self.at = self.opened = self.closed = 0
        self.hold_at = hold_at
        self.held = anyio.Event()
        self.go = anyio.Event()

    async def __call__(self) -> AsyncIterator[Any]:
        """Give the items that nobody got yet."""
        self.opened += 1
        try:
            while self.at < self.length:
                if self.at == self.hold_at:
                    self.held.set()
                    await self.go.wait()
                if self.at % self.pause == 0:
                    await anyio.lowlevel.checkpoint()
                self.at += 1  # and gives it in the same step: a cancellation can't come between
                yield self.item(self.at - 1)
        finally:
            self.closed += 1


async def some(pipe: Pipe, count: int, snapshot: sl.Snapshot | None = None) -> tuple[list[Any], sl.Snapshot]:
    """Return the next items, at most `count`, and the snapshot after the closed stream, through its JSON."""
    seen: list[Any] = []
    async with pipe.open(resume=snapshot) as stream:
        while len(seen) < count:
            try:
                seen.append(await anext(stream))
            except StopAsyncIteration:
                break
    taken = stream.snapshot()
    return seen, sl.Snapshot.from_json(taken.to_json())


async def rest(pipe: Pipe, snapshot: sl.Snapshot | None) -> list[Any]:
    """Return all that is left."""
    async with pipe.open(resume=snapshot) as stream:
        return [item async for item in stream]
