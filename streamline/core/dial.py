"""The end of a connection that dials: dialled, and its handshake done."""

from __future__ import annotations

import socket
import time
from typing import Any, NamedTuple

from streamline.core.handshake import DialerHandshake, PeerHello
from streamline.core.tls import Certificates
from streamline.errors import HostError


class UnreachableError(HostError):
    """No handshake could begin, or it was cut off: worth another attempt."""


def dial(
    address: tuple[str, int],
    key: bytes,
    hello: PeerHello,
    *,
    tls: Certificates | None = None,
    timeout_s: float = 10.0,
    connect_s: float | None = None,
) -> socket.socket:
    """Return a connection to a listener, whose handshake is done. Blocks.

    Args:
      tls: None: not encrypted.
      timeout_s: for all of it, at each address of the name.
      connect_s: of these, for the connection, which something that listens accepts at once; None: as long.

    Raises:
      UnreachableError: nothing listens there, or not in time.
      HandshakeError: it has another key, or refuses this end.
      HostError: there is no certificate.
    """
    deadline = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection(address, timeout_s if connect_s is None else connect_s)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        raise _unreachable(address, error) from error
    return Introduction(address, key, hello, tls).introduced(sock, deadline)


class Introduction(NamedTuple):
    """How a connection begins. Picklable: with TLS, the process that uses it has to begin it itself.

    Attributes:
      address: host and port, as of a socket.
      tls: None: not encrypted.
    """

    address: Any
    key: bytes
    hello: PeerHello
    tls: Certificates | None

    def dial(self, sock: socket.socket, timeout_s: float = 10.0) -> socket.socket:
        """Connect a socket and do the handshake; return what to use in its place. Blocks. Raises what `dial` does."""
        deadline = time.monotonic() + timeout_s
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.address)
        except OSError as error:
            sock.close()
            raise _unreachable(self.address, error) from error
        return self.introduced(sock, deadline)

    def introduced(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Do the handshake on a connected socket; return what to use in its place."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        where = f"{self.address[0]}:{self.address[1]}"
        return greeted(sock, self.key, self.hello, where, tls=self.tls, deadline=deadline)


def greeted(
    sock: socket.socket,
    key: bytes,
    hello: PeerHello,
    where: str,
    *,
    tls: Certificates | None = None,
    deadline: float | None = None,
) -> socket.socket:
    """Return a connection, of a socket connected to the listener at `where`, with its handshake done.

    Args:
      deadline: on the monotonic clock; None: in 10 s.

    Raises:
      As `dial`; the socket is closed then.
    """
    deadline = time.monotonic() + 10.0 if deadline is None else deadline
    handshake = DialerHandshake(key, hello)
    try:
        if tls is not None:
            sock = encrypted = tls.dialling()(sock)
            sock.settimeout(_left_s(deadline))
            encrypted.shake_hands()
            handshake.channel = encrypted.channel
        _shake_hands(sock, handshake, where, deadline)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise UnreachableError(f"{where} doesn't answer: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _unreachable(address: Any, error: Exception) -> UnreachableError:
    return UnreachableError(f"{address[0]}:{address[1]} can't be reached: {error}")


def _shake_hands(sock: socket.socket, handshake: DialerHandshake, where: str, deadline: float) -> None:
    answer = handshake.greeting
    while True:
        sock.settimeout(_left_s(deadline))
        sock.sendall(answer)
        if handshake.done:
            return
        data = sock.recv(handshake.needs)
        if not data:
            raise UnreachableError(f"{where} hung up: another key, or too many connections there")
        answer = handshake.receive(data)


def _left_s(deadline: float) -> float:
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left_s
