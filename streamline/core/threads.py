"""Daemon threads for blocking calls: a pool for sync user code, and an executor of one thread.

The event loop's default executor, anyio's workers and `ThreadPoolExecutor` keep idle threads or join them at exit. A
closed stream must leave no thread, and a call that hangs, in user code or on a mount, must not block the interpreter's
exit.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import importlib.util
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Any, Generic, ParamSpec, TypeVar, cast

import anyio

from streamline.core.place import CURRENT_PLACE, Place
from streamline.errors import HostError

P = ParamSpec("P")
T = TypeVar("T")

JOIN_S = 0.1
"""Seconds to wait for an idle thread to end: it takes some 50 µs."""

CTRL_C_S = 0.5
"""Seconds after which a wait for another thread notices Ctrl-C at the latest. Python overlooks a signal that comes just
before the thread falls asleep, or in another thread, until the wait ends."""


def wait_interruptible(wait: Callable[[float], T], timeout_s: float = math.inf) -> T:
    """Return the result of `wait(timeout_s)`, which raises `queue.Empty` then; in slices, so Ctrl-C interrupts it."""
    while True:
        try:
            return wait(min(CTRL_C_S, timeout_s))
        except Empty:
            timeout_s -= CTRL_C_S
            if timeout_s <= 0:
                raise


class SerialExecutor(Executor):
    """Runs calls one after the other in a thread; if the system can't start one, where they are submitted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[object] | None = None
        self._refused = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        if self._thread is None and not self._refused:
            self._start()
        self._last = future  # type: ignore[assignment]  # only asked whether it is done
        if self._thread is None:
            call()
        else:
            self._calls.put(call)
        return future

    def _start(self) -> None:
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # of each thread, should Ctrl-C leave one behind
        weakref.finalize(self, calls.put, None)  # else an executor that isn't shut down would leave its thread
        thread = threading.Thread(target=_run_jobs, args=(calls,), name=self._name, daemon=True)
        try:
            start_thread(thread)
        except HostError as error:
            self._refused = True
            log_no_thread(error, "without it")
        else:
            self._calls, self._thread = calls, thread

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let the thread end after the calls that were submitted; waits only for one that has nothing to do."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            if wait or self._last is None or self._last.done():
                thread.join(JOIN_S)


def _run_jobs(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # an idle thread must not hold on to a block


logger = logging.getLogger(__name__)
R = TypeVar("R")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all.

    Python handles signals in the main thread, also in the middle of `Thread.start`, which then leaves a thread that
    never runs, or a lock taken. So the main thread has another thread start it, which takes one call in C.

    Cancellation: Ctrl-C comes out as `KeyboardInterrupt`; the thread may run then, or soon: its owner must know it
    before, and its target checks first whether it is still needed.

    Raises:
      HostError: the system can't start another one; the thread never runs.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            outcome: SimpleQueue[BaseException | None] = SimpleQueue()
            _thread.start_new_thread(_put_outcome, (outcome, thread.start))
            _wait_outcome(outcome)
        else:
            thread.start()
    except (RuntimeError, MemoryError) as error:
        raise HostError(
            f"the thread {thread.name!r} can't be started: {error or 'out of memory'}. Raise the limits on threads "
            "(`ulimit -u`, a container's pids.max) and on memory (`ulimit -v`), or use fewer workers and calls at once"
        ) from error


def run_uninterrupted(work: Callable[[], object]) -> None:
    """Do `work` in a thread that no signal interrupts: whole, or not at all. It continues after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()
    args = outcome, partial(copy_context().run, work)
    try:
        start_thread(threading.Thread(target=_put_outcome, args=args, name="streamline opening", daemon=True))
    except HostError:  # no room for it
        work()
    else:
        _wait_outcome(outcome)


def _put_outcome(outcome: SimpleQueue[BaseException | None], work: Callable[[], object]) -> None:
    found: BaseException | None = None
    try:
        work()
    except BaseException as error:
        found = error
    outcome.put(found)
    outcome.put(found)  # again: Ctrl-C may interrupt the taking of the first


def _wait_outcome(outcome: SimpleQueue[BaseException | None]) -> None:
    """Wait for an outcome, and raise it. After Ctrl-C, wait up to `CTRL_C_S` for one that is being put."""
    try:
        failure = wait_interruptible(lambda slice_s: outcome.get(timeout=slice_s))
    except BaseException:
        with suppress(Empty):
            outcome.get(timeout=CTRL_C_S)
        raise
    if failure is not None:
        raise failure


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for a thread, uvloop's if installed. Raises `HostError`: the system can't make one."""
    make = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        from uvloop import new_event_loop as make
    try:
        return make()
    except OSError as error:
        raise HostError(
            f"an event loop can't be made: {error.strerror}. Raise the limit on open files (`ulimit -n`), or close some"
        ) from error


def log_no_thread(error: HostError, how: str) -> None:
    """Log that a thread could not be started, and what happens instead; not at the interpreter's exit."""
    if threading.main_thread().is_alive():
        logger.warning("%s. Going on %s", error, how)


CALL_S = 10.0
"""Seconds that a close, and Python's end, wait for a call into a library. Most take milliseconds; HDF5's library loops
for ever on some damaged files."""

_library_calls: set[_ThreadCall[Any]] = set()  # that threads are in

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_library_calls.clear)


