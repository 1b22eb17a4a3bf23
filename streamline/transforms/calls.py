"""Calling a user's sync function on the items of a flow, in slices, failing behind the last good item."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from streamline.blame import blame
from streamline.errors import PlanTypeError
from streamline.failing.replay import Call
from streamline.flow import Chunk, Run
from streamline.pace import Pace
from streamline.transforms.process_random import Look

__all__ = ["not_awaited", "results"]

In = TypeVar("In")
Out = TypeVar("Out")


def not_awaited(stage: str, results: Sequence[Any], way: str) -> PlanTypeError | None:
    """Return what is wrong with results that are coroutines, which nobody awaits; None: nothing is.

    Args:
      results: the first one is looked at. All coroutines among them are closed.
      way: what to do about it.
    """
    if not results or not inspect.iscoroutine(results[0]):
        return None
    for result in results:
        if inspect.iscoroutine(result):
            result.close()
    return PlanTypeError(f"{stage} returned a coroutine, which would not be awaited: {way}")


async def results(
    run: Run[In], fn: Callable[[In], Out], stage: str, look: Look | None = None
) -> AsyncGenerator[tuple[Chunk[In], list[Out]], None]:
    """Yield parts of the upstream's chunks, each with `fn` of its items; a chunk without items as it is.

    Raises:
      What `fn` raises, after the results before it were yielded, unless its item is to be left out.
    """
    pace = Pace(run.meter)
    while (chunk := await run.upstream.pull(run.want)) is not None:
        done, count = 0, len(chunk.items)
        if not count:
            yield chunk, []
        while done < count:
            out: list[Out] = []
            failure: BaseException | None = None
            looks = look is not None and look.left > 0
            if look is not None and looks:
                look.begin()
            try:
                pace.apply(fn, chunk.items, done, out)
            except BaseException as error:
                at = done + len(out)
                failure = blame(error, stage, run.site, chunk.states[at], Call(fn, chunk.items[at]))
            if look is not None and looks:
                look.end()
            if out:
                yield chunk.part(done, len(out)) if done or len(out) < count else chunk, out
            done += len(out)
            if failure is not None:
                run.judge(failure, chunk.items[done], chunk.states[done])
                done += 1
                if done == count:  # else the states of what follows are behind it
                    yield Chunk((), (), chunk.end), []
            del out  # the reader has it: large results are not kept while the next are made
            await pace.breathe()
        del chunk
        await pace.breathe()
