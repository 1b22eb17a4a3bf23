"""Running what a law is checked on: opened at a state, read item by item or list by list, each item with its state."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any, TypeVar

import anyio.lowlevel

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.backends.threads import Threads
from streamline.core.cursor import FlowReader
from streamline.core.flow import Flow, Opener, Site
from streamline.core.gate import Gate
from streamline.core.limits import Limit
from streamline.core.state import State
from streamline.core.tasks import Session, Tasks, supervise
from streamline.errors import PlanError, SnapshotError
from streamline.merge.base import Merge
from streamline.merge.best_effort import BestEffort
from streamline.merge.strict import Strict
from streamline.pipeline import Pipeline
from streamline.plan.plan import Plan
from streamline.plan.worker import SourceOpener, StageOpener
from streamline.runtime.open import prepare
from streamline.runtime.run import OpenOptions, ResolvedRun
from streamline.snapshot.file_format import one_line
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.base import Part, Source
from streamline.testing.scripted import to_elsewhere
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.custom import Declared, Through
from streamline.transforms.map import ConcurrentMap, Map
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.retry import Retry

R = TypeVar("R")

LOOPS = ("asyncio", "uvloop")
"""Event loops that a law may be checked on."""

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
        options = OpenOptions.of(backend=self.backend, resume=resume, rank=0, world_size=1, stall_s=None)
        return prepare(self._plan, options)

    @cached_property
    def _plan(self) -> Plan:
        return self.pipeline.plan

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
                tasks.clean_up()
            group.cancel_scope.cancel()

    anyio.run(main, backend_options={"use_uvloop": loop == "uvloop"})
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


# What may change between a snapshot and its resume with nothing to accept ("none needed" in docs/resume.md) -----------
AnyStage = Stage[Any, Any]


def changed(pipeline: Pipeline[Any], dice: Random) -> Pipeline[Any]:
    """Return a pipeline that takes `pipeline`'s snapshots: same items; the same order too, unless that one chooses it.

    What changes: the kind of merge and its options, concurrency, executor, retries, limits, prefetch, transfer,
    `max_wait_s`, `overlap`, `snapshot_every`. A stage chooses in the result only where the order that reaches it in
    `pipeline`, or its own, is open already.
    """
    try:
        found = _changed(pipeline, dice)
        found.plan  # noqa: B018 - a choice that a .repeat passes on, say
    except PlanError:
        return pipeline
    return found


def _changed(pipe: Pipeline[Any], dice: Random) -> Pipeline[Any]:
    merging, merged_at = pipe.merging, len(pipe.stages) if pipe.merging is None else pipe.merged_at
    stages: list[AnyStage] = []
    is_open = False
    for at, stage in enumerate(pipe.stages):
        is_open |= stage.chooses or (at >= merged_at and merging is not None and merging.chooses)
        stages.append(_other(stage, is_open, dice))
    last = stages.pop() if stages and stages[-1].last else None
    for at in sorted({len(stages), min(merged_at, len(stages))}, reverse=True):
        if dice.random() < 0.3:
            stages.insert(at, Prefetch[Any](name=f"ahead at {at}", items=dice.randint(1, 6)))
            merged_at += at <= merged_at
    merged_at = 0 if merging is None else merged_at
    made = replace(pipe, stages=tuple(stages), merging=_other_merge(merging, dice), merged_at=merged_at)
    if dice.random() < 0.3:
        return to_elsewhere(made, depth=dice.randint(1, 3))
    return made if last is None or dice.random() < 0.5 else made._with(last)


def _other_merge(merge: Merge | None, dice: Random) -> Merge | None:
    if not isinstance(merge, BestEffort):
        return merge
    kinds: list[Merge] = [
        merge,
        Strict(name=merge.name),
        BestEffort(name=merge.name, max_skips_per_round=dice.randrange(4), max_lead=dice.randint(1, 5)),
    ]
    return dice.choice(kinds)


def _other(stage: AnyStage, is_open: bool, dice: Random) -> AnyStage:
    """Return a stage with other options; one that chooses only if the order of its outputs is open anyway."""
    match stage:
        case ConcurrentMap(executor="thread", ordered=True, retry=None) if dice.random() < 0.3:
            return Map(name=stage.name, fn=stage.fn)
        case ConcurrentMap():
            retry = dice.choice((stage.retry, Retry(retries=99, timeout_s=None, backoff=0, retry_on=Exception)))
            limit = dice.choice((stage.limit, None, Limit(2)))
            return replace(stage, concurrency=dice.choice((1, 2, 5, 40)), retry=retry, limit=limit)
        case Map() if dice.random() < 0.3:
            return ConcurrentMap(name=stage.name, fn=stage.fn, concurrency=1, executor="thread")
        case Batch(kind="batch") if is_open:
            return replace(stage, max_wait_s=dice.choice((None, 1e-9, 0.001)))
        case Regenerate():
            return replace(stage, overlap=dice.random() < 0.5)
        case Through(fn=Declared(fn=fn, state=state)):
            return replace(stage, fn=Declared(fn, state, dice.randint(1, 6)))
        case Prefetch():
            return replace(stage, items=dice.randint(1, 9), bytes=dice.choice((None, 1, 100)))
    return stage
