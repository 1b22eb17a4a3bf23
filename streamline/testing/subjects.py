"""Running what a law is checked on: opened at a state, read item by item or list by list, each item with its state."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any, TypeVar, cast

import anyio.lowlevel

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.backends.threads import Threads
from streamline.core.cursor import FlowReader
from streamline.core.flow import Flow, Opener, Site
from streamline.core.gate import Gate
from streamline.core.state import State
from streamline.core.tasks import Session, Tasks, supervise
from streamline.errors import SnapshotError
from streamline.pipeline import Pipeline
from streamline.plan.worker import SourceOpener, StageOpener
from streamline.runtime.open import OpenOptions, prepare
from streamline.runtime.run import ResolvedRun
from streamline.snapshot.file_format import one_line
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.base import Part, Source
from streamline.testing.changes import changed
from streamline.transforms.base import Stage

R = TypeVar("R")

LOOPS = ("asyncio", "uvloop", "trio")
"""Event loops that a law may be checked on; all but the first need their package."""

TIMEOUT_S = 200.0
"""Seconds after which a law says that nothing comes any more: thousands of times what one takes."""


class Subject(ABC):
    """What a law is checked on.

    Attributes:
      hosted: its workers run in hosts, which end with the run.
      copies: likewise, and what comes from there is copied.
    """

    hosted = copies = False

    @abstractmethod
    def open(self, tasks: Tasks, text: str | None) -> Flow[Any]:
        """Return its flow, at a state that `write` has written or at the beginning."""

    @abstractmethod
    def write(self, state: State) -> str:
        """Return a state as JSON."""

    def changed(self, dice: Random) -> Subject:
        """Return what goes on with its states, as far as something may change that a state says nothing of."""
        return self


@dataclass(frozen=True)
class ChainSubject(Subject):
    """Some stages over a source, pulled directly: no channels but those that the stages bring themselves."""

    source: Source[Any]
    stages: Sequence[Stage[Any, Any]]

    def open(self, tasks: Tasks, text: str | None) -> Flow[Any]:
        part = Part(mode=self.source.default_mode)
        opener: Opener[Any] = SourceOpener(lambda site, state: self.source.open(site, part, state), Site(tasks))
        for stage in self.stages:
            opener = StageOpener(stage, opener)
        return opener(None if text is None else json.loads(text))

    def write(self, state: State) -> str:
        return _saved(lambda: one_line(state.json()))

    def __str__(self) -> str:
        return " -> ".join(map(str, [self.source, *self.stages]))


@dataclass(frozen=True)
class PipelineSubject(Subject):
    """A whole pipeline, on one rank, through its snapshots."""

    pipeline: Pipeline[Any]
    backend: Backend = field(default_factory=Inline)

    @property
    def hosted(self) -> bool:  # type: ignore[override]
        return not isinstance(self.backend, Inline)

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return not isinstance(self.backend, Inline | Threads)

    def open(self, tasks: Tasks, text: str | None) -> Flow[Any]:
        return self._opening(None if text is None else Snapshot.from_json(text)).flow(tasks)

    def write(self, state: State) -> str:
        return _saved(lambda: self._saving.snapshots.take(state, Gate()).to_json())

    def changed(self, dice: Random) -> Subject:
        return replace(self, pipeline=changed(self.pipeline, dice))

    @cached_property
    def _saving(self) -> ResolvedRun:
        """What saves states: made once, since it looks for files."""
        return self._opening(None)

    def _opening(self, resume: Snapshot | None) -> ResolvedRun:
        return prepare(self.pipeline.plan, OpenOptions(self.backend, resume=resume, rank=0, world_size=1))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return repr(self.pipeline)


class Read:
    """What was read from a flow.

    Attributes:
      items: in order.
      states: (items before it, state, the state's text when it was new); several may stand after one item (progress).
      failure: what the flow failed with.
    """

    def __init__(self, begin: State, text: str) -> None:
        self.items: list[Any] = []
        self.states: list[tuple[int, State, str]] = [(0, begin, text)]
        self.failure: BaseException | None = None

    @property
    def last(self) -> str:
        return self.states[-1][2]


async def read(
    flow: Flow[Any] | FlowReader[Any],
    write: Callable[[State], str],
    pulls: Random,
    limit: int | None = None,
    *,
    noting: bool = True,
) -> Read:
    """Read to the end, the failure, or `limit` items; of a flow, now by item, now by list, as `pulls` says.

    Args:
      noting: the states on the way, too; False: only the first one, since writing them is much of the work.

    Raises:
      AssertionError: a list's last state is not its flow's.
      TimeoutError: nothing came within `TIMEOUT_S`.
    """
    found = Read(flow.state, write(flow.state))

    def note(state: State) -> None:
        if noting:
            found.states.append((len(found.items), state, write(state)))

    try:
        with anyio.fail_after(TIMEOUT_S) as timeout:
            while limit is None or len(found.items) < limit:
                timeout.deadline = anyio.current_time() + TIMEOUT_S
                if isinstance(flow, FlowReader) or pulls.random() < 0.5:
                    item = await anext(flow)
                    found.items.append(item)
                    note(flow.state)
                    continue
                room = 256 if limit is None else limit - len(found.items)
                chunk = await flow.pull(min(room, pulls.choice((1, 2, 3, 5, 256))))
                if chunk is None:
                    break
                for index, item in enumerate(chunk.items):
                    found.items.append(item)
                    note(chunk.states[index])
                note(flow.state)
                if noting and found.last != (end := write(chunk.end)):
                    raise AssertionError(
                        f"Quiescence: expected the flow to stand at its list's end, {end}, got {found.last}"
                    )
    except StopAsyncIteration:
        pass
    except anyio.get_cancelled_exc_class():
        raise
    except (AssertionError, TimeoutError):
        raise
    except BaseException as failure:
        found.failure = failure
    if limit is None:
        note(flow.state)
    return found


def run(work: Callable[[Tasks], Awaitable[R]], loop: str = "asyncio") -> R:
    """Run `work` on an event loop, with tasks that end after it, and return what it returns.

    Raises:
      AssertionError: it took longer than `TIMEOUT_S`.
    """
    outcome: list[R] = []
    failure: list[BaseException] = []

    async def main() -> None:
        async with anyio.create_task_group() as group:
            tasks = Tasks(group)
            try:
                with anyio.fail_after(20 * TIMEOUT_S):
                    outcome.append(await work(tasks))
            except TimeoutError:
                failure.append(AssertionError(f"Liveness: nothing more came within {TIMEOUT_S:g} s"))
            except Exception as error:  # out of the group's reach, which would wrap it
                failure.append(error)
            finally:
                tasks.finished()
            group.cancel_scope.cancel()

    name, options = ("asyncio", {"use_uvloop": loop == "uvloop"}) if loop != "trio" else ("trio", {})
    anyio.run(main, backend=name, backend_options=cast("dict[str, Any]", options))
    if failure:
        raise failure[0]
    return outcome[0]


@asynccontextmanager
async def opened(tasks: Tasks, subject: Subject, text: str | None) -> AsyncIterator[Flow[Any]]:
    """Open a subject as a stream does: with tasks of its own, which all have ended after it."""
    ready, stop, ended = anyio.Event(), anyio.Event(), anyio.Event()
    own: list[Tasks] = []

    def begin(made: Tasks) -> None:
        own.append(made)
        ready.set()

    async def supervisor() -> None:
        try:
            await supervise(begin, stop, Session())
        finally:
            ended.set()

    tasks.start(supervisor, "supervisor", stop.set)
    try:
        await ready.wait()
        flow = subject.open(own[0], text)
        try:
            yield flow
        finally:
            await flow.aclose()
    finally:
        stop.set()
        with anyio.CancelScope(shield=True):
            await ended.wait()


async def settle(rounds: int = 30) -> None:
    """Let whatever can go on without time passing or a thread go on."""
    for _ in range(rounds):
        await anyio.lowlevel.checkpoint()


def _saved(text: Callable[[], str]) -> str:
    try:
        return text()
    except SnapshotError as error:
        raise AssertionError(f"State: expected JSON, got a state that is none: {error}") from error
