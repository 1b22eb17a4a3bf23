"""One run of a plan, from its opening to its close: what all its parts share, and who owns its tasks.

Tasks belong to one task group, in a supervisor's task, never in the consumer's: that would turn the consumer's own
exception into a group, and a `break` under a timeout into a cancellation from nowhere.

The consumer takes lists. A *chunk boundary* is the moment at which it asks for another one: whatever must follow what
was consumed (trimming a journal, counting errors) is done there, once a list and never once an item, in the consumer's
own thread, with the state right after the last item that it got, which isn't made unless it is read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import ref

import anyio
from anyio.abc import TaskGroup

from streamline.core.byte_budget import Budget
from streamline.core.cleanup import Cleanup
from streamline.core.error_policy import Errors
from streamline.core.forks import disowned_in_copies
from streamline.core.gate import Event, Gate
from streamline.core.meters import Meters
from streamline.core.threads import ThreadPool, undisturbed
from streamline.errors import PlanError

if TYPE_CHECKING:
    from streamline.core.state import Reference, State

MEMORY_BYTES = 256 * 2**20
"""Bytes that sources may hold read ahead in one process: 16 objects of 16 MiB, or 64 of 4 MiB."""


S = TypeVar("S")

P = ParamSpec("P")


class Services:
    """What optional features keep for a run, in one event loop: one object of a class, found by the class.

    So the parts of a feature find each other, and what stands between them knows nothing of it.
    """

    def __init__(self) -> None:
        self._found: dict[object, Any] = {}
        self._hidden: frozenset[object] = frozenset()

    def add(self, kind: type[S], service: S) -> None:
        """Let `service` be what is found; in the place of another one, if there is one."""
        self._found[kind] = service

    def find(self, kind: type[S]) -> S | None:
        """Return the service; None: there is none, so the feature is off."""
        return None if kind in self._hidden else self._found.get(kind)

    def get(self, kind: Callable[P, S], *args: P.args, **kwargs: P.kwargs) -> S:
        """Return the service; the first that asks makes it, with these arguments."""
        found: S | None = self._found.get(kind)
        return self._found.setdefault(kind, kind(*args, **kwargs)) if found is None else found

    def without(self, kind: type) -> Services:
        """Return the same services, but for one, which is not found."""
        others = Services()
        others._found, others._hidden = self._found, self._hidden | {kind}
        return others


@dataclass(frozen=True)
class WaitedWorker:
    """A worker that the merge waits for; `state`: right after the last item that the merge has taken from it."""

    shard: int
    state: State


@dataclass(frozen=True)
class MergeWait:
    """Tells, in the event loop's thread, which workers the merge waits for."""

    workers: Callable[[], Sequence[WaitedWorker]] = tuple


@dataclass(frozen=True)
class WorkersExhausted:
    """To be called, in the event loop's thread, when the workers have given all that they have, or no more is wanted of
    them; perhaps more than once."""

    tell: Callable[[], None]


@dataclass
class RankWait:
    """Which other ranks have not said what this one waits for; "": it waits for none."""

    missing: str = ""


