"""TLS between two machines: certificates in a folder, and a socket that encrypts, for any thread.

The key that both ends know proves, inside TLS, who they are, and that proof covers the listener's certificate (RFC
5929, `tls-server-end-point`; precedent: PostgreSQL's SCRAM-SHA-256-PLUS). So one that has a trusted certificate but not
the key learns nothing, also where it passes on what the two ends say. Names in certificates are not looked at: the
address of a trainer changes with each job.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from streamline.backends.network.handshake import HandshakeError, TlsMismatchError, refuse_shared
from streamline.errors import HostError

SEALED_BYTES = 1 << 16
"""Bytes that are encrypted at once, under the lock: four records."""

GATHERED_BYTES = 1 << 12
"""Pieces smaller than this are copied together: a record costs some microseconds, and 22 bytes."""

CERTIFICATE, KEY, TRUSTED = "tls.crt", "tls.key", "ca.crt"
"""As in a Secret of Kubernetes (type kubernetes.io/tls), and those of cert-manager."""

HOW = (
    "tls= is a folder with tls.crt and tls.key where machines are listened for, and with ca.crt, or else that tls.crt, "
    "where they dial: `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 "
    "-subj /CN=streamline -keyout tls/tls.key -out tls/tls.crt`"
)

BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def wait_ready(sock: socket.socket, event: int, until: float | None = None) -> None:
    """Wait for an event of `select.poll`, until a time of the monotonic clock; `TimeoutError`: in vain."""
    poll = select.poll()
    poll.register(sock, event)
    left_s = None if until is None else until - time.monotonic()
    if (left_s is not None and left_s <= 0) or not poll.poll(left_s and 1000 * left_s):
        raise TimeoutError("timed out")


class TlsSocket(ssl.SSLSocket):
    """A connected socket that encrypts. One thread may send while another one receives; it gathers and scatters.

    OpenSSL serves one thread at a time. So it runs under a lock, on a descriptor that never blocks, and what it waits
    for is waited for outside of the lock, as long as the timeout says. After a `BlockingIOError` of a send, the next
    one must begin with the same bytes, some of which are on their way.

    Attributes:
      channel: once `shake_hands` has succeeded, what the proof of the key is to cover; the same at both ends.
    """

    channel = b""
    _timeout_s: float | None = None
    _lock: threading.Lock | None = None
    _own: bytes | None
    _trusted: str

    def shake_hands(self) -> None:
        """Do the handshake of TLS, from where it stopped.

        Raises:
          BlockingIOError: call it again once there is something to read.
          HandshakeError: the other end doesn't encrypt, or isn't trusted, or doesn't trust this one.
          OSError: it has hung up.
        """
        try:
            self._use(self.do_handshake)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError) as error:
            raise ConnectionResetError("it hung up in the handshake of TLS") from error
        except ssl.SSLCertVerificationError as error:
            raise HandshakeError(
                f"the other end's certificate is not trusted: {error.verify_message}. The {CERTIFICATE} of its tls= "
                f"has to be {self._trusted}, or be signed by it, and must not have expired"
            ) from error
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise HandshakeError(
                    f"the other end refuses TLS ({error.reason}): if it is the certificate of this end, give the other "
                    f"one this {CERTIFICATE}, or the {TRUSTED} that has signed it, and renew it if it has expired"
                ) from error
            raise TlsMismatchError(
                f"the other end doesn't encrypt, or not with TLS 1.3, and this one does ({error.reason})"
            ) from error
        self.channel = channel_of(self._own or self.getpeercert(binary_form=True))

    def _use(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call OpenSSL until it need not wait."""
        until = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            if self._lock is None or self.fileno() < 0:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            try:
                with self._lock:
                    return call(*arguments)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            if self._timeout_s == 0:
                raise BlockingIOError
            wait_ready(self, event, until)

    # As of any socket -------------------------------------------------------------------------------------------------

    def settimeout(self, value: float | None, /) -> None:
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setblocking(self, flag: bool, /) -> None:
        self._timeout_s = None if flag else 0.0

    def shutdown(self, how: int, /) -> None:
        socket.socket.shutdown(self, how)  # after that of `ssl`, what comes would be taken as it is

    def sendmsg(self, pieces: Iterable[Any], ancillary: Any = (), flags: int = 0, address: Any = None, /) -> int:  # type: ignore[override]
        nbytes = 0
        try:
            for chunk in _chunks(pieces):
                nbytes += self._use(self.write, chunk)
        except BlockingIOError:
            if not nbytes:
                raise
        return nbytes

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.sendmsg([data])  # without a timeout of 0

    def recvmsg_into(self, buffers: Iterable[Any], ancillary: int = 0, flags: int = 0, /) -> Any:  # type: ignore[override]
        """Fill `buffers`, without waiting; call it until it raises `BlockingIOError`: a selector knows no better."""
        spaces, nbytes = deque(memoryview(buffer).cast("B") for buffer in buffers), 0
        try:
            while spaces and (received := self.recv_into(spaces[0])):
                nbytes += received
                spaces[0] = spaces[0][received:]
                if not spaces[0]:
                    spaces.popleft()
        except BlockingIOError:
            if not nbytes:
                raise
        return nbytes, [], 0, None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        received: int = self._use(self.read, nbytes or len(buffer), buffer)
        return received

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        data: bytes = self._use(self.read, buflen)
        return data


