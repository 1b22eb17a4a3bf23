"""Workers in processes on other machines, which agents start there (`streamline worker`)."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import anyio

from streamline.backends.hosts.host import Host, HostExit, SocketHost
from streamline.backends.hosts.host_server import Spec
from streamline.backends.hosts.placement import Elasticity
from streamline.backends.hosts.plan_shipping import Shipped, ship
from streamline.backends.hosts.pool import HostingBackend, check_shared
from streamline.backends.hosts.process_main import ProcessEnv
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.hosts.stdio_relay import Relay
from streamline.backends.ipc.link import Link
from streamline.backends.network.handshake import read_key
from streamline.backends.network.tls import Certificates
from streamline.backends.remote.agents import Agents, CarriedPlan, HostGone, RemoteProcess, agents_at
from streamline.backends.remote.network_link import LOST_AFTER_S, NetworkLink, watch_peer
from streamline.core.figures import HostKind, host_label
from streamline.core.knobs import Knob
from streamline.core.options import check_int, parse_address, type_and_repr
from streamline.core.tasks import Session
from streamline.core.threads import wait_future
from streamline.errors import ClosedError, HostError, PlanError, PlanTypeError
from streamline.plan.plan import Plan


@dataclass(frozen=True)
class AgentsBackend(HostingBackend):
    """Workers run in processes that agents start on their machines: worker w in host w mod n. Options: see `Remote`."""

    isolates: ClassVar[bool] = False  # agents offer so many places

    hosts: int | tuple[int, int]
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    start_timeout_s: float = field(default=300.0, kw_only=True)
    lost_after_s: float = field(default=LOST_AFTER_S, kw_only=True)
    shared: Literal["node"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        checked_hosts(f"{name}(hosts)", self.hosts)
        for option, value, least in (
            ("start_timeout_s", self.start_timeout_s, 0.0),
            ("lost_after_s", self.lost_after_s, 2.0),
        ):
            if not value >= least:
                raise PlanError(f"{name}({option}=) is at least {least:g} seconds, got {value!r}")
        check_shared(name, self.shared)
        if self.shared is not None and isinstance(self.hosts, tuple):
            raise PlanError(
                f'{name}({self.hosts}, shared="node"): shared hosts are as many all the time, since each rank has to '
                f"know which of them runs a shard: write {name}({self.hosts[1]}), or leave shared= out"
            )

    @property
    def sharing_kind(self) -> str:
        times = self.start_timeout_s, self.lost_after_s
        return f"{type(self).__name__}, env {sorted(self.env.items())}, {times}"

    @property
    def most(self) -> int:
        return self.hosts[1] if isinstance(self.hosts, tuple) else self.hosts

    @property
    def elasticity(self) -> Elasticity | None:
        return Elasticity(self.hosts[0], self.start_timeout_s, self.missing) if isinstance(self.hosts, tuple) else None

    @property
    def short(self) -> str:
        return f"{type(self).__name__}({self.hosts})"

    def missing(self, hosts: Sequence[Host], there: int, least: int) -> HostError:
        """Return the error for waiting in vain for `least` of `hosts`."""
        first = hosts[0]
        assert isinstance(first, RemoteHost)
        return HostError(first.late(f"only {there} of the {least} hosts that {self.short} needs at least have come"))

    def knob(self, workers: int) -> Knob | None:
        return None  # machines come and go as agents say, and this one's cores are no bound

    @property
    def crash_tracking(self) -> CrashTracking:
        return CrashTracking()

    def payload(self, plan: Plan, session: Session, hosts: int) -> CarriedPlan:
        carried = self.wrap_payload(ship(Spec.of(plan, session), alike=self.shared is not None))
        session.hooks.at_close(carried.close)
        return carried

    def wrap_payload(self, shipped: Shipped) -> CarriedPlan:
        return CarriedPlan(shipped)

    @abstractmethod
    def listen_for(self, user: object) -> Agents:
        """Listen for agents until `user` releases them. Raises `HostError`."""

    @abstractmethod
    def way_out(self, agents: Agents) -> str:
        """Say, in a message that a host has no place, what there is and what to do."""


@dataclass(frozen=True)
class Remote(AgentsBackend):
    """Workers run in processes on machines whose agents have dialled this process: worker w in host w mod n.

    On each machine, `streamline worker --connect HOST:PORT --key-file FILE` starts an agent. A host that dies, or whose
    machine is lost, is replaced where there is a place; its workers continue after the last item that arrived. Agents
    and this process prove to each other that they know the key. Without `tls` nothing is encrypted: then the network
    must be trusted.

    `with sl.Remote(32) as pool:` makes a pool that is kept between pipelines and serves several at once.

    Args:
      hosts: processes, at least 1, at most one per worker. (8, 64): work begins once 8 of them are there, up to 64 are
        used, and workers move when one comes or goes; the items and their order are the same.
      listen: "ADDRESS:PORT" where agents dial.
      key_file: a file with the key, at least 16 bytes, that the agents have, too; None: the environment's
        STREAMLINE_KEY.
      tls: a folder with tls.crt and tls.key, to encrypt everything; agents have one, too, with that tls.crt or the
        ca.crt that has signed it. None: nothing is encrypted.
      env: environment variables to change in the hosts.
      start_timeout_s: seconds to wait for an agent with a place, for each host; of (8, 64), while there are fewer
        than 8.
      lost_after_s: seconds of silence after which a machine counts as lost, at least 2.
      shared: "node": the processes of one job on this machine use the same hosts (docs/ranks.md). None: each has its
        own.
    """

    listen: str = field(default="0.0.0.0:7077", kw_only=True)
    key_file: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    tls: str | os.PathLike[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_address("Remote(listen=)", self.listen)
        if self.shared is not None and self.tls is not None:
            raise PlanError(
                'Remote(tls=, shared="node"): an encrypted connection can\'t be passed on to another process: leave '
                "one of the two out"
            )

    @property
    def sharing_kind(self) -> str:
        return f"{super().sharing_kind}, {self.listen}, {self.key_file and os.fspath(self.key_file)}"

    def host(self, number: int, *, shared: bool = False) -> RemoteHost:
        return RemoteHost(number, self, shared_by_ranks=shared)

    def listen_for(self, user: object) -> Agents:
        address, key, tls = parse_address("listen", self.listen), read_key(self.key_file), Certificates.of(self.tls)
        return agents_at(address, key, self.lost_after_s, tls, user)

    def way_out(self, agents: Agents) -> str:
        return (
            f"Agents: {agents.summary()}. Start more of `streamline worker --connect HOST:{agents.port}`, or let them "
            "offer more places (--hosts), and see what they log"
        )


def checked_hosts(option: str, hosts: int | tuple[int, int]) -> None:
    """Refuse what is neither a number of hosts nor (fewest, most)."""
    if isinstance(hosts, str | list | float) or (isinstance(hosts, tuple) and len(hosts) != 2):
        raise PlanTypeError(f"{option} is an integer, or two in a tuple, (fewest, most), got {type_and_repr(hosts)}")
    fewest, most = hosts if isinstance(hosts, tuple) else (hosts, hosts)
    check_int(option, fewest, 1)
    if check_int(option, most, 1) < fewest:
        raise PlanError(f"{option} is (fewest, most), got {hosts!r}: write {(most, fewest)}")


CLOSE_S = 5.0
"""Seconds for a host to exit when asked to."""

RETRY_S = 1.0
"""Seconds between two attempts to start a host, or to open a link."""


class RemoteHost(SocketHost[RemoteProcess]):
    """A host process on another machine, or the one that replaced it."""

    kind: ClassVar[HostKind] = "process"

    def __init__(self, number: int, backend: AgentsBackend, *, shared_by_ranks: bool = False) -> None:
        super().__init__(number)
        self._backend = backend
        self._shared_by_ranks = shared_by_ranks
        self._trouble = ""  # why it could not be started or reached, the last time
        self._agents: Agents | None = None
        self._process: Future[RemoteProcess] | None = None

    @property
    def name(self) -> str:
        return host_label(self.number, self.kind, self.pid, self.node)

    @property
    def pid(self) -> int | None:
        process = self._running
        return None if process is None else process.pid or None

    @property
    def node(self) -> str:
        process = self._running
        return "" if process is None else process.agent.node

    @property
    def _running(self) -> RemoteProcess | None:
        """The process, if it has a place."""
        process = self._process
        there = process is not None and process.done() and not (process.cancelled() or process.exception())
        return process.result() if process is not None and there else None

    def start(self) -> None:
        with self._lock:
            self._placed()

    def _placed(self) -> Future[RemoteProcess]:
        """Return what brings the process; under the lock."""
        if self.closed:
            raise ClosedError(f"process {self.number} was closed with its pool")
        if self._agents is None:
            self._agents = self._backend.listen_for(self)
        placed = self._process
        if placed is None or (placed.done() and (placed.exception() or placed.result().gone.is_set())):
            placed = self._process = self._place(self._agents)
        return placed

    def _place(self, agents: Agents) -> Future[RemoteProcess]:
        """Ask for another process; under the lock."""
        return agents.place(self.number, self._backend.env, shared=self._shared_by_ranks)

    def _end_place(self) -> None:
        """End what was asked for to run the process. Idempotent."""

    async def reach(
        self, payload: CarriedPlan, answer: Callable[[Any], Any] | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, RemoteProcess]:
        if self._backend.elasticity is not None:  # the run says how long it waits
            return await self._reached(payload, answer, env)
        try:
            with anyio.fail_after(self._backend.start_timeout_s):
                return await self._reached(payload, answer, env)
        except TimeoutError:
            what = f"no machine has run process {self.number} of {self._backend.short}"
            raise HostError(self.late(what)) from None

    async def _reached(
        self, payload: CarriedPlan, answer: Callable[[Any], Any] | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, RemoteProcess]:
        while True:
            with self._lock:
                placed = self._placed()
            process = None
            try:
                process = await wait_future(placed)
                sock = await process.link(payload, answer, env)
            except HostGone as gone:
                if process is not None and process.exit.counts:
                    return _dead(), process
                self._trouble = str(gone) if process is None else f"{process.agent.node}: {process.exit.reason}"
                await anyio.sleep(RETRY_S)
            except HostError as error:
                if process is None:
                    raise
                self._trouble = str(error)
                await anyio.sleep(RETRY_S)
            else:
                watch_peer(sock, self._backend.lost_after_s)
                return sock, process

    def link_over(self, sock: socket.socket) -> Link:
        return NetworkLink(sock)

    def late(self, what: str) -> str:
        """Return a message: what hasn't come in time, who has, and what to do."""
        assert self._agents is not None
        trouble = f". The last trouble: {self._trouble}" if self._trouble else ""
        wait_s = self._backend.start_timeout_s
        return f"{what} within {wait_s:g} s (start_timeout_s=). {self._backend.way_out(self._agents)}{trouble}"

    def exit_of(self, process: RemoteProcess) -> HostExit:
        process.kill(broken=True)
        if not process.gone.wait(self._backend.lost_after_s):
            return HostExit(f"silence: its agent on {process.agent.node} doesn't answer", counts=False)
        return process.exit

    def stacks(self) -> str:
        process = self._running
        return ("" if process is None else process.stacks()) or "it doesn't answer: it is stopped, or just starting"

    def resident_bytes(self) -> int:
        process = self._running
        return 0 if process is None or process.gone.is_set() else process.resident_bytes

    def leave(self) -> None:
        with self._lock:
            self.closed = True
            process = self._process
        if process is not None and not process.cancel() and (running := self._running) is not None:
            running.end(None)
        for link in list(self._process_of):  # else it would wait for its runs to end
            link.close()

    def close(self) -> None:
        self.leave()
        running = self._running
        if running is not None:
            running.end(CLOSE_S)
            running.gone.wait(CLOSE_S + 1)
        self._end_place()
        if self._agents is not None:
            self._agents.release(self)  # it stays known: what Ctrl-C cuts off, the next close does


def _dead() -> socket.socket:
    """Return a connection whose other end has hung up."""
    here, there = socket.socketpair()
    there.close()
    return here
