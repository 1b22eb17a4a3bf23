"""What a machine serves, to whom, and for how long."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from streamline.core.dial import dial
from streamline.core.handshake import PeerHello
from streamline.core.listener import Listener
from streamline.io.peers import node as nodes
from streamline.io.peers.peer import PeerRequest
from streamline.io.storage.base import FoundObject
from streamline.io.storage.object_cache_folder import digest
from tests.backends.remote.machines import free_address
from tests.io.peers.group import DATA, KEY, URL, Machine, Store, content, etag_of, serving


def address() -> tuple[tuple[str, int], ...]:
    return (("127.0.0.1", int(free_address().rpartition(":")[2])),)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def machine(store: Store, tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(store, tmp_path / "cache", address())
    async with serving(made):
        yield made


def asked_of(machine: Machine, path: str = URL, name: str | None = None, role: Any = "objects", **more: str) -> bytes:
    """Return what a machine answers on a connection whose handshake is done."""
    found = FoundObject(path, len(DATA), etag_of(DATA))
    request = PeerRequest(name or digest(path, etag_of(DATA)), found, 0, len(DATA))
    headers = {"Host": "x", "Connection": "close", **request.headers(), **more}
    lines = [f"{more.pop('method', 'GET')} {more.pop('target', request.target)} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name not in ("method", "target")]
    hello = PeerHello(role=role, node="test", pid=1)
    with dial(machine.where[1][0], KEY, hello, timeout_s=20) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer


async def test_an_object_is_sent_by_its_name_with_its_version(machine: Machine) -> None:
    head, _, body = (await asyncio.to_thread(asked_of, machine)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 206 ")
    assert f"ETag: {etag_of(DATA)}".encode() in head
    assert f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}".encode() in head
    assert body == DATA


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"target": "/objects/../../../etc/passwd"}, 400),
        ({"target": "/etc/passwd"}, 400),
        ({"target": "/objects/" + "%2e" * 22}, 400),
        ({"Range": "bytes=5-"}, 400),
        ({"If-Match": '"other"'}, 404),
        ({"name": "0" * 64}, 404),
        ({"path": "/etc/passwd"}, 404),
        ({"path": "file:///etc/passwd"}, 404),
        ({"method": "POST"}, 405),
        ({"method": "DELETE"}, 405),
    ],
)
async def test_nothing_else_is_served(machine: Machine, store: Store, wrong: dict[str, str], status: int) -> None:
    store.objects |= dict.fromkeys(("/etc/passwd", "file:///etc/passwd"), DATA)
    answer = await asyncio.to_thread(lambda: asked_of(machine, **wrong))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert DATA not in answer
    assert store.log == []


async def test_an_agent_that_dials_here_is_hung_up_on(machine: Machine, store: Store) -> None:
    def answer() -> bytes:
        try:
            return asked_of(machine, role="control")
        except ConnectionError:
            return b""

    assert await asyncio.to_thread(answer) == b""
    assert store.log == []


async def test_more_connections_than_it_has_room_for_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MOST_CONNECTIONS", 0)
    storage = machine.client()
    assert await content(storage) == DATA
    assert storage.cache.traffic.peer_misses == 1


async def test_sources_with_other_endpoints_are_served_by_one_node_and_not_mixed_up(
    store: Store, tmp_path: Path
) -> None:
    other = Store({"far://other": b"other"})
    first = Machine(store, tmp_path / "cache", address())
    second = Machine(other, tmp_path / "cache", first.where[1], scope="there")
    async with serving(first) as node:
        async with serving(second) as same:
            assert same is node
            name = digest("far://other", etag_of(DATA), "there")
            other.objects["far://other"] = DATA
            answer = await asyncio.to_thread(asked_of, second, "far://other", name)
            assert answer.endswith(DATA)
        answer = await asyncio.to_thread(asked_of, first, "far://other", name)
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert (await asyncio.to_thread(asked_of, first)).endswith(DATA)


async def test_a_machine_that_is_not_listed_asks_and_does_not_serve(
    machine: Machine, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Machine(store, tmp_path / "stranger", machine.where[1])
    async with serving(stranger):
        storage = stranger.client()
        assert await content(storage) == DATA
        assert storage.cache.traffic.peer_hits == 1
        assert "none of peers= is an address of this machine" in caplog.text


async def test_a_folder_that_cannot_be_made_is_said(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with serving(Machine(store, tmp_path / "file", address())):
        assert "can't serve cache_dir= to peers" in caplog.text


async def test_a_node_that_is_left_while_a_name_is_looked_up_does_not_wait_for_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "CLOSE_S", 0.05)
    looked = threading.Event()
    monkeypatch.setattr(nodes, "look_up", lambda listed: looked.wait(60) and [])
    machine = Machine(store, tmp_path, address())
    node = nodes.node_of(machine.where, machine)
    await nodes.released(node, machine)
    assert not looked.is_set()
    looked.set()
    await asyncio.wrap_future(node.ready)


HOLDER = """
import asyncio, pathlib, sys
sys.path.insert(0, {root!r})
from tests.io.peers.group import Machine, Store, serving

async def main():
    machine = Machine(Store(), pathlib.Path({folder!r}), {listed!r})
    async with serving(machine) as node:
        print("serving" if node.serves() else "waiting", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def started(script: str) -> Any:
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_another_process_of_the_machine_takes_over_when_the_server_is_killed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listener(*args: Any) -> Listener:
        time.sleep(0.1)  # the folder is locked, and nothing listens yet
        return Listener(*args)

    monkeypatch.setattr(nodes, "RETRY_S", 0.02)
    monkeypatch.setattr(nodes, "Listener", listener)
    machine = Machine(store, tmp_path / "cache", address())
    root = str(Path(__file__).parents[3])
    script = HOLDER.format(root=root, folder=machine.where[0], listed=machine.where[1])
    with started(script) as holder:
        assert await asyncio.to_thread(holder.stdout.readline) == b"serving\n"
        async with serving(machine) as node:
            assert not node.serves()
            first = machine.client()
            assert await content(first) == DATA
            assert (first.cache.traffic.peer_hits, store.log) == (1, [])  # the other process has fetched it
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            while not node.serves():  # noqa: ASYNC110 - it looks, in its thread
                await asyncio.sleep(0.01)
            assert (await asyncio.to_thread(asked_of, machine)).endswith(DATA)


FORKS = """
import asyncio, os, pathlib, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: it forks with threads, which is the point
sys.path.insert(0, {root!r})
from streamline.io.peers import node as nodes
from tests.io.peers.group import DATA, Machine, Store, content, serving

async def served(expected):
    machine = Machine(Store(), pathlib.Path({folder!r}), {listed!r})
    async with serving(machine) as node:
        assert node.serves()
        assert await content(machine.client()) == DATA
        if expected:
            os.write(1, b"again\\n")
            return 0
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            assert not nodes._nodes
            os.read(read, 1)  # it lives longer than what it was copied from
            os._exit(0)
        os.close(read)
    return child, write

child, write = asyncio.run(served(False))
asyncio.run(served(True))
os.close(write)
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_holds_neither_the_lock_nor_the_address(python: Callable[..., str], tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    script = FORKS.format(root=root, folder=str(tmp_path / "cache"), listed=address())
    assert python(script) == "again\n0\n"
