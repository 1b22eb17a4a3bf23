"""Calls a function on many items at once, in tasks or in threads.

                pull             claim              put               take      post
      upstream ─────▶ Admission ──────▶ k workers ─────▶ Delivery ────────▶ Deliverer ────▶ channel
                      lists, in                          in order, or       wakes at
                      order                              as completed       news

The channel's capacity bounds all that is between the admission of an input and the consumer. Workers are long-lived: no
task is started per item. `resize` says how many there are to be: it starts those that are missing, and each worker
looks after its call whether there are too many.

Success: the feeder sees the end, the workers run dry, the deliverer sends the last list, the channel finishes.
Failure of an item: nothing more is started; ordered, what comes before it is finished and delivered; unordered, what
runs; then the channel fails. A skipped item keeps its place in the order, and is counted when it would have been
delivered. Failure of the upstream: everything admitted is finished and delivered first.
Cancellation: the job's task group is cancelled and the upstream closed under a shield. Snapshot: the states travel
with the results.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypeVar, cast

import anyio
import anyio.lowlevel

from streamline.core.blame import blame, cancellation_requested
from streamline.core.capacity import LIST_ITEMS
from streamline.core.channel import Channel
from streamline.core.driver import fill_channel
from streamline.core.error_policy import Failure, Skips
from streamline.core.flow import Flow, Site
from streamline.core.gate import Gate, wait_at_rest
from streamline.core.limits import CallLimits, Limit, StagePermits
from streamline.core.meters import StageMeter
from streamline.core.pace import SLICE_S, Pace, call_all, check_no_coroutines
from streamline.core.replay import FailedCall
from streamline.core.tasks import Starter
from streamline.core.threads import threadsafe_call
from streamline.errors import PlanTypeError, ResumeError
from streamline.transforms.completion_order import AdmittedInputs, Delivery, SkippedResult
from streamline.transforms.retry import RetriedCalls, Retry

In = TypeVar("In")
Out = TypeVar("Out")

Claim: TypeAlias = tuple[AdmittedInputs[In], int, int]
"""A list of inputs, and which of them, [start, stop), are its holder's to call."""

LEAST_S = 0.001
"""Seconds of work in a thread from which on a claim isn't made longer. One costs the event loop some 0.1 ms; but the
results of its first items wait for the last, which may suddenly take long."""

MANY_READY = 16
"""Results in a turn of the event loop from which on those of the next turn are waited for: a hand-over to the consumer
costs as much as some 20 short calls."""

NOT_AWAITED = "give .map the `async def`, without executor="


@dataclass(frozen=True, kw_only=True)
class Calls(Generic[In]):
    """What a concurrent map calls.

    Attributes:
      stage: as printed in notes.
      at_once: calls, or threads, at once.
      retry: when a failed call is made again; None: never.
      limit: bounds its calls together with others'; None: nothing does.
      skips: items skipped because of errors; None: none are.
      on_resize: called with how many calls there are at once from now on.
    """

    fn: Callable[[In], Any]
    stage: str
    at_once: int
    retry: Retry | None
    limit: Limit | None
    skips: Skips | None
    on_resize: Callable[[int], None]


