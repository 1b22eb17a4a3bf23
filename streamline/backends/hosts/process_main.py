"""The main function of a host process: an event loop that serves the links that its parent passes.

A child never outlives its parent: the kernel kills it when the lifeline closes, a pipe whose other end only the parent
has. The end of the control socket asks it to exit once its runs have ended. The user's main module is not imported.
Forks that user code makes end with the child (`streamline.core.forks`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import logging
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

from streamline.core import forks

STACKS_SIGNAL = signal.SIGURG
"""Asks for the stacks: otherwise unused, and ignored by default. Precedent: Go's preemption."""

EntryPoint: TypeAlias = Callable[..., Awaitable[None]]
"""Serves a link, given its socket, the descriptor of the shipped payload, and what else came; closes both."""


class ProcessEnv(NamedTuple):
    """What a host takes over from the consumer's process, with every run.

    Attributes:
      path: `sys.path`.
      directory: the working directory; None: it was deleted.
      disabled: the argument of `logging.disable`.
      levels: of the loggers that have one; "" is the root.
    """

    path: list[str]
    directory: str | None
    disabled: int
    levels: dict[str, int]

    def adopt(self) -> None:
        sys.path[:] = self.path
        if self.directory is not None:
            with contextlib.suppress(OSError):  # then what needs it says so
                os.chdir(self.directory)
        logging.disable(self.disabled)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)


def process_env() -> ProcessEnv:
    try:
        directory = os.getcwd()  # noqa: PTH109 - a string is what crosses
    except FileNotFoundError:
        directory = None
    levels = {"": logging.root.level}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level:
            levels[name] = logger.level
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return ProcessEnv(path, directory, logging.root.manager.disable, levels)


def main(number: int, entry_point: str, control: int, stdio_fd: int, lifeline: int, stacks: int) -> NoReturn:
    """Run host process `number` over inherited descriptors; `entry_point` is "module:function"."""
    gc.disable()  # imports make little garbage, and collecting takes a tenth of their time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked by the parent until now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for fd in (control, stdio_fd, lifeline, stacks):
        os.set_inheritable(fd, False)
    if not forks.end_with(lifeline):
        watch = threading.Thread(target=_await_parent_exit, args=(lifeline,), name="streamline lifeline", daemon=True)
        watch.start()  # it needs the GIL
    _show_stacks(stacks)
    from streamline.backends.hosts.stdio_relay import ChildStdio

    stdio = ChildStdio(socket.socket(fileno=stdio_fd), number)
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


def _await_parent_exit(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _show_stacks(file: int) -> None:
    """Write the stacks of all threads to `file` on `STACKS_SIGNAL` and on a crash."""
    import faulthandler

    faulthandler.enable(file, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


async def _serve_links(sock: socket.socket, run: EntryPoint, stdio: Any) -> None:
    """Serve links until the parent hangs up and every run has ended."""
    import asyncio

    import anyio

    from streamline.backends.ipc.control_connection import ControlConnection

    asyncio.get_running_loop().slow_callback_duration = math.inf  # debug mode would log each slow item
    control = ControlConnection(sock)
    async with anyio.create_task_group() as runs:
        with sock, contextlib.suppress(EOFError):
            while True:
                await anyio.wait_readable(sock)
                number, env, more = control.receive()
                env.adopt()
                fds = control.taken_descriptors()
                if len(fds) == 2:
                    link = socket.socket(fileno=fds[0])
                    runs.start_soon(_serve_one, partial(run, link, fds[1], *more), stdio, number, link)
                    continue
                for fd in fds:
                    os.close(fd)  # the consumer reads the end of its link
                print(
                    "streamline: no descriptors left in this process for another stream (see `ulimit -n`)",
                    file=sys.stderr,
                )


async def _serve_one(run: Callable[[], Awaitable[None]], stdio: Any, number: int, sock: socket.socket) -> None:
    """Serve one link; its failure doesn't reach the others."""
    import asyncio

    from streamline.backends.hosts.stdio_relay import OVER

    stdio.bind_task(number)
    try:
        await run()
    except asyncio.CancelledError:
        raise
    except BaseException:  # SystemExit of user code, too
        traceback.print_exc()
    finally:
        sock.close()
        stdio.send_frame(OVER, b"", number)
