"""`.through` and `@stage`: stages that users write, as async generator functions of one async iterator.

A generator hides its state in its frame, so its author declares it (`@stage`): what must be remembered is kept in a
dict. A *safe point* is the moment the generator asks for its next input, not its yield: there, what it will do
depends only on the dict and on the inputs to come. State: the upstream's at the last safe point (a mark, `Since`), a
copy of the dict there, and how many inputs were taken and outputs delivered since; a resume replays from it. An
undeclared stage has one safe point, its start.

The generator runs in its own task and sends to a channel, so that no timeout of a consumer cancels it, and so that
progress can pass it while it yields nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from streamline.core.blame import blame, cancellation_requested, stage_name
from streamline.core.capacity import LIST_ITEMS, Capacity
from streamline.core.channel import Channel
from streamline.core.cursor import FlowReader
from streamline.core.driver import fill_channel, run_into
from streamline.core.flow import Chunk, Flow, Opener, Site
from streamline.core.meters import StageMeter
from streamline.core.options import check_function, check_int, type_and_repr
from streamline.core.state import Over, Since, State, Tree
from streamline.core.state_types import Count
from streamline.core.user_function import DeclaredFunction, jsonable, parameters_of
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.sources.base import Source
from streamline.transforms.base import Stage, StageLayout

In = TypeVar("In")
Out = TypeVar("Out")
P = ParamSpec("P")

CAPACITY = 64
"""Outputs of a custom stage that its channel holds."""

SHORT_CHARS = 24
"""A parameter of a custom stage is printed if it takes no more than these; else its type is."""


class Declared(DeclaredFunction, Generic[P, Out]):
    """A custom stage with a declared state; callable as the undecorated function."""

    def __init__(
        self, fn: Callable[P, AsyncIterator[Out]], state: Callable[[], dict[str, Any]] | None, snapshot_every: int
    ) -> None:
        super().__init__(fn, state)
        self.snapshot_every = snapshot_every

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Out]:
        outputs: AsyncIterator[Out] = self.fn(*args, **kwargs)
        return outputs


def stage(
    *, state: Callable[[], dict[str, Any]] | None = None, stateless: bool = False, snapshot_every: int = 16
) -> Callable[[Callable[P, AsyncIterator[Out]]], Declared[P, Out]]:
    """Declare what an async generator function remembers, so that `.through` resumes it without starting over.

    Args:
      state: makes the first state, a dict that is JSON-able at every moment the stage asks for its next input
        (`state=dict`). The function gets it as its keyword `state`, changes it in place, and must remember nothing
        else: update it *before* asking for the next input.
      stateless: the stage remembers nothing between two inputs; the function gets no `state`.
      snapshot_every: inputs between two copies of the state; a resume reads up to this many again.

    Raises:
      PlanTypeError: not exactly one of `state` and `stateless` was given, `snapshot_every` is no integer of 1 or more,
        or what is decorated is no async generator function with a first parameter for its inputs, and, where it has a
        state, a keyword `state`.
    """
    if (state is None) != stateless:
        raise PlanTypeError("@stage takes either state=dict (or another function that makes a dict) or stateless=True")
    if state is not None:
        check_function("@stage(state=)", state)
    snapshot_every = check_int("@stage(snapshot_every=)", snapshot_every, 1)

    def declare(fn: Callable[P, AsyncIterator[Out]]) -> Declared[P, Out]:
        _check_declared(fn, state is not None)
        return Declared(fn, state, snapshot_every)

    return declare


def _check_declared(fn: Callable[..., Any], stateful: bool) -> None:
    """Check that `.through` can call the function."""
    name = stage_name(fn)
    if not inspect.isasyncgenfunction(fn):
        raise PlanTypeError(
            f"@stage declares an async generator function (async def with a yield in it), and {name} is none: a sync "
            "function of one item is what .map, .filter and .flat_map take"
        )
    names, _ = parameters_of(fn)
    positional = [p for p in inspect.signature(fn).parameters.values() if p.kind <= p.VAR_POSITIONAL]
    if not positional:
        raise PlanTypeError(f"@stage: {name} has no first parameter for the inputs: async def {name}(items, ...)")
    if stateful != ("state" in names):
        raise PlanTypeError(
            f"@stage(state=): {name} has no keyword `state`: async def {name}(items, *, state), or stateless=True"
            if stateful
            else f"@stage(stateless=True): {name} has a parameter `state`: declare it with @stage(state=dict)"
        )


class SafePoint(msgspec.Struct, frozen=True):
    """The stage's part of a saved state: the dict at its last safe point, and the inputs and outputs since."""

    state: dict[str, Any] | None
    inputs: Count
    outputs: Count