class Admission(Generic[In]):
    """Inputs from their admission until workers claim them, in order.

    Args:
      tell: called when there may be something to deliver.

    Attributes:
      workers: how many claim.
      ended: nothing more is admitted.
      failure: what the upstream failed with.
      full: nothing is admitted until results leave.
      held: nothing may be claimed.
    """

    def __init__(self, channel: Channel[Any], order: Delivery[In, Any], tell: Callable[[], None]) -> None:
        self.workers = 0
        self.ended = self.full = self.held = False
        self.failure: BaseException | None = None
        self._channel = channel
        self._order = order
        self._tell = tell
        self._lists: deque[AdmittedInputs[In]] = deque()
        self._index = 0  # in the first list
        self._waiting: list[anyio.Event] = []  # workers
        self._delivered: anyio.Event | None = None

    async def feed(self, upstream: Flow[In], gate: Gate) -> None:
        """Admit all inputs, as there is room for them."""
        position = 0
        try:
            while not self.ended:
                self.full = True
                room = min(await self._channel.wait_room(), LIST_ITEMS)
                while not (allowed := self._order.room(position)):
                    self._delivered = anyio.Event()
                    await wait_at_rest(self._delivered.wait())
                self.full = False
                if gate.holding:
                    await gate.passage()
                chunk = await upstream.pull(min(room, allowed))
                if gate.holding:
                    await gate.passage()
                if chunk is None or self.ended:
                    break
                if not self.add(self._order.admit(chunk, position)):
                    self._tell()  # nothing to call, but perhaps progress to deliver
                position += len(chunk.items)
                del chunk  # release the inputs while the next are made
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self.failure = failure
        self.ended = True
        self._tell()

    def look_again(self) -> None:
        """Say that results have left, or that more may be in flight."""
        if self._delivered is not None:
            self._delivered.set()

    def add(self, lists: list[AdmittedInputs[In]]) -> int:
        """Let workers claim these inputs; return how many there are."""
        count = sum(len(part.items) for part in lists)
        self._channel.reserve(count)
        self._lists.extend(part for part in lists if part.items)
        self.wake(count)
        return count

    def claim(self, most: int = 1) -> Claim[In] | None:
        """Return the next inputs, at most so many; None: there are none now."""
        lists, start = self._lists, self._index
        if self.held or not lists:
            return None
        part, stop = lists[0], start + most
        if stop < len(part.items):
            self._index = stop
        else:
            stop, self._index = len(part.items), 0
            lists.popleft()
        return part, start, stop

    async def wait(self) -> None:
        """Wait, as a worker, until there may be something to claim, or too many workers."""
        event = anyio.Event()
        self._waiting.append(event)
        if self.ended:
            self._tell()
        await wait_at_rest(event.wait())

    @property
    def over(self) -> bool:
        """Whether all calls have been made."""
        return self.ended and not self._lists and len(self._waiting) == self.workers

    def join(self) -> None:
        """Count a worker from now on."""
        self.workers += 1

    def leave(self) -> None:
        """Count it no more."""
        self.workers -= 1
        if self.ended:
            self._tell()

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        self.wake()

    def stop(self) -> None:
        """Admit nothing more, and drop what wasn't claimed."""
        self.ended = True
        self._lists = deque()  # another one: a thread may be about to claim
        self.wake()
        self._tell()

    def wake(self, most: int | None = None) -> None:
        """Let workers look again, at most so many; None: all that wait."""
        for _ in range(len(self._waiting) if most is None else min(most, len(self._waiting))):
            self._waiting.pop().set()


