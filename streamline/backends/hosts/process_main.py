"""The main function of a host process: an event loop that serves the links that its parent passes.

A child never outlives its parent: the kernel kills it when the lifeline closes, a pipe whose other end only the parent
has. The end of the control socket asks it to exit once its runs have ended. The user's main module is not imported.
Forks that user code makes end with the child (`streamline.core.forks`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
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
from functools import partial
from typing import Any, NoReturn, TypeAlias

LINK_HEADER = struct.Struct(
    "<QI"
)  # the link's number, bytes of what follows, pickled: a `ProcessEnv`, further arguments

STACKS_SIGNAL = signal.SIGURG
"""Asks for the stacks: otherwise unused, and ignored by default. Precedent: Go's preemption."""

EntryPoint: TypeAlias = Callable[..., Awaitable[None]]
"""Serves a link, given its socket, the descriptor of the shipped payload, and what else came; closes both."""


def main(number: int, entry_point: str, control: int, stdio_fd: int, lifeline: int, stacks: int) -> NoReturn:
    """Run host process `number` over inherited descriptors; `entry_point` is "module:function"."""
    gc.disable()  # imports make little garbage, and collecting takes a tenth of their time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked by the parent until now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _exit_with_parent(lifeline)
    _show_stacks(stacks)
    from streamline.backends.hosts.stdio_relay import ChildStdio
    from streamline.core import forks

    for fd in (control, stdio_fd, stacks):
        os.set_inheritable(fd, False)
    stdio = ChildStdio(socket.socket(fileno=stdio_fd), number)
    stdio.begin()
    forks.adopt()
    code = 0
    try:
        import anyio

        module, _, name = entry_point.partition(":")
        run, links = getattr(importlib.import_module(module), name), socket.socket(fileno=control)
        gc.freeze()  # imported modules stay: the collector can skip them
        gc.enable()
        uvloop = importlib.util.find_spec("uvloop") is not None
        anyio.run(_serve_links, links, run, stdio, backend_options={"use_uvloop": uvloop})
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    stdio.end()
    os._exit(code)  # don't wait for threads in which user code is stuck


def _exit_with_parent(lifeline: int) -> None:
    """Exit as soon as the other end of this pipe is closed.

    With `F_SETSIG` the kernel sends SIGKILL, which also ends a child that is stopped, or stuck in C holding the GIL.
    Elsewhere a thread waits, which needs the GIL. Rejected: `PR_SET_PDEATHSIG`, which follows the *thread* that started
    the child.
    """
    os.set_inheritable(lifeline, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # the parent has died already
            os._exit(1)
        return
    threading.Thread(target=_await_parent_exit, args=(lifeline,), name="streamline lifeline", daemon=True).start()


def _await_parent_exit(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _show_stacks(file: int) -> None:
    """Write the stacks of all threads to `file` on `STACKS_SIGNAL` and on a crash."""
    import faulthandler

    faulthandler.enable(file, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


async def _serve_links(control: socket.socket, run: EntryPoint, stdio: Any) -> None:
    """Serve links until the parent hangs up and every run has ended."""
    import asyncio

    import anyio

    asyncio.get_running_loop().slow_callback_duration = math.inf  # debug mode would log each slow item
    async with anyio.create_task_group() as runs:
        with control, contextlib.suppress(EOFError):
            while True:
                await anyio.wait_readable(control)
                number, fds, more = _receive_link(control)
                if len(fds) == 2:
                    sock = socket.socket(fileno=fds[0])
                    runs.start_soon(_serve_one, partial(run, sock, fds[1], *more), stdio, number, sock)
                    continue
                for fd in fds:
                    os.close(fd)  # the consumer reads the end of its link
                print(
                    "streamline: no descriptors left in this process for another stream (see `ulimit -n`)",
                    file=sys.stderr,
                )


def _receive_link(control: socket.socket) -> tuple[int, list[int], list[Any]]:
    """Return the number of the next link, which has begun to arrive, its two descriptors, and what else came with it.

    There are no descriptors if none are left in this process.

    Raises:
      EOFError: the parent has hung up.
    """
    try:
        header, fds, _, _ = socket.recv_fds(control, LINK_HEADER.size, 2, socket.MSG_WAITALL)
    except ConnectionError as error:
        raise EOFError from error
    if len(header) < LINK_HEADER.size:
        raise EOFError
    number, size = LINK_HEADER.unpack(header)
    env, *more = pickle.loads(control.recv(size, socket.MSG_WAITALL))
    env.adopt()
    for fd in fds:
        os.set_inheritable(fd, False)
    return number, fds, more


async def _serve_one(run: Callable[[], Awaitable[None]], stdio: Any, number: int, sock: socket.socket) -> None:
    """Serve one link; its failure doesn't reach the others."""
    import asyncio

    stdio.bind_task(number)
    try:
        await run()
    except asyncio.CancelledError:
        raise
    except BaseException:  # SystemExit of user code, too
        traceback.print_exc()
    finally:
        sock.close()
        stdio.end_questions(number)
