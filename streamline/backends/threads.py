"""Workers in threads, each with an event loop of its own: for functions that let go of the GIL."""

from __future__ import annotations

from dataclasses import dataclass

from streamline.backends.base import Workers
from streamline.flow import Site
from streamline.hosts.far import Spec
from streamline.hosts.hosted import HostedWorkers
from streamline.hosts.lane import Care
from streamline.hosts.thread import ThreadHost
from streamline.options import check_int
from streamline.plan import Plan

__all__ = ["Threads"]


@dataclass(frozen=True)
class Threads:
    """Worker w runs in thread w mod n, in an event loop of its own.

    Args:
      n: threads, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_int("Threads(n)", self.n, 1)

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        session = site.tasks.session
        spec = Spec(plan=plan, policy=session.errors.policy, most_ahead=session.most_ahead, metered=session.meters.on)
        hosts = [ThreadHost(number) for number in range(min(self.n, workers))]
        return HostedWorkers(plan, site, hosts, spec, workers, Care(max_restarts=1), own=True)
