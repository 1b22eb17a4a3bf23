"""The event loop's thread, in which a plan runs for a plain loop.

Success: the last list, then the end. Failure: every list before it, then the user's exception. Nothing here refers to
the stream, whose finalizer calls `stop`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from itertools import starmap
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from streamline.core.driver import LAST_TASK, drive
from streamline.core.flow import Chunk, Flow
from streamline.core.gate import Rest
from streamline.core.state import State
from streamline.core.tasks import Session, Tasks, WorkersExhausted, supervise
from streamline.core.threads import (
    CALL_S,
    disable_slow_callback_log,
    new_event_loop,
    start_thread,
    threadsafe_call,
    wait_interruptible,
)
from streamline.errors import ClosedError
from streamline.observe.watchdog import Patience
from streamline.runtime.pause import RemoteGate
from streamline.runtime.thread_bridge import ConsumerCapacity, ThreadBridge

if TYPE_CHECKING:
    from streamline.runtime.run import ResolvedRun

T = TypeVar("T")

EXIT_S = 1.0
"""How long a close, or the interpreter's exit, waits for a loop that is blocked by user code."""

SLOW_EXIT_S = 2.0
"""How long it waits for a loop that isn't blocked: a loaded machine is slow, and the next opening needs the locks."""


class LoopThread(Generic[T]):
    def __init__(self, resolved: ResolvedRun, session: Session) -> None:
        self.resolved = resolved
        self._session = session
        self.remote_gate = RemoteGate(session.gate)
        self.bridge = ThreadBridge[T](_capacity(resolved, session.most_ahead), self._on_finish)
        stall_s = resolved.options.watch.stall_s
        self._patience = None if stall_s is None else Patience(resolved.watch_target(session), stall_s)
        self._begun: SimpleQueue[State | BaseException] = SimpleQueue()
        self._stop: anyio.Event | None = None
        self._stopped = False
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._thread = threading.Thread(target=self._main, name="streamline loop", daemon=True)

    def start(self) -> State:
        """Start the thread, and return the state before the first item."""
        start_thread(self._thread)
        begun = self._begun.get()
        if isinstance(begun, BaseException):
            self._thread.join()
            raise begun
        return begun

    def take(self, into: list[Chunk[T] | BaseException | None]) -> None:
        """Wait for the next list, a failure, or None at the end, and append it to `into`.

        In one call in C: after Ctrl-C, it is there or still in the queue.
        """
        now, queue = perf_counter(), self.bridge.consumer.queue

        def take(timeout_s: float = math.inf) -> None:
            wait_interruptible(lambda slice_s: into.extend(starmap(queue.get, ((True, slice_s),))), timeout_s)

        def wait() -> None:
            if self._patience is None:
                take()
            else:
                self._patience.wait(take, self._wake, self._thread.ident, now)

        self._session.meters.consumer.wait_begins(now)
        self.bridge.consumer.take(wait, now, self.signal)

    def stop(self) -> None:
        """End the loop and its thread; wait for that, but not for user code that blocks it."""
        self._stopped = True
        self._session.errors.close(None)
        if self._stop is not None:
            self.signal(self._stop)
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._join()
        self.bridge.drop()
        self.bridge.consumer.queue.put(ClosedError("the stream is closed"))  # for another thread that waits for a list

    def _join(self) -> None:
        """Wait until the thread has ended; no longer than `EXIT_S` if the loop is blocked."""
        began, calls, turns = perf_counter(), self._session.threads.library_calls, True
        while turns and self._thread.is_alive() and perf_counter() - began < SLOW_EXIT_S + CALL_S * bool(calls):
            turned = threading.Event()
            self.signal(turned)
            self._thread.join(EXIT_S)
            turns = turned.is_set()

    def signal(self, event: anyio.Event | threading.Event | Rest) -> None:
        """Set an event in the loop."""
        if self._wake is not None and self._session.gate.copied_from is None:
            try:
                self._wake(event.set)
            except RuntimeError:
                return  # the loop has ended already

    def _main(self) -> None:
        try:
            anyio.run(self._serve, backend_options={"loop_factory": new_event_loop})
        except BaseException as failure:
            self._begun.put(failure)
            self.bridge.consumer.queue.put(failure)
        finally:
            self.remote_gate.end()
            self._begun.put(ClosedError("the stream is closed"))  # another thread may have stopped it before it began
            if threading.main_thread().is_alive():  # else the interpreter exits, and no thread is to raise
                self.bridge.consumer.queue.put(ClosedError("the stream is closed"))

    async def _serve(self) -> None:
        disable_slow_callback_log()
        self._wake = threadsafe_call()
        self._stop = anyio.Event()
        if self._stopped:  # before `signal` had an event loop
            return
        await supervise(self._begin, self._stop, self._session)

    def _begin(self, tasks: Tasks) -> None:
        """Open the plan, and start the driver."""
        try:
            flow: Flow[T] = self.resolved.chain(tasks)
        except Exception as failure:  # the task group would wrap it
            self._begun.put(failure)
            if self._stop is not None:
                self._stop.set()
            return
        self.remote_gate.begin(tasks)
        self._begun.put(flow.state)
        bridge, meters, name = self.bridge, self._session.meters, "consumer bridge"
        bridge.filler = flow.meter
        if self.resolved.computes_last:
            name = f"{LAST_TASK} of shard {self.resolved.rank.rank}"
            if meters.on:
                filled_by = LAST_TASK if flow.meter is None else flow.meter.figures.name
                bridge.meter = meters.channel(filled_by, self.resolved.rank.rank, bridge.capacity.items)
        work = partial(drive, flow, bridge, tasks.gate)
        tasks.start(partial(tasks.gate.participate, name, work), name, bridge.abandon)

    def _on_finish(self) -> None:
        exhausted = self._session.services.find(WorkersExhausted)
        if exhausted is not None:  # a `.take` may end before its workers
            exhausted.tell()


def _capacity(resolved: ResolvedRun, most: int | None) -> ConsumerCapacity:
    """Return how many items may be out to a plain loop, those included that the last stages make ahead of it."""
    plan = resolved.plan
    widest, ahead, size = plan.bridge_capacity, 1, None
    if resolved.computes_last:
        ahead, size = plan.end_capacity, plan.source.ahead_bytes
    if most is not None:
        widest, ahead = min(widest, most), min(ahead, most)
    return ConsumerCapacity(widest, ahead, size)
