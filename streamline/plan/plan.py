"""A plan in sections: the source and what stands before the shard, the worker's stages, the merge, the stages after it.

Capacities of channels are in items; where items are batches, fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamline.core.limits import Limit
from streamline.merge.base import Merge
from streamline.sharding.index import Index, WholeIndex
from streamline.sources.base import Mode, Part, Source
from streamline.transforms.base import Stage

AnyStage = Stage[Any, Any]

READ_AHEAD_ITEMS = 512
"""Items a channel holds: two of the longest lists, so that one fills while the other is consumed."""

QUICK_ITEMS_FACTOR = 4
"""A channel holds so many times more items that take no time to make; see `streamline.core.channel`."""

BRIDGE_ITEMS = 4096
"""Items between the event loop's thread and a plain loop's, if those are quick to make."""

ALL_WORKERS_ITEMS = 1024
"""Items that the channels of all workers of the job hold together; at least 8 each."""

MOST_SHARDS = 1_000_000
"""Each has a worker, and a state in every snapshot: a few for each host are enough."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    num_shards: int = 1
    mode: Mode | None = None
    drop_remainder: bool = False
    interleave: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A pipeline in sections.

    Attributes:
      sharded: whether there is a `.shard` at all.
      before: stages before the shard: they act on the index, on the list of files, or run in every worker (replicated).
      worker: stages of each worker.
      after: stages after the merge, on the rank's stream.
    """

    source: Source[Any]
    before: tuple[AnyStage, ...]
    shard: Shard
    worker: tuple[AnyStage, ...]
    merge: Merge
    after: tuple[AnyStage, ...]
    sharded: bool = True

    @property
    def mode(self) -> Mode:
        return self.shard.mode or self.source.default_mode

    @property
    def stages(self) -> tuple[AnyStage, ...]:
        return (*self.before, *self.worker, *self.after)

    @property
    def in_workers(self) -> list[AnyStage]:
        """The stages before the shard that run in every worker; the others act on the index or the list of files."""
        return [stage for stage in self.before if acts_on(stage, self.source, self.mode) in ("whole", "passes")]

    @property
    def repeats(self) -> bool:
        """Whether the source is read in several passes."""
        return any(stage.repeats for stage in self.stages)

    def moved_by(self, first: int = 0) -> str | None:
        """Return the first stage before the shard, from number `first` on, that moves items if its count changes."""
        return next((f".{stage.kind}()" for stage in self.before[first:] if stage.moves_items), None)

    @property
    def names(self) -> list[str]:
        """The names of everything that items pass through, in order; "shard" picks a worker's items."""
        before, worker, after = ([s.name for s in section] for section in (self.before, self.worker, self.after))
        return [*self.source.names, *before, "shard", *worker, self.merge.name, *after]

    @property
    def worker_names(self) -> frozenset[str]:
        return frozenset({*self.source.names, *(stage.name for stage in (*self.before, *self.worker))})

    @property
    def output_items(self) -> int:
        """The most items of the source in one that the consumer gets."""
        return in_flight(self.worker + self.after)[1]

    def worker_capacity(self, workers: int) -> int:
        """Items that the channel at a worker's end holds, unless they are quick to make."""
        return self.capacity(max(8, min(READ_AHEAD_ITEMS, ALL_WORKERS_ITEMS // workers)), self.worker)

    def worker_widest(self, workers: int) -> int:
        """Items that the channel at a worker's end holds at most."""
        return self._widest(self.worker_capacity(workers), self.worker)

    @property
    def end_widest(self) -> int:
        """Items that the channel before the consumer holds at most."""
        return self._widest(self.end_capacity, self.worker + self.after)

    def _widest(self, capacity: int, stages: Sequence[AnyStage]) -> int:
        *_, weight = weights(stages, lambda stage: stage.output_weight)
        return capacity if self.mode == "shared" or weight > 1 else QUICK_ITEMS_FACTOR * capacity

    @property
    def owns_output_channel(self) -> bool:
        """Whether the last stage ends in a channel of its own, which counts what the consumer hasn't taken."""
        return bool(self.after) and self.after[-1].owns_output_channel

    @property
    def chooser(self) -> str | None:
        """What chooses an order that another run would choose differently; None: nothing does."""
        for stage in (*self.worker, *self.after):
            if stage.chooses:
                return str(stage)
        return "the best-effort merge" if self.merge.chooses else None

    @property
    def repeated_choice(self) -> tuple[str, Sequence[AnyStage]] | None:
        """What chooses an order upstream of a `.repeat`, whose passes keep no choices, and the stages after that."""
        stages, chooser = self.worker + self.after, None
        for at, stage in enumerate(stages):
            if at == len(self.worker) and self.merge.chooses:
                chooser = "the best-effort merge"
            if stage.repeats and chooser is not None:
                return chooser, stages[at + 1 :]
            chooser = str(stage) if stage.chooses else chooser
        return None

    @property
    def limits(self) -> list[Limit]:
        """The limits of calls over several stages, in order."""
        found = (stage.call_limit for stage in stages_of(self))
        return list({id(limit): limit for limit in found if limit is not None}.values())

    @property
    def worker_logs(self) -> bool:
        """Whether the states of a worker refer to a log of choices; see `streamline.core.choices`."""
        return any(stage.logs for stage in self.worker)

    @property
    def settled(self) -> Plan:
        """This plan with what depends on the thread that opens it: the current GPU."""
        return replace(self, after=tuple(stage.settled() for stage in self.after)) if self.after else self

    @property
    def recorded(self) -> Plan:
        """This plan for runs that record steps, each of which can be replayed by itself."""
        if self.chooser is None:
            return self
        worker, after = (tuple(stage.recorded() for stage in section) for section in (self.worker, self.after))
        return replace(self, worker=worker, after=after)

    @property
    def feed_capacity(self) -> int:
        """Items of a live source that wait for each worker, while none starves."""
        usual = max(8, min(READ_AHEAD_ITEMS, ALL_WORKERS_ITEMS // self.shard.num_shards))
        return min(usual, self.source.most_ahead or usual)

    @property
    def bridge_capacity(self) -> int:
        """Items that may be between the event loop's thread and a plain loop's."""
        return 1 if self.owns_output_channel else self.capacity(BRIDGE_ITEMS, self.worker + self.after)

    @property
    def end_capacity(self) -> int:
        """Items that the channel before the consumer holds, unless they are quick to make."""
        return self.capacity(READ_AHEAD_ITEMS, self.worker + self.after)

    @staticmethod
    def capacity(items: int, stages: Sequence[AnyStage]) -> int:
        """Return how many outputs of `stages` a channel holds in place of `items` of the source; 2 at least."""
        *_, weight = weights(stages, lambda stage: stage.output_weight)
        return max(2, items // weight)

    def part(self, epoch: tuple[int, ...]) -> Part:
        """Return how the source is read in an epoch; the shard says which part of it is a worker's."""
        part = Part(
            mode=self.mode,
            index=index_of(self.before, self.source.length or 0, epoch) if self.source.indexable else None,
            drop_remainder=self.shard.drop_remainder,
            interleave=self.shard.interleave,
        )
        for stage in self.before if self.source.listed else ():
            part = stage.in_part(part)
        return part


def sources_of(plan: Plan) -> Iterator[Source[Any]]:
    """Yield the source, after those that it is made of."""
    for _, _, part in plan.source.made_of:
        yield from sources_of(part)
    yield plan.source


def stages_of(plan: Plan) -> Iterator[AnyStage]:
    """Yield all stages, those of the source's components first."""
    for _, _, part in plan.source.made_of:
        yield from stages_of(part)
    yield from plan.stages


def index_of(ops: Sequence[AnyStage], length: int, epoch: tuple[int, ...]) -> Index:
    """Return the index after `ops` of a source of `length` items, in an epoch."""
    if not ops:
        return WholeIndex(length)
    return ops[-1].reindexed(partial(index_of, ops[:-1], length), epoch)


def acts_on(stage: AnyStage, source: Source[Any], mode: Mode) -> str | None:
    """Return what a stage before the shard acts on, of `Stage.before_shard`; None: it can't be there."""
    if source.listed and "files" in stage.before_shard:
        return "files"
    flow = "whole" if mode == "replicated" else "index" if source.indexable else "passes"
    return flow if flow in stage.before_shard and mode != "shared" else None


def in_flight(stages: Sequence[AnyStage], weight: int = 1) -> tuple[int, int]:
    """Return how many items of the source, `weight` in an input, stages hold at most, and how many are in an output."""
    before = list(weights(stages, lambda stage: stage.inputs_per_output, weight))
    return sum(stage.in_flight * weight for stage, weight in zip(stages, before, strict=False)), before[-1]


def weights(stages: Sequence[AnyStage], of: Callable[[AnyStage], int], weight: int = 1) -> Iterator[int]:
    """Yield the weight of an item before each of `stages`, and after all; `weight`: of an input.

    `of` returns how many inputs weigh as much as an output. A stage that takes batches apart undoes the last batching.
    """
    batched = [weight]
    for stage in stages:
        yield batched[-1]
        if stage.depth_change > 0:
            batched.append(batched[-1])
        if stage.depth_change < 0 and len(batched) > 1:
            batched.pop()
        else:
            batched[-1] *= of(stage)
    yield batched[-1]
