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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pickle import PickleBuffer
from queue import SimpleQueue
from typing import Any

from streamline.backends.hosts.host import HostExit
from streamline.backends.hosts.plan_shipping import Shipped
from streamline.backends.hosts.process_main import ProcessEnv
from streamline.backends.hosts.stdio_relay import OVER, QUESTION, Answer, HostOutput, Relay
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.network.connections import Listener
from streamline.backends.network.handshake import PeerHello
from streamline.backends.network.tls import Certificates
from streamline.backends.remote.control import AgentCalls, TrainerCalls, call, take
from streamline.backends.remote.network_link import watch_peer
from streamline.core.forks import ForkSafeLock, disown_in_copies
from streamline.core.text import quantity
from streamline.core.threads import resolve, start_thread, wait_future
from streamline.errors import HostError

logger = logging.getLogger("streamline.hosts")

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
                agent.send(call(AgentCalls.keep_payload, self.number, PickleBuffer(self._whole)))

    def fileno(self) -> int:
        return self._shipped.fileno()

    def close(self) -> None:
        """Let all agents drop it. Idempotent."""
        self._shipped.close()
        with self._lock:
            agents, self._agents = list(self._agents), weakref.WeakSet()
            self._whole = None  # it has a descriptor of its own
        for agent in agents:
            agent.send(call(AgentCalls.drop_payload, self.number))


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
        self.output = HostOutput(f"[process {number} on {agent.node}] ", self._reply)
        self.asked: Future[str] = Future()
        self._links = count(1)
        self._pending: dict[int, Future[socket.socket]] = {}
        self._socks: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()
        self._closed_there: dict[int, float] = {}  # links, and when this end is closed, too

    async def link(self, plan: CarriedPlan, answer: Answer | Relay | None, env: ProcessEnv) -> socket.socket:
        """Return a new connection to it; `HostGone`: it ended (`exit`); `HostError`: it can't reach this process."""
        agent, number = self.agent, next(self._links)
        if answer is not None:
            self.output.answer(number, answer)
        plan.send(agent)
        with agent.agents.expected_link() as (ticket, future):
            self._pending[number] = future
            try:
                agent.send(call(AgentCalls.open_link, self.host, number, ticket, plan.number, env))
                if self.gone.is_set():
                    raise HostGone
                sock = self._socks[number] = await wait_future(future)
                if self.gone.is_set():
                    self._hang_up()
                return sock
            finally:
                del self._pending[number]

    def frame(self, kind: int, link: int, body: bytes) -> None:
        """Take what it wrote or asked."""
        if kind == OVER and (future := self._pending.get(link)) is not None:
            resolve(
                future, HostError(f"{self.agent.node}: the host can't open its connection to this process, see above")
            )
        self.output.frame(kind, link, body)

    def _reply(self, link: int, body: bytes) -> None:
        self.agent.send(call(AgentCalls.reply, self.host, link, body))

    def kill(self, *, broken: bool = False) -> None:
        """Send SIGKILL; `broken`: its connection broke, unless it has just died."""
        self.agent.send(call(AgentCalls.kill_host, self.host, broken))

    def end(self, grace_s: float | None) -> None:
        """Ask it to exit once its runs have ended; kill it after `grace_s` seconds, if not None."""
        self.agent.send(call(AgentCalls.end_host, self.host, grace_s))

    def stacks(self) -> str:
        """Return the stacks of its threads; "": it doesn't answer. Blocks."""
        asked: Future[str] = Future()
        self.asked = asked
        self.agent.send(call(AgentCalls.send_stacks, self.host))
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
            resolve(future, HostGone())
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


