"""The seam between a stream and where its workers run."""

from __future__ import annotations

from typing import Any, Protocol

from streamline.channel import Inbox
from streamline.flow import Site
from streamline.plan import Plan
from streamline.states import Tree

__all__ = ["Backend"]


class Backend(Protocol):
    """Runs workers: in this event loop, or where the far end of a channel can be."""

    def open_worker(self, plan: Plan, site: Site, state: Tree | None) -> Inbox[Any]:
        """Return the inbox of the worker of shard `site.shard`, at `state` or at the beginning.

        No I/O: the inbox's first pull starts the worker, and its `aclose` ends it. Items, their order and their states
        are those of `Inline`.
        """
