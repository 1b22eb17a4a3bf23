"""Workers as tasks of the stream's own event loop: the reference that every other backend is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamline.channel import Inbox
from streamline.flow import Site
from streamline.plan import Plan
from streamline.states import Tree
from streamline.worker import open_worker

__all__ = ["Inline"]


@dataclass(frozen=True)
class Inline:
    """One task a worker, in the event loop that runs the stream."""

    def open_worker(self, plan: Plan, site: Site, state: Tree | None) -> Inbox[Any]:
        return open_worker(plan, site, state)
