"""A host: a thread or process that runs workers, as the consumer side sees it."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from streamline.backends.hosts.process_main import ProcessEnv, process_env
from streamline.backends.hosts.stdio_relay import Relay
from streamline.backends.ipc.link import Link
from streamline.core.figures import HostKind
from streamline.core.meters import HostMeter


class HostExit(NamedTuple):
    """How a host ended.

    Attributes:
      reason: for a person: "signal 9 (SIGKILL)".
      output: what it wrote, such as the stacks of a crash.
      counts: whether what it ran may have ended it; else its machine or the network did.
    """

    reason: str
    output: str = ""
    counts: bool = True


class Host(ABC):
    """One host. It may serve several runs in several event loops; its methods are thread-safe.

    Attributes:
      number: 0-based, among its backend's.
      closed: it was asked to end; `connect` raises.
      shared: with other processes of this machine: it isn't killed where a run is only abandoned.
    """

    kind: ClassVar[HostKind] = "thread"
    shared: ClassVar[bool] = False
    number: int
    closed: bool

    @property
    def pid(self) -> int | None:
        """Its process's id; None before it is started."""
        return os.getpid()

    @property
    def node(self) -> str:
        """The machine that it runs on; "": this one, or none yet."""
        return ""

    def resident_bytes(self) -> int:
        """Return its resident memory; 0 if it shares this process's, or isn't running."""
        return 0

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages call it: "process 2, pid 4711"."""

    def start(self) -> None:  # noqa: B027 - a thread needs none
        """Begin to start if that takes time; returns at once. Raises `HostError`; once closed, `ClosedError`."""

    @abstractmethod
    async def connect(self, payload: Any, answer: Callable[[Any], Any] | None = None) -> Link:
        """Return the consumer's end of a new link, starting the host if needed.

        Waits for a machine to run it, if it runs on another one, but not for its start.

        Args:
          payload: what `host_server.serve` gets in the host.
          answer: answers the questions of a host in another process, one at a time, in any thread.
        """

    @abstractmethod
    def exit_reason(self, link: Link) -> HostExit:
        """Make sure that the host of a closed link has ended; return why. Blocks. The next `connect` starts another."""

    @abstractmethod
    def kill(self, link: Link) -> None:
        """Kill the host of a link; where that can't be done, close the link."""

    def isolated(self) -> Host:
        """Return a host of this process alone, if that can be; it is closed with this one.

        For calls that may have ended a host: else what another rank runs may end it again and again, and a call of this
        process that has nothing to do with it would be blamed.
        """
        return self

    @abstractmethod
    def stacks(self) -> str:
        """Return the stacks of its threads, or why there are none. Blocks."""

    @abstractmethod
    def leave(self) -> None:
        """Ask the host to end, with all that it runs, without waiting. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End the host and wait for it. Idempotent. Blocks."""


class HostSlot:
    """One of a run's hosts, or what has taken its place.

    Attributes:
      first: the host that the run began with.
      host: the one that its workers run in now.
      meter: counts what all of them do.
      stuck_s: seconds that a worker had been stuck when the host was killed for it; None: it wasn't.
    """

    def __init__(self, host: Host) -> None:
        self.first = self.host = host
        self.stuck_s: float | None = None
        self.meter = HostMeter(
            host.number,
            host.kind,
            pid=lambda: self.host.pid,
            resident=lambda: self.host.resident_bytes(),
            stacks=lambda: self.host.stacks(),
            node=lambda: self.host.node,
            shared=host.shared,
        )

    def isolate(self) -> None:
        """Go on with a host of this process alone, if that can be."""
        self.host = self.host.isolated()


class Killable(Protocol):
    """The process of a host."""

    def kill(self) -> None: ...


P = TypeVar("P", bound=Killable)


class SocketHost(Host, Generic[P]):
    """A host at the other end of a socket, which may be passed on to another process of this machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False
        self._lock = threading.RLock()  # reentrant: a finaliser may close it in this thread
        self._process_of: weakref.WeakKeyDictionary[Link, P] = weakref.WeakKeyDictionary()

    @abstractmethod
    async def reach(
        self, payload: Any, answer: Callable[[Any], Any] | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, P]:
        """Return the consumer's end of a new connection, and the process there, as `connect`; `env`: the consumer's."""

    @abstractmethod
    def exit_of(self, process: P) -> HostExit:
        """As `exit_reason`, of a process that was reached."""

    @abstractmethod
    def link_over(self, sock: socket.socket) -> Link:
        """Return the consumer's end of a link over a connection."""

    async def connect(self, payload: Any, answer: Callable[[Any], Any] | None = None) -> Link:
        sock, process = await self.reach(payload, answer, process_env())
        link = self.link_over(sock)
        with self._lock:
            self._process_of[link] = process
            if self.closed:
                link.close()
        return link

    def exit_reason(self, link: Link) -> HostExit:
        return self.exit_of(self._process_of[link])

    def kill(self, link: Link) -> None:
        self._process_of[link].kill()
