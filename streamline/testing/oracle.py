"""The oracle: what an uninterrupted, strict run delivers, computed one item at a time.

Plain generators: no lists, no states, no tasks, no channels. What defines the order (permutations, the split, the
random generators) is shared with the library; how it is carried out is not. An unordered map is taken as ordered, and
a best-effort merge as strict: what they deliver is compared as a multiset.

Each kind of stage has a function in a table here; for one of your own, `@reference(MyStage)` adds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, count, groupby, islice
from typing import Any, TypeVar, cast

import anyio
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal

from streamline.core.flow import Flow, Site
from streamline.core.replay import Adapter
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.plan.plan import Plan, Shard
from streamline.sharding.index import Bijection, SampledOnce, WholeIndex, uniform
from streamline.sources.composite import Several
from streamline.sources.concat import Concat
from streamline.sources.foreign_datasets import DatasetSource
from streamline.sources.items import Items
from streamline.sources.iterable import IterableSource
from streamline.sources.mix import Mix
from streamline.sources.sampler import Numbers
from streamline.sources.zip import Zip
from streamline.testing.scripted import Abort, Script
from streamline.transfer.stage import Transfer
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.bucket import BucketByLength
from streamline.transforms.cache import Cache
from streamline.transforms.collate import stack, unstack
from streamline.transforms.custom import Declared, Through
from streamline.transforms.cut import CostBatch, GroupBy
from streamline.transforms.enumerate import Enumerate
from streamline.transforms.filter import Filter
from streamline.transforms.flat_map import FlatMap
from streamline.transforms.limit import Skip, Take
from streamline.transforms.map import ConcurrentMap, Generators, Map, Numbering
from streamline.transforms.pack import Pack
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.regenerate_cycle import order_of
from streamline.transforms.repeat import Repeat
from streamline.transforms.sample import Sample
from streamline.transforms.scan import Scan
from streamline.transforms.shuffle import IndexShuffle, Shuffle, permutation
from streamline.transforms.window import Window

Chain = Callable[[Site], Iterator[Any]]
"""What comes out of a stage at a site: in an epoch, in a shard."""

NOTHING: Any = object()


class UnknownStageError(LookupError):
    """The oracle has no reference for this stage: compare with an uninterrupted run instead."""


def oracle(pipeline: Pipeline[Any], *, rank: int = 0, world_size: int = 1, epoch: int = 0) -> list[Any]:
    """Return the items that an uninterrupted strict run of one rank delivers.

    Called from plain code, not from a coroutine. Functions of the pipeline are called; async ones in threads with event
    loops of their own.

    Raises:
      UnknownStageError: a stage for which there is no `@reference`.
      What a source or a function raises.
    """
    with Oracle(pipeline, rank=rank, world_size=world_size, epoch=epoch) as truth:
        return list(truth)


@dataclass(frozen=True)
class Upstream:
    """What a reference is given: the items upstream, one by one, each time that it is iterated.

    Attributes:
      site: the shard, their number, and the epoch.
      plan: for a source, the plan that it stands in.
    """

    chain: Chain
    site: Site
    loops: Loops
    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        return self.chain(self.site)


Reference = Callable[[Any, Upstream], Iterable[Any]]

R = TypeVar("R", bound=Reference)

REFERENCES: dict[type, Reference] = {}


def reference(*kinds: type) -> Callable[[R], R]:
    """Register what classes of stages, or of sources, make of their upstream: a generator of `(stage, upstream)`.

    A source has no upstream: it yields the items of shard `upstream.site.shard` of `upstream.site.num_shards`. One that
    has no reference is taken at its own word: what it delivers from start to end is expected.
    """

    def register(apply: R) -> R:
        REFERENCES.update(dict.fromkeys(kinds, apply))
        return apply

    return register


def _reference_of(kind: type) -> Reference | None:
    return next((REFERENCES[base] for base in kind.__mro__ if base in REFERENCES), None)


class Oracle:
    """The same, item by item: an iterable, to be closed."""

    def __init__(self, pipeline: Pipeline[Any], *, rank: int = 0, world_size: int = 1, epoch: int = 0) -> None:
        self._plan = pipeline.plan
        self._site = Site(cast(Tasks, None), rank, world_size, (epoch,))
        self._loops = Loops()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self._loops.close()

    def workers(self) -> list[Iterator[Any]]:
        """Return what each worker of this rank yields, by shard."""
        return self._workers(self._site)

    def _workers(self, site: Site) -> list[Iterator[Any]]:
        num_shards = self._plan.shard.num_shards
        chain = _worker(self._plan, self._loops)
        shards = range(site.shard, num_shards, site.num_shards)
        return [chain(replace(site, shard=shard, num_shards=num_shards)) for shard in shards]

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan
        return _through(plan.after, lambda site: _strict(self._workers(site)), plan, self._loops)(self._site)


class Loops:
    """Where async functions run, and what stages remember.

    Each stage has an event loop of its own, because one may be asked for an item inside another.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portals: dict[int, BlockingPortal] = {}
        self.first_sites: dict[tuple[int, int, int], Site] = {}

    def of(self, stage: object) -> BlockingPortal:
        if id(stage) not in self._portals:
            self._portals[id(stage)] = self._stack.enter_context(start_blocking_portal())
        return self._portals[id(stage)]

    def before_close(self, loop: BlockingPortal, aclose: Callable[[], Awaitable[None]]) -> None:
        """Await `aclose` in `loop` before that ends: a generator that is not read to its end is closed where it ran."""
        self._stack.callback(loop.call, aclose)

    def close(self) -> None:
        self._stack.close()


