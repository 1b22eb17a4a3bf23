"""How two machines, a trainer and an agent say, prove to each other that they know the same key. No I/O.

    dialer                                    listener
    MAGIC, nonce d  (32 random bytes)   --->
                                        <---  MAGIC, nonce l, MAC("listener", d, l)
    MAC("dialer", d, l, hello), hello   --->
                                        <---  MAC("verdict", d, l, verdict), verdict

MAC is HMAC-SHA256 with the key; its first argument keeps one end's answer from being sent back as the other's. Nonces
are new for each connection, so a recorded one can't be replayed. Nothing is parsed before its MAC was verified, and
nothing is ever unpickled here. What follows the handshake is neither encrypted nor authenticated, unless all of it
goes through TLS (`core.tls`): then each MAC covers the listener's certificate, too.

Each machine says how many bytes it `needs` next; its owner reads no more than that, since what follows the handshake
isn't for it.
"""

from __future__ import annotations

import hmac
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from platform import python_version
from secrets import token_bytes
from typing import Annotated, Literal, NoReturn, TypeVar

import msgspec

from streamline.errors import DISTRIBUTION, HostError

MAGIC = b"strmln\x00\x01"
"""The last byte is the protocol's version."""

NONCE, MAC = 32, 32

SIZE = struct.Struct(">H")

MOST = 4096
"""Bytes of a hello, and of a verdict."""

MISFIT = MAGIC[:-1] + b"\xff"
"""The answer, never encrypted, where one end encrypts and the other one doesn't: neither understands the other."""

KEY = 16
"""Bytes of a key at the least; 32 random ones as hexadecimal digits are 64."""


T = TypeVar("T")


class HandshakeError(HostError):
    """The other end doesn't know the key, isn't streamline, or refuses this one.

    Attributes:
      answer: what it is sent as it is before the connection is closed, if anything.
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


def _version() -> str:
    version = sys.modules["streamline"].__version__  # of the code that runs; what is installed may be another one
    return f"{DISTRIBUTION} {version}"


_Short = Annotated[str, msgspec.Meta(max_length=64)]


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialer says of itself.

    Attributes:
      role: of the connection: an agent's own, a link of one of its hosts, or one of a process that shares the hosts
        of another.
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
    """The verdict; empty: welcome."""

    why: str


class _Handshake:
    """One end. It fails for good: after an error, drop the connection.

    Attributes:
      channel: to be set before anything is received: `TlsSocket.channel`, b"": nothing is encrypted.
      needs: bytes that it wants next.
      done: whether it has succeeded.
      refused: of a listener: why the dialer is refused, once what `receive` has returned is sent; "": it isn't.
    """

    def __init__(self, key: bytes, step: Callable[[bytes], bytes]) -> None:
        self.needs = len(MAGIC)
        self.done = False
        self.channel = b""
        self.refused = ""
        self._key = key
        self._step = step
        self._nonces = b""
        self._data = b""

    def receive(self, data: bytes) -> bytes:
        """Take at most `needs` bytes; return what is to be sent now.

        Raises:
          HandshakeError: this connection is of no use.
          ValueError: there is more than it needs; nothing is taken.
        """
        if len(data) > self.needs:
            raise ValueError(f"{len(data)} bytes for a handshake that needs {self.needs}: what follows isn't for it")
        self._data += data
        self.needs -= len(data)
        if self.needs:
            return b""
        whole, self._data = self._data, b""
        step, self._step = self._step, _over
        answer = step(whole)
        self.done = self._step is _over and not self.refused
        return answer

    def _expect(self, needs: int, step: Callable[[bytes], bytes]) -> None:
        self.needs, self._step = needs, step

    def _mac(self, role: bytes, body: bytes = b"") -> bytes:
        channel = self.channel and b"tls\x00" + self.channel
        return hmac.digest(self._key, role + b"\x00" + self._nonces + channel + body, "sha256")

    def _verified(self, role: bytes, mac: bytes, body: bytes = b"") -> None:
        if not hmac.compare_digest(mac, self._mac(role, body)):
            raise HandshakeError("the other end has another key: give both the same --key-file or STREAMLINE_KEY")

    def _sealed(self, role: bytes, body: bytes) -> bytes:
        if len(body) > MOST:
            raise HandshakeError(f"a {role.decode()} may say {MOST:,} bytes, not {len(body):,}: is its name that long?")
        return self._mac(role, body) + SIZE.pack(len(body)) + body

    def _open(self, role: bytes, take: Callable[[bytes], bytes]) -> None:
        """Expect what `_sealed` makes of `role`; give its body to `take`."""

        def head(data: bytes) -> bytes:
            mac, size = data[:MAC], SIZE.unpack(data[MAC:])[0]
            if not 0 < size <= MOST:
                raise HandshakeError(f"the other end speaks of {size} bytes: it is no streamline")

            def body(data: bytes) -> bytes:
                self._verified(role, mac, data)
                return take(data)

            self._expect(size, body)
            return b""

        self._expect(MAC + SIZE.size, head)


def _over(_: bytes) -> NoReturn:
    raise HandshakeError("this handshake is over")


def _checked_magic(data: bytes) -> None:
    if data[:2] == b"\x16\x03":  # a handshake of TLS
        raise HandshakeError(
            "the other end encrypts (TLS), this one doesn't: give both tls= (--tls), or neither", MISFIT
        )
    if data == MISFIT:
        raise HandshakeError("the other end encrypts, this one doesn't: give both tls= (--tls), or neither")
    if data[:-1] != MAGIC[:-1]:
        raise HandshakeError("the other end is no streamline")
    if data != MAGIC:
        raise HandshakeError(f"the other end speaks version {data[-1]} of the protocol, this one {MAGIC[-1]}")


def _parsed(data: bytes, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # of UTF-8, and of brackets in brackets
        raise HandshakeError(f"a {name} that isn't one: {error}") from error


class DialerHandshake(_Handshake):
    """The end that dials; `greeting` is what it sends first."""

    def __init__(self, key: bytes, hello: PeerHello) -> None:
        super().__init__(key, self._magic)
        self._hello = msgspec.json.encode(hello)
        self._nonce = token_bytes(NONCE)
        self.greeting = MAGIC + self._nonce

    def _magic(self, data: bytes) -> bytes:
        _checked_magic(data)
        self._expect(NONCE + MAC, self._proof)
        return b""

    def _proof(self, data: bytes) -> bytes:
        self._nonces = self._nonce + data[:NONCE]
        self._verified(b"listener", data[NONCE:])
        self._open(b"verdict", self._verdict)
        return self._sealed(b"dialer", self._hello)

    def _verdict(self, data: bytes) -> bytes:
        if why := _parsed(data, _Refused, "verdict").why:
            raise HandshakeError(why)
        return b""


class ListenerHandshake(_Handshake):
    """The end that listens.

    Attributes:
      challenged: whether the dialer was answered: it speaks this protocol.
      hello: the dialer's, once it is done; None: it is refused.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(key, self._magic)
        self.challenged = False
        self.hello: PeerHello | None = None

    def _magic(self, data: bytes) -> bytes:
        _checked_magic(data)
        self._expect(NONCE, self._challenge)
        return b""

    def _challenge(self, data: bytes) -> bytes:
        nonce = token_bytes(NONCE)
        self._nonces = data + nonce
        self.challenged = True
        self._open(b"dialer", self._judge)
        return MAGIC + nonce + self._mac(b"listener")

    def _judge(self, data: bytes) -> bytes:
        hello = _parsed(data, PeerHello, "hello")
        self.refused = _mismatch(hello)
        self.hello = None if self.refused else hello
        return self._sealed(b"verdict", msgspec.json.encode(_Refused(self.refused)))


