"""A network that takes its time: a proxy, in a process of its own, that passes on after a delay what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from bench import harness

Address = tuple[str, int]


class _End(asyncio.Protocol):
    """One of the two connections that are joined; what arrives here leaves at `other` after the delay."""

    def __init__(self, delay_s: float) -> None:
        self.other: _End | None = None
        self._delay_s = delay_s
        self._transport: asyncio.Transport
        self._early: list[bytes] = []  # what came before the other end was there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            asyncio.get_running_loop().call_later(self._delay_s, self.other._transport.write, data)

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None:
            asyncio.get_running_loop().call_later(self._delay_s, self.other._transport.close)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other._transport.resume_reading()

    def join(self, other: _End) -> None:
        self.other, other.other = other, self
        for data in self._early:
            self.data_received(data)


class _Entry(_End):
    """The end of who dials: dials on."""

    def __init__(self, delay_s: float, to: Address, tasks: set[asyncio.Task[None]]) -> None:
        super().__init__(delay_s)
        self._to = to
        self._tasks = tasks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        task = asyncio.get_running_loop().create_task(self._dial())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self) -> None:
        try:
            _, exit_end = await asyncio.get_running_loop().create_connection(lambda: _End(self._delay_s), *self._to)
        except ConnectionError:  # nothing listens there yet
            self._transport.close()
        else:
            self.join(exit_end)


def _serve(delay_s: float, to: Address, told: Connection) -> None:
    async def serve() -> None:
        tasks = set[asyncio.Task[None]]()
        server = await asyncio.get_running_loop().create_server(lambda: _Entry(delay_s, to, tasks), "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname())
        await server.serve_forever()

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
