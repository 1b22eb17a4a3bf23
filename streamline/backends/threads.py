"""Workers in threads, each with an event loop of its own: for functions that let go of the GIL."""

from __future__ import annotations

from dataclasses import dataclass

from streamline.core.options import check_int
from streamline.core.session import Session
from streamline.hosts.deaths import Care
from streamline.hosts.far import Spec
from streamline.hosts.pool import Hosting
from streamline.hosts.thread_host import ThreadHost
from streamline.plan.plan import Plan

__all__ = ["Threads"]

CARE = Care(max_restarts=1)
"""A thread doesn't die by itself: when its event loop has ended, something is wrong that would come again."""


@dataclass(frozen=True)
class Threads(Hosting):
    """Worker w runs in thread w mod n, in an event loop of its own.

    `with sl.Threads(4) as pool:` makes a pool of threads that stay between pipelines, and serve several at once.

    Args:
      n: threads, at least 1, and no more than there are workers; None: as many as this rank has cores.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            check_int("Threads(n)", self.n, 1)

    @property
    def most(self) -> int | None:
        return self.n

    @property
    def care(self) -> Care:
        return CARE

    def host(self, number: int) -> ThreadHost:
        return ThreadHost(number)

    def payload(self, plan: Plan, session: Session, hosts: int) -> Spec:
        return Spec.of(plan, session, memory=max(1, session.budget.most // hosts))  # of one process, all together
