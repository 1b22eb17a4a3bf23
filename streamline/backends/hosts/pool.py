"""Hosts of a run and of a pool: worker w runs in host w mod n, or where a `Placement` says.

A backend's hosts end with the run; those of a `HostPool` are kept, and serve several runs. Success: the first run that
needs k hosts starts those that are missing. Failure of a host: each run that it served has it replaced. Close: hosts
are asked to end, all at once, then waited for; a run that is still open fails with a `ClosedError`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn

from streamline.backends.hosts.connection import HostConnection, Hosting
from streamline.backends.hosts.host import Host
from streamline.backends.hosts.job import in_a_job
from streamline.backends.hosts.placement import Elasticity, Placement
from streamline.backends.hosts.plan_shipping import Shipped, digest
from streamline.backends.hosts.remote_worker import RemoteWorker
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.hosts.shared_hosts import SharedHost
from streamline.core.channel import Inbox
from streamline.core.cleanup import Cleanup
from streamline.core.cpus import cpus_here, usable_cpus
from streamline.core.flow import Site
from streamline.core.forks import disown_in_copies
from streamline.core.knobs import HOSTS, Knob, KnobValues
from streamline.core.options import type_and_repr
from streamline.core.state import Tree
from streamline.core.tasks import Session
from streamline.errors import ClosedError, PlanError, PlanTypeError
from streamline.plan.plan import Plan
from streamline.sharding.ranks import find_rank
from streamline.sharding.split import shards_of_rank

BYTES_ON_THE_WAY = 64 * 2**20
"""Bytes of items that may be in flight from one host, for all its workers of a run together."""


class HostedWorkers:
    """Opens workers, of which `workers` are open at a time, in at most as many hosts, which may end with the run.

    Args:
      elasticity: where hosts come and go; None: they are fixed.
      home: returns the number of a shard's fixed host; None: worker w runs in host w mod n.
    """

    def __init__(
        self,
        plan: Plan,
        site: Site,
        hosts: Sequence[Host],
        workers: int,
        hosting: Hosting,
        *,
        elasticity: Elasticity | None = None,
        home: Callable[[int], int] | None = None,
    ) -> None:
        self._plan = plan
        tasks, tracking = site.tasks, hosting.crash_tracking
        self._placement = None if elasticity is None else Placement(elasticity, hosts, tracking, tasks)
        self._connections = [HostConnection(host, hosting, tasks, self._placement) for host in hosts]
        self._numbered = {connection.host.number: connection for connection in self._connections}
        self._home = home
        self._ranks = site.num_shards
        self._size = BYTES_ON_THE_WAY // -(-workers // len(hosts))
        self._opened = 0

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        """Return the inbox of a worker; its first pull starts all hosts, then the worker."""
        plan = self._plan
        worker = RemoteWorker[Any](self._opened, plan, site, state, self._size, feed)
        self._opened += 1
        runs = self._fixed_host(site.shard) if self._placement is None else self._placement
        runs.add(worker)

        def start() -> None:
            for connection in self._connections:
                connection.begin()
            runs.start(worker)

        filled_by = (plan.worker[-1] if plan.worker else plan.source).name
        return worker.connect(start, filled_by)

    def _fixed_host(self, shard: int) -> HostConnection:
        if self._home is None:
            return self._connections[shard // self._ranks % len(self._connections)]
        return self._numbered[self._home(shard)]


logger = logging.getLogger("streamline.hosts")

PLENTY = 8
"""Shards that messages suggest."""

_hinted: set[tuple[object, ...]] = set()
"""Hints already logged: a pipeline may be opened for every epoch."""


@dataclass(frozen=True)
class HostingBackend(ABC):
    """A backend whose workers run in hosts: new ones for each run, or those of the `HostPool` that `with` makes."""

    isolates: ClassVar[bool] = True

    _pools: list[HostPool] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    @abstractmethod
    def most(self) -> int | None:
        """Hosts at most; None: one per core of this rank."""

    @property
    @abstractmethod
    def crash_tracking(self) -> CrashTracking:
        """When a host is given up."""

    @property
    def elasticity(self) -> Elasticity | None:
        """With fewer hosts than `most`, how a run begins and goes on; None: they are all there, or come back."""
        return None

    @property
    def shared(self) -> Literal["node"] | None:
        """Which processes use the same hosts: "node", those of the job on this machine. None: none do."""
        return None

    @property
    def sharing_kind(self) -> str:
        """The same for backends of one job that can share hosts: what is said of them, but how many there are."""
        return type(self).__name__

    @abstractmethod
    def host(self, number: int, *, shared: bool = False) -> Host:
        """Return a new host of this process; it starts at its first link. `shared`: for ranks, a `SocketHost`."""

    @abstractmethod
    def payload(self, plan: Plan, session: Session, hosts: int) -> Any:
        """Return what each of `hosts` hosts gets of a run."""

    def wrap_payload(self, shipped: Shipped) -> Any:
        """Return what hosts get of a plan that another process has shipped, to run it for that."""
        return shipped

    def run_host(self, number: int) -> Host:
        """Return a new host for the runs of this process, or its part in a shared one."""
        return SharedHost(number, self) if self.shared is not None and in_a_job(os.environ) else self.host(number)

    def knob(self, workers: int) -> Knob | None:
        """Return what a tuner may change between passes of so many workers. None: nothing.

        Not where the cores say how many hosts there are, or other processes use the same ones.
        """
        if self.most is None or self.shared is not None:
            return None
        return Knob(stage=HOSTS, kind="hosts", written=self.most, most=max(self.most, min(workers, cpus_here())))

    def hosts_for(self, workers: int, most: int | None = None) -> int:
        """Return how many hosts run `workers` workers; `most` in the place of what is written."""
        most = most or self.most
        return min(workers, cpus_here() if most is None else most)

    def numbers(self, plan: Plan, site: Site, workers: int) -> Sequence[int]:
        """Return the numbers of a run's hosts. Of shared ones, which all ranks number alike, those of its shards."""
        if self.shared is None:
            knobs = site.tasks.session.services.find(KnobValues)
            return range(self.hosts_for(workers, None if knobs is None else knobs.hosts))
        shards = shards_of_rank(plan.shard.num_shards, site.shard, site.num_shards)
        return sorted({self.home(shard) for shard in shards})

    def home(self, shard: int) -> int:
        """Return the number of the shared host that runs a shard, for whichever rank."""
        return spread(shard, usable_cpus() if self.most is None else self.most)

    def begin(self, plan: Plan, site: Site, workers: int) -> HostedWorkers:
        """Return what opens the workers of a run, in hosts that end with it."""
        self.hint(plan, site, workers)
        if self._pools and (hint := (self.short, "pool")) not in _hinted:
            _hinted.add(hint)
            logger.warning(
                "%s has an open pool, but backend= is not the pool, so hosts are started for this run alone: "
                "`with %s as pool:`, and then open(backend=pool)",
                *(self.short,) * 2,
            )
        hosts = [self.run_host(number) for number in self.numbers(plan, site, workers)]
        return self.assign(plan, site, workers, hosts, own=True)

    def assign(self, plan: Plan, site: Site, workers: int, hosts: Sequence[Host], *, own: bool) -> HostedWorkers:
        """Return the workers of a run, assigned to hosts, which begin to start."""
        try:
            for host in hosts:
                host.start()
            payload = self.payload(plan, site.tasks.session, len(hosts))
        except BaseException:
            for host in hosts if own else ():
                host.close()
            raise
        share = digest(payload) if self.shared is not None and may_share_workers(plan, site) else b""
        home = None if self.shared is None else self.home
        hosting = Hosting(payload, self.crash_tracking, own, share)
        return HostedWorkers(plan, site, hosts, workers, hosting, elasticity=self.elasticity, home=home)

    def check(self, plan: Plan) -> None:
        """Refuse a plan of one worker, without `.shard`, for several hosts: `PlanError`."""
        if (self.most or 1) > 1 and not plan.sharded:
            raise PlanError(
                f"{self.short} over a pipeline without .shard: all of it is one worker's, which runs in one of them. "
                f"Write .shard({PLENTY}) after the source (how many shards there are never changes in the life of a "
                f"run, so take a multiple of the hosts that you may ever want), or {type(self).__name__}(1)"
            )

    def hint(self, plan: Plan, site: Site, workers: int) -> None:
        """Log, once per plan, that there are more hosts than workers."""
        wanted = cpus_here() if self.most is None else self.most
        if self.shared is not None or wanted <= workers or (self.most is None and plan.sharded):
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
        """Its name in messages: "Processes(8)"."""
        return f"{type(self).__name__}({'' if self.most is None else self.most})"

    def pool(self, *, hints: bool = False) -> HostPool:
        """Return a pool of its hosts; the caller closes it."""
        return HostPool(self, hints=hints)

    def __enter__(self) -> HostPool:
        pool = self.pool()
        self._pools.append(pool)
        return pool

    def __exit__(self, *_: object) -> None:
        self._pools.pop().close()


