"""A connection for control between two processes that trust each other: pickled messages, and descriptors beside them.

Both ends have proved that they know the key (`backends.network.handshake`) before the first message is unpickled.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any

SIZES = struct.Struct("<QQ")
"""Bytes of a message, pickled, and of the one buffer that may follow it."""

PIECE = 1 << 20
"""Bytes that the other end must take within the socket's timeout: a plan may be large, and a network slow."""

MOST_DESCRIPTORS = 2
"""With one message."""


class ControlConnection:
    """One end: `send` in any thread, `receive` in one. `descriptors` have arrived, in order; who pops one closes it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.descriptors: deque[int] = deque()
        self._sending = threading.Lock()
        self._passes = sock.family == socket.AF_UNIX

    def send(self, message: Any, *descriptors: int) -> None:
        """Send a message; drop it if the other end is gone. Blocks while it is slow.

        Args:
          descriptors: sent with it, over a Unix socket; the caller may close them then.
        """
        try:
            self.write(message, *descriptors)
        except OSError:
            self.hang_up()  # a part of it may have left

    def write(self, message: Any, *descriptors: int) -> None:
        """Send a message; raises `OSError`. A short one goes in one call: no interrupt leaves a part of it."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, 5, buffer_callback=buffers.append)
        body = buffers[0].raw() if buffers else memoryview(b"")
        first = memoryview(SIZES.pack(len(data), len(body)) + data)
        with self._sending:
            if descriptors:
                first = first[socket.send_fds(self.sock, [first], descriptors) :]
            for part in (first, body):
                for begin in range(0, len(part), PIECE):
                    self.sock.sendall(part[begin : begin + PIECE])

    def receive(self) -> Any:
        """Return the next message; `EOFError`: the other end is gone, or silent for longer than it may be."""
        size, body = SIZES.unpack(self._exactly(SIZES.size))
        data = self._exactly(size)
        return pickle.loads(data, buffers=[self._exactly(body)] if body else None)

    def taken_descriptors(self) -> list[int]:
        """Return the descriptors that have arrived, which the caller closes."""
        taken = list(self.descriptors)
        self.descriptors.clear()
        return taken

    def hang_up(self) -> None:
        """Wake the thread that receives. Idempotent."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, with what has arrived and was not taken; in the thread that receives, or after it."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            try:
                received = self._receive_into(view[filled:])
            except OSError as error:
                raise EOFError(str(error)) from error
            if not received:
                raise EOFError("it hung up")
            filled += received
        return data

    def _receive_into(self, view: memoryview) -> int:
        if not self._passes:
            return self.sock.recv_into(view)
        data, descriptors, _, _ = socket.recv_fds(self.sock, len(view), MOST_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self.descriptors.extend(descriptors)
        view[: len(data)] = data
        return len(data)
