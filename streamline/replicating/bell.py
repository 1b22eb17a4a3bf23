"""Waiting for news out of any thread or event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident

import anyio

from streamline.core.threads import waker

__all__ = ["Bell"]


class _Waiter:
    """One wait."""

    __slots__ = ("rung", "set", "thread", "wake")

    def __init__(
        self,
        set_event: Callable[[], None],
        wake: Callable[[Callable[[], None]], object] | None = None,
        thread: int | None = None,
    ) -> None:
        self.set = set_event
        self.wake = wake
        self.thread = thread
        self.rung = False


class Bell:
    """Wakes the one who waits at it, a task or a thread. Whoever rings does so behind the change that is waited for.

    Nothing is locked: who waits looks again once he can be seen to wait, and who rings looks behind the change. What
    was rung is said of one wait, so that a ring which comes late can't take the next one's.

    Attributes:
      waiter: who waits; None: nobody.
    """

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: _Waiter | None = None

    @property
    def taken(self) -> bool:
        """Whether somebody else waits: not this thread, in a wait that Ctrl-C has cut off."""
        waiter = self.waiter
        return waiter is not None and (waiter.wake is not None or waiter.thread != get_ident())

    def ring(self, soon: bool = False) -> None:
        """Wake who waits, if anybody does. From any thread; doesn't wait.

        Args:
          soon: it is called from anywhere, a finalizer say: let the event loop do it.
        """
        waiter = self.waiter
        if waiter is None or waiter.rung:
            return
        try:
            if waiter.wake is None or (not soon and waiter.thread == get_ident()):
                waiter.set()
            else:
                waiter.wake(waiter.set)
        except RuntimeError:
            return  # its event loop has ended, and has cancelled who waited
        waiter.rung = True  # not before: Ctrl-C may come in the middle of this

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until it rings, or not at all if it is `ready`. Cancellation: nothing has changed."""
        event = anyio.Event()
        try:
            self.waiter = _Waiter(event.set, waker(), get_ident())
            if not ready():
                await event.wait()
        finally:
            self.waiter = None

    def wait_in_thread(self, ready: Callable[[], bool]) -> None:
        """Likewise, in a thread that has no event loop."""
        event = threading.Event()
        try:
            self.waiter = _Waiter(event.set, thread=get_ident())
            if not ready():
                event.wait()
        finally:
            self.waiter = None
