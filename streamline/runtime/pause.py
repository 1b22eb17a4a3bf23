"""Pausing a stream: the gate that waits, for `async with` and, across a border between two threads, for `with`.

Entered: the gate is closed, and whatever was at work has come to rest, or `quiesce_timeout` is over and what doesn't
rest has been named. Left, in any way: the gate is open. Cancelled or interrupted while it is entered: the stream goes
on. A stream that has ended, failed or been closed is at rest already: the block just runs.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType

from streamline.core.cleanup import Cleanup
from streamline.core.forks import belongs_elsewhere
from streamline.core.gate import Event, Gate, Phase
from streamline.core.tasks import Job, Tasks
from streamline.core.threads import interruptible, threadsafe_call
from streamline.errors import ClosedError, PausedError, PlanError, PlanTypeError, printable

QUIESCE_S = 10.0
"""Seconds that a pause waits for what is at work, by default: a slow call rather than a dead one."""

logger = logging.getLogger("streamline.pausing")  # as the docs call it


class Pause:
    """`async with stream.paused()`: gives what doesn't rest, by name."""

    def __init__(self, gate: Gate, quiesce_timeout: float) -> None:
        _check_timeout(quiesce_timeout)
        self._gate = gate
        self._within_s = quiesce_timeout

    async def __aenter__(self) -> tuple[str, ...]:
        _check_not_paused(self._gate)
        if self._gate.phase is Phase.CLOSED:
            return ()
        at_work = await self._gate.pause(self._within_s)
        _tell(at_work, self._within_s)
        return at_work

    async def __aexit__(self, *_: object) -> None:
        self._gate.resume()


class SyncPause:
    """`with stream.paused()`: gives what doesn't rest, by name.

    The consumer's side has a gate of its own, with the same table: what a snapshot captures there, the place in the
    list at hand, is the consumer's thread's.

    Args:
      gate: the consumer's.
      lock: held to send it an event.
      far: the gate of the event loop.
    """

    def __init__(self, gate: Gate, lock: threading.RLock, far: RemoteGate, quiesce_timeout: float) -> None:
        _check_timeout(quiesce_timeout)
        self._gate = gate
        self._lock = lock
        self._far = far
        self._within_s = quiesce_timeout
        self._cleanup: Cleanup | None = None

    def __enter__(self) -> tuple[str, ...]:
        with self._lock:
            _check_not_paused(self._gate)
            if self._gate.phase is Phase.CLOSED:
                return ()
        request = _PauseRequest()
        self._cleanup = Cleanup(self, _leave, self._gate, self._lock, self._far, request).not_at_exit()
        try:
            self._far.request = request
            with self._lock:
                self._gate.on(Event.QUIESCE)
            at_work = self._far.pause(request, self._within_s)  # Ctrl-C comes out here
            with self._lock:
                self._gate.insist()
            _tell(at_work, self._within_s)
            return at_work
        except BaseException:
            self._left()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._left()

    def _left(self) -> None:
        """Let the stream go on. If Ctrl-C comes in the middle of this, the finalizer does it."""
        if self._cleanup is not None:
            self._cleanup()


def _leave(gate: Gate, lock: threading.RLock, far: RemoteGate, request: _PauseRequest) -> None:
    """End a pause, once; the consumer's gate is the last to open, so that nothing waits for a paused loop."""
    if far.request is request:
        far.resume(request)
        with lock:
            gate.resume()
        far.request = None


class RemoteGate:
    """The gate of an event loop that runs in another thread.

    Requests cross in order. Every request is answered, also from a loop that ends, and waits no longer than
    it said for a loop that is stuck in user code: that finds the gate closed as soon as it gives way.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tasks: Tasks | None = None
        self._context = Context()
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self.request: _PauseRequest | None = None  # the pause that is on
        self._over = False

    def begin(self, tasks: Tasks) -> None:
        """Say, in the loop, that it runs."""
        self._tasks, self._wake, self._context = tasks, threadsafe_call(), copy_context()

    def end(self) -> None:
        """Say that the loop has ended: nothing waits for it any more."""
        self._over = True
        if (request := self.request) is not None:
            request.answer()

    def pause(self, request: _PauseRequest, within_s: float) -> tuple[str, ...]:
        """Close the gate, wait until everything is at rest, and return what is not within that time."""
        if self._over or not self._call(partial(self._begin, request)):
            return ()
        try:
            interruptible(lambda slice_s: request.answers.get(timeout=slice_s), within_s)
        except Empty:
            at_work = self._gate.at_work
            self._call(partial(self._insist, request))
            return at_work
        return ()

    def resume(self, request: _PauseRequest) -> None:
        """Open the gate, or give up waiting for it to close; doesn't wait for a loop that may be stuck."""
        self._call(partial(self._resume, request))

    def _call(self, work: Callable[[], None]) -> bool:
        if self._wake is None:
            return False
        try:
            self._wake(partial(self._context.run, work))  # in the loop's: anyio has to know where it is
        except RuntimeError:
            return False  # the loop has ended
        return True

    def _begin(self, request: _PauseRequest) -> None:
        if self._tasks is not None and self._gate.phase is Phase.RUNNING:
            request.job = self._tasks.start(partial(self._pause, request), "pause", request.answer)
        else:
            request.answer()

    def _insist(self, request: _PauseRequest) -> None:
        request.insisted = True
        self._gate.insist()

    def _resume(self, request: _PauseRequest) -> None:
        if request.job is not None:
            request.job.cancel()
        self._gate.resume()

    async def _pause(self, request: _PauseRequest) -> None:
        try:
            if self._gate.phase is Phase.RUNNING:
                await self._gate.pause(0 if request.insisted else None)
        finally:
            request.answer()


class _PauseRequest:
    """A pause that another thread asked for."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[None] = SimpleQueue()
        self.insisted = False
        self.job: Job | None = None

    def answer(self) -> None:
        """Let the waiting thread go on."""
        self.answers.put(None)


def check_asked(gate: Gate) -> None:
    """Refuse to ask for another list where the gate is closed to it: that would wait for ever.

    Raises:
      PausedError: the stream is paused, or about to be.
      ClosedError: it was opened before this process was forked.
    """
    if gate.copied_from is not None:
        raise ClosedError(belongs_elsewhere("stream", gate.copied_from))
    if gate.holding:
        raise PausedError(
            "the stream is paused, and has handed out the items that it had at hand: leave its paused() block before "
            "asking for more"
        )


def _check_not_paused(gate: Gate) -> None:
    if gate.holding:
        raise PausedError("the stream is paused already: leave the other paused() block before entering another")


def _check_timeout(value: object) -> None:
    option = "paused(quiesce_timeout=)"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanTypeError(f"{option} is a number of seconds, got {type(value).__name__} {value!r}")
    if not 0 <= value <= threading.TIMEOUT_MAX or math.isnan(value):
        raise PlanError(f"{option} is a number of seconds from 0 on, and finite, got {value}")


def _tell(at_work: tuple[str, ...], within_s: float) -> None:
    """Name what doesn't rest. A warning, no error: an evaluation beside one stuck call beats a run that is dead."""
    if at_work:
        logger.warning(
            "paused, but still at work after %g s: %s; what they are at may share CPU and network with you until it "
            "ends, and its results wait until the stream goes on",
            within_s,
            printable(", ".join(at_work)),
        )
