"""Lists of consecutive items, cut by what is in them: `.group_by` and `.batch(max_cost=)`.

An item belongs to the current list, or begins the next one. State: the upstream's after the last item of a list that
was delivered; a resume reads the item that ended the list again. Where a stage downstream rereads lists, or steps are
recorded, their sizes are logged: over a choosing upstream, another item may follow the last of them then.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, SupportsFloat, SupportsIndex, TypeVar

from streamline.core.blame import blame
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, StageRun
from streamline.core.meters import HoldTimer
from streamline.core.options import check_function, check_int, check_takes_item, is_async, type_and_repr
from streamline.core.pace import Pace
from streamline.core.replay import FailedCall
from streamline.core.state import Reference, State, Tree
from streamline.errors import DataError, PlanError, PlanTypeError
from streamline.transforms.batch import TOGETHER_ITEMS, Batch, Batches, BatchPart
from streamline.transforms.collate import as_list

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True)
class Cut(Batch[In, Out]):
    """Makes lists of at most `size` items, which end by what is in them.

    What a subclass says of a list, it says of its *sum*: what `check_measure` returns for its first item, and
    `add_measure` for each further one.
    """

    def recorded(self) -> Cut[In, Out]:
        return replace(self, counts=True)

    @property
    def logs_sizes(self) -> bool:
        return self.counts

    @property
    def in_flight(self) -> int:
        return self.size + 1

    def num_outputs(self, items: float) -> float | None:
        return items if items in (0, math.inf) else None

    @property
    @abstractmethod
    def measure(self) -> Callable[[In], Any]:
        """The user's function."""

    def check_measure(self, item: In) -> Any:
        """Return the measure of an item, checked."""
        return self.measure(item)

    def add_measure(self, total: Any, measured: Any) -> Any:
        """Return the sum of a list with one more item."""
        return total

    @abstractmethod
    def ends_before(self, total: Any, count: int, measured: Any) -> bool:
        """Whether the next item doesn't belong to a list of `count` items."""

    def full(self, total: Any, count: int) -> bool:
        """Whether a list ends, whatever item is next."""
        return False

    def output_function(self, total: Any) -> Callable[[list[In]], Out]:
        """Return the function that makes an output of the items."""
        return self.collate

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        own: BatchPart | None = self.part_of(state)
        flow, site = upstream(state), upstream.site
        run, cutting = self.run_over(flow, site, state, own), _Cutting(self, flow.state, own)
        return ListsFlow(cutting.state_after(flow.state), cutting.lists(run), run, flow)


class _Cutting(Batches[In, Out]):
    _stage: Cut[In, Out]

    def __init__(self, stage: Cut[In, Out], begin: State, own: BatchPart | None) -> None:
        super().__init__(stage, begin, own)
        self._total: Any = None

    def _batch(self, run: StageRun[In], last: State, after: State | None) -> Chunk[Out]:
        self._collate = self._stage.output_function(self._total)
        return super()._batch(run, last, after)

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        pace, size = Pace(), self._stage.size
        while (chunk := await run.pull(min(TOGETHER_ITEMS, size + 1 - len(self._held)))) is not None:
            at, skipped = 0, False
            while at < len(chunk.items):
                with HoldTimer(run.meter):
                    stop, complete, error = self._fill(chunk.items, at)
                if stop > at:
                    self._last, skipped = Reference(chunk.states, stop - 1), False
                if error is not None:
                    call = FailedCall(self._stage.measure, chunk.items[stop])
                    failure = blame(error, str(self._stage), run.site, chunk.states[stop], call)
                    run.skip_or_raise(failure, chunk.items[stop], chunk.states[stop])
                    self._last, skipped = Reference(chunk.states, stop), True
                    stop += 1
                at = stop
                if complete:
                    yield self._batch(run, self._last.get(), chunk.progress if at == len(chunk.items) else None)
                await pace.maybe_yield()
            if not self._held and (skipped or chunk.progress is not None):
                yield Chunk((), (), self.state_after(chunk.end))
            self._last = chunk.end_reference
            del chunk  # release the items while the next are made
        rest = self._rest(run)
        while rest:
            yield rest.pop()  # held by nothing here

    def _fill(self, items: Sequence[In], start: int) -> tuple[int, bool, BaseException | None]:
        """Add items from `start` on to the current list, until it is complete.

        Returns:
          Where to go on; whether it is complete; the error of the item there, if any.
        """
        stage, held = self._stage, self._held
        for at in range(start, len(items)):
            try:
                measured = stage.check_measure(items[at])
                if held and not self._replay and stage.ends_before(self._total, len(held), measured):
                    return at, True, None
            except BaseException as error:
                return at, False, error
            self._total = stage.add_measure(self._total, measured) if held else measured
            held.append(items[at])
            count = len(held)
            if count == self._replay[0] if self._replay else stage.full(self._total, count):
                return at + 1, True, None
        return len(items), False, None


GROUP_ITEMS = 32
"""Items that a channel takes a group for: most are far smaller than the largest that is allowed."""


