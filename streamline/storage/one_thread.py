"""One daemon thread for blocking calls, as an executor, for aiofiles and name look-ups.

The event loop's default executor and `ThreadPoolExecutor` join their threads at exit, and keep idle ones: a stream
that was closed must leave no thread, and a mount that hangs must not stop the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from streamline.errors import HostError
from streamline.threads import log_refused, start_thread

__all__ = ["OneThread"]

P = ParamSpec("P")
T = TypeVar("T")

JOIN_S = 0.1
"""Seconds to wait for an idle thread to end: it takes some 50 µs."""


class OneThread(Executor):
    """Runs calls one after the other in a thread that starts with the first of them.

    Where the system has no room for it, a call runs where it is submitted, and the log says so once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[object] | None = None
        self._refused = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn` in the thread."""
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
        thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
        try:
            start_thread(thread)
        except HostError as error:
            self._refused = True
            log_refused(error, "without it")
        else:
            self._thread = thread

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let the thread end behind the calls that were submitted; waits only for one that has nothing to do."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            if wait or self._last is None or self._last.done():
                thread.join(JOIN_S)


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # an idle thread must not hold on to a block
