"""Exceptions of user code: the notes that say at which item one was raised, and what Python would read as an end."""

from __future__ import annotations

import asyncio
import math
import os
import re
from asyncio import CancelledError
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from streamline.core.text import shortened
from streamline.errors import StageError, WorkerDied, printable

if TYPE_CHECKING:
    from streamline.core.flow import Site
    from streamline.core.replay import FailedCall
    from streamline.core.state import State

F = TypeVar("F", bound=Callable[..., Any])
LOOKS_LIKE_AN_END = (StopIteration, StopAsyncIteration, CancelledError, GeneratorExit)

INLINED = re.compile(r"<(list|set|dict)comp>\.")
"""In Python 3.11, comprehensions are functions, and part of the names of functions made in them (PEP 709)."""


def blame(
    error: BaseException,
    stage: str,
    site: Site,
    position: State | None,
    call: FailedCall | None = None,
    *,
    shows_item: bool = True,
) -> BaseException:
    """Return what the consumer is to see for `error` out of user code: itself, with a note that says where.

    `position`: the upstream state right after the failing item; `call`: what `replay` calls again. None: there is none.
    `shows_item`: the note shows what the call was given.
    """
    if call is not None:
        call.attach(error)
    error = not_an_end(error, stage)
    if call is not None:
        call.attach(error)
    at = printable(position.where()) if position is not None else ""
    if isinstance(error, WorkerDied):
        error.position = at
    where = site.tasks.session.where or f"pid {os.getpid()}"
    note = f"in {stage}, shard {site.shard} of {site.num_shards} ({where})" + (f", at {at}" if at else "")
    if call is not None and shows_item:
        note += f": {shortened(call.item)}"
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
    """Return the default name of a stage: its function's, or the type's of a callable object."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def saved_as(name: str) -> Callable[[F], F]:
    """Return a decorator that sets a function's name in fingerprints, which then outlives renames."""

    def named(fn: F) -> F:
        fn.__saved_name__ = name  # type: ignore[attr-defined]
        return fn

    return named


def function_name(fn: object) -> str:
    """Return the name of a function in fingerprints: its qualified name, or its type's for a callable object.

    The comprehensions that it was made in are left out, so that a newer Python resumes the snapshots of 3.11.
    """
    name = getattr(fn, "__saved_name__", None) or getattr(fn, "__qualname__", None)
    return INLINED.sub("", name) if isinstance(name, str) else type(fn).__qualname__


def cancellation_requested(error: BaseException) -> bool:
    """Whether `error`, out of awaited user code, is a cancellation that was requested for this task.

    A library may let a `CancelledError` of a task of its own escape; taken for ours, it would end a worker silently.
    """
    if not isinstance(error, CancelledError):
        return False
    task = asyncio.current_task()
    return anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling() > 0)