class ThreadPool:
    """Runs sync functions in up to `max_threads` threads, started when needed.

    If the system can't start another thread, the existing ones do the work; if there is none, the event loop itself.
    The log says so once.

    Cancellation: a cancelled `run` returns at once. Its function isn't called, if it wasn't yet; a running call
    continues, and its result is dropped.
    """

    def __init__(self, max_threads: int = 64) -> None:
        self._max_threads = max_threads
        self._pending = 0
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.library_calls: set[_ThreadCall[Any]] = set()  # that a close waits for

    async def run(self, fn: Callable[[], R], what: str = "", on_end: Callable[[bool], None] | None = None) -> R:
        """Return `fn()`, called in one of the threads. Raises what it raises.

        Args:
          what: what a library's call works on, for messages: a cancelled caller waits up to `CALL_S` for it. At exit,
            Python would kill an abandoned thread in pyarrow, and wait for ever for the lock of one in h5py. "": the
            caller doesn't wait.
          on_end: called in the event loop once `fn` has ended, or won't be called, with whether it was; also after a
            cancellation.
        """
        call = _ThreadCall(fn, what, on_end)
        if self._pending >= len(self._threads) < self._max_threads:
            self._grow()
        self._pending += 1
        if self._max_threads:
            self._jobs.put(call.run)
        else:
            call.wake(call.run)
        if what:
            self.library_calls.add(call)
        try:
            return await call.wait()
        finally:
            self.library_calls.discard(call)
            self._pending -= 1

    @property
    def crowded(self) -> bool:
        """Whether calls wait for a thread."""
        return not self._jobs.empty()

    def close(self) -> None:
        """Let the threads end after their calls. Returns at once."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _grow(self) -> None:
        thread = threading.Thread(
            target=_work, args=(self._jobs, CURRENT_PLACE.get()), name="streamline map", daemon=True
        )
        self._threads.append(thread)  # before it runs: Ctrl-C may come in the middle of this
        try:
            start_thread(thread)
        except HostError as error:
            self._threads.remove(thread)
            self._max_threads = len(self._threads)
            log_no_thread(error, f"with {self._max_threads} threads")


class _ThreadCall(Generic[R]):
    """One call on its way to a thread and back; `wake` calls into the loop; `what`: as in `run`, while one waits."""

    def __init__(self, fn: Callable[[], R], what: str = "", on_end: Callable[[bool], None] | None = None) -> None:
        self._fn: Callable[[], R] | None = fn
        self.what = what
        self._on_end = on_end
        self._begun = False  # set before the function is looked at
        self._done = anyio.Event()
        self.wake = threadsafe_call()
        self._result: R | None = None
        self._failure: BaseException | None = None

    async def wait(self) -> R:
        """Return the result. A call whose waiter is cancelled doesn't begin."""
        try:
            await self._done.wait()
        except anyio.get_cancelled_exc_class():
            self._fn = None
            if self.what and self._begun:
                with anyio.move_on_after(CALL_S, shield=True) as scope:
                    await self._done.wait()
                if scope.cancelled_caught:
                    logger.warning("closed; a thread is still at work on %s after %g s, and is left", self.what, CALL_S)
            raise
        finally:
            self._fn, self.what = None, ""
        if self._failure is not None:
            raise self._failure
        result, self._result = self._result, None
        return cast(R, result)

    def run(self) -> None:
        """Call the function, in a thread. Raises `RuntimeError`: the loop has ended."""
        self._begun = True
        fn = self._fn
        if fn is not None:
            if self.what:
                _library_calls.add(self)
            try:
                self._result = fn()
            except BaseException as failure:  # else its caller waits for ever, and this thread is gone
                self._failure = failure
            self._fn = None
            _library_calls.discard(self)
        if self._on_end is not None:
            self.wake(partial(self._on_end, fn is not None))
        del fn  # a cycle may hang on it, and the waiter makes the next one at once
        self.wake(self._done.set)


def _work(jobs: SimpleQueue[Callable[[], None] | None], place: Place | None) -> None:
    CURRENT_PLACE.set(place)
    while (job := jobs.get()) is not None:
        try:
            job()
        except RuntimeError:
            return  # the loop has ended, and its waiters with it
        del job  # an idle thread must not hold on to items


@atexit.register  # early, so it comes late
def finish_calls() -> bool:
    """Wait for the library calls that a close would wait for, at Python's end; return whether any still runs."""
    until, calls = perf_counter() + CALL_S, [call for call in list(_library_calls) if call.what]
    while not _library_calls.isdisjoint(calls) and perf_counter() < until:
        sleep(0.01)
    for call in calls:
        call.what = ""
    return bool(_library_calls)


def hold_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null where they are closed, for this process and its children.

    A program that was started without stdin, stdout or stderr, or that closed them, would get them back as the next
    socket or file that is opened: uvloop aborts the process when it closes one, and what is printed goes into it.
    Rejected: asyncio's own loop there, which would let prints go into its sockets.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found == fd:
                os.set_inheritable(fd, True)
            else:  # another thread was quicker
                os.close(found)


def disable_slow_callback_log() -> None:
    """Let the current event loop, one of our own, not log slow items in debug mode."""
    asyncio.get_running_loop().slow_callback_duration = math.inf


def threadsafe_call() -> Callable[[Callable[[], None]], object]:
    """Return a function that has the current event loop call a sync one, from any thread, without waiting."""
    return asyncio.get_running_loop().call_soon_threadsafe


async def wait_future(future: Future[T]) -> T:
    """Return the result that another thread gives a future."""
    arrived, wake = anyio.Event(), threadsafe_call()

    def done(_: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            wake(arrived.set)

    future.add_done_callback(done)
    await arrived.wait()
    return future.result()


def resolve(future: Future[T], result: T | BaseException) -> bool:
    """Give a future its result or exception; return whether it had none."""
    try:
        future.set_exception(result) if isinstance(result, BaseException) else future.set_result(result)
    except InvalidStateError:
        return False
    return True
