"""What TLS adds to a connection: nothing but secrecy; and who doesn't get one, and is told why."""

from __future__ import annotations

import random
import re
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from streamline.backends.network.connections import Introduction, Listener, UnreachableError
from streamline.backends.network.handshake import MISFIT, HandshakeError, PeerHello, dialer_steps
from streamline.backends.network.tls import Certificates, TlsSocket, channel_of
from streamline.errors import HostError
from tests.certificates import tls_folder

KEY = b"key-of-this-job-" * 2

HELLO = PeerHello(role="control", node="node7", pid=4711)

LOGGED = "a connection from 127.0.0.1 is refused: "


class Port:
    """A listener at a free port, and those that it has let in."""

    def __init__(self, tls: Certificates | None) -> None:
        self.peers: SimpleQueue[Any] = SimpleQueue()
        self.listener = Listener(("127.0.0.1", 0), KEY, lambda *peer: self.peers.put(peer), tls)
        self.address = "127.0.0.1", self.listener.port

    def pair(self, tls: Certificates | None) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection."""
        return Introduction(self.address, KEY, HELLO, tls).dial(timeout_s=60), self.peers.get(timeout=60)[0]


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(str(tls_folder(tmp_path_factory.mktemp("tls"), ca)))


@pytest.fixture(scope="module")
def port(tls: Certificates) -> Iterator[Port]:
    port = Port(tls)
    yield port
    port.listener.close()


@pytest.fixture
def plain_port() -> Iterator[Port]:
    port = Port(None)
    yield port
    port.listener.close()


# What arrives ---------------------------------------------------------------------------------------------------------


def test_both_ends_speak_and_no_socket_stays_open(port: Port, tls: Certificates) -> None:
    here, there = port.pair(tls)
    with here, there:
        here.sendall(b"up")
        there.sendall(b"down")
        assert (there.recv(9), here.recv(9)) == (b"up", b"down")
        here.shutdown(socket.SHUT_WR)
        assert there.recv(9) == b""
    assert (here.fileno(), there.fileno()) == (-1, -1)


pieces = st.lists(st.one_of(st.binary(max_size=20), st.integers(0, 700_000).map(bytes)), max_size=6)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(sent=pieces, spaces=st.lists(st.integers(1, 300_000), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_pieces_that_do_not_wait_arrive_whole_and_in_order(
    port: Port, tls: Certificates, sent: list[bytes], spaces: list[int], seed: int
) -> None:
    """Sent as a link does: what isn't taken is sent again, in other pieces."""
    draw = random.Random(seed)
    data = b"".join(draw.randbytes(len(piece)) for piece in sent)
    left = [memoryview(data[begin : begin + 100_000]) for begin in range(0, len(data), 100_000)]
    got, ends = bytearray(), port.pair(tls)
    here, there = draw.sample(ends, 2)
    with here, there:
        for end in ends:
            end.setblocking(False)
        while len(got) < len(data):
            if left:
                try:
                    taken = here.sendmsg(left)
                except BlockingIOError:
                    left = [memoryview(b"".join(left))]
                else:
                    left = [memoryview(b"".join(left)[taken:])] if taken < sum(map(len, left)) else []
            buffers = [bytearray(space) for space in spaces]
            try:
                nbytes = there.recvmsg_into(buffers)[0]
            except BlockingIOError:
                select.select([there], [here] if left else [], [], 60)
            else:
                got += b"".join(buffers)[:nbytes]
        with pytest.raises(BlockingIOError):
            there.recvmsg_into([bytearray(1)])
    assert got == data


