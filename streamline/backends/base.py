"""The seam between a stream and where its workers run."""

from __future__ import annotations

from typing import Any, Protocol

from streamline.core.channel import Inbox
from streamline.core.flow import Site
from streamline.core.state import Tree
from streamline.plan.plan import Plan

__all__ = ["Backend", "Workers"]


class Workers(Protocol):
    """Opens the workers of one running."""

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        """Return the inbox of the worker of shard `site.shard`, at `state` or at the beginning.

        No I/O: the inbox's first pull starts the worker, and its `aclose` ends it. Items, their order and their states
        are those of `Inline`.

        Args:
          feed: what the worker reads of a live source, whose feed is one for all workers; None: it reads by itself.
        """


class Backend(Protocol):
    """Runs workers: in this event loop, or where the far end of a channel can be."""

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        """Return what opens the workers of a running. No I/O; what it starts later on ends with the running.

        Args:
          site: the rank's.
          workers: how many there will be.
        """
