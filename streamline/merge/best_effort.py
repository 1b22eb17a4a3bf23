"""The best-effort merge: as written in a plan, and its flow; and `.merge` of either kind, from its arguments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from streamline.core.gate import wait_at_rest
from streamline.core.options import check_int
from streamline.core.state import Json
from streamline.errors import PlanError
from streamline.merge.base import ALL_ROUNDS, Inboxes, Merge, MergeFlow, MergeTake
from streamline.merge.strict import Strict

T = TypeVar("T")


class BestEffortMerge(MergeFlow[T]):
    """The first eligible worker that has an item, within bounds.

    Args:
      max_skips_per_round: how many workers without an item are passed over before waiting; 0 is strict order.
      max_lead: a worker this many items ahead of the slowest active one waits for it; at least 1.
    """

    choosing = True

    def __init__(
        self, name: str, inboxes: Inboxes[T], own: Any = None, *, max_skips_per_round: int, max_lead: int
    ) -> None:
        self._skips = max_skips_per_round
        self._max_lead = max_lead
        self._news = anyio.Event()
        super().__init__(name, inboxes, own, self._wake)

    def _wake(self) -> None:
        self._news.set()

    def _rounds_of(self, ready: Collection[int]) -> int:
        """As many as neither skip more workers nor lead further than the bounds allow."""
        active, produced = self._inputs.active, self._inputs.produced
        if len(active) - len(ready) > self._skips:
            return 0
        if len(active) == len(ready) and (len(ready) == 1 or self._level()):
            return ALL_ROUNDS
        slowest = min([produced[worker] for worker in active])
        return slowest + self._max_lead - max([produced[worker] for worker in ready])

    def _level(self) -> bool:
        """Return whether each worker is eligible at its turn, and so in each round, since all advance by one."""
        active, produced = self._inputs.active, self._inputs.produced
        slowest = min([produced[worker] for worker in active])
        at_slowest = sum(produced[worker] == slowest for worker in active)
        for worker in sorted(active, key=self._distance):
            if produced[worker] - slowest >= self._max_lead:
                return False
            at_slowest -= produced[worker] == slowest
            if not at_slowest:
                return True  # the slowest have advanced by one, so all others are eligible
        return True

    def _pick(self, take: MergeTake) -> int | None:
        active, produced = self._inputs.active, self._inputs.produced
        count = len(active)
        while count:
            limit = min([produced[worker] for worker in active]) + self._max_lead
            first = bisect_left(active, self._next_worker)
            looked = 0
            for at in range(first, first + count):
                worker = active[at if at < count else at - count]
                if produced[worker] >= limit:
                    continue
                if self._look(worker, take):
                    return worker
                looked += 1
                if looked > self._skips or len(active) < count:
                    break
            if len(active) == count:
                return None
            count = len(active)  # one has ended, which may make others eligible: repeat
        return None

    def _workers_awaited(self) -> list[int]:
        if self._replay:
            return self._replay[-1:]
        active, produced = self._inputs.active, self._inputs.produced
        limit = min([produced[worker] for worker in active]) + self._max_lead
        eligible = [worker for worker in sorted(active, key=self._distance) if produced[worker] < limit]
        return eligible[: self._skips + 1]

    async def _wait(self) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()  # as in `Inbox.wait`
        await wait_at_rest(self._news.wait())
        self._news = anyio.Event()
        await next(iter(self._inputs.inboxes.values())).passage()


@dataclass(frozen=True, kw_only=True)
class BestEffort(Merge):
    """A best-effort merge, as written in a plan; see `BestEffortMerge` for the options."""

    chooses = True

    max_skips_per_round: int
    max_lead: int

    def __str__(self) -> str:
        return f"merge (best effort: max_skips_per_round={self.max_skips_per_round}, max_lead={self.max_lead})"

    def open(self, inboxes: Inboxes[T], own: Json | None) -> MergeFlow[T]:
        return BestEffortMerge(
            self.name, inboxes, own, max_skips_per_round=self.max_skips_per_round, max_lead=self.max_lead
        )


def merge_of(kind: str, max_skips_per_round: int | None, max_lead: int | None) -> Merge:
    """Return the merge that `.merge` with these options means. Raises `PlanError`."""
    if kind == "strict":
        if max_skips_per_round is not None or max_lead is not None:
            raise PlanError("max_skips_per_round and max_lead are options of .merge('best_effort')")
        return Strict(name="merge")
    if kind != "best_effort":
        raise PlanError(f".merge is 'strict' or 'best_effort', got {kind!r}")
    skips = 2 if max_skips_per_round is None else max_skips_per_round
    lead = 8 if max_lead is None else max_lead
    skips = check_int(".merge(max_skips_per_round=)", skips, 0)
    lead = check_int(".merge(max_lead=)", lead, 1)
    return BestEffort(name="merge", max_skips_per_round=skips, max_lead=lead)
