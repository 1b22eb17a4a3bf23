"""The trainer's end: accepts connections, and passes on those whose handshake succeeds. One thread.

A connection that has not proved itself costs a descriptor and at most some kilobytes, for at most `HANDSHAKE_S`
seconds; there are at most `MOST_PENDING`, and a further one takes the place of the oldest: connections that say nothing
don't lock agents out.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from streamline.backends.remote.handshake import HandshakeError, ListenerHandshake, PeerHello
from streamline.core.forks import disowned_in_copies
from streamline.core.threads import start_thread
from streamline.errors import HostError, printable

logger = logging.getLogger("streamline.hosts")

HANDSHAKE_S = 10.0
"""Seconds for a whole handshake: three round trips."""

MOST_PENDING = 256

MOST_LOGGED = 1024
"""Addresses and reasons that are remembered, to log each once."""


class _Pending:
    """A connection whose handshake is not done."""

    def __init__(self, sock: socket.socket, address: str, key: bytes) -> None:
        self.sock = sock
        self.address = address
        self.handshake = ListenerHandshake(key)
        self.deadline = time.monotonic() + HANDSHAKE_S


class Listener:
    """Listens at an address, as long as it isn't closed.

    Args:
      address: port 0: any that is free.
      peer: called in the listener's thread with each connection, blocking, what it said of itself, and its address.

    Raises:
      HostError: the address is in use, or not of this machine.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, peer: Callable[[socket.socket, PeerHello, str], object]
    ) -> None:
        self._key = key
        self._peer = peer
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._server = socket.create_server(address, family=family, backlog=1024)
        except OSError as error:
            raise HostError(
                f"can't listen for agents at {address[0]}:{address[1]}: {error.strerror or error}"
            ) from error
        self._server.setblocking(False)
        self._woken, self._wake = os.pipe()
        self._pending: OrderedDict[socket.socket, _Pending] = OrderedDict()
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="streamline listener", daemon=True)
        start_thread(self._thread)
        disowned_in_copies(self)

    def close(self) -> None:
        """Stop listening, and drop connections whose handshake isn't done. Idempotent."""
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def disown(self) -> None:
        """Close the descriptors in a fork, in which the thread doesn't go on."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._drop_all()

    def _serve(self) -> None:
        try:
            while True:
                wait_s = next((pending.deadline - time.monotonic() for pending in self._pending.values()), None)
                for key, _ in self._selector.select(None if wait_s is None else max(0.0, wait_s)):
                    if key.fileobj == self._woken:
                        return
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        self._read(key.data)
                self._expire()
        finally:
            self._drop_all()

    def _accept(self) -> None:
        try:
            sock, address = self._server.accept()
        except OSError as error:  # it has hung up already; or no descriptors are left: those that wait are dropped
            if not isinstance(error, BlockingIOError | ConnectionError) and self._pending:
                self._drop(next(iter(self._pending.values())))
            return
        sock.setblocking(False)
        if len(self._pending) >= MOST_PENDING:
            self._drop(next(iter(self._pending.values())))
        pending = self._pending[sock] = _Pending(sock, str(address[0]), self._key)
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _read(self, pending: _Pending) -> None:
        handshake = pending.handshake
        try:
            data = pending.sock.recv(handshake.needs)
            answer = handshake.receive(data)
            pending.sock.sendall(answer)  # a new socket's buffer takes it
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self._refuse(pending, str(error))
            return
        if not data:
            self._drop(pending)
        elif handshake.refused:
            self._refuse(pending, handshake.refused)
        elif handshake.done:
            self._pass_on(pending)

    def _pass_on(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.sock.setblocking(True)
        hello: Any = pending.handshake.hello
        try:
            self._peer(pending.sock, hello, pending.address)
        except Exception:
            pending.sock.close()
            logger.exception("a connection of %s can't be used", pending.address)

    def _refuse(self, pending: _Pending, why: str) -> None:
        """Drop a connection, and log it once per address and reason."""
        self._drop(pending)
        known = pending.address, why
        if known not in self._logged:
            if len(self._logged) >= MOST_LOGGED:
                self._logged.popitem(last=False)
            self._logged[known] = None
            logger.warning("a connection from %s is refused: %s", pending.address, printable(why))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._pending and (oldest := next(iter(self._pending.values()))).deadline <= now:
            self._refuse(oldest, f"no handshake within {HANDSHAKE_S:g} s")

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending.sock, None)
        self._selector.unregister(pending.sock)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.sock.close()

    def _drop_all(self) -> None:
        for sock in list(self._pending):
            sock.close()
        self._pending.clear()
        with suppress(OSError):
            os.close(self._woken)
        self._server.close()
        self._selector.close()
