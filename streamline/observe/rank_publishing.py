"""How ranks publish to rank 0's page: both ends of a connection, over which a rank sends a line a second.

A rank finds the page by a store that all ranks share, where rank 0 says where it listens, and with which key; or it
knows its address, and STREAMLINE_KEY. Both ends prove that they have the key. The hello says which
rank it is; rank 0 answers with an empty line, or with why it refuses, and says nothing more. Then lines come
(`rank_lines`), of which rank 0 keeps each rank's last one.

A rank publishes from a thread of its own, in at most one thousandth of the time, and connects again when it must,
after pauses that grow. Rank 0 waits for no rank: it looks at what has come as often as ranks publish. A rank costs it
one connection and at most two lines of memory, whatever it sends.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from time import perf_counter, process_time, thread_time
from typing import Annotated, Protocol

import msgspec

from streamline.backends.network.connections import Introduction, Listener
from streamline.backends.network.handshake import PeerHello, read_key
from streamline.core.cpus import LOCAL_RANKS
from streamline.core.forks import disowned_in_copies
from streamline.core.threads import start_thread
from streamline.errors import HostError, PlanError, printable
from streamline.observe.rank_lines import (
    MOST_LINE_BYTES,
    MOST_RANKS,
    RankLine,
    SeenRank,
    SlowRank,
    StreamLine,
    decoded,
    encoded,
    short,
    slowest,
)

logger = logging.getLogger("streamline.page")  # as the docs call it

EVERY_S = 1.0

SHARE = 0.001
"""The most of the time that goes into reading figures and sending them."""

LOOK_SHARE = 0.01
"""The most of it that goes into looks at what other ranks have sent: 64 take 1 ms, a thousand up to 40 ms."""

CONNECT_S, HANDSHAKE_S = 2.0, 5.0
"""Seconds for a connection to one of rank 0's addresses, and until it is let in."""

SEND_S = 5.0
"""Seconds that rank 0 may take for a line, where the buffers between are full."""

PAUSES_S = (0.5, 10.0)
"""The first and the longest pause before another connection; up to a half is added at random, so that ranks don't come
back all at once."""

PATIENCE_S = 10.0
"""Seconds without the page until the log says so: ranks don't open their streams at the same moment."""

CLOSE_S = 0.5
"""Seconds that a close waits for the last line to be sent, and then for a send that is cut off."""

ANSWER_BYTES = 1024

PIECE_BYTES, MOST_PIECES = 1 << 14, 16
"""What is taken of a connection at a look, at the most: a usual line is smaller than a piece, none is than all."""

MOST_SAID = 256
"""Refusals that are logged, each once."""


class Board(Protocol):
    """Where rank 0 says where its page is, and the others look. Both may block, and raise anything."""

    def post(self, text: str) -> object:
        """Say it."""

    def look(self) -> bytes | None:
        """Return what was said last; None: nothing."""


class Whereabouts(msgspec.Struct, frozen=True):
    """Where rank 0 listens: the addresses to try, in this order, and what proves that one is meant."""

    hosts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    key: bytes


@dataclass(frozen=True)
class JobRanks:
    """A rank of a job, and how it meets the others.

    Attributes:
      host: where rank 0's page is.
      board: None: there is no store.
      fixed: without a store, what is known from the beginning; None: nothing is.
    """

    rank: int = 0
    world_size: int = 1
    host: str = "127.0.0.1"
    board: Board | None = None
    fixed: Whereabouts | None = None

    @property
    def meet(self) -> bool:
        """Whether they can."""
        return self.board is not None or self.fixed is not None

    @property
    def listens_at(self) -> tuple[str, int]:
        """Where rank 0 listens for the others."""
        port = 0 if self.fixed is None else self.fixed.port
        here = self.world_size in (_number(os.environ.get(name, "")) for name in LOCAL_RANKS)
        if is_loopback(self.host) if self.fixed is not None else here:
            return self.host if self.fixed is not None else "127.0.0.1", port
        return (
            "::" if ":" in self.host else "0.0.0.0",
            port,
        )  # Debian's /etc/hosts has a machine's own name at 127.0.1.1


