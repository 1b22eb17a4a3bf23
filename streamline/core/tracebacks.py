"""Tracebacks and stacks as users want them: from the user's loop straight to the user's function.

A stack of a thread shows only the loop that waits, so tasks have stacks, too: a task's frame leads to what it awaits,
and so on down to the last one; asynchronous generators hide theirs in objects without attributes, where the collector
finds them all the same.
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

OURS = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (sys.modules["streamline"], asyncio, anyio))
"""Folders whose frames are not shown above a user's."""

DEEPEST = 100
"""How many awaits of one task are followed."""

ELSEWHERE = "the traceback in "
"""How the note begins that says what frames an exception had in the process that it comes from."""


class TrimmedTraceback:
    """`with TrimmedTraceback():` in a method that users call: what is raised inside shows no frame of it."""

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
            hide_frames(error)


def hide_frames(error: BaseException) -> None:
    """Take the frames out of a traceback that lie between the user's loop and the user's function.

    Called in the method that the user has called. Causes lose the frames of ours that they begin with, too. The
    exception stays the same object. With `STREAMLINE_TRACEBACK=full` in the environment, nothing is taken out.
    """
    found, seen = [error], {id(error)}
    for one in () if _traced_in_full() else found:  # it grows meanwhile
        one.__traceback__ = _outside(one, one.__traceback__)
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for other in (one.__cause__, one.__context__, *members):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                found.append(other)


def _traced_in_full() -> bool:
    """Whether tracebacks are to show the frames of ours, too."""
    return os.environ.get("STREAMLINE_TRACEBACK") == "full"


def _outside(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is not ours.

    If all are: none, where streamline itself found the error, or a note tells the frames that it had in another
    process; any other exception has all of them, for it is a fault of ours.
    """
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename.startswith(OURS):
        found = found.tb_next
    if found is not None or isinstance(error, StreamlineError):
        return found
    notes = getattr(error, "__notes__", ())
    return None if any(str(note).startswith(ELSEWHERE) for note in notes) else trace


def trace_of(error: BaseException) -> traceback.TracebackException:
    """Return the traceback of an exception, without its frames, from the first one on that isn't streamline's."""
    full = _traced_in_full()
    trace = error.__traceback__ if full else _outside(error, error.__traceback__)
    found = traceback.TracebackException(type(error), error, trace, lookup_lines=False)
    chain = [] if full else [found.__cause__, found.__context__]
    for other in chain:  # it grows meanwhile
        if other is not None:
            ours = [frame.filename.startswith(OURS) for frame in other.stack]
            first = ours.index(False) if False in ours else 0
            del other.stack[:first]
            chain += [other.__cause__, other.__context__]
    return found


def waiting_tasks() -> str:
    """Return the stacks of this loop's tasks that wait in user code, the last call first."""
    shown = []
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        frames = _frames(task.get_coro())
        if any(not frame.f_code.co_filename.startswith(OURS) for frame in frames):
            lines = traceback.format_list(
                [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_name) for f in frames[::-1]]
            )
            shown.append(f"Task {task.get_name()} (most recent call first):\n{''.join(lines)}")
    return "\n".join(shown)


def _frames(awaited: Any) -> list[types.FrameType]:
    frames: list[types.FrameType] = []
    for _ in range(DEEPEST):
        if awaited is None:
            break
        frame, after = _step(awaited)
        if frame is not None:
            frames.append(frame)
        awaited = after
    return frames


def _step(awaited: Any) -> tuple[types.FrameType | None, Any]:
    """Return the frame of what is awaited, if it has one, and what that awaits in turn."""
    for kind in ("cr", "ag", "gi"):
        if hasattr(awaited, f"{kind}_frame"):
            after = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
            return getattr(awaited, f"{kind}_frame"), after
    if isinstance(awaited, asyncio.Future):
        return None, None
    steps = (types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType)
    inner = [found for found in gc.get_referents(awaited) if isinstance(found, steps)]
    return None, inner[0] if inner else None
