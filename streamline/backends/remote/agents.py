"""The agents that are attached to this process, and the host processes that they run for it.

One listener per address and key serves all runs of this process. Hosts wait for a place: an agent offers so many, and
each goes to the agent with the most free ones, or to the one that was started for it, which has its ticket. An agent
that is silent for too long counts as lost, and its hosts with it; they wait for other places. Each agent has two
threads, which read and write its control connection.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pickle import PickleBuffer
from queue import SimpleQueue
from typing import Any, TypeVar

from streamline.backends.hosts.host import HostExit
from streamline.backends.hosts.plan_shipping import Shipped
from streamline.backends.hosts.process_main import ProcessEnv
from streamline.backends.hosts.stdio_relay import OVER, QUESTION, Answer, HostOutput, Relay
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.remote.control import (
    Alive,
    Attach,
    Detach,
    DropPayload,
    EndHost,
    HostExited,
    HostFrame,
    HostStacks,
    HostStarted,
    KillHost,
    Leave,
    LinkFailed,
    Offer,
    OpenLink,
    Payload,
    Reply,
    StacksOf,
    StartHost,
)
from streamline.backends.remote.network_link import watch_peer
from streamline.core.forks import ForkSafeLock, disowned_in_copies
from streamline.core.handshake import PeerHello
from streamline.core.listener import Listener
from streamline.core.text import counted
from streamline.core.threads import bring, brought, start_thread
from streamline.core.tls import Certificates
from streamline.errors import HostError

logger = logging.getLogger("streamline.hosts")

T = TypeVar("T")

STACKS_S = 3.0
"""Seconds to wait for the stacks of a host on another machine."""


class CarriedPlan:
    """A shipped plan, sent to an agent before the first link of its run there."""

    _numbers = count()

    def __init__(self, shipped: Shipped) -> None:
        self.number = next(self._numbers)
        self._shipped = shipped
        self.nbytes = shipped.nbytes
        self._lock = threading.Lock()
        self._agents: weakref.WeakSet[AttachedAgent] = weakref.WeakSet()
        self._whole: mmap.mmap | None = None  # for all agents: a copy for each would be gigabytes

    def send(self, agent: AttachedAgent) -> None:
        """Send it to an agent, once."""
        with self._lock:
            if agent not in self._agents:
                self._agents.add(agent)
                self._whole = self._whole or mmap.mmap(self._shipped.fileno(), 0, prot=mmap.PROT_READ)
                agent.send(Payload(self.number, PickleBuffer(self._whole)))

    def fileno(self) -> int:
        """Return the descriptor of what was shipped."""
        return self._shipped.fileno()

    def close(self) -> None:
        """Let all agents drop it. Idempotent."""
        self._shipped.close()
        with self._lock:
            agents, self._agents = list(self._agents), weakref.WeakSet()
            self._whole = None  # it has a descriptor of its own
        for agent in agents:
            agent.send(DropPayload(self.number))


class HostGone(Exception):  # noqa: N818 - its exit is no error of the caller's
    """The host has ended before its link came, or what was to run it has; another attempt may succeed."""


class RemoteProcess:
    """One host process of an agent.

    Attributes:
      pid: there; 0: not known yet.
      gone: set once it has ended; then `exit` says how.
      resident_bytes: as last reported.
    """

    def __init__(self, agent: AttachedAgent, host: int, number: int) -> None:
        self.agent = agent
        self.host = host
        self.pid = 0
        self.gone = threading.Event()
        self.exit = HostExit("unknown")
        self.resident_bytes = 0
        self.output = HostOutput(f"[process {number} on {agent.node}] ", partial(_reply, agent, host))
        self.asked: Future[str] = Future()
        self._links = count(1)
        self._pending: dict[int, Future[socket.socket]] = {}
        self._socks: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()
        self._closed_there: dict[int, float] = {}  # links, and when this end is closed, too

    async def link(self, plan: CarriedPlan, answer: Answer | Relay | None, env: ProcessEnv) -> socket.socket:
        """Return a new connection to it.

        Raises:
          HostGone: it has ended; see `exit`.
          HostError: it can't reach this process.
        """
        agent, number = self.agent, next(self._links)
        if answer is not None:
            self.output.answer(number, answer)
        plan.send(agent)
        with agent.agents.expected_link() as (ticket, future):
            self._pending[number] = future
            try:
                agent.send(OpenLink(self.host, number, ticket, plan.number, env))
                if self.gone.is_set():
                    raise HostGone
                sock = self._socks[number] = await brought(future)
                if self.gone.is_set():
                    self._hang_up()
                return sock
            finally:
                del self._pending[number]

    def frame(self, kind: int, link: int, body: bytes) -> None:
        """Take what it wrote or asked."""
        if kind == OVER and (future := self._pending.get(link)) is not None:
            bring(
                future, HostError(f"{self.agent.node}: the host can't open its connection to this process, see above")
            )
        self.output.frame(kind, link, body)

    def kill(self, *, broken: bool = False) -> None:
        """Send SIGKILL; `broken`: its connection broke, unless it has just died."""
        self.agent.send(KillHost(self.host, broken))

    def end(self, grace_s: float | None) -> None:
        """Ask it to exit once its runs have ended; kill it after `grace_s` seconds, if not None."""
        self.agent.send(EndHost(self.host, grace_s))

    def stacks(self) -> str:
        """Return the stacks of its threads; "": it doesn't answer. Blocks."""
        asked: Future[str] = Future()
        self.asked = asked
        self.agent.send(StacksOf(self.host))
        with suppress(TimeoutError):
            return asked.result(STACKS_S)
        return ""

    def ended(self, how: HostExit) -> None:
        """Note how it ended, once."""
        if self.gone.is_set():
            return
        self.exit = how
        self.output.end()
        self.gone.set()
        for future in list(self._pending.values()):
            bring(future, HostGone())
        self._hang_up()

    def closed_there(self, link: int, until_s: float) -> None:
        """Note that its end of a link is closed; what it has sent has `until_s` seconds to arrive."""
        self._closed_there[link] = time.monotonic() + until_s

    def close_here(self) -> None:
        """Close links that were closed there: what is between the two, a tunnel or a proxy, may hold this end open."""
        now = time.monotonic()
        for link in [link for link, until in self._closed_there.items() if until < now]:
            del self._closed_there[link]
            if (sock := self._socks.pop(link, None)) is not None:
                _shut_down(sock)

    def _hang_up(self) -> None:
        """Close the links of a lost machine, which may hold their other ends open for ever."""
        for sock in () if self.exit.counts else list(self._socks.values()):
            _shut_down(sock)


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # closed already
        sock.shutdown(socket.SHUT_RDWR)