def job_ranks(rank: int, world_size: int, address: tuple[str, int], board: Board | None) -> JobRanks:
    """Return how a rank meets the others at a page's address.

    Raises:
      PlanError: there is no store, and no address to find rank 0 at.
      HostError: STREAMLINE_KEY is too short.
    """
    host, port = address
    if world_size == 1 or board is not None or not port or not os.environ.get("STREAMLINE_KEY"):
        return JobRanks(rank, world_size, host, None if world_size == 1 else board)
    if port == (1 << 16) - 1:
        raise PlanError(f".open(page=): ranks connect to the port after the page's, and there is none after {port}")
    there = host
    if host in ("0.0.0.0", "::"):
        there = os.environ.get("MASTER_ADDR", "127.0.0.1" if rank == 0 else "")
        if not there:
            raise PlanError(
                f'.open(page="{host}:{port}"): rank {rank} of {world_size} is to find rank 0 there, and nothing '
                f'connects to that: give the name of its machine on all ranks, page="node0:{port}", or set MASTER_ADDR'
            )
    return JobRanks(rank, world_size, host, fixed=Whereabouts((there,), port + 1, read_key(None)))


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _addresses(host: str) -> tuple[str, ...]:
    """Return where other ranks may reach this machine; a wrong one is found out by its key."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        own = ""
        with suppress(OSError):  # there is no way out of this machine
            sock.connect(("192.0.2.1", 9))  # sends nothing; of a network for documentation (RFC 5737)
            own = sock.getsockname()[0]
    given = "" if host in ("0.0.0.0", "::") or is_loopback(host) else host
    found = [given, os.environ.get("MASTER_ADDR", ""), socket.gethostname(), own, "127.0.0.1"]
    return tuple(dict.fromkeys(filter(None, found)))


class CoresBusy:
    """The cores that this process keeps busy, its hosts aside, between one look and the next."""

    def __init__(self) -> None:
        self._before = perf_counter(), process_time()

    def since(self) -> float:
        """Return them since the last look."""
        (at, used_s), self._before = self._before, (perf_counter(), process_time())
        return (self._before[1] - used_s) / max(1e-3, self._before[0] - at)


class RankPublisher:
    """Publishes the streams of a rank that isn't 0.

    Args:
      lines: returns what is published of them.
    """

    def __init__(self, ranks: JobRanks, lines: Callable[[], tuple[StreamLine, ...]]) -> None:
        self._ranks = ranks
        self._lines = lines
        self._cores = CoresBusy()
        self._over = threading.Event()
        self._sock: socket.socket | None = None
        self._pause_s = 0.0
        self._since = time.monotonic()  # it is without the page
        self._said = False
        self._thread = threading.Thread(target=self._main, name="streamline rank publisher", daemon=True)
        disowned_in_copies(self)
        try:
            start_thread(self._thread)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Publish that it is over, and close the connection; bounded in time, whatever rank 0 does."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        if self._thread.is_alive() and (sock := self._sock) is not None:
            with suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)  # rank 0 doesn't take what is sent
            self._thread.join(CLOSE_S)

    def disown(self) -> None:
        """Close the connection in a fork, where the thread doesn't go on."""
        if self._sock is not None:
            self._sock.close()

    def _main(self) -> None:
        while not self._over.wait(self._pause_s):
            try:
                with self._joined() as self._sock:
                    self._publish(self._sock)
                return
            except (OSError, HostError) as error:
                self._say(error)
            shortest, longest = PAUSES_S
            self._pause_s = min(longest, max(shortest, 2 * self._pause_s)) * random.uniform(1, 1.5)

    def _joined(self) -> socket.socket:
        """Return a connection to rank 0, which has let this rank in."""
        where = self._whereabouts()
        rank, world_size = self._ranks.rank, self._ranks.world_size
        node = short(socket.gethostname(), 253)
        hello = PeerHello(role="node", node=node, pid=os.getpid(), ticket=f"{rank}/{world_size}")
        for host in where.hosts:
            try:
                dialer = Introduction((host, where.port), where.key, hello)
                sock = dialer.dial(timeout_s=HANDSHAKE_S, connect_s=CONNECT_S)
            except HostError as error:
                failure = error
                if self._over.is_set():
                    break
                continue
            try:
                sock.settimeout(HANDSHAKE_S)
                _let_in(sock)
            except BaseException:
                sock.close()
                raise
            return sock
        raise failure

    def _whereabouts(self) -> Whereabouts:
        if self._ranks.fixed is not None:
            return self._ranks.fixed
        assert self._ranks.board is not None
        try:
            found = self._ranks.board.look()
            if found is not None:
                return msgspec.json.decode(found, type=Whereabouts)
        except Exception as error:  # a store may raise anything
            raise HostError(f"the store can't be asked where it is: {error}") from error
        raise HostError("rank 0 hasn't said where it is: is page= given there, too, and the same?")

    def _publish(self, sock: socket.socket) -> None:
        every_s = EVERY_S
        while True:
            began = thread_time()
            line = RankLine(every_s, max(0.0, self._cores.since()), self._lines())
            sock.settimeout(SEND_S)
            sock.sendall(encoded(line))
            every_s = max(EVERY_S, (thread_time() - began) / SHARE)
            if self._over.wait(every_s):
                sock.settimeout(CLOSE_S)
                sock.sendall(encoded(RankLine(over=True)))
                return
            self._pause_s, self._since, self._said = 0.0, time.monotonic(), False

    def _say(self, error: Exception) -> None:
        refused = isinstance(error, _RefusedError)
        if not self._said and (refused or time.monotonic() - self._since >= PATIENCE_S):
            self._said = True
            logger.warning(
                "rank %d isn't on the page of rank 0, and tries again: %s", self._ranks.rank, printable(str(error))
            )


