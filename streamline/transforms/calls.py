"""Calling a user's sync function on the items of a flow, in slices, failing behind the last good item."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from streamline.blame import blame
from streamline.flow import Chunk, Run
from streamline.pace import Pace

__all__ = ["results"]

In = TypeVar("In")
Out = TypeVar("Out")


async def results(
    run: Run[In], fn: Callable[[In], Out], stage: str
) -> AsyncGenerator[tuple[Chunk[In], list[Out]], None]:
    """Yield parts of the upstream's chunks, each with `fn` of its items; a chunk without items as it is.

    Raises:
      What `fn` raises, after the results before it were yielded.
    """
    pace = Pace()
    while (chunk := await run.upstream.pull(run.want)) is not None:
        done, count = 0, len(chunk.items)
        if not count:
            yield chunk, []
        while done < count:
            out: list[Out] = []
            failure: BaseException | None = None
            try:
                pace.apply(fn, chunk.items, done, out)
            except BaseException as error:
                failure = blame(error, stage, run.site, chunk.states[done + len(out)])
            if out:
                yield chunk.part(done, len(out)) if done or len(out) < count else chunk, out
            if failure is not None:
                raise failure
            done += len(out)
            del out  # the reader has it: large results are not kept while the next are made
            await pace.breathe()
        del chunk
        await pace.breathe()
