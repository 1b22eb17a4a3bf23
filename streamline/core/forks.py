"""Forks of this process: copies in which one thread goes on, and which own nothing of what they have inherited.

User code may fork. A child that does its own work and ends is its own business. A function of a pipeline may also
return on both sides of `os.fork()`: then the copy would give items, or be asked for some, as if it were the process
that it was copied from. So in a thread of ours a copy ends, quietly, where it comes back from user code: that is when
the nearest frame of this package goes on. A trace function sees that; nothing is looked at unless user code forks.
Rejected: asking after each call whether this is still the same process, which costs more than a short call.
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
        """Release it: this is a copy of that process, in which only the thread that has forked goes on."""


_owned: weakref.WeakSet[Disowned] = weakref.WeakSet()


class ForkSafeLock(_thread.RLock):  # type: ignore[misc]  # the stubs say that it is final
    """A reentrant lock that is free in a copy of this process, though another thread held it when that was made.

    No function of Python takes or releases it: an interrupt in one would leave it locked.
    """

    def __init__(self) -> None:
        disowned_in_copies(self)

    def disown(self) -> None:
        """Free it, unless the thread that has forked holds it: that goes on, and releases it."""
        if not self._is_owned():  # type: ignore[attr-defined]
            self._at_fork_reinit()  # type: ignore[attr-defined]  # as `threading` and `logging` do


_host: list[int] = []  # in a host process: a pipe, which ends when it does


def disowned_in_copies(thing: Disowned) -> None:
    """Call `thing.disown()` in copies of this process, as long as it lives."""
    _owned.add(thing)


def adopt() -> None:
    """Say that all threads of this process are ours, and that copies of it end with it: it is a host."""
    _host[:] = os.pipe()


def belongs_elsewhere(what: str, owner: int) -> str:
    """Return the message for a caller that wants something of `what` in a copy of the process that has it."""
    return (
        f"this {what} belongs to process {owner}, which this one (pid {os.getpid()}) was forked from: open another one "
        "here, or fork before it's opened"
    )


def _copied() -> None:
    """Runs in every copy, before user code goes on there."""
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
            frame.f_trace = _returned
            frame.f_trace_opcodes = True
            sys.settrace(lambda *_: None)  # without one no frame's own is called
            return
        frame = frame.f_back


def _returned(frame: FrameType, event: str, arg: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(event == "exception" and not issubclass(arg[0], StopIteration | StopAsyncIteration))


def _end_with_parent() -> None:
    """Be killed by the kernel when the host has gone."""
    if len(_host) > 1:  # a copy of a copy has none
        os.close(_host.pop())
    with contextlib.suppress(OSError):  # /proc isn't there
        end_with(os.open(f"/proc/self/fd/{_host[0]}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # with its own owner


def end_with(pipe: int) -> bool:
    """Let the kernel kill this process when the other end of a pipe is closed; False: this system can't.

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
    os.register_at_fork(after_in_child=_copied)
