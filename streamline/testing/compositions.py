"""Random pipelines, for hypothesis: every stage, in every order that a plan allows.

Where the order of items is open (behind an unordered map or a best-effort merge), only stages follow for which the multiset of
what comes out doesn't depend on it: so that comparing multisets proves something.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio.lowlevel
from hypothesis import strategies as st

from streamline.errors import PlanError
from streamline.pipeline import Pipeline
from streamline.sources.items import Items
from streamline.sources.iterable import IterableSource
from streamline.testing.sources import Script
from streamline.transforms.custom import stage

__all__ = ["Composition", "Step", "compositions", "pipelines"]


@dataclass(frozen=True)
class Step:
    """One method call on a pipeline, printed as it would be written.

    Attributes:
      ordered: what comes out depends on the order of what goes in: not behind choices.
      whole: it takes apart or drops by content: not on batches made behind choices.
    """

    text: str
    apply: Callable[[Pipeline[Any]], Pipeline[Any]]
    ordered: bool = False
    whole: bool = False

    def __repr__(self) -> str:
        return self.text


class Composition:
    """A random pipeline, and how it is written."""

    def __init__(self, pipeline: Pipeline[Any], text: str) -> None:
        self.pipeline = pipeline
        self.text = text

    def __repr__(self) -> str:
        return self.text


# Functions: of ints, or of lists of them however deep. ------------------------------------------------------------------


def each(fn: Callable[[int], int], item: Any) -> Any:
    return [each(fn, part) for part in item] if isinstance(item, list) else fn(item)


def number(item: Any) -> int:
    return sum(map(number, item)) if isinstance(item, list) else int(item)


def plus(item: Any) -> Any:
    return each(lambda x: x + 1000, item)


async def slow(item: Any) -> Any:
    for _ in range(number(item) * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return plus(item)


DICE = Random(0)


async def erratic(item: Any) -> Any:
    """Not the same pace twice: what an unordered map chooses, the next run would choose differently."""
    for _ in range(DICE.randrange(6)):
        await anyio.lowlevel.checkpoint()
    return plus(item)


def noisy(item: Any, *, rng: Any) -> Any:
    draw = int(rng.integers(100))
    return each(lambda x: x + 10_000 * draw, item)


def third(item: Any) -> bool:
    return number(item) % 3 == 0


def never(item: Any) -> bool:
    return False


def some(item: Any) -> list[Any]:
    return [each(lambda x, j=j: x + 100_000 * (j + 1), item) for j in range(number(item) % 3)]


def none(item: Any) -> list[Any]:
    return []


# Custom stages: stateful, stateless, expanding, dropping. ---------------------------------------------------------------


async def pairs(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncIterator[Any]:
    async for item in items:
        held = state.setdefault("held", [])
        held.append(item)
        if len(held) == 2:
            state["held"] = []
            yield held
    for item in state.get("held", []):
        yield [item]


async def running(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncIterator[Any]:
    async for item in items:
        state["sum"] = (state.get("sum", 0) + number(item)) % 997
        yield each(lambda x: x + 1_000_000 * state["sum"], item)


async def twice(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for item in items:
        yield item
        await anyio.lowlevel.checkpoint()
        yield plus(item)


async def odd(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncIterator[Any]:
    async for item in items:
        state["dropped"] = state.get("dropped", 0) + (number(item) % 2 == 0)
        if number(item) % 2:
            yield item


# Steps ------------------------------------------------------------------------------------------------------------------

small = st.integers(1, 7)


@st.composite
def _maps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from(["sync", "async", "unordered", "thread", "thread unordered", "seed", "async seed"]))
    calls = draw(st.integers(1, 5))
    if kind == "sync":
        return Step(".map(plus)", lambda p: p.map(plus))
    if kind == "async":
        return Step(f".map(slow, concurrency={calls})", lambda p: p.map(slow, concurrency=calls))
    if kind == "unordered":
        text = f".map(erratic, concurrency={calls}, ordered=False)"
        return Step(text, lambda p: p.map(erratic, concurrency=calls, ordered=False))
    if kind == "seed":
        return Step(".map(noisy, seed=3)", lambda p: p.map(noisy, seed=3))
    if kind == "async seed":
        return Step(f".map(jitters, concurrency={calls}, seed=3)", lambda p: p.map(jitters, concurrency=calls, seed=3))
    ordered = kind == "thread"
    text = f".map(plus, executor='thread', concurrency={calls}, ordered={ordered})"
    return Step(text, lambda p: p.map(plus, executor="thread", concurrency=calls, ordered=ordered))


async def jitters(item: Any, *, rng: Any) -> Any:
    for _ in range(int(rng.integers(4))):
        await anyio.lowlevel.checkpoint()
    return noisy(item, rng=rng)


@st.composite
def _customs(draw: st.DrawFn) -> Step:
    fn, ordered = draw(st.sampled_from([(pairs, False), (running, True), (twice, False), (odd, False)]))
    every = draw(st.integers(1, 5))
    declare = stage(stateless=True, snapshot_every=every) if fn is twice else stage(state=dict, snapshot_every=every)
    declared: Any = declare(fn)  # type: ignore[type-var]
    text = f".through({fn.__name__} every {every})"
    return Step(text, lambda p: p.through(declared), ordered=ordered, whole=fn is odd)


@st.composite
def _batches(draw: st.DrawFn) -> Step:
    size, drop = draw(small), draw(st.booleans())
    text = f".batch({size}, drop_remainder={drop}, collate=None)"
    return Step(text, lambda p: p.batch(size, drop_remainder=drop, collate=None), ordered=drop)


def _filters() -> st.SearchStrategy[Step]:
    return st.sampled_from([third, never, third]).map(
        lambda fn: Step(f".filter({fn.__name__})", lambda p: p.filter(fn), whole=True)
    )


def _flat_maps() -> st.SearchStrategy[Step]:
    return st.sampled_from([some, some, none]).map(
        lambda fn: Step(f".flat_map({fn.__name__})", lambda p: p.flat_map(fn), whole=True)
    )


def _counted(kind: str, counts: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    ordered = kind in ("take", "skip")
    return counts.map(lambda n: Step(f".{kind}({n})", lambda p: getattr(p, kind)(n), ordered=ordered))


def _shuffles() -> st.SearchStrategy[Step]:
    return small.map(lambda n: Step(f".shuffle(window={n})", lambda p: p.shuffle(window=n)))


@st.composite
def _prefetches(draw: st.DrawFn) -> Step:
    items, size = draw(small), draw(st.none() | st.integers(1, 200))
    return Step(f".prefetch({items}, bytes={size})", lambda p: p.prefetch(items, bytes=size))


UNBATCH = Step(".unbatch()", lambda p: p.unbatch())


def _steps() -> st.SearchStrategy[Step]:
    return st.one_of(
        _maps(),
        _maps(),
        _filters(),
        _flat_maps(),
        _batches(),
        _customs(),
        _customs(),
        _shuffles(),
        _shuffles(),
        _counted("take", st.integers(0, 12)),
        _counted("skip", st.integers(0, 5)),
        _counted("repeat", st.integers(0, 3)),
        _prefetches(),
        st.just(UNBATCH),
    )


# Pipelines --------------------------------------------------------------------------------------------------------------


@st.composite
def _sources(draw: st.DrawFn, most: int, kinds: Sequence[str]) -> tuple[Pipeline[Any], str]:
    """A source with its shards."""
    shards = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(kinds))
    if kind == "script":
        sizes = draw(st.lists(st.integers(0, max(1, 2 * most // shards)), min_size=shards, max_size=shards))
        paces = draw(st.lists(st.integers(0, 3), max_size=5))
        lists = [[shard + 10 * at for at in range(size)] for shard, size in enumerate(sizes)]
        pipe: Pipeline[Any] = Pipeline(Script(shards=tuple(map(tuple, lists)), schedule=tuple(paces)))
        return pipe.shard(shards), f"scripted of sizes {sizes}, paces {paces}"
    length = draw(st.integers(0, most))
    if kind == "items":
        pipe, text = Pipeline(Items(name="items", items=range(length))), f"from_items(range({length}))"
    else:
        factory = _asynchronously(length) if kind == "async iterable" else (lambda: range(length))
        pipe, text = Pipeline(IterableSource(name="iterable", factory=factory)), f"from_iterable({kind} of {length})"
    pipe, text = _applied(pipe, text, draw(st.lists(_before(kind == "items"), max_size=3)), False)[:2]
    drop, mode = draw(st.booleans()), draw(st.sampled_from(["interleaved", "contiguous"])) if kind == "items" else None
    try:
        return pipe.shard(shards, mode=mode, drop_remainder=drop), f"{text}.shard({shards}, {mode}, {drop})"
    except PlanError:
        return pipe, text


def _asynchronously(length: int) -> Callable[[], AsyncIterator[int]]:
    async def numbers() -> AsyncIterator[int]:
        for item in range(length):
            if item % 3 == 2:
                await anyio.lowlevel.checkpoint()
            yield item

    return numbers


def _before(indexable: bool) -> st.SearchStrategy[Step]:
    steps = [
        _counted("take", st.integers(0, 20)),
        _counted("skip", st.integers(0, 5)),
        _counted("repeat", st.integers(0, 3)),
    ]
    if indexable:
        steps.append(st.integers(0, 3).map(lambda seed: Step(f".shuffle(seed={seed})", lambda p: p.shuffle(seed=seed))))
    return st.one_of(steps)


@st.composite
def compositions(
    draw: st.DrawFn,
    *,
    choosing: bool | None = None,
    most: int = 24,
    stages: int = 4,
    kinds: Sequence[str] = ("items", "iterable", "async iterable", "script"),
) -> Composition:
    """Random pipelines with how they are written.

    Args:
      choosing: whether something in it must choose an order; None: as it comes.
      most: items of the source, about.
      stages: before the merge, and again behind it, at the most.
      kinds: of sources, those to choose from.
    """
    pipe, text = draw(_sources(most, kinds))
    pipe, text, chose = _applied(pipe, text, draw(st.lists(_steps(), max_size=stages)), False, choosing)
    best_effort = (choosing is not False and draw(st.booleans())) or (bool(choosing) and not chose)
    if best_effort:
        skips, lead = draw(st.integers(0, 3)), draw(st.integers(1, 4))
        pipe = pipe.merge("best_effort", max_skips_per_round=skips, max_lead=lead)
        text += f".merge(best_effort, max_skips_per_round={skips}, max_lead={lead})"
    else:
        pipe, text = pipe.merge(), text + ".merge()"
    pipe, text, _ = _applied(pipe, text, draw(st.lists(_steps(), max_size=stages)), best_effort or chose, choosing)
    return Composition(pipe, text)


def pipelines(*, choosing: bool | None = None, most: int = 24, stages: int = 4) -> st.SearchStrategy[Pipeline[Any]]:
    """Random pipelines; the arguments are those of `compositions`."""
    return compositions(choosing=choosing, most=most, stages=stages).map(lambda composition: composition.pipeline)


def _applied(
    pipe: Pipeline[Any], text: str, steps: Sequence[Step], chose: bool, choosing: bool | None = None
) -> tuple[Pipeline[Any], str, bool]:
    """Apply the steps that a plan allows, and that leave the multiset determined; say whether one of them chooses."""
    depth = _depth(pipe)
    for step in steps:
        if step is UNBATCH and not depth:
            continue
        if chose and (step.ordered or (step.whole and depth)):
            continue
        try:
            longer = step.apply(pipe)
        except PlanError:
            continue
        chooses = longer.stages[-1].chooses
        if chooses and choosing is False:
            continue
        pipe, text, chose = longer, text + step.text, chose or chooses
        depth = _depth(pipe)
    return pipe, text, chose


def _depth(pipe: Pipeline[Any]) -> int:
    """Return how deep items are nested in lists."""
    depth = 0
    for step in pipe.stages:
        if step.kind == "batch" or step.name.startswith("pairs"):
            depth += 1
        elif step.kind == "unbatch":
            depth -= 1
    return depth
