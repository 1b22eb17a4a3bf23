"""Calls of a user's sync function on the items of a flow, in slices of about a millisecond.

A stage that calls one on a list checks the clock and, when its slice is over, yields the results so far, so that the
first result of a slow function is not late; other tasks run before the next slice. A failing call ends the slice: the
results before it are yielded first.
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
"""Seconds of work after which a channel's reader runs: a task switch costs a twentieth of this, and large items are
still in the processor's cache (batches of 3 MiB: 1.4 x as fast as after 1 ms)."""

LIST_S = 0.004
"""Seconds of user code in a thread between two returns to the loop: a return costs some 0.1 ms."""

HOLD_S = 0.016
"""Seconds after which a list is handed on, even with fewer items than its reader needs: a crash loses no more than
this, and a hand-over out of a process costs up to 0.3 ms."""

MOST_CALLS_UNTIMED = 64
"""Calls between two checks of the clock at most: a check costs as much as five tiny calls, and a function that suddenly
takes 200 µs is noticed after 13 ms."""


async def checkpoint() -> None:
    """Let other tasks run, in fewer steps than `anyio.lowlevel.checkpoint`."""
    await asyncio.sleep(0)


def call_all(fn: Callable[[In], Out], items: Sequence[In]) -> tuple[list[Out], BaseException | None]:
    """Return `fn` of items, until one fails or they have taken long, and the failure. For a thread: never raises."""
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
    """The clock of one stage; `meter` counts the time in its function, if there is one."""

    __slots__ = ("_calls", "_meter", "_since")

    def __init__(self, meter: StageMeter | None = None) -> None:
        self._calls = 1
        self._meter = meter
        self._since = perf_counter()

    def begin(self, at: float | None = None) -> None:
        """Begin a slice, now or at an earlier time at which other tasks ran."""
        self._since = perf_counter() if at is None else at

    async def maybe_yield(self) -> None:
        """Let others run if a slice is over and no other stage of the chain just did; wait while items must rest."""
        now = perf_counter()
        if now - self._since > SLICE_S:
            gate = gate_of_task()
            if gate is not None and now - gate.turned_at <= SLICE_S:
                self._since = gate.turned_at
            else:
                await self.yield_after(SLICE_S)

    async def yield_after(self, after_s: float, turns: int = 1) -> None:
        """Let other tasks run if this slice has lasted `after_s`, and wait while items must not move."""
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

    async def keep_filling(self, made: int, min_items: int, began: float) -> bool:
        """Let other tasks run, and return whether to add to a list that was begun at `began`.

        Not if it has the `min_items` items that its reader needs, or was kept long enough.
        """
        if made >= min_items or perf_counter() - began > HOLD_S:
            return False
        await self.yield_after(-1.0, turns=2)  # a host's loop reads a message in one turn, and handles it in the next
        return True

    def apply(
        self, fn: Callable[[In], Out], items: Sequence[In], start: int, results: list[Out], stop: int | None = None
    ) -> None:
        """Append `fn` of items from `start` to `stop`, at least one, until the slice is over; raise what it raises."""
        stop, began, done = len(items) if stop is None else stop, perf_counter(), start
        if self._meter is not None:
            self._meter.begun = began
        now: float | None = None
        try:
            while done < stop:
                calls = min(self._calls, stop - done)
                now = None
                for item in items[done : done + calls]:  # extend(map(fn, …)) would swallow a StopIteration
                    results.append(fn(item))  # noqa: PERF401  # looked up here it is quicker than by a local name
                done += calls
                now = perf_counter()
                if self._over(now - began):
                    return
        finally:
            if self._meter is not None:
                self._meter.count_hold(began, perf_counter() if now is None else now)

    def draw(self, iterator: Iterator[Out], limit: int, results: list[Out]) -> bool:
        """Append items of an iterator to `results` until `limit` or the slice is over; return whether it has ended."""
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
                self._meter.count_hold(began, perf_counter() if now is None else now)

    def _over(self, spent: float) -> bool:
        """Return whether the slice is over, and adapt the number of calls between two checks of the clock."""
        if spent > SLICE_S:
            self._calls = max(1, self._calls // 2)
            return True
        if spent < SLICE_S / 4 and self._calls < MOST_CALLS_UNTIMED:
            self._calls *= 2
        return False


def check_no_coroutines(stage: object, results: Sequence[Any], way: str) -> None:
    """Raise a PlanTypeError, with the `way` out, if the results are coroutines, which would never be awaited."""
    if results and isinstance(results[0], CoroutineType):
        for result in results:
            if isinstance(result, CoroutineType):
                result.close()
        raise PlanTypeError(f"{stage} returned a coroutine, which would not be awaited: {way}")


async def map_in_slices(
    run: StageRun[In], fn: Callable[[In], Out], stage: str, way: str, look: Look | None = None
) -> AsyncGenerator[tuple[Chunk[In], list[Out]], None]:
    """Yield parts of the upstream's chunks, each with `fn` of its items; a chunk without items as it is.

    What `fn` raises comes after the results before it, unless its item is skipped.
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
                need = min(run.min_items, count - done)
                stop = done + need if out else count  # after the first slice, only what the reader needs
                failure = _slice(pace, run, fn, stage, chunk, done, stop, out, look)
                going_on = failure is None and await pace.keep_filling(len(out), need, began)
            made = len(out)
            if made:
                check_no_coroutines(stage, out, way)
                given = [out]
                del out  # only the reader may refer to large results while the next are made
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
    """Append `fn` of `chunk`'s items after the first `done`, up to `stop`, to `out`, for a slice; return a failure."""
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
