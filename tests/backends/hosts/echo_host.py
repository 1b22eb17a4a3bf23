"""What runs in the host processes of these tests: calls what it is sent, and sends back what that returned."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import anyio
import cloudpickle

SIZE = struct.Struct("<I")


async def serve_socket(sock: socket.socket, payload: int) -> None:
    os.close(payload)
    sock.setblocking(False)
    while (call := await receive(sock)) is not None:
        try:
            result = call()
        except Exception as error:
            result = error
        data = cloudpickle.dumps(result)
        sock.setblocking(True)
        sock.sendall(SIZE.pack(len(data)) + data)
        sock.setblocking(False)


async def receive(sock: socket.socket) -> Callable[[], Any] | None:
    data = bytearray()
    while len(data) < SIZE.size or len(data) < SIZE.size + SIZE.unpack_from(data)[0]:
        await anyio.wait_readable(sock)
        try:
            if not (more := sock.recv(1 << 16)):
                return None
        except ConnectionError:
            return None
        data += more
    call: Callable[[], Any] = pickle.loads(data[SIZE.size :])
    return call
