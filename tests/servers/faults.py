"""A proxy between a client and a real server, which breaks answers as a test's script says.

It runs in a thread with a loop of its own, so that it serves any event loop, thread and process. Each connection
carries one request; the answer to request number i goes through `script[i]`, those behind the script as they are.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.servers.nginx import Nginx

__all__ = [
    "Fault", "Faults", "busy", "cut", "drip", "faults", "flipped", "garbage", "replaced", "reset", "silence", "told",
    "whole",
]  # fmt: skip

Fault = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
"""Sends what is left of an answer, head and body; behind it the connection is closed."""


async def whole(answer: bytes, writer: asyncio.StreamWriter) -> None:
    """Send it as it is."""
    writer.write(answer)


def cut(sent: int) -> Fault:
    """Send the first bytes, then close."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer[:sent])

    return send


def reset(sent: int) -> Fault:
    """Send the first bytes, then reset the connection (RST)."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer[:sent])
        await writer.drain()
        made = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return send


def silence(sent: int) -> Fault:
    """Send the first bytes, then nothing until the client has gone."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer[:sent])
        raise _Silence

    return send


class _Silence(Exception):  # noqa: N818 - it is none
    """Nothing more is sent until the client has gone."""


async def drip(answer: bytes, writer: asyncio.StreamWriter) -> None:
    """Send it byte by byte, each in a packet of its own."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for index in range(len(answer)):
        writer.write(answer[index : index + 1])
        await writer.drain()
        await asyncio.sleep(0)


def busy(status: str = "503 Service Unavailable", *headers: str) -> Fault:
    """Send another answer, without content."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "Content-Length: 0", "", ""]).encode())

    return send


def garbage(data: bytes) -> Fault:
    """Send something else."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return send


def told(more: int) -> Fault:
    """Tell a Content-Length that is larger than the content by `more`, or smaller."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        head = re.sub(rb"(?<=Content-Length: )\d+", str(len(body) + more).encode(), head)
        writer.write(head + b"\r\n\r\n" + body)

    return send


def flipped(byte: int) -> Fault:
    """Flip a bit of the content."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n" + body[:byte] + bytes([body[byte] ^ 4]) + body[byte + 1 :])

    return send


def replaced(sent: int, replace: Callable[[], None]) -> Fault:
    """Send the first bytes, replace the object, and close."""

    async def send(answer: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer[:sent])
        replace()

    return send


class Faults:
    """The proxy: `script` is worked off, `requests` are the heads of what has been asked for.

    A request for the first byte alone, as a look at an object makes it, is answered as it is, and is not among them,
    unless `looks_too`.
    """

    def __init__(self, upstream: int) -> None:
        self.script: list[Fault] = []
        self.requests: list[str] = []
        self.looks_too = False
        self.port = 0
        self._upstream = upstream
        self._answering: set[asyncio.Task[None] | None] = set()

    def url(self, path: str) -> str:
        """Return the URL of a path, through this proxy."""
        return f"http://127.0.0.1:{self.port}/{path}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread."""
        ready = threading.Event()
        ends: list[Callable[[], object]] = []

        async def serve() -> None:
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ends.append(lambda: loop.call_soon_threadsafe(over.set))
            ready.set()
            await over.wait()
            server.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fault proxy")
        thread.start()
        ready.wait()
        try:
            yield
        finally:
            ends[0]()
            thread.join()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._answering.add(task)  # nothing else holds it once the client has gone
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            fault: Fault = whole
            if self.looks_too or b"\nRange: bytes=0-0\r\n" not in head:
                self.requests.append(head.decode())
                fault = self.script.pop(0) if self.script else whole
            try:
                await fault(await self._answer(head), writer)
            except _Silence:
                await reader.read()
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client has gone
        finally:
            writer.close()
            self._answering.discard(task)

    async def _answer(self, head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            writer.write(head[:-2] + b"Connection: close\r\n\r\n")
            return await reader.read()
        finally:
            writer.close()


@pytest.fixture(scope="session")
def faulty_nginx(nginx: Nginx) -> Iterator[Faults]:
    """Put the proxy before nginx, once for all tests."""
    proxy = Faults(nginx.ports["plain"])
    with proxy.running():
        yield proxy


@pytest.fixture
def faults(faulty_nginx: Faults) -> Faults:
    """Return the proxy before nginx, with nothing in its script."""
    faulty_nginx.script, faulty_nginx.looks_too = [], False
    faulty_nginx.requests.clear()
    return faulty_nginx
