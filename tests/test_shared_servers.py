"""A server that tests share runs while anybody uses it, whoever started it, and not longer."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.shared import shared

USER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_shared_servers import program, shared
with shared(Path({path!r}), program) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


def program(port: int) -> list[str]:
    serve = f"import socket\ns = socket.create_server(('127.0.0.1', {port}))\nwhile a := s.accept(): a[0].sendall(b'!')"
    return [sys.executable, "-S", "-c", serve]


def ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 200) as asked:
        return asked.recv(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one"


def started(path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Let another process start the server, and use it."""
    code = USER.format(root=str(Path(__file__).parents[1]), path=str(path))
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_it_ends_with_the_last_user_though_the_one_that_started_it_was_killed(path: Path) -> None:
    process, port = started(path)
    with process, shared(path, program) as joined:
        assert joined == port
        process.kill()
        process.wait()
        with shared(path, program) as again:
            assert again == port
        assert ask(port) == b"!"
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_it_ends_where_its_only_user_is_killed_and_starts_anew(path: Path) -> None:
    process, port = started(path)
    with process, socket.create_connection(("127.0.0.1", port), 200) as open_as_long:
        assert open_as_long.recv(1) == b"!"
        process.kill()
        assert open_as_long.recv(1) == b""
    with shared(path, program) as port:
        assert ask(port) == b"!"
