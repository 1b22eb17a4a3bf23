"""`.map`: calls a function on each item, inline, in tasks or in threads; `seed=` adds a random generator."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from streamline.core.blame import stage_name
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel
from streamline.core.driver import run_into
from streamline.core.flow import Chunk, Flow, Lists, Opener, Site, StageRun
from streamline.core.knobs import Knob, KnobKind, KnobValues
from streamline.core.lazy_numpy import np
from streamline.core.limits import Limit
from streamline.core.options import check_int, is_async
from streamline.core.pace import map_in_slices
from streamline.core.process_random import Look, check_alone, set_globally, torch_generator
from streamline.core.replay import Adapter
from streamline.core.state import NumberedStates, Over, Tree
from streamline.core.state_types import Count, total
from streamline.errors import PlanError, PlanTypeError, install
from streamline.transforms.base import Stage, StageLayout
from streamline.transforms.completion_order import AsCompleted, CompletionPart, Delivery, InOrder
from streamline.transforms.concurrent import CallPool, Calls, LimitedThreads, TaskPool, ThreadedPool
from streamline.transforms.retry import Retry

In = TypeVar("In")
Out = TypeVar("Out")

WAITING_ITEMS, WAITING_EACH = 64, 5
"""Inputs and results that may wait beside the calls in flight: at least so many, so that a list is worth its hop, and
so many for each call, so that no worker waits for its next input while the last results are on their way (3: 12 % of
the claims waited; 5: none)."""

AHEAD = 64
"""Unordered: inputs admitted beyond the oldest unfinished one, per call in flight (DESIGN, "Unordered work")."""

SYNC_AT_ONCE = (
    ".map(concurrency=, ordered=) of a sync function needs executor='thread': inline, one call follows another. One "
    "that returns an awaitable is written `async def`"
)

NOT_AFTER_A_CHOICE = (
    "can't be downstream of an unordered map or a best-effort merge, whose order another run would choose differently: "
    "move it before"
)

TORCH_SEGMENT, GLOBAL_SEGMENT = 1, 2
"""Of an item's random numbers, which seed torch's generator and those of the process; its `rng` draws from 0."""

ACCEPTED_CHANGES = {
    "fn": "each item from here on, also one that is computed again, is of the new function",
    "added": "each item from here on is passed through it",
    "removed": "each item from here on comes without it",
}
REFUSES = {"ordered": "a state of one says nothing of the order of the other: finish the epoch with the old setting"}


@dataclass(frozen=True, kw_only=True)
class Map(Stage[In, Out]):
    """Calls `fn` inline, in the task that pulls: for quick sync functions."""

    kind: ClassVar[str] = "map"
    accepted_changes: ClassVar[Mapping[str, str]] = ACCEPTED_CHANGES
    order_preserving: ClassVar[frozenset[str]] = frozenset(ACCEPTED_CHANGES)
    refuses: ClassVar[Mapping[str, str]] = REFUSES
    one_to_one = True

    fn: Callable[[In], Out]

    @classmethod
    def answers(cls, options: Mapping[str, Any]) -> bool:
        return options.get("ordered") is not False

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        look = None
        if isinstance(self.fn, Seeded) and self.fn.seed_globals:
            check_alone(str(self), run.site)
        else:
            look = Look(str(self), run.site)
        async with aclosing(map_in_slices(run, self.fn, str(self), awaiting_way(self.fn), look)) as parts:
            async for chunk, out in parts:
                made = [Chunk(out, chunk.states, chunk.progress)]
                chunk.items = ()  # a batch that was changed in place is its reader's alone
                del chunk, out  # release large results while they are used, and the next are made
                yield made.pop()


@dataclass(frozen=True, kw_only=True)
class ConcurrentMap(Stage[In, Out]):
    """Calls `fn` on many items at once, in a job of its own that fills a channel.

    Attributes:
      concurrency: calls (or threads) at once.
      ordered: whether results keep the order of their inputs. Otherwise they leave in order of completion; state: the
        low-water mark and what is done beyond it.
      executor: "task" for async functions, "thread" for sync ones.
      retry: when a failed call is made again; None: never.
      limit: bounds its calls together with those of other shards and stages; None: nothing does.
    """

    kind: ClassVar[str] = "map"
    accepted_changes: ClassVar[Mapping[str, str]] = ACCEPTED_CHANGES
    order_preserving: ClassVar[frozenset[str]] = frozenset({"fn"})
    refuses: ClassVar[Mapping[str, str]] = REFUSES
    state_type: ClassVar[Any] = CompletionPart  # one in order has none
    initial_state = CompletionPart([], [])
    keeps_only_held: ClassVar[bool] = True
    one_to_one = True

    fn: Callable[[In], Any]
    concurrency: int
    ordered: bool = True
    executor: Literal["task", "thread"] = "task"
    retry: Retry | None = field(default=None, repr=False)
    limit: Limit | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"fn": self.fn} if self.ordered else {"fn": self.fn, "ordered": False}

    @classmethod
    def replay_cost(cls, own: CompletionPart) -> str | None:
        if not (own.done or own.replay):
            return None
        done, replay = total(own.done), len(own.replay)
        parts = [f"reads {done:,} inputs again that are done, and passes over them"] if done else []
        parts += [f"completes {replay:,} inputs first that had been chosen"] if replay else []
        return "; ".join(parts)

    @classmethod
    def answers(cls, options: Mapping[str, Any]) -> bool:
        return options.get("ordered") is False

    def one_call_at_a_time(self) -> ConcurrentMap[In, Out]:
        return replace(self, concurrency=1)

    def in_all(self, num_workers: int) -> str:
        calls = self.concurrency
        if self.limit is not None:
            return f"up to {calls * num_workers:,} calls, as many at once as {self.limit} lets"
        return f"up to {calls * num_workers:,} calls at once ({calls:,} x {num_workers:,} shards)" if calls > 1 else ""

    def shown_options(self) -> list[str]:
        return [*super().shown_options(), *([] if self.retry is None else [str(self.retry)])]

    @property
    def layout(self) -> StageLayout:
        return StageLayout(
            after=self.capacity, calls=self.concurrency, threads=self.executor == "thread", limit=self.limit
        )

    @property
    def call_limit(self) -> Limit | None:
        return self.limit

    @property
    def knob(self) -> Knob | None:
        if self.concurrency == 1:
            return None  # its calls may not bear one another
        kind: KnobKind = "concurrency" if self.executor == "task" else "threads"
        return Knob(stage=self.name, kind=kind, written=self.concurrency, items_each=1 + WAITING_EACH)

    @property
    def chooses(self) -> bool:
        return not self.ordered

    @property
    def rewinds(self) -> bool:
        return not self.ordered

    @property
    def capacity(self) -> int:
        """Items between their admission and the consumer."""
        return self.concurrency + max(WAITING_EACH * self.concurrency, WAITING_ITEMS)

    @property
    def in_flight(self) -> int:
        return self.capacity + (0 if self.ordered else self.max_ahead)

    @property
    def max_ahead(self) -> int:
        """Unordered: how far beyond the oldest unfinished input others may be finished."""
        return AHEAD * self.concurrency

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        flow = upstream(state)
        begin, order = flow.state, cast("Delivery[In, Out]", InOrder())
        if not self.ordered:
            completed = AsCompleted[In, Out](self.name, flow.state, self.part_of(state), self.max_ahead)
            begin, order = completed.begin, completed
        skips = upstream.site.skips(self.name, self.kind, state)
        channel = Channel[Out](begin if skips is None else skips.over(begin), Capacity(self.capacity))
        channel.filler = flow.meter  # admitting inputs waits for room; the pool counts idle calls
        site = upstream.site
        meter = site.meter(self.name, self.kind, self.concurrency)
        if meter is not None:
            meter.figures.executor, meter.figures.ordered = self.executor, self.ordered
        in_threads = ThreadedPool if self.limit is None else LimitedThreads
        pool = TaskPool if self.executor == "task" else in_threads
        calls = Calls(
            fn=self.fn,
            stage=str(self),
            at_once=self.concurrency,
            retry=self.retry,
            limit=self.limit,
            skips=skips,
            on_resize=partial(self._resize, channel, order),
        )
        job: CallPool[In, Out] = pool(calls, site, channel, order, meter)
        inbox = run_into(channel, partial(job.run, flow), site, str(self), self.name)
        if (knobs := site.tasks.session.services.find(KnobValues)) is not None:
            knobs.join(self.name, job)
        return inbox

    def _resize(self, channel: Channel[Out], order: Delivery[In, Out], concurrency: int) -> None:
        """Let as much be in flight as with so many calls at once."""
        resized = replace(self, concurrency=concurrency)
        channel.resize(resized.capacity)
        order.max_ahead = resized.max_ahead


class Generators:
    """The random generators of one stage's items in one shard and epoch.

    Each depends on (seed, stage name, epoch, shard, ordinal of the item) alone: the same after a resume, and under any
    concurrency. Philox is counter-based, so each item has a range of 2^128 numbers of its own.

    To make one takes 15 us, to set one to an item's numbers 1: what a call leaves behind is set for the next. From any
    thread.
    """

    def __init__(self, seed: int, stage: str, site: Site) -> None:
        entropy = [seed, len(stage), *stage.encode(), site.num_shards, site.shard, *site.epoch]
        self._key: list[int] = np.random.SeedSequence(entropy).generate_state(2, np.uint64).tolist()
        self._free: list[ReusedGenerator] = []

    def lend(self, ordinal: int, segment: int = 0) -> ReusedGenerator:
        """Return the generator of the stage's input number `ordinal`, from 0, which nothing else has.

        Args:
          segment: of the item's numbers; what its function is given as `rng` draws from 0.
        """
        try:
            lent = self._free.pop()
        except IndexError:
            lent = ReusedGenerator(self._key)
        lent.begin(ordinal, segment)
        return lent

    def take_back(self, lent: ReusedGenerator) -> None:
        """Keep it for another item, unless the function has kept it."""
        if not lent.kept:
            self._free.append(lent)

    def words(self, ordinal: int, segment: int) -> list[int]:
        """Return three random words of an item, for generators of other libraries."""
        lent = self.lend(ordinal, segment)
        words: list[int] = lent.rng.bit_generator.random_raw(3).tolist()
        self.take_back(lent)
        return words


class ReusedGenerator:
    """A generator, `rng`, that is set to one item's numbers after the other's."""

    __slots__ = ("_counter", "_references_of_one", "_state", "rng")

    def __init__(self, key: list[int]) -> None:
        self.rng = np.random.Generator(np.random.Philox(key=0))
        self._counter = [0, 0, 0, 0]
        self._state = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": key},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._references_of_one = self._references()

    def begin(self, ordinal: int, segment: int) -> None:
        """Set it to the beginning of an item's numbers."""
        self._counter[2:] = ordinal, segment
        self.rng.bit_generator.state = self._state

    @property
    def kept(self) -> bool:
        """Whether anything else has the generator, or its bits."""
        return self._references() != self._references_of_one

    def _references(self) -> int:
        return sys.getrefcount(self.rng) + sys.getrefcount(self.rng.bit_generator)


