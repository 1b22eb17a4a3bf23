"""A network that takes its time: a proxy, in a process of its own, that passes on after a delay what it gets.

With a delay it does the same work as without: what waits lies in buffers that are used in turn. A proxy that made a
`bytes` of each piece took 1.4 times the CPU time with 15 ms as without, since what waited was in no cache and its pages
were new; that was all that was measured through it.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from bench import harness

Address = tuple[str, int]

PIECES = 256
"""On their way at once in one direction: 64 MiB, as much as may be in flight from a host."""

PIECE_BYTES = 1 << 18


class _Way:
    """One direction of a connection."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._free = asyncio.Queue[memoryview]()
        self._due = asyncio.Queue[tuple[float, memoryview, int]]()
        memory = memoryview(mmap.mmap(-1, PIECES * PIECE_BYTES))
        for start in range(0, len(memory), PIECE_BYTES):
            self._free.put_nowait(memory[start : start + PIECE_BYTES])

    async def receive(self, source: socket.socket) -> None:
        loop, nbytes = asyncio.get_running_loop(), 1
        while nbytes:
            piece = await self._free.get()
            nbytes = await loop.sock_recv_into(source, piece)
            self._due.put_nowait((loop.time() + self._delay_s, piece, nbytes))
            await asyncio.sleep(0)  # receiving what is there already doesn't let other tasks run

    async def send(self, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, piece, nbytes = await self._due.get()
            if (left_s := due - loop.time()) > 0:
                await asyncio.sleep(left_s)
            if not nbytes:
                sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, piece[:nbytes])
            self._free.put_nowait(piece)


async def _join(entry: socket.socket, delay_s: float, to: Address) -> None:
    """Dial on, and pass on until both ends have hung up, or one can't be reached."""
    with entry, socket.socket() as exit_end:
        for sock in (entry, exit_end):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(exit_end, to)
            async with asyncio.TaskGroup() as tasks:
                for source, sink in ((entry, exit_end), (exit_end, entry)):
                    way = _Way(delay_s)
                    tasks.create_task(way.receive(source))
                    tasks.create_task(way.send(sink))
        except* OSError:  # nothing listens there yet, or a process was killed: the sockets are closed, as its own was
            pass


def _serve(delay_s: float, to: Address, told: Connection) -> None:
    async def serve() -> None:
        joined = set[asyncio.Task[None]]()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            told.send(server.getsockname())
            while True:
                entry, _ = await asyncio.get_running_loop().sock_accept(server)
                task = asyncio.create_task(_join(entry, delay_s, to))
                joined.add(task)
                task.add_done_callback(joined.discard)

    asyncio.run(serve())


@contextmanager
def delayed(to: Address, round_trip_s: float) -> Iterator[Address]:
    """Yield an address from which connections lead to another one, with such a round trip."""
    here, there = harness.SPAWN.Pipe()
    process = harness.SPAWN.Process(target=_serve, args=(round_trip_s / 2, to, there))
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()
