"""How a trainer and an agent prove to each other that they know the same key. No I/O.

    dialer                                    listener
    MAGIC, nonce d  (32 random bytes)   --->
                                        <---  MAGIC, nonce l, MAC("listener", d, l)
    MAC("dialer", d, l, hello), hello   --->
                                        <---  MAC("verdict", d, l, verdict), verdict

MAC is HMAC-SHA256 with the key; its first argument keeps one end's answer from being sent back as the other's. Nonces
are new for each connection, so a recorded one can't be replayed. Nothing is parsed before its MAC was verified, and
nothing is ever unpickled here. The channel itself is not encrypted.

Each machine says how many bytes it `needs` next; its owner reads no more than that, since what follows the handshake
isn't for it.
"""

from __future__ import annotations

import hmac
import os
import stat
import struct
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from secrets import token_bytes
from typing import Literal

import msgspec

from streamline.errors import HostError

MAGIC = b"strmln\x00\x01"
"""The last byte is the protocol's version."""

NONCE, MAC = 32, 32

SIZE = struct.Struct(">H")

MOST = 4096
"""Bytes of a hello, and of a verdict."""

KEY = 16
"""Bytes of a key at the least; 32 random ones as hexadecimal digits are 64."""


class HandshakeError(HostError):
    """The other end doesn't know the key, isn't streamline, or refuses this one."""


@cache
def _version() -> str:
    return metadata.version("streamline")


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialer says of itself.

    Attributes:
      role: of the connection: an agent's own, or a link of one of its hosts.
      node: its machine's name.
      ticket: of a link: the listener's, good for one.
    """

    role: Literal["control", "link"]
    node: str
    pid: int
    ticket: str = ""
    version: str = msgspec.field(default_factory=_version)
    python: str = msgspec.field(default_factory=python_version)


class _Refused(msgspec.Struct, frozen=True):
    """The verdict; empty: welcome."""

    why: str


class _Handshake:
    """One end. It fails for good: after an error, drop the connection.

    Attributes:
      needs: bytes that it wants next.
      done: whether it has succeeded.
    """

    def __init__(self, key: bytes, needs: int, step: Callable[[bytes], bytes]) -> None:
        self.needs = needs
        self.done = False
        self._key = key
        self._step = step
        self._nonces = b""
        self._data = b""

    def receive(self, data: bytes) -> bytes:
        """Take at most `needs` bytes; return what is to be sent now.

        Raises:
          HandshakeError: this connection is of no use.
        """
        assert len(data) <= self.needs, "what follows the handshake isn't for it"
        self._data += data
        self.needs -= len(data)
        if self.needs:
            return b""
        whole, self._data = self._data, b""
        answer = self._step(whole)
        self.done = not self.needs
        return answer

    def _expect(self, needs: int, step: Callable[[bytes], bytes]) -> None:
        self.needs, self._step = needs, step

    def _mac(self, role: bytes, body: bytes = b"") -> bytes:
        return hmac.digest(self._key, role + b"\x00" + self._nonces + body, "sha256")

    def _verified(self, role: bytes, mac: bytes, body: bytes = b"") -> None:
        if not hmac.compare_digest(mac, self._mac(role, body)):
            raise HandshakeError("the other end has another key: give both the same --key-file or STREAMLINE_KEY")

    def _sealed(self, role: bytes, body: bytes) -> bytes:
        return self._mac(role, body) + SIZE.pack(len(body)) + body

    def _open(self, role: bytes, take: Callable[[bytes], bytes]) -> None:
        """Expect what `_sealed` makes of `role`; give its body to `take`."""

        def head(data: bytes) -> bytes:
            mac, (size,) = data[:MAC], SIZE.unpack(data[MAC:])
            if not 0 < size <= MOST:
                raise HandshakeError(f"the other end speaks of {size} bytes: it is no streamline")

            def body(data: bytes) -> bytes:
                self._verified(role, mac, data)
                return take(data)

            self._expect(size, body)
            return b""

        self._expect(MAC + SIZE.size, head)


def _checked_magic(data: bytes) -> None:
    if data[:-1] != MAGIC[:-1]:
        raise HandshakeError("the other end is no streamline")
    if data != MAGIC:
        raise HandshakeError(f"the other end speaks version {data[-1]} of the protocol, this one {MAGIC[-1]}")


class DialerHandshake(_Handshake):
    """The end that dials; `greeting` is what it sends first."""

    def __init__(self, key: bytes, hello: PeerHello) -> None:
        super().__init__(key, len(MAGIC) + NONCE + MAC, self._proof)
        self._hello = msgspec.json.encode(hello)
        self._nonce = token_bytes(NONCE)
        self.greeting = MAGIC + self._nonce

    def _proof(self, data: bytes) -> bytes:
        _checked_magic(data[: len(MAGIC)])
        self._nonces = self._nonce + data[len(MAGIC) : -MAC]
        self._verified(b"listener", data[-MAC:])
        self._open(b"verdict", self._verdict)
        return self._sealed(b"dialer", self._hello)

    def _verdict(self, data: bytes) -> bytes:
        if why := msgspec.json.decode(data, type=_Refused).why:
            raise HandshakeError(why)
        return b""


class ListenerHandshake(_Handshake):
    """The end that listens.

    Attributes:
      hello: the dialer's, once it is done.
      refused: why the dialer is refused, once what `receive` has returned is sent; "": it isn't.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(key, len(MAGIC) + NONCE, self._challenge)
        self.hello: PeerHello | None = None
        self.refused = ""

    def _challenge(self, data: bytes) -> bytes:
        _checked_magic(data[: len(MAGIC)])
        nonce = token_bytes(NONCE)
        self._nonces = data[len(MAGIC) :] + nonce
        self._open(b"dialer", self._judge)
        return MAGIC + nonce + self._mac(b"listener")

    def _judge(self, data: bytes) -> bytes:
        try:
            hello = msgspec.json.decode(data, type=PeerHello)
        except msgspec.MsgspecError as error:
            raise HandshakeError(f"a hello that isn't one: {error}") from error
        self.refused = _mismatch(hello)
        self.hello = hello
        return self._sealed(b"verdict", msgspec.json.encode(_Refused(self.refused)))


