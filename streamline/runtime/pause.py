"""Pausing a stream, by `async with`, or by `with` from another thread than the event loop's.

Inside the block, the gate is closed, and everything is at rest, or `quiesce_timeout` is over and the log names what is
still at work. Leaving the block in any way, or a cancellation while entering it, opens the gate. A stream that has
ended, failed or been closed is at rest already.
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
from streamline.core.threads import threadsafe_call, wait_interruptible
from streamline.errors import ClosedError, PausedError, PlanError, PlanTypeError, printable

QUIESCE_S = 10.0
"""Seconds that a pause waits for calls in progress, by default: enough for slow ones."""

logger = logging.getLogger("streamline.pausing")  # as the docs call it


class Pause:
    """`async with stream.paused()`: gives the names of the participants that are still at work."""

    def __init__(self, gate: Gate, quiesce_timeout: float) -> None:
        _check_timeout(quiesce_timeout)
        self._gate = gate
        self._within_s = quiesce_timeout

    async def __aenter__(self) -> tuple[str, ...]:
        _check_not_paused(self._gate)
        if self._gate.phase is Phase.CLOSED:
            return ()
        at_work = await self._gate.pause(self._within_s)
        _log_at_work(at_work, self._within_s)
        return at_work

    async def __aexit__(self, *_: object) -> None:
        self._gate.resume()


class SyncPause:
    """`with stream.paused()`: gives the names of the participants that are still at work.

    The consumer's thread has a `gate` of its own, for the position in the current list, which snapshots read under
    `lock`; `remote` is the event loop's.
    """

    def __init__(self, gate: Gate, lock: threading.RLock, remote: RemoteGate, quiesce_timeout: float) -> None:
        _check_timeout(quiesce_timeout)
        self._gate = gate
        self._lock = lock
        self._remote = remote
        self._within_s = quiesce_timeout
        self._cleanup: Cleanup | None = None

    def __enter__(self) -> tuple[str, ...]:
        with self._lock:
            _check_not_paused(self._gate)
            if self._gate.phase is Phase.CLOSED:
                return ()
        request = _PauseRequest()
        self._cleanup = Cleanup(self, _leave, self._gate, self._lock, self._remote, request).not_at_exit()
        try:
            self._remote.request = request
            with self._lock:
                self._gate.on(Event.QUIESCE)
            at_work = self._remote.pause(request, self._within_s)  # Ctrl-C interrupts this
            with self._lock:
                self._gate.insist()
            _log_at_work(at_work, self._within_s)
            return at_work
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        """Resume the stream. If Ctrl-C interrupts this, the finalizer does it."""
        if self._cleanup is not None:
            self._cleanup()


def _leave(gate: Gate, lock: threading.RLock, remote: RemoteGate, request: _PauseRequest) -> None:
    """End a pause, once; the consumer's gate opens last, so that nothing waits for a paused loop."""
    if remote.request is request:
        remote.resume(request)
        with lock:
            gate.resume()
        remote.request = None


class RemoteGate:
    """The gate of an event loop that runs in another thread.

    Each request is answered, even if the loop ends. If user code blocks the loop, a request waits no longer than its
    time.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tasks: Tasks | None = None
        self._context = Context()
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self.request: _PauseRequest | None = None  # the current pause
        self._over = False

    def begin(self, tasks: Tasks) -> None:
        """Called in the loop, when it runs."""
        self._tasks, self._wake, self._context = tasks, threadsafe_call(), copy_context()

    def end(self) -> None:
        """Called when the loop has ended: answer the current request."""
        self._over = True
        if (request := self.request) is not None:
            request.answer()

    def pause(self, request: _PauseRequest, within_s: float) -> tuple[str, ...]:
        """Close the gate, wait until everything is at rest, and return what isn't after that time."""
        if self._over or not self._call(partial(self._begin, request)):
            return ()
        try:
            wait_interruptible(lambda slice_s: request.answers.get(timeout=slice_s), within_s)
        except Empty:
            at_work = self._gate.at_work
            self._call(partial(self._insist, request))
            return at_work
        return ()

    def resume(self, request: _PauseRequest) -> None:
        """Open the gate, or cancel the pause; never waits for the loop."""
        self._call(partial(self._resume, request))

    def _call(self, work: Callable[[], None]) -> bool:
        if self._wake is None:
            return False
        try:
            self._wake(partial(self._context.run, work))  # by which anyio knows the event loop
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
    def __init__(self) -> None:
        self.answers: SimpleQueue[None] = SimpleQueue()
        self.insisted = False
        self.job: Job | None = None

    def answer(self) -> None:
        self.answers.put(None)


def check_may_pull(gate: Gate) -> None:
    """Raise where a pull would wait for ever: in a paused stream, or a fork of the process that has opened it."""
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


def _log_at_work(at_work: tuple[str, ...], within_s: float) -> None:
    """Log what is still at work. No error: an evaluation beside one stuck call is better than a dead run."""
    if at_work:
        logger.warning(
            "paused, but still at work after %g s: %s; what they are at may share CPU and network with you until it "
            "ends, and its results wait until the stream goes on",
            within_s,
            printable(", ".join(at_work)),
        )
