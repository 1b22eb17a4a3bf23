"""The entry point of a host on another machine that ranks of the consumer's machine share."""

from __future__ import annotations

import socket

from streamline.backends.hosts.shared_runs import serve_link
from streamline.backends.remote.network_link import load_here, network_link
from streamline.core.dial import Introduction


async def serve_network(sock: socket.socket, payload: int, introduction: Introduction | None = None) -> None:
    """Serve a run, as `streamline.backends.remote.network_link.serve_network` does, as a peer of others."""
    await serve_link(await network_link(sock, introduction), payload, load_here)
