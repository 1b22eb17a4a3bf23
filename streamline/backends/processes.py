"""Workers in processes: for Python code that holds the GIL.

Large items cross in shared memory. A process is started at its first link; one that dies is replaced, and its workers
continue after the last item that arrived.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.host import HostExit, SocketHost
from streamline.backends.hosts.host_server import Spec
from streamline.backends.hosts.plan_shipping import Shipped, ship
from streamline.backends.hosts.pool import HostingBackend, check_shared
from streamline.backends.hosts.process_main import ProcessEnv
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.hosts.stdio_relay import Relay
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.socket_link import SocketLink
from streamline.core.figures import HostKind
from streamline.core.options import check_int
from streamline.core.tasks import Session
from streamline.errors import ClosedError
from streamline.plan.plan import Plan

ENTRY_POINT = "streamline.backends.hosts.host_server:serve_socket"

SHARED_ENTRY_POINT = "streamline.backends.hosts.shared_runs:serve_socket"


@dataclass(frozen=True)
class Processes(HostingBackend):
    """Worker w runs in process w mod n, in an event loop of its own.

    A process is a new interpreter, never a fork, and doesn't import the main module again. One that dies is replaced;
    its workers continue after the last item that arrived.

    `with sl.Processes(4) as pool:` makes a pool that is kept between pipelines and serves several at once.

    Args:
      n: processes, at least 1, at most one per worker; None: one per core of this rank.
      env: environment variables to change. By default they see no GPU, and BLAS runs one thread.
      max_restarts: deaths in a row, without an item in between, before `WorkerDied` is raised.
      worker_timeout: seconds that the consumer waits for a worker before its Python stack is logged; None: no limit.
      replace_stuck: whether the process of such a worker is then replaced, too.
      shared: "node": the processes of one job on this machine use the same n processes, and what several of them need
        is read once (docs/ranks.md). None: each has its own.
    """

    n: int | None = None
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    max_restarts: int = field(default=3, kw_only=True)
    worker_timeout: float | None = field(default=None, kw_only=True)
    replace_stuck: bool = field(default=False, kw_only=True)
    shared: Literal["node"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.n is not None:
            check_int("Processes(n)", self.n, 1)
        check_int("Processes(max_restarts=)", self.max_restarts, 1)
        check_shared("Processes", self.shared)

    @property
    def most(self) -> int | None:
        return self.n

    @property
    def sharing_kind(self) -> str:
        return f"Processes, env {sorted(self.env.items())}"

    @property
    def crash_tracking(self) -> CrashTracking:
        return CrashTracking(
            max_restarts=self.max_restarts, worker_timeout=self.worker_timeout, replace_stuck=self.replace_stuck
        )

    def host(self, number: int, *, shared: bool = False) -> ProcessHost:
        return ProcessHost(number, self.env, SHARED_ENTRY_POINT if shared else ENTRY_POINT)

    def payload(self, plan: Plan, session: Session, hosts: int) -> Shipped:
        shipped = ship(Spec.of(plan, session), alike=self.shared is not None)
        session.hooks.at_close(shipped.close)  # an ended run is a reference cycle, which may be collected late
        return shipped


DYING_S = 0.3
"""Seconds from the end of a link to the exit of its process: well under a millisecond if it died."""

DEATH_S = 5.0
"""Seconds to wait for a killed process; one that is stuck in a driver may never exit."""


class ProcessHost(SocketHost[HostProcess]):
    """A process, or the one that replaced it."""

    kind: ClassVar[HostKind] = "process"

    def __init__(self, number: int, env: Mapping[str, str], entry_point: str = ENTRY_POINT) -> None:
        super().__init__(number)
        self._env = env
        self._entry_point = entry_point
        self._process: HostProcess | None = None
        self._used = False  # whether the process was given a link

    @property
    def name(self) -> str:
        process = self._process
        return f"process {self.number}" + ("" if process is None else f", pid {process.pid}")

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        with self._lock:
            self._running_process()

    async def reach(
        self, payload: Shipped, answer: Callable[[Any], Any] | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, HostProcess]:
        with self._lock:
            process = self._running_process()
            sock = process.link(payload, answer, env)
            self._used = True
            return sock, process

    def link_over(self, sock: socket.socket) -> Link:
        return SocketLink(sock)

    def _running_process(self) -> HostProcess:
        """Return the process, started if there is none; under the lock."""
        if self.closed:
            raise ClosedError(f"process {self.number} was closed with its pool")
        if self._process is None or self._process.exit is not None:
            self._process = HostProcess(self.number, self._env, entry_point=self._entry_point)
            self._used = False
        return self._process

    def exit_of(self, process: HostProcess) -> HostExit:
        hung_up = not process.wait(DYING_S)
        if hung_up:
            process.kill()
            process.wait(DEATH_S)
        reason, crash = process.exit or "nothing: it can't be killed", process.crash
        if hung_up:
            reason += ", since it had hung up"
        process.close(0.0)
        with self._lock:
            if self._process is process:
                self._process = None
        return HostExit(reason, crash)

    def stacks(self) -> str:
        process = self._process
        return ("" if process is None else process.stacks()) or "it doesn't answer: it is stopped, or just starting"

    def resident_bytes(self) -> int:
        process = self._process
        return 0 if process is None else process.resident_bytes()

    def leave(self) -> None:
        with self._lock:
            self.closed = True
            process = self._process
        if process is not None:
            process.leave()
        for link in list(self._process_of):  # else it would wait for its runs to end
            link.close()

    def close(self) -> None:
        self.leave()
        process = self._process
        if process is not None:
            process.close() if self._used else process.close(0.0)
            self._process = None  # not before: what Ctrl-C cuts off, the next close does
