"""The gate: the phases of a stream as one transition table, without I/O.

Tasks that move items, *participants*, pass the gate between two lists, and again after every wait. On one event loop
all other tasks are at rest at any instant, so a snapshot closes the gate, copies the state and opens it again in one
step, without waiting.

A pause waits. A participant is at rest while it waits at the gate, or for another participant: at the sending or
receiving end of a channel. In user code, or while it reads, it is active, and comes to the gate when that is done.

An illegal event raises and changes nothing (the idea is h11's).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import Enum
from typing import TypeVar

import anyio

from streamline.core.forks import disowned_in_copies
from streamline.errors import ClosedError

T = TypeVar("T")


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
    (Phase.CAPTURED, Event.QUIESCE): Phase.QUIESCING,  # a snapshot while a pause waits: it goes on waiting
    (Phase.CAPTURED, Event.RESUME): Phase.RUNNING,
    **{(phase, Event.CLOSE): Phase.CLOSED for phase in Phase},
}

_RUNNING, _CLOSED = Phase.RUNNING, Phase.CLOSED  # looked at often


class Gate:
    """The current phase, and where tasks wait while items must not move.

    Attributes:
      phase: what the stream is doing. The one thing that an event changes: Ctrl-C may come between any two.
      on_rest: called whenever a participant comes to rest; None: not called.
      copied_from: in a fork, the process whose stream this is; None: it is this one's.
      turned_at: when a task of the run last went on after others had a turn; the task that runs now has run at most
        since then.
    """

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.on_rest: Callable[[], None] | None = None
        self._opened: anyio.Event | None = None  # made by the first waiter: outside of a loop they are slow
        self._rested: anyio.Event | None = None
        self._pausing: object = None
        self._participants: set[Participant] = set()
        self._at_work = 0
        self._holders: dict[Callable[[], None], Callable[[], None]] = {}
        self.copied_from: int | None = None
        self.turned_at = -math.inf
        self._owner = os.getpid()
        disowned_in_copies(self)

    def disown(self) -> None:
        """Let nothing be asked for: what moves items runs in the process that this one is a copy of."""
        self.copied_from = self._owner

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
        if not self.holding:
            if self._opened is not None:
                self._opened.set()
                self._opened = None
            self._wake_pause()  # a waiting pause learns that there is nothing to wait for
        return before

    @property
    def holding(self) -> bool:
        """Whether items must not move. Callers on the hot path check it before they await `passage`."""
        phase = self.phase
        return (phase is not _RUNNING and phase is not _CLOSED) or self.copied_from is not None

    async def passage(self) -> None:
        """Wait while items must not move."""
        while self.holding:
            if self._opened is None:
                self._opened = anyio.Event()
            await resting(self._opened.wait())

    async def pause(self, within_s: float | None = None) -> tuple[str, ...]:
        """Let nothing move any more: close the gate, and wait until every participant is at rest.

        Cancellation: everything goes on as before, unless `insist` was called meanwhile.

        Args:
          within_s: how long to wait; the pause holds all the same. None: as long as it takes.

        Returns:
          The participants that were still at work, by name.

        Raises:
          RuntimeError: a stream that doesn't run; ClosedError where it is closed. Nothing has changed.
        """
        self.hold()
        mine = self._pausing
        try:
            with anyio.move_on_after(within_s):
                while self._at_work and self.phase is Phase.QUIESCING:
                    self._rested = anyio.Event()
                    await self._rested.wait()
            at_work = self.at_work
            self.insist()
        finally:
            if self.phase is Phase.QUIESCING and self._pausing is mine:
                self.resume()
        return at_work

    def hold(self) -> None:
        """Let nothing move any more, and wait for nothing."""
        self.on(Event.QUIESCE)
        self._pausing = object()
        for hold in list(self._holders):
            hold()

    def insist(self) -> None:
        """Let the pause hold although some participants may still be at work; they stop at the closed gate later."""
        if self.phase is Phase.QUIESCING:
            self.on(Event.PAUSE)
            self._wake_pause()

    def resume(self) -> None:
        """End a pause, or the wait for one. Nothing to do for a stream that has been closed."""
        if self.holding:
            for release in list(self._holders.values()):
                release()
            self.on(Event.RESUME)

    @property
    def at_work(self) -> tuple[str, ...]:
        """The participants that are not at rest, by name, with the number of each. From any thread."""
        names = Counter(name for each in list(self._participants) if not each.rests for name in each.names())
        return tuple(name if count == 1 else f"{name} ({count} calls)" for name, count in sorted(names.items()))

    async def participate(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work`, whose task is a participant from now on; `name` is what people read while a pause waits for it."""
        participant = Participant(self, name)
        self._participants.add(participant)
        self._at_work += 1
        _participant.set(participant)  # never reset: the task ends with it
        try:
            await work()
        finally:
            self._participants.discard(participant)
            if not participant.rests:
                self._one_rests()

    def on_pause(self, hold: Callable[[], None], release: Callable[[], None]) -> None:
        """Call `hold` when a pause begins and `release` when it ends: for what can't ask the gate for every item."""
        self._holders[hold] = release
        if self.holding:
            hold()

    def forget_pause(self, hold: Callable[[], None]) -> None:
        """Forget what `holds` was told."""
        self._holders.pop(hold, None)

    def remote_participant(self, name: str) -> Participant:
        """Return what stands for participants elsewhere; it is at rest until it says `wake`."""
        participant = Participant(self, name)
        participant.rests = 1
        self._participants.add(participant)
        return participant

    def unregister(self, participant: Participant) -> None:
        """Forget what `participant` returned."""
        if participant in self._participants:
            self._participants.discard(participant)
            if not participant.rests:
                self._one_rests()

    def _one_rests(self) -> None:
        self._at_work -= 1
        if self.on_rest is not None:
            self.on_rest()
        if not self._at_work:
            self._wake_pause()

    def _wake_pause(self) -> None:
        if self._rested is not None:
            self._rested.set()


class Participant:
    """A task that moves items; `rests` counts its waits for others (a custom stage may have tasks of its own).

    Attributes:
      names: tells what people read while a pause waits for it; of what stands for several of them elsewhere, theirs.
    """

    __slots__ = ("gate", "names", "rests")

    def __init__(self, gate: Gate, name: str) -> None:
        self.gate = gate
        self.names: Callable[[], tuple[str, ...]] = lambda: (name,)
        self.rests = 0

    def rest(self) -> None:
        """A wait begins."""
        self.rests += 1
        if self.rests == 1:
            self.gate._one_rests()

    def wake(self) -> None:
        """It is over."""
        self.rests -= 1
        if not self.rests:
            self.gate._at_work += 1


_participant: ContextVar[Participant | None] = ContextVar("streamline participant", default=None)


async def resting(wait: Awaitable[T]) -> T:
    """Return what `wait` gives: a wait for another participant, so that this one is at rest meanwhile.

    Before it moves anything then, it passes the gate.
    """
    participant = _participant.get()
    if participant is None:
        return await wait
    participant.rest()
    try:
        return await wait
    finally:
        participant.wake()


class Rest:
    """One wait of a task for another participant, as `resting`; `set`, in the same loop, ends it once it has begun.

    An `anyio.Event` does it in four times as many steps, which large items have driven out of the processor's cache.
    """

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    async def wait(self) -> None:
        participant = _participant.get()
        if participant is not None:
            participant.rest()
        try:
            await self._end
        finally:
            if participant is not None:
                participant.wake()


def gate_of_task() -> Gate | None:
    """Return the gate of the participant that this task is; None: it is none, as the consumer's."""
    participant = _participant.get()
    return None if participant is None else participant.gate
