"""Workers in processes: for Python code that holds the GIL, at the speed of memory, and going on when one dies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamline.backends.base import Workers
from streamline.flow import Site
from streamline.hosts.child_host import ProcessHost
from streamline.hosts.far import Spec
from streamline.hosts.hosted import HostedWorkers
from streamline.hosts.lane import Care
from streamline.hosts.shipping import ship
from streamline.options import check_int
from streamline.plan import Plan

__all__ = ["Processes"]


@dataclass(frozen=True)
class Processes:
    """Worker w runs in process w mod n, in an event loop of its own.

    A process is a new interpreter, never a fork, and doesn't import the main module again. One that dies is replaced;
    its workers go on behind the last item that arrived.

    Args:
      n: processes, at least 1.
      env: of their environment, what is to be other than here. By default they see no GPU, and BLAS runs one thread.
      max_restarts: deaths that are borne while a worker gives nothing in between; then `WorkerDied` is raised.
      worker_timeout: seconds that the consumer waits for a worker that gives nothing before it is reported in the log,
        with its Python stack; None: for ever.
      replace_stuck: whether the process of such a worker is then replaced.
    """

    n: int
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    max_restarts: int = field(default=3, kw_only=True)
    worker_timeout: float | None = field(default=None, kw_only=True)
    replace_stuck: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_int("Processes(n)", self.n, 1)
        check_int("Processes(max_restarts=)", self.max_restarts, 1)

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        session = site.tasks.session
        spec = Spec(plan=plan, policy=session.errors.policy, most_ahead=session.most_ahead, metered=session.meters.on)
        hosts = [ProcessHost(number, self.env) for number in range(min(self.n, workers))]
        care = Care(
            max_restarts=self.max_restarts, worker_timeout=self.worker_timeout, replace_stuck=self.replace_stuck
        )
        return HostedWorkers(plan, site, hosts, ship(spec), workers, care, own=True)
