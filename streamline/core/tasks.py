"""One run of a plan, from its opening to its close: what all its parts share, and who owns its tasks.

Tasks belong to one task group, in a supervisor's task, never in the consumer's: that would turn the consumer's own
exception into a group, and a `break` under a timeout into a cancellation from nowhere.

The consumer takes lists. At a *chunk boundary* it asks for another one: what follows from what was consumed (trimming a
journal, counting errors) is done there, once a list, in the consumer's thread, with a reference to the state right
after the last item that it got.
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
from streamline.core.forks import disown_in_copies
from streamline.core.gate import Event, Gate
from streamline.core.meters import Meters
from streamline.core.threads import ThreadPool, run_uninterrupted
from streamline.errors import PlanError

if TYPE_CHECKING:
    from streamline.core.state import Reference, State

MEMORY_BYTES = 256 * 2**20
"""Bytes that sources may hold read ahead in one process: 16 objects of 16 MiB, or 64 of 4 MiB."""

S = TypeVar("S")
P = ParamSpec("P")


class Services:
    """What optional features keep for a run in one event loop: one object of each class, found by the class."""

    def __init__(self) -> None:
        self._found: dict[object, Any] = {}
        self._hidden: frozenset[object] = frozenset()

    def add(self, kind: type[S], service: S) -> None:
        """Set the service of a class, in place of an earlier one."""
        self._found[kind] = service

    def find(self, kind: type[S]) -> S | None:
        """Return the service; None: the feature is off."""
        return None if kind in self._hidden else self._found.get(kind)

    def get(self, kind: Callable[P, S], *args: P.args, **kwargs: P.kwargs) -> S:
        """Return the service; the first call makes it, with these arguments."""
        found: S | None = self._found.get(kind)
        return self._found.setdefault(kind, kind(*args, **kwargs)) if found is None else found

    def without(self, kind: type) -> Services:
        """Return the same services without one of them."""
        others = Services()
        others._found, others._hidden = self._found, self._hidden | {kind}
        return others


@dataclass(frozen=True)
class WaitedWorker:
    """A worker that the merge waits for, and the state right after the last item taken from it."""

    shard: int
    state: State


@dataclass(frozen=True)
class MergeWait:
    """A service: returns the workers that the merge waits for. In the event loop's thread."""

    workers: Callable[[], Sequence[WaitedWorker]] = tuple


@dataclass(frozen=True)
class WorkersExhausted:
    """A service: `tell` is called in the event loop's thread when the workers have ended or are no longer needed,
    perhaps twice.
    """

    tell: Callable[[], None]


@dataclass
class RankWait:
    """A service: the other ranks whose answer this one waits for; "": it waits for none."""

    missing: str = ""


class RunHooks:
    """What is called at moments of one run: when its consumer asks for another list, leaves, or it has ended."""

    def __init__(self) -> None:
        self._on_leave: list[Callable[[], None]] = []
        self._on_chunk_boundary: list[Callable[[Reference], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._closed = False
        disown_in_copies(self)

    def disown(self) -> None:
        """Write and close nothing in this fork: the process that was copied does."""
        for work in (self._on_leave, self._on_chunk_boundary, self._at_close):
            work.clear()

    def on_chunk_boundary(self, work: Callable[[Reference], None]) -> None:
        """Do `work` at every chunk boundary, in the consumer's thread; the stream fails with what it raises."""
        self._on_chunk_boundary.append(work)

    def run_chunk_boundary(self, state: Reference) -> None:
        """Call what `on_chunk_boundary` was given, with the state right after the consumer's last item."""
        for work in self._on_chunk_boundary:
            work(state)

    def on_leave(self, work: Callable[[], None]) -> None:
        """Do `work` when an async stream begins to close, in the event loop's thread: stop reading, say."""
        self._on_leave.append(work)

    def leave(self) -> None:
        """Call what `on_leave` was given."""
        for work in self._on_leave:
            work()

    def at_close(self, work: Callable[[], None]) -> None:
        """Do `work` when the stream has ended, however, in any thread, perhaps twice."""
        self._at_close.append(work)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Call what `at_close` was given. Idempotent."""
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
      most_ahead: items that each channel may hold at most, if less than its own capacity; None: its own capacity.
      budget: of the bytes that sources may hold read ahead, all together.
      threads: for sync user code that must not block the event loop.
      meters: count what its stages and channels do.
      errors: which failed items are skipped, and how many were.
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
    """Starts coroutines in a task group; `close` closes those whose task was cancelled before its first step."""

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
        for coroutine in self._not_begun:
            coroutine.close()
        self._not_begun.clear()


class Job:
    def __init__(self, cleanup: Callable[[], None]) -> None:
        self._scope = anyio.CancelScope()
        self._begun = False
        self._done = anyio.Event()
        self._cleanup = cleanup

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` until its end or a cancellation; not at all if it was cancelled before."""
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
        self._scope.cancel()

    async def stop(self) -> None:
        """Cancel the task and wait until it has cleaned up, shielded; unless it hasn't begun, and may never do so."""
        self._scope.cancel()
        if self._begun:
            with anyio.CancelScope(shield=True):
                await self._done.wait()

    def clean_up(self) -> None:
        """Clean up after a task that won't run any more, whether or not it ever did."""
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

    def add_cleanup(self, cleanup: Callable[[], None]) -> None:
        """Call `cleanup`, which is idempotent, when the supervisor ends, unless `remove_cleanup` is called before."""
        self._owned.add(cleanup)

    def remove_cleanup(self, cleanup: Callable[[], None]) -> None:
        self._owned.discard(cleanup)

    def start(self, work: Callable[[], Awaitable[None]], name: str, cleanup: Callable[[], None]) -> Job:
        """Start `work`, which must not raise, as a task; `cleanup`, idempotent, is called when the supervisor ends."""
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
        """Ask all jobs, and later ones, to end. Each has a scope: anyio takes a minute for 10,000 tasks of one."""
        self._ending = True
        for job in list(self._jobs):
            job.cancel()

    def clean_up(self) -> None:
        """Clean up after all jobs: one that was cancelled before its first step never ran its `finally`, and no job
        closes what is downstream of a channel that was never pulled.
        """
        for cleanup in (*(job.clean_up for job in self._jobs), *self._owned):
            try:
                cleanup()
            except RuntimeError as error:
                if str(error) != "Event loop is closed":  # nothing waits there any more
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
            tasks.clean_up()
        session.gate.on(Event.CLOSE)
        session.hooks.close()


async def wait_shielded(event: anyio.Event) -> None:
    """Wait for `event`, and raise a cancellation only then; even asyncio's `task.cancel()`, which ignores shields."""
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

    `on_end` is called when it has ended, even before its first step; if its loop was closed, in any thread. Idempotent.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work(), name=f"streamline {name}")
    held = partial(task.get_name)  # a loop refers to its tasks weakly, but to timers until it is closed
    cleanup = Cleanup(held, run_uninterrupted, on_end).not_at_exit()
    timer = ref(loop.call_later(1e8, held))  # in three years, which the clocks of all event loops can hold

    def ended(_: object) -> None:
        on_end()
        cleanup.detach()
        if (found := timer()) is not None:
            found.cancel()

    task.add_done_callback(ended)
