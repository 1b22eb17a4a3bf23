"""What do ranks that need the same items read and hold? `python -m bench.shared_hosts [--ranks N] [--smoke]`.

N processes of one machine read the same objects of a store at the same time, as tensor-parallel ranks do, over eight
host processes: one rank alone, N ranks each for itself, and N ranks with shared="node". The store is a server on
loopback that counts the bytes it sends. Memory is what all of them and their hosts take together half way, with shared
pages divided among their users (PSS); and less what N interpreters take that have imported the same and read nothing,
which are there anyway. What each rank gets is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.harness import SPAWN

HOSTS = 8

KEPT = 4
"""Items that a rank's loop holds on to: what it works on, and a few on their way to a device."""

DELAY_S = 0.03
"""In which the store answers."""

RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass
class CountingStore:
    """Serves objects in a thread; a look at an ETag (one byte) isn't counted.

    Attributes:
      sent: bytes of objects, or ranges of one.
    """

    objects: int
    nbytes: int
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
                    self.sent += stop - start
                told = f"Content-Range: bytes {start}-{stop - 1}/{len(data)}\r\nContent-Length: {stop - start}"
                writer.write(f'HTTP/1.1 206 Partial Content\r\nETag: "v1"\r\n{told}\r\n\r\n'.encode())
                writer.write(data[start:stop])
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


def decoded(item: Any) -> Any:
    """Return an object as an array four times as large, as decoding does."""
    return np.frombuffer(item.data, np.uint8).astype(np.float32)


def rank(base: str, objects: int, shared: bool, job: str, meet: Barrier, done: Any) -> None:
    """Read all objects in a process of its own; stop at the first item and half way, until all have come as far."""
    import streamline as sl
    import streamline.io.storage.http_client  # this and the next: what a run imports as it is opened
    import streamline.runtime.loop_thread

    os.environ["STREAMLINE_JOB"] = job
    found, kept = hashlib.sha256(), deque[Any](maxlen=KEPT)
    pipe = sl.read_files(f"{base}/{{0..{objects - 1}}}").shard(HOSTS, mode="file").map(decoded).merge()
    meet.wait()
    meet.wait()  # measured: nothing is open
    backend = sl.Processes(HOSTS, shared="node" if shared else None)
    with pipe.open(backend=backend, rank=0, world_size=1) as stream:
        for number, item in enumerate(stream):
            found.update(item)
            kept.append(item)
            if number == 0:
                meet.wait()
            elif number == objects // 2:
                done.put([host.pid for host in stream.stats().hosts])
                meet.wait()
                meet.wait()  # measured
    done.put(found.hexdigest())


class Measured(NamedTuple):
    """What one round took.

    Attributes:
      sent: bytes that the store sent.
      pss: bytes of memory of all processes.
      beyond: those that the ranks themselves don't take before they open anything.
      hosts: processes.
    """

    sent: int
    pss: int
    beyond: int
    hosts: int


def one_round(store: CountingStore, ranks: int, *, shared: bool) -> Measured:
    """Let `ranks` ranks read all objects."""
    meet, done = SPAWN.Barrier(ranks + 1), SPAWN.Queue()
    with tempfile.TemporaryDirectory() as folder:
        job = str(Path(folder, "job"))
        arguments = store.base, store.objects, shared, job, meet, done
        processes = [SPAWN.Process(target=rank, args=arguments) for _ in range(ranks)]
        for process in processes:
            process.start()
        pids = {process.pid for process in processes}
        meet.wait()
        idle, store.sent = sum(map(pss_bytes, pids)), 0
        meet.wait()
        meet.wait()  # all have their first item
        hosts = {pid for _ in processes for pid in done.get()}
        meet.wait()
        pss = sum(map(pss_bytes, pids | hosts))
        meet.wait()
        digests = {done.get() for _ in processes}
        for process in processes:
            process.join()
    if digests != {expected(store)}:
        raise AssertionError("a rank got other items")
    return Measured(store.sent, pss, pss - idle, len(hosts))


def expected(store: CountingStore) -> str:
    found = hashlib.sha256()
    for number in range(store.objects):
        found.update(np.frombuffer(store.content(number), np.uint8).astype(np.float32).data)
    return found.hexdigest()


def pss_bytes(pid: int | None) -> int:
    """Return a process's memory, of which shared pages are divided among their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="few objects; bytes that are read twice fail")
    options = parser.parse_args()
    store = CountingStore(32, 50_000) if options.smoke else CountingStore(128, 512 * 1024)
    ranks = options.ranks
    print(f"{ranks} ranks of one machine read the same {store.objects} objects of {store.nbytes / 2**20:.2f} MiB")
    titles = f"{'MiB held':>10}{'of one':>8}{'beyond idle ranks':>19}{'of one':>8}"
    print(f"{'':26}{'hosts':>6}{'MiB read':>10}{'of one':>8}{titles}")
    with store.running():
        one = one_round(store, 1, shared=False)
        rows = {
            "one rank": one,
            f"{ranks}, each for itself": one_round(store, ranks, shared=False),
            f'{ranks}, shared="node"': (together := one_round(store, ranks, shared=True)),
        }
    for name, row in rows.items():
        held = f"{row.pss / 2**20:>10.1f}{row.pss / one.pss:>7.2f}x"
        beyond = f"{row.beyond / 2**20:>19.1f}{row.beyond / one.beyond:>7.2f}x"
        print(f"{name:26}{row.hosts:>6}{row.sent / 2**20:>10.1f}{row.sent / one.sent:>7.2f}x{held}{beyond}")
    if together.sent > one.sent:
        sys.exit("expected the bytes of one rank")


if not Path("/proc/self/smaps_rollup").exists():
    sys.exit("shared pages are divided among processes by Linux only, in /proc/PID/smaps_rollup")

if __name__ == "__main__":
    main()
