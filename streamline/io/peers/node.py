"""This process among the peers: where they are, and whether it serves this machine's folder.

Of the processes of a machine that share a folder, one serves it to all: the one that has locked a file there, and can
listen at one of the listed addresses. The kernel frees both when it ends; the others look every `RETRY_S`, and the
first of them takes over.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from aiohttp import web

from streamline.core.atomic_file import free_lock, lock_file
from streamline.core.forks import ForkSafeLock, disowned_in_copies
from streamline.core.handshake import PeerHello
from streamline.core.listener import Listener
from streamline.core.threads import start_thread
from streamline.core.tls import Certificates
from streamline.errors import HostError, ReadError
from streamline.io.peers.peer import Peer, look_up
from streamline.io.peers.server import ObjectServer, Origin
from streamline.io.storage.object_cache_folder import CacheFolder

logger = logging.getLogger(__name__)


class Where(NamedTuple):
    """A cache_dir, the listed peers, and what proves that this is one of them; `tls`: None, nothing is encrypted."""

    folder: str
    listed: tuple[tuple[str, int], ...]
    key: bytes
    tls: Certificates | None = None


RETRY_S = 2.0
"""Seconds between two looks at whether this machine's folder is served."""

CLOSE_S = 2.0
"""Seconds that leaving waits at the most; what hangs, a look-up of a name say, ends by itself."""

SHUTDOWN_S = 0.1
"""Seconds for answers that are being sent: their origins have gone, so they end by themselves. 0 would be no limit."""

MOST_CONNECTIONS = 1024
"""Connections that are served at a time; a further one is refused."""


class PeerNode:
    """This process among the peers of one list. One thread, which serves where that is its task; and a listener's.

    Attributes:
      ready: the peers, once this process has tried to serve.
    """

    def __init__(self, where: Where) -> None:
        self.where = where
        self.users = 0
        self.ready: Future[list[Peer]] = Future()
        self._ended: Future[None] = Future()
        self._server = ObjectServer()
        self._sockets: set[socket.socket] = set()
        self._connecting: list[Future[Any]] = []
        self._lock: int | None = None
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._closed = threading.Event()
        self._said = False
        self._thread = threading.Thread(target=self._main, name="streamline peers", daemon=True)
        disowned_in_copies(self)
        start_thread(self._thread)

    def serves(self) -> bool:
        """Whether it is this process that serves the machine's folder."""
        return self._listener is not None

    def add(self, origin: Origin) -> None:
        """Serve what `origin` fetches, too."""
        self._server.origins.append(origin)

    async def remove(self, origin: Origin) -> None:
        """Serve it no longer, and close it."""
        self._server.origins.remove(origin)
        if self._loop is not None and not self._ended.done():
            with anyio.move_on_after(CLOSE_S, shield=True):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._server.forget(origin), self._loop))

    async def aclose(self) -> None:
        """Leave the peers, after all origins have been removed."""
        self._closed.set()
        if self._loop is not None and self._over is not None and not self._ended.done():
            self._loop.call_soon_threadsafe(self._over.set)
        with anyio.move_on_after(CLOSE_S, shield=True) as hangs:
            await asyncio.shield(asyncio.wrap_future(self._ended))
        if not hangs.cancelled_caught:
            self._thread.join()

    def disown(self) -> None:
        """Close the descriptors in a fork, which would keep the lock and the connections."""
        for sock in self._sockets:
            sock.close()
        if self._lock is not None:
            os.close(self._lock)

    def _main(self) -> None:
        peers: list[Peer] = []
        try:
            peers = look_up(self.where.listed)
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # uvloop wouldn't use a `TlsSocket`
                runner.run(self._serve(peers))
        finally:
            if not self.ready.done():
                self.ready.set_result(peers)
            self._ended.set_result(None)

    async def _serve(self, peers: list[Peer]) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        http = web.Server(self._server.answer, access_log=None, handler_cancellation=True)
        try:
            while not self._closed.is_set():
                self._listener = self._listener or self._listening(peers, http)
                if not self.ready.done():
                    self.ready.set_result(peers)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), None if self._listener else RETRY_S)
        finally:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*map(asyncio.wrap_future, self._connecting), return_exceptions=True)
                await http.shutdown(SHUTDOWN_S)
                await self._server.aclose()
            if self._lock is not None:
                free_lock(self._lock)
                self._lock = None

    def _listening(self, peers: list[Peer], http: web.Server) -> Listener | None:
        """Return what listens for all peers, if this process is to serve; None: it isn't."""
        try:
            self._lock = self._locked() if self._lock is None else self._lock
        except (OSError, ReadError) as error:
            self._say(f"can't serve cache_dir= to peers: {error}")
        if self._lock is None:
            return None
        why = "the list is empty"
        for peer in peers:
            host = peer.host
            if peer.is_loopback and not all(one.is_loopback for one in peers):
                host = "::" if ":" in host else "0.0.0.0"  # as /etc/hosts of Debian has a machine's own name
            try:
                return Listener(
                    (host, peer.port), self.where.key, lambda *peer: self._connected(http, *peer), self.where.tls
                )
            except HostError as error:
                why = str(error)
        self._say(f"none of peers= is an address of this machine: it asks the others, and serves none: {why}")
        free_lock(self._lock)
        self._lock = None
        return None

    def _locked(self) -> int | None:
        path = CacheFolder(self.where.folder).path
        return lock_file(Path(path, f"{hashlib.sha256(repr(self.where.listed).encode()).hexdigest()[:16]}.serving"))

    def _connected(self, http: web.Server, sock: socket.socket, hello: PeerHello, address: str) -> None:
        """Take a connection whose handshake is done, in the listener's thread."""
        assert self._loop is not None
        if hello.role != "objects" or len(self._sockets) >= MOST_CONNECTIONS:
            sock.close()
            return
        self._sockets = {one for one in self._sockets if one.fileno() >= 0} | {sock}
        sock.setblocking(False)
        taken = asyncio.run_coroutine_threadsafe(self._loop.connect_accepted_socket(http, sock), self._loop)
        self._connecting = [*(one for one in self._connecting if not one.done()), taken]

    def _say(self, line: str) -> None:
        if not self._said:
            self._said = True
            logger.warning("%s", line)


_nodes: dict[Where, PeerNode] = {}

_joining = ForkSafeLock()

os.register_at_fork(after_in_child=_nodes.clear)  # those are the parent's


def node_of(where: Where, origin: Origin) -> PeerNode:
    """Return this process's node of a list of peers; it fetches from `origin`, too, until that is `released`."""
    with _joining:
        node = _nodes.get(where)
        if node is None:
            node = _nodes[where] = PeerNode(where)
        node.users += 1
        node.add(origin)
    return node


async def released(node: PeerNode, origin: Origin) -> None:
    """Take an origin back; the last one ends the node."""
    await node.remove(origin)
    with _joining:
        node.users -= 1
        last = not node.users
        if last and _nodes.get(node.where) is node:
            del _nodes[node.where]
    if last:
        await node.aclose()
