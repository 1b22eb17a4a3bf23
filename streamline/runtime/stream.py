"""A plan that runs, for an async consumer.

Success: the last item, then the end; everything is closed by then. Stage failure: every item before it, then the user's
exception, for ever. Cancellation of a pull, or a timeout around it: no item is lost, and the next pull continues.
Leaving the loop: `async with` closes and waits; without it, the end, a failure, or garbage collection closes.
Snapshot: the state of the last flow, at any time, also after the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn, TypeVar

import anyio

from streamline.core.capacity import LIST_ITEMS
from streamline.core.cleanup import Cleanup
from streamline.core.cursor import AsyncCursor, CurrentChunk
from streamline.core.flow import Chunk, Flow
from streamline.core.options import check_ago
from streamline.core.pace import SLICE_S, Pace
from streamline.core.tasks import Session, Tasks, check_event_loop, spawn, supervise, wait_shielded
from streamline.core.threads import threadsafe_call
from streamline.errors import ClosedError, PlanError, PlanTypeError
from streamline.observe.watchdog import HoldHint, watch
from streamline.runtime.pause import QUIESCE_S, Pause, check_may_pull
from streamline.runtime.run import RESET_WITHIN, ResolvedRun, reset_caches
from streamline.runtime.stream_base import BaseStream
from streamline.snapshot.snapshot import Snapshot

T = TypeVar("T")

TURN_ITEMS = 2 * LIST_ITEMS
"""Items after which other tasks run, however quick they were."""


class Stream(BaseStream[T], AsyncCursor[T]):
    """An async iterator over a running plan. Made by `async for x in pipe` or `async with pipe.open() as stream`.

    Args:
      resolve: returns the resolved run, once servers and stores have answered; None: `resolved` is complete.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        session: Session | None = None,
        *,
        resolve: Callable[[], Awaitable[ResolvedRun]] | None = None,
    ) -> None:
        super().__init__(resolved, session)
        self._resolve = resolve
        self._failure: Exception | None = None  # of resolving
        self._session.meters.hooks.on_hold = HoldHint()
        Cleanup(self, self._session.hooks.close)  # if it never began, or its loop is gone, no supervisor does
        self._pace = Pace()
        self._gave_way_at = 0
        self._turned_at = -math.inf
        self._call_soon: Callable[[Callable[[], None]], object] = lambda _: None
        self._flow: Flow[T] | None = None
        self._supervisor: _Supervisor | None = None
        self._tasks: Tasks | None = None
        self._closed = False

    async def start(self) -> Flow[T]:
        """Start the supervisor and open the plan. Items are read from the first `anext` on."""
        if self._failure is not None:
            raise self._failure
        check_event_loop()
        if self._resolve is not None and not self._closed:
            try:
                self._resolved = await self._resolve()
            except Exception as failure:
                self._failure = failure
                raise
            self._resolve = None
        if self._closed:
            raise ClosedError("the stream is closed")
        self._supervisor = _Supervisor(self._session)
        Cleanup(self, self._supervisor.abandon).not_at_exit()
        tasks = self._tasks = await self._supervisor.start()
        if self._closed:  # by another task, meanwhile
            raise ClosedError("the stream is closed")
        self._call_soon = asyncio.get_running_loop().call_soon
        try:
            flow = self._resolved.flow(tasks)
            self._begin_at(flow.state)
            self._flow = flow
            if (stall_s := self._resolved.options.watch.stall_s) is not None:
                tasks.start(
                    partial(watch, self._resolved.watch_target(self._session), stall_s), "watchdog", lambda: None
                )
            self._resolved.show(self._session)
        except BaseException:
            await self.aclose()
            raise
        return flow

    if not TYPE_CHECKING:  # type checkers say so sooner

        def __iter__(self) -> NoReturn:
            """Refuse: this is the stream of `async with`."""
            raise PlanTypeError(
                "this stream is async: async for item in stream, [item async for item in stream]; `with pipe.open() as "
                "stream` gives one for plain loops, which holds up the event loop"
            )

        __next__ = __iter__

    @property
    def begun(self) -> bool:
        """Whether the plan was opened, so that there is a state."""
        return self._flow is not None

    async def aclose(self) -> None:
        """End everything that this stream started, and wait until it has ended. Idempotent.

        Cancellation: the clean-up is completed first.
        """
        self._closed = True
        self._end_record()
        self._session.meters.consumer.close(self.at_hand)
        self._forget()
        self._session.hooks.leave()
        self._session.errors.close(self.state)
        with anyio.CancelScope(shield=True):
            try:
                if self._flow is not None:
                    await self._flow.aclose()
            finally:
                if self._supervisor is not None:
                    await self._supervisor.stop()

    def snapshot(self, items_ago: int = 0) -> Snapshot:
        """Return the state of the run: what resumes right after the last item received. Doesn't wait.

        Args:
          items_ago: 1: what resumes with that item, for code that fetches one ahead of using it.

        Raises:
          DeadLetterError: a skipped item that it counts can't be written down.
          PlanError: `items_ago` is neither 0 nor 1; the stream hasn't begun, and has no state yet.
        """
        check_ago("snapshot(items_ago)", items_ago)
        if self._flow is None:
            raise PlanError(
                "stream.snapshot(): the stream hasn't begun, and has no state yet: open it with `async with "
                "pipe.open() as stream`, or take an item first"
            )
        return self._snapshot(self._session.gate, items_ago)

    async def reset_cache(self) -> None:
        """As `SyncStream.reset_cache`: after this one's end or close."""
        if not self._closed:
            raise PlanError(RESET_WITHIN)
        if self._resolve is not None:
            self._resolved = await self._resolve()
        reset_caches(self._resolved)

    def paused(self, *, quiesce_timeout: float = QUIESCE_S) -> Pause:
        """Return the context manager of a pause, as `SyncStream.paused`.

        Cancellation, also by a timeout, while it is entered: the stream goes on.
        """
        return Pause(self._session.gate, quiesce_timeout)

    async def _pull(self) -> Chunk[T] | None:
        """Pull a list; at the end, or after a failure, close everything."""
        if self._session.gate.holding:
            check_may_pull(self._session.gate)
        meters, consumer = self._session.meters, self._session.meters.consumer
        consumer.body_ends()
        consumer.wait_begins(perf_counter())
        try:
            flow = self._flow or await self.start()
            await self._give_way()
            if self._session.gate.holding:
                await self._session.gate.passage()  # another task has begun a pause
            self._session.hooks.run_chunk_boundary(self.state_after)
            chunk = await flow.pull(1 if self._by_step else LIST_ITEMS)
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException:
            await self.aclose()
            raise
        finally:
            now = perf_counter()
            consumer.wait_ends(now)
        if chunk is None:
            await self.aclose()
        elif self._closed:  # by another task, meanwhile
            raise ClosedError("the stream is closed")
        else:
            meters.count_list(len(chunk.items))
        if meters.on and consumer.body_begins(now):
            self._call_soon(consumer.body_ends)
        return chunk

    async def _give_way(self) -> None:
        """Let other tasks run from time to time: a merge with items at hand never waits."""
        turned_at = self._session.gate.turned_at
        if turned_at > self._turned_at:  # other tasks ran, as this one waited
            self._turned_at, self._gave_way_at = turned_at, self.count
            self._pace.begin(turned_at)
        due = self.count - self._gave_way_at >= TURN_ITEMS
        if due:
            self._gave_way_at = self.count
        await self._pace.yield_after(0.0 if due else SLICE_S)

    def _on_consumed(self, current: CurrentChunk[T]) -> None:
        if self._flow is not None:
            self._flow.release()


