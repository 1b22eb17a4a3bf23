"""What does another machine cost, beside the network? Batches and tiny items over loopback TCP."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness, process_tiny, steady, tiny_items
from bench.suite import Case, Suite, Tally, at_least

Array = npt.NDArray[np.float32]

FLOATS = 1 << 18
NBYTES = 4 * FLOATS
PAGE = 1024  # floats
LEVELS = 256


@cache
def template() -> Array:
    return np.ones(FLOATS, dtype=np.float32)


def batch(index: int) -> Array:
    array = template().copy()
    array[0] = index % LEVELS
    return array


def read(array: Any) -> tuple[int, float]:
    """Touch each page."""
    return 1, float(array[::PAGE].sum())


def expected(n: int) -> Tally:
    return Tally(n, float(n * (FLOATS // PAGE - 1) + sum(index % LEVELS for index in range(n))))


async def by_hand(n: int) -> Tally:
    """Receive arrays from a process over a TCP connection, into memory of their own."""
    server = socket.create_server(("127.0.0.1", 0))
    process = harness.SPAWN.Process(target=_send, args=(n, server.getsockname()))
    process.start()
    sock, _ = server.accept()
    with server, sock:
        sock.setblocking(False)
        try:
            return await steady.consume_async(_received(n, sock), read)
        finally:
            process.join()


async def _received(n: int, sock: socket.socket) -> Any:
    loop = asyncio.get_running_loop()
    for _ in range(n):
        array = np.empty(FLOATS, np.float32)
        view, filled = array.view(np.uint8).data, 0
        while filled < NBYTES:
            filled += await loop.sock_recv_into(sock, view[filled:])
        yield array


def _send(n: int, address: tuple[str, int]) -> None:
    async def send() -> None:
        with socket.create_connection(address) as sock:
            sock.setblocking(False)
            for index in range(n):
                await asyncio.get_running_loop().sock_sendall(sock, batch(index).view(np.uint8).data)

    asyncio.run(send())


CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=bench "
    "-keyout tls.key -out tls.crt"
)


@contextmanager
def machine(*, tls: bool = False) -> Iterator[sl.Remote]:
    """An agent on this machine, and the backend that it serves."""
    with TemporaryDirectory() as folder:
        if tls:
            subprocess.run(CERTIFICATE.split(), cwd=folder, check=True, capture_output=True)
        with _machine(folder if tls else None) as backend:
            yield backend


@contextmanager
def _machine(tls: str | None) -> Iterator[sl.Remote]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    os.environ["STREAMLINE_KEY"] = secrets.token_hex(32)
    command = [sys.executable, "-m", "streamline", "worker", "--connect", address, "--hosts", "1"]
    agent = subprocess.Popen([*command, *(["--tls", tls] if tls else [])], stderr=subprocess.DEVNULL)
    try:
        yield sl.Remote(1, listen=address, tls=tls)
    finally:
        agent.kill()
        agent.wait()


def batches(n: int) -> sl.Pipeline[Array]:
    return sl.from_items(range(n)).map(batch)


def plain_for(pipe: Callable[[int], sl.Pipeline[Any]], take: steady.Read, n: int, *, tls: bool = False) -> Tally:
    with machine(tls=tls) as backend, pipe(n).open(backend=backend) as stream:
        return steady.consume(stream, take)


async def async_for(pipe: Callable[[int], sl.Pipeline[Any]], take: steady.Read, n: int) -> Tally:
    with machine() as backend:
        async with pipe(n).open(backend=backend) as stream:
            return await steady.consume_async(stream, take)


def count(item: int) -> tuple[int, float]:
    return 1, item


def one_process(n: int) -> Tally:
    with process_tiny.pipeline(n).open(backend=sl.Processes(1)) as stream:
        return steady.consume(stream, count)


FLOOR, PROCESS = "an asyncio TCP pair by hand", "streamline, Processes(1), plain for"

SUITES = (
    Suite(
        question="Batches of 1 MiB from another machine: what is lost beside the network?",
        unit="items/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=8,
        note=(
            "float32 arrays of 1 MiB over loopback TCP from one process, each a copy of a template; the consumer reads "
            "one float of each page. 1,000 items/s are 1.05 GB/s. Counted from the first delivery on."
        ),
        cases=(
            Case(FLOOR, by_hand, 3000),
            Case("streamline, Remote(1), plain for", partial(plain_for, batches, read), 3000, (at_least(0.8, FLOOR),)),
            Case("streamline, Remote(1), async for", partial(async_for, batches, read), 3000, (at_least(0.8, FLOOR),)),
            Case("streamline, Remote(1, tls=), plain for", partial(plain_for, batches, read, tls=True), 3000),
        ),
    ),
    Suite(
        question="Tiny items from another machine: what do they cost more than from a process of this one?",
        unit="items/s",
        expected=tiny_items.expected,
        smoke_items=2_000,
        note="range → x + 1 in one process, here and over loopback TCP. Counted from the first delivery on.",
        cases=(
            Case(PROCESS, one_process, tiny_items.MANY),
            Case(
                "streamline, Remote(1), plain for",
                partial(plain_for, process_tiny.pipeline, count),
                tiny_items.MANY,
                (at_least(0.8, PROCESS),),
            ),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
