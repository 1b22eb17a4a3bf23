"""Calling a function on many items at once: in tasks, or in threads.

A job of k long-lived workers, one task that feeds them and one that delivers. Workers claim inputs in order; the
deliverer sends on what is due, as one list, whenever it is woken. Nothing is started per item.

Success: the feeder sees the end, the workers run dry, the deliverer sends the last list, the channel finishes.
Failure of an item: nothing more is started; ordered, what comes before it is finished and delivered; unordered, what
runs; then the channel fails. Failure of the upstream: everything admitted is finished and delivered first.
Cancellation: the job's task group is cancelled and the upstream closed under a shield. Snapshot: the states travel
with the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

import anyio

from streamline.blame import blame, cancellation_requested
from streamline.channel import Channel
from streamline.driver import into
from streamline.errors import ResumeError
from streamline.flow import LIST_ITEMS, Chunk, Flow, Site
from streamline.pace import Pace, call_all
from streamline.states import Shifted, State, States
from streamline.tasks import Starter

__all__ = ["Delivery", "InOrder", "Part", "Pool", "TaskPool", "ThreadedPool"]

In = TypeVar("In")
Out = TypeVar("Out")

PENDING: Any = object()


class Part(Generic[In]):
    """Consecutive inputs that were admitted together.

    Attributes:
      first: the position of `items[0]` in the upstream, counted from where it was opened.
    """

    __slots__ = ("after", "first", "items", "results", "states")

    def __init__(self, chunk: Chunk[In], first: int) -> None:
        self.items = chunk.items
        self.states: States = chunk.states
        self.after: State | None = chunk.after
        self.first = first
        self.results: list[Any] = [PENDING] * len(chunk.items)


class Delivery(ABC, Generic[In, Out]):
    """In which order results leave, and with which states. No I/O, no waiting."""

    def room(self, position: int) -> int:
        """Return how many inputs from `position` on the order allows to admit; 0: only after further deliveries."""
        return LIST_ITEMS

    @abstractmethod
    def admit(self, chunk: Chunk[In], position: int) -> list[Part[In]]:
        """Take note of a chunk whose first item has `position`, and return what of it has to run."""

    @abstractmethod
    def put(self, part: Part[In], index: int, result: Out) -> bool:
        """Take the result of item `index` of `part`; say whether something has become due."""

    def released(self) -> list[Part[In]]:
        """Return what was held back at the admission and has to run now."""
        return []

    @property
    def stranded(self) -> bool:
        """Whether a resume counted on inputs that have not come."""
        return False

    @abstractmethod
    def take(self) -> Chunk[Out] | None:
        """Return what is due; None if nothing is."""

    @abstractmethod
    def due(self, part: Part[In], index: int) -> bool:
        """Say whether a failure of item `index` of `part` may be reported although others still run."""


class InOrder(Delivery[In, Out]):
    """Results leave in the order of their inputs, with their inputs' states."""

    def __init__(self) -> None:
        self._parts: deque[Part[In]] = deque()
        self._next = 0

    def admit(self, chunk: Chunk[In], position: int) -> list[Part[In]]:
        part = Part(chunk, position)
        self._parts.append(part)
        return [part]

    def put(self, part: Part[In], index: int, result: Out) -> bool:
        part.results[index] = result
        return index == self._next and part is self._parts[0]

    def take(self) -> Chunk[Out] | None:
        if not self._parts:
            return None
        part, start = self._parts[0], self._next
        results, stop, end = part.results, start, len(part.results)
        while stop < end and results[stop] is not PENDING:
            stop += 1
        self._next = stop
        if stop == end:
            self._parts.popleft()
            self._next = 0
        elif stop == start:
            return None
        return Chunk(results[start:stop], Shifted(part.states, start), part.after if stop == end else None)

    def due(self, part: Part[In], index: int) -> bool:
        return bool(self._parts) and part is self._parts[0] and index == self._next


