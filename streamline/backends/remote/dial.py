"""The agent's end of a connection: dialled, and its handshake done."""

from __future__ import annotations

import socket

from streamline.backends.remote.handshake import DialerHandshake, PeerHello
from streamline.errors import HostError


class UnreachableError(HostError):
    """No handshake could begin, or it was cut off: worth another attempt."""


def dial(address: tuple[str, int], key: bytes, hello: PeerHello, *, timeout_s: float = 10.0) -> socket.socket:
    """Return a connection to a listener, whose handshake is done. Blocks.

    Raises:
      UnreachableError: nothing listens there, or not in time.
      HandshakeError: it has another key, or refuses this end.
    """
    try:
        sock = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise UnreachableError(f"{address[0]}:{address[1]} can't be reached: {error}") from error
    try:
        handshake = DialerHandshake(key, hello)
        sock.sendall(handshake.greeting)
        while not handshake.done:
            data = sock.recv(handshake.needs)
            if not data:
                raise UnreachableError(f"{address[0]}:{address[1]} hung up: another key, or too many connections there")
            sock.sendall(handshake.receive(data))
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise UnreachableError(f"{address[0]}:{address[1]} doesn't answer: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock
