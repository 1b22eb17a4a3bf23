"""What would 4,096 ranks with 100,000 hosts weigh, and what does one trainer take? `python -m bench.scale [--smoke]`.

Sizes are those of real plans, snapshots and messages. Connections are real ones over loopback, to the listener and the
agents' registry of this process, from another process that plays many agents; hosts and workers that are placed are
played, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec

import streamline as sl
from bench.harness import SPAWN
from streamline.backends.hosts.placement import Elasticity, Placement
from streamline.backends.hosts.plan_shipping import ship
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.network.connections import Introduction, Listener, UnreachableError
from streamline.backends.network.handshake import PeerHello
from streamline.backends.network.tls import Certificates
from streamline.backends.remote.agents import agents_at
from streamline.backends.remote.control import TrainerCalls, call

RANKS, HOSTS = 4096, 100_000

KEY = b"key-of-this-job-" * 2

WAIT_S = 60.0
"""For a connection: more than this is a failure."""

CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=bench "
    "-keyout tls.key -out tls.crt"
)


@dataclass(frozen=True)
class Sizes:
    """How much of each is measured."""

    files: int = 1_000
    connections: int = 2_000
    agents: int = 500
    workers: int = 10_000
    hosts: int = 1_000


SMOKE = Sizes(files=100, connections=20, agents=5, workers=200, hosts=20)


def say(what: str, value: float, unit: str) -> None:
    print(f"{what:72}{value:>12,.{0 if value >= 100 else 2}f} {unit}", flush=True)


def hello(role: Any = "control") -> PeerHello:
    return PeerHello(role=role, node="node-0123", pid=4711, ticket="" if role == "control" else 32 * "0")


# Sizes ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weighing(sl.Inline):
    """Notes how many bytes of plan a host would be sent."""

    nbytes: list[int] = field(default_factory=list, compare=False)

    def check(self, plan: Any) -> None:
        """Every plan runs here."""

    def begin(self, plan: Any, site: Any, workers: Any) -> Any:
        shipped = ship(plan)
        self.nbytes.append(os.fstat(shipped.fileno()).st_size)
        shipped.close()
        return super().begin(plan, site, workers)


def tokenize(item: Any) -> Any:
    return item


def weigh(pipe: sl.Pipeline[Any], ranks: int) -> tuple[int, int]:
    """Return the bytes of the plan, and of one rank's snapshot."""
    backend = Weighing()
    with pipe.open(rank=0, world_size=ranks, ends="allow", backend=backend) as stream:
        next(stream)
        return backend.nbytes[0], len(stream.snapshot().to_json())


def sizes(of: Sizes, folder: Path) -> None:
    items = sl.from_items(range(10**10)).shuffle(seed=0).shard(HOSTS).map(tokenize).merge()
    plan, snapshot = weigh(items, RANKS)
    say(f"plan of {HOSTS:,} shards of items, to each host", plan, "bytes")
    say(f"snapshot of one of {RANKS:,} ranks, {HOSTS // RANKS} shards of items", snapshot, "bytes")
    say(f"snapshots of all {RANKS:,} ranks", RANKS * snapshot / 1e6, "MB")
    for number in range(of.files):
        (folder / f"part-{number:06}.jsonl").write_text("1\n")
    plan, snapshot = weigh(sl.read_jsonl(f"{folder}/*.jsonl").shard(of.files).map(tokenize).merge(), 1)
    say(f"plan of {of.files:,} listed files, for each file", plan / of.files, "bytes")
    say(f"snapshot of {of.files:,} shards of files on one rank, for each shard", snapshot / of.files, "bytes")
    say("hello of an agent or a link", len(msgspec.json.encode(hello("link"))), "bytes")