class Deliverer(Generic[In, Out]):
    """Takes results and failures of calls, and sends on what is due, as one list whenever there is news."""

    def __init__(
        self, calls: Calls[In], site: Site, channel: Channel[Out], order: Delivery[In, Out], meter: StageMeter
    ) -> None:
        self.admission = Admission[In](channel, order, self.tell)
        self._calls = calls
        self._site = site
        self._channel = channel
        self._order = order
        self._meter = meter
        self._failed_at: int | None = None
        self._failure: BaseException | None = None
        self._event = anyio.Event()
        self._news_at: float | None = None  # when the first news came since it last looked
        order.on_skip = self._skip

    def tell(self) -> None:
        """Say that there may be something to deliver."""
        if self._news_at is None:
            self._news_at = perf_counter()
            self._event.set()

    def put(self, part: AdmittedInputs[In], index: int, result: Out) -> None:
        if self._order.put(part, index, result) and self._news_at is None:
            self.tell()

    def fail(self, part: AdmittedInputs[In], index: int, error: BaseException) -> None:
        """Skip the failed item, or let nothing more start. Of several failures, the first in order is reported."""
        item, position, skips = part.items[index], part.states[index], self._calls.skips
        error = blame(error, self._calls.stage, self._site, position, FailedCall(self._calls.fn, item))
        if skips is not None:
            verdict = skips.decide(error, item, position)
            if isinstance(verdict, Failure):
                self._order.num_skipped += 1
                self.put(part, index, cast("Out", SkippedResult(verdict)))
                return
            error = verdict
        if not self.is_late(part, index):
            self._failed_at = part.first + index
            self._failure = error
        self.admission.stop()

    def is_late(self, part: AdmittedInputs[In], index: int) -> bool:
        """Whether an item comes after one that has failed, so that it isn't called any more."""
        return self._failed_at is not None and part.first + index > self._failed_at

    def _skip(self, failure: Failure) -> None:
        """Count a skipped item, and free its place in the channel."""
        assert self._calls.skips is not None
        self._calls.skips.add(failure)
        self._channel.on_consumed(1, 0)

    async def run(self) -> BaseException | None:
        """Send on what is due, until all is sent or a failure is due; return that."""
        admission, order, gate = self.admission, self._order, self._site.tasks.gate
        while True:
            self._event, self._news_at = anyio.Event(), None
            while (chunk := order.take()) is not None:
                self._meter.count(chunk.items)
                self._channel.post(chunk.with_skip_counts(self._calls.skips))
            admission.look_again()
            if self._failed_at is None:
                admission.add(order.release_held())
            elif order.due(self._failed_at):
                return self._failure
            if admission.over:
                failure = self._failure or admission.failure
                if failure is None and order.stranded:
                    return ResumeError(f"{self._calls.stage}: fewer items came than when the snapshot was taken")
                return failure
            await wait_at_rest(self._event.wait())
            await self._let_more_come()
            if gate.holding:
                await gate.passage()

    async def _let_more_come(self) -> None:
        """Give calls more turns while each brings many results in little time, up to a quarter of the channel."""
        until, before, most = (self._news_at or 0.0) + SLICE_S, 0, self._channel.capacity.items // 4
        while (
            before + MANY_READY <= (ready := self._order.ready) <= most and not self._failure and perf_counter() < until
        ):
            before = ready
            await anyio.lowlevel.checkpoint()


class CallPool(ABC, Generic[In, Out]):
    """The job of one concurrent map: its workers, and what they need.

    Args:
      meter: of this stage; None: nothing is counted.
    """

    def __init__(
        self,
        calls: Calls[In],
        site: Site,
        channel: Channel[Out],
        order: Delivery[In, Out],
        meter: StageMeter | None = None,
    ) -> None:
        self._calls = calls
        self._site = site
        self._channel = channel
        self._meter = meter or StageMeter(calls.stage, "", site.shard, calls.at_once)
        self._results = Deliverer(calls, site, channel, order, self._meter)
        self._admission = self._results.admission
        self._at_once = calls.at_once
        self._free_slots: list[int] = []  # of the meter
        self._start: Callable[[], None] | None = None  # the workers that are missing, while the job runs
        self._permits: StagePermits | None = None
        self._retried: RetriedCalls[In, Out] | None = None
        tasks = site.tasks
        if calls.limit is not None:
            self._permits = StagePermits(
                tasks.session.services.get(CallLimits).permits(calls.limit, tasks.gate, tasks.start)
            )
            self._meter.details_from(self._permits.details)
        if calls.retry is not None:
            self._retried = RetriedCalls(calls.fn, calls.retry, tasks.gate, self._permits, self._wrap)
            self._meter.details_from(self._retried.details)

    async def run(self, upstream: Flow[In]) -> None:
        """Run the job, and close the upstream; raises nothing but its own cancellation."""
        await fill_channel(self._channel, upstream, partial(self._run, upstream))

    async def _run(self, upstream: Flow[In]) -> None:
        admission, gate, group = self._admission, self._site.tasks.gate, anyio.create_task_group()
        name, feeder = f"{self._calls.stage} of shard {self._site.shard}", f"feeder of {self._calls.stage}"
        gate.on_pause(admission.hold, admission.release)
        try:
            with closing(Starter(group)) as tasks:
                async with group:
                    feed = partial(admission.feed, upstream, gate)
                    tasks.start(partial(gate.participate, f"feeder of {name}", feed), feeder)
                    self._start = partial(self._start_workers, tasks, name)
                    self._start()
                    try:
                        failure = await self._results.run()
                    finally:
                        self._start = None
                    group.cancel_scope.cancel()
        except BaseExceptionGroup as failures:
            if failures.subgroup(MemoryError) is None:
                raise
            raise MemoryError(f"no memory is left for the calls at once of {name}") from failures
        finally:
            gate.forget_pause(admission.hold)
            admission.hold()  # threads may still be at work
            if self._retried is not None:
                self._retried.stop()
        if failure is not None:
            raise failure

    def _start_workers(self, tasks: Starter, name: str) -> None:
        slots, free = self._meter.slots, self._free_slots
        while self._admission.workers < self._at_once:
            if not free:
                free.append(len(slots))
                slots.append(0.0)
            self._admission.join()
            worker = partial(self._run_worker, free.pop())
            tasks.start(partial(self._site.tasks.gate.participate, name, worker), self._calls.stage)

    async def _run_worker(self, slot: int) -> None:
        await self._work(slot)
        self._free_slots.append(slot)
        self._admission.leave()

    def resize(self, at_once: int) -> None:
        """Make so many calls at once from now on; those at work are finished, and nothing is claimed before.

        In the event loop's thread.
        """
        self._at_once = self._meter.figures.concurrency = at_once
        self._calls.on_resize(at_once)
        if self._start is not None:
            self._start()
            self._admission.wake()  # those that are too many end
            self._admission.look_again()

    @property
    def _too_many(self) -> bool:
        """Whether a worker is to end."""
        return self._admission.workers > self._at_once

    async def _wait(self, slot: int) -> None:
        """Wait for something to claim; after the end, for what was held back until others are done."""
        self._meter.wait_begins("wait_output" if self._admission.full else "wait_input", slot)
        try:
            await self._admission.wait()
        finally:
            self._meter.wait_ends(slot)

    def _wrap(self, fn: Callable[[In], Any]) -> Callable[[In], Any]:
        """Return what calls `fn` and, if calls need permits, gives one back."""
        return fn

    @abstractmethod
    async def _work(self, slot: int) -> None:
        """Claim and run items, as one of the workers, until there are too many of these."""