Numbered: TypeAlias = "tuple[In, Generators, int]"
"""An item, and the ordinal of its generator among those of its shard."""


@dataclass(frozen=True, kw_only=True)
class Numbering(Stage[In, "Numbered[In]"]):
    """Numbers each item, for its generator. State: the ordinal of the next item."""

    kind: ClassVar[str] = "numbering"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "seed_globals": "random numbers from here on, also for items that are computed again, are drawn as it says now",
        "seed": "random numbers from here on, also for items that are computed again, are of the new seed",
        "added": "its function is given rng=, and items are numbered from here on",
        "removed": "its function is no longer given rng=",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset({"seed", "seed_globals", "removed"})
    state_type: ClassVar[Any] = Count
    one_to_one = True
    initial_state = 0
    part_of_next: ClassVar[bool] = True
    own_state_counts: ClassVar[bool] = False

    seed: int
    stage: str
    seed_globals: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"seed": self.seed, "seed_globals": True} if self.seed_globals else {"seed": self.seed}

    @classmethod
    def reshard(cls, owns: Sequence[int | None]) -> int:
        return max(own or 0 for own in owns)  # no rank has two items with the same generator

    @property
    def method(self) -> str:
        return "map(seed=)"

    def shown_options(self) -> list[str]:
        return [f"seed={self.seed!r}"]

    @classmethod
    def argument(cls, name: str, what: str) -> str:
        """Name the change as one of the map that this stage belongs to."""
        return f"{name.removesuffix('.rng')}.{what if what in ('name', 'removed') else 'seed'}"

    async def lists(self, run: StageRun[In]) -> Lists[Numbered[In]]:
        ordinal: int = run.own
        generators = Generators(self.seed, self.stage, run.site)
        while (chunk := await run.upstream.pull(run.max_items)) is not None:
            numbered = [(item, generators, at) for at, item in enumerate(chunk.items, ordinal)]
            states = NumberedStates(self.name, ordinal + 1, chunk.states)
            ordinal += len(numbered)
            yield Chunk(numbered, states, None if chunk.progress is None else Over(self.name, ordinal, chunk.progress))
            del chunk, numbered


