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

from streamline.core.forks import disown_in_copies
from streamline.errors import ClosedError

T = TypeVar("T")


class Phase(Enum):
    RUNNING = "running"  # items move
    QUIESCING = "quiescing"  # the gate is closed; some tasks may not have reached it
    CAPTURED = "captured"  # at rest for the length of one copy
    PAUSED = "paused"  # at rest until resumed
    CLOSED = "closed"  # nothing will ever move again


class Event(Enum):
    QUIESCE = "quiesce"
    CAPTURE = "capture"
    PAUSE = "pause"
    RESUME = "resume"
    CLOSE = "close"


TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.RUNNING, Event.QUIESCE): Phase.QUIESCING,
    (Phase.QUIESCING, Event.CAPTURE): Phase.CAPTURED,
    (Phase.QUIESCING, Event.PAUSE): Phase.PAUSED,
    (Phase.QUIESCING, Event.RESUME): Phase.RUNNING,  # it took too long
    (Phase.PAUSED, Event.CAPTURE): Phase.CAPTURED,
    (Phase.PAUSED, Event.RESUME): Phase.RUNNING,
    (Phase.CAPTURED, Event.PAUSE): Phase.PAUSED,
    (Phase.CAPTURED, Event.QUIESCE): Phase.QUIESCING,  # a snapshot during a pause's wait
    (Phase.CAPTURED, Event.RESUME): Phase.RUNNING,
    **{(phase, Event.CLOSE): Phase.CLOSED for phase in Phase},
}

_RUNNING, _CLOSED = Phase.RUNNING, Phase.CLOSED  # for the hot path: attributes of an Enum are slow


class Gate:
    """The current phase, and where tasks wait while items must not move.

    Attributes:
      phase: the only thing that an event changes: Ctrl-C may come between any two assignments.
      on_rest: called whenever a participant comes to rest; None: not called.
      copied_from: in a fork, the pid of the process whose stream this is; None: it is this one's.
      turned_at: when a task of the run last resumed after other tasks ran; the running task has held the loop at most
        since then.
    """

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.on_rest: Callable[[], None] | None = None
        self._opened: anyio.Event | None = None  # made by the first waiter, in the event loop
        self._rested: anyio.Event | None = None
        self._pausing: object = None
        self._participants: set[Participant] = set()
        self._at_work = 0
        self._holders: dict[Callable[[], None], Callable[[], None]] = {}
        self.copied_from: int | None = None
        self.turned_at = -math.inf
        self._owner = os.getpid()
        disown_in_copies(self)

    def disown(self) -> None:
        """Let nothing move in this fork: the stream runs in the process that was copied."""
        self.copied_from = self._owner

    def on(self, event: Event) -> Phase:
        """Go to the phase of `event` in the table, and return the one before; without one, raise and change nothing."""
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
            self._wake_pause()
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
            await wait_at_rest(self._opened.wait())

    async def pause(self, within_s: float | None = None) -> tuple[str, ...]:
        """Close the gate, and wait until every participant is at rest.

        Cancellation: the gate opens again, unless `insist` was called meanwhile.

        Args:
          within_s: seconds to wait; the gate stays closed all the same. None: no limit.

        Returns:
          The names of the participants that were still at work.

        Raises:
          RuntimeError: the stream isn't running; ClosedError: it is closed. Nothing has changed.
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
        """Close the gate, without waiting for anything."""
        self.on(Event.QUIESCE)
        self._pausing = object()
        for hold in list(self._holders):
            hold()

    def insist(self) -> None:
        """Complete the pause although some participants may still be at work; they stop at the gate later."""
        if self.phase is Phase.QUIESCING:
            self.on(Event.PAUSE)
            self._wake_pause()

    def resume(self) -> None:
        """End a pause, or the wait for one. Does nothing if the stream is closed."""
        if self.holding:
            for release in list(self._holders.values()):
                release()
            self.on(Event.RESUME)

    @property
    def at_work(self) -> tuple[str, ...]:
        """The names of the participants that are not at rest, with the number of each. From any thread."""
        names = Counter(name for each in list(self._participants) if not each.rests for name in each.names())
        return tuple(name if count == 1 else f"{name} ({count} calls)" for name, count in sorted(names.items()))

    async def participate(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` as a participant; messages about pauses call it `name`."""
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
        """Call `hold` when a pause begins and `release` when it ends, for code that can't await `passage`."""
        self._holders[hold] = release
        if self.holding:
            hold()

    def forget_pause(self, hold: Callable[[], None]) -> None:
        """Undo `on_pause`."""
        self._holders.pop(hold, None)

    def remote_participant(self, name: str) -> Participant:
        """Return a participant that stands for others elsewhere; it is at rest until its `wake`."""
        participant = Participant(self, name)
        participant.rests = 1
        self._participants.add(participant)
        return participant

    def unregister(self, participant: Participant) -> None:
        """Undo `remote_participant`."""
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
    """A task that moves items; `rests` counts its waits for others, `names` returns those to show in messages."""

    __slots__ = ("gate", "names", "rests")

    def __init__(self, gate: Gate, name: str) -> None:
        self.gate = gate
        self.names: Callable[[], tuple[str, ...]] = lambda: (name,)
        self.rests = 0

    def rest(self) -> None:
        """Begin to wait for another participant."""
        self.rests += 1
        if self.rests == 1:
            self.gate._one_rests()

    def wake(self) -> None:
        """End the wait."""
        self.rests -= 1
        if not self.rests:
            self.gate._at_work += 1


_participant: ContextVar[Participant | None] = ContextVar("streamline participant", default=None)


async def wait_at_rest(wait: Awaitable[T]) -> T:
    """Return the result of `wait`, a wait for another participant, during which this one is at rest.

    The caller passes the gate before it moves anything.
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
    """One wait of a task for another participant, as `wait_at_rest`; `set`, in the same loop, ends it.

    `anyio.Event` takes four times as many steps, which are slow when large items have filled the processor's cache.
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
    """Return the gate of the participant that runs in this task; None: there is none, as in the consumer's task."""
    participant = _participant.get()
    return None if participant is None else participant.gate
