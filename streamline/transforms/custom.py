"""Stages that users write: any async generator function of one async iterator.

A generator hides its state in its frame, so its author declares it (`@stage`): what must be remembered is kept in a
dict. A *safe point* is the moment the generator asks for its next input, not its yield: there, what it will do
depends only on the dict and on the inputs to come. State: the upstream's at the last safe point (a mark, `Since`), a
copy of the dict there, and how many outputs were delivered since; a resume replays from it. An undeclared stage has
one safe point, its start.

The generator runs in a task of its own behind a channel, so that it can be driven by nobody's timeout, and so that
progress can pass it while it yields nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec, SupportsIndex, TypeVar

import msgspec

from streamline.blame import blame, cancellation_requested
from streamline.channel import Channel
from streamline.cursor import Reader
from streamline.driver import into, run_into
from streamline.errors import PlanTypeError
from streamline.flow import LIST_ITEMS, Chunk, Flow, Opener, Site, Stage
from streamline.states import Over, Since, State, Tree

__all__ = ["Declared", "Through", "stage"]

In = TypeVar("In")
Out = TypeVar("Out")
P = ParamSpec("P")

CAPACITY = 64
"""Outputs of a custom stage that may wait for their reader."""


class Declared(Generic[P, Out]):
    """A custom stage whose author has declared its state. Still callable, as the function it was."""

    def __init__(
        self,
        fn: Callable[P, AsyncIterator[Out]],
        state: Callable[[], dict[str, Any]] | None,
        snapshot_every: int,
    ) -> None:
        update_wrapper(self, fn)
        self.fn = fn
        self.state = state
        self.snapshot_every = snapshot_every

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle a stage of a module by its name, as the function would be; the name is bound to this object."""
        name = self.fn.__qualname__
        if self.fn.__module__ != "__main__" and "<locals>" not in name:
            return name
        return super().__reduce_ex__(protocol)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Out]:
        return self.fn(*args, **kwargs)


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
      PlanTypeError: not exactly one of `state` and `stateless` was given, or `snapshot_every` < 1.
    """
    if (state is None) != stateless:
        raise PlanTypeError("@stage takes either state=dict (or another function that makes a dict) or stateless=True")
    if snapshot_every < 1:
        raise PlanTypeError(f"@stage(snapshot_every=) is at least 1, got {snapshot_every}")

    def declare(fn: Callable[P, AsyncIterator[Out]]) -> Declared[P, Out]:
        return Declared(fn, state, snapshot_every)

    return declare


@dataclass(frozen=True, kw_only=True)
class Through(Stage[In, Out]):
    """A custom stage in a pipeline."""

    fn: Callable[..., AsyncIterator[Out]]
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def in_flight(self) -> int:
        return CAPACITY + LIST_ITEMS

    @property
    def rewinds(self) -> bool:
        return True

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        flow = upstream(state)
        own = {"state": self._first_state(), "outputs": 0} if state is None else state[self.name]
        channel = Channel[Out](Over(self.name, own, flow.state), CAPACITY)
        running = _Running(self, flow, channel, own, upstream.site)
        return run_into(channel, partial(into, channel, flow, running.run), upstream.site, str(self))

    def _first_state(self) -> dict[str, Any] | None:
        if isinstance(self.fn, Declared) and self.fn.state is not None:
            return jsonable(self.fn.state(), str(self))
        return None


class _Running(Generic[In, Out]):
    """The job of one custom stage; also the async iterator that the user's function reads."""

    def __init__(
        self, stage: Through[In, Out], upstream: Flow[In], channel: Channel[Out], own: Any, site: Site
    ) -> None:
        self._stage, self._reader, self._channel, self._site = stage, Reader(upstream), channel, site
        self._declared = stage.fn if isinstance(stage.fn, Declared) else None
        self._state: dict[str, Any] | None = None if own["state"] is None else jsonable(own["state"], str(stage))
        self._saved = own["state"]
        self._mark = self._now = upstream.state
        self._skip: int = own["outputs"]
        self._outputs = 0
        self._inputs = 0
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Send what the user's function yields, each output with its state."""
        params = dict(self._stage.params)
        if self._state is not None:
            params["state"] = self._state
        try:
            outputs: Any = self._stage.fn(self, **params)
            if not isinstance(outputs, AsyncGenerator):
                if inspect.iscoroutine(outputs):
                    outputs.close()  # it will not be awaited
                raise PlanTypeError(f"expected an async generator from {self._stage}, got {type(outputs).__name__}")
            async with aclosing(outputs):
                while True:
                    await self._channel.wait_room()
                    try:
                        item = await anext(outputs)
                    except StopAsyncIteration:
                        break
                    await self._send(item)
        except BaseException as error:
            if error is self._failure or cancellation_requested(error):
                raise
            raise blame(error, str(self._stage), self._site, self._now)  # noqa: B904 - it is the error, or has its cause
        if self._failure is not None:
            raise self._failure  # the user's function swallowed it: a failed upstream must not look like a finished one

    async def _send(self, item: Out) -> None:
        self._outputs += 1
        if self._outputs > self._skip:
            await self._channel.send(Chunk((item,), (self._behind(),)))

    def _behind(self) -> State:
        """The state behind the outputs so far."""
        return Over(self._stage.name, {"state": self._saved, "outputs": self._outputs}, Since(self._mark, self._now))

    def __aiter__(self) -> AsyncIterator[In]:
        return self

    async def __anext__(self) -> In:
        await self._site.tasks.gate.passage()
        if self._declared is not None and self._outputs >= self._skip and self._inputs >= self._declared.snapshot_every:
            self._save()
        try:
            item = await anext(self._reader)
        except StopAsyncIteration:
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
        self._channel.post(Chunk((), (), self._behind()))


def jsonable(state: Any, stage: str) -> dict[str, Any]:
    """Return a deep copy of a custom stage's state, made through JSON.

    Raises:
      PlanTypeError: the state is not a dict, or comes back from JSON as something else.
    """
    try:
        copy = msgspec.json.decode(msgspec.json.encode(state))
    except (TypeError, ValueError) as error:
        raise PlanTypeError(f"the state of {stage} is not JSON-able: {error}") from error
    if not isinstance(copy, dict) or copy != state:
        raise PlanTypeError(f"the state of {stage} does not survive JSON: {state!r} comes back as {copy!r}")
    return copy
