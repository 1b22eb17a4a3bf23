"""Calls of a user's sync function on the items of a flow, and the notes that say at which item an exception was raised.

A failing call ends the slice after the last good item: what came before is yielded first.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import anyio

from streamline.core.flow import Chunk, Run, Site
from streamline.core.pace import Pace
from streamline.core.process_random import Look
from streamline.core.replay import FailedCall
from streamline.core.state import State
from streamline.errors import PlanTypeError, StageError, WorkerDied, printable

__all__ = [
    "blame",
    "cancellation_requested",
    "function_name",
    "not_an_end",
    "not_awaited",
    "results",
    "saved_as",
    "stage_name",
]


LOOKS_LIKE_AN_END = (StopIteration, StopAsyncIteration, CancelledError, GeneratorExit)


INLINED = re.compile(r"<(list|set|dict)comp>\.")
"""In Python 3.11 they stand in the name of a function that they made; since 3.12 they are none themselves (PEP 709)."""


def blame(
    error: BaseException, stage: str, site: Site, position: State | None, call: FailedCall | None = None
) -> BaseException:
    """Return what the consumer is to see for `error` out of user code: itself, with a note that says where.

    Args:
      error: as raised by the user's function, not a cancellation that streamline asked for.
      stage: the stage as printed, "map(tokenize)".
      site: where it ran.
      position: the upstream state right after the item at fault; None where no item is at fault.
      call: what `replay` is to call again; None where that can't be done.
    """
    if call is not None:
        call.attach(error)
    error = not_an_end(error, stage)
    if call is not None:
        call.attach(error)
    at = position.where() if position is not None else ""
    if isinstance(error, WorkerDied):
        error.position = at
    where = site.tasks.session.where or f"pid {os.getpid()}"
    note = f"in {stage}, shard {site.shard} of {site.num_shards} ({where})" + (f", at {at}" if at else "")
    error.add_note(printable(note))
    return error


def not_an_end(error: BaseException, stage: str) -> BaseException:
    """Return `error`, or a `StageError` for one that Python would read as an end or as a cancellation."""
    if not isinstance(error, LOOKS_LIKE_AN_END):
        return error
    wrapped = StageError(f"{stage} raised {type(error).__name__}, which Python would read as an end: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def stage_name(fn: object) -> str:
    """Return the name that a stage gets from its function: the bare one, or its type's for a callable object."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def saved_as(name: str) -> Callable[[F], F]:
    """Give a function of the package the name by which fingerprints know it, whatever it is called."""

    def named(fn: F) -> F:
        fn.__saved_name__ = name  # type: ignore[attr-defined]
        return fn

    return named


def function_name(fn: object) -> str:
    """Return how a function is fingerprinted: its qualified name, or its type's for a callable object.

    The comprehensions that it was made in are left out, so that a newer Python resumes the snapshots of 3.11.
    """
    name = getattr(fn, "__saved_name__", None) or getattr(fn, "__qualname__", None)
    return INLINED.sub("", name) if isinstance(name, str) else type(fn).__qualname__


def cancellation_requested(error: BaseException) -> bool:
    """Whether `error`, out of user code that was awaited, is a cancellation that was requested for this task.

    A library may let a `CancelledError` of a task of its own escape; taken for ours, it would end a worker in silence.
    """
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return False
    if not isinstance(error, CancelledError):
        return True  # trio's can't be raised by hand
    task = asyncio.current_task()
    return anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling() > 0)


In = TypeVar("In")
F = TypeVar("F", bound=Callable[..., Any])


Out = TypeVar("Out")


def not_awaited(stage: str, results: Sequence[Any], way: str) -> PlanTypeError | None:
    """Return what is wrong with results that are coroutines that are never awaited; None: nothing is.

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
                failure = blame(error, stage, run.site, chunk.states[at], FailedCall(fn, chunk.items[at]))
            if look is not None and looks:
                look.end()
            if out:
                yield chunk.part(done, len(out)) if done or len(out) < count else chunk, out
            done += len(out)
            if failure is not None:
                run.judge(failure, chunk.items[done], chunk.states[done])
                done += 1
                if done == count:  # else the states of what follows include it
                    yield Chunk((), (), chunk.end), []
            del out  # the reader has it: large results are not kept while the next are made
            await pace.breathe()
        del chunk
        await pace.breathe()
