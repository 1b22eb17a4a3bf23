"""From which size on is a buffer better beside the pickle than in it, and in shared memory than in the frame?

`python -m bench.buffer_threshold` prints, for lists of 1 and of 32 arrays, the µs of processor time that a list costs
both processes together, and the µs between two lists. Not one of the suites: it says where `BESIDE` and `SLAB_BYTES`
come from, and changes nothing but them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import partial
from time import perf_counter, process_time
from typing import Any

import anyio
import numpy as np

from streamline.backends.ipc import pickling
from streamline.backends.ipc import socket_link as wire
from streamline.backends.ipc.link import LinkClosed
from streamline.backends.ipc.messages import Credit, ItemsMessage, Message

NEVER = 1 << 40
WAYS = {"in the pickle": (NEVER, NEVER), "in the frame": (0, NEVER), "in a slab": (0, 0)}
WINDOW = 8
ROUNDS = 3
SIZES = {1: [1 << n for n in range(10, 21, 2)], 32: [1 << n for n in range(8, 17, 2)]}


async def send(link: wire.SocketLink, arrays: int, nbytes: int, lists: int) -> None:
    """Send lists, at most so many ahead, and how much processor time they took; until the other end hangs up."""
    items = [np.zeros(nbytes, np.uint8) for _ in range(arrays)]
    credit, began = WINDOW, process_time()
    async with anyio.create_task_group() as group:
        group.start_soon(link.flush)
        for _ in range(lists):
            while not credit:
                credit += sum(message.items for message in await link.receive() if isinstance(message, Credit))
            link.send(ItemsMessage(0, link.pack(items), b""))
            credit -= 1
        link.send(ItemsMessage(0, link.pack([process_time() - began]), b""))
        try:
            while True:
                await link.receive()
        except LinkClosed:
            group.cancel_scope.cancel()


async def receive(link: wire.SocketLink, lists: int) -> tuple[float, float]:
    """Return the seconds of processor time of both ends, and those that passed, for each list."""
    messages: list[Message] = []
    async with anyio.create_task_group() as group:
        group.start_soon(link.flush)
        began = perf_counter(), process_time()
        for _ in range(lists):
            await _unpack_one(link, messages)
            link.send(Credit(0, 1, 0))
        wall, mine = perf_counter() - began[0], process_time() - began[1]
        (theirs,) = await _unpack_one(link, messages)
        group.cancel_scope.cancel()
    return (mine + theirs) / lists, wall / lists


async def _unpack_one(link: wire.SocketLink, messages: list[Message]) -> list[Any]:
    while not messages:
        messages += reversed(await link.receive())
    message = messages.pop()
    assert isinstance(message, ItemsMessage)
    return link.unpack(message.packed)


def measure(arrays: int, nbytes: int, way: str) -> tuple[float, float]:
    """Run one case, with a process at the other end; as `receive`."""
    lists = max(100, min(600, (64 << 20) // (arrays * nbytes)))
    here, there = socket.socketpair(socket.AF_UNIX)
    arguments = [str(there.fileno()), str(arrays), str(nbytes), str(lists), way]
    with subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments], pass_fds=[there.fileno()]):
        there.close()
        link = wire.SocketLink(here)
        try:
            return anyio.run(receive, link, lists, backend_options={"use_uvloop": True})
        finally:
            link.close()


def far(fd: str, arrays: str, nbytes: str, lists: str, way: str) -> None:
    """Be the process at the other end."""
    pickling.BESIDE, wire.SLAB_BYTES = WAYS[way]  # type: ignore[attr-defined]
    link = wire.SocketLink(socket.socket(fileno=int(fd)))
    anyio.run(partial(send, link, int(arrays), int(nbytes), int(lists)), backend_options={"use_uvloop": True})
    link.close()


def main() -> None:
    if len(sys.argv) > 1:
        far(*sys.argv[1:])
        return
    print(f"{'arrays':>6} {'bytes':>8}", *(f"{way:>16}" for way in WAYS), " µs of processor time / µs a list")
    for arrays, sizes in SIZES.items():
        for nbytes in sizes:
            runs = [[measure(arrays, nbytes, way) for way in WAYS] for _ in range(ROUNDS)]
            best = [[1e6 * min(figures) for figures in zip(*column, strict=True)] for column in zip(*runs, strict=True)]
            print(f"{arrays:6} {nbytes:8}", *(f"{processor:8.0f} /{wall:6.0f}" for processor, wall in best), flush=True)


if __name__ == "__main__":
    main()
