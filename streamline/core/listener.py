"""The end that listens: accepts connections, and passes on those whose handshake succeeds. One thread.

A connection that has not proved itself costs a descriptor and at most some kilobytes, with TLS some tens; for at most
`HANDSHAKE_S` seconds; there are at most `MOST_PENDING`, and a further one takes the place of one that has said nothing,
or else of the oldest, once that has had `TURN_S`: connections that say nothing don't lock others out, and many peers
that dial at once don't push each other out. Time counts in which this thread looks at what has come: where it was held
up, by user code that holds the interpreter's lock, no peer is to blame.
"""

from __future__ import annotations

import errno
import logging
import re
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from streamline.core.forks import disowned_in_copies
from streamline.core.handshake import HandshakeError, ListenerHandshake, PeerHello
from streamline.core.threads import start_thread
from streamline.core.tls import Certificates, TlsSocket
from streamline.errors import HostError, printable

logger = logging.getLogger("streamline.hosts")

HANDSHAKE_S = 10.0
"""Seconds for a whole handshake: three round trips, and two of TLS."""

MOST_PENDING = 256

TURN_S = 1.0
"""Seconds for a peer that has begun its handshake, until a further one may take its place: a slow round trip."""

CROWDED_S = 0.05
"""Seconds until the next attempt to accept one, where all that are pending have begun, and none has had `TURN_S`."""

LOOK_S = 1.0
"""Seconds from one look at what has come to the next, at the most; a look that is late counts for no more."""

MOST_LOGGED = 1024
"""Addresses and reasons that are remembered, to log each once."""

FULL_S = 0.5
"""Seconds until the next attempt, where this process has as many open files as it may. As nginx does."""

_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class _Pending:
    """A connection whose handshake is not done."""

    def __init__(self, sock: socket.socket, address: str, key: bytes, accepted_at: float) -> None:
        self.sock = sock
        self.address = address
        self.handshake = ListenerHandshake(key)
        self.accepted_at = accepted_at
        self.begun = False  # it has said something
        self._to_send = b""

    def go_on(self) -> int:
        """Do what needs no waiting; return the event to wait for, 0: it is over.

        Raises:
          HandshakeError: it is refused.
          OSError: it has hung up.
        """
        self.begun = True
        try:
            if isinstance(self.sock, TlsSocket) and not self.handshake.channel:
                self.sock.shake_hands()
                self.handshake.channel = self.sock.channel
            while self._to_send or self.handshake.needs:
                if self._to_send:
                    self._to_send = self._to_send[self.sock.send(self._to_send) :]
                else:
                    data = self.sock.recv(self.handshake.needs)
                    if not data:
                        raise ConnectionResetError("it hung up")
                    self._to_send = self.handshake.receive(data)
        except BlockingIOError:
            unsent = self._to_send or (isinstance(self.sock, TlsSocket) and self.sock.has_unsent)
            return selectors.EVENT_WRITE if unsent else selectors.EVENT_READ
        return 0

    def say(self, answer: bytes) -> None:
        """Send an answer as it is, if there is one, before the connection is closed."""
        with suppress(OSError):  # it has hung up
            if answer and socket.socket.send(self.sock, answer):
                socket.socket.recv(self.sock, 1 << 16)  # what is unread would take the answer from the other end


