"""Workers in threads, each with an event loop of its own: for functions that release the GIL."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import anyio

from streamline.backends.hosts.host import Host, HostExit
from streamline.backends.hosts.host_server import Spec, serve
from streamline.backends.hosts.pool import HostingBackend
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.link import Link, PipeLink, pipe
from streamline.core.options import check_int
from streamline.core.place import Lender
from streamline.core.tasks import Session
from streamline.core.threads import disable_slow_callback_log, new_event_loop, start_thread, threadsafe_call
from streamline.errors import ClosedError, HostError
from streamline.plan.plan import Plan

CRASH_TRACKING = CrashTracking(max_restarts=1)
"""A thread doesn't die by itself: an event loop that ended would end again."""


@dataclass(frozen=True)
class Threads(HostingBackend):
    """Worker w runs in thread w mod n, in an event loop of its own.

    `with sl.Threads(4) as pool:` makes a pool that is kept between pipelines and serves several at once.

    Args:
      n: threads, at least 1, at most one per worker; None: one per core of this rank.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            check_int("Threads(n)", self.n, 1)

    @property
    def most(self) -> int | None:
        return self.n

    @property
    def crash_tracking(self) -> CrashTracking:
        return CRASH_TRACKING

    def host(self, number: int, *, shared: bool = False) -> ThreadHost:
        return ThreadHost(number)

    def payload(self, plan: Plan, session: Session, hosts: int) -> Spec:
        spec = Spec.of(plan, session, memory=max(1, session.budget.most // hosts))  # they share the process's memory
        return replace(spec, place=session.services.get(Lender).place)


logger = logging.getLogger("streamline.hosts")

EXIT_S = 1.0
"""Seconds to wait for a thread that is stuck in user code; it is a daemon."""


class ThreadHost(Host):
    """A thread, started at the first link."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False
        self._lock = threading.RLock()  # reentrant: a finaliser may close it in this thread
        self._new_links: list[tuple[PipeLink, Spec]] = []
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._changed: anyio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return f"thread {self.number}"

    async def connect(self, payload: Spec, answer: Callable[[Any], Any] | None = None) -> Link:
        consumer_end, host_end = pipe()
        with self._lock:
            if self.closed:
                raise ClosedError(f"{self.name} is closed, and runs no more workers")
            self._new_links.append((host_end, payload))
            if self._thread is None:
                name, loop = f"streamline host {self.number}", new_event_loop()  # here its failure comes out
                thread = threading.Thread(target=self._main, args=(loop,), name=name, daemon=True)
                try:
                    start_thread(thread)
                except HostError:
                    loop.close()
                    raise
                self._thread = thread
            self._notify()
        return consumer_end

    def exit_reason(self, link: Link) -> HostExit:
        return HostExit("its event loop has ended")

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
        if self._changed is not None and self._wake is not None:
            try:
                self._wake(self._changed.set)
            except RuntimeError:
                return  # the loop has ended

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        anyio.run(self._serve, backend_options={"loop_factory": lambda: loop})

    async def _serve(self) -> None:
        disable_slow_callback_log()
        self._wake = threadsafe_call()
        async with anyio.create_task_group() as group:
            while True:
                with self._lock:
                    self._changed = changed = anyio.Event()
                    new_links, self._new_links = self._new_links, []
                    closed = self.closed
                for link, spec in new_links:
                    if closed:
                        link.close()
                    else:
                        group.start_soon(_serve_safely, link, spec, name="streamline run")
                if closed:
                    break
                await changed.wait()
            group.cancel_scope.cancel()


async def _serve_safely(link: PipeLink, spec: Spec) -> None:
    """Serve one run; an unexpected failure doesn't reach the other runs of this thread."""
    try:
        await serve(link, spec)
    except Exception:
        logger.exception("a run in %s has failed", threading.current_thread().name)
