"""The trainer's port under attack: what connections that prove nothing cost, and what forks and full tables do."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.backends.network import connections, tls
from streamline.backends.network.connections import Introduction, Listener, UnreachableError
from streamline.backends.network.handshake import MAGIC, NONCE_BYTES, HandshakeError, PeerHello, dialer_steps
from streamline.errors import HostError

KEY = b"key-of-this-job-" * 2

HELLO = PeerHello(role="control", node="node7", pid=4711)

Peer = tuple[socket.socket, PeerHello, str]

CONNECTIONS = 3_000
"""`STREAMLINE_CONNECTIONS=10000` for as many as the issue asks for."""


class Port:
    """A listener at a free port, and those that it has let in."""

    def __init__(self) -> None:
        self.peers: SimpleQueue[Peer] = SimpleQueue()
        self.listener = Listener(("127.0.0.1", 0), KEY, lambda *peer: self.peers.put(peer))
        self.address = "127.0.0.1", self.listener.port

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address)
        sock.settimeout(60)
        return sock

    def close_when_all_is_logged(self) -> None:
        """Close it after what has come was looked at."""
        with self.connect() as probe:
            probe.shutdown(socket.SHUT_WR)
            while probe.recv(9):  # until it is hung up on
                pass
        self.listener.close()

    def lets_in(self) -> bool:
        """Return whether a dialer gets in, and can talk with the one that listens, in both directions."""
        with Introduction(self.address, KEY, HELLO).dial(timeout_s=60) as here:
            there, hello, address = self.peers.get(timeout=200)
            with there:
                there.sendall(b"down")
                here.sendall(b"up")
                return (here.recv(4), there.recv(2), hello, address) == (b"down", b"up", HELLO, "127.0.0.1")


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.listener.close()


def ended(sock: socket.socket) -> bool:
    """Wait until the other end has hung up."""
    with sock, suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


# Who gets in, and what those who don't are told


def test_who_knows_the_key_gets_in_and_can_speak(port: Port) -> None:
    assert port.lets_in()


def test_another_key_is_an_error_for_the_dialer_and_nobody_gets_in(port: Port) -> None:
    with pytest.raises(HandshakeError, match="another key"):
        Introduction(port.address, b"other" * 8, HELLO).dial()
    assert port.peers.empty()
    assert port.lets_in()


@pytest.mark.parametrize(
    "rubbish", [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), os.urandom(5000), MAGIC + bytes(NONCE_BYTES + 5000)]
)
def test_rubbish_is_refused_and_logged_once(port: Port, rubbish: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "streamline.hosts"):
        for _ in range(3):
            sock = port.connect()
            sock.sendall(rubbish)
            assert ended(sock)
    assert port.peers.empty()
    assert port.lets_in()
    (record,) = caplog.records
    assert record.getMessage().startswith("a connection from 127.0.0.1 is refused: ")


def test_a_refused_agent_is_told_why_and_logged(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    old = PeerHello(role="control", node="old\x1b[31m", pid=1, version="0.0.1")
    with (
        caplog.at_level(logging.WARNING, "streamline.hosts"),
        pytest.raises(HandshakeError, match=r"0\.0\.1 on Python"),
    ):
        Introduction(port.address, KEY, old).dial()
    port.close_when_all_is_logged()
    assert "0.0.1 on Python" in caplog.text
    assert "\x1b" not in caplog.text


def test_silence_ends(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.02)
    silent, slow = port.connect(), port.connect()
    slow.sendall(MAGIC)
    assert ended(silent)
    assert ended(slow)


def test_what_is_remembered_of_the_refused_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_LOGGED", 3)
    port = Port()
    for version in range(10):
        old = PeerHello(role="control", node="n", pid=1, version=str(version))
        with pytest.raises(HandshakeError):
            Introduction(port.address, KEY, old).dial()
    assert port.lets_in()
    assert port.listener._warn_once.cache_info().currsize == 3
    port.listener.close()


def test_a_receiver_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*peer: object) -> None:
        raise ValueError("out of order")

    listener = Listener(("127.0.0.1", 0), KEY, fail)
    try:
        for _ in range(2):
            assert ended(Introduction(("127.0.0.1", listener.port), KEY, HELLO).dial())
    finally:
        listener.close()
    assert "out of order" in caplog.text


def test_a_port_in_use_is_named(port: Port) -> None:
    with pytest.raises(HostError, match=rf"can't listen at 127\.0\.0\.1:{port.listener.port}: .*in use"):
        Listener(port.address, KEY, print)
    with pytest.raises(HostError, match=r"can't listen at 192\.0\.2\.1:0"):
        Listener(("192.0.2.1", 0), KEY, print)


def test_a_trainer_that_says_nothing_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UnreachableError, match="doesn't answer"):
        Introduction(server.getsockname(), KEY, HELLO).dial(timeout_s=0.02)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_holds_no_port(port: Port) -> None:
    (here, there), (ready, begun) = os.pipe(), os.pipe()
    if not (child := os.fork()):  # it waits until it is told to exit
        os.write(begun, b"x")
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        assert port.lets_in()
        port.listener.close()
        Listener(port.address, KEY, print).close()
    finally:
        os.close(there)
        os.waitpid(child, 0)
        for fd in (here, ready, begun):
            os.close(fd)


# Many, slow and silent


@pytest.mark.long
def test_thousands_of_idle_connections_cost_a_bounded_number_of_descriptors(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of them begin a handshake. They are logged once, not each."""
    caplog.set_level(logging.WARNING, "streamline.hosts")
    before = open_files()
    many: list[socket.socket] = []
    for number in range(int(os.environ.get("STREAMLINE_CONNECTIONS", CONNECTIONS))):
        many.append(port.connect())
        if number % 2:
            many[-1].sendall(MAGIC + bytes(NONCE_BYTES))
        if len(many) == 500:  # this end's own are few, too: what the test may open is limited
            assert port.lets_in()
            assert len(port.listener._pending) <= connections.MOST_PENDING
            assert open_files() <= before + len(many) + connections.MOST_PENDING + 5
            while many:
                many.pop().close()
    assert port.lets_in()
    while many:
        many.pop().close()
    port.close_when_all_is_logged()
    reasons = [
        record.getMessage().removeprefix("a connection from 127.0.0.1 is refused: ") for record in caplog.records
    ]
    assert sorted(reasons) == [
        f"{connections.MOST_PENDING} others aren't done with their handshakes either",
        "it hung up in its handshake: it may have another key",
    ]