class TaskPool(CallPool[In, Out]):
    """Calls of an async function, each in the task of a worker."""

    def _wrap(self, fn: Callable[[In], Any]) -> Callable[[In], Any]:
        return fn if self._permits is None else partial(_call_and_release, self._permits, fn)

    async def _work(self, slot: int) -> None:
        fn: Callable[[In], Awaitable[Out]]
        fn = self._wrap(self._calls.fn) if self._retried is None else self._retried.acall
        admission, put, permits = self._admission, self._results.put, self._permits
        slots, worked, pace, calls = self._meter.slots, self._meter.count_work, Pace(), 0
        while admission.workers <= self._at_once:  # `_too_many`, in fewer steps
            if (claim := admission.claim()) is None:
                await self._wait(slot)
                continue
            part, index, _ = claim
            if permits is not None and not permits.acquire_nowait():
                await permits.wait()
                if self._results.is_late(part, index):
                    permits.release(unused=True)
                    continue
            call_began = slots[slot] = perf_counter()
            try:
                result = await fn(part.items[index])
            except BaseException as error:
                if cancellation_requested(error):
                    slots[slot] = 0.0
                    worked(call_began, perf_counter())
                    raise
                self._results.fail(part, index, error)
            else:
                put(part, index, result)
                del result
            del part, claim  # not kept while waiting
            slots[slot] = 0.0
            worked(call_began, perf_counter())
            calls += 1
            if not calls % 16:
                await pace.maybe_yield()  # an async function need not ever wait


async def _call_and_release(permits: StagePermits, fn: Callable[[In], Awaitable[Out]], item: In) -> Out:
    """Await a call that has a permit, and give it back."""
    try:
        return await fn(item)
    finally:
        permits.release()


class LimitedThreads(TaskPool[In, Out]):
    """Calls of a sync function in threads, one item a call. No thread waits for a permit, or for another try."""

    def _wrap(self, fn: Callable[[In], Any]) -> Callable[[In], Any]:
        return partial(self._in_thread, fn)

    async def _in_thread(self, fn: Callable[[In], Out], item: In) -> Out:
        results, error = await self._site.tasks.threads.run(partial(call_all, fn, [item]), on_end=self._give_back)
        if error is not None:
            raise error
        check_no_coroutines(self._calls.stage, results, NOT_AWAITED)
        return results[0]

    def _give_back(self, called: bool) -> None:
        """Give a permit back once its call is over, also where its result isn't waited for any more."""
        assert self._permits is not None
        self._permits.release(unused=not called)