class Pool(ABC, Generic[In, Out]):
    """The job of one concurrent map.

    Args:
      stage: as printed in notes.
      upstream: opened; closed by this job.
      channel: where results go. Its capacity bounds everything between the admission of an input and the consumer.
      workers: calls, or threads, at once.
    """

    def __init__(
        self, stage: str, upstream: Flow[In], channel: Channel[Out], site: Site, workers: int, order: Delivery[In, Out]
    ) -> None:
        self._stage = stage
        self._upstream = upstream
        self._channel = channel
        self._site = site
        self._workers = workers
        self._order = order
        self._parts: deque[Part[In]] = deque()
        self._part: Part[In] | None = None
        self._index = 0
        self._idle: list[anyio.Event] = []
        self._running = 0
        self._fed = False
        self._failure: BaseException | None = None
        self._failed_at: tuple[Part[In], int] | None = None
        self._news = anyio.Event()
        self._notified = False
        self._delivered: anyio.Event | None = None

    async def run(self) -> None:
        """Do the job: never raises but for its own cancellation."""
        await into(self._channel, self._upstream, self._run)

    async def _run(self) -> None:
        group = anyio.create_task_group()
        with closing(Starter(group)) as tasks:
            async with group:
                tasks.start(self._feed, f"feeder of {self._stage}")
                for _ in range(self._workers):
                    tasks.start(self._work, self._stage)
                await self._deliver()
                group.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _feed(self) -> None:
        position = 0
        try:
            while not self._fed:
                await self._site.tasks.gate.passage()
                room = min(await self._channel.wait_room(), LIST_ITEMS)
                while not (allowed := self._order.room(position)):
                    self._delivered = anyio.Event()
                    await self._delivered.wait()
                chunk = await self._upstream.pull(min(room, allowed))
                if chunk is None or self._fed:
                    break
                self._admit(chunk, position)
                position += len(chunk.items)
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self._failure = self._failure or failure
        self._fed = True
        self._wake(len(self._idle))
        self._notify()

    def _admit(self, chunk: Chunk[In], position: int) -> None:
        parts = self._order.admit(chunk, position)
        self._run_parts(parts)
        if not parts or not chunk.items:
            self._notify()  # nothing to run, but perhaps progress to deliver

    def _run_parts(self, parts: list[Part[In]]) -> None:
        count = sum(len(part.items) for part in parts)
        self._channel.reserve(count)
        self._parts.extend(parts)
        self._wake(count)

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            self._idle.pop().set()

    def _next_part(self) -> bool:
        """Go on with the next part that has items to run; say whether there is one."""
        while self._parts:
            self._part, self._index = self._parts.popleft(), 0
            if self._part.items:
                return True
        return False

    def _notify(self) -> None:
        """Wake the deliverer."""
        if not self._notified:
            self._notified = True
            self._news.set()

    async def _wait_claim(self) -> None:
        """Wait for something to claim; also behind the end, for what was held back until others are done."""
        if self._fed:
            self._notify()
        event = anyio.Event()
        self._idle.append(event)
        await event.wait()

    def _fail(self, part: Part[In], index: int, error: BaseException) -> None:
        """Take note that an item failed: start nothing more. Of several, the first in order counts."""
        if self._failed_at is None or part.first + index < self._failed_at[0].first + self._failed_at[1]:
            self._failed_at = (part, index)
            self._failure = blame(error, self._stage, self._site, part.states[index])
        self._fed = True
        self._parts.clear()
        self._part = None
        self._wake(len(self._idle))
        self._notify()

    async def _deliver(self) -> None:
        """Send on what is due, until all is sent or a failure is due."""
        while True:
            self._news, self._notified = anyio.Event(), False
            while (chunk := self._order.take()) is not None:
                self._channel.post(chunk)
            if self._delivered is not None:
                self._delivered.set()
            if self._failed_at is None:
                self._run_parts(self._order.released())
            if self._failed_at is not None and self._order.due(*self._failed_at):
                return
            if self._fed and not self._running and not self._parts and self._exhausted:
                if self._failure is None and self._order.stranded:
                    self._failure = ResumeError(f"{self._stage}: fewer items came than when the snapshot was taken")
                return
            await self._news.wait()

    @property
    def _exhausted(self) -> bool:
        return self._part is None or self._index == len(self._part.items)

    @abstractmethod
    async def _work(self) -> None:
        """Claim and run items until cancelled."""


class TaskPool(Pool[In, Out]):
    """Calls of an async function, each in the task of a worker."""

    def __init__(self, fn: Callable[[In], Awaitable[Out]], *args: Any) -> None:
        super().__init__(*args)
        self._fn = fn

    async def _work(self) -> None:
        fn, put, pace, calls = self._fn, self._order.put, Pace(), 0
        while True:
            part, index = self._part, self._index
            if part is None or index == len(part.items):
                if not self._next_part():
                    await self._wait_claim()
                continue
            self._index = index + 1
            self._running += 1
            try:
                result = await fn(part.items[index])
            except BaseException as error:
                if cancellation_requested(error):
                    raise
                self._fail(part, index, error)
            else:
                if put(part, index, result) and not self._notified:
                    self._notify()
            self._running -= 1
            calls += 1
            if not calls % 16:
                await pace.breathe()  # an async function need not ever wait


class ThreadedPool(Pool[In, Out]):
    """Calls of a sync function in threads, a list a call, as long as about two milliseconds of work."""

    def __init__(self, fn: Callable[[In], Out], *args: Any) -> None:
        super().__init__(*args)
        self._fn = fn

    async def _work(self) -> None:
        limit = 1
        while True:
            part, start = self._part, self._index
            if part is None or start == len(part.items):
                if not self._next_part():
                    await self._wait_claim()
                continue
            items = part.items[start : start + limit]
            self._index = start + len(items)
            self._running += 1
            began = perf_counter()
            error: BaseException | None = None
            while items and error is None:
                results, error = await self._site.tasks.threads.run(partial(call_all, self._fn, items))
                for index, result in enumerate(results, start):
                    if self._order.put(part, index, result):
                        self._notify()
                start, items = start + len(results), items[len(results) :]
            self._running -= 1
            if error is not None:
                self._fail(part, start, error)
            limit = self._next_limit(limit, perf_counter() - began)

    def _next_limit(self, limit: int, took_s: float) -> int:
        """Return how many items the next call gets: about 2 ms of work, but no more than one worker's share."""
        share = max(1, self._channel.capacity // (2 * self._workers))
        return min(share, limit * 2) if took_s < 0.001 else max(1, limit // 2) if took_s > 0.004 else min(share, limit)
