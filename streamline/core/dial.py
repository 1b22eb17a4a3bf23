"""The end of a connection that dials: dialled, and its handshake done."""

from __future__ import annotations

import socket
import time

from streamline.core.handshake import DialerHandshake, PeerHello
from streamline.errors import HostError


class UnreachableError(HostError):
    """No handshake could begin, or it was cut off: worth another attempt."""


def dial(
    address: tuple[str, int],
    key: bytes,
    hello: PeerHello,
    *,
    timeout_s: float = 10.0,
) -> socket.socket:
    """Return a connection to a listener, whose handshake is done. Blocks.

    Args:
      timeout_s: for all of it, but for the look-up of a name.

    Raises:
      UnreachableError: nothing listens there, or not in time.
      HandshakeError: it has another key, or refuses this end.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        raise UnreachableError(f"{where} can't be reached: {error}") from error
    return greeted(sock, key, hello, where, timeout_s=deadline - time.monotonic())


def greeted(sock: socket.socket, key: bytes, hello: PeerHello, where: str, *, timeout_s: float = 10.0) -> socket.socket:
    """Return `sock`, connected to the listener at `where`, with its handshake done; closed if that fails.

    Raises:
      As `dial`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        _shake_hands(sock, DialerHandshake(key, hello), where, deadline)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise UnreachableError(f"{where} doesn't answer: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


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
