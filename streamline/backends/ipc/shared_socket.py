"""A socket used by several tasks and threads, closed when the last of them leaves. A Unix one passes descriptors."""

from __future__ import annotations

import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from streamline.core.forks import disown_in_copies
from streamline.errors import HostError

SOCKET_BYTES = 1 << 20
"""Bytes of a Unix socket's buffers that are asked for; the system may give less. Those of TCP grow by themselves."""

DESCRIPTORS = 64
"""Descriptors read at once: a kernel returns those of one message, and a message has one."""

_RECEIVE = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))

_ANCILLARY = socket.CMSG_SPACE(4 * DESCRIPTORS)

_SEND = int(getattr(socket, "MSG_NOSIGNAL", 0))

_TRUNCATED = int(socket.MSG_CTRUNC)  # enumerations are slow


class Gone(Exception):  # noqa: N818 - as LinkClosed
    """The socket is closed."""


class SharedSocket:
    """A connected stream socket, which it owns. Use it inside `with`, in any thread.

    Args:
      closed: called when it is closed, in the thread of the last user.

    Attributes:
      descriptors: that have arrived, in order; the caller closes one that it pops.
    """

    def __init__(self, sock: socket.socket, closed: Callable[[], object]) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if sock.family == socket.AF_UNIX else ():
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self.descriptors: deque[int] = deque()
        self._socket = sock
        self._on_closed = closed
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._least = 1
        disown_in_copies(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise Gone
            self._users += 1
        return self._socket

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._close_socket()

    def close(self) -> None:
        """Close it when its last user leaves; wakes those that wait for it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(OSError):  # the other end was faster
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes waiting tasks, in any loop
            idle = not self._users
        if idle:
            self._close_socket()

    def disown(self) -> None:
        """Close the descriptor in a fork, without shutting the connection down."""
        self._lock = threading.Lock()  # another thread may have held it
        self._closed, self._users = True, 1
        self._socket.close()

    def write(self, pieces: Sequence[memoryview], descriptor: int | None = None) -> int:
        """Write what the socket takes; return the bytes. A descriptor goes with the first byte."""
        if descriptor is not None:
            return self._socket.sendmsg(
                pieces, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))], _SEND
            )
        return self._socket.send(pieces[0], _SEND) if len(pieces) == 1 else self._socket.sendmsg(pieces, (), _SEND)

    def read(self, spaces: list[memoryview]) -> int:
        """Read what is there into `spaces`; return the bytes, 0: the other end has hung up.

        Raises:
          OSError: the other end is gone.
          HostError: a descriptor was lost: this process has as many open as it may.
        """
        nbytes, ancillary, flags, _ = self._socket.recvmsg_into(spaces, _ANCILLARY, _RECEIVE)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array("i", data[: len(data) // 4 * 4])
                self.descriptors.extend(got)
                for fd in () if _RECEIVE else got:
                    os.set_inheritable(fd, False)
        if flags & _TRUNCATED:
            raise HostError(
                "this process has as many files open as it may (`ulimit -n`): what its workers send is lost"
            )
        return nbytes

    def readable_from(self, nbytes: int) -> None:
        """Let an event loop find it readable once `nbytes` are there, or the other end is gone; not before."""
        if nbytes != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._least = nbytes

    def drop_descriptors(self) -> None:
        """Close those that were not popped."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _close_socket(self) -> None:
        self._socket.close()
        self._on_closed()
        del self._on_closed  # breaks a reference cycle
