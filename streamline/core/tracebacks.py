"""Tracebacks without the frames of streamline: from the user's loop straight to the user's function."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

import anyio

from streamline.errors import StreamlineError

OURS = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (sys.modules["streamline"], asyncio, anyio))
"""Folders whose frames are not shown above a user's."""

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
