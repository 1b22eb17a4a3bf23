"""The one idea: a flow is an async iterator that knows its state.

A stage (`streamline.transforms.base`) is opened over an *opener* of its upstream, at a state or at the beginning, and
returns a flow. It may open its upstream again (repeat, cache), and closes what it opened. Inside, flows move lists:
`pull` returns a `Chunk`: some items, and the state after each. Users see items: `async for`, and `state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from streamline.core.capacity import LIST_ITEMS
from streamline.core.state import MadeStates, Reference, Shifted, Since, SkipCounts, Skipped, State, States, Tree
from streamline.errors import ClosedError

if TYPE_CHECKING:
    from streamline.core.error_policy import Failure, Skips
    from streamline.core.meters import StageMeter
    from streamline.core.tasks import Tasks

T = TypeVar("T")
In = TypeVar("In")


class Chunk(Generic[T]):
    """Some items in order, the state after each, and perhaps *progress*: a state later than all of them.

    A chunk without items carries progress alone: what was read since the last item was dropped.
    """

    __slots__ = ("items", "progress", "states")

    def __init__(self, items: Sequence[T], states: States, after: State | None = None) -> None:
        self.items = items
        self.states = states
        self.progress = after

    @property
    def end_reference(self) -> Reference:
        """A reference to the state after everything in this chunk: its progress, or the last item's state."""
        return Reference(self.states, len(self.items) - 1) if self.progress is None else Reference.to(self.progress)

    @property
    def end(self) -> State:
        return self.end_reference.get()

    def take_items(self) -> list[T]:
        """Return the items, and drop them here: the generator that made this chunk may refer to it until its next step.

        So only their reader holds large items, and they leave a process without a copy.
        """
        items, self.items = list(self.items), ()
        return items

    def part(self, start: int, count: int) -> Chunk[T]:
        """Return items start … start + count - 1; the last part keeps the progress."""
        stop = start + count
        after = self.progress if stop >= len(self.items) else None
        return Chunk(self.items[start:stop], Shifted(self.states, start) if start else self.states, after)

    def with_skip_counts(self, skips: Skips | None) -> Chunk[T]:
        """Return this chunk with states that say what the stage has skipped so far."""
        if skips is None or not skips.counts:
            return self
        states = MadeStates(Skipped, skips.name, skips.shard, skips.counts, states=self.states)
        return Chunk(self.items, states, None if self.progress is None else skips.over(self.progress))


class Flow(ABC, Generic[T]):
    """An async iterator that knows its state; made without I/O, which begins at the first pull.

    A subclass produces chunks in `_next`. This class remembers failure and end: a failed flow raises the same
    exception for ever, and a finished one stays finished. It keeps no item that it has returned.

    Attributes:
      meter: of this flow's stage; counts the lists that are pulled. None: not counted, or the stage counts itself.
      reader: the meter of the stage that pulls this flow; counts waits. None: not counted.
      min_items: items that its reader needs to go on, set before a pull: a list with fewer is not handed on early
        because user code took long.
      has_own_task: other tasks make its items while its reader works on earlier ones.
    """

    meter: StageMeter | None = None
    reader: StageMeter | None = None
    min_items = 1
    has_own_task = False

    def __init__(self, begin: State) -> None:
        self._state_ref = Reference.to(begin)
        self._rest: Chunk[T] | None = None
        self._failure: BaseException | None = None
        self._trace: TracebackType | None = None
        self._ended = False

    @property
    def state(self) -> State:
        """The state right after the last item returned. It changes only while a pull is in progress."""
        return self._state_ref.get()

    def since(self, mark: State) -> State:
        """Return `mark`, an earlier state of this flow, plus the choices made since."""
        return Since(mark, self.state)

    async def pull(self, limit: int = LIST_ITEMS) -> Chunk[T] | None:
        """Return the next 1 to `limit` items, or none and progress; None at the end.

        A pull releases the items of the list before: they count as consumed.
        """
        chunk, self._rest = self._rest, None
        if chunk is None:
            if self._failure is not None:
                raise self._failure.with_traceback(self._trace)  # else it would grow with every raise
            if self._ended:
                return None
            try:
                chunk = await self._next(limit)
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as failure:
                self._failure, self._trace = failure, failure.__traceback__
                raise
            if chunk is None:
                self._ended = True
                return None
        if len(chunk.items) > limit:
            self._rest = chunk.part(limit, len(chunk.items))
            chunk = chunk.part(0, limit)
        self._state_ref = chunk.end_reference
        if self.meter is not None:
            self.meter.count(chunk.items)
        return chunk

    @property
    def is_ready(self) -> bool:
        """Whether the next pull neither waits nor calls user code, so that items at hand may be held back for it."""
        return self._rest is not None

    def release(self) -> None:
        """Count the items returned so far as consumed, without asking for more."""

    async def aclose(self) -> None:
        """Close what this flow opened, and drop its items. Idempotent. A later pull raises `ClosedError`."""
        self._rest = None
        if self._failure is None and not self._ended:
            self._failure = ClosedError("the stream is closed")

    def __aiter__(self) -> Flow[T]:
        return self

    async def __anext__(self) -> T:
        while (chunk := await self.pull(1)) is not None:
            if chunk.items:
                return chunk.items[0]
        raise StopAsyncIteration

    @abstractmethod
    async def _next(self, limit: int) -> Chunk[T] | None:
        """Produce the next chunk; about `limit` items, None at the end. Never called again after a failure."""


