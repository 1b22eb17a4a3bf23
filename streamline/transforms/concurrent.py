"""Calls a function on many items at once, in tasks or in threads.

A job has k long-lived workers, one task that feeds them and one that delivers. Workers claim inputs in order; the
deliverer sends what is due as one list whenever it is notified. No task is started per item. `resize` changes k: more
workers are started, or nothing is claimed until as many as there are too many have come back from their calls.

Success: the feeder sees the end, the workers run dry, the deliverer sends the last list, the channel finishes.
Failure of an item: nothing more is started; ordered, what comes before it is finished and delivered; unordered, what
runs; then the channel fails. A skipped item keeps its place in the order, and is counted when it would have been
delivered. Failure of the upstream: everything admitted is finished and delivered first.
Cancellation: the job's task group is cancelled and the upstream closed under a shield. Snapshot: the states travel
with the results.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Generic, TypeVar, cast

import anyio
import anyio.lowlevel

from streamline.core.blame import blame, cancellation_requested
from streamline.core.capacity import LIST_ITEMS
from streamline.core.channel import Channel
from streamline.core.counters import StageMeter, TimedCall
from streamline.core.driver import into
from streamline.core.error_policy import Failure, Skips
from streamline.core.flow import Chunk, Flow, Site
from streamline.core.gate import resting
from streamline.core.limits import Limit, StagePermits
from streamline.core.pace import SLICE_S, Pace, call_all, check_awaited
from streamline.core.replay import FailedCall
from streamline.core.tasks import Starter
from streamline.core.threads import waker
from streamline.errors import PlanTypeError, ResumeError
from streamline.transforms.completion_order import AdmittedInputs, Delivery, SkippedResult
from streamline.transforms.retry import RetriedCalls, Retry

In = TypeVar("In")
Out = TypeVar("Out")

LEAST_S = 0.001
"""Seconds of work in a thread from which on a call isn't made longer. One costs the event loop some 0.1 ms; but the
results of its first items wait for the last, which may suddenly take long."""

MANY = 16
"""Results in a turn of the event loop from which on those of the next turn are waited for: a hand-over to the consumer
costs as much as some 20 short calls."""


class CallPool(ABC, Generic[In, Out]):
    """The job of one concurrent map.

    Args:
      stage: as printed in notes.
      upstream: opened; closed by this job.
      channel: of the results. Its capacity bounds everything between the admission of an input and the consumer.
      workers: calls, or threads, at once.
      skips: items skipped because of errors; None: none are.
      order: in which results leave.
      meter: of this stage; None: nothing is counted.
      retry: when a failed call is made again; None: never.
      limit: bounds its calls together with others'; None: nothing does.

    Attributes:
      claims_each: calls claimed by each worker: one runs, the others are queued.
      on_resize: called with how many calls at once there are from now on; None: not called.
    """

    on_resize: Callable[[int], None] | None = None

    claims_each: ClassVar[int] = 1

    def __init__(
        self,
        fn: Callable[[In], Any],
        stage: str,
        upstream: Flow[In],
        channel: Channel[Out],
        site: Site,
        workers: int,
        order: Delivery[In, Out],
        skips: Skips | None = None,
        meter: StageMeter | None = None,
        retry: Retry | None = None,
        limit: Limit | None = None,
    ) -> None:
        self._fn = fn
        self._stage = stage
        self._upstream = upstream
        self._channel = channel
        self._site = site
        self._workers = workers
        self._order = order
        self._skips = skips
        order.on_skip = self._skip
        self._meter = meter or StageMeter(stage, "", site.shard, workers)
        self._meter.slots = self._slots = [0.0] * (workers * self.claims_each)
        self._unused = deque(range(len(self._slots)))  # slots without a worker
        self._surplus = 0  # workers that are to end
        self._start_workers: Callable[[], None] | None = None  # while the job runs
        self._permits: StagePermits | None = None
        if limit is not None:
            gate, start = site.tasks.gate, site.tasks.start
            self._permits = StagePermits(site.tasks.session.limits.permits(limit, gate, start))
            self._meter.details_from(self._permits.details)
        self._retried: RetriedCalls[In, Out] | None = None
        if retry is not None:
            self._retried = RetriedCalls(fn, retry, site.tasks.gate, self._permits, self._calling)
            self._meter.details_from(self._retried.details)
        self._full = False
        self._parts: deque[AdmittedInputs[In]] = deque()
        self._part: AdmittedInputs[In] | None = None
        self._index = 0
        self._stop = 0  # items of the part that may be claimed: all of them, unless items must not move
        self._idle: list[anyio.Event] = []
        self._running = 0
        self._fed = False
        self._failure: BaseException | None = None
        self._failed_at: tuple[AdmittedInputs[In], int] | None = None
        self._news = anyio.Event()
        self._notified, self._notified_at = False, 0.0
        self._delivered: anyio.Event | None = None

    async def run(self) -> None:
        """Run the job; raises nothing but its own cancellation."""
        await into(self._channel, self._upstream, self._run)

    async def _run(self) -> None:
        gate, group = self._site.tasks.gate, anyio.create_task_group()
        gate.on_pause(self._hold, self._release)
        name = f"{self._stage} of shard {self._site.shard}"
        try:
            with closing(Starter(group)) as tasks:
                async with group:
                    feeder = f"feeder of {self._stage}"
                    tasks.start(partial(gate.participate, f"{feeder} of shard {self._site.shard}", self._feed), feeder)
                    self._start_workers = partial(self._start, tasks, name)
                    self._start_workers()
                    try:
                        await self._deliver()
                    finally:
                        self._start_workers = None
                    group.cancel_scope.cancel()
        except BaseExceptionGroup as failures:
            if failures.subgroup(MemoryError) is None:
                raise
            raise MemoryError(f"no memory is left for the calls at once of {name}") from failures
        finally:
            gate.forget_pause(self._hold)
            if self._retried is not None:
                self._retried.stop()
        if self._failure is not None:
            raise self._failure

    def _start(self, tasks: Starter, name: str) -> None:
        """Start a worker for each slot that has none, as far as there may be so many."""
        while self._working < self._workers * self.claims_each:
            work = partial(self._work, self._unused.popleft())
            tasks.start(partial(self._site.tasks.gate.participate, name, work), self._stage)

    @property
    def _working(self) -> int:
        """Workers that there are, and that are to stay."""
        return len(self._slots) - len(self._unused) - self._surplus

    def resize(self, workers: int) -> None:
        """Make so many calls at once from now on; those at work are finished, and nothing is claimed before.

        In the event loop's thread.
        """
        self._workers = self._meter.concurrency = workers
        if self.on_resize is not None:
            self.on_resize(workers)
        more = workers * self.claims_each - len(self._slots)
        if more > 0:
            self._unused.extend(range(len(self._slots), len(self._slots) + more))
            self._slots.extend([0.0] * more)
        if self._start_workers is None:
            return
        excess = self._working - workers * self.claims_each
        if excess >= 0:
            self._surplus += excess
        else:
            self._surplus = max(0, self._surplus + excess)
            self._start_workers()
        if self._surplus:
            self._stop = 0
            self._wake(len(self._idle))
        else:
            self._claim_again()
        if self._delivered is not None:  # more may be admitted beyond the oldest input that isn't done
            self._delivered.set()

    def _ends(self, slot: int) -> bool:
        """Whether a worker that has nothing to claim is to end."""
        if not self._surplus:
            return False
        self._surplus -= 1
        self._unused.append(slot)
        if not self._surplus:
            self._claim_again()
        return True

    def _claim_again(self) -> None:
        """Let claims go on, unless items must not move."""
        if not self._site.tasks.gate.holding:
            self._release()

    async def _feed(self) -> None:
        position, gate = 0, self._site.tasks.gate
        try:
            while not self._fed:
                self._full = True
                room = min(await self._channel.wait_room(), LIST_ITEMS)
                while not (allowed := self._order.room(position)):
                    self._delivered = anyio.Event()
                    await resting(self._delivered.wait())
                self._full = False
                if gate.holding:
                    await gate.passage()
                chunk = await self._upstream.pull(min(room, allowed))
                if gate.holding:
                    await gate.passage()
                if chunk is None or self._fed:
                    break
                self._admit(chunk, position)
                position += len(chunk.items)
                del chunk  # release the inputs while the next are made
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

    def _run_parts(self, parts: list[AdmittedInputs[In]]) -> None:
        count = sum(len(part.items) for part in parts)
        self._channel.reserve(count)
        self._parts.extend(parts)
        self._wake(count)

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            self._idle.pop().set()

    def _hold(self) -> None:
        """Stop all claims."""
        self._stop = 0

    def _release(self) -> None:
        """Resume claims, once workers that are to end have."""
        if self._part is not None and not self._surplus:
            self._stop = len(self._part.items)
        self._wake(len(self._idle))

    def _next_part(self) -> bool:
        """Make the next part with items to run the current one; return whether there is one."""
        if self._site.tasks.gate.holding:
            return False
        while self._parts:
            self._part, self._index = self._parts.popleft(), 0
            self._stop = len(self._part.items)
            if self._part.items:
                return True
        if self._exhausted:
            self._part, self._stop = None, 0  # release its items while the next are made
        return False

    def _notify(self) -> None:
        """Wake the deliverer."""
        if not self._notified:
            self._notified, self._notified_at = True, perf_counter()
            self._news.set()

    async def _wait_claim(self, slot: int) -> None:
        """Wait for something to claim; after the end, for what was held back until others are done."""
        if self._fed:
            self._notify()
        event = anyio.Event()
        counts = self._working - len(self._idle) <= self._workers  # else it is only that nothing waits for a worker
        self._idle.append(event)
        if counts:
            self._meter.wait_begins("wait_output" if self._full else "wait_input", slot)
        try:
            await resting(event.wait())
        finally:
            if counts:
                self._meter.wait_ends(slot)

    def _fail(self, part: AdmittedInputs[In], index: int, error: BaseException) -> None:
        """Skip the failed item, or start nothing more. Of several failures, the first in order is reported."""
        item, position = part.items[index], part.states[index]
        error = blame(error, self._stage, self._site, position, FailedCall(self._fn, item))
        if self._skips is not None:
            verdict = self._skips.judge(error, item, position)
            if isinstance(verdict, Failure):
                self._order.num_skipped += 1
                if self._order.put(part, index, cast("Out", SkippedResult(verdict))):
                    self._notify()
                return
            error = verdict
        if self._failed_at is None or part.first + index < self._failed_at[0].first + self._failed_at[1]:
            self._failed_at = (part, index)
            self._failure = error
        self._fed = True
        self._parts.clear()
        self._part, self._stop = None, 0
        self._wake(len(self._idle))
        self._notify()

    def _skip(self, failure: Failure) -> None:
        """Count a skipped item, and free its place in the channel."""
        assert self._skips is not None
        self._skips.add(failure)
        self._channel.freed(1, 0)

    async def _deliver(self) -> None:
        """Send on what is due, until all is sent or a failure is due."""
        while True:
            self._news, self._notified = anyio.Event(), False
            while (chunk := self._order.take()) is not None:
                self._meter.count(chunk.items)
                self._channel.post(chunk.counting(self._skips))
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
            await resting(self._news.wait())
            await self._let_more_come()
            if self._site.tasks.gate.holding:
                await self._site.tasks.gate.passage()

    async def _let_more_come(self) -> None:
        """Give calls more turns while each brings many results in little time, up to a quarter of the channel."""
        until, before, most = self._notified_at + SLICE_S, 0, self._channel.capacity.items // 4
        while before + MANY <= (ready := self._order.ready) <= most and not self._failure and perf_counter() < until:
            before = ready
            await anyio.lowlevel.checkpoint()

    @property
    def _exhausted(self) -> bool:
        return self._part is None or self._index == len(self._part.items)

    def _calling(self, fn: Callable[[In], Any]) -> Callable[[In], Any]:
        """Return what calls `fn` and, if calls need permits, gives one back."""
        return fn

    @abstractmethod
    async def _work(self, slot: int) -> None:
        """Claim and run items until cancelled, as one of `workers`."""


class TaskPool(CallPool[In, Out]):
    """Calls of an async function, each in the task of a worker."""

    def _calling(self, fn: Callable[[In], Any]) -> Callable[[In], Any]:
        return fn if self._permits is None else partial(_holding, self._permits, fn)

    async def _permitted(self, permits: StagePermits, part: AdmittedInputs[In], index: int) -> bool:
        """Wait for a permit; False: an item before this one has failed meanwhile, so that its call isn't made."""
        await permits.wait()
        failed = self._failed_at
        if failed is not None and part.first + index > failed[0].first + failed[1]:
            permits.release(unused=True)
            return False
        return True

    async def _work(self, slot: int) -> None:
        fn: Callable[[In], Awaitable[Out]]
        fn = self._calling(self._fn) if self._retried is None else self._retried.acall
        permits = self._permits
        put, pace, calls = self._order.put, Pace(), 0
        slots, worked = self._slots, self._meter.worked
        while True:
            part, index = self._part, self._index
            if part is None or index >= self._stop:
                del part  # not kept while waiting
                if self._ends(slot):
                    return
                if not self._next_part():
                    await self._wait_claim(slot)
                continue
            self._index = index + 1
            self._running += 1
            if permits is not None and not (permits.acquire_nowait() or await self._permitted(permits, part, index)):
                self._running -= 1
                self._notify()
                continue
            call_began = slots[slot] = perf_counter()
            try:
                result = await fn(part.items[index])
            except BaseException as error:
                if cancellation_requested(error):
                    raise
                self._fail(part, index, error)
            else:
                if put(part, index, result) and not self._notified:
                    self._notify()
                del result
            slots[slot] = 0.0
            worked(call_began, perf_counter())
            self._running -= 1
            calls += 1
            if not calls % 16:
                await pace.breathe()  # an async function need not ever wait


