"""The thread in which a plan runs for a plain loop, and the border that lists cross.

The event loop is uvloop where it exists. Success: the last list, then the end. Failure: every list before it, then the
user's exception. Nothing here knows the stream: whoever drops it calls `stop`.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Generic, TypeVar

import anyio

from streamline.errors import ClosedError
from streamline.flow import LONG_LIST_ITEMS, Chunk, Flow
from streamline.gate import resting
from streamline.meters.stage_meter import StageMeter
from streamline.opening import Opening
from streamline.pausing import FarGate
from streamline.resuming.bound import caches_of
from streamline.session import Session
from streamline.states import State
from streamline.tasks import Job, Tasks, supervise
from streamline.threads import hold_quietly, waker
from streamline.watching.watchdog import Patience

__all__ = ["Engine"]

T = TypeVar("T")

QUICK_S = 0.001
"""A consumer that deals with a list in less time than this is quick enough for longer ones."""

STEADY_S = 0.02
"""So is one that takes this long for a list of a few items, up to `STEADY_ITEMS` of them out at once: in training with
steps of 5 ms, a batch then costs half of the time in both threads together (0.1 ms of 0.2), since one in four is
fetched."""

STEADY_ITEMS = 8

SLOW_ITEM_S = 0.00001
"""A list whose items took longer than this each is worth handing over at once: doing so costs some 50 µs."""

FIRST_S = 0.25
"""How long to wait at most for a consumer that is handed its first list: once a stream."""

EXIT_S = 1.0
"""How long a close, or the interpreter's exit, waits for an engine that is stuck in user code."""


