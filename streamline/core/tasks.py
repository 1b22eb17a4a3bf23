"""Who owns the tasks: one task group, in a supervisor's task, never in the consumer's.

A task group entered in the consumer's task would turn the consumer's own exception into a group, and a `break` under
a timeout into a cancellation from nowhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from streamline.core.gate import Event, Gate
from streamline.core.session import Session

__all__ = ["Job", "Starter", "Tasks", "spawn", "supervise"]

_spawned: set[asyncio.Task[None]] = set()  # an event loop refers to its tasks weakly


class Starter:
    """Starts coroutines in a task group, in silence.

    A loop that ends cancels tasks before their first step, too, and Python then prints that their coroutines were
    "never awaited": what was started here is closed instead.
    """

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._not_begun: set[Coroutine[Any, Any, None]] = set()

    def start(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Start `work` as a task called `name`."""

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
        """Whether this task was asked to end."""
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
    """Starts jobs in the supervisor's task group. `start` may be called from any task of the same loop.

    Attributes:
      session: the run that all this belongs to.
      threads: for sync user code that shall not hold the loop.
    """

    def __init__(self, group: TaskGroup, session: Session | None = None) -> None:
        self.session = session or Session()
        self.threads = self.session.threads
        self._starter = Starter(group)
        self._jobs: set[Job] = set()
        self._owned: set[Callable[[], None]] = set()

    @property
    def gate(self) -> Gate:
        """What every task that moves items passes between two lists."""
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
        self._starter.start(partial(job.run, work), name)
        return job

    async def stop(self, job: Job) -> None:
        """Stop one job and forget it."""
        await job.stop()
        self._jobs.discard(job)

    def finished(self) -> None:
        """Clean up after all jobs: one that was cancelled before its first step never ran its own `finally`, and what
        is downstream of a channel that was never pulled was never closed by a job."""
        for job in self._jobs:
            job.finished()
        self._jobs.clear()
        for cleanup in self._owned:
            cleanup()
        self._owned.clear()
        self._starter.close()
        self.threads.close()


async def supervise(ready: Callable[[Tasks], None], stop: anyio.Event, session: Session) -> None:
    """Own a task group until `stop` is set, then cancel what still runs and clean up after it."""
    tasks: Tasks | None = None
    try:
        async with anyio.create_task_group() as group:
            tasks = Tasks(group, session)
            ready(tasks)
            await stop.wait()
            group.cancel_scope.cancel()
    finally:
        if tasks is not None:
            tasks.finished()
        session.gate.on(Event.CLOSE)
        session.close()


def spawn(work: Callable[[], Coroutine[Any, Any, None]], name: str, on_end: Callable[[], None] = lambda: None) -> None:
    """Start a task that belongs to the event loop, not to the caller.

    Args:
      on_end: called when asyncio's task has ended, also if its loop has cancelled it before its first step; trio runs
        that step in any case.
    """
    try:
        task = asyncio.get_running_loop().create_task(work(), name=f"streamline {name}")
    except RuntimeError:
        trio: Any = sys.modules["trio"]
        trio.lowlevel.spawn_system_task(work, name=f"streamline {name}")
        return
    _spawned.add(task)
    task.add_done_callback(_spawned.discard)
    task.add_done_callback(lambda _: on_end())
