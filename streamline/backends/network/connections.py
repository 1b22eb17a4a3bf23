"""Both ends of a connection until the handshake is done: a listener, in one thread, and those that dial it.

A connection that has not proved itself costs a descriptor and at most some kilobytes, with TLS some tens; for at most
`HANDSHAKE_S` seconds; there are at most `MOST_PENDING`, and a further one takes the place of one that has said nothing,
or else of one that has had `TURN_S`: connections that say nothing don't lock others out, and many peers that dial at
once don't push each other out. Time counts in which the listener looks at what has come: where it was held up, by user
code that holds the interpreter's lock, no peer is to blame.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import anyio

from streamline.backends.network.handshake import (
    MISFIT,
    HandshakeError,
    PeerHello,
    Steps,
    TlsMismatchError,
    dialer_steps,
    listener_steps,
)
from streamline.backends.network.tls import Certificates, TlsSocket, wait_ready
from streamline.core.forks import disown_in_copies
from streamline.core.options import listening_socket
from streamline.core.threads import start_thread
from streamline.errors import HostError, printable

logger = logging.getLogger("streamline.hosts")

T = TypeVar("T")

HANDSHAKE_S = 10.0
"""Seconds for a whole handshake: three round trips, and two of TLS."""

MOST_PENDING = 256

TURN_S = 1.0
"""Seconds for a peer that has begun its handshake, until a further one may take its place: a slow round trip."""

CROWDED_S = 0.05
"""Seconds until the next attempt to accept one, where all that are pending have begun, and none has had `TURN_S`."""

LOOK_S = 1.0
"""Seconds of a handshake that are counted at once; also where they have taken longer."""

MOST_LOGGED = 1024
"""Addresses and reasons that are remembered, to log each once."""

FULL_S = 0.5
"""Seconds until the next attempt, where this process has as many open files as it may. As nginx does."""

_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def _conversation(sock: socket.socket, steps_in: Callable[[bytes], Steps[T]]) -> Generator[int, None, T]:
    """Do the handshake on a socket that doesn't block; yields what to wait for, as `select.poll` names it.

    Args:
      steps_in: returns this end's steps in a channel.

    Raises:
      HandshakeError: one end refuses the other.
      EOFError: the other end has hung up after this one has said something; OSError: before.
    """
    channel, has_spoken = b"", False
    if isinstance(sock, TlsSocket):
        yield from _once_ready(select.POLLIN, sock.shake_hands)
        channel = sock.channel
    steps, received = steps_in(channel), b""
    try:
        step = next(steps)
        while True:
            if isinstance(step, bytes):
                has_spoken = True
                sent = yield from _once_ready(select.POLLOUT, sock.send, step)
                step = step[sent:] or next(steps)
            elif len(received) == step:
                step, received = steps.send(received), b""
            elif piece := (yield from _once_ready(select.POLLIN, sock.recv, step - len(received))):
                received += piece
            else:
                raise ConnectionResetError("it hung up")
    except StopIteration as end:
        result: T = end.value
        return result
    except OSError as error:
        if has_spoken:
            raise EOFError(str(error)) from error
        raise


def _once_ready(event: int, call: Callable[..., T], *arguments: Any) -> Generator[int, None, T]:
    while True:
        try:
            return call(*arguments)
        except BlockingIOError:
            yield event


def _send_at_once(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Pending:
    """A connection whose handshake is not done."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.age_s = 0.0
        self.has_spoken = False
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    async def shake_hands(self, key: bytes) -> PeerHello:
        talk = _conversation(self.sock, partial(listener_steps, key))
        await anyio.wait_readable(self.sock)
        self.has_spoken = True
        while True:
            try:
                event = next(talk)
            except StopIteration as end:
                hello: PeerHello = end.value
                return hello
            await (anyio.wait_writable if event == select.POLLOUT else anyio.wait_readable)(self.sock)

    def say_misfit(self) -> None:
        with suppress(OSError):  # it has hung up
            socket.socket.send(self.sock, MISFIT)
            socket.socket.recv(self.sock, 1 << 16)  # what is unread would take the answer from the other end

    def hang_up(self) -> None:
        with suppress(OSError):  # it has hung up
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # a fork may hold it, too
        self.sock.close()


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
        self._encrypt = None if tls is None else tls.listening()
        self._key = key
        self._on_peer = on_peer
        self._pending: dict[_Pending, None] = {}  # the oldest first
        self._warn_once = lru_cache(MOST_LOGGED)(logger.warning)
        self._closed = False
        self._server = listening_socket(address)
        try:
            self._loop = asyncio.SelectorEventLoop()
        except OSError as error:
            self._server.close()
            raise HostError(f"an event loop can't be made: {error.strerror} (`ulimit -n`)") from error
        self.port: int = 0 if isinstance(address, str) else self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="streamline listener", daemon=True)
        disown_in_copies(self)
        try:
            start_thread(self._thread)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, and drop connections whose handshake isn't done. Idempotent."""
        self._closed = True
        if self._thread.ident is None:  # it isn't there, or will see that before it uses what this closes
            self._close_all()
            return
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """Close the descriptors in a fork, in which the thread doesn't go on."""
        self._closed = True
        for sock in (self._server, *(pending.sock for pending in self._pending)):
            sock.close()

    def _run(self) -> None:
        try:
            if not self._closed:
                with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                    runner.run(self._serve())
        finally:
            self._close_all()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _close_all(self) -> None:
        for pending in self._pending:  # those that were not begun yet
            pending.hang_up()
        self._pending.clear()
        self._server.close()
        self._loop.close()

    async def _serve(self) -> None:
        while True:
            if len(self._pending) >= MOST_PENDING and not await self._make_room():
                await asyncio.sleep(CROWDED_S)
                continue
            try:
                await anyio.wait_readable(self._server)
                sock, peer = self._server.accept()  # that of asyncio loses one where it is cancelled
                sock.setblocking(False)
            except OSError as error:  # it has hung up already, or there is no descriptor for it
                if error.errno in _FULL:
                    await self._wait_for_descriptor(error)
                continue
            try:
                _send_at_once(sock)
                sock = sock if self._encrypt is None else self._encrypt(sock)
            except OSError:  # it has hung up
                sock.close()
                continue
            pending = _Pending(sock, "this machine" if sock.family == socket.AF_UNIX else str(peer[0]))
            self._pending[pending] = None
            self._count_time(pending)
            pending.task = self._loop.create_task(self._admit(pending))
            await asyncio.sleep(0)  # it begins

    async def _make_room(self) -> bool:
        """Drop one that has had its time; return whether there was one."""
        for _ in range(3):  # turns, in which what has come is read: those that have said it aren't silent
            await asyncio.sleep(0)
        if len(self._pending) < MOST_PENDING:
            return True
        silent = (pending for pending in self._pending if not pending.has_spoken)
        found = next(silent, next(iter(self._pending)))
        if found.has_spoken and found.age_s < TURN_S:
            return False
        self._refuse(found, f"{MOST_PENDING} others aren't done with their handshakes either")
        return True

    async def _wait_for_descriptor(self, error: OSError) -> None:
        if self._pending:
            self._refuse(next(iter(self._pending)), f"there is no room for it: {error.strerror}")
            await asyncio.sleep(0)  # it is closed
        else:
            self._warn_once(f"connections can't be accepted: {error.strerror} (`ulimit -n`)")
            await asyncio.sleep(FULL_S)

    def _count_time(self, pending: _Pending, seconds: float = 0.0) -> None:
        pending.age_s += seconds
        if pending.age_s >= HANDSHAKE_S:
            self._refuse(pending, f"no handshake within {HANDSHAKE_S:g} s")
        else:
            look_s = min(LOOK_S, HANDSHAKE_S)
            pending.timer = self._loop.call_later(look_s, self._count_time, pending, look_s)

    async def _admit(self, pending: _Pending) -> None:
        hello = None
        try:
            hello = await pending.shake_hands(self._key)
        except HandshakeError as error:
            if isinstance(error, TlsMismatchError):
                pending.say_misfit()
            self._log_refused(pending, str(error))
        except EOFError:
            self._log_refused(pending, "it hung up in its handshake: it may have another key")
        except OSError:
            logger.debug("%s has connected and hung up, as probes of load balancers do", pending.address)
        finally:
            self._forget(pending)
            if hello is None:
                pending.hang_up()
        if hello is not None:
            self._pass_on(pending, hello)

    def _pass_on(self, pending: _Pending, hello: PeerHello) -> None:
        try:
            pending.sock.setblocking(True)
            self._on_peer(pending.sock, hello, pending.address)
        except Exception:
            pending.sock.close()
            logger.exception("a connection from %s can't be used", pending.address)

    def _refuse(self, pending: _Pending, why: str) -> None:
        self._log_refused(pending, why)
        self._forget(pending)
        if pending.task is not None:
            pending.task.cancel()  # it hangs up

    def _log_refused(self, pending: _Pending, why: str) -> None:
        self._warn_once(printable(f"a connection from {pending.address} is refused: {why}").replace("%", "%%"))

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending, None)
        if pending.timer is not None:
            pending.timer.cancel()