class Engine(Generic[T]):
    """The thread, its event loop, and the border that lists cross.

    Each of the two counters has one writer, so no lock is needed. `depth` items may be out at once; it doubles when the
    consumer has dealt with a list in no time and finds no other, or with a short one in little time, and shrinks when
    it is slow: a slow consumer keeps few items waiting, a fast one makes the switches of threads rare, each of which
    costs as much as some 200 tiny items.
    """

    def __init__(self, opening: Opening, session: Session) -> None:
        plan = opening.plan
        self.opening = opening
        self._session = session
        self.far = FarGate(session.gate)
        self._most = min(plan.border_capacity, session.most_ahead or plan.border_capacity)
        self._depth = self._least = min(2, self._most)
        stall_s = opening.stall_s
        self._patience = None if stall_s is None else Patience(opening.watched(session), stall_s)
        self.taken_at = 0.0
        self._waiting = False
        self._sent = 0
        self._dealt = 0
        self._border: SimpleQueue[Chunk[T] | BaseException | None] = SimpleQueue()
        self._begun: SimpleQueue[State | BaseException] = SimpleQueue()
        self._room: anyio.Event | None = None
        self._stop: anyio.Event | None = None
        self._stopped = False
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._again: anyio.Event | None = None
        self._opened: Callable[[], Opening] = lambda: opening
        self._job: Job | None = None
        self._thread = threading.Thread(target=self._main, name="streamline loop", daemon=True)

    def start(self) -> State:
        """Start the thread, and return the state before the first item."""
        self._thread.start()
        begun = self._begun.get()
        if isinstance(begun, BaseException):
            self._thread.join()
            raise begun
        return begun

    def take(self) -> Chunk[T] | BaseException | None:
        """Wait for the next list, or for what the pipeline failed with; None at the end."""
        now = perf_counter()
        self._session.meters.consumer.asks(now)
        dealt_s = now - self.taken_at
        if dealt_s > 2 * STEADY_S:
            self._depth = max(self._least, self._depth // 2)
        elif (dealt_s < QUICK_S and self._border.empty()) or (dealt_s < STEADY_S and self._depth < STEADY_ITEMS):
            self._depth = min(2 * self._depth, self._most)
        self._waiting = True
        patience = self._patience
        found = self._border.get() if patience is None else patience.get(self._border, self._wake, self._thread.ident)
        self._waiting = False
        self.taken_at = perf_counter()
        return found

    def dealt_with(self, items: int) -> None:
        """Say that a list has been handed out."""
        self._dealt += items
        room = self._room
        if room is not None and self._wake is not None:
            self._room = None
            self._signal(room)

    def reopen(self, opening: Callable[[], Opening]) -> State:
        """Close the plan's flows, drop what is on its way, and begin at another opening of the same plan.

        Args:
          opening: makes it, while nothing runs.

        Returns:
          The state before the first item.
        """
        assert self._again is not None
        self._opened = opening
        self._signal(self._again)
        begun = self._begun.get()
        if isinstance(begun, BaseException):
            raise begun
        return begun

    async def _reopen(self, tasks: Tasks) -> None:
        """Begin again, whenever that is asked for."""
        while self._again is not None:
            await resting(self._again.wait())
            self._again = anyio.Event()
            if self._job is not None:
                await tasks.stop(self._job)
            self._drop()
            self._sent = self._dealt
            self.opening = self._opened()
            self._open(tasks)

    def stop(self) -> None:
        """End the loop and its thread; wait for that, though not for user code that is stuck."""
        self._stopped = True
        self._session.errors.close(None)
        if self._stop is not None:
            self._signal(self._stop)
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(EXIT_S)
        self._drop()
        self._border.put(ClosedError("the stream is closed"))  # for another thread that waits for a list

    def _drop(self) -> None:
        """Keep no item that is on its way."""
        with suppress(Empty):
            while True:
                self._border.get_nowait()

    def _signal(self, event: anyio.Event) -> None:
        if self._wake is not None:
            try:
                self._wake(event.set)
            except RuntimeError:
                return  # the loop has ended already

    def _main(self) -> None:
        try:
            anyio.run(self._serve, backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None})
        except BaseException as failure:
            self._begun.put(failure)
            self._border.put(failure)
        finally:
            self.far.end()
            self._begun.put(ClosedError("the stream is closed"))  # another thread may have stopped it before it began
            if threading.main_thread().is_alive():  # else the interpreter exits: let no thread say that it was cut off
                self._border.put(ClosedError("the stream is closed"))

    async def _serve(self) -> None:
        hold_quietly()
        self._wake = waker()
        self._stop = anyio.Event()
        if self._stopped:  # Ctrl-C came before there was anything to signal to
            return
        await supervise(self._begin, self._stop, self._session)

    def _begin(self, tasks: Tasks) -> None:
        if caches_of(self.opening.plan):
            self._again = anyio.Event()
            tasks.start(partial(self._reopen, tasks), "resets", lambda: None)
        self._open(tasks)

    def _open(self, tasks: Tasks) -> None:
        """Open the plan, and let its lists cross."""
        try:
            flow: Flow[T] = self.opening.flow(tasks)
        except Exception as failure:  # out of the task group's reach, which would wrap it
            self._begun.put(failure)
            if self._stop is not None:
                self._stop.set()
            return
        if self._job is None:
            self.far.begin(tasks)
        self._begun.put(flow.state)
        self._job = tasks.start(partial(tasks.gate.moves, "border", partial(self._feed, flow)), "border", lambda: None)

    async def _feed(self, flow: Flow[T]) -> None:
        """Carry lists across the border, then the end or the failure."""
        end: BaseException | None = None
        try:
            while True:
                room = await self._wait_room(flow.meter)
                if self._session.gate.holding:
                    await self._session.gate.passage()
                began = perf_counter()
                if (chunk := await flow.pull(room)) is None:
                    break
                self._sent += len(chunk.items)
                self._border.put(chunk)
                slow = perf_counter() - began > SLOW_ITEM_S * len(chunk.items)
                del chunk  # it is the consumer's: items are not kept while the next are made
                if slow:
                    self._hand_over()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            end = failure
        finally:
            with anyio.CancelScope(shield=True):
                await flow.aclose()
        if end is None and self._session.spent is not None:  # a take may have had enough before the workers' ends
            self._session.spent()
        self._border.put(end)

    def _hand_over(self) -> None:
        """Behind a list that took long, let a consumer that waits for it run, until it has taken the list.

        A thread that is woken loses the race for the GIL against a loop that lets go of it for a microsecond now and
        then: behind a slow sync map, 500 items were made before the first was handed out. For the first list of all it
        waits longer, and lets go of the core, too: where all cores are busy, a thread is woken late.
        """
        began, longest = perf_counter(), QUICK_S if self._dealt else FIRST_S
        while self._waiting and not self._border.empty() and (waited := perf_counter() - began) < longest:
            sleep(0 if waited < QUICK_S else QUICK_S)

    async def _wait_room(self, meter: StageMeter | None) -> int:
        while (room := self._depth - (self._sent - self._dealt)) < 1:
            event = self._room = anyio.Event()
            if self._depth - (self._sent - self._dealt) < 1:  # the other thread may just have made room
                await _wait_for_room(event, meter)
        return min(max(1, self._depth // 2), room, LONG_LIST_ITEMS)


async def _wait_for_room(event: anyio.Event, meter: StageMeter | None) -> None:
    """Wait, and tell the meter of the stage whose items wait."""
    if meter is not None:
        meter.wait_begins("wait_output")
    try:
        await resting(event.wait())
    finally:
        if meter is not None:
            meter.wait_ends()
