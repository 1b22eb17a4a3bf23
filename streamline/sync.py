"""A plan that runs, for a plain `for` loop.

The event loop (uvloop where it exists) runs in a thread of its own; the consumer receives lists, not items. Everything
that the thread holds is in `_Engine`, which doesn't know the stream: when the stream is dropped, the engine stops.

Success, failure, snapshot: as in `streamline.stream`. Ctrl-C: `KeyboardInterrupt` in the consumer's thread, wherever it
is; leaving the `with` block, or dropping the iterator, ends the engine.
"""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import perf_counter, sleep
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from streamline.cursor import Cursor
from streamline.errors import ClosedError
from streamline.flow import LIST_ITEMS, Chunk, Flow
from streamline.gate import Gate
from streamline.opening import Opening
from streamline.snapshot import Snapshot
from streamline.states import State
from streamline.tasks import Tasks, supervise
from streamline.threads import waker

__all__ = ["SyncStream"]

T = TypeVar("T")

QUICK_S = 0.001
"""A consumer that deals with a list in less time than this is quick enough for longer ones."""

SLOW_ITEM_S = 0.00001
"""A list whose items took longer than this each is worth handing over at once: doing so costs some 50 µs."""

EXIT_S = 1.0
"""How long a close, or the interpreter's exit, waits for an engine that is stuck in user code."""


class SyncStream(Cursor[T], Generic[T]):
    """An iterator over a running plan. Made by `for x in pipe` or `with pipe.open() as stream`."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._gate = Gate()
        self._engine = _Engine[T](opening, self._gate)
        self._finalize = weakref.finalize(self, self._engine.stop)
        self._failure: BaseException | None = None
        self._trace: TracebackType | None = None
        self._ended = False
        super().__init__(self._engine.start())

    def close(self) -> None:
        """End everything that this stream started, and wait until it has ended. Idempotent.

        Sync user code that is stuck is waited for a second at most: a thread can't be ended from outside.
        """
        self._finalize()
        self._forget()
        if self._failure is None and not self._ended:
            self._failure = ClosedError("the stream is closed")

    def snapshot(self) -> Snapshot:
        """Return the state of the run: what resumes right after the last item received. Doesn't wait."""
        return self._opening.snapshot(self.state, Gate())

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        taken = self._taken
        if taken < self._last:
            self._taken = taken + 1
            item: T = self._items[taken]
            self._items[taken] = None
            return item
        return self._next_edge()

    def _next_edge(self) -> T:
        """Return the last item of the list, or fetch another list first."""
        while self._taken > self._last:
            self._fetch()
        if self._taken < self._last:
            return self.__next__()
        item = self._take_last()
        self._engine.dealt_with(self._taken)
        return item

    def _fetch(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)  # else it would grow with every raise
        if self._ended:
            raise StopIteration
        found = self._engine.take()  # Ctrl-C comes out here, and changes nothing
        if isinstance(found, BaseException):
            self._failure, self._trace = found, found.__traceback__
            self._finalize()
            raise found
        if found is None:
            self._ended = True
            self._finalize()
            raise StopIteration
        self._load(found)


class _Engine(Generic[T]):
    """The thread, its event loop, and the border that lists cross.

    Each of the two counters has one writer, so no lock is needed. `depth` items may be out at once; it doubles when the
    consumer has dealt with a list in no time and finds no other, and shrinks when it is slow: a slow consumer keeps few
    items waiting, a fast one makes the switches of threads rare, each of which costs as much as some 200 tiny items.
    """

    def __init__(self, opening: Opening, gate: Gate) -> None:
        plan = opening.plan
        self._opening = opening
        self._gate = gate
        self._most = plan.border_capacity
        self._depth = 2
        self._taken_at = 0.0
        self._waiting = False
        self._sent = 0
        self._dealt = 0
        self._border: SimpleQueue[Chunk[T] | BaseException | None] = SimpleQueue()
        self._begun: SimpleQueue[State | BaseException] = SimpleQueue()
        self._room: anyio.Event | None = None
        self._stop: anyio.Event | None = None
        self._stopped = False
        self._wake: Callable[[Callable[[], None]], object] | None = None
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
        dealt_s = perf_counter() - self._taken_at
        if dealt_s > 10 * QUICK_S:
            self._depth = max(2, self._depth // 2)
        elif dealt_s < QUICK_S and self._border.empty():
            self._depth = min(2 * self._depth, self._most)
        self._waiting = True
        found = self._border.get()
        self._waiting = False
        self._taken_at = perf_counter()
        return found

    def dealt_with(self, items: int) -> None:
        """Say that a list has been handed out."""
        self._dealt += items
        room = self._room
        if room is not None and self._wake is not None:
            self._room = None
            self._signal(room)

    def stop(self) -> None:
        """End the loop and its thread; wait for that, though not for user code that is stuck."""
        self._stopped = True
        if self._stop is not None:
            self._signal(self._stop)
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(EXIT_S)

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
            if threading.main_thread().is_alive():  # else the interpreter exits: let no thread say that it was cut off
                self._border.put(ClosedError("the stream is closed"))

    async def _serve(self) -> None:
        self._wake = waker()
        self._stop = anyio.Event()
        if self._stopped:  # Ctrl-C came before there was anything to signal to
            return
        await supervise(self._begin, self._stop, self._gate)

    def _begin(self, tasks: Tasks) -> None:
        try:
            flow: Flow[T] = self._opening.flow(tasks)
        except Exception as failure:  # out of the task group's reach, which would wrap it
            self._begun.put(failure)
            if self._stop is not None:
                self._stop.set()
            return
        self._begun.put(flow.state)
        tasks.start(lambda: self._feed(flow), "border", lambda: None)

    async def _feed(self, flow: Flow[T]) -> None:
        """Carry lists across the border, then the end or the failure."""
        end: BaseException | None = None
        try:
            while True:
                room = await self._wait_room()
                began = perf_counter()
                if (chunk := await flow.pull(room)) is None:
                    break
                self._sent += len(chunk.items)
                self._border.put(chunk)
                if perf_counter() - began > SLOW_ITEM_S * len(chunk.items):
                    self._hand_over()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            end = failure
        finally:
            with anyio.CancelScope(shield=True):
                await flow.aclose()
        self._border.put(end)

    def _hand_over(self) -> None:
        """Behind a list that took long, let a consumer that waits for it run.

        A thread that is woken loses the race for the GIL against a loop that lets go of it for a microsecond now and
        then: behind a slow sync map, 500 items were made before the first was handed out.
        """
        stop = perf_counter() + QUICK_S
        while self._waiting and perf_counter() < stop:
            sleep(0)

    async def _wait_room(self) -> int:
        while (room := self._depth - (self._sent - self._dealt)) < 1:
            event = self._room = anyio.Event()
            if self._depth - (self._sent - self._dealt) < 1:  # the other thread may just have made room
                await event.wait()
        return min(max(1, self._depth // 2), room, LIST_ITEMS)
