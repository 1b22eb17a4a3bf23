"""How two machines, a trainer and an agent say, prove to each other that they know the same key. No I/O.

    dialer                                    listener
    MAGIC, nonce d  (32 random bytes)   --->
                                        <---  MAGIC, nonce l, MAC("listener", d, l)
    MAC("dialer", d, l, hello), hello   --->
                                        <---  MAC("verdict", d, l, verdict), verdict

MAC is HMAC-SHA256 with the key; its first argument keeps one end's answer from being sent back as the other's. Nonces
are new for each connection, so a recorded one can't be replayed. Nothing is parsed before its MAC was verified, and
nothing is ever unpickled here. What follows the handshake is neither encrypted nor authenticated, unless all of it
goes through TLS (`tls`): then each MAC covers the listener's certificate, too.
"""

from __future__ import annotations

import hmac
import os
import stat
import struct
import sys
from collections.abc import Generator
from pathlib import Path
from platform import python_version
from secrets import token_bytes
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from streamline.errors import DISTRIBUTION, HostError

MAGIC = b"strmln\x00\x01"
"""The last byte is the protocol's version."""

NONCE_BYTES, MAC_BYTES = 32, 32

FRAME_LENGTH = struct.Struct(">H")

MOST_BYTES = 4096
"""Of a hello, of a verdict, and of a file with a key."""

MISFIT = MAGIC[:-1] + b"\xff"
"""The answer, never encrypted, where one end encrypts and the other one doesn't: neither understands the other."""

LEAST_KEY_BYTES = 16
"""32 random ones as hexadecimal digits are 64."""

T = TypeVar("T")

Steps: TypeAlias = Generator["bytes | int", bytes, T]
"""One end. It yields the bytes that it sends, and how many it receives next: what follows the handshake isn't for it.
It raises `HandshakeError`, or returns."""


class HandshakeError(HostError):
    """The other end doesn't know the key, isn't streamline, or refuses this one."""


class TlsMismatchError(HandshakeError):
    """One end encrypts, the other one doesn't."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: give both tls= (--tls), or neither")


def _version() -> str:
    version = sys.modules["streamline"].__version__  # of the code that runs; what is installed may be another one
    return f"{DISTRIBUTION} {version}"


_Short = Annotated[str, msgspec.Meta(max_length=64)]


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialer says of itself.

    Attributes:
      role: of the connection: an agent's own, a link of one of its hosts, or one of a process that shares the hosts of
        another.
      node: its machine's name.
      ticket: of a link: the listener's, good for one; of an agent that was started for one host: that host's.
    """

    role: Literal["control", "link", "node"]
    node: Annotated[str, msgspec.Meta(max_length=253)]
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    ticket: Annotated[str, msgspec.Meta(max_length=256)] = ""
    version: _Short = msgspec.field(default_factory=_version)
    python: _Short = msgspec.field(default_factory=python_version)


class _Refused(msgspec.Struct, frozen=True):
    why: str


def dialer_steps(key: bytes, hello: PeerHello, channel: bytes = b"") -> Steps[None]:
    """Return the end that dials; `channel`: of the TLS connection below it."""
    nonce = token_bytes(NONCE_BYTES)
    yield MAGIC + nonce
    _check_magic((yield len(MAGIC)))
    answer = yield NONCE_BYTES + MAC_BYTES
    proof = _Proof(key, nonce + answer[:NONCE_BYTES], channel)
    proof.verify(b"listener", answer[NONCE_BYTES:])
    yield proof.sealed(b"dialer", hello)
    verdict = yield from proof.opened(b"verdict", _Refused)
    if verdict.why:
        raise HandshakeError(verdict.why)


def listener_steps(key: bytes, channel: bytes = b"") -> Steps[PeerHello]:
    """Return the end that listens; it returns what the dialer says of itself."""
    _check_magic((yield len(MAGIC)))
    dialers, nonce = (yield NONCE_BYTES), token_bytes(NONCE_BYTES)
    proof = _Proof(key, dialers + nonce, channel)
    yield MAGIC + nonce + proof.mac(b"listener")
    hello = yield from proof.opened(b"dialer", PeerHello)
    why_refused = _mismatch(hello)
    yield proof.sealed(b"verdict", _Refused(why_refused))
    if why_refused:
        raise HandshakeError(why_refused)
    return hello


