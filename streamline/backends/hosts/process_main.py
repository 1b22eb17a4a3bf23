"""The main of a host process: an event loop in which it runs the workers of every running that it is handed.

A child never outlives its parent: the kernel kills it as soon as the last end of a pipe is closed that the parent alone
holds, whatever the child does meanwhile. It is told to go by the end of its control socket; then it lets its runnings
end. It knows nothing of the user's main module. What user code forks from it ends with it (`streamline.core.forks`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

__all__ = ["HANDED", "STACKS_SIGNAL", "Handed", "main"]


HANDED = struct.Struct("<QI")  # the link's number, bytes of surroundings that follow


STACKS_SIGNAL = signal.SIGURG
"""Asks for the stacks: nobody else's, and harmless to a child that doesn't listen yet. Precedent: Go's preemption."""


Attend: TypeAlias = Callable[[socket.socket, int], Awaitable[None]]
"""Runs a running's workers: given its link's socket and the descriptor of what was shipped; it closes both."""


class Handed(NamedTuple):
    """A running's link, handed over."""

    number: int
    sock: socket.socket
    payload: int


def main(number: int, attend: str, control: int, side: int, lifeline: int, stacks: int) -> NoReturn:
    """Be host process `number`, over descriptors that it inherited; `attend` names a function as "module:function"."""
    gc.disable()  # imports make next to no garbage, and looking for it takes a tenth of their time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has blocked it, up to here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with(lifeline)
    _show_stacks(stacks)
    from streamline.backends.hosts.stdio_relay import ChildStdio
    from streamline.core import forks

    for fd in (control, side, stacks):
        os.set_inheritable(fd, False)
    talk = ChildStdio(socket.socket(fileno=side), number)
    talk.begin()
    forks.adopt()
    code = 0
    try:
        import anyio

        run, handed = _found(attend), socket.socket(fileno=control)
        gc.freeze()  # what is there by now stays: the collector need not look at it
        gc.enable()
        anyio.run(_work, handed, run, talk, backend_options={"use_uvloop": _has_uvloop()})
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    talk.end()
    os._exit(code)  # threads in which user code is stuck don't keep it, and nothing here needs to be taken apart


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def _die_with(lifeline: int) -> None:
    """Die as soon as nobody holds the other end of this pipe.

    Where there is `F_SETSIG` the kernel sends SIGKILL: it ends a child that is stopped, or stuck in C under the
    interpreter's lock, too. Elsewhere a thread waits for it, which can't help against the last. Rejected:
    `PR_SET_PDEATHSIG`, which follows the *thread* that started the child.
    """
    os.set_inheritable(lifeline, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it has died before that
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(lifeline,), name="streamline lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _show_stacks(file: int) -> None:
    """Write the Python stacks of all threads to `file` when asked by a signal, and when this process crashes."""
    import faulthandler

    faulthandler.enable(file, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


async def _work(control: socket.socket, run: Attend, talk: Any) -> None:
    """Run what is handed over, until the parent hangs up and every running has ended."""
    import asyncio

    import anyio

    asyncio.get_running_loop().slow_callback_duration = math.inf  # in debug mode it would tell of each slow item
    async with anyio.create_task_group() as runnings:
        with control:
            await _take(control, lambda handed: runnings.start_soon(_attend, run, talk, handed))


async def _take(control: socket.socket, start: Callable[[Handed], object]) -> None:
    import anyio

    while True:
        await anyio.wait_readable(control)
        try:
            handed = receive(control)
        except EOFError:
            return
        if handed is not None:
            start(handed)


def _found(attend: str) -> Attend:
    module, _, name = attend.partition(":")
    found: Attend = getattr(importlib.import_module(module), name)
    return found


def receive(control: socket.socket) -> Handed | None:
    """Return the next link, of which at least the beginning has arrived; None: there was no room for it.

    Raises:
      EOFError: the parent has hung up.
    """
    try:
        header, fds, _, _ = socket.recv_fds(control, HANDED.size, 2, socket.MSG_WAITALL)
    except ConnectionError as error:
        raise EOFError from error
    if len(header) < HANDED.size:
        raise EOFError
    number, size = HANDED.unpack(header)
    pickle.loads(control.recv(size, socket.MSG_WAITALL)).adopt()
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(fds) == 2:
        return Handed(number, socket.socket(fileno=fds[0]), fds[1])
    for fd in fds:
        os.close(fd)  # the running reads the end of its link
    print("streamline: no descriptors left in this process for another stream (see `ulimit -n`)", file=sys.stderr)
    return None


async def _attend(run: Attend, talk: Any, handed: Handed) -> None:
    """Run the workers of one running. Whatever becomes of it, the others go on."""
    import asyncio

    talk.belongs(handed.number)
    try:
        await run(handed.sock, handed.payload)
    except asyncio.CancelledError:
        raise
    except BaseException:  # SystemExit too: of user code
        traceback.print_exc()
    finally:
        handed.sock.close()
        talk.over(handed.number)
