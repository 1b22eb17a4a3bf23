"""A plan that runs in the calling thread, step by step: for pdb, for prints in order, for Ctrl-C.

An event loop of its own runs only while an item is asked for, and calls user code, so that a debugger stops in it and
shows the caller. It runs the same stream as `open`, with three differences: no channel holds more than one item, calls
follow one another in the order of the items, and functions for threads are called in the same thread.

Success: the last item, then the end; everything is closed by then. Failure: every item before it, then the user's
exception, for ever. Ctrl-C, `quit` in pdb: `KeyboardInterrupt` or `BdbQuit` comes out, and everything is closed.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from streamline.core.cleanup import Cleanup
from streamline.core.cursor import CurrentChunk, PartIterator
from streamline.core.error_policy import ErrorReport
from streamline.core.forks import belongs_elsewhere, disown_in_copies
from streamline.core.threads import ThreadPool
from streamline.core.tracebacks import hide_frames
from streamline.errors import ClosedError
from streamline.observe.stats import Stats
from streamline.plan.plan import Plan
from streamline.runtime.run import ResolvedRun
from streamline.runtime.stream import Stream
from streamline.snapshot.snapshot import Snapshot

EXIT_S = 1.0
"""How long a close waits for each thing that Ctrl-C may have cut off."""

R = TypeVar("R")
T = TypeVar("T")


class DebugStream(PartIterator[T]):
    """An iterator over a plan that runs in the calling thread. Made by `pipe.debug()`; begins at the first item."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._runner = _Runner[T](replace(resolved, plan=_one_call_at_a_time(resolved.plan)))
        self._cleanup = Cleanup(self, self._runner.close)
        self._failure: BaseException | None = None
        self._trace: TracebackType | None = None
        self._ended = False

    def close(self) -> None:
        """End everything that this stream started. Idempotent."""
        self._end()
        if self._failure is None and not self._ended:
            self._failure = ClosedError("the stream is closed")

    def snapshot(self) -> Snapshot:
        """Return the state of the run: what resumes right after the last item received, here or by `open`."""
        return self._runner.snapshot()

    def reset_cache(self) -> None:
        """Release what `.cache` keeps, as that of `open` does."""
        self._runner.reset_cache()

    @property
    def errors(self) -> ErrorReport:
        """The items that were left out so far because of an error, up to the last item received."""
        return self._runner.stream.errors

    def stats(self) -> Stats:
        """Return what was counted so far; as calls follow one another, nothing waits for another here as in `open`."""
        return self._runner.stream.stats()

    def _fetch_part(self) -> NoReturn:
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)  # else it would grow with every raise
        part = None
        if not self._ended:
            try:
                part = self._runner.part()
            except StopAsyncIteration:
                self._ended = True
            except _BusyError as busy:
                raise RuntimeError(str(busy)) from None
            except BaseException as failure:
                hide_frames(failure)
                self._trace = failure.__traceback__
                self._failure = failure
        if part is None:
            self._end()
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)
        self._go_on(part)

    def _end(self) -> None:
        self._runner.close()
        self._cleanup.detach()  # not before: Ctrl-C may interrupt `close`

    def __enter__(self) -> DebugStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Stepped(Stream[T]):
    """A stream that makes no item before the next one is asked for."""

    def _on_consumed(self, current: CurrentChunk[T]) -> None:
        """Do nothing: the next pull releases the item."""


class _BusyError(RuntimeError):
    """The pipeline has asked its own debug stream for an item."""


