"""The oracle: what an uninterrupted, strict run delivers, computed one item at a time.

Plain generators: no lists, no states, no tasks, no channels. What defines the order (permutations, the split, the
random generators) is shared with the library; how it is carried out is not. An unordered map is taken as ordered, and
a best-effort merge as strict: what they deliver is compared as a multiset.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import count, islice
from typing import Any, cast

import anyio
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal

from streamline.core.flow import Flow, Site
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.plan.plan import Plan, Shard
from streamline.sharding.index import Bijection
from streamline.sources.composite import Several
from streamline.sources.items import Items
from streamline.sources.iterable import IterableSource
from streamline.sources.mix import Mix
from streamline.sources.sampler import Numbers
from streamline.testing.scripted import Abort, Script
from streamline.transfer.stage import Transfer
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.bucket import BucketByLength
from streamline.transforms.cache import Cache
from streamline.transforms.collate import stack, unstack
from streamline.transforms.custom import Declared, Through
from streamline.transforms.filter import Filter
from streamline.transforms.flat_map import FlatMap
from streamline.transforms.limit import Skip, Take
from streamline.transforms.map import ConcurrentMap, Generators, Map, Numbering
from streamline.transforms.pack import Pack
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.regenerate_cycle import order_of
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import IndexShuffle, Shuffle, permutation

__all__ = ["Oracle", "UnknownStageError", "bucketed", "mixed", "oracle", "packed"]


Chain = Callable[[Site], Iterator[Any]]
"""What comes out of a stage at a site: in an epoch, in a shard."""


NOTHING: Any = object()


class UnknownStageError(LookupError):
    """The oracle has no words for this stage: compare with an uninterrupted run instead."""


def oracle(pipeline: Pipeline[Any], *, rank: int = 0, world_size: int = 1, epoch: int = 0) -> list[Any]:
    """Return the items that an uninterrupted strict run of one rank delivers.

    Called from plain code, not from a coroutine. Functions of the pipeline are called; async ones in threads with event
    loops of their own.

    Raises:
      UnknownStageError: a stage that is not one of streamline's.
      What a source or a function raises.
    """
    with Oracle(pipeline, rank=rank, world_size=world_size, epoch=epoch) as truth:
        return list(truth)


class Oracle:
    """The same, item by item: an iterable, to be closed."""

    def __init__(self, pipeline: Pipeline[Any], *, rank: int = 0, world_size: int = 1, epoch: int = 0) -> None:
        self._plan = pipeline.plan
        self._site = Site(cast(Tasks, None), rank, world_size, (epoch,))
        self._loops = _Loops()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self._loops.close()

    def workers(self) -> list[Iterator[Any]]:
        """Return what each worker of this rank yields, by shard."""
        return self._workers(self._site)

    def _workers(self, site: Site) -> list[Iterator[Any]]:
        plan = self._plan
        chain = self._through(_head(plan, self._loops), plan.worker)
        shards = range(site.shard, plan.shard.num_shards, site.num_shards)
        return [chain(replace(site, shard=shard, num_shards=plan.shard.num_shards)) for shard in shards]

    def __iter__(self) -> Iterator[Any]:
        return self._through(lambda site: _strict(self._workers(site)), self._plan.after)(self._site)

    def _through(self, chain: Chain, stages: Sequence[Stage[Any, Any]]) -> Chain:
        for stage in stages:
            chain = _behind(stage, chain, self._loops)
        return chain


class _Loops:
    """Where async functions run: for each stage an event loop, because one may be asked for an item inside another."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portals: dict[int, BlockingPortal] = {}

    def of(self, stage: object) -> BlockingPortal:
        if id(stage) not in self._portals:
            self._portals[id(stage)] = self._stack.enter_context(start_blocking_portal())
        return self._portals[id(stage)]

    def before_close(self, loop: BlockingPortal, aclose: Callable[[], Awaitable[None]]) -> None:
        """Await `aclose` in `loop` before that ends: a generator that is not read to its end is closed where it ran."""
        self._stack.callback(loop.call, aclose)

    def close(self) -> None:
        self._stack.close()