def _through(stages: Sequence[Stage[Any, Any]], chain: Chain, plan: Plan, loops: Loops) -> Chain:
    for stage in stages:
        chain = _after(stage, chain, plan, loops)
    return chain


def _after(stage: Stage[Any, Any], chain: Chain, plan: Plan, loops: Loops) -> Chain:
    apply = _reference_of(type(stage))
    if apply is None:
        raise UnknownStageError(f"the oracle knows no {type(stage).__name__}: add @reference({type(stage).__name__})")
    return lambda site: iter(apply(stage, Upstream(chain, site, loops, plan)))


def _worker(plan: Plan, loops: Loops) -> Chain:
    """Return what comes out of a worker."""
    apply = _reference_of(type(plan.source)) or _as_read
    chain: Chain = lambda site: iter(apply(plan.source, Upstream(_nothing, site, loops, plan)))  # noqa: E731
    if not plan.source.indexable:  # else the source reads an index that they have made
        chain = _through([stage for stage in plan.before if _reference_of(type(stage))], chain, plan, loops)
    if plan.mode == "replicated":
        everything = chain
        chain = lambda site: islice(everything(site), site.shard, None, site.num_shards)  # noqa: E731
    return _through(plan.worker, chain, plan, loops)


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


# Sources ------------------------------------------------------------------------------------------------------------


def _nothing(site: Site) -> Iterator[Any]:
    return iter(())


@reference(Items)
def _items(source: Items[Any], upstream: Upstream) -> Iterator[Any]:
    plan, shard, n = upstream.plan, upstream.site.shard, upstream.site.num_shards
    index = _through(plan.before, lambda site: iter(range(len(source.items))), plan, upstream.loops)(upstream.site)
    if plan.mode == "interleaved" and not plan.shard.drop_remainder:
        return (source.items[at] for at in islice(index, shard, None, n))
    listed = list(index)
    each, rest = divmod(len(listed), n)
    if plan.mode == "interleaved":
        return (source.items[at] for at in listed[: n * each][shard::n])
    sizes = [each + (s < rest and not plan.shard.drop_remainder) for s in range(n)]
    return (source.items[at] for at in listed[sum(sizes[:shard]) : sum(sizes[: shard + 1])])


@reference(Script)
def _script(source: Script, upstream: Upstream) -> Iterator[Any]:
    for entry in source.entries(upstream.site.shard, upstream.site.num_shards):
        if isinstance(entry, Abort):
            raise entry.error
        if type(entry).__name__ != "_Mark":
            yield entry


@reference(IterableSource)
def _iterable(source: IterableSource[Any], upstream: Upstream) -> Iterator[Any]:
    iterable = source.factory()
    if isinstance(iterable, Iterable):
        yield from iterable
        return
    iterator, loop = aiter(iterable), upstream.loops.of(source)
    while (item := loop.call(_next, iterator)) is not NOTHING:
        yield item


@reference(DatasetSource)
def _dataset(source: DatasetSource[Any], upstream: Upstream) -> Iterator[Any]:
    yield from cast("Iterable[Any]", source.make(upstream.site))


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, NOTHING)


@reference(Concat)
def _concat(source: Concat[Any], upstream: Upstream) -> Iterator[Any]:
    return chain.from_iterable(_components(source, upstream).values())


@reference(Zip)
def _zip(source: Zip, upstream: Upstream) -> Iterator[Any]:
    return zip(*_components(source, upstream).values(), strict=False)


