"""The workers of a running, dealt to hosts: worker w to host w mod n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamline.core.channel import Inbox
from streamline.core.flow import Site
from streamline.core.state import Tree
from streamline.hosts.deaths import Care
from streamline.hosts.host import Host
from streamline.hosts.lane import Lane
from streamline.hosts.remote import RemoteWorker
from streamline.plan.plan import Plan

__all__ = ["HostedWorkers"]

BYTES_ON_THE_WAY = 64 * 2**20
"""Bytes of items that may be between a host and whoever reads them, for all its workers of a running together."""


class HostedWorkers:
    """Opens workers in hosts.

    Args:
      hosts: at most as many as there are workers.
      payload: what each of them is given.
      workers: how many there will be at a time.
      care: what is borne of a host.
      own: whether the hosts end with the running.
    """

    def __init__(
        self, plan: Plan, site: Site, hosts: Sequence[Host], payload: Any, workers: int, care: Care, *, own: bool
    ) -> None:
        self._plan = plan
        self._lanes = [Lane(host, payload, site.tasks, care, own=own) for host in hosts]
        self._ranks = site.num_shards
        self._size = BYTES_ON_THE_WAY // -(-workers // len(hosts))
        self._opened = 0

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        """Return the inbox of a worker, whose first pull starts all hosts side by side, and then the worker."""
        plan = self._plan
        worker = RemoteWorker[Any](self._opened, plan, site, state, self._size, feed)
        self._opened += 1
        lane = self._lanes[site.shard // self._ranks % len(self._lanes)]
        lane.add(worker)

        def start() -> None:
            for other in self._lanes:
                other.begin()
            lane.start(worker)

        filled_by = (plan.worker[-1] if plan.worker else plan.source).name
        return worker.wire(lane, start, filled_by)