class Seeded(Adapter):
    """Calls `fn(item, rng=...)` on a numbered item. A class: it is picklable, and shows its function's name.

    Args:
      fn: takes `rng`, `generator` (of torch's), both, or, with `seed_globals`, neither.
      seed_globals: the generators that the process shares are set for each call.
    """

    def __init__(self, fn: Callable[..., Any], seed_globals: bool = False) -> None:
        self.fn = self.__wrapped__ = fn
        self.seed_globals = seed_globals
        self.takes = _generators_of(fn, seed_globals)
        self._takes_rng_alone = self.takes == ("rng",) and not seed_globals
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.is_async = is_async(fn)

    def __call__(self, numbered: Numbered[Any]) -> Any:
        if self.is_async:
            return self._call_async(numbered)
        item, generators, ordinal = numbered
        lent = generators.lend(ordinal)
        try:
            if self._takes_rng_alone:
                return self.fn(item, rng=lent.rng)
            words = generators.words(ordinal, GLOBAL_SEGMENT) if self.seed_globals else None
            with nullcontext() if words is None else set_globally(words):
                return self.fn(item, **self._arguments(lent.rng, generators, ordinal))
        finally:
            generators.take_back(lent)

    async def _call_async(self, numbered: Numbered[Any]) -> Any:
        item, generators, ordinal = numbered
        lent = generators.lend(ordinal)
        try:
            return await self.fn(item, **self._arguments(lent.rng, generators, ordinal))
        finally:
            generators.take_back(lent)

    def _arguments(self, rng: np.random.Generator, generators: Generators, ordinal: int) -> dict[str, Any]:
        made: dict[str, Any] = {"rng": rng} if "rng" in self.takes else {}
        if "generator" in self.takes:
            made["generator"] = torch_generator(generators.words(ordinal, TORCH_SEGMENT))
        return made

    def item(self, numbered: Numbered[Any]) -> Any:
        return numbered[0]

    def around(self, fn: Callable[..., Any]) -> Seeded:
        return Seeded(fn, self.seed_globals)