class ThreadedPool(CallPool[In, Out]):
    """Calls of a sync function in threads.

    A thread claims by itself, a list at a time, as long as some milliseconds of work, and goes on while the results
    travel to the event loop. It comes back when there is nothing to claim, after a failure, for a pause, where other
    calls wait for a thread, and where the event loop is late: it may need the GIL.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._claiming = threading.Lock()

    async def _work(self, slot: int) -> None:
        gate, wake = self._site.tasks.gate, threadsafe_call()
        claim: Claim[In] | None = None
        most = 1
        while claim is not None or not self._too_many:
            if claim is None and (claim := self._claim(most)) is None:
                await self._wait(slot)
                continue
            call = partial(self._call, wake, slot, most, [claim])
            claim = None  # `call` has it
            most, claim, error = await self._site.tasks.threads.run(call)
            del call
            if gate.holding:
                await gate.passage()
            if error is not None and claim is not None:
                claim = self._without_failed(*claim, error)
            del error

    def _without_failed(
        self, part: AdmittedInputs[In], start: int, stop: int, error: BaseException
    ) -> Claim[In] | None:
        """Return what is left of a claim whose first item has failed."""
        if start == stop:
            raise error  # Ctrl-C after the last call: no item's failure
        self._results.fail(part, start, error)
        return (part, start + 1, stop) if start + 1 < stop else None

    def _call(
        self, wake: Callable[[Callable[[], None]], object], slot: int, most: int, claims: list[Claim[In]]
    ) -> tuple[int, Claim[In] | None, BaseException | None]:
        """Call the function of what is claimed, then of more, in a thread.

        It holds nothing of a list whose results are on their way: who gets them may be the only one who has them.

        Returns:
          How many items to claim next time; what is left of the last claim; what its first item has failed with.
        """
        left: Claim[In] | None = claims.pop()
        fn = self._calls.fn if self._retried is None else self._retried.call
        slots, admission, threads = self._meter.slots, self._admission, self._site.tasks.threads
        comes_back = asyncio._get_running_loop() is not None  # no thread could be started: this is the event loop
        untaken = deque[list[Out]]()
        while left is not None:
            part, start, stop = left
            if self._results.is_late(part, start):
                return most, None, None
            began = slots[slot] = perf_counter()
            results, error = call_all(fn, part.items[start:stop])
            slots[slot], ended = 0.0, perf_counter()
            try:
                check_no_coroutines(self._calls.stage, results, NOT_AWAITED)
            except PlanTypeError as failure:
                results, error = [], failure
            rest = start + len(results)
            untaken.append(results)
            left = (part, rest, stop) if rest < stop or error is not None else None
            takes = [partial(self._take, part, start, untaken, began, ended)]
            del part, results
            wake(takes.pop())
            if error is not None:
                return most, left, error
            most = self._next_most(most, ended - began)
            event_loop_is_late = len(untaken) > 1
            if event_loop_is_late or comes_back or admission.held or self._too_many or threads.crowded:
                break
            left = left or self._claim(most)
        return most, left, None

    def _claim(self, most: int) -> Claim[In] | None:
        with self._claiming:
            return self._admission.claim(most)

    def _take(
        self, part: AdmittedInputs[In], start: int, untaken: deque[list[Out]], began: float, ended: float
    ) -> None:
        """Take the first list of results, in the event loop."""
        self._meter.count_work(began, ended)
        for index, result in enumerate(untaken.popleft(), start):
            self._results.put(part, index, result)

    def _next_most(self, most: int, took_s: float) -> int:
        """Return how many items to claim: 1 to 4 ms of work, but no more than one worker's share."""
        if took_s < LEAST_S:
            return min(most * 2, max(1, self._channel.capacity.items // (4 * self._at_once)))
        return max(1, most // 2) if took_s > 4 * LEAST_S else most
