"""Hosts that stay: what the backends with hosts have in common, and a pool of their hosts that serves many runnings.

Success: the first running that needs k hosts starts those that aren't there yet; they stay when it ends. Failure of a
host: each running that it served has another one take its place. Close: hosts are asked to end, all at once, then
waited for; a running that is still open fails with a `ClosedError`.

The workers of a running, dealt to hosts: worker w to host w mod n.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from streamline.backends.hosts.connection import HostConnection
from streamline.backends.hosts.host import Host
from streamline.backends.hosts.remote_worker import RemoteWorker
from streamline.backends.hosts.restarts import CrashTracking
from streamline.core.channel import Inbox
from streamline.core.cpus import cpus_here
from streamline.core.flow import Site
from streamline.core.session import Session
from streamline.core.state import Tree
from streamline.errors import ClosedError, PlanError
from streamline.plan.plan import Plan

__all__ = ["HostPool", "HostedWorkers", "HostingBackend"]


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
        self,
        plan: Plan,
        site: Site,
        hosts: Sequence[Host],
        payload: Any,
        workers: int,
        care: CrashTracking,
        *,
        own: bool,
    ) -> None:
        self._plan = plan
        self._lanes = [HostConnection(host, payload, site.tasks, care, own=own) for host in hosts]
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


logger = logging.getLogger("streamline.hosts")


PLENTY = 8
"""Shards that messages suggest."""


_hinted: set[tuple[object, ...]] = set()
"""What was said already: of a pipeline that is opened for every epoch, once."""


@dataclass(frozen=True)
class HostingBackend(ABC):
    """A backend whose workers run in hosts. They end with each running; those of the `HostPool` that `with` makes
    stay."""

    _pools: list[HostPool] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    @abstractmethod
    def most(self) -> int | None:
        """Hosts, at the most; None: as many as this rank has cores for."""

    @property
    @abstractmethod
    def care(self) -> CrashTracking:
        """What is borne of a host."""

    @abstractmethod
    def host(self, number: int) -> Host:
        """Return a new host, which starts at its first link."""

    @abstractmethod
    def payload(self, plan: Plan, session: Session, hosts: int) -> Any:
        """Return what each of so many hosts is given of a running."""

    def hosts_for(self, workers: int) -> int:
        """Return how many hosts so many workers run in."""
        return min(workers, cpus_here() if self.most is None else self.most)

    def begin(self, plan: Plan, site: Site, workers: int) -> HostedWorkers:
        """Return what opens the workers of a running, in hosts that end with it; see `Backend`."""
        self.hint(plan, site, workers)
        hosts = [self.host(number) for number in range(self.hosts_for(workers))]
        return self.dealt(plan, site, workers, hosts, own=True)

    def dealt(self, plan: Plan, site: Site, workers: int, hosts: Sequence[Host], *, own: bool) -> HostedWorkers:
        """Return the workers of a running, dealt to hosts; those that take a while to start begin to."""
        try:
            for host in hosts:
                host.start()
            payload = self.payload(plan, site.tasks.session, len(hosts))
        except BaseException:
            for host in hosts if own else ():
                host.close()
            raise
        return HostedWorkers(plan, site, hosts, payload, workers, self.care, own=own)

    def check(self, plan: Plan) -> None:
        """Refuse a number of hosts of which all but one would be idle.

        Raises:
          PlanError: the plan has no `.shard`.
        """
        if (self.most or 1) > 1 and not plan.sharded:
            raise PlanError(
                f"{self.short} over a pipeline without .shard: all of it is one worker's, which runs in one of them. "
                f"Write .shard({PLENTY}) after the source (how many shards there are never changes in the life of a "
                f"run, so take a multiple of the hosts that you may ever want), or {type(self).__name__}(1)"
            )

    def hint(self, plan: Plan, site: Site, workers: int) -> None:
        """Say in the log, once of each plan, that there are more hosts than workers, if so."""
        wanted = cpus_here() if self.most is None else self.most
        if wanted <= workers or (self.most is None and plan.sharded):
            return
        key = (self.short, workers, site.num_shards, *plan.names)
        if key in _hinted:
            return
        _hinted.add(key)
        on_each = "" if site.num_shards == 1 else f" on each of the {site.num_shards} ranks"
        logger.warning(
            "%s: there %s%s, one a shard, so %d of %d would be idle, and %s started: write .shard(%d) or more%s",
            self.short,
            "is 1 worker" if workers == 1 else f"are {workers} workers",
            on_each,
            wanted - workers,
            wanted,
            "isn't" if wanted - workers == 1 else "aren't",
            wanted * site.num_shards,
            "" if self.most is None else f", or {type(self).__name__}({workers})",
        )

    @property
    def short(self) -> str:
        """How messages call it: "Processes(8)"."""
        return f"{type(self).__name__}({'' if self.most is None else self.most})"

    def pool(self, *, hints: bool = False) -> HostPool:
        """Return a pool of its hosts, to be closed; see `HostPool`."""
        return HostPool(self, hints=hints)

    def __enter__(self) -> HostPool:
        pool = self.pool()
        self._pools.append(pool)
        return pool

    def __exit__(self, *_: object) -> None:
        self._pools.pop().close()


class HostPool:
    """Hosts that stay between runnings, and serve several at once, in whatever event loops and threads.

    Made by `with sl.Threads(4) as pool:`; it is a backend. Dropping it, and the interpreter's exit, close it, too.

    Args:
      hosting: the backend that it is made of.
      hints: one pipeline has it alone: refuse more hosts than it can use, or say so. Where several share a pool, one of
        them may well have fewer workers.
    """

    def __init__(self, hosting: HostingBackend, *, hints: bool = False) -> None:
        self.hosting = hosting
        self._own = self._hints = hints
        self._hosts: list[Host] = []
        self._lock = threading.Lock()
        self._closed = False
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._end = weakref.finalize(self, _end, self._hosts, os.getpid())

    def begin(self, plan: Plan, site: Site, workers: int) -> HostedWorkers:
        """Return what opens the workers of a running, in hosts of this pool; see `Backend`.

        Raises:
          ClosedError: the pool is closed.
        """
        hosting, count = self.hosting, self.hosting.hosts_for(workers)
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"the pool of {hosting.short} is closed: open the pipeline inside its `with` block, or with "
                    f"backend={hosting.short}"
                )
            hints, self._hints = self._hints, False
            while len(self._hosts) < count:
                self._hosts.append(hosting.host(len(self._hosts)))
            hosts = self._hosts[:count]
        if hints:
            hosting.hint(plan, site, workers)
        return hosting.dealt(plan, site, workers, hosts, own=False)

    def check(self, plan: Plan) -> None:
        """As that of its backend, unless several pipelines share this."""
        if self._own:
            self.hosting.check(plan)

    def close(self) -> None:
        """End all hosts, and wait for that; what is stuck in user code is waited for a while only. Idempotent."""
        with self._lock:
            self._closed = True
            at_close, self._at_close = self._at_close, []
        for work in at_close:
            if (call := work()) is not None:
                call()
        self._end()

    def at_close(self, work: Callable[[], None]) -> None:
        """Do `work`, a method of an object that others keep, before this closes, if that object is still there."""
        with self._lock:
            self._at_close = [known for known in self._at_close if known() is not None]
            self._at_close.append(weakref.WeakMethod(work))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool belongs to the process that made it")

    def __repr__(self) -> str:
        return f"<pool of {self.hosting.short}: {'closed' if self._closed else f'{len(self._hosts)} begun'}>"


def _end(hosts: Sequence[Host], owner: int) -> None:
    """End hosts side by side. In a fork of the process that they belong to, they are somebody else's."""
    if os.getpid() != owner:
        return
    for host in hosts:
        host.leave()
    for host in hosts:
        host.close()
