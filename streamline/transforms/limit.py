"""The first items of a flow, and all but the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from streamline.flow import Chunk, Lists, Run, Stage
from streamline.states import Numbered, Over, Overlaid, State

__all__ = ["Skip", "Take"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Take(Stage[T, T]):
    """The first `count` items; asks its upstream for no more. State: items taken."""

    count: int

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, own or 0, upstream)

    async def lists(self, run: Run[T]) -> Lists[T]:
        taken: int = run.own or 0
        while taken < self.count:
            chunk = await run.upstream.pull(min(run.want, self.count - taken))
            if chunk is None:
                return
            after = None if chunk.after is None else Over(self.name, taken + len(chunk.items), chunk.after)
            states = Numbered(self.name, taken + 1, chunk.states)
            taken += len(chunk.items)
            yield Chunk(chunk.items, states, after)


@dataclass(frozen=True, kw_only=True)
class Skip(Stage[T, T]):
    """All but the first `count` items. State: items skipped, so that a resume skips none again."""

    count: int

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, own or 0, upstream)

    async def lists(self, run: Run[T]) -> Lists[T]:
        skipped: int = run.own or 0
        while (chunk := await run.upstream.pull(run.want)) is not None:
            drop = min(self.count - skipped, len(chunk.items))
            skipped += drop
            kept = chunk.part(drop, len(chunk.items)) if drop else chunk
            yield Chunk(kept.items, Overlaid(self.name, skipped, kept.states), Over(self.name, skipped, chunk.end))