def spread(shard: int, hosts: int) -> int:
    """Return a number below `hosts`, evenly for the shards of a machine's ranks, however ranks lie on machines.

    The sum of the digits to the base `hosts`: the ranks of one machine have consecutive numbers, or every k-th one, and
    each rank every R-th shard.
    """
    total = 0
    while shard and hosts > 1:
        shard, digit = divmod(shard, hosts)
        total += digit
    return total % hosts


def may_share_workers(plan: Plan, site: Site) -> bool:
    """Whether another process may need the same items: not where there is none, or each is a rank of its own.

    Nor where something decides in the process that reads: a live source, an order that is chosen, a limit of calls, a
    handler of errors.
    """
    if not in_a_job(os.environ):
        return False
    job = find_rank()
    own_rank = job.world_size > 1 and site.num_shards == job.world_size
    decides = (
        plan.mode == "shared"
        or plan.worker_logs
        or plan.limits
        or not isinstance(site.tasks.session.errors.policy.on_error, str)
    )
    return not own_rank and not decides


def check_shared(backend: str, shared: object) -> None:
    """Refuse what is neither None nor "node"."""
    if shared is None or shared == "node":
        return
    error = PlanError if isinstance(shared, str) else PlanTypeError
    raise error(
        f'{backend}(shared=) is "node", for the processes of a job on one machine to use the same hosts, or None, for '
        f"hosts of its own for each process; got {type_and_repr(shared)}"
    )