class _Supervisor:
    """The task that owns a stream's tasks, started beside the consumer's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stop = anyio.Event()
        self._ready = anyio.Event()
        self._done = anyio.Event()
        self._spawned = False
        self._tasks: Tasks | None = None
        self._wake: Callable[[Callable[[], None]], object] | None = None

    async def start(self) -> Tasks:
        self._wake = threadsafe_call()
        spawn(self._run, "supervisor", self._on_end)
        self._spawned = True
        try:
            await self._ready.wait()
        except anyio.get_cancelled_exc_class():
            await self.stop()
            raise
        except BaseException:  # its loop has ended, perhaps: nothing can be awaited
            self._stop.set()
            raise
        assert self._tasks is not None
        return self._tasks

    async def stop(self) -> None:
        self._stop.set()
        if self._spawned:  # Ctrl-C may have come before
            await wait_shielded(self._done)

    def abandon(self) -> None:
        """Clean up after a stream that was dropped. From any thread; does not wait."""
        self._session.errors.close(None)
        if self._wake is not None and not self._stop.is_set():
            try:
                self._wake(self._stop.set)
            except RuntimeError:
                return  # its event loop has ended, and has cancelled everything

    def _on_end(self) -> None:
        """Called when the task has ended, or its loop was closed before."""
        if self._tasks is not None:
            self._tasks.clean_up()  # again: Ctrl-C may have cut it off
            self._session.hooks.close()
        with suppress(RuntimeError):  # as the loop is closed
            self._done.set()

    async def _run(self) -> None:
        try:
            await supervise(self._begin, self._stop, self._session)
        finally:
            self._done.set()

    def _begin(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._ready.set()