def _mismatch(hello: PeerHello) -> str:
    """Return why a dialer and this process can't work together; "": they can."""
    here = PeerHello(role=hello.role, node="", pid=0)
    if (hello.version, _minor(hello.python)) == (here.version, _minor(here.python)):
        return ""
    agents = hello.role in ("control", "link")
    ours, theirs = ("the trainer", "the agent") if agents else ("this process", "the one")
    return (
        f"{ours} runs {here.version} on Python {here.python}, {theirs} on {hello.node} {hello.version} on Python "
        f"{hello.python}: install the same {DISTRIBUTION} and the same minor version of Python"
    )


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def read_key(path: str | os.PathLike[str] | None) -> bytes:
    """Return the key in a file, or, without one, that of the environment's STREAMLINE_KEY; `HostError`: neither."""
    if path is None:
        key, where = os.fsencode(os.environ.get("STREAMLINE_KEY", "")).strip(), "STREAMLINE_KEY"
        if not key:
            raise HostError(
                "machines need a common key: write one with `openssl rand -hex 32 > key`, and give both ends the file "
                "(key_file=, --key-file) or its content (STREAMLINE_KEY)"
            )
    else:
        key, where = _key_in(path), os.fspath(path)
    if len(key) < KEY:
        raise HostError(f"the key of {where} has {len(key)} bytes; at least {KEY} are needed: `openssl rand -hex 32`")
    return key


def refuse_shared(status: os.stat_result, path: str | os.PathLike[str], or_else: str = "") -> None:
    """Insist on a file with a key that only its owner can read; `HostError`: others can.

    One that belongs to root may be read by a group that this process is in: so Kubernetes mounts Secrets for others
    than root. Precedent: PostgreSQL's server.key.
    """
    from_root = status.st_uid == 0 != os.geteuid()
    if stat.S_IMODE(status.st_mode) & (0o037 if from_root else 0o077):
        raise HostError(f"the key in {path} may be read by others: `chmod 600 {path}`{or_else}")


def _key_in(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            status, key = os.fstat(file.fileno()), file.read(MOST + 1)
    except OSError as error:
        raise HostError(f"the key can't be read: {error.strerror}: {os.fspath(path)}") from error
    refuse_shared(status, path, ", or set STREAMLINE_KEY instead")
    if len(key) > MOST:
        raise HostError(f"{path} has more than {MOST:,} bytes: it is no key")
    return key.strip()
