"""An HTTP server in a thread of its own, for what is shown of streams. It waits for no client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from weakref import WeakSet

from aiohttp import web

from streamline.core.forks import disowned_in_copies
from streamline.core.listener import listening_socket
from streamline.core.threads import start_thread

MOST_CONNECTIONS = 64
"""Connections that are served at a time; for a further one, the oldest is dropped: so no client locks others out."""

SHUTDOWN_S = 0.1
"""Seconds for answers that are being sent when it is closed."""


class WebServer:
    """Answers requests until it is closed.

    Args:
      address: port 0: any that is free.
      answer: called in the server's thread with each request; shouldn't block.

    Attributes:
      url: "http://127.0.0.1:9464".

    Raises:
      HostError: the address is in use, or not of this machine; there is no room for a thread.
    """

    def __init__(
        self, address: tuple[str, int], answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> None:
        self._answer = answer
        self._socket = listening_socket(address)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._closed = False
        self._serves = threading.Event()
        self._adopted: WeakSet[socket.socket] = WeakSet()
        self._transports: WeakSet[asyncio.Transport] = WeakSet()
        self._thread = threading.Thread(target=self._main, name="streamline web server", daemon=True)
        disowned_in_copies(self)
        try:
            start_thread(self._thread)
        except BaseException:
            self._socket.close()
            raise

    def adopt(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Let a protocol serve a connection that came elsewhere, until this is closed. From any thread."""
        sock.setblocking(False)
        self._serves.wait()
        assert self._loop is not None
        self._adopted.add(sock)
        asyncio.run_coroutine_threadsafe(self._adopt(sock, protocol), self._loop)

    async def _adopt(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)
        self._transports.add(transport)

    def close(self) -> None:
        """Stop listening, and drop all connections. Idempotent."""
        self._closed = True
        loop, over = self._loop, self._over
        if loop is not None and over is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(over.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """Close the sockets in a fork, where the thread doesn't go on."""
        for sock in (self._socket, *self._adopted):
            sock.close()

    def _main(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve())
        for sock in self._adopted:  # those that came too late
            sock.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        http = web.Server(self._answer, access_log=None)

        def connected() -> asyncio.Protocol:
            if len(http.connections) >= MOST_CONNECTIONS:
                oldest = http.connections[0]
                transport = oldest.transport
                oldest.force_close()
                if transport is not None:
                    transport.abort()  # a close would wait for a client that doesn't read
            return http()

        server = await self._loop.create_server(connected, sock=self._socket)
        self._serves.set()
        if not self._closed:
            await self._over.wait()
        server.close()
        for transport in self._transports:
            transport.abort()
        await http.shutdown(SHUTDOWN_S)
