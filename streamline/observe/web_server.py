"""An HTTP server in a thread of its own, for what is shown of streams. It waits for no client."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import http_exceptions, web

from streamline.core.forks import disown_in_copies
from streamline.core.options import listening_socket
from streamline.core.threads import start_thread

logger = logging.getLogger("streamline.web")
NO_HTTP = (http_exceptions.HttpProcessingError, web.RequestPayloadError)
logger.addFilter(lambda record: not isinstance((record.exc_info or [None] * 2)[1], NO_HTTP))
"""Says nothing of requests that are no HTTP: anybody may send them, and they are answered with 400."""

MOST_CONNECTIONS = 64
"""Connections that are served at a time; for a further one, the oldest is dropped: so no client locks others out."""

SHUTDOWN_S = 0.1
"""Seconds for answers that are being sent when it is closed."""


ACCEPT_TURNS = 3
"""Turns of the loop until a connection that asyncio has accepted is among those of aiohttp's server. One that isn't
when the loop ends stays open, without an answer, until it is garbage collected."""


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
        self._thread = threading.Thread(target=self._main, name="streamline web server", daemon=True)
        disown_in_copies(self)
        try:
            start_thread(self._thread)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, and drop all connections. Idempotent."""
        self._closed = True
        if self._thread.ident is None:  # it isn't there, or will see that before it uses the socket
            self._socket.close()
            return
        loop, over = self._loop, self._over
        if loop is not None and over is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(over.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """Close the listening socket in a fork, where the thread doesn't go on."""
        self._socket.close()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # of uvloop's, no reader can be removed
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._closed:
            self._socket.close()
            return
        http = web.Server(self._answer, access_log=None, logger=logger)

        def connected() -> asyncio.Protocol:
            if len(http.connections) >= MOST_CONNECTIONS:
                oldest = http.connections[0]
                transport = oldest.transport
                oldest.force_close()
                if transport is not None:
                    transport.abort()  # a close would wait for a client that doesn't read
            return http()

        server = await self._loop.create_server(connected, sock=self._socket)
        await self._over.wait()
        self._loop.remove_reader(self._socket)  # accept no more; a server that is closed forgets those on their way
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        transports = [one.transport for one in http.connections]
        await http.shutdown(SHUTDOWN_S)
        for transport in transports:
            if transport is not None:
                transport.abort()  # as above
        server.close()
        await asyncio.sleep(0)  # in which they close their sockets
