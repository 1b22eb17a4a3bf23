"""The trainer's port: who gets in, and what those who don't cost."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from streamline.backends.remote import listener as listening
from streamline.backends.remote.dial import UnreachableError, dial
from streamline.backends.remote.handshake import MAGIC, NONCE, HandshakeError, PeerHello
from streamline.backends.remote.listener import Listener
from streamline.errors import HostError

KEY = b"k" * 32

HELLO = PeerHello(role="control", node="node7", pid=4711)

Peer = tuple[socket.socket, PeerHello, str]


class Door:
    """A listener, and those who got in."""

    def __init__(self) -> None:
        self.peers: SimpleQueue[Peer] = SimpleQueue()
        self.listener = Listener(("127.0.0.1", 0), KEY, lambda *peer: self.peers.put(peer))
        self.address = "127.0.0.1", self.listener.port

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address)
        sock.settimeout(30)
        return sock


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.listener.close()


def ended(sock: socket.socket) -> bool:
    """Wait until the other end has hung up."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    sock.close()
    return True


def gets_in(door: Door) -> bool:
    with dial(door.address, KEY, HELLO) as sock:
        there, hello, address = door.peers.get(timeout=30)
        with there:
            there.sendall(b"items")
            return (sock.recv(5), hello, address) == (b"items", HELLO, "127.0.0.1")


def test_who_knows_the_key_gets_in_and_can_speak(door: Door) -> None:
    assert gets_in(door)


def test_another_key_is_an_error_for_the_dialer_and_nobody_gets_in(door: Door) -> None:
    with pytest.raises(HandshakeError, match="another key"):
        dial(door.address, b"other" * 8, HELLO)
    assert door.peers.empty()
    assert gets_in(door)


@pytest.mark.parametrize(
    "rubbish", [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), os.urandom(5000), MAGIC + bytes(NONCE + 5000)]
)
def test_rubbish_is_refused_and_logged_once(door: Door, rubbish: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "streamline.hosts"):
        for _ in range(3):
            sock = door.connect()
            sock.sendall(rubbish)
            assert ended(sock)
    assert door.peers.empty()
    assert gets_in(door)
    (record,) = caplog.records
    assert record.getMessage().startswith("a connection from 127.0.0.1 is refused: ")


def test_a_refused_agent_is_told_why_and_logged(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    old = PeerHello(role="control", node="old\x1b[31m", pid=1, version="0.0.1")
    with (
        caplog.at_level(logging.WARNING, "streamline.hosts"),
        pytest.raises(HandshakeError, match=r"0\.0\.1 on Python"),
    ):
        dial(door.address, KEY, old)
    door.listener.close()  # then all is logged
    assert "streamline 0.0.1 on Python" in caplog.text
    assert "\x1b" not in caplog.text


def test_silence_ends(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.02)
    silent, slow = door.connect(), door.connect()
    slow.sendall(MAGIC)
    assert ended(silent)
    assert ended(slow)


def test_what_is_remembered_of_the_refused_is_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MOST_LOGGED", 3)
    for version in range(10):
        with pytest.raises(HandshakeError):
            dial(door.address, KEY, PeerHello(role="control", node="n", pid=1, version=str(version)))
    assert gets_in(door)
    assert len(door.listener._logged) <= 3


def test_a_receiver_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*peer: object) -> None:
        raise ValueError("out of order")

    listener = Listener(("127.0.0.1", 0), KEY, fail)
    try:
        for _ in range(2):
            assert ended(dial(("127.0.0.1", listener.port), KEY, HELLO))
    finally:
        listener.close()
    assert "out of order" in caplog.text


def test_a_port_in_use_is_named(door: Door) -> None:
    with pytest.raises(HostError, match=rf"can't listen for agents at 127\.0\.0\.1:{door.listener.port}: .*in use"):
        Listener(door.address, KEY, print)
    with pytest.raises(HostError, match=r"can't listen for agents at 192\.0\.2\.1:0"):
        Listener(("192.0.2.1", 0), KEY, print)


def test_a_trainer_that_says_nothing_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UnreachableError, match="doesn't answer"):
        dial(server.getsockname(), KEY, HELLO, timeout_s=0.02)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_holds_no_port(door: Door) -> None:
    (here, there), (ready, begun) = os.pipe(), os.pipe()
    if not (child := os.fork()):  # it waits until it is told to exit
        os.write(begun, b"x")
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        assert gets_in(door)
        door.listener.close()
        Listener(door.address, KEY, print).close()
    finally:
        os.close(there)
        os.waitpid(child, 0)
        for fd in (here, ready, begun):
            os.close(fd)