class _RefusedError(HostError):
    """Rank 0 doesn't let this rank in."""


def _let_in(sock: socket.socket) -> None:
    """Wait for rank 0's answer."""
    answer = b""
    while not answer.endswith(b"\n"):
        piece = sock.recv(ANSWER_BYTES)
        if not piece or len(answer) > ANSWER_BYTES:
            raise ConnectionResetError("rank 0 hung up")
        answer += piece
    if answer != b"\n":
        raise _RefusedError(answer.decode(errors="replace").strip())


class RankCollector:
    """Takes what ranks publish, as often as they do: a look at all connections takes as long as to wake up for two of
    them. In the same thread it finds out what there is to say of rank 0, as a publisher does.

    Args:
      lines: as of a `RankPublisher`.

    Attributes:
      slow: by name of a stream, the rank that the others wait for. Where ranks have ended, what was found before.

    Raises:
      HostError: what listens for ranks can't be opened.
    """

    def __init__(self, ranks: JobRanks, lines: Callable[[], tuple[StreamLine, ...]]) -> None:
        self.world_size = ranks.world_size
        self.slow: dict[str, SlowRank] = {}
        self._lines = lines
        self._cores = CoresBusy()
        self._own = self._said_here(EVERY_S, ())
        self._own_due = -math.inf
        self._over, self._woken = threading.Event(), threading.Event()
        self._new: deque[_RankConnection] = deque()
        self._connections: dict[int, _RankConnection] = {}
        self._logged: set[str] = set()
        key = os.urandom(32) if ranks.fixed is None else ranks.fixed.key
        address = ranks.listens_at
        self._thread = threading.Thread(target=self._main, name="streamline rank collector", daemon=True)
        self._listener = Listener(address, key, self._came)
        disowned_in_copies(self)
        try:
            start_thread(self._thread)
            if ranks.board is not None:
                hosts = ("127.0.0.1",) if is_loopback(address[0]) else _addresses(ranks.host)
                text = msgspec.json.encode(Whereabouts(hosts, self._listener.port, key)).decode()
                board = threading.Thread(target=_post, args=(ranks.board, text), name="streamline board", daemon=True)
                start_thread(board)  # a store may block
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hang up on all ranks."""
        self._listener.close()
        self._over.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.disown()

    def disown(self) -> None:
        """Close the connections; in a fork, where the thread doesn't go on, and after it has ended."""
        for connection in (*self._connections.values(), *self._new):
            connection.close()

    def seen(self) -> dict[int, SeenRank]:
        """Return what is known of each rank. From any thread."""
        return {0: self._own, **{rank: one.seen for rank, one in self._connections.copy().items()}}

    def _came(self, sock: socket.socket, hello: PeerHello, _: str) -> None:
        """Take a connection whose handshake is done, in the listener's thread."""
        self._new.append(_RankConnection(sock, hello))
        self._woken.set()

    def _main(self) -> None:
        due = -math.inf
        while not self._over.is_set():
            self._woken.clear()
            while self._new:
                self._answer(self._new.popleft())
            if time.monotonic() >= due:
                began = thread_time()
                self._look()
                due = time.monotonic() + max(EVERY_S, (thread_time() - began) / LOOK_SHARE)
            self._woken.wait(max(0.0, due - time.monotonic()))

    def _look(self) -> None:
        """Take what has come, and find out which rank the others wait for."""
        for connection in self._connections.values():
            self._take(connection)
        now = time.monotonic()
        if now + EVERY_S / 2 >= self._own_due:
            began = thread_time()
            lines = self._lines()
            every_s = max(EVERY_S, (thread_time() - began) / SHARE)
            self._own, self._own_due = self._said_here(every_s, lines), now + every_s
        seen = self.seen()
        if any(one.status(now) == "ended" for one in seen.values()):
            return
        names = [stream.name for stream in self._own.streams if not stream.ended]
        found = {name: slowest(name, seen, now) for name in names}
        self.slow = {name: slow for name, slow in found.items() if slow is not None}

    def _said_here(self, every_s: float, lines: tuple[StreamLine, ...]) -> SeenRank:
        line = RankLine(every_s, max(0.0, self._cores.since()), lines)
        return SeenRank(socket.gethostname(), os.getpid(), line, time.monotonic())

    def _take(self, connection: _RankConnection) -> None:
        try:
            connection.take()
        except ValueError as error:
            connection.close()
            self._log(connection, str(error))

    def _answer(self, connection: _RankConnection) -> None:
        why = self._admitted(connection)
        connection.answer(why)
        if why:
            connection.close()
            self._log(connection, why)

    def _admitted(self, connection: _RankConnection) -> str:
        """Take a rank in, in the place of one that it was before; return why not, "": it is in."""
        hello, rank = connection.hello, connection.rank
        if hello.role != "node" or rank is None:
            return "this is where the ranks of a job publish"
        if connection.world_size != self.world_size or not 0 < rank < self.world_size:
            return (
                f"the page is of a job of {self.world_size} ranks, and this is rank {rank} of {connection.world_size}"
            )
        if rank >= MOST_RANKS:
            return f"the page has {MOST_RANKS:,} ranks at the most"
        other = self._connections.get(rank)
        if other is not None:
            self._take(other)
            same = (other.hello.node, other.hello.pid) == (hello.node, hello.pid)
            if not same and other.seen.status(time.monotonic()) == "live":
                return f"rank {rank} is there already, on {other.seen.who}: two processes have been given this rank"
            other.close()
        self._connections[rank] = connection
        return ""

    def _log(self, connection: _RankConnection, why: str) -> None:
        """Log why a rank isn't let in, or not any more; each once."""
        line = f"a rank on {connection.hello.node}, pid {connection.hello.pid}, is refused: {why}"
        if line not in self._logged and len(self._logged) < MOST_SAID:
            self._logged.add(line)
            logger.warning("%s", printable(line))