# Sources ------------------------------------------------------------------------------------------------------------
def _head(plan: Plan, loops: _Loops) -> Chain:
    """Return what comes out of the shard."""
    source = plan.source
    if isinstance(source, Items):
        items = source.items
        return lambda site: (items[index] for index in _indices(plan, site))
    if isinstance(source, Script):
        script = source
        chain: Chain = lambda site: _scripted(script.entries(site.shard, site.num_shards))  # noqa: E731
    elif isinstance(source, IterableSource):
        factory = source.factory
        chain = lambda site: _drawn(factory(), loops.of(plan.source))  # noqa: E731
    elif isinstance(source, Several):
        chain = _of_several(source, loops)
    else:
        chain = lambda site: _as_read(plan, site, loops.of(plan.source))  # noqa: E731
    for stage in plan.before:
        if isinstance(stage, Take | Skip | Repeat):
            chain = _behind(stage, chain, loops)
    if plan.mode != "replicated":
        return chain
    everything = chain
    return lambda site: islice(everything(site), site.shard, None, site.num_shards)


def _indices(plan: Plan, site: Site) -> Iterator[int]:
    """Return which items of an indexable source one shard reads."""
    every, shard, n = (
        _index(plan.before, len(cast(Items[Any], plan.source).items), site.epoch),
        site.shard,
        site.num_shards,
    )
    if plan.mode == "interleaved" and not plan.shard.drop_remainder:
        return islice(every, shard, None, n)
    listed = list(every)
    each, rest = divmod(len(listed), n)
    if plan.mode == "interleaved":
        return iter(listed[: n * each][shard::n])
    sizes = [each + (s < rest and not plan.shard.drop_remainder) for s in range(n)]
    return iter(listed[sum(sizes[:shard]) : sum(sizes[: shard + 1])])


def _index(ops: Sequence[Stage[Any, Any]], length: int, epoch: tuple[int, ...]) -> Iterator[int]:
    """Return the index after what stands before the shard."""
    if not ops:
        yield from range(length)
        return
    *before, op = ops
    if isinstance(op, Repeat):
        for number in count() if op.times is None else range(op.times):
            found = list(_index(before, length, (*epoch, number)))
            yield from found
            if not found:
                return
    elif isinstance(op, IndexShuffle):
        inner = list(_index(before, length, epoch))
        order = Bijection(len(inner), [op.seed, *epoch])(np.arange(len(inner)))
        yield from (inner[position] for position in order.tolist())
    elif isinstance(op, Take):
        yield from islice(_index(before, length, epoch), op.count)
    elif isinstance(op, Skip):
        yield from islice(_index(before, length, epoch), op.count, None)


def _scripted(entries: Sequence[Any]) -> Iterator[Any]:
    for entry in entries:
        if isinstance(entry, Abort):
            raise entry.error
        if type(entry).__name__ != "_Mark":
            yield entry


def _drawn(iterable: Iterable[Any] | AsyncIterable[Any], loop: BlockingPortal) -> Iterator[Any]:
    if isinstance(iterable, Iterable):
        yield from iterable
        return
    iterator = aiter(iterable)
    while (item := loop.call(_next, iterator)) is not NOTHING:
        yield item


def _of_several(source: Several[Any], loops: _Loops) -> Chain:
    """Return what comes out of a mixture, or of a zip. A component is one over all passes: it may have a cache."""

    @cache
    def component(name: str, num_shards: int) -> Chain:
        plan = replace(dict(source.components)[name].plan, shard=Shard(num_shards=num_shards))
        chain = _head(plan, loops)
        for stage in plan.worker:
            chain = _behind(stage, chain, loops)
        return chain

    def chain(site: Site) -> Iterator[Any]:
        parts = {name: component(name, site.num_shards)(site) for name, _ in source.components}
        return mixed(source, parts, site) if isinstance(source, Mix) else zip(*parts.values(), strict=False)

    return chain


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, NOTHING)