class AttachedAgent(TrainerCalls):
    """One agent. `lost` is called once, when it has gone; its hosts have ended then."""

    def __init__(self, agents: Agents, sock: socket.socket, hello: PeerHello) -> None:
        self.agents = agents
        self.node = hello.node
        self.ticket = hello.ticket
        self.dismissed = self.lost = False
        self.hosts: dict[int, RemoteProcess] = {}
        self.offer = 0
        self._control = ControlConnection(sock)
        self._numbers = count()
        self._unsent: SimpleQueue[Any] = SimpleQueue()
        self._sending = threading.Lock()
        self._sent_all = False
        disown_in_copies(self)

    def __repr__(self) -> str:
        return f"<agent on {self.node}: {len(self.hosts)} of {self.offer} hosts>"

    @property
    def free(self) -> int:
        """How many more hosts it takes."""
        return self.offer - len(self.hosts)

    def attach(self) -> None:
        """Begin to read what it says."""
        lost_after_s = self.agents.lost_after_s
        watch_peer(self._control.sock, lost_after_s, busy=True)
        self._control.sock.settimeout(lost_after_s)  # it says that it is alive more often
        self.send(call(AgentCalls.attach, lost_after_s))
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
        self.send(call(AgentCalls.detach))
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
                take(TrainerCalls, self, self._control.receive())
        except EOFError as error:
            why = (
                f"silent for {self.agents.lost_after_s:g} s"
                if isinstance(error.__cause__, TimeoutError)
                else str(error)
            )
        except Exception as error:  # else it would seem attached for ever
            logger.exception("what the agent on %s says can't be understood", self.node)
            why = f"it can't be understood: {error}"
        self._control.hang_up()
        self.send(None)
        self.agents.lost(self, why)
        self._control.sock.close()

    # What it says ----------------------------------------------------------------------------------------------------

    def left(self, why: str) -> None:
        raise EOFError(f"it was asked to leave: {why}")

    def offered(self, hosts: int) -> None:
        self.offer = hosts
        self.agents.offered(self)

    def host_started(self, host: int, pid: int, failure: str = "") -> None:
        if (process := self.hosts.get(host)) is not None:
            process.pid = pid
            if failure:
                self.agents.freed(process, HostExit(failure, counts=False))

    def host_frame(self, host: int, kind: int, link: int, body: bytes) -> None:
        if (process := self.hosts.get(host)) is None:
            return
        if kind == QUESTION:  # the user's handler may take its time
            answer = partial(process.frame, kind, link, body)
            start_thread(threading.Thread(target=answer, name="streamline answer", daemon=True))
            return
        process.frame(kind, link, body)
        if kind == OVER:
            process.closed_there(link, self.agents.lost_after_s)

    def host_stacks(self, host: int, text: str) -> None:
        if (process := self.hosts.get(host)) is not None:
            resolve(process.asked, text)

    def link_failed(self, ticket: str, why: str) -> None:
        self.agents.link_failed(ticket, f"{self.node}: a host has no link: {why}")

    def host_exited(self, host: int, reason: str, crash: str, counts: bool) -> None:
        if (process := self.hosts.get(host)) is not None:
            self.agents.freed(process, HostExit(reason, crash, counts))

    def alive(self, resident: Mapping[int, int]) -> None:
        for host, nbytes in resident.items():
            if (process := self.hosts.get(host)) is not None:
                process.resident_bytes = nbytes
                process.close_here()


class _Wanted:
    """A host that waits for a place."""

    def __init__(self, number: int, env: Mapping[str, str], *, shared: bool) -> None:
        self.number = number
        self.env = env
        self.shared = shared
        self.process: Future[RemoteProcess] = Future()


class Agents:
    """The agents that have dialled one address of this process; see `agents_at`.

    Attributes:
      users: those who need them: the last one that releases them lets them go.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, lost_after_s: float, tls: Certificates | None = None
    ) -> None:
        self.users: set[object] = set()
        self.lost_after_s = lost_after_s
        self._lock = threading.RLock()
        self._agents: list[AttachedAgent] = []
        self._wanted: dict[str, deque[_Wanted]] = {}  # by the ticket of the agent
        self._links: dict[str, Future[socket.socket]] = {}
        self._closed = False
        self._listener = Listener(address, key, self._peer, tls)
        disown_in_copies(self)

    @property
    def port(self) -> int:
        return self._listener.port

    def place(
        self, number: int, env: Mapping[str, str], ticket: str = "", *, shared: bool = False
    ) -> Future[RemoteProcess]:
        """Return what brings a host, once an agent has a place for it. Cancel it, or fail it, to stop waiting."""
        wanted = _Wanted(number, env, shared=shared)
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
            if not resolve(future, HostGone()) and future.exception() is None:
                future.result().close()
            raise

    def link_failed(self, ticket: str, why: str) -> None:
        """Fail a link that was expected."""
        if (future := self._links.pop(ticket, None)) is not None:
            resolve(future, HostError(why))

    def offered(self, agent: AttachedAgent) -> None:
        """Use an agent, which has said how many hosts it takes."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._agents.append(agent)
        if closed:  # while it attached: it may serve the next run
            agent.detach()
            return
        logger.info("agent on %s attached, for up to %s", agent.node, quantity(agent.offer, "host"))
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
            logger.warning(
                "the agent on %s is lost (%s), and %s with it", agent.node, why, quantity(len(hosts), "host")
            )
        for process in hosts:
            process.ended(HostExit(f"the loss of its machine, {agent.node} ({why})", counts=False))

    def release(self, user: object) -> None:
        """Let all agents go, if no other run needs them. Idempotent: what Ctrl-C cuts off, the next call does."""
        with _opening:
            self.users.discard(user)
            if self.users:
                return
            for where in [where for where, agents in _open.items() if agents is self]:
                del _open[where]
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
            agent.send(call(AgentCalls.start_host, process.host, wanted.number, wanted.env, wanted.shared))
            if not resolve(wanted.process, process):  # it waits no more
                process.end(0.0)

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
            agent = AttachedAgent(self, sock, hello)
            agent.attach()
            return
        future = self._links.pop(hello.ticket, None)
        if future is None or not resolve(future, sock):
            sock.close()


_open: dict[tuple[tuple[str, int], bytes, Certificates | None], Agents] = {}
"""Those in use, by address, key and certificates."""

_opening = ForkSafeLock()

os.register_at_fork(after_in_child=_open.clear)  # those are the parent's


def agents_at(
    address: tuple[str, int], key: bytes, lost_after_s: float, tls: Certificates | None, user: object
) -> Agents:
    """Return the agents that dial an address; `user` calls `release` of them. Raises what `Listener` does."""
    where = address, key, tls
    with _opening:
        agents = _open.get(where)
        if agents is None:
            agents = _open[where] = Agents(address, key, lost_after_s, tls)
        agents.users.add(user)
        return agents