@dataclass(frozen=True, kw_only=True)
class Through(Stage[In, Out]):
    kind: ClassVar[str] = "through"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "fn": "the new function is given the state that the old one kept; of the inputs since its last safe point, as "
        "many outputs as were delivered are passed over",
        "params": "its state is kept; of the inputs since its last safe point, as many outputs as were delivered are "
        "passed over",
        "added": "it begins here",
        "removed": "the items from here on come as they are",
    }
    state_type: ClassVar[Any] = SafePoint
    keeps_only_held: ClassVar[bool] = True
    rewinds = True
    item_functions: ClassVar[tuple[str, ...]] = ()  # one call makes all its items

    fn: Callable[..., AsyncIterator[Out]]
    params: tuple[tuple[str, Any], ...] = ()

    def check_live(self, source: Source[Any]) -> None:
        if not isinstance(self.fn, Declared):
            raise PlanError(
                f"a resume would run {self.name} from its start, on items of {source.kind} that are gone by then: "
                "declare what it remembers with @sl.stage(state=dict), or @sl.stage(stateless=True)"
            )

    def shown_options(self) -> list[str]:
        return [f"{key}={_short_text(value)}" for key, value in self.params]

    @property
    def layout(self) -> StageLayout:
        return StageLayout(after=CAPACITY)

    @property
    def in_flight(self) -> int:
        return CAPACITY + LIST_ITEMS

    @classmethod
    def replay_cost(cls, own: SafePoint) -> str | None:
        if not own.inputs:
            return None
        return f"takes {own.inputs:,} inputs again, and passes over the {own.outputs:,} outputs that were delivered"

    @classmethod
    def held_items(cls, own: SafePoint) -> str | None:
        if own.state:
            return "keeps a state, which may hold items"
        if own.outputs and not own.inputs:
            return f"has given {own.outputs:,} outputs since its last safe point, before it took an input"
        return cls.replay_cost(own)

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        flow = upstream(state)
        own = self.part_of(state)
        channel = Channel[Out](Over(self.name, own, flow.state), Capacity(CAPACITY))
        channel.filler = flow.reader = upstream.site.meter(self.name, self.kind)
        job = _CustomRun(self, flow, channel, own, upstream.site)
        return run_into(channel, partial(fill_channel, channel, flow, job.run), upstream.site, str(self), self.name)

    @property
    def initial_state(self) -> SafePoint:
        return SafePoint(self.fn.first_state(str(self)) if isinstance(self.fn, Declared) else None, 0, 0)

    def part_of(self, state: Tree | None) -> SafePoint:
        """Return the part of the state to begin at, with what `fn` declares today.

        Raises:
          ResumeError: it kept a state, and declares none any more.
        """
        if state is None or self.name not in state:
            return self.initial_state
        own: SafePoint = super().part_of(state)
        first = self.initial_state.state
        if own.state is not None and first is None:
            raise ResumeError(
                f"the snapshot has a state of {self}, which declares none any more: give it back its "
                "@sl.stage(state=dict), or begin anew"
            )
        if own.state is None:
            return replace(own, state=first)  # it was undeclared: what is replayed begins at its start
        return own


def _short_text(value: object) -> str:
    """Return what a parameter is, in a few characters."""
    try:
        text = repr(value)
    except Exception:  # a user's own: no reason not to see the plan
        text = ""
    return text if 0 < len(text) <= SHORT_CHARS else f"<{type(value).__name__}>"


class _TimedReader(FlowReader[In]):
    """The inputs of a generator. Times it from each request for an output to that, but not while it waits here."""

    def __init__(self, flow: Flow[In], meter: StageMeter | None) -> None:
        super().__init__(flow)
        self._meter = meter

    def start(self) -> None:
        """The generator runs from now on."""
        if self._meter is not None:
            self._meter.slots = [perf_counter()]

    def stop(self) -> None:
        """The generator has yielded, or asks for an input."""
        meter = self._meter
        if meter is not None and meter.slots:
            (began,), meter.slots = meter.slots, []
            meter.count_work(began, perf_counter())

    async def _pull(self) -> Chunk[In] | None:
        self.stop()
        try:
            return await super()._pull()
        finally:
            self.start()


