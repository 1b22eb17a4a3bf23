"""What asks peers for objects, in one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import weakref
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import anyio
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace
from yarl import URL

from streamline.core.handshake import DialerHandshake, HandshakeError, PeerHello
from streamline.core.meters import Traffic
from streamline.core.tls import Certificates, channel_of, refusal
from streamline.errors import HostError, printable
from streamline.io.peers.node import PeerNode, Where, node_of, released
from streamline.io.peers.peer import Peer, PeerRequest, can_be_asked_for, chosen
from streamline.io.peers.server import Origin
from streamline.io.storage.base import FoundObject
from streamline.io.storage.http_client import BUFFER_BYTES, more_of

logger = logging.getLogger(__name__)

STALL_S = 10.0
"""Seconds of silence after which a peer counts as lost, as `Remote(lost_after_s=)`; also where it waits for a store."""

CONNECT_S = 3.0
"""Seconds for a connection and its handshake: four round trips in the job's own network."""

PIECE_BYTES = 32 * 2**20
"""The most that is asked for at once. It is held in memory, and passed on when all of it is there."""

PIECE_S = 120.0
"""Seconds for all of a piece: a peer that drips is slower than any store."""

MIN_SLOTS = 8
"""Requests to one peer at a time, at the least."""

IDLE_S = 5.0
"""Seconds for which a connection is kept for the next request: with 100 machines, each has thousands to others."""


class UnbelievableError(Exception):
    """An answer that isn't what was asked for."""


class PeerClient:
    """Asks peers for objects, in one event loop; joins them with the first request.

    Args:
      origin: what this process, if it serves, fetches from; closed with this.
    """

    def __init__(self, where: Where, origin: Origin, traffic: Traffic) -> None:
        self._where = where
        self._origin = origin
        self._traffic = traffic
        self._node: PeerNode | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots: dict[Peer, asyncio.Semaphore] = {}

    async def blocks(self, name: str, found: FoundObject, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """As `Peers.blocks`."""
        if not can_be_asked_for(found):
            return
        for begin in range(start, stop, PIECE_BYTES):
            piece = await self._piece(PeerRequest(name, found, begin, min(stop, begin + PIECE_BYTES)))
            self._traffic.peer_hits += piece is not None
            self._traffic.peer_misses += piece is None
            if piece is None:
                return
            self._traffic.peer_bytes += len(piece)
            yield piece

    async def aclose(self) -> None:
        """As `Peers.aclose`."""
        node, self._node = self._node, None
        session, self._session = self._session, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                if isinstance(session.connector, _PeerConnector):
                    session.connector.abort()
                await session.close()
            if node is not None:
                await released(node, self._origin)

    async def _piece(self, wanted: PeerRequest) -> bytes | None:
        """Return the bytes; None: from the store, please."""
        if self._node is None:
            self._node = node_of(self._where, self._origin)
        peers = await asyncio.shield(asyncio.wrap_future(self._node.ready))
        while (peer := chosen(peers, wanted.name)) is not None:
            seen = peer.failures
            if peer not in self._slots:
                self._slots[peer] = asyncio.Semaphore(max(MIN_SLOTS, -(-self._origin.concurrency // len(peers))))
            async with self._slots[peer]:
                if seen != peer.failures:
                    return None
                with suppress(ConnectionRefusedError):  # which costs no time: on to the next of the ranking
                    return await self._asked(peer, seen, wanted)
        return None

    async def _asked(self, peer: Peer, seen: int, wanted: PeerRequest) -> bytes | None:
        """As `_piece`, of one peer; `ConnectionRefusedError`: it isn't there."""
        try:
            async with asyncio.timeout(PIECE_S):
                found = await self._answer(peer, wanted)
        except (aiohttp.ClientError, OSError, HostError, UnbelievableError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            if peer.failed(seen, refused=refused):
                why = str(error) or type(error).__name__
                logger.warning("the peer %s is not asked for a while: %s", peer.name, printable(why)[:300])
            if refused:
                raise
            return None
        peer.answered()
        return found

    async def _answer(self, peer: Peer, wanted: PeerRequest) -> bytes | None:
        """Return the bytes; None: the peer doesn't have them, and doesn't fetch them."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_PeerConnector(self._where.key, self._where.tls),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=BUFFER_BYTES,
            )
        url = URL.build(scheme="http", host=peer.host, port=peer.port, path=wanted.target)
        async with asyncio.timeout(STALL_S):
            response = await self._session.get(url, headers=wanted.headers(), allow_redirects=False)
        async with response:
            if response.status == 404:
                return None
            expected = {**wanted.answer(), "Content-Length": str(wanted.stop - wanted.start)}
            told = {name: response.headers.get(name) for name in expected}
            if response.status != 206 or told != expected or "Transfer-Encoding" in response.headers:
                raise UnbelievableError(f"it answered {response.status} {told}, expected 206 {expected}")
            pieces: list[bytes] = []
            while data := await more_of(response.content, STALL_S):
                pieces.append(data)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(data) != wanted.stop - wanted.start:
            raise UnbelievableError(f"it sent {len(data):,} bytes, expected {wanted.stop - wanted.start:,}")
        return data


class _PeerConnector(aiohttp.BaseConnector):
    """Makes connections on which both ends have proved that they know the key."""

    def __init__(self, key: bytes, tls: Certificates | None) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE_S)
        self._key = key
        self._context: ssl.SSLContext | None = None
        self._trusted = ""
        if tls is not None:
            self._context, self._trusted = tls.trusting()
        self._make = partial(ResponseHandler, loop=self._loop)
        self._made: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        host, port = str(req.url.host), int(req.url.port or 0)
        hello = PeerHello(role="objects", node=socket.gethostname(), pid=os.getpid())
        introduce = partial(_Introducing, DialerHandshake(self._key, hello))
        async with asyncio.timeout(CONNECT_S):
            try:
                transport, introducing = await self._loop.create_connection(introduce, host, port, ssl=self._context)
            except ssl.SSLError as error:
                raise refusal(error, self._trusted) from error
            try:
                await introducing.over
            except BaseException:
                transport.abort()
                raise
        protocol = self._make()
        self._made.add(protocol)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return protocol

    def abort(self) -> None:
        """Drop all connections: to close one over TLS waits for its other end."""
        for transport in [protocol.transport for protocol in self._made]:
            if transport is not None:
                transport.abort()


class _Introducing(asyncio.Protocol):
    """The handshake of a connection that this end has dialled.

    Attributes:
      over: done once it has succeeded, or failed.
    """

    def __init__(self, handshake: DialerHandshake) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self._handshake = handshake
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self._handshake.channel = channel_of(tls.getpeercert(binary_form=True))
        transport.write(self._handshake.greeting)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            while data and not self.over.done():
                needs = self._handshake.needs
                self._transport.write(self._handshake.receive(data[:needs]))
                data = data[needs:]
                if self._handshake.done:
                    self.over.set_result(None)
        except HandshakeError as error:
            self.over.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            why = "it hung up in the handshake: another key, or too many connections there"
            self.over.set_exception(ConnectionResetError(why))
