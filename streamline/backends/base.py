"""The interface between a stream and the place where its workers run."""

from __future__ import annotations

from typing import Any, Protocol

from streamline.core.channel import Inbox
from streamline.core.flow import Site
from streamline.core.state import Tree
from streamline.plan.plan import Plan


class Workers(Protocol):
    """Opens the workers of one run."""

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        """Return the inbox of the worker of shard `site.shard`, at `state` or at the start.

        No I/O: the inbox's first pull starts the worker, and its `aclose` ends it. Items, their order and their states
        are those of `Inline`.

        Args:
          feed: what the worker reads of a shared live source; None: it reads its source itself.
        """


class Backend(Protocol):
    """Where workers run."""

    def check(self, plan: Plan) -> None:
        """Refuse a plan that can't run here, or not as it was meant: `PlanError`."""

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        """Return what opens the workers of a run of the rank at `site`. No I/O; what it starts later ends with it."""