class _Proof(NamedTuple):
    key: bytes
    nonces: bytes
    channel: bytes

    def __repr__(self) -> str:
        return "<proof of a key>"

    def mac(self, role: bytes, body: bytes = b"") -> bytes:
        channel = self.channel and b"tls\x00" + self.channel
        return hmac.digest(self.key, role + b"\x00" + self.nonces + channel + body, "sha256")

    def verify(self, role: bytes, mac: bytes, body: bytes = b"") -> None:
        if not hmac.compare_digest(mac, self.mac(role, body)):
            raise HandshakeError("the other end has another key: give both the same --key-file or STREAMLINE_KEY")

    def sealed(self, role: bytes, message: msgspec.Struct) -> bytes:
        body = msgspec.json.encode(message)
        if len(body) > MOST_BYTES:
            raise HandshakeError(
                f"a {role.decode()} may say {MOST_BYTES:,} bytes, not {len(body):,}: is its name that long?"
            )
        return self.mac(role, body) + FRAME_LENGTH.pack(len(body)) + body

    def opened(self, role: bytes, kind: type[T]) -> Steps[T]:
        """Receive what `sealed` returns."""
        head = yield MAC_BYTES + FRAME_LENGTH.size
        (size,) = FRAME_LENGTH.unpack(head[MAC_BYTES:])
        if not 0 < size <= MOST_BYTES:
            raise HandshakeError("the other end speaks of too many bytes, or none: it is no streamline")
        body = yield size
        self.verify(role, head[:MAC_BYTES], body)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # of UTF-8, and of brackets in brackets
            name = "hello" if role == b"dialer" else "verdict"
            raise HandshakeError(f"a {name} that isn't one: {error}") from error


def _check_magic(data: bytes) -> None:
    if data[:2] == b"\x16\x03":  # a handshake of TLS
        raise TlsMismatchError("the other end encrypts (TLS), this one doesn't")
    if data == MISFIT:
        raise TlsMismatchError("the other end encrypts, this one doesn't")
    if data[:-1] != MAGIC[:-1]:
        raise HandshakeError("the other end is no streamline")
    if data != MAGIC:
        raise HandshakeError(f"the other end speaks another version of the protocol than {MAGIC[-1]}, this one's")


def _mismatch(hello: PeerHello) -> str:
    """Return why a dialer and this process can't work together; "": they can."""
    here = PeerHello(role=hello.role, node="", pid=0)
    if (hello.version, _minor(hello.python)) == (here.version, _minor(here.python)):
        return ""
    ours, theirs = ("this process", "the one") if hello.role == "node" else ("the trainer", "the agent")
    return (
        f"{ours} runs {here.version} on Python {here.python}, {theirs} on {hello.node} {hello.version} on Python "
        f"{hello.python}: install the same {DISTRIBUTION} and the same minor version of Python"
    )


def _minor(python: str) -> list[str]:
    return python.split(".")[:2]


def read_key(path: str | os.PathLike[str] | None) -> bytes:
    """Return the key in a file, or, without one, that of the environment's STREAMLINE_KEY; `HostError`: neither."""
    where = "STREAMLINE_KEY" if path is None else os.fspath(path)
    key = (os.fsencode(os.environ.get("STREAMLINE_KEY", "")) if path is None else _content(path)).strip()
    if path is None and not key:
        raise HostError(
            "machines need a common key: write one with `openssl rand -hex 32 > key`, and give both ends the file "
            "(key_file=, --key-file) or its content (STREAMLINE_KEY)"
        )
    if len(key) < LEAST_KEY_BYTES:
        raise HostError(
            f"the key of {where} has {len(key)} bytes; at least {LEAST_KEY_BYTES} are needed: `openssl rand -hex 32`"
        )
    return key


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            status, key = os.fstat(file.fileno()), file.read(MOST_BYTES + 1)
    except OSError as error:
        raise HostError(f"the key can't be read: {error.strerror}: {os.fspath(path)}") from error
    refuse_shared(status, path, ", or set STREAMLINE_KEY instead")
    if len(key) > MOST_BYTES:
        raise HostError(f"{path} has more than {MOST_BYTES:,} bytes: it is no key")
    return key


def refuse_shared(status: os.stat_result, path: str | os.PathLike[str], or_else: str = "") -> None:
    """Insist on a file with a key that only its owner can read; `HostError`: others can.

    One that belongs to root may be read by a group that this process is in: so Kubernetes mounts Secrets for others
    than root. Precedent: PostgreSQL's server.key.
    """
    from_root = status.st_uid == 0 != os.geteuid()
    if stat.S_IMODE(status.st_mode) & (0o037 if from_root else 0o077):
        raise HostError(f"the key in {path} may be read by others: `chmod 600 {path}`{or_else}")