def _generators_of(fn: Callable[..., Any], seed_globals: bool) -> tuple[str, ...]:
    """Return which generators a function takes by name; `rng` where its signature is unknown."""
    try:
        parameters = set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        parameters = set()
    found = tuple(name for name in ("rng", "generator") if name in parameters)
    if "generator" in found and find_spec("torch") is None:
        raise PlanError(
            f".map(seed=): {stage_name(fn)} takes generator=, one of torch's, which is not installed: take rng=, a "
            f"NumPy Generator, or {install('torch')}"
        )
    return found or (() if seed_globals else ("rng",))


class Awaiting(Adapter):
    """Awaits what a function without `async def` returns: a lambda around an async one, say."""

    is_async = True

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = self.__wrapped__ = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)

    async def __call__(self, given: Any) -> Any:
        made = self.fn(given)
        if not inspect.isawaitable(made):
            raise PlanTypeError(f"{SYNC_AT_ONCE} (it returned no awaitable, but {type(made).__name__})")
        return await made

    def around(self, fn: Callable[..., Any]) -> Awaiting:
        return Awaiting(self.fn.around(fn) if isinstance(self.fn, Adapter) else fn)


def may_await(fn: Callable[..., Any]) -> bool:
    """Whether a function that isn't async may wrap an async one: a lambda, or a decorated one."""
    while isinstance(fn, Adapter | partial):
        fn = fn.fn if isinstance(fn, Adapter) else fn.func
    inner = getattr(fn, "__wrapped__", None)
    return getattr(fn, "__name__", None) == "<lambda>" or (inner is not None and is_async(inner))


