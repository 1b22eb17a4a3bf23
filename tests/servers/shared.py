"""Servers of which one serves all test processes of a session (pytest-xdist); the last to leave waits for its end."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers import keeper

START_S = 200.0
"""Moto imports half of botocore: 1.5 s on a free core."""


def for_session(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return where all processes of this session look for the server of this name."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name


@contextmanager
def shared(path: Path, program: Callable[[int], list[str]]) -> Iterator[int]:
    """Yield the port of a server that runs, started by the first process that needs it.

    Args:
      path: one server is shared by all who use this path.
      program: returns the command that serves on a port, which `keeper` runs.
    """
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        user, port = _joined(path) or _started(path, program)
        with user:
            _wait_for(port)
            fcntl.flock(lock, fcntl.LOCK_UN)
            try:
                yield port
            finally:
                user.shutdown(socket.SHUT_WR)
                user.recv(1)  # nothing: others use it, or it has ended


def _joined(path: Path) -> tuple[socket.socket, int] | None:
    user = socket.socket(socket.AF_UNIX)
    try:
        user.connect(os.fspath(path))
        if told := user.recv(9):
            return user, int(told)
    except OSError:
        pass  # not there yet, or just gone
    user.close()
    return None


def _started(path: Path, program: Callable[[int], list[str]]) -> tuple[socket.socket, int]:
    path.unlink(missing_ok=True)
    port = free_port()
    user, other = socket.socketpair()
    with other:
        command = [sys.executable, "-S", keeper.__file__, os.fspath(path), str(port), *program(port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        subprocess.run(command, stdin=other.fileno(), check=True, cwd=path.parent, env=environment)
    assert int(user.recv(9)) == port
    return user, port


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as look:
            if look.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"no server on port {port} within {START_S:.0f} s")
