"""Agents for tests: in threads of this process, or as processes of their own, on this machine."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import streamline as sl
from streamline.backends.network.handshake import read_key
from streamline.backends.network.tls import Certificates
from streamline.backends.remote.agent import run_agent
from streamline.core.options import parse_address

KEY = "0123456789abcdef" * 4


def free_address() -> str:
    """Return an address of this machine that nothing listens at: of those that no connection is given by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"


def key_file(folder: Path) -> Path:
    file = folder / "key"
    file.touch(mode=0o600)
    file.write_text(KEY)
    return file


@contextmanager
def machines(
    folder: Path,
    *,
    agents: int = 1,
    hosts: int = 2,
    cuts: Iterable[int | None] = (),
    half_open: bool = False,
    tls: Path | None = None,
    tap: Callable[[bytes], object] = bool,
    **options: Any,
) -> Iterator[sl.Remote]:
    """Run agents in threads; yield a backend that waits for them, of as many hosts as they offer together.

    Args:
      cuts: as in `CuttingProxy`, likewise `half_open` and `tap`.
    """
    address, key = free_address(), key_file(folder)
    proxy = CuttingProxy(address, cuts, tap, half_open=half_open)
    where, certificates = parse_address("", proxy.address), Certificates.of(tls)
    serve = partial(run_agent, where, read_key(key), hosts, tls=certificates, rejoin_s=0.0)
    threads = [threading.Thread(target=serve, name=f"agent {number}") for number in range(agents)]
    for thread in threads:
        thread.start()
    try:
        yield sl.Remote(agents * hosts, listen=address, key_file=key, tls=tls, **options)
    finally:
        for thread in threads:
            thread.join()
        proxy.close()


@contextmanager
def agent_process(
    address: str, key: Path, *, hosts: int = 2, tls: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `streamline worker`; kill it at the end if it still runs."""
    command = [sys.executable, "-m", "streamline", "worker", "--connect", address, "--key-file", os.fspath(key)]
    command += [] if tls is None else ["--tls", os.fspath(tls)]
    process = subprocess.Popen([*command, "--hosts", str(hosts)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class CuttingProxy:
    """Stands between agents and a trainer, and cuts connections off, in the midst of frames, as a bad network does.

    Args:
      cuts: after how many bytes, of both directions together, each further connection is cut; None: never. After the
        last of these none is.
      tap: is given all that passes.
      half_open: the trainer's end of a connection that is cut stays open, and silent.
    """

    def __init__(
        self,
        trainer: str,
        cuts: Iterable[int | None],
        tap: Callable[[bytes], object] = bool,
        *,
        half_open: bool = False,
    ) -> None:
        self._trainer = parse_address("trainer", trainer)
        self._half_open = half_open
        self._closing = threading.Event()
        self._cuts = iter(cuts)
        self._tap = tap
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._ends: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for end in list(self._ends):
            _hang_up(end)
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                agent, _ = self._server.accept()
                try:
                    trainer = socket.create_connection(self._trainer)
                except ConnectionError:  # it doesn't listen yet, or no more
                    agent.close()
                    continue
                self._threads.append(threading.Thread(target=self._connect, args=(agent, trainer)))
                self._threads[-1].start()

    def _connect(self, agent: socket.socket, trainer: socket.socket) -> None:
        self._ends |= {agent, trainer}
        left = [next(self._cuts, None)]
        back = threading.Thread(target=self._back, args=(trainer, agent, left))
        back.start()
        self._forward(agent, trainer, left)
        _hang_up(agent)
        if self._half_open and left[0] is not None and left[0] <= 0:
            self._closing.wait()
        _hang_up(trainer)
        back.join()
        self._ends -= {agent, trainer}
        agent.close()
        trainer.close()

    def _back(self, trainer: socket.socket, agent: socket.socket, left: list[int | None]) -> None:
        self._forward(trainer, agent, left)
        _hang_up(agent)

    def _forward(self, there: socket.socket, back: socket.socket, left: list[int | None]) -> None:
        """Forward until an end hangs up, or the connection is cut."""
        with suppress(OSError):  # the other direction has ended
            while data := there.recv(1 << 16 if left[0] is None else min(1 << 16, max(1, left[0]))):
                self._tap(data)
                back.sendall(data)
                if left[0] is not None:
                    left[0] -= len(data)
                    if left[0] <= 0:
                        break


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
