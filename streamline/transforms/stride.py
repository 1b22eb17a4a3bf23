"""One shard of a flow that every worker reads whole: each n-th item. State: items seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Chunk, Lists, Run
from streamline.core.state import NumberedStates, Over, Picked, State
from streamline.core.state_types import Count
from streamline.transforms.base import Stage

__all__ = ["Stride"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Stride(Stage[T, T]):
    """The items i with i mod num_shards = shard of where it runs."""

    state_type: ClassVar[Any] = Count

    @property
    def kind(self) -> str:
        """What users wrote that made it."""
        return "shard"

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, own or 0, upstream)

    async def lists(self, run: Run[T]) -> Lists[T]:
        seen: int = run.own or 0
        shard, num_shards = run.site.shard, run.site.num_shards
        while (chunk := await run.upstream.pull(run.want * num_shards)) is not None:
            first = (shard - seen) % num_shards
            picked = range(first, len(chunk.items), num_shards)
            states = Picked(NumberedStates(self.name, seen + 1, chunk.states), picked)
            seen += len(chunk.items)
            yield Chunk(chunk.items[first::num_shards], states, Over(self.name, seen, chunk.end))
            del chunk  # items are not kept while the next are made