def awaiting_way(fn: Callable[..., Any]) -> str:
    """Return the way out where a coroutine is not awaited."""
    at_once = ", or .map(fn, concurrency=16), which awaits what a lambda returns" if may_await(fn) else ""
    return f"give .map the `async def` itself, functools.partial(fetch, client) of it{at_once}"


def map_of(
    name: str,
    fn: Callable[..., Any],
    *,
    concurrency: int | None = None,
    ordered: bool = True,
    executor: str | None = None,
    retry: Retry | None = None,
    limit: Limit | None = None,
) -> Map[Any, Any] | ConcurrentMap[Any, Any]:
    """Return the stage of `.map` with these; a PlanError if they contradict each other, or the kind of function."""
    user = fn
    while isinstance(user, Adapter):
        user = user.fn
    if inspect.isgeneratorfunction(user) or inspect.isasyncgenfunction(user):
        raise PlanError(
            f".map takes a function that returns one item for one, and {stage_name(user)} yields: "
            + (".flat_map(fn)" if inspect.isgeneratorfunction(user) else ".through(fn), whose fn takes all items")
        )
    asynchronous = is_async(fn)
    if isinstance(fn, Seeded) and fn.seed_globals and (asynchronous or executor or (concurrency or 1) > 1):
        raise PlanError(
            ".map(seed_globals=True) sets the generators of a whole process for one call at a time: a sync function, "
            "without concurrency= and executor=; .shard(8) and sl.Processes(4) make several at once"
        )
    calls = 1 if concurrency is None else concurrency
    calls = check_int(".map(concurrency=)", calls, 1)
    if executor not in (None, "thread"):
        raise PlanError(
            f".map(executor=) is 'thread' or None, got {executor!r}; processes run whole workers, "
            ".shard(8) and open(backend=sl.Processes(4))"
        )
    if asynchronous and executor:
        raise PlanError(".map(executor='thread') calls sync functions; an async one runs in the event loop already")
    if asynchronous or executor:
        kind: Literal["task", "thread"] = "task" if asynchronous else "thread"
        if kind == "thread" and retry is not None and retry.timeout_s is not None:
            raise PlanError(
                ".map(timeout_s=) ends calls of async functions; a thread can't be ended from outside: give a timeout "
                "to what waits in the function"
            )
        return ConcurrentMap(
            name=name, fn=fn, concurrency=calls, ordered=ordered, executor=kind, retry=retry, limit=limit
        )
    if calls > 1 or not ordered:
        if not may_await(fn):
            raise PlanError(SYNC_AT_ONCE)
        return ConcurrentMap(name=name, fn=Awaiting(fn), concurrency=calls, ordered=ordered, retry=retry, limit=limit)
    if retry is not None or limit is not None:
        raise PlanError(
            ".map(retries=, timeout_s=, limit=) are for async functions and executor='thread': inline, all else would "
            "wait for the pauses"
            + (", and .map(fn, concurrency=16) awaits what a lambda returns" if may_await(fn) else "")
        )
    return Map(name=name, fn=fn)