class RunHooks:
    """What is called at moments of one run: when its consumer asks for another list, leaves, or it has ended."""

    def __init__(self) -> None:
        self._at_leaving: list[Callable[[], None]] = []
        self._on_chunk_boundary: list[Callable[[Reference], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._closed = False
        disowned_in_copies(self)

    def disown(self) -> None:
        """Write and close nothing: it is done in the process that this one is a copy of."""
        for work in (self._at_leaving, self._on_chunk_boundary, self._at_close):
            work.clear()

    def on_chunk_boundary(self, work: Callable[[Reference], None]) -> None:
        """Do `work` at every chunk boundary, in the consumer's thread; what it raises, the stream fails with."""
        self._on_chunk_boundary.append(work)

    def run_chunk_boundary(self, state: Reference) -> None:
        """The consumer asks for another list; `state` is the state right after the last item that it got."""
        for work in self._on_chunk_boundary:
            work(state)

    def at_leaving(self, work: Callable[[], None]) -> None:
        """Do `work` as soon as an async stream is asked to close, in the event loop's thread: read no more, say."""
        self._at_leaving.append(work)

    def leave(self) -> None:
        """The stream is about to be closed, by its consumer or after its end."""
        for work in self._at_leaving:
            work()

    def at_close(self, work: Callable[[], None]) -> None:
        """Do `work` when the stream has ended, in whatever way and thread that comes about, perhaps twice."""
        self._at_close.append(work)
        if self._closed:
            self.close()

    def close(self) -> None:
        """The stream has ended. Idempotent."""
        self._closed = True
        while last := self._at_close[-1:]:
            last[0]()  # taken off after it is done: what Ctrl-C cuts off, the next close does
            with suppress(ValueError):  # another thread closes this, too
                self._at_close.remove(last[0])


@dataclass(frozen=True, eq=False)
class Session:
    """What the parts of one run share. Made anew at each opening.

    Attributes:
      where: how messages call the host that this is in: "process 2, pid 4711"; "": it is the run itself.
      most_ahead: items that each channel may hold, where that is less than its own capacity; None: as many as it has.
      budget: of the bytes that sources may hold read ahead, all together.
      threads: for sync user code that shall not hold the loop.
      meters: count what its stages and channels do.
      errors: items that are left out because of an error.
      gate: what every task that moves items passes between two lists.
    """

    where: str = ""
    most_ahead: int | None = None
    budget: Budget = field(default_factory=lambda: Budget(MEMORY_BYTES))
    threads: ThreadPool = field(default_factory=ThreadPool)
    meters: Meters = field(default_factory=lambda: Meters(perf_counter()))
    errors: Errors = field(default_factory=Errors)
    gate: Gate = field(default_factory=Gate)
    services: Services = field(default_factory=Services)
    hooks: RunHooks = field(default_factory=RunHooks)


class Starter:
    """Starts coroutines in a task group, in silence.

    A loop that ends cancels tasks before their first step, too, and Python then prints that their coroutines were
    "never awaited": what was started here is closed instead.
    """

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._not_begun: set[Coroutine[Any, Any, None]] = set()

    def start(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        async def begin() -> None:
            self._not_begun.discard(coroutine)
            await work()

        coroutine = begin()
        self._not_begun.add(coroutine)
        self._group.start_soon(lambda: coroutine, name=f"streamline {name}")

    def close(self) -> None:
        """Close what never ran. The task group has ended."""
        for coroutine in self._not_begun:
            coroutine.close()
        self._not_begun.clear()


class Job:
    """A running task that can be stopped, and waited for."""

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self._scope = anyio.CancelScope()
        self._begun = False
        self._done = anyio.Event()
        self._cleanup = cleanup

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end, or until it is cancelled; not at all if it was before."""
        if self.cancelled:
            return
        self._begun = True
        try:
            with self._scope:
                await work()
        finally:
            self._done.set()

    @property
    def cancelled(self) -> bool:
        return self._scope.cancel_called

    def cancel(self) -> None:
        """Ask the task to end; do not wait."""
        self._scope.cancel()

    async def stop(self) -> None:
        """Cancel the task and wait until it has cleaned up, also when the caller is being cancelled itself.

        A task that hasn't begun has nothing to clean up, and may never begin: a loop that ends cancels it unseen.
        """
        self._scope.cancel()
        if self._begun:
            with anyio.CancelScope(shield=True):
                await self._done.wait()

    def finished(self) -> None:
        """Clean up after a task that will not run any more, whether or not it ever did."""
        self._cleanup()
        self._done.set()


class Tasks:
    """Starts jobs in the supervisor's task group. `start` may be called from any task of the same loop."""

    def __init__(self, group: TaskGroup, session: Session | None = None) -> None:
        self.session = session or Session()
        self.threads = self.session.threads
        self._starter = Starter(group)
        self._jobs: set[Job] = set()
        self._owned: set[Callable[[], None]] = set()
        self._ending = False

    @property
    def gate(self) -> Gate:
        return self.session.gate

    def own(self, cleanup: Callable[[], None]) -> None:
        """Call `cleanup` when the supervisor ends, unless it is disowned before; it is idempotent."""
        self._owned.add(cleanup)

    def disown(self, cleanup: Callable[[], None]) -> None:
        """Forget `cleanup`: what it was for has been cleaned up."""
        self._owned.discard(cleanup)

    def start(self, work: Callable[[], Awaitable[None]], name: str, cleanup: Callable[[], None]) -> Job:
        """Start `work` as a task called `name`; it must not raise, but report through its channel.

        Args:
          cleanup: called when the supervisor ends, however that comes about; idempotent.
        """
        job = Job(cleanup)
        self._jobs.add(job)
        if self._ending:
            job.cancel()
        self._starter.start(partial(job.run, work), name)
        return job

    async def stop(self, job: Job) -> None:
        await job.stop()
        self._jobs.discard(job)

    def cancel(self) -> None:
        """Ask all jobs to end, and those that are started from now on; do not wait.

        Each by itself: in the scope that they have in common, anyio looks at all of them whenever one has cleaned up, a
        minute of work for 10,000.
        """
        self._ending = True
        for job in list(self._jobs):
            job.cancel()

    def finished(self) -> None:
        """Clean up after all jobs: one that was cancelled before its first step never ran its own `finally`, and what
        is downstream of a channel that was never pulled was never closed by a job."""
        for cleanup in (*(job.finished for job in self._jobs), *self._owned):
            try:
                cleanup()
            except RuntimeError as error:
                if str(error) != "Event loop is closed":  # who waits there does so no more
                    raise
        self._jobs.clear()
        self._owned.clear()
        self._starter.close()
        self.threads.close()


async def supervise(ready: Callable[[Tasks], None], stop: anyio.Event, session: Session) -> None:
    """Own a task group until `stop` is set, then cancel the jobs that still run, and clean up after them."""
    tasks: Tasks | None = None
    session.meters.loop.thread = threading.get_native_id()
    try:
        async with anyio.create_task_group() as group:
            tasks = Tasks(group, session)
            ready(tasks)
            await stop.wait()
            tasks.cancel()
    finally:
        if tasks is not None:
            tasks.finished()
        session.gate.on(Event.CLOSE)
        session.hooks.close()


async def surely(event: anyio.Event) -> None:
    """Wait for `event`. A cancellation comes out after it: asyncio's `task.cancel()`, too, which ignores shields."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def check_event_loop() -> None:
    """Raise a PlanError unless this runs in asyncio's event loop, or uvloop's."""
    try:
        found = anyio.get_cancelled_exc_class() is asyncio.CancelledError
    except RuntimeError:  # anyio finds no event loop that it knows
        found = False
    if not found:
        raise PlanError(
            "streamline runs on asyncio and uvloop, and this is another event loop, or none (trio's?): read it in a "
            "thread, where `for item in pipe` and `with pipe.open() as stream` have a loop of their own"
        )


def spawn(work: Callable[[], Coroutine[Any, Any, None]], name: str, on_end: Callable[[], None] = lambda: None) -> None:
    """Start a task that belongs to the event loop, not to the caller.

    Args:
      on_end: called when asyncio's task has ended, also if its loop has cancelled it before its first step, or was
        closed without that, as Ctrl-C has cut that off: then in any thread, and again where Ctrl-C has cut it off.
        Idempotent.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work(), name=f"streamline {name}")
    held = partial(task.get_name)  # a loop refers to its tasks weakly, and to timers as long as it isn't closed
    cleanup = Cleanup(held, undisturbed, on_end).not_at_exit()
    timer = ref(loop.call_later(1e8, held))  # in three years, which the clocks of all event loops can hold

    def ended(_: object) -> None:
        on_end()
        cleanup.detach()
        if (found := timer()) is not None:
            found.cancel()

    task.add_done_callback(ended)
