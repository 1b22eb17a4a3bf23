"""Tracebacks and stacks as users want them: from the user's loop straight to the user's function.

A thread's stack shows only the event loop that waits. A task's stack is found from its frame, by what that awaits, and
so on; objects without attributes, as of asynchronous generators, are followed by the collector's references.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import traceback
import types
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio

from streamline.errors import StreamlineError

OUR_FOLDERS = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (sys.modules["streamline"], asyncio, anyio)
)
"""Folders whose frames are not shown above a user's."""

MOST_AWAITS = 100
"""How many awaits of one task are followed."""

TRACEBACK_NOTE = "the traceback in "
"""The beginning of a note with the traceback of an exception in the process that it comes from."""


class TrimmedTraceback:
    """`with TrimmedTraceback():` in a method that users call: what is raised inside has none of our frames."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
            hide_frames(error)


def hide_frames(error: BaseException) -> None:
    """Remove the frames between the user's loop and the user's function from a traceback, and from its causes'.

    Called in the method that the user has called. The exception stays the same object. With
    `STREAMLINE_TRACEBACK=full` in the environment, nothing is removed.
    """
    found, seen = [error], {id(error)}
    for one in () if _traced_in_full() else found:  # `found` grows
        one.__traceback__ = _outside(one, one.__traceback__)
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for other in (one.__cause__, one.__context__, *members):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                found.append(other)


def _traced_in_full() -> bool:
    return os.environ.get("STREAMLINE_TRACEBACK") == "full"


def _outside(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is not ours.

    If all are ours: None for an error of streamline's own, or if a note has the traceback of another process; else all,
    for it is a bug of ours.
    """
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename.startswith(OUR_FOLDERS):
        found = found.tb_next
    if found is not None or isinstance(error, StreamlineError):
        return found
    notes = getattr(error, "__notes__", ())
    return None if any(str(note).startswith(TRACEBACK_NOTE) for note in notes) else trace


def trace_of(error: BaseException) -> traceback.TracebackException:
    """Return the traceback of an exception, without its frame objects, from the first frame on that is not ours."""
    full = _traced_in_full()
    trace = error.__traceback__ if full else _outside(error, error.__traceback__)
    found = traceback.TracebackException(type(error), error, trace, lookup_lines=False)
    chain = [] if full else [found.__cause__, found.__context__]
    for other in chain:  # `chain` grows
        if other is not None:
            ours = [frame.filename.startswith(OUR_FOLDERS) for frame in other.stack]
            first = ours.index(False) if False in ours else 0
            del other.stack[:first]
            chain += [other.__cause__, other.__context__]
    return found


def waiting_tasks() -> str:
    """Return the stacks of this loop's tasks that wait in user code, most recent call first."""
    shown = []
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        frames = _frames(task.get_coro())
        if any(not frame.f_code.co_filename.startswith(OUR_FOLDERS) for frame in frames):
            lines = traceback.format_list(
                [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_name) for f in frames[::-1]]
            )
            shown.append(f"Task {task.get_name()} (most recent call first):\n{''.join(lines)}")
    return "\n".join(shown)


def _frames(awaited: Any) -> list[types.FrameType]:
    frames: list[types.FrameType] = []
    for _ in range(MOST_AWAITS):
        if awaited is None:
            break
        frame, after = _step(awaited)
        if frame is not None:
            frames.append(frame)
        awaited = after
    return frames


def _step(awaited: Any) -> tuple[types.FrameType | None, Any]:
    """Return the frame of an awaitable, if it has one, and what that awaits."""
    for kind in ("cr", "ag", "gi"):
        if hasattr(awaited, f"{kind}_frame"):
            after = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
            return getattr(awaited, f"{kind}_frame"), after
    if isinstance(awaited, asyncio.Future):
        return None, None
    steps = (types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType)
    inner = [found for found in gc.get_referents(awaited) if isinstance(found, steps)]
    return None, inner[0] if inner else None
