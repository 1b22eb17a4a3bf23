"""A source outside the package: the squares below a number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.state import At, CountedStates, Tree
from streamline.core.state_types import Count
from streamline.sources.base import Mode, Part, Source
from streamline.testing.oracle import Upstream, reference


@dataclass(frozen=True, kw_only=True)
class Squares(Source[int]):
    """The squares of 0 to `count` - 1. State: items given in this shard."""

    modes: ClassVar[tuple[Mode, ...]] = ("interleaved",)
    state_type: ClassVar[Any] = Count

    name: str = "squares"
    count: int

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[int]:
        done: int = 0 if state is None else state[self.name]
        context = self.context(site, state)
        return ListsFlow(At(self.name, done), self._lists(context, done), context)

    async def _lists(self, run: StageContext, done: int) -> Lists[int]:
        mine = range(run.site.shard, self.count, run.site.num_shards)
        while items := [n * n for n in mine[done : done + run.max_items]]:
            yield Chunk(items, CountedStates(self.name, done + 1))
            done += len(items)


@reference(Squares)
def squares(source: Squares, upstream: Upstream) -> Iterator[int]:
    return (n * n for n in range(upstream.site.shard, source.count, upstream.site.num_shards))
