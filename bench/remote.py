"""What does another machine cost, beside the network? Batches and tiny items over loopback TCP; deaths under Ray.

The rows of Ray need it: `.venv-ray/bin/python -m bench remote`, after `make test-ray`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from time import perf_counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import harness, process_tiny, steady, tiny_items
from bench.suite import Case, Suite, Tally, at_least, peer, within_ms

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


@contextmanager
def machine() -> Iterator[sl.Remote]:
    """An agent on this machine, and the backend that it serves."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    os.environ["STREAMLINE_KEY"] = secrets.token_hex(32)
    agent = subprocess.Popen(
        [sys.executable, "-m", "streamline", "worker", "--connect", address, "--hosts", "1"], stderr=subprocess.DEVNULL
    )
    try:
        yield sl.Remote(1, listen=address)
    finally:
        agent.kill()
        agent.wait()


@cache
def cluster() -> None:
    """Start a Ray cluster of this machine, for the life of the process."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    peer("ray").init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20
    )


def start_cluster(_: int) -> None:
    cluster()


def on_ray(pipe: Callable[[int], sl.Pipeline[Any]], take: steady.Read, n: int) -> Tally:
    with pipe(n).open(backend=sl.Ray(1)) as stream:
        return steady.consume(stream, take)


def successor(whose: Literal["host", "actor"], n: int) -> Tally:
    """Kill what gives the items, and wait for the first one of its successor."""
    pipe = sl.from_items(range(10**9)).shard(1).map(lambda item: (item, os.getpid(), os.getppid()))
    with pipe.open(backend=sl.Ray(1)) as stream:
        for number in range(n):
            item, host, actor = next(stream)
            assert item == number
        os.kill(host if whose == "host" else actor, signal.SIGKILL)
        killed = perf_counter()
        while next(stream)[1] == host:
            pass
        return Tally(1, 0, perf_counter() - killed)


def batches(n: int) -> sl.Pipeline[Array]:
    return sl.from_items(range(n)).map(batch)


def plain_for(pipe: Callable[[int], sl.Pipeline[Any]], take: steady.Read, n: int) -> Tally:
    with machine() as backend, pipe(n).open(backend=backend) as stream:
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
            Case(
                "streamline, Ray(1), plain for",
                partial(on_ray, batches, read),
                3000,
                (at_least(0.8, FLOOR),),
                ("ray",),
                start_cluster,
            ),
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
            Case(
                "streamline, Ray(1), plain for",
                partial(on_ray, process_tiny.pipeline, count),
                tiny_items.MANY,
                (at_least(0.8, PROCESS),),
                ("ray",),
                start_cluster,
            ),
        ),
    ),
    Suite(
        question="What dies on a Ray cluster: how long until its successor's first item?",
        unit="ms",
        smoke_items=100,
        note="From SIGKILL on, on a cluster that stands: what had arrived by then is read first.",
        cases=(
            Case("a host process", partial(successor, "host"), 1000, (within_ms(1000),), ("ray",), start_cluster),
            Case("an actor", partial(successor, "actor"), 1000, (within_ms(3000),), ("ray",), start_cluster),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