def more_descriptors() -> None:
    """Let this process have as many as it may: 1,024 are the usual limit, and each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# Connections ----------------------------------------------------------------------------------------------------------
def dialled(address: tuple[str, int], tls: Certificates | None = None) -> socket.socket:
    """Dial, again where a machine that does much else was too slow for a handshake, as an agent does."""
    while True:
        try:
            return Introduction(address, KEY, hello(), tls).dial(timeout_s=WAIT_S)
        except UnreachableError as error:
            print(error, flush=True)


def dial_all(address: tuple[str, int], count: int, tls: Certificates | None, done: Any) -> None:
    """Dial so many times, eight at a time; keep each connection until all are there."""
    more_descriptors()
    with ThreadPoolExecutor(8) as threads:
        held = list(threads.map(lambda _: dialled(address, tls), range(count)))
    done.wait()
    for sock in held:
        sock.close()


@contextmanager
def played(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """Run a function in another process, until the block ends."""
    done = SPAWN.Event()
    process = SPAWN.Process(target=target, args=(*args, done))
    process.start()
    try:
        yield
    finally:
        done.set()
        process.join()


def connections(of: Sizes, folder: Path) -> None:
    subprocess.run(CERTIFICATE.split(), cwd=folder, check=True, capture_output=True)
    for name, tls in {"": None, ", TLS": Certificates.of(folder)}.items():
        came: SimpleQueue[socket.socket] = SimpleQueue()
        listener = Listener(("127.0.0.1", 0), KEY, lambda sock, *_, came=came: came.put(sock), tls)
        with played(dial_all, ("127.0.0.1", listener.port), of.connections, tls):
            held, begun, cpu = [came.get(timeout=WAIT_S)], time.perf_counter(), time.process_time()
            held += [came.get(timeout=WAIT_S) for _ in range(1, of.connections)]
            elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
        say(f"connections a second through the handshake{name}", of.connections / elapsed, "/s")
        say(f"  CPU time of the listener for each{name}", 1e6 * cpu / of.connections, "µs")
        for sock in held:
            sock.close()
        listener.close()


def play_agents(address: tuple[str, int], count: int, done: Any) -> None:
    """Attach so many agents, each of which offers a host and says that it is alive, every second."""
    more_descriptors()
    selector = selectors.DefaultSelector()
    attached = []
    for _ in range(count):
        sock = dialled(address)
        attached.append(ControlConnection(sock))
        attached[-1].send(call(TrainerCalls.offered, 1))
        selector.register(sock, selectors.EVENT_READ)
    while not done.wait(1.0):
        for agent in attached:
            agent.send(call(TrainerCalls.alive, {0: 100 << 20}))
        for key, _ in selector.select(0):
            sock = key.fileobj  # type: ignore[assignment]
            if not sock.recv(1 << 16):
                selector.unregister(sock)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def quiet() -> Iterator[None]:
    """Log no warnings: played agents hang up. Elsewhere they say why a connection was refused."""
    logger = logging.getLogger("streamline.hosts")
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)


def agents(of: Sizes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with quiet(), ExitStack() as stack:
        registry = agents_at(address, KEY, 60.0, None, stack)
        stack.callback(registry.release, stack)
        before = resident(), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
        begun = time.perf_counter()
        waiting = [registry.place(number, {}) for number in range(of.agents)]
        say(f"placing {of.agents:,} hosts before any agent is there", 1e3 * (time.perf_counter() - begun), "ms")
        with played(play_agents, address, of.agents):
            for future in waiting:
                future.result(WAIT_S)
            after = resident(), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
            names = ("bytes of memory", "threads", "descriptors")
            for name, was, now in zip(names, before, after, strict=True):
                say(f"{name} of the trainer, for each of {of.agents:,} agents", (now - was) / of.agents, "")
            cpu, begun = time.process_time(), time.perf_counter()
            time.sleep(3)
            used = (time.process_time() - cpu) / (time.perf_counter() - begun)
            say(f"share of a core that {of.agents:,} agents take while nothing happens", 100 * used, "%")


# Placement ------------------------------------------------------------------------------------------------------------
class PlayedHost:
    """A host that takes all."""

    def take(self, worker: Any) -> None:
        """Run it."""


class PlayedWorker:
    """A worker that moves at once."""

    finished, movable = False, True

    def __init__(self, number: int, placement: Placement) -> None:
        self.number = number
        self.connection: Any = None
        self._placement = placement

    def close_to_reopen(self) -> None:
        self._placement.rehome(self)  # type: ignore[arg-type]


async def placement(of: Sizes) -> None:
    least = of.hosts // 2
    hosts: list[Any] = [PlayedHost() for _ in range(of.hosts)]
    placed = Placement(
        Elasticity(least, 60.0, lambda *_: Exception()),
        hosts,
        CrashTracking(),
        SimpleNamespace(gate=None),  # type: ignore[arg-type]
    )
    for number in range(of.workers):
        worker: Any = PlayedWorker(number, placed)
        placed.add(worker)
        placed.rehome(worker)
    for host in hosts[:least]:
        placed.host_ready(host)
    begun = time.perf_counter()
    placed._settle()
    first = time.perf_counter() - begun
    for host in hosts[least:]:
        placed.host_ready(host)
        placed._settle()
        placed._settle()  # what was moved
    say(f"placing {of.workers:,} workers in {least:,} hosts", 1e3 * first, "ms")
    each = (time.perf_counter() - begun - first) / (of.hosts - least)
    say(f"  a further host, of {of.hosts:,} in the end", 1e3 * each, "ms")


def run(of: Sizes) -> None:
    """Print all of it."""
    more_descriptors()
    agents(of)
    anyio.run(placement, of)
    for part in (connections, sizes):
        with tempfile.TemporaryDirectory() as folder:
            part(of, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few of each, only to see that it runs")
    run(SMOKE if parser.parse_args().smoke else Sizes())


if __name__ == "__main__":
    main()
