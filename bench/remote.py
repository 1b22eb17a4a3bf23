"""What does another machine cost, beside the network? Batches and tiny items over loopback TCP, and through a delay.

The rows of Ray need it: `.venv-ray/bin/python -m bench remote`, after `make test-ray`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from tempfile import TemporaryDirectory
from time import process_time, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

import streamline as sl
from bench import delay, harness, process_tiny, steady, tiny_items
from bench.suite import Case, Suite, Tally, at_least, at_most, peer
from streamline.backends.hosts.pool import BYTES_ON_THE_WAY

Array = npt.NDArray[np.float32]

FLOATS = 1 << 18
NBYTES = 4 * FLOATS
PAGE = 1024  # floats
LEVELS = 256

AHEAD_ITEMS = BYTES_ON_THE_WAY // NBYTES


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


Clock = Callable[[], float] | None


async def by_hand(n: int, clock: Clock = None, consumed: Callable[[socket.socket], Any] | None = None) -> Tally:
    """Receive arrays from a process over a TCP connection, into memory of their own."""
    server = socket.create_server(("127.0.0.1", 0))
    process = harness.SPAWN.Process(target=_send, args=(n, server.getsockname()))
    process.start()
    sock, _ = server.accept()
    with server, sock:
        sock.setblocking(False)
        try:
            return await steady.consume_async(_received(n, sock) if consumed is None else consumed(sock), read, clock)
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


async def by_hand_ahead(n: int, clock: Clock = None) -> Tally:
    """Likewise, with as many arrays ready for the loop as a link has in flight."""
    ready = asyncio.Queue[Array](AHEAD_ITEMS)

    async def receive(sock: socket.socket) -> None:
        async for array in _received(n, sock):
            await ready.put(array)

    async def consumed(sock: socket.socket) -> Any:
        receiving = asyncio.create_task(receive(sock))
        for _ in range(n):
            yield await ready.get()
        await receiving

    return await by_hand(n, clock, consumed)


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
def machines(
    agents: int = 1, round_trip_s: float | None = None, hosts: int | None = None, *, tls: bool = False
) -> Iterator[sl.Remote]:
    """Run agents on this machine, of one host each; yield the backend that they serve.

    Args:
      hosts: that it has; None: as many as there are agents.
      round_trip_s: to the agents, through a proxy; None: there is none between.
      tls: whether the connections are encrypted.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    os.environ["STREAMLINE_KEY"] = secrets.token_hex(32)
    with ExitStack() as running:
        folder = running.enter_context(TemporaryDirectory()) if tls else None
        if folder is not None:
            subprocess.run(CERTIFICATE.split(), cwd=folder, check=True, capture_output=True)
        way = address if round_trip_s is None else running.enter_context(delay.delayed(address, round_trip_s))
        command = [sys.executable, "-m", "streamline", "worker", "--connect", f"{way[0]}:{way[1]}", "--hosts", "1"]
        command += [] if folder is None else ["--tls", folder]
        for _ in range(agents):
            agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            running.callback(agent.wait)
            running.callback(agent.kill)
        yield sl.Remote(hosts or agents, listen=f"{address[0]}:{address[1]}", tls=folder)