def _components(source: Several[Any], upstream: Upstream) -> dict[str, Iterator[Any]]:
    site = upstream.site
    plans = {
        name: replace(cast(Any, component).plan, shard=Shard(num_shards=site.num_shards))
        for name, component in source.components
    }
    return {name: _worker(plan, upstream.loops)(site) for name, plan in plans.items()}


@reference(Mix)
def _mix(mix: Mix[Any], upstream: Upstream) -> Iterator[Any]:
    """Yield one shard of a mixture, draw by draw."""
    site = upstream.site
    draws, numbers, left, n = mix.draws, Numbers(site), _components(mix, upstream), 0
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


def _as_read(source: Any, upstream: Upstream) -> Iterator[Any]:
    """Take a source's own word for what a shard holds: the flow that it opens, from start to end."""

    async def read() -> list[Any]:
        async with anyio.create_task_group() as group:
            here = replace(upstream.site, tasks=Tasks(group))
            flow: Flow[Any] = source.open(here, upstream.plan.part(here.epoch))
            try:
                found = [item async for item in flow]
            finally:
                await flow.aclose()
                here.tasks.clean_up()
        return found

    yield from upstream.loops.of(source).call(read)


# Stages -------------------------------------------------------------------------------------------------------------


@reference(Prefetch, Transfer)
def _same(stage: Any, upstream: Upstream) -> Iterable[Any]:
    return upstream  # a transfer to the host: the items stay what they are


@reference(Repeat)
def _repeat(stage: Repeat[Any], upstream: Upstream) -> Iterator[Any]:
    for number in count() if stage.times is None else range(stage.times):
        empty = True
        for item in upstream.chain(upstream.site.in_pass(number)):
            empty = False
            yield item
        if empty:
            return


@reference(Cache)
def _cache(stage: Cache[Any], upstream: Upstream) -> Iterator[Any]:
    """One pass, whichever is asked for; kept by shard and loader epoch."""
    key = id(stage), upstream.site.shard, upstream.site.epoch[0]
    return upstream.chain(upstream.loops.first_sites.setdefault(key, upstream.site))


@reference(Map)
def _map(stage: Map[Any, Any], upstream: Upstream) -> Iterator[Any]:
    return map(stage.fn, upstream)


@reference(ConcurrentMap)
def _concurrent_map(stage: ConcurrentMap[Any, Any], upstream: Upstream) -> Iterator[Any]:
    for item in upstream:
        yield _tried(stage, item, upstream.loops)


def _tried(stage: ConcurrentMap[Any, Any], item: Any, loops: Loops) -> Any:
    """Return what a stage makes of an item, at its first try that doesn't fail."""
    fn, left = stage.fn, 0 if stage.retry is None else stage.retry.retries
    while True:
        try:
            return fn(item) if stage.executor == "thread" else loops.of(stage).call(fn, item)
        except Exception:
            if not left:
                raise
        fn, left = stage.fn.again if isinstance(stage.fn, Adapter) else fn, left - 1


@reference(Numbering)
def _numbering(stage: Numbering[Any], upstream: Upstream) -> Iterator[Any]:
    generators = Generators(stage.seed, stage.stage, upstream.site)
    for ordinal, item in enumerate(upstream):
        yield item, generators, ordinal


@reference(Filter)
def _filter(stage: Filter[Any], upstream: Upstream) -> Iterator[Any]:
    return filter(stage.fn, upstream)


@reference(FlatMap)
def _flat_map(stage: FlatMap[Any, Any], upstream: Upstream) -> Iterator[Any]:
    for item in upstream:
        yield from stage.fn(item)


@reference(Batch)
def _batch(stage: Batch[Any, Any], upstream: Upstream) -> Iterator[Any]:
    items = iter(upstream)
    while held := list(islice(items, stage.size)):
        if len(held) == stage.size or not stage.drop_remainder:
            yield stage.collate(held)


@reference(CostBatch)
def _cost_batch(stage: CostBatch[Any, Any], upstream: Upstream) -> Iterator[Any]:
    """Yield batches, each item weighed with all before it."""
    held: list[Any] = []
    for item in upstream:
        if held and sum(map(stage.cost, [*held, item])) > stage.max_cost:
            yield stage.collate(held)
            held = []
        held.append(item)
        if len(held) == stage.size or sum(map(stage.cost, held)) >= stage.max_cost:
            yield stage.collate(held)
            held = []
    if held and not stage.drop_remainder:
        yield stage.collate(held)


@reference(GroupBy)
def _group_by(stage: GroupBy[Any], upstream: Upstream) -> Iterator[Any]:
    return ((key, list(items)) for key, items in groupby(upstream, stage.key))