def _post(board: Board, text: str) -> None:
    try:
        board.post(text)
    except Exception as error:  # a store may raise anything
        logger.warning("the other ranks can't be told where the page is: %s", error)


class _RankConnection:
    """A rank that publishes. Keeps its last line.

    Attributes:
      rank, world_size: that it says it is; None and 0: it says nothing of the kind.
    """

    def __init__(self, sock: socket.socket, hello: PeerHello) -> None:
        sock.setblocking(False)
        self.hello = hello
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", hello.ticket)
        self.rank = None if found is None else int(found[1])
        self.world_size = 0 if found is None else int(found[2])
        self.seen = SeenRank(printable(hello.node), hello.pid, None, time.monotonic())
        self._sock = sock
        self._begun = b""  # a line

    def answer(self, why: str) -> None:
        with suppress(OSError):  # it has hung up
            self._sock.send(f"{why}\n".encode())

    def take(self) -> None:
        """Take what has come. Raises `ValueError`: it is no line of a rank."""
        for _ in range(MOST_PIECES if self.seen.connected else 0):
            try:
                piece = self._sock.recv(PIECE_BYTES)
            except BlockingIOError:
                return
            except OSError:  # it is cut off
                piece = b""
            if not piece:
                self.close()
                return
            self._received(piece)
            if len(piece) < PIECE_BYTES:
                return

    def _received(self, piece: bytes) -> None:
        whole, end, self._begun = (self._begun + piece).rpartition(b"\n")
        last = whole.rpartition(b"\n")[2]
        if max(len(last), len(self._begun)) > MOST_LINE_BYTES:
            raise ValueError(f"it sends a line of more than {MOST_LINE_BYTES:,} bytes")
        if end:
            try:
                line = decoded(last)
            except ValueError as error:
                raise ValueError(f"it sends what is no line of a rank: {error}") from error
            self.seen = replace(self.seen, line=line, at=time.monotonic())

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.seen = replace(self.seen, connected=False)
        self._begun = b""
        self._sock.close()
