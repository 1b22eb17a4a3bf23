"""A plan that runs, for an async consumer.

Success: the last item, then the end; everything has been closed by then. Stage failure: every item before it, then the
user's exception, for ever. Cancellation of a pull, a timeout around one `anext`: no effect, the next pull goes on.
Leaving the loop: `async with` closes and waits; without it, the end, a failure, or garbage collection closes.
Snapshot: the state of the last flow, at any time, also behind the end.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio

from streamline.cursor import AsyncCursor
from streamline.errors import ClosedError
from streamline.flow import Chunk, Flow
from streamline.gate import Gate
from streamline.opening import Opening
from streamline.pace import Pace
from streamline.snapshot import Snapshot
from streamline.states import At
from streamline.tasks import Tasks, supervise
from streamline.threads import waker

__all__ = ["Stream"]

T = TypeVar("T")

_supervisors: set[asyncio.Task[None]] = set()  # an event loop refers to its tasks weakly


class Stream(AsyncCursor[T]):
    """An async iterator over a running plan. Made by `async for x in pipe` or `async with pipe.open() as stream`."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(At("", None))  # until it is started
        self._opening = opening
        self._gate = Gate()
        self._pace = Pace()
        self._flow: Flow[T] | None = None
        self._supervisor: _Supervisor | None = None
        self._closed = False

    async def start(self) -> Flow[T]:
        """Begin: start the supervisor and open the plan. Items are read from the first `anext` on."""
        if self._closed:
            raise ClosedError("the stream is closed")
        self._supervisor = _Supervisor(self._gate)
        weakref.finalize(self, self._supervisor.abandon).atexit = False
        tasks = await self._supervisor.start()
        if self._closed:  # by another task, meanwhile
            raise ClosedError("the stream is closed")
        self._flow = flow = self._opening.flow(tasks)
        super().__init__(flow.state)
        return flow

    async def aclose(self) -> None:
        """End everything that this stream started, and wait until it has ended. Idempotent.

        Cancellation: the clean-up is finished all the same.
        """
        self._closed = True
        self._forget()
        with anyio.CancelScope(shield=True):
            if self._flow is not None:
                await self._flow.aclose()
            if self._supervisor is not None:
                await self._supervisor.stop()

    async def snapshot(self) -> Snapshot:
        """Return the state of the run: what resumes right after the last item received. Doesn't wait."""
        if self._flow is None:
            await self.start()
        return self._opening.snapshot(self.state, self._gate)

    async def _pull(self) -> Chunk[T] | None:
        """Pull a list; at the end, or behind a failure, close what isn't needed any more: it will say so again."""
        flow = self._flow or await self.start()
        try:
            await self._pace.breathe()  # a merge with items at hand never waits
            chunk = await flow.pull()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException:
            await self.aclose()
            raise
        if chunk is None:
            await self.aclose()
        elif self._closed:  # by another task, meanwhile
            raise ClosedError("the stream is closed")
        return chunk

    def _dealt_with(self) -> None:
        if self._flow is not None:
            self._flow.release()


class _Supervisor:
    """The task that owns a stream's tasks, started beside the consumer's."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._stop = anyio.Event()
        self._ready = anyio.Event()
        self._done = anyio.Event()
        self._tasks: Tasks | None = None
        self._wake: Callable[[Callable[[], None]], object] | None = None

    async def start(self) -> Tasks:
        """Start the task, and return what jobs are started with."""
        self._wake = waker()
        _spawn(self._run)
        try:
            await self._ready.wait()
        except BaseException:
            self._stop.set()
            raise
        assert self._tasks is not None
        return self._tasks

    async def stop(self) -> None:
        """Cancel what still runs, and wait for it."""
        self._stop.set()
        await self._done.wait()

    def abandon(self) -> None:
        """The stream is gone: clean up behind it. From any thread; does not wait."""
        if self._wake is not None and not self._stop.is_set():
            try:
                self._wake(self._stop.set)
            except RuntimeError:
                return  # its event loop has ended, and has cancelled everything

    async def _run(self) -> None:
        try:
            await supervise(self._begin, self._stop, self._gate)
        finally:
            self._done.set()

    def _begin(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._ready.set()


def _spawn(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start a task that belongs to the event loop, not to whoever calls."""
    try:
        task = asyncio.get_running_loop().create_task(work(), name="streamline supervisor")
    except RuntimeError:
        trio: Any = sys.modules["trio"]
        trio.lowlevel.spawn_system_task(work, name="streamline supervisor")
        return
    _supervisors.add(task)
    task.add_done_callback(_supervisors.discard)
