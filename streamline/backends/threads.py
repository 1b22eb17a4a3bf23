"""A host that is a thread: with an event loop of its own, in the same process.

Workers in threads, each with an event loop of its own: for functions that let go of the GIL.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from streamline.backends.hosts.host import Host
from streamline.backends.hosts.host_server import Spec, serve
from streamline.backends.hosts.pool import HostingBackend
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.link import Link, PipeLink, pipe
from streamline.core.options import check_int
from streamline.core.session import Session
from streamline.core.threads import hold_quietly, start_thread, waker
from streamline.errors import ClosedError
from streamline.plan.plan import Plan

__all__ = ["ThreadHost", "Threads"]


CARE = CrashTracking(max_restarts=1)
"""A thread doesn't die by itself: when its event loop has ended, something is wrong that would come again."""


@dataclass(frozen=True)
class Threads(HostingBackend):
    """Worker w runs in thread w mod n, in an event loop of its own.

    `with sl.Threads(4) as pool:` makes a pool of threads that stay between pipelines, and serve several at once.

    Args:
      n: threads, at least 1, and no more than there are workers; None: as many as this rank has cores.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            check_int("Threads(n)", self.n, 1)

    @property
    def most(self) -> int | None:
        return self.n

    @property
    def care(self) -> CrashTracking:
        return CARE

    def host(self, number: int) -> ThreadHost:
        return ThreadHost(number)

    def payload(self, plan: Plan, session: Session, hosts: int) -> Spec:
        return Spec.of(plan, session, memory=max(1, session.budget.most // hosts))  # of one process, all together


logger = logging.getLogger("streamline.hosts")


EXIT_S = 1.0
"""How long to wait for a thread that is stuck in user code; it is a daemon, and ends with the interpreter."""


class ThreadHost(Host):
    """A thread, started at the first link."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False
        self._lock = threading.RLock()  # the collector may close it, in whatever this thread is at
        self._waiting: list[tuple[PipeLink, Spec]] = []
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._news: anyio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return f"thread {self.number}"

    def connect(self, payload: Spec, answer: Callable[[Any], Any] | None = None) -> Link:
        near, far = pipe()
        with self._lock:
            if self.closed:
                raise ClosedError(f"{self.name} is closed, and runs no more workers")
            self._waiting.append((far, payload))
            if self._thread is None:
                name = f"streamline host {self.number}"
                thread = threading.Thread(target=self._main, name=name, daemon=True)
                start_thread(thread)
                self._thread = thread
            self._notify()
        return near

    def fell(self, link: Link) -> str:
        return "its event loop has ended"

    def kill(self, link: Link) -> None:
        link.close()

    def stacks(self) -> str:
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        return "it runs no more" if frame is None else "".join(traceback.format_stack(frame))

    def leave(self) -> None:
        with self._lock:
            self.closed = True
            self._notify()

    def close(self) -> None:
        self.leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_S)

    def _notify(self) -> None:
        if self._news is not None and self._wake is not None:
            try:
                self._wake(self._news.set)
            except RuntimeError:
                return  # the loop has ended

    def _main(self) -> None:
        anyio.run(self._serve, backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None})

    async def _serve(self) -> None:
        hold_quietly()
        self._wake = waker()
        async with anyio.create_task_group() as group:
            while True:
                with self._lock:
                    self._news = news = anyio.Event()
                    waiting, self._waiting = self._waiting, []
                    closed = self.closed
                for link, spec in waiting:
                    if closed:
                        link.close()
                    else:
                        group.start_soon(_serve_safely, link, spec, name="streamline running")
                if closed:
                    break
                await news.wait()
            group.cancel_scope.cancel()


async def _serve_safely(link: PipeLink, spec: Spec) -> None:
    """Serve one running; should that fail, which it must not, then without the others that this thread serves."""
    try:
        await serve(link, spec)
    except Exception:
        logger.exception("a running in %s has failed", threading.current_thread().name)
