"""A pause, as it concerns one host: what is asked of it, what it answers, and what of it arrives meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import AtWork, Broken, Closed, Counts, Hold, Message, Release
from streamline.core.gate import Gate

__all__ = ["RemotePause"]


AT_ONCE = (AtWork, Broken, Closed, Counts)
"""Messages that move nothing."""


class RemotePause:
    """Stands at the gate for all workers of a host.

    While items must not move, what arrives is kept, bounded as what is on its way always is, and dealt with when they
    may again. While there is no host, everything in it is at rest.

    Args:
      busy: names what seems to be at work there, as long as it doesn't say so itself; called in any thread.
      handle: deals with a message.
      failed: told what `handle` raised.
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
        self._mover = gate.remote_participant("")
        self._mover.names = self._names
        self._said: tuple[str, ...] = ()
        self._link: Link | None = None
        self._number = 0
        self._kept: deque[tuple[Link, Message]] = deque()
        gate.on_pause(self._hold, self._release)

    def connected(self, link: Link) -> None:
        """There is a host; items may move, or the gate would have to be passed first."""
        self._link = link

    def lost(self) -> None:
        """It is gone."""
        self._link = None
        self._rests()

    def close(self) -> None:
        """It is over."""
        self._gate.forget_pause(self._hold)
        self._gate.unregister(self._mover)
        self._kept.clear()

    def arrived(self, link: Link, message: Message) -> None:
        """Deal with a message, now or when items may move."""
        if self._gate.holding and not isinstance(message, AT_ONCE):
            self._kept.append((link, message))
        else:
            self._handle(link, message)

    def at_work(self, message: AtWork, host: str) -> None:
        """The host says what is at work there."""
        if message.number != self._number or not self._gate.holding:
            return  # of a pause that is over
        if message.names:
            self._said = tuple(f"{name} in {host}" for name in message.names)
        else:
            self._rests()

    def _names(self) -> tuple[str, ...]:
        return self._said or self._busy()

    def _hold(self) -> None:
        if self._link is not None:
            self._number += 1
            self._said = ()
            self._link.send(Hold(self._number))
            if self._mover.rests:
                self._mover.wake()

    def _release(self) -> None:
        self._rests()
        if self._link is not None:
            self._link.send(Release())
        try:
            while self._kept:
                self._handle(*self._kept.popleft())
        except BaseException as failure:
            self._failed(failure)

    def _rests(self) -> None:
        if not self._mover.rests:
            self._mover.rest()