class Listener:
    """Listens at an address, as long as it isn't closed.

    Args:
      address: port 0: any that is free. A path: that of a Unix socket, which isn't there yet; it isn't removed.
      on_peer: called in the listener's thread with each connection, blocking, what it said of itself, and its address.
        It must not wait: others do meanwhile.
      tls: None: nothing is encrypted.

    Attributes:
      port: at which it listens; 0: at a path.

    Raises:
      HostError: the address is in use, or not of this machine; there is no room for a thread or a descriptor; there is
        no certificate.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        key: bytes,
        on_peer: Callable[[socket.socket, PeerHello, str], object],
        tls: Certificates | None = None,
    ) -> None:
        self._encrypts = None if tls is None else tls.listening()
        self._key = key
        self._on_peer = on_peer
        self._server = listening_socket(address)
        self.port: int = 0 if isinstance(address, str) else self._server.getsockname()[1]
        self._pending: OrderedDict[socket.socket, _Pending] = OrderedDict()
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._closed_until: float | None = None  # for what would be accepted
        self._now, self._looked_at = 0.0, time.monotonic()  # the seconds that count
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="streamline listener", daemon=True)
        disowned_in_copies(self)
        try:
            start_thread(self._thread)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, and drop connections whose handshake isn't done. Idempotent."""
        self._over = True
        if self._thread.ident is None:  # it isn't there, or will see that before it uses what this closes
            self._close_all()
            return
        with suppress(OSError):  # it is closed already
            self._wake.send(b"\x00")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """Close the descriptors in a fork, in which the thread doesn't go on."""
        self._close_all()

    def _serve(self) -> None:
        try:
            while not self._over and self._turn():
                self._expire()
        finally:
            for pending in list(self._pending.values()):
                self._drop(pending)
            self._close_all()

    def _turn(self) -> bool:
        """Wait, and serve whatever has come; return whether to go on."""
        ready = self._selector.select(self._wait_s())
        looked_at = time.monotonic()
        self._now += min(looked_at - self._looked_at, LOOK_S)
        self._looked_at = looked_at
        for key, _ in ready:
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._pending:  # it wasn't replaced in this very turn
                self._go_on(key.data)
        return True

    def _wait_s(self) -> float | None:
        times = [pending.accepted_at + HANDSHAKE_S for pending in islice(self._pending.values(), 1)]
        if self._closed_until is not None:
            times.append(self._closed_until)
        return max(0.0, min(min(times) - self._now, LOOK_S)) if times else None

    def _accept(self) -> None:
        if len(self._pending) >= MOST_PENDING and not self._make_room():
            self._accept_none_for(CROWDED_S)
            return
        try:
            sock, peer = self._server.accept()
        except OSError as error:  # it has hung up already, or there is no descriptor for it
            if error.errno in _FULL:
                self._full(error)
            return
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has hung up
            sock.close()
            return
        host = "this machine" if sock.family == socket.AF_UNIX else peer[0]
        if self._encrypts is not None:
            sock = self._encrypts(sock)
        pending = self._pending[sock] = _Pending(sock, str(host), self._key, self._now)
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _make_room(self) -> bool:
        """Drop one that has had its time; return whether there was one."""
        silent = (pending for pending in self._pending.values() if not pending.begun)
        found = next(silent, self._oldest())
        if found.begun and found.accepted_at + TURN_S > self._now:
            return False
        self._refuse(found, f"{MOST_PENDING} others aren't done with their handshakes either")
        return True

    def _accept_none_for(self, seconds: float) -> None:
        self._selector.unregister(self._server)
        self._closed_until = self._now + seconds

    def _full(self, error: OSError) -> None:
        """Make room by dropping the oldest; without any, accept nothing for a while: the selector would spin."""
        if self._pending:
            self._refuse(self._oldest(), f"there is no room for it: {error.strerror}")
            return
        self._log("", f"connections can't be accepted: {error.strerror} (`ulimit -n`)")
        self._accept_none_for(FULL_S)

    def _go_on(self, pending: _Pending) -> None:
        try:
            events = pending.go_on()
        except HandshakeError as error:
            pending.say(error.answer)
            self._refuse(pending, str(error))
        except OSError:
            if pending.handshake.challenged:
                self._refuse(pending, "it hung up in its handshake: it may have another key")
            else:
                self._drop(pending)  # quietly: probes of load balancers do that
        else:
            if events:
                self._selector.modify(pending.sock, events, pending)
            elif pending.handshake.refused:
                self._refuse(pending, pending.handshake.refused)
            else:
                self._pass_on(pending)

    def _pass_on(self, pending: _Pending) -> None:
        self._forget(pending)
        hello: Any = pending.handshake.hello
        try:
            pending.sock.setblocking(True)
            self._on_peer(pending.sock, hello, pending.address)
        except Exception:
            pending.sock.close()
            logger.exception("a connection from %s can't be used", pending.address)

    def _refuse(self, pending: _Pending, why: str) -> None:
        self._drop(pending)
        self._log(pending.address, f"a connection from {pending.address} is refused: {why}")

    def _log(self, address: str, line: str) -> None:
        """Log once per address and reason. Reasons with other numbers are the same: the sender chooses those."""
        known = address, re.sub(r"\d+", "0", line)
        if known not in self._logged:
            if len(self._logged) >= MOST_LOGGED:
                self._logged.popitem(last=False)
            self._logged[known] = None
            logger.warning("%s", printable(line))

    def _expire(self) -> None:
        while self._pending and self._oldest().accepted_at + HANDSHAKE_S <= self._now:
            self._refuse(self._oldest(), f"no handshake within {HANDSHAKE_S:g} s")
        if self._closed_until is not None and self._closed_until <= self._now:
            self._closed_until = None
            self._selector.register(self._server, selectors.EVENT_READ)

    def _oldest(self) -> _Pending:
        return next(iter(self._pending.values()))

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.sock]
        self._selector.unregister(pending.sock)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        with suppress(OSError):  # it has hung up
            pending.sock.shutdown(socket.SHUT_RDWR)  # closing alone doesn't end it while a fork holds it, too
        pending.sock.close()

    def _close_all(self) -> None:
        for sock in (*self._pending, self._woken, self._wake, self._server):
            sock.close()
        self._pending.clear()
        self._selector.close()


def listening_socket(address: tuple[str, int] | str) -> socket.socket:
    """Return a socket that listens at an address, or at a path, and doesn't block.

    Raises:
      HostError: it is in use, or not of this machine.
    """
    try:
        server = _server_at(address)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        why = getattr(error, "strerror", None) or error
        where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise HostError(f"can't listen at {where}: {why}") from error
    server.setblocking(False)
    return server


def _server_at(address: tuple[str, int] | str) -> socket.socket:
    if not isinstance(address, str):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=1024)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(address)
        server.listen(1024)
    except BaseException:
        server.close()
        raise
    return server