def _chunks(pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield what is encrypted at once."""
    gathered = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        if gathered and (len(view) >= GATHERED_BYTES or len(gathered) + len(view) > SEALED_BYTES):
            yield gathered
            gathered = bytearray()
        if len(view) < GATHERED_BYTES:
            gathered += view
        else:
            yield from (view[begin : begin + SEALED_BYTES] for begin in range(0, len(view), SEALED_BYTES))
    if gathered:
        yield gathered


def channel_of(certificate: bytes | None) -> bytes:
    """Return what identifies a channel whose listener has this certificate, for the proof of the key."""
    assert certificate is not None
    return sha256(certificate).digest()


@dataclass(frozen=True)
class Certificates:
    """A folder with certificates, at an absolute path, `tls=`: see `HOW`. Picklable; all is read when it is used."""

    folder: str

    @classmethod
    def of(cls, tls: str | os.PathLike[str] | None) -> Certificates | None:
        """Return those of an option; None: no TLS."""
        return None if tls is None else cls(os.fspath(Path(tls).absolute()))

    def listening(self) -> Callable[[socket.socket], TlsSocket]:
        """Return what encrypts accepted connections; `HostError`: there is no certificate, or no key of it."""
        certificate, key = Path(self.folder, CERTIFICATE), Path(self.folder, KEY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no connection is resumed
        try:
            refuse_shared(key.stat(), key)
            context.load_cert_chain(certificate, key, password=_refuse_password)
            text = certificate.read_text("latin-1")
            own = ssl.PEM_cert_to_DER_cert(text[text.index(BEGIN) : text.index(END) + len(END)])
        except (OSError, ValueError) as error:
            raise self._unusable(f"{CERTIFICATE} and {KEY}", error) from error
        return partial(_encrypted, context, own, "")

    def dialling(self) -> Callable[[socket.socket], TlsSocket]:
        """Return what encrypts connections that this process makes; `HostError`: there is no certificate to trust."""
        trusted = Path(self.folder, TRUSTED)
        if not trusted.exists():
            trusted = Path(self.folder, CERTIFICATE)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that is trusted need not be a CA's
        try:
            context.load_verify_locations(trusted)
        except OSError as error:
            raise self._unusable(trusted.name, error) from error
        return partial(_encrypted, context, None, str(trusted))

    def _unusable(self, names: str, error: Exception) -> HostError:
        return HostError(f"{names} in {self.folder} can't be used: {getattr(error, 'strerror', None) or error}. {HOW}")


def _encrypted(context: ssl.SSLContext, own: bytes | None, trusted: str, sock: socket.socket) -> TlsSocket:
    """Return what takes the place of a connected socket.

    Args:
      own: the certificate of this end, if it is the one that listens.
      trusted: where a dialler's trusted certificates come from, for a message.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    tls = context.wrap_socket(sock, server_side=own is not None, do_handshake_on_connect=False)
    assert isinstance(tls, TlsSocket)
    socket.socket.settimeout(tls, 0.0)
    tls._own, tls._trusted, tls._lock = own, trusted, threading.Lock()
    return tls


def _refuse_password() -> str:
    raise ValueError("the key has a password, which has to be typed in on each machine: take one without")