class Opener(Protocol[T]):
    """Opens a flow anew: at a state, or with None at the beginning. Opening does no I/O."""

    @property
    def site(self) -> Site:
        """Where the flow will run."""

    def __call__(self, state: Tree | None = None) -> Flow[T]: ...

    def at(self, site: Site) -> Opener[T]:
        """Return the opener of the same flow at another site, such as another pass."""


@dataclass(frozen=True)
class Site:
    """Where a chain of stages runs: what order and randomness may depend on, and who owns its tasks.

    Attributes:
      tasks: the supervisor's, in which stages start theirs.
      shard: 0-based among `num_shards` of the whole job; for stages after the merge, the rank.
      num_shards: shards in the whole job; after the merge, ranks.
      epoch: (loader epoch, pass of each enclosing repeat, outermost first).
      skipped: items left out in earlier passes, by (shard, stage), from which a stage that is opened again counts on.
    """

    tasks: Tasks
    shard: int = 0
    num_shards: int = 1
    epoch: tuple[int, ...] = (0,)
    skipped: Mapping[tuple[int, str], SkipCounts] = field(default_factory=dict)

    def meter(self, name: str, kind: str, concurrency: int = 1) -> StageMeter | None:
        """Return the meter of a stage that runs here; None: stages aren't counted."""
        meters = self.tasks.session.meters
        return meters.stage(name, kind, self.shard, concurrency) if meters.on else None

    def in_pass(self, number: int, skipped: Mapping[tuple[int, str], SkipCounts] | None = None) -> Site:
        """Return the site that stages upstream of a repeat have in pass `number`."""
        return replace(self, epoch=(*self.epoch, number), skipped={**self.skipped, **(skipped or {})})

    def skips(self, name: str, kind: str, state: Tree | None) -> Skips | None:
        """Return what counts the items that a stage here skips; None: it skips none, and never has."""
        count = self.skipped.get((self.shard, name), 0) if state is None else state.get("errors", {}).get(name, 0)
        return self.tasks.session.errors.skips(name, kind, self.shard, self.epoch, count)


class StageContext:
    """The pull in progress and the site, for a generator of chunks.

    Attributes:
      max_items: items that the pull in progress asks for; longer chunks are handed out in parts.
      min_items: how many of them its reader needs to go on.
      meter: of the stage; None: nothing is counted.
      skips: counts the items that are left out because of errors; None: none are.
      between_files: what a reader of files keeps from one file to the next.
    """

    __slots__ = ("between_files", "max_items", "meter", "min_items", "site", "skips")

    def __init__(self, site: Site, meter: StageMeter | None = None, skips: Skips | None = None) -> None:
        self.site = site
        self.skips = skips
        self.max_items = LIST_ITEMS
        self.min_items = 1
        self.meter = meter
        self.between_files: dict[str, Any] = {}

    def skip_or_raise(self, error: BaseException, item: object, position: State, items: int = 1) -> Failure:
        """Count a failed item as skipped, and return the failure; or raise what the stream fails with."""
        failure = error if self.skips is None else self.skips.decide(error, item, position, items)
        if isinstance(failure, BaseException):
            raise failure
        assert self.skips is not None
        self.skips.add(failure)
        return failure


class StageRun(StageContext, Generic[In]):
    """One run of a stage, for its generator; `own`: the stage's part of the state that it was opened at."""

    __slots__ = ("own", "upstream")

    def __init__(
        self, upstream: Flow[In], own: Any, site: Site, meter: StageMeter | None = None, skips: Skips | None = None
    ) -> None:
        super().__init__(site, meter, skips)
        self.upstream = upstream
        self.own = own
        upstream.reader = meter

    async def pull(self, max_items: int | None = None, min_items: int | None = None) -> Chunk[In] | None:
        """Return the upstream's next list of up to `max_items` items, of which the stage needs `min_items` to go on.

        None: as many as are asked for of the stage itself, which gives at most one item for each. Where another task
        makes the items, one is then enough.
        """
        if min_items is None:
            min_items = 1 if self.upstream.has_own_task else self.min_items
        self.upstream.min_items = min_items
        return await self.upstream.pull(self.max_items if max_items is None else max_items)


Lists = AsyncGenerator[Chunk[T], None]


class ListsFlow(Flow[T]):
    """A flow that is written as an async generator of chunks, `lists`, not started; `opened` are flows to close after
    it.

    Attributes:
      instant: nothing in here waits or calls a user's function, ever.
    """

    instant = False

    def __init__(self, begin: State, lists: Lists[T], context: StageContext, *opened: Flow[Any]) -> None:
        skips = context.skips
        super().__init__(begin if skips is None else skips.over(begin))
        self._lists = lists
        self._context = context
        self._opened = opened
        self.meter = context.meter

    @property
    def is_ready(self) -> bool:
        return self.instant or super().is_ready

    async def _next(self, limit: int) -> Chunk[T] | None:
        self._context.max_items, self._context.min_items = limit, self.min_items
        try:
            chunk = await anext(self._lists, None)
        except anyio.get_cancelled_exc_class():
            # The generator is dead now: without this, the next pull would look like an end.
            self._failure = ClosedError("a pull inside the pipeline was cancelled; open the pipeline again")
            raise
        return chunk if self._context.skips is None or chunk is None else chunk.with_skip_counts(self._context.skips)

    async def aclose(self) -> None:
        await super().aclose()
        await self._lists.aclose()
        for flow in self._opened:
            await flow.aclose()
