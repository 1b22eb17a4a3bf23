"""Reading whenever a socket has something, in whatever event loop.

The loops of asyncio call a function as long as a descriptor is readable. What is registered once need not be set up and
taken down for each message, and what was read is there when the reader's task wakes. Under trio a task waits.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import anyio

from streamline.border.shared_socket import SharedSocket

__all__ = ["Reading"]


class Reading:
    """Calls `read` when there is something to read, from the first `wait` on.

    Args:
      read: reads all that is there; must not raise.
    """

    def __init__(self, sock: SharedSocket, read: Callable[[], None]) -> None:
        self._socket = sock
        self._read = read
        self._held = ExitStack()  # the socket, while the loop calls us
        self._loop: asyncio.AbstractEventLoop | None = None  # that calls us
        self._thread = 0
        self._waiting: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until something was read.

        Cancellation: nothing is read until the next call.

        Raises:
          OSError, anyio.ClosedResourceError: the socket can't be waited for.
          Gone: it is closed.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            await self._wait_readable()
            return
        if self._loop is None:
            self._begin(loop)
        self._waiting = loop.create_future()
        try:
            await self._waiting
        except BaseException:
            self.end()
            raise
        finally:
            self._waiting = None

    def end(self) -> None:
        """Be called no more, and wake who waits, if this is the loop's thread; in any other one nothing happens."""
        loop = self._loop
        if loop is not None and self._thread == threading.get_ident():
            self._loop = None
            self._held.close()
            self._tell()

    async def _wait_readable(self) -> None:
        with self._socket as sock:
            await anyio.wait_readable(sock)
        self._read()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        with ExitStack() as held:
            sock = held.enter_context(self._socket)
            loop.add_reader(sock, self._readable)
            held.callback(_forget, loop, sock)
            self._held = held.pop_all()
        self._loop, self._thread = loop, threading.get_ident()

    def _readable(self) -> None:
        self._read()
        self._tell()

    def _tell(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _forget(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.remove_reader(sock)