@reference(Window)
def _window(stage: Window[Any], upstream: Upstream) -> Iterator[Any]:
    items = list(upstream)
    return (items[at : at + stage.size] for at in range(0, len(items) - stage.size + 1, stage.stride))


@reference(Enumerate)
def _enumerate(stage: Enumerate[Any], upstream: Upstream) -> Iterator[Any]:
    return enumerate(upstream, stage.start)


@reference(Scan)
def _scan(stage: Scan[Any, Any], upstream: Upstream) -> Iterator[Any]:
    carry = deepcopy(stage.init)
    for item in upstream:
        carry, output = stage.fn(deepcopy(carry), item)
        yield output


@reference(BucketByLength)
def _bucket_by_length(stage: BucketByLength[Any, Any], upstream: Upstream) -> Iterator[Any]:
    """Yield batches out of buckets, looked for one by one."""
    buckets: list[list[Any]] = [[] for _ in stage.batch_size]
    for item in upstream:
        length = stage.length(item)
        number = sum(length > boundary for boundary in stage.boundaries)
        buckets[number].append(item)
        if len(buckets[number]) == stage.batch_size[number]:
            yield stage.collate(buckets[number])
            buckets[number] = []
    if not stage.drop_remainder:
        yield from (stage.collate(bucket) for bucket in buckets if bucket)


@reference(Pack)
def _pack(stage: Pack, upstream: Upstream) -> Iterator[Any]:
    """Yield blocks, token by token."""
    block: list[tuple[int, int, int]] = []  # token, segment, position
    dtype = np.dtype(np.int64)
    for item in upstream:
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


@reference(Take)
def _take(stage: Take[Any], upstream: Upstream) -> Iterator[Any]:
    return islice(upstream, stage.count)


@reference(Skip)
def _skip(stage: Skip[Any], upstream: Upstream) -> Iterator[Any]:
    return islice(upstream, stage.count, None)


@reference(IndexShuffle)
def _index_shuffle(stage: IndexShuffle[Any], upstream: Upstream) -> Iterator[Any]:
    held = list(upstream)
    return (held[at] for at in Bijection(len(held), [stage.seed, *upstream.site.epoch])(np.arange(len(held))).tolist())


@reference(Sample)
def _sample(stage: Sample[Any], upstream: Upstream) -> Iterator[Any]:
    """Yield draws, each looked for among all items."""
    held, entropy = list(upstream), [stage.seed, *upstream.site.epoch]
    draws = len(held) if stage.count is None else stage.count * bool(held)
    weights = np.ones(len(held)) if stage.weights is None else stage.weights.values
    if not stage.replacement:
        once = SampledOnce(WholeIndex(len(held)), weights, draws, entropy)
        yield from (held[at] for at in once(np.arange(draws)).tolist())
        return
    for number in uniform(np.arange(draws), entropy):
        left, at = number * weights.sum(), 0
        while left >= weights[at] and at < len(held) - 1:
            left, at = left - weights[at], at + 1
        yield held[at]


@reference(Shuffle)
def _shuffle(stage: Shuffle[Any], upstream: Upstream) -> Iterator[Any]:
    items = iter(upstream)
    for window in count():
        held = list(islice(items, stage.window))
        if not held:
            return
        yield from (held[index] for index in permutation(len(held), stage.seed, upstream.site, window))


@reference(Regenerate)
def _regenerate(stage: Regenerate[Any], upstream: Upstream) -> Iterator[Any]:
    rows = iter(upstream) if stage.block is None else (row for block in upstream for row in unstack(block))
    seed = stage.seed if stage.shuffle else None
    for cycle in count():
        held = list(islice(rows, stage.size))
        if not held:
            return
        for serving in range(stage.reuse):
            served = iter([held[index] for index in order_of(len(held), seed, upstream.site, cycle, serving)])
            if stage.block is None:
                yield from served
            while stage.block is not None and (block := list(islice(served, stage.block))):
                yield stack(block)


@reference(Through)
def _custom(stage: Through[Any, Any], upstream: Upstream) -> Iterator[Any]:
    params, loop = dict(stage.params), upstream.loops.of(stage)
    if isinstance(stage.fn, Declared) and stage.fn.state is not None:
        params["state"] = stage.fn.state()
    outputs: Any = stage.fn(_asynchronous(upstream), **params)
    upstream.loops.before_close(loop, outputs.aclose)
    while (item := loop.call(_next, outputs)) is not NOTHING:
        yield item


async def _asynchronous(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