class _CustomRun(Generic[In, Out]):
    """One run of a custom stage; also the async iterator that the user's function reads."""

    def __init__(
        self, stage: Through[In, Out], upstream: Flow[In], channel: Channel[Out], own: SafePoint, site: Site
    ) -> None:
        self._stage, self._channel, self._site = stage, channel, site
        self._reader = _TimedReader[In](upstream, channel.filler)
        self._state: dict[str, Any] | None = None if own.state is None else jsonable(own.state, str(stage))
        self._saved = own.state
        self._mark = self._now = upstream.state
        self._skip = own.outputs
        self._outputs = 0
        self._inputs = 0
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Send what the user's function yields, each output with its state."""
        params, gate = dict(self._stage.params), self._site.tasks.gate
        if self._state is not None:
            params["state"] = self._state
        try:
            outputs: Any = self._stage.fn(self, **params)
            if not isinstance(outputs, AsyncGenerator):
                if inspect.iscoroutine(outputs):
                    outputs.close()  # it will not be awaited
                raise PlanTypeError(
                    f"expected an async generator from {self._stage}, got {type(outputs).__name__}: async def "
                    f"{stage_name(self._stage.fn)}(items), with `async for item in items` and a yield in it"
                )
            async with aclosing(outputs):
                while True:
                    await self._channel.wait_room()
                    if gate.holding:
                        await gate.passage()
                    self._reader.start()
                    try:
                        item = await anext(outputs)
                    except StopAsyncIteration:
                        break
                    finally:
                        self._reader.stop()
                    if gate.holding:
                        await gate.passage()  # it may have waited for something of its own
                    await self._send(item)
                    del item  # it is the reader's: not kept while the next is made
        except BaseException as error:
            if error is self._failure or cancellation_requested(error):
                raise
            raise blame(error, str(self._stage), self._site, self._now)  # noqa: B904 - it is the error, or has its cause
        self._channel.post(Chunk((), (), self._output_state()))  # the inputs after the last output are consumed
        if self._failure is not None:
            raise self._failure  # the user's function swallowed it: a failed upstream must not look like a finished one

    async def _send(self, item: Out) -> None:
        self._outputs += 1
        if self._outputs > self._skip:
            await self._channel.send(Chunk((item,), (self._output_state(),)))
            if (meter := self._channel.filler) is not None:
                meter.count((item,))

    def _output_state(self) -> State:
        own = SafePoint(self._saved, self._inputs, self._outputs)
        return Over(self._stage.name, own, Since(self._mark, self._now))

    def __aiter__(self) -> AsyncIterator[In]:
        return self

    async def __anext__(self) -> In:
        if self._site.tasks.gate.holding:  # a paused stream does no work
            self._reader.stop()
            await self._site.tasks.gate.passage()
            self._reader.start()
        fn = self._stage.fn
        if isinstance(fn, Declared) and self._outputs >= self._skip and self._inputs >= fn.snapshot_every:
            self._save()
        try:
            item = await anext(self._reader)
        except StopAsyncIteration:
            self._now = self._reader.state  # after what was dropped at the end
            raise
        except BaseException as failure:
            if not cancellation_requested(failure):
                self._failure = failure
            raise
        self._inputs += 1
        self._now = self._reader.state
        return item

    def _save(self) -> None:
        """Make this moment the safe point that a resume replays from."""
        if self._state is not None:
            self._saved = jsonable(self._state, str(self._stage))
        self._mark = self._now
        self._inputs = self._outputs = self._skip = 0
        self._channel.post(Chunk((), (), self._output_state()))


def check_through(fn: object) -> None:
    """Check that `fn` may be an async generator function."""
    if inspect.isasyncgen(fn) or inspect.isgenerator(fn):
        raise PlanTypeError(
            f".through(fn) is a function, got {type_and_repr(fn)}: .through({fn.__name__}), which is called with the "
            "items"
        )
    check_function(".through(fn)", fn)
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        kind = "a sync generator function" if inspect.isgeneratorfunction(fn) else "an async function without a yield"
        raise PlanTypeError(
            f".through(fn) is an async generator function, and {stage_name(fn)} is {kind}: async def "
            f"{stage_name(fn)}(items), with `async for item in items` and a yield in it"
        )
