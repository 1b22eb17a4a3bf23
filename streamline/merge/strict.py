"""The strict merge: as written in a plan, and its flow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TypeVar

from streamline.core.state import Json
from streamline.merge.base import ALL_ROUNDS, BatchTurns, Inboxes, Merge, MergeFlow, MergeTake

T = TypeVar("T")


class StrictMerge(MergeFlow[T]):
    """Always the active worker with the smallest (produced, index)."""

    def __init__(self, name: str, inboxes: Inboxes[T], own: Json | None = None) -> None:
        super().__init__(name, inboxes, own)
        # A heap; counts may be out of date, and then are too small.
        self._turns = [self._turn(worker) for worker in self._inputs.active]
        heapify(self._turns)

    def _rounds_of(self, ready: Collection[int]) -> int:
        if len(ready) < len(self._inputs.active):
            return 0
        if len(ready) == 1:
            self._next_worker = self._inputs.active[0]
            return ALL_ROUNDS
        self._next_worker = self._smallest()
        return ALL_ROUNDS if self._level(self._next_worker) else 0

    def _level(self, first: int) -> bool:
        """Return whether it takes one item of each worker in turn, from the first, the smallest, on."""
        produced = self._inputs.produced
        lowest = produced[first]
        return all(produced[worker] == lowest + (worker < first) for worker in self._inputs.active)

    def _batch_turns(self) -> BatchTurns | None:
        inputs = self._inputs
        if self._batch > 1 and inputs.active and not self._replay and self._level(first := self._smallest()):
            return BatchTurns(first, sum(inputs.produced) - sum(inputs.began), self._batch)
        return None

    def _pick(self, take: MergeTake) -> int | None:
        active = self._inputs.active
        while active:
            worker = self._smallest()
            if self._look(worker, take):
                return worker
            if worker in active:
                return None
        return None

    def _smallest(self) -> int:
        turns, produced, finished = self._turns, self._inputs.produced, self._inputs.finished
        while (turn := turns[0]) != (now := (produced[turn[1]], turn[1])) or turn[1] in finished:
            if turn[1] in finished:
                heappop(turns)
            else:
                heapreplace(turns, now)
        return turn[1]

    def _turn(self, worker: int) -> tuple[int, int]:
        return self._inputs.produced[worker], worker

    def _workers_awaited(self) -> list[int]:
        return self._replay[-1:] or [self._smallest()]

    async def _wait(self) -> None:
        await self._inputs.inboxes[self._workers_awaited()[0]].wait()


@dataclass(frozen=True, kw_only=True)
class Strict(Merge):
    chooses = False

    def __str__(self) -> str:
        return "merge (strict)"

    def open(self, inboxes: Inboxes[T], own: Json | None) -> MergeFlow[T]:
        return StrictMerge(self.name, inboxes, own)
