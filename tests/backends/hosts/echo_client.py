"""The near end of a host process that runs `echo_host`."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import Shipped, dumps

SIZE = struct.Struct("<I")


class Echo:
    """A host process, and a link over which it calls what it is sent."""

    def __init__(self, host: HostProcess, shipped: Shipped, answer: Callable[[Any], Any] | None = None) -> None:
        self.host = host
        self.sock: socket.socket = host.link(shipped, answer)

    def send(self, call: Callable[[], Any]) -> None:
        data = dumps(call)
        self.sock.sendall(SIZE.pack(len(data)) + data)

    def call(self, call: Callable[[], Any]) -> Any:
        self.send(call)
        (size,) = SIZE.unpack(self.sock.recv(SIZE.size, socket.MSG_WAITALL))
        return pickle.loads(self.sock.recv(size, socket.MSG_WAITALL))

    def close(self) -> None:
        self.sock.close()
        self.host.close()
