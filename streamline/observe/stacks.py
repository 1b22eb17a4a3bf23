"""What the tasks of an event loop wait for, as Python prints stacks: a thread's stack shows only the loop that waits.

A task's frame leads to what it awaits, and so on down to the last one; asynchronous generators hide theirs in
objects without attributes, where the collector finds them all the same.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
import types
from pathlib import Path
from typing import Any

import anyio

DEEPEST = 100

NOT_USERS = (
    *(str(Path(module.__file__ or "").parent) for module in (asyncio, anyio)),
    str(Path(__file__).parents[1]),
)
"""Where what isn't user code lies."""


def waiting_tasks() -> str:
    """Return the stacks of this loop's tasks that wait in user code, the last call first; only asyncio's are known."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return ""
    shown = []
    for task in sorted(tasks, key=lambda task: task.get_name()):
        frames = _frames(task.get_coro())
        if any(not frame.f_code.co_filename.startswith(NOT_USERS) for frame in frames):
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
