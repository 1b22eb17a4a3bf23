"""`from_items`: items read by index; the reference source that others are tested against."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

from streamline.core.blame import blame
from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.lazy_numpy import np
from streamline.core.meters import HoldTimer, StageMeter
from streamline.core.pace import Pace
from streamline.core.replay import FailedCall
from streamline.core.state import At, CountedStates, Json, State, States, Tree
from streamline.core.state_types import Count
from streamline.errors import PlanError, PlanTypeError, SnapshotError
from streamline.sharding import split as sharding
from streamline.sharding.index import Index, WholeIndex
from streamline.sources.base import Change, Mode, Part, Source, Split
from streamline.sources.table_rows import TableRows

PLAIN: tuple[object, ...] = (range, list, tuple)
"""Types that read without delay or user code, and whose slices equal their items one by one."""

TABLE_S = 0.004
"""Seconds that a call for rows of a table may take: pandas needs some 0.3 ms for a single one."""

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
    """Reads by index. State: items consumed in this shard; a resume computes its place, shuffled or not."""

    kind: ClassVar[str] = "from_items"
    modes: ClassVar[tuple[Mode, ...]] = ("interleaved", "contiguous")
    indexable: ClassVar[bool] = True
    changeable: ClassVar[tuple[str, ...]] = ("length",)
    state_type: ClassVar[Any] = Count

    items: Indexable[T]

    def __eq__(self, other: object) -> bool:
        """By identity of the data: comparing them takes long, and arrays don't compare to a bool."""
        return isinstance(other, Items) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, int]:
        return self.name, id(self.items.table if isinstance(self.items, TableRows) else self.items)

    @property
    def length(self) -> int | None:
        return len(self.items)

    @property
    def reread(self) -> str:
        return "computes its place"

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        done: int = 0 if state is None else state[self.name]
        index = part.index or WholeIndex(len(self.items))
        positions = positions_of(index, site.shard, site.num_shards, part)
        context = self.context(site, state)
        flow = ListsFlow(At(self.name, done), self._lists(context, index, positions, done), context)
        flow.instant = type(self.items) in PLAIN
        return flow

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        positions = positions_of(part.index or WholeIndex(len(self.items)), shard, num_shards, part)
        return math.inf if positions is None else len(positions)

    def check_within(self, split: Split) -> None:
        for shard, own in split.own.items():
            most = self.num_outputs(split.part, shard, split.num_shards)
            if most is not None and own > most:
                raise SnapshotError(
                    f"the snapshot is damaged, or was edited: the state of {self.name!r} in shard {shard}: it has read "
                    f"{own:,} of {most:,} items; use an earlier one"
                )

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        if listing == now:
            return []
        before = listing.get("length") if isinstance(listing, dict) else listing
        lines = (f"{self.kind} had {before} items, now has {len(self.items)}",)
        then = "the items up to the new end are read, in the shards in which they are by their number"
        if split.part.mode == "contiguous":
            then = "the blocks of a contiguous split move with the length: give the items as they were, or begin anew"
        elif split.moved_by is not None:
            then = f"{split.moved_by} places items by their number: give as many items as there were, or begin anew"
        possible = split.part.mode == "interleaved" and split.moved_by is None
        return [Change(what="length", lines=lines, then=then, possible=possible)]

    def reads_on(self, own: Json) -> str:
        return f"item {own or 0:,} of the shard, computed" if own is None or isinstance(own, int) else str(own)

    async def _lists(self, run: StageContext, index: Index, positions: range | None, done: int) -> Lists[T]:
        pace, site, read = Pace(run.meter), run.site, self._reader(run.meter)
        while True:
            stop = done + run.max_items if positions is None else min(done + run.max_items, len(positions))
            if stop <= done:
                return
            wanted = _positions(positions, site, done, stop)
            drawn = None if index.identity else index(np.asarray(wanted, np.int64))
            indices: Sequence[int] = wanted if drawn is None else drawn.tolist()
            found: list[T] = []
            failure: BaseException | None = None
            began, going_on = perf_counter(), True
            while going_on:
                need = min(run.min_items, len(indices))
                asked = indices[:need] if found else indices
                try:
                    read(asked, pace, found)
                except BaseException as error:
                    if len(found) == len(asked):  # Ctrl-C after the last one: no item is at fault
                        raise
                    at = _AtIndex(self.name, done + len(found) + 1, indices[len(found)])
                    call = self._call(indices[len(found) :], error)
                    failure = blame(error, self.name, site, at, call, shows_item=False)
                going_on = failure is None and await pace.keep_filling(len(found), need, began)
            if found:
                yield Chunk(found, _ItemStates(self.name, done + 1, wanted if drawn is None else drawn))
                done += len(found)
            if failure is not None:
                after = At(self.name, done + 1)
                run.skip_or_raise(failure, indices[len(found)], after)
                done += 1
                yield Chunk((), (), after)
            await pace.maybe_yield()

    def _reader(self, meter: StageMeter | None) -> Callable[[Sequence[int], Pace, list[T]], None]:
        """Return a function that appends the items of more indices to a list, as many as fit a slice of time."""
        if isinstance(self.items, TableRows):
            return _Slices(self._read_list, meter)
        if isinstance(self.items, _TakesLists):
            return lambda indices, pace, found: self._read_list(indices, found, meter)
        getitem: Callable[[int], T] = self.items.__getitem__
        if type(self.items) in PLAIN:
            return lambda indices, pace, found: _read_plain(cast("Sequence[T]", self.items), indices, pace, found)
        return lambda indices, pace, found: pace.apply(getitem, indices, len(found), found)

    def _read_list(self, indices: Sequence[int], found: list[T], meter: StageMeter | None) -> None:
        read = cast(_TakesLists, self.items).__getitems__
        try:
            with HoldTimer(meter):
                items = read(indices if isinstance(self.items, TableRows) else list(indices))  # type: ignore[arg-type]
        except Exception:
            for index in indices:  # to find the one that fails, and deliver those before it
                found.extend(_list_of(read([index]), [index]))
        else:
            found.extend(_list_of(items, indices))

    def _call(self, indices: Sequence[int], error: BaseException) -> FailedCall:
        """Return the call that failed, for `replay`: for the first of these, or for all of them."""
        if isinstance(self.items, _TakesLists):
            asked = list(indices) if isinstance(error, PlanError) else [indices[0]]  # see `_read_list`
            return FailedCall(self.items.__getitems__, asked)
        return FailedCall(self.items.__getitem__, indices[0])


