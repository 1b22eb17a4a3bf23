"""Every stage as one step of a random pipeline, with functions for any item that comes: an int, or lists of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from random import Random
from typing import Any

import anyio.lowlevel
from hypothesis import strategies as st

from streamline.core.limits import Limit
from streamline.pipeline import Pipeline
from streamline.testing.scripted import to_elsewhere
from streamline.transforms.custom import stage


@dataclass(frozen=True)
class Step:
    """One method call on a pipeline, printed as it would be written.

    Attributes:
      ordered: what comes out depends on the order of what goes in: not after choices.
      whole: it takes apart or drops by content: not on batches made after choices.
      grows: how many times more comes out than goes in, about.
    """

    text: str
    apply: Callable[[Pipeline[Any]], Pipeline[Any]]
    ordered: bool = False
    whole: bool = False
    grows: int = 1

    def __repr__(self) -> str:
        return self.text


def call(method: str, *args: Any, **options: Any) -> Step:
    """Return the step that calls a method of the pipeline with these arguments."""
    shown = [*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in options.items())]
    return Step(f".{method}({', '.join(shown)})", lambda pipe: getattr(pipe, method)(*args, **options))


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


# Functions: of ints, or of lists of them however deep. --------------------------------------------------------------


def each(fn: Callable[[int], int], item: Any) -> Any:
    return [each(fn, part) for part in item] if isinstance(item, list) else fn(item)


def number(item: Any) -> int:
    return sum(map(number, item)) if isinstance(item, list) else int(item)


def one_number(row: tuple[Any, ...]) -> int:
    """Return what tells a row of a zip from others."""
    return sum(number(item) * 1009**at for at, item in enumerate(row))


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


async def jitters(item: Any, *, rng: Any) -> Any:
    for _ in range(int(rng.integers(4))):
        await anyio.lowlevel.checkpoint()
    return noisy(item, rng=rng)


def stumbles(item: Any) -> Any:
    """Fails now and then, never twice at the same items."""
    if DICE.random() < 0.2:
        raise ConnectionError("it has stumbled")
    return plus(item)


async def stumbles_later(item: Any, *, rng: Any) -> Any:
    made = await jitters(item, rng=rng)
    stumbles(item)
    return made


def third(item: Any) -> bool:
    return number(item) % 3 == 0


def never(item: Any) -> bool:
    return False


def some(item: Any) -> list[Any]:
    return [each(partial(int.__add__, 100_000 * copy), item) for copy in range(1, 1 + number(item) % 3)]


def none(item: Any) -> list[Any]:
    return []


def document(item: Any) -> list[int]:
    """None to three tokens."""
    return [number(item)] * (number(item) % 4)


def packed(block: Any) -> list[int]:
    """The tokens of a block, as a list like those that `.batch` makes: compared as these are."""
    return [int(token) for token, segment in zip(block["tokens"], block["segment_ids"], strict=True) if segment]


# Custom stages: stateful, stateless, expanding, dropping. -----------------------------------------------------------


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


# Steps --------------------------------------------------------------------------------------------------------------

LIMITS = [Limit(1), Limit(3), Limit(2, per_second=50_000, burst=2)]
"""Stages of a composition may have the same one, and share it then."""

small = st.integers(1, 7)
rarely = st.sampled_from([False, False, True])


@st.composite
def maps(draw: st.DrawFn) -> Step:
    calls = draw(st.integers(1, 5))
    threads = {"executor": "thread", "concurrency": calls}
    again = {"retries": 99, "backoff": 0}
    limited = {"limit": draw(st.sampled_from(LIMITS))}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (plus, {}),
        (slow, {"concurrency": calls}),
        (erratic, {"concurrency": calls, "ordered": False}),
        (plus, {**threads, "ordered": True}),
        (plus, {**threads, "ordered": False}),
        (noisy, {"seed": 3}),
        (jitters, {"concurrency": calls, "seed": 3}),
        (stumbles, {**threads, **again}),
        (stumbles_later, {"concurrency": calls, "seed": 3, **again}),
        (plus, {"batched": calls}),
        (slow, {"batched": 3, "concurrency": calls}),
        (erratic, {"batched": 2, "concurrency": calls, "ordered": False}),
        (stumbles, {"batched": 4, **threads, **again}),
        (slow, {"concurrency": calls, **limited}),
        (erratic, {"concurrency": calls, "ordered": False, **limited}),
        (stumbles, {**threads, **again, **limited}),
    ]
    fn, options = draw(st.sampled_from(kinds))
    return call("map", fn, **options)


@st.composite
def customs(draw: st.DrawFn) -> Step:
    fn: Any
    fn, ordered = draw(st.sampled_from([(pairs, False), (running, True), (twice, False), (odd, False)]))
    every = draw(st.integers(1, 5))
    declare = stage(stateless=True, snapshot_every=every) if fn is twice else stage(state=dict, snapshot_every=every)
    text = f".through({fn.__name__} every {every})"
    made = replace(call("through", declare(fn)), text=text)
    return replace(made, ordered=ordered, whole=fn is odd, grows=2 if fn is twice else 1)


@st.composite
def batches(draw: st.DrawFn) -> Step:
    size, kind = draw(small), draw(st.sampled_from(["", "", "drop", "wait"]))
    if kind == "wait":  # a batch leaves whenever nothing is ready
        return call("batch", size, collate=None, max_wait_s=1e-9)
    return replace(call("batch", size, drop_remainder=kind == "drop", collate=None), ordered=kind == "drop")


def tens(item: Any) -> int:
    return number(item) // 10 % 3


def counted_by_rest(seen: dict[str, int], item: Any) -> tuple[dict[str, int], Any]:
    rest = str(number(item) % 3)
    seen[rest] = seen.get(rest, 0) + 1
    return seen, each(lambda x: x + 10_000 * seen[rest], item)


def summed(total: int, item: Any) -> tuple[int, Any]:
    total = (total + number(item)) % 997
    return total, each(lambda x: x + 10_000 * total, item)


def span(item: Any) -> int:
    """How long an item is said to be: few are long."""
    return number(item) * 7 % 11


@st.composite
def buckets(draw: st.DrawFn) -> Step:
    bounds, drop = draw(st.sampled_from([[4], [2, 6], [0, 3, 9]])), draw(rarely)
    sizes = draw(st.lists(small, min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    made = call("bucket_by_length", bounds, sizes, length=span, drop_remainder=drop, collate=None)
    return replace(made, ordered=drop)


@st.composite
def cuts(draw: st.DrawFn) -> Step:
    """Lists that end by what is in them."""
    if draw(st.booleans()):
        made = call("group_by", tens)
        return replace(made, text=".group_by(tens).map(second)", apply=lambda pipe: made.apply(pipe).map(itemgetter(1)))
    size, drop = draw(st.none() | small), draw(rarely)
    made = call("batch", size, max_cost=draw(st.integers(10, 25)), cost=span, drop_remainder=drop, collate=None)
    return replace(made, ordered=drop)


@st.composite
def scans(draw: st.DrawFn) -> Step:
    fn, init = draw(st.sampled_from([(counted_by_rest, {}), (summed, 0)]))
    return replace(call("scan", fn, init), ordered=True)


@st.composite
def windows(draw: st.DrawFn) -> Step:
    size, stride = draw(small), draw(small)
    return replace(call("window", size, stride), ordered=True, grows=-(-size // stride))


def numbered() -> Step:
    made = call("enumerate", 3)
    return replace(made, text=".enumerate(3).map(listed)", apply=lambda pipe: made.apply(pipe).map(list), ordered=True)


def _whole(method: str, *functions: Callable[..., Any]) -> st.SearchStrategy[Step]:
    return st.sampled_from(functions).map(lambda fn: replace(call(method, fn), whole=True))


def counted(kind: str, most: int) -> st.SearchStrategy[Step]:
    def made(count: int) -> Step:
        return replace(call(kind, count), ordered=kind != "repeat", grows=count if kind == "repeat" else 1)

    return st.integers(0, most).map(made)


def shuffles() -> st.SearchStrategy[Step]:
    return small.map(lambda n: call("shuffle", window=n))


@st.composite
def prefetches(draw: st.DrawFn) -> Step:
    return call("prefetch", draw(small), bytes=draw(st.none() | st.integers(1, 200)))


@st.composite
def packs(draw: st.DrawFn) -> Step:
    length, drop = draw(small), draw(rarely)
    pack = call("pack", length, eos=draw(st.none() | st.just(5)), drop_remainder=drop)
    apply = lambda pipe: pack.apply(pipe.map(document)).map(packed)  # noqa: E731
    return replace(pack, apply=apply, ordered=drop, whole=True, grows=3 if length < 3 else 1)


@st.composite
def regenerates(draw: st.DrawFn) -> Step:
    size, reuse = draw(small), draw(st.sampled_from([1, 1, 2]))
    return replace(call("regenerate", size, reuse=reuse, overlap=draw(st.booleans())), grows=reuse)


def transfers() -> st.SearchStrategy[Step]:
    """The last stage of all, after the merge: to the host, where items are already, or to what is waited for."""
    awaited = small.map(lambda n: Step(f".transfer(elsewhere, depth={n})", lambda p: to_elsewhere(p, depth=n)))
    return st.one_of(st.just(call("transfer", "host")), awaited)


UNBATCH = call("unbatch")


def steps() -> st.SearchStrategy[Step]:
    """Any stage, for a worker or after the merge."""
    return st.one_of(
        *[maps(), maps(), _whole("filter", third, never, third), _whole("flat_map", some, some, none), batches()],
        *[buckets(), customs(), customs(), shuffles(), shuffles(), regenerates(), st.just(call("cache"))],
        *[counted("take", 12), counted("skip", 5), counted("repeat", 3), prefetches(), packs(), st.just(UNBATCH)],
        *[cuts(), scans(), windows(), st.just(numbered())],
    )


def steps_before(indexable: bool) -> st.SearchStrategy[Step]:
    """Stages that may stand before the shard."""
    shuffled = [st.integers(0, 3).map(lambda seed: call("shuffle", seed=seed))] * indexable
    return st.one_of(counted("take", 20), counted("skip", 5), counted("repeat", 3), *shuffled)