def test_two_threads_send_and_receive_at_the_same_time(port: Port, tls: Certificates) -> None:
    ends = port.pair(tls)
    sent = [random.Random(seed).randbytes(8 << 20) for seed in range(2)]
    got = [bytearray(8 << 20), bytearray(8 << 20)]

    def receive(end: socket.socket, into: bytearray) -> None:
        view = memoryview(into)
        while view:
            view = view[end.recv_into(view) or len(view) :]

    threads = [threading.Thread(target=end.sendall, args=(data,)) for end, data in zip(ends, sent, strict=True)]
    threads += [threading.Thread(target=receive, args=(end, into)) for end, into in zip(ends, got, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    assert got == sent[::-1]


def test_what_is_sent_right_after_the_handshake_waits_where_a_selector_sees_it(port: Port, tls: Certificates) -> None:
    here, there = port.pair(tls)
    with here, there:
        there.sendall(b"first")
        assert here.recv(5) == b"first"
        there.sendall(b"later")
        assert select.select([here], [], [], 60)[0]
        assert here.recv(5) == b"later"


def test_a_socket_that_is_not_connected_yet_can_be_dialled_with(port: Port, tls: Certificates) -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with Introduction(port.address, KEY, HELLO, tls).dial(sock) as here, port.peers.get(timeout=60)[0] as there:
        here.sendall(b"up")
        assert there.recv(2) == b"up"
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1 can't be reached: .*refused"):
        Introduction(("127.0.0.1", 1), KEY, HELLO, tls).dial(socket.socket(socket.AF_INET, socket.SOCK_STREAM))


def test_an_end_that_says_it_sends_no_more_has_hung_up(port: Port, tls: Certificates) -> None:
    """As asyncio's does before it closes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(f"{tls.folder}/ca.crt")
    with context.wrap_socket(socket.create_connection(port.address)) as here:
        steps = dialer_steps(KEY, HELLO, channel_of(here.getpeercert(binary_form=True)))
        step = next(steps)
        with suppress(StopIteration):
            while True:
                if isinstance(step, bytes):
                    here.sendall(step)
                    step = next(steps)
                else:
                    step = steps.send(here.recv(step))
        with port.peers.get(timeout=60)[0] as there:
            here.setblocking(False)
            with suppress(ssl.SSLWantReadError):  # it would wait for the other end to say so, too
                here.unwrap()
            assert there.recv(9) == b""


def test_a_forged_byte_ends_the_connection(port: Port, tls: Certificates) -> None:
    here, there = port.pair(tls)
    with here, there:
        assert isinstance(here, TlsSocket)
        socket.socket.sendall(here, b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ssl.SSLError, match=r"BAD_RECORD_MAC|RECORD_LAYER_FAILURE"):
            there.recv(9)


# Who doesn't get in ---------------------------------------------------------------------------------------------------


def logged(port: Port, caplog: pytest.LogCaptureFixture) -> list[str]:
    with socket.create_connection(port.address) as probe, suppress(ConnectionError):
        probe.shutdown(socket.SHUT_WR)
        while probe.recv(9):  # until it is hung up on: then all that came before is logged
            pass
    port.listener.close()
    return [record.getMessage().removeprefix(LOGGED) for record in caplog.records]


def test_an_end_that_does_not_encrypt_is_told_so(tls: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    port = Port(tls)
    with pytest.raises(HandshakeError, match=r"the other end encrypts, this one doesn't: give both tls= \(--tls\)"):
        Introduction(port.address, KEY, HELLO).dial()
    (line,) = logged(port, caplog)
    assert line.startswith("the other end doesn't encrypt, or not with TLS 1.3, and this one does")


def test_an_end_that_encrypts_is_told_that_the_other_one_does_not(
    plain_port: Port, tls: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(HandshakeError, match=r"the other end doesn't encrypt.*: give both tls= \(--tls\), or neither"):
        Introduction(plain_port.address, KEY, HELLO, tls).dial()
    assert logged(plain_port, caplog) == [
        "the other end encrypts (TLS), this one doesn't: give both tls= (--tls), or neither"
    ]


def test_a_certificate_of_another_authority_is_refused(
    tls: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = Port(Certificates(str(tls_folder(tmp_path))))
    with pytest.raises(
        HandshakeError, match=rf"not trusted: unable to get local.* be {tls.folder}/ca.crt, or be signed"
    ):
        Introduction(port.address, KEY, HELLO, tls).dial()
    (line,) = logged(port, caplog)
    assert line.startswith("the other end refuses TLS (TLSV1_ALERT_UNKNOWN_CA): if it is the certificate of this end")


def test_an_expired_certificate_is_refused(
    tls: Certificates, ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    port = Port(Certificates(str(tls_folder(tmp_path, ca, not_after=yesterday))))
    with pytest.raises(HandshakeError, match="certificate has expired"):
        Introduction(port.address, KEY, HELLO, tls).dial()
    (line,) = logged(port, caplog)
    assert "EXPIRED" in line


def test_another_key_is_refused_inside_tls(port: Port, tls: Certificates) -> None:
    with pytest.raises(HandshakeError, match="another key"):
        Introduction(port.address, b"other" * 8, HELLO, tls).dial()
    assert port.peers.empty()


def relayed(listening: Certificates, dialling: Certificates, target: tuple[str, int], server: socket.socket) -> None:
    """Stand between two ends, with TLS to each of them, and pass on what they say."""
    dialler = listening.listening()(server.accept()[0])
    trainer = dialling.dialling()(socket.create_connection(target))
    with dialler, trainer:
        dialler.shake_hands()
        trainer.shake_hands()
        for here, there in ((dialler, trainer), (trainer, dialler)) * 2:
            if not (data := here.recv(1000)):
                break
            there.sendall(data)


def test_one_with_a_trusted_certificate_and_no_key_can_not_pass_on_what_both_say(
    port: Port, tls: Certificates, ca: trustme.CA, tmp_path: Path
) -> None:
    other = Certificates(str(tls_folder(tmp_path, ca)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        between = threading.Thread(target=relayed, args=(other, tls, port.address, server))
        between.start()
        with pytest.raises(HandshakeError, match="another key"):
            Introduction(server.getsockname(), KEY, HELLO, tls).dial()
        between.join()
    assert port.peers.empty()


def test_one_that_has_the_key_of_the_certificate_can_pass_it_on(port: Port, tls: Certificates) -> None:
    """Else the test before would show nothing about the proof."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        between = threading.Thread(target=relayed, args=(tls, tls, port.address, server))
        between.start()
        Introduction(server.getsockname(), KEY, HELLO, tls).dial().close()
        between.join()
    port.peers.get(timeout=60)[0].close()


def test_older_versions_of_tls_are_refused(port: Port) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(port.address) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)


# Folders --------------------------------------------------------------------------------------------------------------


def test_one_certificate_that_has_signed_itself_does_for_all(tmp_path: Path) -> None:
    """As the command in the message of a missing one writes it."""
    with pytest.raises(HostError, match="openssl req") as caught:
        Certificates(str(tmp_path)).listening()
    (command,) = re.findall("`(openssl req [^`]+)`", str(caught.value))
    (tmp_path / "tls").mkdir()
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    certificates = Certificates.of(tmp_path / "tls")
    port = Port(certificates)
    for end in port.pair(certificates):
        end.close()
    port.listener.close()


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def written(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def with_password(folder: Path) -> None:
    command = "openssl pkey -in tls.key -aes256 -passout pass:secret -out locked.key"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    (folder / "locked.key").rename(folder / "tls.key")


LISTENING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no certificate": (without("tls.crt"), r"tls\.crt and tls\.key in .*: No such file"),
    "no key": (without("tls.key"), r"tls\.crt and tls\.key in .*: No such file.*`openssl req"),
    "no certificate in it": (written("tls.crt", b"nothing"), r"tls\.crt and tls\.key in .* can't be used: .*PEM"),
    "no key in it": (written("tls.key", b"nothing"), r"tls\.crt and tls\.key in .* can't be used: .*PEM"),
    "a key for all to read": (lambda folder: (folder / "tls.key").chmod(0o644), r"may be read by others: `chmod 600 "),
    "a password": (with_password, r"can't be used: the key has a password"),
}


@pytest.mark.parametrize("case", LISTENING)
def test_what_is_wrong_with_the_folder_of_a_listener_is_named(case: str, tmp_path: Path) -> None:
    change, words = LISTENING[case]
    change(tls_folder(tmp_path))
    with pytest.raises(HostError, match=words):
        Listener(("127.0.0.1", 0), KEY, print, Certificates(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "words"),
    [("tls.crt", r"tls\.crt in .* can't be used: No such file"), ("ca.crt", r"ca\.crt in .* can't be used: .*")],
)
def test_what_is_wrong_with_the_folder_of_a_dialler_is_named(port: Port, name: str, words: str, tmp_path: Path) -> None:
    if name == "ca.crt":
        (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(HostError, match=words):
        Introduction(port.address, KEY, HELLO, Certificates(str(tmp_path))).dial()


@pytest.mark.parametrize("rubbish", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01\x40\x00" + bytes(300)])
def test_rubbish_and_an_end_amid_the_handshake_end_the_connection(port: Port, rubbish: bytes) -> None:
    with socket.create_connection(port.address) as sock:
        sock.sendall(rubbish)
        sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while data := sock.recv(99):
                assert data.startswith(b"\x15\x03") or data == MISFIT  # an alert of TLS
    assert port.peers.empty()
