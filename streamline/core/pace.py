"""Calls of a user's sync function on the items of a flow, in slices of about a millisecond.

A stage that calls one on a list looks at the clock now and then and hands on what it has when its slice is over, so
that the first result of a slow function is not late; and it gives way before the next slice. A failing call ends the
slice after the last good item: what came before is yielded first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar

from streamline.core.blame import blame
from streamline.core.flow import Chunk
from streamline.core.gate import gate_of_task
from streamline.core.replay import FailedCall
from streamline.errors import PlanTypeError

if TYPE_CHECKING:
    from streamline.core.flow import StageRun
    from streamline.core.meters import StageMeter
    from streamline.core.process_random import Look

In = TypeVar("In")
Out = TypeVar("Out")

SLICE_S = 0.001
"""Seconds of user code between two checkpoints (DESIGN, "Cancellation")."""

HANDOVER_S = 0.0002
"""Seconds of work downstream of a channel after which its reader gets a turn: a task switch costs a twentieth of this,
and large items are better used while they are in the cache (batches of 3 MiB: 1.4 x as fast as after 1 ms)."""

LIST_S = 0.004
"""Seconds of user code in a thread between two returns to the loop: a return costs some 0.1 ms."""

HOLD_S = 0.016
"""Seconds after which a list is handed on, however many items its reader needs: the longest that a crash undoes, and
long enough for a list (a hand-over out of a process costs up to 0.3 ms in all)."""

CALLS = 64
"""Calls between two looks at the clock at the most: a look costs as much as five tiny calls, and a function that
suddenly takes 200 µs is noticed after 13 ms."""


async def checkpoint() -> None:
    """Let other tasks run, in fewer steps than `anyio.lowlevel.checkpoint`."""
    await asyncio.sleep(0)


def call_all(fn: Callable[[In], Out], items: Sequence[In]) -> tuple[list[Out], BaseException | None]:
    """Return `fn` of the items up to the first that fails, and that failure. For a thread: never raises.

    It returns early when the items take long, so that no result waits for many others, nor a cancellation.
    """
    results: list[Out] = []
    stop = perf_counter() + LIST_S
    try:
        for item in items:
            results.append(fn(item))
            if perf_counter() > stop:
                break
    except BaseException as error:
        return results, error
    return results, None


class Pace:
    """The clock of one stage; `meter` counts the time spent in its function, None: nothing does."""

    __slots__ = ("_calls", "_meter", "_since")

    def __init__(self, meter: StageMeter | None = None) -> None:
        self._calls = 1
        self._meter = meter
        self._since = perf_counter()

    def begin(self, at: float | None = None) -> None:
        """Begin a slice: the task has just given way, or did at that time."""
        self._since = perf_counter() if at is None else at

    async def maybe_yield(self) -> None:
        """Give way if this task has run for a slice, and wait while items must not move.

        The stages of a chain share a task: what one of them has given away, the others needn't.
        """
        now = perf_counter()
        if now - self._since > SLICE_S:
            gate = gate_of_task()
            if gate is not None and now - gate.turned_at <= SLICE_S:
                self._since = gate.turned_at
            else:
                await self.yield_after(SLICE_S)

    async def yield_after(self, after_s: float, turns: int = 1) -> None:
        """Give way if the last time here is so long ago, and wait while items must not move."""
        if perf_counter() - self._since > after_s:
            for _ in range(turns):
                await checkpoint()
            gate = gate_of_task()
            self._since = perf_counter()
            if gate is not None:
                if gate.holding:
                    await gate.passage()
                    self._since = perf_counter()
                gate.turned_at = self._since

    async def keep_filling(self, made: int, need: int, began: float) -> bool:
        """Give way, unless a list begun at `began` has what its reader needs, or has been kept long enough.

        Args:
          need: as in `Flow.need`, and no more than the list may have.
        """
        if made >= need or perf_counter() - began > HOLD_S:
            return False
        await self.yield_after(-1.0, turns=2)  # a host's loop reads a message in one turn, and handles it in the next
        return True

    def apply(
        self, fn: Callable[[In], Out], items: Sequence[In], start: int, results: list[Out], stop: int | None = None
    ) -> None:
        """Append `fn` of items from `start` to `stop`, or the end, to `results`, at least one, until the slice is over.

        Raises:
          StopIteration: `fn` raised it; `results` holds what came before, as for any other exception.
        """
        stop, began, done = len(items) if stop is None else stop, perf_counter(), start
        if self._meter is not None:
            self._meter.begun = began
        now: float | None = None
        try:
            while done < stop:
                calls = min(self._calls, stop - done)
                now = None
                for item in items[done : done + calls]:  # extend(map(fn, ...)) would take a StopIteration for the end
                    results.append(fn(item))  # noqa: PERF401  # looked up here it is quicker than by a local name
                done += calls
                now = perf_counter()
                if self._over(now - began):
                    return
        finally:
            if self._meter is not None:
                self._meter.held(began, perf_counter() if now is None else now)

    def draw(self, iterator: Iterator[Out], limit: int, results: list[Out]) -> bool:
        """Append items of a sync iterator to `results` until `limit` or the slice is over; True if it has ended."""
        stop, began = len(results) + limit, perf_counter()
        if self._meter is not None:
            self._meter.begun = began
        now: float | None = None
        try:
            while len(results) < stop:
                calls = min(self._calls, stop - len(results))
                before = len(results)
                now = None
                results.extend(islice(iterator, calls))
                if len(results) - before < calls:
                    return True
                now = perf_counter()
                if self._over(now - began):
                    break
            return False
        finally:
            if self._meter is not None:
                self._meter.held(began, perf_counter() if now is None else now)

    def _over(self, spent: float) -> bool:
        """Adapt the number of calls between two looks at the clock; say whether the slice is over."""
        if spent > SLICE_S:
            self._calls = max(1, self._calls // 2)
            return True
        if spent < SLICE_S / 4 and self._calls < CALLS:
            self._calls *= 2
        return False


def check_awaited(stage: object, results: Sequence[Any], way: str) -> None:
    """Insist, by the first one, on results that are no coroutines, which would never be awaited; else close all.

    Args:
      way: what to do about it, for the `PlanTypeError`.
    """
    if results and isinstance(results[0], CoroutineType):
        for result in results:
            if isinstance(result, CoroutineType):
                result.close()
        raise PlanTypeError(f"{stage} returned a coroutine, which would not be awaited: {way}")


async def results(
    run: StageRun[In], fn: Callable[[In], Out], stage: str, way: str, look: Look | None = None
) -> AsyncGenerator[tuple[Chunk[In], list[Out]], None]:
    """Yield parts of the upstream's chunks, each with `fn` of its items; a chunk without items as it is.

    Raises:
      What `fn` raises, after the results before it were yielded, unless its item is to be left out.
      PlanTypeError: it returns coroutines.
    """
    pace = Pace(run.meter)
    while (chunk := await run.pull()) is not None:
        done, count = 0, len(chunk.items)
        if not count:
            yield chunk, []
        while done < count:
            out: list[Out] = []
            began, going_on = perf_counter(), True
            while going_on:
                need = min(run.need, count - done)
                stop = done + need if out else count  # what goes on does so up to the item that is missing
                failure = _slice(pace, run, fn, stage, chunk, done, stop, out, look)
                going_on = failure is None and await pace.keep_filling(len(out), need, began)
            made = len(out)
            if made:
                check_awaited(stage, out, way)
                given = [out]
                del out  # the reader has it: large results are not kept while they are used, and the next are made
                yield chunk.part(done, made) if done or made < count else chunk, given.pop()
            done += made
            if failure is not None:
                run.skip_or_raise(failure, chunk.items[done], chunk.states[done])
                done += 1
                if done == count:  # else the states of what follows include it
                    yield Chunk((), (), chunk.end), []
            await pace.maybe_yield()
        del chunk
        await pace.maybe_yield()


def _slice(
    pace: Pace,
    run: StageRun[In],
    fn: Callable[[In], Out],
    stage: str,
    chunk: Chunk[In],
    done: int,
    stop: int,
    out: list[Out],
    look: Look | None,
) -> BaseException | None:
    """Append `fn` of items of `chunk` after the first `done`, up to `stop`, to `out`, for a slice; return a failure."""
    looks = look is not None and look.left > 0
    if look is not None and looks:
        look.begin()
    try:
        pace.apply(fn, chunk.items, done + len(out), out, stop)
    except BaseException as error:
        at = done + len(out)
        return blame(error, stage, run.site, chunk.states[at], FailedCall(fn, chunk.items[at]))
    finally:
        if look is not None and looks:
            look.end()
    return None