class _Slices:
    """Reads rows of a table, as many in a call as take a few milliseconds."""

    def __init__(
        self, read: Callable[[Sequence[int], list[Any], StageMeter | None], None], meter: StageMeter | None
    ) -> None:
        self._read = read
        self._meter = meter
        self._rows = 16

    def __call__(self, indices: Sequence[int], pace: Pace, found: list[Any]) -> None:
        began = perf_counter()
        self._read(indices[len(found) :][: self._rows], found, self._meter)
        spent = perf_counter() - began
        if spent > TABLE_S:
            self._rows = max(1, self._rows // 2)
        elif spent < TABLE_S / 3:
            self._rows = min(LIST_ITEMS, self._rows * 2)


def _read_plain(items: Sequence[T], indices: Sequence[int], pace: Pace, found: list[T]) -> None:
    """Append what is at these indices; a slice at once, where it is one."""
    if isinstance(indices, range) and not found:
        found.extend(items[indices.start : indices.stop : indices.step])
    if len(found) < len(indices):
        pace.apply(items.__getitem__, indices, len(found), found)


class _ItemStates(CountedStates):
    """The states of a list; each knows the index of its item."""

    __slots__ = ("_indices",)

    def __init__(self, name: str, first: int, indices: Any) -> None:
        super().__init__(name, first)
        self._indices = indices

    def __getitem__(self, index: int, /) -> State:
        return _AtIndex(self._name, (self._first or 0) + index, self._indices[index])

    def trimmed(self, first: int, count: int) -> States:
        return _ItemStates(self._name, (self._first or 0) + first, self._indices[first : first + count])


class _AtIndex(At):
    """After an item, whose index it knows."""

    __slots__ = ("_index",)

    def __init__(self, name: str, own: Json, index: int) -> None:
        self.name, self.own, self.item, self._index = name, own, own, index

    def where(self) -> str:
        return f"index {self._index:,} of {self.name}"


def _list_of(items: Any, indices: Sequence[int]) -> Sequence[Any]:
    """Return the items, once checked: a list (not a dict of columns, say), of one item for each index."""
    shown = f"{indices[0]} ... {indices[-1]}" if len(indices) > 1 else f"{indices[0]}"
    if isinstance(items, str | bytes | Mapping | Set) or not (hasattr(items, "__len__") and hasattr(items, "__iter__")):
        raise PlanTypeError(
            f"expected a list of items from __getitems__ for the indices {shown}, got a {type(items).__name__}"
        )
    if len(items) != len(indices):
        raise PlanError(f"expected {len(indices)} items from __getitems__ for the indices {shown}, got {len(items)}")
    return cast("Sequence[Any]", items)


def positions_of(index: Index, shard: int, num_shards: int, part: Part) -> range | None:
    """Return a shard's positions in the index; None if the index is endless: then every `num_shards`-th."""
    if index.length is None:
        return None  # a plan refuses contiguous blocks of it
    if index.length > sys.maxsize:
        raise PlanError(
            f"there are {index.length:,} items, with those that are repeated or sampled, more than can be counted: "
            ".repeat() without a number repeats for ever"
        )
    split = sharding.contiguous if part.mode == "contiguous" else sharding.interleaved
    return split(index.length, num_shards, shard, drop_remainder=part.drop_remainder)


def _positions(positions: range | None, site: Site, start: int, stop: int) -> range:
    if positions is None:
        return range(site.shard + start * site.num_shards, site.shard + stop * site.num_shards, site.num_shards)
    return positions[start:stop]