def _reply(agent: AttachedAgent, host: int, link: int, body: bytes) -> None:
    agent.send(Reply(host, link, body))


class AttachedAgent:
    """One agent. `lost` is called once, when it has gone; its hosts have ended then."""

    def __init__(self, agents: Agents, sock: socket.socket, hello: PeerHello, lost_after_s: float) -> None:
        self.agents = agents
        self.node = hello.node
        self.pid = hello.pid
        self.ticket = hello.ticket
        self.dismissed = self.lost = False
        self.hosts: dict[int, RemoteProcess] = {}
        self.offer = 0
        self._control = ControlConnection(sock)
        self._lost_after_s = lost_after_s
        self._numbers = count()
        self._unsent: SimpleQueue[Any] = SimpleQueue()
        self._sending = threading.Lock()
        self._sent_all = False
        self._handlers: dict[type, Callable[[Any], object]] = {
            Offer: self._offered,
            HostStarted: self._started,
            HostFrame: self._frame,
            HostStacks: lambda message: self._known(message.host, lambda host: bring(host.asked, message.text)),
            LinkFailed: lambda message: agents.link_failed(
                message.ticket, f"{self.node}: a host has no link: {message.why}"
            ),
            HostExited: self._exited,
            Alive: self._alive,
            Leave: self._leave,
        }
        disowned_in_copies(self)

    def __repr__(self) -> str:
        return f"<agent on {self.node}, pid {self.pid}: {len(self.hosts)} of {self.offer} hosts>"

    @property
    def free(self) -> int:
        """How many more hosts it takes."""
        return self.offer - len(self.hosts)

    def attach(self) -> None:
        """Begin to read what it says."""
        watch_peer(self._control.sock, self._lost_after_s, busy=True)
        self._control.sock.settimeout(self._lost_after_s)  # it says `Alive` more often
        self.send(Attach(self._lost_after_s))
        name = f"streamline agent on {self.node}"
        for work in (self._listen, self._write):
            start_thread(threading.Thread(target=work, name=name, daemon=True))

    def send(self, message: Any) -> None:
        """Send it a message, without waiting: a plan may be large, and an agent stopped. Dropped if it is gone."""
        with self._sending:
            if not self._sent_all:
                self._unsent.put(message)

    def start(self, number: int, env: Mapping[str, str]) -> RemoteProcess:
        """Start a host on it; under the lock of `agents`."""
        process = RemoteProcess(self, next(self._numbers), number)
        self.hosts[process.host] = process
        return process

    def detach(self) -> None:
        """Let it go, with all its hosts."""
        self.dismissed = True
        self.send(Detach())
        self.send(None)

    def disown(self) -> None:
        """Close the connection in a fork of this process: its end must have one holder."""
        self._control.sock.close()

    def _write(self) -> None:
        while (message := self._unsent.get()) is not None:
            self._control.send(message)
        self._control.hang_up()
        with self._sending:
            self._sent_all = True
            while not self._unsent.empty():  # a plan among them would keep its memory
                self._unsent.get()

    def _listen(self) -> None:
        try:
            while True:
                message = self._control.receive()
                self._handlers[type(message)](message)
        except EOFError as error:
            why = f"silent for {self._lost_after_s:g} s" if isinstance(error.__cause__, TimeoutError) else str(error)
        except Exception as error:  # else it would seem attached for ever
            logger.exception("what the agent on %s says can't be understood", self.node)
            why = f"it can't be understood: {error}"
        self._control.hang_up()
        self.send(None)
        self.agents.lost(self, why)
        self._control.sock.close()

    def _leave(self, message: Leave) -> None:
        raise EOFError(f"it was asked to leave: {message.why}")

    def _offered(self, message: Offer) -> None:
        self.offer = message.hosts
        self.agents.offered(self)

    def _started(self, message: HostStarted) -> None:
        if (host := self.hosts.get(message.host)) is not None:
            host.pid = message.pid
            if message.failure:
                self.agents.freed(host, HostExit(message.failure, counts=False))

    def _frame(self, message: HostFrame) -> None:
        def give(host: RemoteProcess) -> None:
            host.frame(message.kind, message.link, message.body)
            if message.kind == OVER:
                host.closed_there(message.link, self._lost_after_s)

        if message.kind == QUESTION:  # the user's handler may take its time
            answering = threading.Thread(
                target=partial(self._known, message.host, give), name="streamline answer", daemon=True
            )
            start_thread(answering)
        else:
            self._known(message.host, give)

    def _exited(self, message: HostExited) -> None:
        how = HostExit(message.reason, message.crash, message.counts)
        self._known(message.host, lambda host: self.agents.freed(host, how))

    def _alive(self, message: Alive) -> None:
        for number, nbytes in message.resident.items():
            if (host := self.hosts.get(number)) is not None:
                host.resident_bytes = nbytes
                host.close_here()

    def _known(self, host: int, work: Callable[[RemoteProcess], object]) -> None:
        if (process := self.hosts.get(host)) is not None:
            work(process)


