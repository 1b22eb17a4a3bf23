"""The gate: what a stream is doing, as one table, without I/O.

Tasks that move items pass the gate between two lists. A task is at rest while it waits at the gate, in a channel, or in
user work. On one event loop everything but the running task is at rest at any instant, so a snapshot closes the gate,
copies the state and opens it again in one step, without waiting.

An illegal event raises and changes nothing (the idea is h11's).
"""

from __future__ import annotations

from enum import Enum

import anyio

from streamline.errors import ClosedError

__all__ = ["TABLE", "Event", "Gate", "Phase"]


class Phase(Enum):
    """What a stream is doing."""

    RUNNING = "running"  # items move
    QUIESCING = "quiescing"  # the gate is closed; some tasks may not have reached it
    CAPTURED = "captured"  # at rest for the length of one copy
    PAUSED = "paused"  # at rest until resumed
    CLOSED = "closed"  # nothing will ever move again


class Event(Enum):
    """What may happen to a stream."""

    QUIESCE = "quiesce"
    CAPTURE = "capture"
    PAUSE = "pause"
    RESUME = "resume"
    CLOSE = "close"


TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.RUNNING, Event.QUIESCE): Phase.QUIESCING,
    (Phase.QUIESCING, Event.CAPTURE): Phase.CAPTURED,
    (Phase.QUIESCING, Event.PAUSE): Phase.PAUSED,
    (Phase.QUIESCING, Event.RESUME): Phase.RUNNING,  # it took too long: go on
    (Phase.PAUSED, Event.CAPTURE): Phase.CAPTURED,
    (Phase.PAUSED, Event.RESUME): Phase.RUNNING,
    (Phase.CAPTURED, Event.PAUSE): Phase.PAUSED,
    (Phase.CAPTURED, Event.RESUME): Phase.RUNNING,
    **{(phase, Event.CLOSE): Phase.CLOSED for phase in Phase},
}


class Gate:
    """The current phase, and where tasks wait while items must not move."""

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self._opened = anyio.Event()

    def on(self, event: Event) -> Phase:
        """Go to the phase that the table gives for `event`, and return the one before.

        Raises:
          ClosedError: the stream is closed.
          RuntimeError: any other event that is not in the table; nothing has changed.
        """
        before = self.phase
        after = TABLE.get((before, event))
        if after is None:
            error = ClosedError if before is Phase.CLOSED else RuntimeError
            raise error(f"can't {event.value} a stream that is {before.value}")
        self.phase = after
        if after in (Phase.RUNNING, Phase.CLOSED):
            self._opened.set()
            self._opened = anyio.Event()
        return before

    async def passage(self) -> None:
        """Wait while items must not move."""
        while self.phase is not Phase.RUNNING and self.phase is not Phase.CLOSED:
            await self._opened.wait()