class _Runner(Generic[T]):
    """The event loop, and the stream in it. Doesn't refer to the iterator, whose finalizer closes it."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._resolved = resolved
        self._session = resolved.session(most_ahead=1, threads=_CallingThread())
        self.stream = _Stepped[T](resolved, self._session)
        self._session.meters.hooks.on_hold = None  # no hint while a person debugs
        self._session.meters.on_first_list = None  # `step` in pdb would stop in the collector
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._interrupted = False
        self._interrupt: BaseException | None = None
        self._owner = os.getpid()
        disown_in_copies(self)

    def disown(self) -> None:
        """Never run or close the loop in this fork: the other process shares its selector."""
        if self._loop is not None:
            self._loop._closed = True  # type: ignore[attr-defined]  # else the collector closes it
            self._loop, self._closed = None, True

    def part(self) -> Iterator[T]:
        """Run until there is an item, and return an iterator in C over it. Raises `StopAsyncIteration` at the end."""
        return self._run(self.stream.part)

    def snapshot(self) -> Snapshot:
        """Return the state; before the first item, that of the beginning."""
        if self.stream.begun:
            return self.stream.snapshot()
        if self._closed or self._interrupted:
            with closing(_Runner[T](self._resolved)) as other:
                return other.snapshot()
        return self._run(self._start_and_snapshot)

    async def _start_and_snapshot(self) -> Snapshot:
        await self.stream.start()
        return self.stream.snapshot()

    def reset_cache(self) -> None:
        self._run(self.stream.reset_cache)

    def close(self) -> None:
        """Close the stream and the loop, with what is left in it. Idempotent; after Ctrl-C, the next call continues."""
        loop = self._loop
        if loop is not None:
            if loop.is_running():
                raise _BusyError("a debug stream can't be closed by the pipeline that it is running")
            loop.set_exception_handler(lambda *_: None)  # it was raised already
        self._closed = True
        if loop is not None and not loop.is_closed():
            cut, self._interrupted = self._interrupted, True
            _OuterLoop().run(partial(_end, loop, self.stream, EXIT_S if cut else None))
            loop.set_task_factory(None)

    def _run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run `work` in the loop. Ctrl-C comes out, whichever task it interrupts, and nothing runs after it."""
        if self._closed:
            forked = self._owner != os.getpid()
            raise ClosedError(belongs_elsewhere("stream", self._owner) if forked else "the stream is closed")
        if self._loop is None:
            self._loop = asyncio.SelectorEventLoop()
        self._loop.set_task_factory(self._task)
        if self._loop.is_running():
            raise _BusyError("a debug stream was asked for an item by the pipeline that it is running")
        if self._interrupted:
            raise ClosedError(
                "the debug stream was interrupted and is closed: pipe.debug(resume=stream.snapshot()) goes on with "
                "the next item"
            )
        self._interrupted = True  # until it has succeeded
        try:
            with _closed_unless_begun(work()) as begun:
                result: R = _OuterLoop().run(partial(self._loop.run_until_complete, begun))
        except BaseException as failure:
            wrapped = isinstance(failure, BaseExceptionGroup) and failure.subgroup(KeyboardInterrupt) is not None
            if self._interrupt is not None or wrapped:
                raise (self._interrupt or KeyboardInterrupt()) from None
            self._interrupted = not isinstance(failure, Exception)
            raise
        self._interrupted = False
        return result

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        """Stop the loop if Ctrl-C has ended a task: a task group may have wrapped it."""
        failure = None if task.cancelled() else task.exception()
        if failure is None or isinstance(failure, Exception):
            return
        if self._interrupt is None and not self._closed:
            self._interrupt = KeyboardInterrupt()
            task.get_loop().stop()


def _end(loop: asyncio.AbstractEventLoop, stream: Stream[Any], within_s: float | None) -> None:
    """Close the stream and its loop, with what is left in there; wait for each step, but no longer than `within_s`."""

    def run(work: Coroutine[Any, Any, Any]) -> None:
        with _closed_unless_begun(work):
            if within_s is None:
                loop.run_until_complete(work)
            else:
                wait([loop.create_task(work)])

    def wait(tasks: Collection[asyncio.Task[Any]]) -> None:
        with _closed_unless_begun(asyncio.wait(tasks, timeout=within_s)) as waiting:
            loop.run_until_complete(waiting)

    loop.call_soon(loop.stop)
    loop.run_forever()  # after Ctrl-C, a `stop` may be left in the loop
    failed: Exception | None = None
    try:
        run(stream.aclose())
    except Exception as failure:  # not Ctrl-C: the next close continues then
        failed = failure
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        wait(left)
    run(loop.shutdown_asyncgens())
    run(loop.shutdown_default_executor())
    for task in asyncio.all_tasks(loop):
        with _closed_unless_begun(task.get_coro()):
            pass
    loop.close()
    if failed is not None:
        raise failed


@contextmanager
def _closed_unless_begun(work: Any) -> Iterator[Any]:
    """Close a coroutine that has never run by the end: else Python prints that it was never awaited."""
    try:
        yield work
    finally:
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()


class _CallingThread(ThreadPool):
    """Calls functions in the thread that asks for it."""

    async def run(self, fn: Callable[[], R], what: str = "", on_end: Callable[[bool], None] | None = None) -> R:
        try:
            return fn()
        finally:
            if on_end is not None:
                on_end(True)


class _OuterLoop:
    """Suspends the thread's running event loop, a notebook's say, while another one runs inside its callback."""

    def __init__(self) -> None:
        self._loop = asyncio._get_running_loop()
        self._task = None if self._loop is None else asyncio.current_task(self._loop)

    def run(self, work: Callable[[], R]) -> R:
        """Call `work`, which runs another loop. After Ctrl-C, too, this loop is the running one again."""
        try:
            try:
                self._leave()
                return work()
            finally:
                self._enter()
        finally:
            self._enter()  # Ctrl-C may have cut the first one off

    def _leave(self) -> None:
        if self._loop is not None and self._task is not None:
            asyncio.tasks._leave_task(self._loop, self._task)
        asyncio._set_running_loop(None)

    def _enter(self) -> None:
        """Make it the running one again. Idempotent."""
        asyncio._set_running_loop(self._loop)
        if self._loop is not None and self._task is not None and asyncio.current_task(self._loop) is None:
            asyncio.tasks._enter_task(self._loop, self._task)


def _one_call_at_a_time(plan: Plan) -> Plan:
    """Return the plan with every map's calls one after the other: the order of calls is the order of items."""
    worker, after = (tuple(stage.one_call_at_a_time() for stage in part) for part in (plan.worker, plan.after))
    return replace(plan, worker=worker, after=after)
