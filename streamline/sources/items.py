"""Items that can be had by index: the reference source, and what others are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from streamline import sharding
from streamline.blame import blame
from streamline.errors import PlanError
from streamline.flow import Chunk, Demand, Flow, Lists, ListsFlow, Site
from streamline.index import Index, Whole
from streamline.pace import Pace
from streamline.sources.base import Mode, Part, Source
from streamline.states import At, Counted, Tree

__all__ = ["Indexable", "Items"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Indexable(Protocol[T_co]):
    """What `from_items` reads: a list, an array, a memory map, a map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T_co: ...


@runtime_checkable
class _TakesLists(Protocol):
    def __getitems__(self, indices: list[int], /) -> Sequence[Any]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Items(Source[T]):
    """Reads by index. State: items consumed in this shard; a resume computes its place, whatever the shuffle."""

    modes: ClassVar[tuple[Mode, ...]] = ("interleaved", "contiguous")
    indexable: ClassVar[bool] = True

    items: Indexable[T]

    def __eq__(self, other: object) -> bool:
        """Of the same items, not of equal ones: comparing data takes long, and arrays don't compare to a bool."""
        return isinstance(other, Items) and self.items is other.items and self.name == other.name

    def __hash__(self) -> int:
        return hash((self.name, id(self.items)))

    @property
    def length(self) -> int | None:
        return len(self.items)

    @property
    def kind(self) -> str:
        return "from_items"

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        done: int = 0 if state is None else state[self.name]
        index = part.index or Whole(len(self.items))
        demand = Demand(site)
        return ListsFlow(At(self.name, done), self._lists(demand, index, positions_of(index, site, part), done), demand)

    async def _lists(self, run: Demand, index: Index, positions: range | None, done: int) -> Lists[T]:
        pace, site, read = Pace(), run.site, self._reader()
        while True:
            stop = done + run.want if positions is None else min(done + run.want, len(positions))
            if stop <= done:
                return
            wanted = _positions(positions, site, done, stop)
            indices: Sequence[int] = wanted if index.identity else index(np.asarray(wanted, np.int64)).tolist()
            found: list[T] = []
            failure: BaseException | None = None
            try:
                read(indices, pace, found)
            except BaseException as error:
                failure = blame(error, self.name, site, At(self.name, done + len(found) + 1))
            if found:
                yield Chunk(found, Counted(self.name, done + 1))
                done += len(found)
            if failure is not None:
                raise failure
            await pace.breathe()

    def _reader(self) -> Callable[[Sequence[int], Pace, list[T]], None]:
        """Return what appends the items of the first of some indices to a list, as many as fit a slice of time."""
        if isinstance(self.items, _TakesLists):
            return self._read_list
        getitem: Callable[[int], T] = self.items.__getitem__
        return lambda indices, pace, found: pace.apply(getitem, indices, 0, found)

    def _read_list(self, indices: Sequence[int], pace: Pace, found: list[T]) -> None:
        items: Sequence[T] = cast(_TakesLists, self.items).__getitems__(list(indices))
        if len(items) != len(indices):
            raise PlanError(f"expected {len(indices)} items from __getitems__, got {len(items)}")
        found.extend(items)


def positions_of(index: Index, site: Site, part: Part) -> range | None:
    """Return a shard's positions in the index; None if the index is endless: then every `num_shards`-th."""
    if index.length is None:
        return None  # a plan refuses contiguous blocks of it
    split = sharding.contiguous if part.mode == "contiguous" else sharding.interleaved
    return split(index.length, site.num_shards, site.shard, drop_remainder=part.drop_remainder)


def _positions(positions: range | None, site: Site, start: int, stop: int) -> range:
    if positions is None:
        return range(site.shard + start * site.num_shards, site.shard + stop * site.num_shards, site.num_shards)
    return positions[start:stop]