# The other end --------------------------------------------------------------------------------------------------------
class UnreachableError(HostError):
    """No handshake could begin, or it was cut off: worth another attempt."""


class Introduction(NamedTuple):
    """How a connection to a listener begins. Picklable: with TLS, the process that uses it has to begin it itself.

    Attributes:
      address: host and port, or a path.
      tls: None: not encrypted.
    """

    address: Any
    key: bytes
    hello: PeerHello
    tls: Certificates | None = None

    @property
    def where(self) -> str:
        return self.address if isinstance(self.address, str) else f"{self.address[0]}:{self.address[1]}"

    def dial(
        self, sock: socket.socket | None = None, *, timeout_s: float = HANDSHAKE_S, connect_s: float = HANDSHAKE_S
    ) -> socket.socket:
        """Return a connection whose handshake is done. Blocks.

        Args:
          sock: to connect; None: a new one, for whichever address of the name answers.
          timeout_s: for all of it, at each address of the name.
          connect_s: of these, for the connection, which something that listens accepts at once.

        Raises:
          UnreachableError: nothing listens there, or not in time.
          HandshakeError: it has another key, or refuses this end.
          HostError: there is no certificate.
        """
        until = time.monotonic() + timeout_s
        try:
            if sock is None:
                sock = socket.create_connection(self.address, min(connect_s, timeout_s))
            else:
                sock.settimeout(timeout_s)
                sock.connect(self.address)
        except (OSError, UnicodeError) as error:  # the latter: no name of a host
            if sock is not None:
                sock.close()
            raise UnreachableError(f"{self.where} can't be reached: {error}") from error
        return self.greet(sock, until)

    def greet(self, sock: socket.socket, until: float | None = None) -> socket.socket:
        """Do the handshake on a connected socket, until a time; return what to use in its place. Raises as `dial`."""
        until = time.monotonic() + HANDSHAKE_S if until is None else until
        try:
            _send_at_once(sock)
            sock.setblocking(False)
            sock = sock if self.tls is None else self.tls.dialling()(sock)
            for event in _conversation(sock, partial(dialer_steps, self.key, self.hello)):
                wait_ready(sock, event, until)
            sock.setblocking(True)
        except (OSError, EOFError) as error:
            sock.close()
            hung_up = "hung up: another key, or too many connections there"
            why = hung_up if isinstance(error, EOFError) else f"doesn't answer: {error}"
            raise UnreachableError(f"{self.where} {why}") from error
        except BaseException:
            sock.close()
            raise
        return sock