def test_a_peer_that_sends_a_byte_at_a_time_has_no_more_time(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(port, monkeypatch)
    slow, begun = port.connect(), clock.now
    assert port.lets_in()  # it is accepted
    for byte in MAGIC + bytes(NONCE_BYTES):
        slow.sendall(bytes([byte]))
        clock.now += 0.9
        assert port.lets_in()  # the listener has looked at its clock since
        if not port.listener._pending:
            break
    assert clock.now < begun + 2 * connections.HANDSHAKE_S
    assert ended(slow)


class Clock:
    """The listener's clock, moved by the test."""

    def __init__(self, port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = port.listener._loop
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)


def test_a_listener_that_was_held_up_hangs_up_on_no_peer(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """By user code that holds the interpreter's lock, or since it was stopped: what has come meanwhile counts."""
    clock = Clock(port, monkeypatch)
    with port.connect() as late:
        assert port.lets_in()  # the other one is accepted
        clock.now += 2 * connections.HANDSHAKE_S
        with Introduction("there", KEY, HELLO).greet(late), port.peers.get(timeout=200)[0] as there:
            assert there.fileno() >= 0


def test_peers_that_dial_at_once_push_none_of_them_out(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be pending, and all have begun: each further one waits to be accepted. Silent ones give way."""
    monkeypatch.setattr(connections, "MOST_PENDING", 4)
    monkeypatch.setattr(connections, "TURN_S", 1e9)
    silent, begun = [port.connect() for _ in range(4)], [port.connect() for _ in range(4)]
    for sock in begun:
        sock.sendall(MAGIC + bytes(NONCE_BYTES))
    assert all(map(ended, silent))
    for sock in begun:
        assert sock.recv(len(MAGIC)) == MAGIC  # it is answered
    crowded, make_room = threading.Event(), port.listener._make_room

    async def noted() -> bool:
        if made := await make_room():
            return made
        crowded.set()
        return False

    monkeypatch.setattr(port.listener, "_make_room", noted)
    further: SimpleQueue[bool] = SimpleQueue()
    thread = threading.Thread(target=lambda: further.put(port.lets_in()))
    thread.start()
    assert crowded.wait(200)
    begun.pop().close()  # now there is room for it
    assert further.get(timeout=200)
    thread.join()
    for sock in begun:
        sock.setblocking(False)
        assert len(sock.recv(4096)) == NONCE_BYTES + 32  # and nobody has hung up
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        sock.close()


@pytest.mark.long
def test_an_agent_that_dials_during_a_flood_gets_in(port: Port) -> None:
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(port.connect()).sendall(MAGIC)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert all(port.lets_in() for _ in range(5))
    finally:
        over.set()
        thread.join()


def test_two_agents_that_dial_at_once_both_get_in(port: Port) -> None:
    hellos = [PeerHello(role="link", node=f"n{number}", pid=number, ticket=f"{number:x}") for number in range(20)]
    made: SimpleQueue[socket.socket] = SimpleQueue()
    threads = [
        threading.Thread(target=lambda hello=hello: made.put(Introduction(port.address, KEY, hello).dial(timeout_s=60)))
        for hello in hellos
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    came = [port.peers.get(timeout=200) for _ in threads]
    assert sorted(hello.pid for _, hello, _ in came) == list(range(20))
    for sock, _, _ in came:
        sock.close()
        made.get().close()


def test_without_descriptors_it_goes_on_once_there_are_some(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert port.lets_in()
    turns: list[int] = []

    def full(_: socket.socket) -> Any:
        turns.append(len(turns))
        if len(turns) == 3:  # descriptors are free again
            monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connections, "FULL_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", full)
    with caplog.at_level(logging.WARNING, "streamline.hosts"):
        assert port.lets_in()
    assert len(turns) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "connections can't be accepted: Too many open files (`ulimit -n`)"
    ]


# Who isn't let in


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=4), st.booleans())
def test_whatever_bytes_come_it_stays_and_lets_only_others_in(data: list[bytes], polite: bool) -> None:
    port = Port()
    try:
        sock = port.connect()
        with suppress(OSError):  # it was refused already
            for piece in [MAGIC + bytes(NONCE_BYTES)] * polite + data:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        assert ended(sock)
        assert port.peers.empty()
        assert port.lets_in()
    finally:
        port.listener.close()


def test_a_hello_of_brackets_alone_ends_its_connection_not_the_listener(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msgspec.json, "encode", lambda _: b'{"more":' + b"[" * 4000)
    steps, sock = dialer_steps(KEY, HELLO), port.connect()
    sock.sendall(next(steps))  # type: ignore[arg-type]
    assert next(steps) == len(MAGIC)
    needs = steps.send(sock.recv(len(MAGIC)))
    proof = steps.send(sock.recv(needs))  # type: ignore[arg-type]
    monkeypatch.undo()
    sock.sendall(proof)  # type: ignore[arg-type]
    assert ended(sock)
    assert port.lets_in()


def test_an_agent_with_another_key_is_logged_with_its_address(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            with pytest.raises(HandshakeError, match="another key"):
                Introduction(port.address, b"another-key-----" * 2, HELLO).dial()
        assert port.lets_in()
        port.listener.close()
    assert [record.getMessage() for record in caplog.records] == [
        "a connection from 127.0.0.1 is refused: it hung up in its handshake: it may have another key"
    ]
    assert "key-of-this-job" not in caplog.text
    assert "another-key" not in caplog.text


def test_a_probe_that_connects_and_goes_is_not_logged(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        port.connect().close()
        reset = port.connect()
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        assert port.lets_in()
        port.listener.close()
    assert caplog.records == []


def test_reasons_that_the_sender_numbers_are_logged_as_one(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "streamline.hosts"):
        for version in range(2, 40):
            sock = port.connect()
            sock.sendall(MAGIC[:-1] + bytes([version]))
            assert ended(sock)
        assert port.lets_in()
    assert len(caplog.records) == 1


def test_accepted_and_dialled_connections_wait_for_no_acknowledgement(port: Port) -> None:
    with Introduction(port.address, KEY, HELLO).dial() as here:
        there, _, _ = port.peers.get(timeout=200)
        with there:
            for sock in (here, there):
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.gettimeout() is None
                assert not sock.get_inheritable()


# How it ends


def test_closing_amid_handshakes_ends_them_all_and_leaves_nothing(port: Port) -> None:
    socks = [port.connect() for _ in range(40)]
    for number, sock in enumerate(socks):
        sock.sendall((MAGIC + bytes(NONCE_BYTES))[:number])
    port.listener.close()
    assert all(map(ended, socks))
    port.listener.close()


def test_it_can_be_closed_by_several_threads_and_from_its_own() -> None:
    closed = threading.Event()

    def close(sock: socket.socket, *_: object) -> None:
        sock.close()
        listener.close()
        closed.set()

    listener = Listener(("127.0.0.1", 0), KEY, close)
    assert ended(Introduction(("127.0.0.1", listener.port), KEY, HELLO).dial())
    assert closed.wait(200)
    threads = [threading.Thread(target=listener.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_without_room_for_its_thread_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(HostError, match="'streamline listener' can't be started"):
            Listener(("127.0.0.1", 0), KEY, print)
    assert open_files() == before


@pytest.mark.parametrize("address", [("192.0.2.1", 0), ("a" * 70, 0), ("no.such.name.invalid", 0)])
def test_an_address_that_is_none_is_named(address: tuple[str, int]) -> None:
    with pytest.raises(HostError, match=f"can't listen at {address[0]}:{address[1]}: "):
        Listener(address, KEY, print)
    with pytest.raises(UnreachableError, match=f"{address[0]}:{address[1]} can't be reached: "):
        Introduction(address, KEY, HELLO).dial(timeout_s=0.01)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_connections_end_for_their_peers_although_a_fork_was_made_meanwhile(port: Port) -> None:
    """The fork holds no port, no connection, and may close its copy of the listener."""
    waiting = [port.connect() for _ in range(5)]
    assert port.lets_in()  # they are accepted
    (read, write), (go, held) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        try:
            os.close(held)
            port.listener.close()
            os.write(write, b"1" if port.listener._server.fileno() == -1 else b"0")
            os.read(go, 1)  # it is there until the test ends
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert os.read(read, 1) == b"1"
        assert port.lets_in()
        port.listener.close()
        assert all(map(ended, waiting))
        Listener(port.address, KEY, print).close()
    finally:
        for fd in (read, go, held):
            os.close(fd)
        os.waitpid(child, 0)


def test_a_dial_takes_no_longer_than_it_may_however_the_other_end_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    clock = [0.0]
    for module in (connections, tls):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def trickle() -> None:
        sock, _ = server.accept()
        with sock, suppress(ConnectionError):
            for byte in MAGIC:
                clock[0] += 3.0
                sock.sendall(bytes([byte]))
                sock.recv(1)  # the dialer's greeting, a byte for each of ours
            while sock.recv(4096):  # until it hangs up
                pass

    thread = threading.Thread(target=trickle)
    thread.start()
    with server, pytest.raises(UnreachableError, match="doesn't answer: timed out"):
        Introduction(server.getsockname(), KEY, HELLO).dial(timeout_s=10.0)
    thread.join()