def _as_read(plan: Plan, site: Site, loop: BlockingPortal) -> Iterator[Any]:
    """Take a source's own word for what a shard holds: the flow that it opens, from start to end."""

    async def read() -> list[Any]:
        async with anyio.create_task_group() as group:
            here = replace(site, tasks=Tasks(group))
            flow: Flow[Any] = plan.source.open(here, plan.part(here.epoch))
            try:
                found = [item async for item in flow]
            finally:
                await flow.aclose()
                here.tasks.finished()
        return found

    yield from loop.call(read)


# Stages -------------------------------------------------------------------------------------------------------------
def _behind(stage: Stage[Any, Any], chain: Chain, loops: _Loops) -> Chain:
    """Return what comes out of one stage after `chain`."""
    if isinstance(stage, Repeat):
        repeat = stage
        return lambda site: _repeat(repeat, chain, site)
    if isinstance(stage, Prefetch | Transfer):  # to the host: the items stay what they are
        return chain
    if isinstance(stage, Cache):
        return _cache(chain)
    for kind, apply in STAGES.items():
        if isinstance(stage, kind):
            return lambda site: apply(stage, chain(site), site, loops)
    raise UnknownStageError(f"the oracle knows no {type(stage).__name__}")


def _repeat(stage: Repeat[Any], chain: Chain, site: Site) -> Iterator[Any]:
    for number in count() if stage.times is None else range(stage.times):
        empty = True
        for item in chain(site.in_pass(number)):
            empty = False
            yield item
        if empty:
            return


def _cache(chain: Chain) -> Chain:
    """One pass, whichever is asked for; kept by shard and loader epoch."""
    first: dict[tuple[int, int], Site] = {}
    return lambda site: chain(first.setdefault((site.shard, site.epoch[0]), site))


