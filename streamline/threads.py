"""A few threads for sync user code. Daemons: user code that never returns can't keep the interpreter alive.

anyio's own worker threads stay for ten seconds after their last call, and concurrent.futures joins its threads at
exit; a stream that was closed must leave no thread behind, and one that is stuck must not stop anybody.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import anyio

__all__ = ["ThreadPool", "waker"]

R = TypeVar("R")


class ThreadPool:
    """Runs sync functions in up to `max_threads` threads, started when needed.

    Cancellation: a cancelled `run` returns at once; its function goes on, and its result is dropped.
    """

    def __init__(self, max_threads: int = 64) -> None:
        self._max_threads = max_threads
        self._pending = 0
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()

    async def run(self, fn: Callable[[], R]) -> R:
        """Return `fn()`, called in one of the threads; it must not raise, but return what went wrong."""
        call = _Call(fn, anyio.Event(), waker())
        if self._pending >= len(self._threads) < self._max_threads:
            thread = threading.Thread(target=_work, args=(self._calls,), name="streamline map", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._pending += 1
        self._calls.put(call)
        try:
            await call.done.wait()
        finally:
            self._pending -= 1
        return cast(R, call.result)

    def close(self) -> None:
        """Let the threads end behind the calls that they are in. Returns at once."""
        for _ in self._threads:
            self._calls.put(None)
        self._threads.clear()


class _Call(Generic[R]):
    """One call on its way to a thread and back."""

    def __init__(self, fn: Callable[[], R], done: anyio.Event, wake: Callable[[Callable[[], None]], object]) -> None:
        self.fn = fn
        self.done = done
        self.wake = wake
        self.result: R | None = None


def _work(calls: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.result = call.fn()
        try:
            call.wake(call.done.set)
        except RuntimeError:
            return  # the loop has ended: nobody waits any more
        del call  # an idle thread must not hold on to items


def waker() -> Callable[[Callable[[], None]], object]:
    """Return what runs a sync function in the current event loop when called from another thread; it never waits."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        trio: Any = sys.modules["trio"]
        return cast("Callable[[Callable[[], None]], object]", trio.lowlevel.current_trio_token().run_sync_soon)
