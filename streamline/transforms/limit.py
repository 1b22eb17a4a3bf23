"""`.take`, `.skip`, and the stride of a shard whose worker reads the whole flow. State: items seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.state import Json, MadeStates, NumberedStates, Over, Picked
from streamline.core.state_types import Count, check_type
from streamline.errors import SnapshotError
from streamline.sharding.index import Index, IndexSlice
from streamline.transforms.base import Stage

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Take(Stage[T, T]):
    """The first `count` items; pulls no more from its upstream."""

    kind: ClassVar[str] = "take"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "count": "it goes on to the new count, what was delivered included; if that is more already, it ends",
        "added": "it counts from here on",
        "removed": "all the rest comes",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset({"count", "removed"})
    state_type: ClassVar[Any] = Count
    initial_state = 0
    before_shard = frozenset({"index", "whole"})

    count: int

    def in_all(self, num_workers: int) -> str:
        return f"up to {self.count * num_workers:,} in all"

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        return IndexSlice(inner(epoch), 0, self.count)

    def num_outputs(self, items: float) -> float | None:
        return min(self.count, items)

    async def lists(self, run: StageRun[T]) -> Lists[T]:
        taken: int = run.own
        while taken < self.count:
            chunk = await run.upstream.pull(min(run.max_items, self.count - taken))
            if chunk is None:
                return
            states = NumberedStates(self.name, taken + 1, chunk.states)
            taken += len(chunk.items)
            last = taken == self.count  # progress after the last item is there or not by chance
            after = None if chunk.progress is None or last else Over(self.name, taken, chunk.progress)
            yield Chunk(chunk.take_items(), states, after)


@dataclass(frozen=True, kw_only=True)
class Skip(Stage[T, T]):
    """All but the first `count` items. A resume skips only those not skipped yet."""

    kind: ClassVar[str] = "skip"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "added": "it skips its count from here on",
        "removed": "what it has not skipped yet comes",
    }
    refuses: ClassVar[Mapping[str, str]] = {
        "count": "what it had to skip is before this snapshot already: for another beginning, begin anew"
    }
    state_type: ClassVar[Any] = Count
    initial_state = 0
    before_shard = frozenset({"index", "whole"})

    count: int

    @classmethod
    def check_state(cls, own: Json, options: Mapping[str, Any], where: str) -> None:
        check_type(own, Count, where)
        count = options.get("count")
        if type(count) is int and own > count:
            raise SnapshotError(f"the snapshot is damaged, or was edited: {where}: it has skipped {own:,} of {count:,}")

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        return IndexSlice(inner(epoch), self.count)

    def num_outputs(self, items: float) -> float | None:
        return max(0, items - self.count)

    async def lists(self, run: StageRun[T]) -> Lists[T]:
        skipped: int = run.own
        while (chunk := await run.upstream.pull(run.max_items)) is not None:
            drop = min(self.count - skipped, len(chunk.items))
            skipped += drop
            kept = chunk.part(drop, len(chunk.items)) if drop else chunk
            states = MadeStates(Over, self.name, skipped, states=kept.states)
            end = Over(self.name, skipped, chunk.end)
            items = [kept.take_items()]
            chunk.items = ()
            yield Chunk(items.pop(), states, end)


@dataclass(frozen=True, kw_only=True)
class Stride(Stage[T, T]):
    """The items i with i mod num_shards = shard."""

    kind: ClassVar[str] = "shard"
    state_type: ClassVar[Any] = Count
    initial_state = 0

    async def lists(self, run: StageRun[T]) -> Lists[T]:
        seen: int = run.own
        shard, num_shards = run.site.shard, run.site.num_shards
        while (chunk := await run.upstream.pull(run.max_items * num_shards)) is not None:
            first = (shard - seen) % num_shards
            picked = range(first, len(chunk.items), num_shards)
            states = Picked(NumberedStates(self.name, seen + 1, chunk.states), picked)
            seen += len(chunk.items)
            yield Chunk(chunk.items[first::num_shards], states, Over(self.name, seen, chunk.end))
            del chunk  # likewise
