"""Workers in processes: for Python code that holds the GIL, at the speed of memory, and going on when one dies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamline.core.options import check_int
from streamline.core.session import Session
from streamline.hosts.deaths import Care
from streamline.hosts.far import Spec
from streamline.hosts.pool import Hosting
from streamline.hosts.process_host import ProcessHost
from streamline.hosts.shipping import Shipped, ship
from streamline.plan.plan import Plan

__all__ = ["Processes"]


@dataclass(frozen=True)
class Processes(Hosting):
    """Worker w runs in process w mod n, in an event loop of its own.

    A process is a new interpreter, never a fork, and doesn't import the main module again. One that dies is replaced;
    its workers go on behind the last item that arrived.

    `with sl.Processes(4) as pool:` makes a pool of processes that stay between pipelines, and serve several at once.

    Args:
      n: processes, at least 1; more than there are workers aren't started. None: as many as this rank has cores for.
      env: of their environment, what is to be other than here. By default they see no GPU, and BLAS runs one thread.
      max_restarts: deaths that are borne while a worker gives nothing in between; then `WorkerDied` is raised.
      worker_timeout: seconds that the consumer waits for a worker that gives nothing before it is reported in the log,
        with its Python stack; None: for ever.
      replace_stuck: whether the process of such a worker is then replaced.
    """

    n: int | None = None
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    max_restarts: int = field(default=3, kw_only=True)
    worker_timeout: float | None = field(default=None, kw_only=True)
    replace_stuck: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.n is not None:
            check_int("Processes(n)", self.n, 1)
        check_int("Processes(max_restarts=)", self.max_restarts, 1)

    @property
    def most(self) -> int | None:
        return self.n

    @property
    def care(self) -> Care:
        return Care(
            max_restarts=self.max_restarts, worker_timeout=self.worker_timeout, replace_stuck=self.replace_stuck
        )

    def host(self, number: int) -> ProcessHost:
        return ProcessHost(number, self.env)

    def payload(self, plan: Plan, session: Session, hosts: int) -> Shipped:
        shipped = ship(Spec.of(plan, session))
        session.at_close(shipped.close)  # what has ended is a cycle, which the collector may leave alone for long
        return shipped