@cache
def cluster() -> None:
    """Start a Ray cluster of this machine, for the life of the process."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    peer("ray").init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20
    )


def start_cluster(_: int) -> None:
    cluster()


def on_ray(pipe: Callable[[int], sl.Pipeline[Any]], take: steady.Read, n: int) -> Tally:
    with pipe(n).open(backend=sl.Ray(1)) as stream:
        return steady.consume(stream, take)


def batches(n: int) -> sl.Pipeline[Array]:
    return sl.from_items(range(n)).map(batch)


def of_many(n: int, clock: Clock) -> Tally:
    agents = min(AGENTS, n)
    return plain_for(lambda n: sl.from_items(range(n)).shard(agents).map(batch).merge(), read, n, clock, agents=agents)


def worked_on(n: int) -> sl.Pipeline[Array]:
    return sl.from_items(range(n)).map(slowly)


def slowly(index: int) -> Array:
    sleep(0.001)
    return batch(index)[: FLOATS // 16]


Pipe = Callable[[int], sl.Pipeline[Any]]


def plain_for(pipe: Pipe, take: steady.Read, n: int, clock: Clock = None, **where: Any) -> Tally:
    with machines(**where) as backend, pipe(n).open(backend=backend) as stream:
        return steady.consume(stream, take, clock)


async def async_for(pipe: Pipe, take: steady.Read, n: int, clock: Clock = None) -> Tally:
    with machines() as backend:
        async with pipe(n).open(backend=backend) as stream:
            return await steady.consume_async(stream, take, clock)


def each(run: Callable[..., Tally], n: int) -> Tally:
    """Return the CPU time of this process for each item."""
    return _for_each(run(n, clock=process_time), n)


def _for_each(tally: Tally, n: int) -> Tally:
    assert tally.seconds is not None
    return replace(tally, seconds=tally.seconds / n)


async def each_by_hand(n: int) -> Tally:
    return _for_each(await by_hand(n, process_time), n)


async def each_by_hand_ahead(n: int) -> Tally:
    return _for_each(await by_hand_ahead(n, process_time), n)


def count(item: int) -> tuple[int, float]:
    return 1, item


def one_process(n: int) -> Tally:
    with process_tiny.pipeline(n).open(backend=sl.Processes(1)) as stream:
        return steady.consume(stream, count)


AHEAD = f"the same, reading {AHEAD_ITEMS} arrays ahead"
FLOOR, PROCESS = "an asyncio TCP pair by hand", "streamline, Processes(1), plain for"
PLAIN, ASYNC = "streamline, Remote(1), plain for", "streamline, Remote(1), async for"
AGENTS = 16
NO_DELAY = "a proxy between"
ROUND_TRIP_S = 0.03

PRIORITY = "Ray's workers have the priority of other processes (RAY_worker_niceness=0), as those beside them do."

SUITES = (
    Suite(
        question="Batches of 1 MiB from another machine: what is lost beside the network?",
        unit="items/s",
        floor=FLOOR,
        expected=expected,
        smoke_items=8,
        note=(
            "float32 arrays of 1 MiB over loopback TCP from one process, each a copy of a template; the consumer reads "
            "one float of each page. 1,000 items/s are 1.05 GB/s. Counted from the first delivery on. By hand, each "
            "array lies in the memory of the one before, which is cached; of 64 arrays ahead, each is in new memory. "
            f"{PRIORITY}"
        ),
        cases=(
            Case(FLOOR, by_hand, 3000),
            Case(AHEAD, by_hand_ahead, 3000),
            Case(PLAIN, partial(plain_for, batches, read), 3000, (at_least(0.8, FLOOR), at_least(1, AHEAD))),
            Case(ASYNC, partial(async_for, batches, read), 3000, (at_least(0.8, FLOOR), at_least(1, AHEAD))),
            Case("streamline, Remote(1, tls=), plain for", partial(plain_for, batches, read, tls=True), 3000),
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
        question="Batches of 1 MiB from another machine: what CPU time does the consumer take for each?",
        unit="ms",
        floor=FLOOR,
        expected=expected,
        smoke_items=8,
        note="The same arrays. CPU time of the consumer's process, all threads, from the first delivery on.",
        cases=(
            Case(FLOOR, each_by_hand, 3000),
            Case(AHEAD, each_by_hand_ahead, 3000),
            Case(
                PLAIN,
                partial(each, partial(plain_for, batches, read)),
                3000,
                (at_most(1.15, FLOOR), at_most(1, AHEAD)),
            ),
        ),
    ),
    Suite(
        question=f"Batches of 1 MiB from {AGENTS} machines: what CPU time does the consumer take for each?",
        unit="ms",
        floor=PLAIN,
        expected=expected,
        smoke_items=2,
        note=(
            f"The same arrays, from {AGENTS} agents with one host each, merged strictly: so many that the first 64 MiB "
            "of each host, which come into memory that is new, count for little."
        ),
        cases=(
            Case(PLAIN, partial(each, partial(plain_for, batches, read)), 3000),
            Case(
                f"streamline, Remote({AGENTS}), plain for",
                partial(each, of_many),
                16 * AHEAD_ITEMS * AGENTS,
                (at_most(1.25, PLAIN),),
            ),
        ),
    ),
    Suite(
        question="Batches of 1 MiB over a round trip of 30 ms: what does it cost?",
        unit="items/s",
        floor=NO_DELAY,
        expected=expected,
        smoke_items=8,
        note="The same arrays, through a proxy in Python that passes them on at once, or after 15 ms.",
        cases=(
            Case(NO_DELAY, partial(plain_for, batches, read, round_trip_s=0.0), 1500),
            Case(
                "a round trip of 30 ms",
                partial(plain_for, batches, read, round_trip_s=ROUND_TRIP_S),
                1500,
                (at_least(0.9, NO_DELAY),),
            ),
        ),
    ),
    Suite(
        question="Items of a millisecond over a round trip of 30 ms: what does it cost?",
        unit="items/s",
        floor=NO_DELAY,
        smoke_items=8,
        note="Arrays of 64 KiB that take 1 ms to make, through the same proxy.",
        cases=(
            Case(NO_DELAY, partial(plain_for, worked_on, read, round_trip_s=0.0), 1500),
            Case(
                "a round trip of 30 ms",
                partial(plain_for, worked_on, read, round_trip_s=ROUND_TRIP_S),
                1500,
                (at_least(0.9, NO_DELAY),),
            ),
        ),
    ),
    Suite(
        question="Tiny items from another machine: what do they cost more than from a process of this one?",
        unit="items/s",
        expected=tiny_items.expected,
        smoke_items=2_000,
        note=(
            f"range → x + 1 in one process, here and over loopback TCP. Counted from the first delivery on. {PRIORITY}"
        ),
        cases=(
            Case(PROCESS, one_process, tiny_items.MANY),
            Case(
                PLAIN,
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
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
