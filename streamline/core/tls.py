"""TLS on a connection between two machines: certificates in a folder, and a socket that encrypts, for any thread.

The key that both ends know proves, inside TLS, who they are, and that proof covers the listener's certificate (RFC
5929, `tls-server-end-point`; precedent: PostgreSQL's SCRAM-SHA-256-PLUS). So one that has a trusted certificate but not
the key learns nothing, also where it passes on what the two ends say. Names in certificates are not looked at: the
address of a trainer changes with each job.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from streamline.core.handshake import MISFIT, HandshakeError, refuse_shared
from streamline.errors import HostError

SEALED_BYTES = 1 << 16
"""Bytes that are encrypted, or received, at once."""

GATHERED_BYTES = 1 << 12
"""Pieces smaller than this are copied together: a record of TLS costs some microseconds, and 22 bytes."""

CERTIFICATE, KEY, TRUSTED = "tls.crt", "tls.key", "ca.crt"
"""As in a Secret of Kubernetes (type kubernetes.io/tls), and those of cert-manager."""

HOW = (
    "tls= is a folder with tls.crt and tls.key where machines are listened for, and with ca.crt, or else that tls.crt, "
    "where they dial: `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 "
    "-subj /CN=streamline -keyout tls/tls.key -out tls/tls.crt`"
)

HEADER = 5
"""Bytes before each record of TLS; the last two are how many follow (RFC 8446, 5.1)."""

BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class TlsSocket(socket.socket):
    """A connected TCP socket that encrypts what it sends. It takes the place of the one given.

    One thread may send while another one receives. After a `BlockingIOError` of a send, the next one must begin with
    the same bytes, as those are encrypted already. The end of the connection is that of TCP: nothing that the two ends
    say ends with it, so nothing can be cut off unseen.

    Rejected: `ssl.SSLSocket`. Two threads can't use one at the same time, and it neither gathers nor scatters.

    Args:
      own: the certificate of this end, if it is the one that listens.
      trusted: where a dialler's trusted certificates come from, for a message.

    Attributes:
      channel: once `shake_hands` has succeeded, what the proof of the key is to cover; the same at both ends.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, own: bytes | None, trusted: str = "") -> None:
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.settimeout(timeout)
        self.channel = b""
        self._own = own
        self._trusted = trusted
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=own is not None)
        self._lock = threading.Lock()  # of the three above, never held while the socket is waited for
        self._unsent = memoryview(b"")  # encrypted
        self._taken = 0  # bytes in it, as they were
        self._received = memoryview(bytearray(SEALED_BYTES))
        self._header = b""  # what has come of the next record's
        self._left = 0  # bytes to come of a record
        self._ended = False  # the other end has said that it sends no more, as `ssl` and asyncio do

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken all that is encrypted."""
        return bool(self._unsent)

    def shake_hands(self) -> None:
        """Do the handshake of TLS, from where it stopped.

        Raises:
          BlockingIOError: the socket, which doesn't block, is to be waited for.
          HandshakeError: the other end doesn't encrypt, or isn't trusted, or doesn't trust this one.
          OSError: it has hung up.
        """
        while True:
            self._flush()
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._encrypted()
                self._flush()
                if not self._receive_of_record():
                    raise ConnectionResetError("it hung up in the handshake of TLS") from None
            except ssl.SSLError as error:
                raise self._refused(error) from error
            else:
                break
        self._encrypted()
        self._flush()
        self.channel = channel_of(self._own or self._tls.getpeercert(binary_form=True))

    def _refused(self, error: ssl.SSLError) -> HandshakeError:
        """Return what a failed handshake of TLS means, of one end, and what to do."""
        if isinstance(error, ssl.SSLCertVerificationError):
            self._encrypted()
            with suppress(OSError):  # let the other end know, too
                self._flush()
            return HandshakeError(
                f"the other end's certificate is not trusted: {error.verify_message}. The {CERTIFICATE} of its tls= "
                f"has to be {self._trusted}, or be signed by it, and must not have expired"
            )
        if "ALERT" in (error.reason or ""):
            return HandshakeError(
                f"the other end refuses TLS ({error.reason}): if it is the certificate of this end, give the other one "
                f"this {CERTIFICATE}, or the {TRUSTED} that has signed it, and renew it if it has expired"
            )
        return HandshakeError(
            f"the other end doesn't encrypt, or not with TLS 1.3, and this one does ({error.reason}): give both tls= "
            "(--tls), or neither",
            MISFIT,
        )

    # As of any socket -------------------------------------------------------------------------------------------------

    def sendmsg(self, pieces: Iterable[Any], ancillary: Any = (), flags: int = 0, address: Any = None, /) -> int:
        if not self._unsent:
            with self._lock:
                self._taken = self._encrypt(pieces)
            self._encrypted()
        self._flush(flags)
        taken, self._taken = self._taken, 0
        return taken

    def send(self, data: Any, flags: int = 0, /) -> int:
        return self.sendmsg([data], (), flags)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[self.send(left, flags) :]

    def recvmsg_into(self, buffers: Iterable[Any], ancillary: int = 0, flags: int = 0, /) -> Any:
        """Receive, perhaps more than fits into `buffers`: call it until it raises `BlockingIOError`.

        A selector doesn't know of what was received and isn't taken yet. `recv` and `recv_into` don't leave anything,
        where the space given is as large as what the other end has sent at once.
        """
        return self._filled(buffers, self._receive), [], 0, None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        space = memoryview(buffer).cast("B")
        return self._filled([space[: nbytes or len(space)]], self._receive_of_record)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data)])

    # What it does with them -------------------------------------------------------------------------------------------

    def _encrypt(self, pieces: Iterable[Any]) -> int:
        """Encrypt the first `SEALED_BYTES`; return how many there were."""
        left, small = SEALED_BYTES, bytearray()
        for piece in pieces:
            view = memoryview(piece).cast("B")[:left]
            left -= len(view)
            if len(view) < GATHERED_BYTES:
                small += view
                continue
            self._write(small)
            small.clear()
            self._write(view)
            if not left:
                break
        self._write(small)
        return SEALED_BYTES - left

    def _write(self, data: Any) -> None:
        if data:
            self._tls.write(data)

    def _encrypted(self) -> None:
        """Take what is to be sent."""
        with self._lock:
            more = self._outgoing.read()
        self._unsent = memoryview(b"".join((self._unsent, more)) if self._unsent else more)

    def _flush(self, flags: int = 0) -> None:
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent, flags) :]

    def _decrypt(self, spaces: Iterable[memoryview]) -> int:
        """Fill `spaces` with what has been received; return the bytes."""
        nbytes = 0
        for space in spaces:
            filled = 0
            while filled < len(space):
                try:
                    with self._lock:
                        read: Any = self._tls.read(len(space) - filled, space[filled:])
                except ssl.SSLWantReadError:
                    return nbytes + filled
                if not read:
                    self._ended = True
                    return nbytes + filled
                filled += read
            nbytes += filled
        return nbytes

    def _filled(self, buffers: Iterable[Any], receive: Callable[[], int]) -> int:
        spaces = [memoryview(buffer).cast("B") for buffer in buffers]
        while not (nbytes := self._decrypt(spaces)):
            if self._ended or not receive():
                break
        return nbytes

    def _receive_of_record(self) -> int:
        """Receive something of one record: its header, or what is missing of the rest."""
        nbytes = self._receive(self._left or HEADER - len(self._header))
        if self._left:
            self._left -= nbytes
        else:
            self._header += self._received[:nbytes]
            if len(self._header) == HEADER:
                self._left, self._header = int.from_bytes(self._header[3:], "big"), b""
        return nbytes

    def _receive(self, most: int = SEALED_BYTES) -> int:
        """Receive something, encrypted; return the bytes, 0: the other end has hung up."""
        nbytes = super().recv_into(self._received, most)
        with self._lock:
            self._incoming.write(self._received[:nbytes])
        return nbytes


def channel_of(certificate: bytes | None) -> bytes:
    """Return what identifies a channel whose listener has this certificate, for the proof of the key."""
    assert certificate is not None
    return sha256(certificate).digest()


@dataclass(frozen=True)
class Certificates:
    """A folder with certificates, `tls=`: see `HOW`. Picklable; all is read when it is used.

    Attributes:
      folder: an absolute path.
    """

    folder: str

    @classmethod
    def of(cls, tls: str | os.PathLike[str] | None) -> Certificates | None:
        """Return those of an option; None: no TLS."""
        return None if tls is None else cls(os.fspath(Path(tls).absolute()))

    def listening(self) -> Callable[[socket.socket], TlsSocket]:
        """Return what encrypts accepted connections; `HostError`: there is no certificate, or no key of it."""
        certificate, key = Path(self.folder, CERTIFICATE), Path(self.folder, KEY)
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no connection is resumed
        try:
            refuse_shared(key.stat(), key)
            context.load_cert_chain(certificate, key, password=_no_password)
            text = certificate.read_text("latin-1")
            own = ssl.PEM_cert_to_DER_cert(text[text.index(BEGIN) : text.index(END) + len(END)])
        except (OSError, ValueError) as error:
            raise _unusable(self.folder, f"{CERTIFICATE} and {KEY}", error) from error
        return lambda sock: TlsSocket(sock, context, own)

    def dialling(self) -> Callable[[socket.socket], TlsSocket]:
        """Return what encrypts connections that this process makes; `HostError`: there is no certificate to trust."""
        trusted = Path(self.folder, TRUSTED)
        if not trusted.exists():
            trusted = Path(self.folder, CERTIFICATE)
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that is trusted need not be a CA's
        try:
            context.load_verify_locations(trusted)
        except OSError as error:
            raise _unusable(self.folder, trusted.name, error) from error
        return lambda sock: TlsSocket(sock, context, None, str(trusted))


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _no_password() -> str:
    raise ValueError("the key has a password, which nobody could type in on each machine")


def _unusable(folder: str, names: str, error: Exception) -> HostError:
    why = getattr(error, "strerror", None) or error
    return HostError(f"{names} in {folder} can't be used: {why}. {HOW}")