class _Wanted:
    """A host that waits for a place, at an agent with this ticket."""

    def __init__(self, number: int, env: Mapping[str, str], ticket: str, *, shared: bool) -> None:
        self.number = number
        self.env = env
        self.ticket = ticket
        self.shared = shared
        self.process: Future[RemoteProcess] = Future()


class Agents:
    """The agents that have dialled one address of this process; see `agents_at`."""

    def __init__(
        self, address: tuple[str, int], key: bytes, lost_after_s: float, tls: Certificates | None = None
    ) -> None:
        self._lost_after_s = lost_after_s
        self._lock = threading.RLock()
        self._agents: list[AttachedAgent] = []
        self._wanted: dict[str, deque[_Wanted]] = {}  # by the ticket of the agent
        self._links: dict[str, Future[socket.socket]] = {}
        self._closed = False
        self._listener = Listener(address, key, self._peer, tls)
        disowned_in_copies(self)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.port

    def place(
        self, number: int, env: Mapping[str, str], ticket: str = "", *, shared: bool = False
    ) -> Future[RemoteProcess]:
        """Return what brings a host, once an agent has a place for it. Cancel it, or fail it, to stop waiting."""
        wanted = _Wanted(number, env, ticket, shared=shared)
        with self._lock:
            self._wanted.setdefault(ticket, deque()).append(wanted)
        self._fill()
        return wanted.process

    def summary(self) -> str:
        """Say how many agents there are, for a message."""
        with self._lock:
            agents = [f"{agent.node} ({len(agent.hosts)} of {agent.offer} hosts)" for agent in self._agents]
        return f"{len(agents)} attached" + (f": {', '.join(agents)}" if agents else "")

    @contextmanager
    def expected_link(self) -> Iterator[tuple[str, Future[socket.socket]]]:
        """Expect a connection with a new ticket, good for one; yield both."""
        ticket: str = secrets.token_hex(16)
        future: Future[socket.socket] = Future()
        self._links[ticket] = future
        try:
            yield ticket, future
        except BaseException:
            self._links.pop(ticket, None)
            if not bring(future, HostGone()) and future.exception() is None:
                future.result().close()
            raise

    def link_failed(self, ticket: str, why: str) -> None:
        """Fail a link that was expected."""
        if (future := self._links.pop(ticket, None)) is not None:
            bring(future, HostError(why))

    def offered(self, agent: AttachedAgent) -> None:
        """Use an agent, which has said how many hosts it takes."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._agents.append(agent)
        if closed:  # while it attached: it may serve the next run
            agent.detach()
            return
        logger.info("agent on %s attached, for up to %s", agent.node, counted(agent.offer, "host"))
        self._fill()

    def freed(self, process: RemoteProcess, how: HostExit) -> None:
        """Note the end of a host; its place is free."""
        with self._lock:
            process.agent.hosts.pop(process.host, None)
        process.ended(how)
        self._fill()

    def dismiss(self, ticket: str) -> None:
        """Let the agent go that has this ticket, with its host."""
        with self._lock:
            agents = [agent for agent in self._agents if agent.ticket == ticket]
        for agent in agents:
            agent.detach()

    def lost(self, agent: AttachedAgent, why: str) -> None:
        """Note that an agent has gone, and its hosts with it."""
        with self._lock:
            agent.lost = True
            if agent in self._agents:
                self._agents.remove(agent)
            hosts, expected = list(agent.hosts.values()), self._closed or agent.dismissed
            agent.hosts.clear()
        if not expected:
            logger.warning("the agent on %s is lost (%s), and %s with it", agent.node, why, counted(len(hosts), "host"))
        for process in hosts:
            process.ended(HostExit(f"the loss of its machine, {agent.node} ({why})", counts=False))

    def close(self) -> None:
        """Let all agents go."""
        with self._lock:
            self._closed = True
            agents = list(self._agents)
        self._listener.close()
        for agent in agents:
            agent.detach()

    def disown(self) -> None:
        """Forget the lock, which another thread may have held at a fork."""
        self._lock = threading.RLock()

    def _fill(self) -> None:
        """Give hosts that wait the places that are free."""
        while True:
            with self._lock:
                agent = max(
                    (agent for agent in self._agents if agent.free > 0 and self._wanting(agent.ticket)),
                    key=lambda agent: agent.free,
                    default=None,
                )
                if agent is None:
                    return
                wanted = self._wanted[agent.ticket].popleft()
                process = agent.start(wanted.number, wanted.env)
            agent.send(StartHost(process.host, wanted.number, wanted.env, wanted.shared))
            if not bring(wanted.process, process):  # it waits no more
                agent.send(EndHost(process.host, 0.0))

    def _wanting(self, ticket: str) -> bool:
        """Whether a host waits for an agent with this ticket; under the lock."""
        waiting = self._wanted.get(ticket)
        while waiting and waiting[0].process.done():
            waiting.popleft()
        if waiting is not None and not waiting:
            del self._wanted[ticket]
        return bool(waiting)

    def _peer(self, sock: socket.socket, hello: PeerHello, address: str) -> None:
        """Take a connection whose handshake is done."""
        if hello.role == "control":
            agent = AttachedAgent(self, sock, hello, self._lost_after_s)
            agent.attach()
            return
        future = self._links.pop(hello.ticket, None)
        if future is None or not bring(future, sock):
            sock.close()


_open: dict[tuple[tuple[str, int], bytes, Certificates | None], tuple[Agents, int]] = {}
"""Those in use, by address, key and certificates, with their users."""

_opening = ForkSafeLock()

os.register_at_fork(after_in_child=_open.clear)  # those are the parent's


@contextmanager
def agents_at(
    address: tuple[str, int], key: bytes, lost_after_s: float, tls: Certificates | None = None
) -> Iterator[Agents]:
    """Listen at an address, as long as there is a user. Raises what `Listener` does."""
    where = address, key, tls
    with _opening:
        agents, users = _open.get(where) or (Agents(address, key, lost_after_s, tls), 0)
        _open[where] = agents, users + 1
    try:
        yield agents
    finally:
        with _opening:
            agents, users = _open[where]
            if users > 1:
                _open[where] = agents, users - 1
            else:
                del _open[where]
        if users == 1:
            agents.close()
