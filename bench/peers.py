"""What do N machines that read the same objects ask of the store? `python -m bench.peers [--machines N] [--smoke]`.

Each machine is a process with a cache_dir of its own; the store is a server on loopback that answers after 30 ms and
counts. All read all objects at the same time, three times: alone, with peers, and with peers of which one is killed
while it fetches. What each delivers is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from random import SystemRandom
from socket import create_server
from typing import Any

from bench.harness import SPAWN

DELAY_S = 0.03

OBJECTS, OBJECT_BYTES = 100, 512 * 1024

RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass
class CountingStore:
    """Serves objects in a thread; a look at an ETag (one byte) isn't counted.

    Attributes:
      requests: for objects, or ranges of one.
      sent: their bytes.
    """

    objects: int
    nbytes: int
    requests: int = 0
    sent: int = 0
    base: str = ""
    _data: dict[bytes, bytes] = field(default_factory=dict)

    def content(self, number: int) -> bytes:
        return hashlib.shake_128(b"%d" % number).digest(self.nbytes)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._data = {b"/%d" % number: self.content(number) for number in range(self.objects)}
        ready, ends = threading.Event(), list[Callable[[], object]]()

        async def serve() -> None:
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ends.append(lambda: loop.call_soon_threadsafe(over.set))
            ready.set()
            await over.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        ready.wait()
        try:
            yield
        finally:
            ends[0]()
            thread.join()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(DELAY_S)
                data = self._data[head.split(b" ", 2)[1]]
                asked = RANGE.search(head)
                start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
                if stop - start > 1:
                    self.requests += 1
                    self.sent += stop - start
                told = f"Content-Range: bytes {start}-{stop - 1}/{len(data)}\r\nContent-Length: {stop - start}"
                writer.write(f'HTTP/1.1 206 Partial Content\r\nETag: "v1"\r\n{told}\r\n\r\n'.encode())
                writer.write(data[start:stop])
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


def read(
    base: str, objects: int, folder: str, peers: list[str] | None, ready: Any, go: Event, done: Any, over: Event
) -> None:
    """Read all objects in a process of its own, once all others are there; serve until all have."""
    import streamline as sl
    from streamline.core.handshake import read_key
    from streamline.io.peers.node import Where, node_of
    from streamline.io.peers.peer import check_peers
    from streamline.io.storage.options import Access
    from streamline.io.storage.registry import Storages

    if peers is not None:  # as another stream of this process that goes on
        node = node_of(Where(folder, check_peers(peers), read_key(None)), Storages(Access(cache_dir=folder)))
        node.ready.result()
    ready.put(os.getpid())
    go.wait()
    began, found = time.perf_counter(), hashlib.sha256()
    with sl.read_files(f"{base}/{{0..{objects - 1}}}", cache_dir=folder, peers=peers).open() as stream:
        for item in stream:
            found.update(item.data)
        (reads,) = stream.stats().reads
    done.put((found.hexdigest(), time.perf_counter() - began, reads.peer_hits))
    over.wait()


def one_round(store: CountingStore, machines: int, *, peers: bool, kill: bool = False) -> tuple[int, int, float]:
    """Return the requests and bytes that the store was asked for, and how long the slowest machine took."""
    listed = None if not peers else [f"127.0.0.1:{free_port()}" for _ in range(machines)]
    expected = hashlib.sha256(b"".join(map(store.content, range(store.objects)))).hexdigest()
    ready, done, go, over = SPAWN.Queue(), SPAWN.Queue(), SPAWN.Event(), SPAWN.Event()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number in range(machines):
            args = store.base, store.objects, str(Path(folder, str(number))), listed, ready, go, done, over
            processes.append(SPAWN.Process(target=read, args=args))
            processes[-1].start()
            ready.get()
        store.requests = store.sent = 0
        go.set()
        if kill:
            while store.requests < store.objects // 4:
                time.sleep(0.001)
            processes[-1].kill()
        found = [done.get() for _ in processes[: machines - kill]]
        over.set()
        for process in processes:
            process.join()
    if any(digest != expected for digest, _, _ in found):
        raise AssertionError("a machine delivered other bytes")
    if peers and not all(hits for _, _, hits in found):
        raise AssertionError("a machine had nothing from its peers")
    return store.requests, store.sent, max(seconds for _, seconds, _ in found)


def free_port() -> int:
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        try:
            with create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--smoke", action="store_true", help="few objects; one that is asked for twice fails")
    options = parser.parse_args()
    os.environ["STREAMLINE_KEY"] = secrets.token_hex(32)
    objects, nbytes = (12, 20_000) if options.smoke else (OBJECTS, OBJECT_BYTES)
    store = CountingStore(objects, nbytes)
    print(f"{options.machines} machines read the same {objects} objects of {nbytes / 2**20:.2f} MiB at once")
    print(f"{'':28}{'requests':>10}{'of one':>8}{'MiB':>8}{'seconds':>9}")
    with store.running():
        one = one_round(store, 1, peers=False)
        rows = {
            "one machine": one,
            "each for itself": one_round(store, options.machines, peers=False),
            "peers": one_round(store, options.machines, peers=True),
            "peers, one of them killed": one_round(store, options.machines, peers=True, kill=True),
        }
    for name, (requests, sent, seconds) in rows.items():
        print(f"{name:28}{requests:>10,}{requests / one[0]:>7.2f}x{sent / 2**20:>8.1f}{seconds:>9.2f}")
    if rows["peers"][0] > one[0]:
        sys.exit("expected the requests of one machine")


if __name__ == "__main__":
    main()