def _map(stage: Map[Any, Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    for item in items:
        yield stage.fn(item)


def _concurrent_map(stage: ConcurrentMap[Any, Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    for item in items:
        yield stage.fn(item) if stage.executor == "thread" else loops.of(stage).call(stage.fn, item)


def _numbering(stage: Numbering[Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    generators = Generators(stage.seed, stage.stage, site)
    for ordinal, item in enumerate(items):
        yield item, generators.of(ordinal)


def _filter(stage: Filter[Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    for item in items:
        if stage.fn(item):
            yield item


def _flat_map(stage: FlatMap[Any, Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    for item in items:
        yield from stage.fn(item)


def _batch(stage: Batch[Any, Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    while held := list(islice(items, stage.size)):
        if len(held) == stage.size or not stage.drop_remainder:
            yield stage.collate(held)


def _take(stage: Take[Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    yield from islice(items, stage.count)


def _skip(stage: Skip[Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    yield from islice(items, stage.count, None)


def _shuffle(stage: Shuffle[Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    for window in count():
        held = list(islice(items, stage.window))
        if not held:
            return
        yield from (held[index] for index in permutation(len(held), stage.seed, site, window))


def _regenerate(stage: Regenerate[Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    rows = items if stage.block is None else (row for block in items for row in unstack(block))
    seed = stage.seed if stage.shuffle else None
    for cycle in count():
        held = list(islice(rows, stage.size))
        if not held:
            return
        for serving in range(stage.reuse):
            served = iter([held[index] for index in order_of(len(held), seed, site, cycle, serving)])
            if stage.block is None:
                yield from served
            while stage.block is not None and (block := list(islice(served, stage.block))):
                yield stack(block)


def _through(stage: Through[Any, Any], items: Iterator[Any], site: Site, loops: _Loops) -> Iterator[Any]:
    params, loop = dict(stage.params), loops.of(stage)
    if isinstance(stage.fn, Declared) and stage.fn.state is not None:
        params["state"] = stage.fn.state()
    outputs: Any = stage.fn(_asynchronous(items), **params)
    loops.before_close(loop, outputs.aclose)
    while (item := loop.call(_next, outputs)) is not NOTHING:
        yield item


async def _asynchronous(items: Iterator[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def _strict(workers: list[Iterator[Any]]) -> Iterator[Any]:
    """Merge: one item at a time, always from the worker with the smallest (produced, index)."""
    produced = dict.fromkeys(range(len(workers)), 0)
    while produced:
        worker = min(produced, key=lambda worker: (produced[worker], worker))
        item = next(workers[worker], NOTHING)
        if item is NOTHING:
            del produced[worker]
        else:
            produced[worker] += 1
            yield item


Apply = Callable[[Any, Iterator[Any], Site, _Loops], Iterator[Any]]


STAGES: dict[type, Apply] = {
    Map: _map,
    ConcurrentMap: _concurrent_map,
    Numbering: _numbering,
    Filter: _filter,
    FlatMap: _flat_map,
    Batch: _batch,
    BucketByLength: lambda stage, items, site, loops: bucketed(stage, items),
    Pack: lambda stage, items, site, loops: packed(stage, items),
    Take: _take,
    Skip: _skip,
    Shuffle: _shuffle,
    Regenerate: _regenerate,
    Through: _through,
}


def bucketed(stage: BucketByLength[Any, Any], items: Iterator[Any]) -> Iterator[Any]:
    """Yield batches out of buckets, looked for one by one."""
    buckets: list[list[Any]] = [[] for _ in stage.batch_size]
    for item in items:
        length = stage.length(item)
        number = sum(length > boundary for boundary in stage.boundaries)
        buckets[number].append(item)
        if len(buckets[number]) == stage.batch_size[number]:
            yield stage.collate(buckets[number])
            buckets[number] = []
    if not stage.drop_remainder:
        yield from (stage.collate(bucket) for bucket in buckets if bucket)


def packed(stage: Pack, items: Iterator[Any]) -> Iterator[Any]:
    """Yield blocks, token by token."""
    block: list[tuple[int, int, int]] = []  # token, segment, position
    dtype = np.dtype(np.int64)
    for item in items:
        document = np.asarray(item if stage.key is None else item[stage.key])
        dtype = document.dtype if len(document) else dtype
        segment, position = block[-1][1] + 1 if block else 1, 0
        for token in [*document.tolist(), *([stage.eos] if stage.eos is not None and len(document) else [])]:
            block.append((token, segment, position))
            position += 1
            if len(block) == stage.length:
                yield _block(block, dtype)
                block, segment, position = [], 1, 0
    if block and not stage.drop_remainder:
        yield _block(block + [(0, 0, 0)] * (stage.length - len(block)), dtype)


def _block(block: list[tuple[int, int, int]], dtype: np.dtype[Any]) -> dict[str, Any]:
    tokens, segments, positions = zip(*block, strict=True)
    return {
        "tokens": np.array(tokens, dtype),
        "segment_ids": np.array(segments, np.int32),
        "positions": np.array(positions, np.int32),
    }


def mixed(mix: Mix[Any], parts: dict[str, Iterator[Any]], site: Site) -> Iterator[Any]:
    """Yield one shard of a mixture, draw by draw."""
    draws, numbers, left, n = mix.draws, Numbers(site), dict(parts), 0
    while left:
        served = n * site.num_shards + site.shard
        begun = [dict(weights) for start, weights in draws.schedule if start <= served]
        later = [dict(weights) for start, weights in draws.schedule if start > served]
        found = [{name: weights[name] for name in sorted(left) if weights[name]} for weights in (begun[-1], *later)]
        weights = next((weights for weights in found if weights), None)
        if weights is None:
            return
        number = numbers.of(draws.seed, n, 1)[0] * sum(weights.values())
        picked = list(weights)[-1]
        for name, weight in weights.items():
            if number < weight:
                picked = name
                break
            number -= weight
        item = next(left[picked], NOTHING)
        if item is NOTHING:
            del left[picked]
            if mix.stop == "first":
                return
        else:
            n += 1
            yield item