class HostPool:
    """A backend whose hosts are kept between runs and serve several at once, in any event loops and threads.

    Made by `with sl.Threads(4) as pool:`. Also closed when it is garbage collected, and at the interpreter's exit.

    Args:
      hosting: the backend whose hosts it keeps.
      hints: only one pipeline uses it: refuse, or log, more hosts than that can use, and end those that its last run
        doesn't need.
    """

    def __init__(self, hosting: HostingBackend, *, hints: bool = False) -> None:
        self.hosting = hosting
        self._own = self._hints = hints
        self._hosts: list[Host] = []
        self._lock = threading.RLock()  # reentrant: a finaliser may end a run in this thread
        self._running: dict[object, frozenset[int]] = {}  # which hosts each run uses
        self._last: frozenset[int] = frozenset()
        self._closed = False
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._end = Cleanup(self, _end, self._hosts, os.getpid())
        disown_in_copies(self)

    def disown(self) -> None:
        """Forget the lock, which another thread may have held."""
        self._lock = threading.RLock()

    def knob(self, workers: int) -> Knob | None:
        """Return what a tuner may change, as its backend does. None: nothing, where it may serve several pipelines."""
        return self.hosting.knob(workers) if self._own else None

    def begin(self, plan: Plan, site: Site, workers: int) -> HostedWorkers:
        """Return what opens the workers of a run, in hosts of this pool; raises `ClosedError` if it is closed."""
        hosting, numbers, run = self.hosting, self.hosting.numbers(plan, site, workers), object()
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"the pool of {hosting.short} is closed: open the pipeline inside its `with` block, or with "
                    f"backend={hosting.short}"
                )
            hints, self._hints = self._hints, False
            ended = [host for host in self._hosts if host.closed]
            self._hosts[:] = [host for host in self._hosts if not host.closed]
            known = {host.number: host for host in self._hosts}
            self._hosts += [hosting.run_host(number) for number in numbers if number not in known]
            hosts = [host for host in self._hosts if host.number in numbers]
            self._last = self._running[run] = frozenset(numbers)
            self._end_spare()
        site.tasks.session.hooks.at_close(partial(self._run_over, run))
        for host in ended:
            host.close()
        if hints:
            hosting.hint(plan, site, workers)
        return hosting.assign(plan, site, workers, hosts, own=False)

    def _run_over(self, run: object) -> None:
        """Note that a run uses its hosts no more. Idempotent."""
        with self._lock:
            self._running.pop(run, None)
            self._end_spare()

    def _end_spare(self) -> None:
        """Ask hosts to end that neither a run uses that goes on, nor the last one has used; under the lock."""
        used = self._last.union(*self._running.values())
        for host in self._hosts if self._own else ():
            if host.number not in used:
                host.leave()

    def check(self, plan: Plan) -> None:
        """Check as its backend does, unless several pipelines share the pool."""
        if self._own:
            self.hosting.check(plan)

    def close(self) -> None:
        """End all hosts and wait for them, but only seconds for those stuck in user code. Idempotent."""
        with self._lock:
            self._closed = True
            at_close, self._at_close = self._at_close, []
        for work in at_close:
            if (call := work()) is not None:
                call()
        self._end()

    def at_close(self, work: Callable[[], None]) -> None:
        """Call `work`, a method, before this closes; its object is referred to weakly."""
        with self._lock:
            self._at_close = [known for known in self._at_close if known() is not None]
            self._at_close.append(weakref.WeakMethod(work))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool belongs to the process that made it")

    def __repr__(self) -> str:
        return f"<pool of {self.hosting.short}: {'closed' if self._closed else f'{len(self._hosts)} begun'}>"


def _end(hosts: Sequence[Host], owner: int) -> None:
    """End hosts side by side; in a fork of the process that owns them, do nothing."""
    if os.getpid() != owner:
        return
    for host in hosts:
        host.leave()
    for host in hosts:
        host.close()