@dataclass(frozen=True, kw_only=True)
class GroupBy(Cut[In, tuple[Any, list[In]]]):
    """Pairs (key, items) of consecutive items of one key; one of more than `size` is an error."""

    kind: ClassVar[str] = "group_by"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "key": "the groups from here on are those of the new function, from the first item that was in no group "
        "delivered",
        "added": "the items from here on come in groups",
        "removed": "the items from here on come one by one",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset()
    uncounted_options: ClassVar[Collection[str]] = ("size", "drop_remainder", "collate", "max_wait_s", "counts")
    item_functions: ClassVar[tuple[str, ...]] = ("key",)

    key: Callable[[In], Any]
    collate: Callable[[list[In]], Any] = as_list

    def shown_options(self) -> list[str]:
        return [f"max_items={self.size}"]

    @property
    def output_weight(self) -> int:
        return min(self.size, GROUP_ITEMS)

    @property
    def measure(self) -> Callable[[In], Any]:
        return self.key

    def ends_before(self, total: Any, count: int, measured: Any) -> bool:
        if measured != total:
            return True
        if count == self.size:
            raise DataError(
                f"more than {count:,} consecutive items have the key {total!r}: let a group be larger with "
                ".group_by(max_items=), or cut it by another key"
            )
        return False

    def output_function(self, total: Any) -> Callable[[list[In]], tuple[Any, list[In]]]:
        return partial(_group, total)


def _group(key: Any, items: list[In]) -> tuple[Any, list[In]]:
    return key, items


MOST_ITEMS = 4096
"""Items of a batch that is bounded by its cost alone: some cost nothing."""


@dataclass(frozen=True, kw_only=True)
class CostBatch(Cut[In, Out]):
    """Collates at most `size` consecutive items that cost at most `max_cost` together."""

    kind: ClassVar[str] = "batch_by_cost"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        **Batch.accepted_changes,
        "max_cost": "the batches from here on have the new cost, from the first item that was in no batch delivered",
        "cost": "the batches from here on are cut by the new function, from the first item that was in no batch "
        "delivered",
    }
    item_functions: ClassVar[tuple[str, ...]] = ("cost", "collate")

    max_cost: float
    cost: Callable[[In], float]

    @property
    def method(self) -> str:
        return "batch"

    @property
    def measure(self) -> Callable[[In], float]:
        return self.cost

    def check_measure(self, item: In) -> float:
        cost = self.cost(item)
        if isinstance(cost, bool) or not isinstance(cost, SupportsFloat | SupportsIndex):
            raise PlanTypeError(f"expected a cost from .batch(cost=), a number, got {type_and_repr(cost)}")
        cost = cost if isinstance(cost, int | float) else float(cost)
        if not cost >= 0:
            raise DataError(f"expected a cost of at least 0 from .batch(cost=), got {cost!r}")
        if cost > self.max_cost:
            raise DataError(
                f"an item costs {cost:,}, and a batch may cost {self.max_cost:,}: cut such items, leave them out with "
                "a .filter before .batch, or raise max_cost="
            )
        return cost

    def add_measure(self, total: float, measured: float) -> float:
        return total + measured

    def ends_before(self, total: float, count: int, measured: float) -> bool:
        return total + measured > self.max_cost

    def full(self, total: float, count: int) -> bool:
        return count == self.size or total >= self.max_cost


def group_by_of(key: Callable[[Any], Any], max_items: int, *, name: str) -> GroupBy[Any]:
    _check_sync(".group_by(key)", key)
    return GroupBy(name=name, key=key, size=check_int(".group_by(max_items=)", max_items, 1))


def cost_batch_of(
    size: int | None,
    max_cost: object,
    cost: Any,
    drop_remainder: bool,
    collate: Callable[[list[Any]], Any],
    max_wait_s: float | None,
    *,
    name: str,
) -> CostBatch[Any, Any]:
    if max_cost is None or cost is None:
        raise PlanTypeError(
            ".batch(max_cost=4096, cost=len) takes both: what a batch may cost, and a function of an item"
        )
    _check_sync(".batch(cost=)", cost)
    if isinstance(max_cost, bool) or not isinstance(max_cost, int | float):
        raise PlanTypeError(f".batch(max_cost=) is a number, got {type_and_repr(max_cost)}")
    if not 0 < max_cost < math.inf:
        raise PlanError(f".batch(max_cost=) is more than 0, got {max_cost!r}")
    if max_wait_s is not None:
        raise PlanError(".batch(max_wait_s=) is for batches of one size: leave it out, or max_cost=")
    return CostBatch(
        name=name,
        size=MOST_ITEMS if size is None else size,
        max_cost=max_cost,
        cost=cost,
        drop_remainder=drop_remainder,
        collate=collate,
    )


def _check_sync(option: str, fn: Callable[[Any], Any]) -> None:
    check_function(option, fn)
    check_takes_item(option, fn)
    if is_async(fn):
        raise PlanError(f"{option} is a sync function: await what it needs in a .map before")
