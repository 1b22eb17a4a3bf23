"""What is counted of the training loop: how long it waits, and what its body takes of a shared event loop."""

from __future__ import annotations

from time import perf_counter

from streamline.meters.stage_meter import LoopMeter

__all__ = ["ConsumerMeter"]

QUICK_S = 0.001
"""A body of the consumer's loop that takes less is timed now and then only."""

BODIES = 8
"""One in so many."""


class ConsumerMeter:
    """The training loop, as seen from the pipeline.

    Attributes:
      items: that it was given, in whole lists: up to a list more than it has seen.
      waiting_since: when the wait that is going on began; None: the consumer has what it asked for.
      held_s: how long its loop's body is known to have held the event loop that it shares with the pipeline.
      closed_at: when the stream ended or was closed; None: it is open.
    """

    __slots__ = (
        "_body",
        "_quick",
        "_unseen",
        "closed_at",
        "held_s",
        "items",
        "loop",
        "opened_at",
        "wait_s",
        "waiting_since",
    )

    def __init__(self, opened_at: float, loop: LoopMeter | None = None) -> None:
        self.opened_at = opened_at
        self.items = 0
        self.wait_s = 0.0
        self.waiting_since: float | None = None
        self.held_s = 0.0
        self.closed_at: float | None = None
        self.loop = loop or LoopMeter()
        self._body: tuple[float, float] | None = None
        self._quick = False
        self._unseen = 0

    def asks(self, now: float) -> None:
        """It asks for a list, and has none."""
        self.waiting_since = now

    def gets(self, now: float) -> None:
        """It has what it asked for, or gives up."""
        if self.waiting_since is not None:
            self.wait_s += now - self.waiting_since
            self.waiting_since = None

    def waited_until(self, now: float) -> float:
        """Return how long it has waited up to `now`, with the wait that is going on."""
        since = self.waiting_since
        return self.wait_s + (0.0 if since is None else max(0.0, now - since))

    def body_begins(self, now: float) -> bool:
        """Its loop's body begins, in the event loop of the pipeline; say whether this one is to be timed.

        Of quick ones, one in `BODIES` is, and stands for the others: timing one costs as much as it takes.
        """
        self._unseen += 1
        if self._quick and self._unseen < BODIES:
            return False
        self._body = now, self.loop.held_s
        return True

    def body_ends(self) -> None:
        """The body asks for more, or the event loop has turned; what else ran there meanwhile doesn't count."""
        if self._body is not None:
            (began, held_s), self._body = self._body, None
            spent = max(0.0, perf_counter() - began - (self.loop.held_s - held_s))
            self.held_s += spent * self._unseen
            self._unseen = 0
            self._quick = spent < QUICK_S

    def close(self, unseen: int = 0) -> None:
        """Stop the clock, and take back what it will never see. Idempotent."""
        self.items -= unseen
        if self.closed_at is None:
            self.closed_at = perf_counter()