def _mismatch(hello: PeerHello) -> str:
    """Return why an agent can't serve this process; "": it can."""
    here = PeerHello(role=hello.role, node="", pid=0)
    if (hello.version, _minor(hello.python)) == (here.version, _minor(here.python)):
        return ""
    return (
        f"the trainer runs streamline {here.version} on Python {here.python}, the agent on {hello.node} streamline "
        f"{hello.version} on Python {hello.python}: install the same streamline and the same minor version of Python"
    )


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def read_key(path: str | os.PathLike[str] | None) -> bytes:
    """Return the key in a file, or, without one, that of the environment's STREAMLINE_KEY; `HostError`: neither."""
    if path is None:
        key, where = os.environ.get("STREAMLINE_KEY", "").strip().encode(), "STREAMLINE_KEY"
        if not key:
            raise HostError(
                "machines need a common key: write one with `openssl rand -hex 32 > key`, and give both ends the file "
                "(key_file=, --key-file) or its content (STREAMLINE_KEY)"
            )
    else:
        try:
            mode, key, where = Path(path).stat().st_mode, Path(path).read_bytes().strip(), os.fspath(path)
        except OSError as error:
            raise HostError(f"the key can't be read: {error.strerror}: {os.fspath(path)}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise HostError(f"the key in {where} may be read by others: `chmod 600 {where}`")
    if len(key) < KEY:
        raise HostError(f"the key of {where} has {len(key)} bytes; at least {KEY} are needed: `openssl rand -hex 32`")
    return key
