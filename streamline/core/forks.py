"""Forks of this process: copies with one thread, which must not use what they have inherited.

User code may fork. A child that does its own work and exits needs nothing. But a function of a pipeline may return in
both processes: then the copy would go on giving items as if it were the original. So in a thread of ours, a copy exits
silently when user code returns to the nearest frame of this package, which a trace function detects; it is set only in
the copy. Rejected: comparing pids after each call, which costs more than a short call.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any, Protocol

PACKAGE = __name__.partition(".")[0]

LAUNCHER = "multiprocessing.popen_fork"
"""Its children never return to where they were forked."""


class Disowned(Protocol):
    """What belongs to the process that made it."""

    def disown(self) -> None:
        """Release it: this process is a copy, in which only the forking thread goes on."""


_owned: weakref.WeakSet[Disowned] = weakref.WeakSet()


class ForkSafeLock(_thread.RLock):  # type: ignore[misc]  # the stubs say that it is final
    """A reentrant lock that is free in a copy of this process, even if another thread held it at the fork.

    No function of Python takes or releases it: an interrupt in one would leave it locked.
    """

    def __init__(self) -> None:
        disown_in_copies(self)

    def disown(self) -> None:
        """Free it, unless the forking thread holds it, which goes on and releases it."""
        if not self._is_owned():  # type: ignore[attr-defined]
            self._at_fork_reinit()  # type: ignore[attr-defined]  # as `threading` and `logging` do


_host: list[int] = []  # in a host process: a pipe, whose other end closes when it exits


def disown_in_copies(thing: Disowned) -> None:
    """Call `thing.disown()` in forks of this process, while `thing` lives."""
    _owned.add(thing)


def adopt() -> None:
    """Mark this process as a host: all its threads are ours, and forks end with it."""
    _host[:] = os.pipe()


def belongs_elsewhere(what: str, owner: int) -> str:
    """Return the message for a caller that uses a `what` in a fork of the process that owns it."""
    return (
        f"this {what} belongs to process {owner}, which this one (pid {os.getpid()}) was forked from: open another one "
        "here, or fork before it's opened"
    )


def _after_fork() -> None:
    """Runs in every fork, before user code."""
    for thing in list(_owned):
        thing.disown()
    if _host:
        _end_with_parent()
    if _host or threading.current_thread().name.startswith(PACKAGE):
        _end_where_it_returns()


def _end_where_it_returns() -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == LAUNCHER:
            return
        if module.partition(".")[0] == PACKAGE and module != __name__:
            frame.f_trace = _exit_copy
            frame.f_trace_opcodes = True
            sys.settrace(lambda *_: None)  # without one no frame's own is called
            return
        frame = frame.f_back


def _exit_copy(frame: FrameType, event: str, arg: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(event == "exception" and not issubclass(arg[0], StopIteration | StopAsyncIteration))


def _end_with_parent() -> None:
    """Have the kernel kill this process when the host exits."""
    if len(_host) > 1:  # a copy of a copy has none
        os.close(_host.pop())
    with contextlib.suppress(OSError):  # /proc isn't there
        end_with(os.open(f"/proc/self/fd/{_host[0]}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # with its own owner


def end_with(pipe: int) -> bool:
    """Have the kernel kill this process when the other end of a pipe is closed; False: the system can't.

    It sends SIGKILL, which also ends a process that is stopped, or stuck in C holding the GIL. Rejected:
    `PR_SET_PDEATHSIG`, which follows the *thread* that started the process.
    """
    import fcntl  # here, since few fork
    import select
    import signal

    if not hasattr(fcntl, "F_SETSIG"):
        return False
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it has been closed before that
        os._exit(1)
    return True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
