"""What a host process does with a link that it is handed: takes in what was shipped, and runs the workers of it."""

from __future__ import annotations

import socket

from streamline.border.failures import carry
from streamline.border.messages import Broken
from streamline.border.wire import SocketLink
from streamline.hosts.far import serve
from streamline.hosts.shipping import load

__all__ = ["attend"]


async def attend(sock: socket.socket, payload: int) -> None:
    """Run the workers of a running; where its plan can't be taken in, tell it why."""
    link = SocketLink(sock)
    try:
        spec = load(payload)
    except BaseException as error:  # the import of a user's module may raise anything
        link.send(Broken(carry(error)))
        await link.drain()
        link.close()
        return
    await serve(link, spec)