async def _holding(permits: StagePermits, fn: Callable[[In], Awaitable[Out]], item: In) -> Out:
    """Await a call that has a permit, and give it back."""
    try:
        return await fn(item)
    finally:
        permits.release()


class LimitedThreads(TaskPool[In, Out]):
    """Calls of a sync function in threads, one item a call. No thread waits for a permit, or for another try."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._threads = self._site.tasks.threads.share(self._workers)

    def resize(self, workers: int) -> None:
        super().resize(workers)
        self._threads.resize(workers)

    def _calling(self, fn: Callable[[In], Any]) -> Callable[[In], Any]:
        return partial(self._in_thread, fn)

    async def _in_thread(self, fn: Callable[[In], Out], item: In) -> Out:
        assert self._permits is not None
        call = _HoldingCall(fn, item, self._permits)
        try:
            results, error = await self._threads.run(call)
        finally:
            call.drop()
        if error is not None:
            raise error
        check_awaited(self._stage, results, "give .map the `async def`, without executor=")
        return results[0]


class _HoldingCall(Generic[In, Out]):
    """A call in a thread that has a permit until it is over, also where its result isn't waited for any more."""

    def __init__(self, fn: Callable[[In], Out], item: In, permits: StagePermits) -> None:
        self._fn = fn
        self._item = item
        self._permits = permits
        self._wake = waker()
        self._begin = [True]  # taken by the thread, or by who drops the call before

    def __call__(self) -> tuple[list[Out], BaseException | None]:
        try:
            self._begin.pop()
        except IndexError:
            return [], None
        try:
            return call_all(self._fn, [self._item])
        finally:
            self._wake(self._permits.release)

    def drop(self) -> None:
        """Give the permit back if the call hasn't begun, and won't."""
        if self._begin:
            with suppress(IndexError):  # the thread was quicker
                self._begin.pop()
                self._permits.release(unused=True)


class ThreadedPool(CallPool[In, Out]):
    """Calls of a sync function in threads, a list a call, as long as some milliseconds of work.

    After each call another one is queued, so that its thread continues while the results travel to the event loop.
    Items that a call gives back (it took long enough, one was skipped, a pause began) go to another call. With one
    thread, the queued call lets them go first, so that calls keep the order of their inputs.
    """

    claims_each = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._threads = self._site.tasks.threads.share(self._workers)
        self._end = math.inf  # of what is called: the position of the first item that has failed
        self._turn = math.inf  # with one thread: the position of an item that was given back, and comes first

    def resize(self, workers: int) -> None:
        super().resize(workers)
        self._threads.resize(workers)

    async def _work(self, slot: int) -> None:
        limit = 1
        while True:
            part, start = self._part, self._index
            if part is None or start >= self._stop:
                del part  # not kept while waiting
                if self._ends(slot):
                    return
                if not self._next_part():
                    await self._wait_claim(slot)
                continue
            stop = self._index = min(start + limit, len(part.items))
            self._running += 1
            took_s = await self._run_claimed(part, start, stop, slot)
            self._running -= 1
            limit = self._next_limit(limit, took_s)

    async def _run_claimed(self, part: AdmittedInputs[In], start: int, stop: int, slot: int) -> float:
        """Call the function of the items that were claimed, and return the seconds that it took."""
        took_s = 0.0
        while start < stop and self._wanted(part, start):
            call = TimedCall(partial(self._call, part, start, stop), self._slots, slot)
            try:
                results, error = await self._threads.run(call)
                check_awaited(self._stage, results, "give .map the `async def`, without executor=")
            except (MemoryError, PlanTypeError) as failure:
                results, error = [], failure
            self._meter.worked(call.began, call.ended)
            took_s += call.ended - call.began
            for index, result in enumerate(results, start):
                if self._order.put(part, index, result):
                    self._notify()
            start += len(results)
            if self._site.tasks.gate.holding:
                await self._site.tasks.gate.passage()
            if error is not None:
                if start >= stop:
                    raise error  # Ctrl-C after the last call: no item's failure
                self._fail(part, start, error)
                if self._failed_at is not None:
                    self._stops_at(*self._failed_at)
                start += 1
        return took_s

    def _call(self, part: AdmittedInputs[In], start: int, stop: int) -> tuple[list[Out], BaseException | None]:
        """Call the function of some items, in a thread; of none, if in the meantime they aren't to be called."""
        if not self._wanted(part, start):
            return [], None
        if self._turn >= self._end:  # nor is that one wanted
            self._turn = math.inf
        if self._site.tasks.gate.holding or self._turn < part.first + start:
            self._give_back(part, start)
            return [], None
        self._turn = math.inf
        fn = self._fn if self._retried is None else self._retried.call
        results, error = call_all(fn, part.items[start:stop])
        if error is not None and self._skips is None:
            self._stops_at(part, start + len(results))
        elif (rest := start + len(results) + (error is not None)) < stop:
            self._give_back(part, rest)
        return results, error

    def _give_back(self, part: AdmittedInputs[In], index: int) -> None:
        if self._workers == 1:
            self._turn = min(self._turn, part.first + index)

    def _stops_at(self, part: AdmittedInputs[In], index: int) -> None:
        """Note that an item has failed before the event loop sees it: the thread is in its next call by then."""
        self._end = min(self._end, part.first + index)

    def _wanted(self, part: AdmittedInputs[In], index: int) -> bool:
        """Whether a claimed item is to be called: items after a failed one aren't."""
        return part.first + index < self._end

    def _next_limit(self, limit: int, took_s: float) -> int:
        """Return how many items the next call gets: 1 to 4 ms of work, but no more than one worker's share."""
        share = max(1, self._channel.capacity.items // (4 * self._workers))
        return min(share, limit * 2) if took_s < LEAST_S else max(1, limit // 2) if took_s > 4 * LEAST_S else limit
