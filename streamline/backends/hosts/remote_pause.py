"""A pause of one host: asks it to pause, reports its status, and defers its messages meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import (
    HostFailed,
    Message,
    MetricsUpdate,
    PauseHost,
    PauseStatus,
    ResumeHost,
    WorkerClosed,
)
from streamline.core.gate import Gate

AT_ONCE = (PauseStatus, HostFailed, WorkerClosed, MetricsUpdate)
"""Messages that move no items."""


class RemotePause:
    """The gate's participant for all workers of a host.

    During a pause, messages that arrive are deferred, bounded by the items in flight, and handled when it ends. Without
    a host, it is at rest. Until the host reports what is at work there, `busy` names it, in any thread.
    """

    def __init__(
        self,
        gate: Gate,
        busy: Callable[[], tuple[str, ...]],
        handle: Callable[[Link, Message], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._gate = gate
        self._busy = busy
        self._handle = handle
        self._failed = failed
        self._participant = gate.remote_participant("")
        self._participant.names = self._names
        self._reported: tuple[str, ...] = ()
        self._link: Link | None = None
        self._number = 0
        self._deferred: deque[tuple[Link, Message]] = deque()
        gate.on_pause(self._pause, self._resume)

    def connected(self, link: Link) -> None:
        """Take the link to a host; the caller has passed the gate."""
        self._link = link

    def lost(self) -> None:
        """Be at rest: the host has ended."""
        self._link = None
        self._set_resting()

    def close(self) -> None:
        """Leave the gate: the run is over."""
        self._gate.forget_pause(self._pause)
        self._gate.unregister(self._participant)
        self._deferred.clear()

    def arrived(self, link: Link, message: Message, *, in_order: bool = False) -> None:
        """Handle a message, or defer it until the pause ends.

        Args:
          in_order: after those that came before it, whatever it is.
        """
        if self._gate.holding and (in_order or not isinstance(message, AT_ONCE)):
            self._deferred.append((link, message))
        else:
            self._handle(link, message)

    def at_work(self, message: PauseStatus, host: str) -> None:
        """Take the host's report of what is at work there."""
        if message.number != self._number or not self._gate.holding:
            return  # of a pause that is over
        if message.names:
            self._reported = tuple(f"{name} in {host}" for name in message.names)
        else:
            self._set_resting()

    def _names(self) -> tuple[str, ...]:
        return self._reported or self._busy()

    def _pause(self) -> None:
        if self._link is not None:
            self._number += 1
            self._reported = ()
            self._link.send(PauseHost(self._number))
            if self._participant.rests:
                self._participant.wake()

    def _resume(self) -> None:
        self._set_resting()
        if self._link is not None:
            self._link.send(ResumeHost())
        try:
            while self._deferred:
                self._handle(*self._deferred.popleft())
        except BaseException as failure:
            self._failed(failure)

    def _set_resting(self) -> None:
        if not self._participant.rests:
            self._participant.rest()
