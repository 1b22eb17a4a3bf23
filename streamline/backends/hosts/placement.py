"""Which of a run's hosts runs which worker, where hosts come and go: with fixed ones, worker w runs in host w mod n.

Work begins once `least` hosts are there. A host that comes is given workers of those that have most; the workers of one
that goes are spread over the others. A worker is moved by closing it in its host: what it has sent until then arrives,
and it is opened elsewhere at the state after that, as after a death, which this isn't: it counts against nothing. While
there are fewer hosts than `least`, those that are there go on, and workers without a host wait for another one; if none
comes in time, all fail. One task decides all that, with the gate passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio

from streamline.backends.hosts.restarts import CrashReport, CrashTracking
from streamline.core.gate import wait_at_rest

if TYPE_CHECKING:
    from streamline.backends.hosts.host import Host
    from streamline.backends.hosts.remote_worker import RemoteWorker
    from streamline.core.tasks import Job, Tasks


class Elasticity(NamedTuple):
    """With how many hosts a run begins and goes on, where they come and go.

    Attributes:
      least: hosts; or as many as there are workers.
      timeout_s: seconds to wait for another one while there are fewer.
      missing: returns the error for waiting in vain, given the run's hosts, how many are there and how many have to be.
    """

    least: int
    timeout_s: float
    missing: Callable[[Sequence[Host], int, int], Exception]


class Home(Protocol):
    """The connection to a host that may run workers."""

    def take(self, worker: RemoteWorker[Any]) -> None: ...


class FixedPlacement:
    """One host, which keeps its workers: what takes its place opens them again.

    Attributes:
      elastic: hosts come and go; each says `HostReady`.
      crash_report: finds whom a death counts against.
    """

    elastic = False

    def __init__(self, crash_tracking: CrashTracking) -> None:
        self.crash_report: CrashReport[RemoteWorker[Any]] = CrashReport(crash_tracking)

    @property
    def needed(self) -> bool:
        """Whether a worker waits for another host, or may yet."""
        return False

    def host_ready(self, home: Home) -> None:
        """Note that a host is ready to run workers."""

    def host_lost(self, home: Home) -> None:
        """Note that a host isn't there any more. Idempotent; `rehome` follows for each of its workers."""

    def rehome(self, worker: RemoteWorker[Any]) -> None:
        """Take a worker that has no host, or none any more."""

    def wake(self) -> None:
        """Place workers anew."""

    def fail(self, failure: BaseException) -> None:
        """Fail all workers after what has arrived: no host can run this."""


class Placement(FixedPlacement):
    """The hosts of a run that are there, and the workers of each; the crash report is of all hosts together."""

    elastic = True

    def __init__(
        self, elasticity: Elasticity, hosts: Sequence[Host], crash_tracking: CrashTracking, tasks: Tasks
    ) -> None:
        super().__init__(crash_tracking)
        self._elasticity = elasticity
        self._hosts = hosts
        self._tasks = tasks
        self._workers: list[RemoteWorker[Any]] = []
        self._there: list[Home] = []
        self._homes: dict[RemoteWorker[Any], Home] = {}  # where each is, or is moved to
        self._homeless: list[RemoteWorker[Any]] = []
        self._changed = anyio.Event()
        self._job: Job | None = None
        self._over = False
        self._failure: BaseException | None = None

    @property
    def needed(self) -> bool:
        return not all(worker.finished for worker in self._workers)

    # What happens ---------------------------------------------------------------------------------------------------

    def add(self, worker: RemoteWorker[Any]) -> None:
        """Add a worker; `start` runs it."""
        self._workers.append(worker)
        worker.connection = self

    def start(self, worker: RemoteWorker[Any]) -> None:
        if self._failure is not None:
            worker.fail(self._failure)
        if self._failure is not None or self._over:
            worker.close()
            return
        self.rehome(worker)
        if self._job is None:
            name = "placement of workers"
            self._job = self._tasks.start(partial(self._tasks.gate.participate, name, self._serve), name, self._end)

    def host_ready(self, home: Home) -> None:
        self._there.append(home)
        self.wake()

    def host_lost(self, home: Home) -> None:
        if home in self._there:
            self._there.remove(home)

    def rehome(self, worker: RemoteWorker[Any]) -> None:
        worker.connection = self
        self._homes.pop(worker, None)
        self._homeless.append(worker)
        self.wake()

    def forget(self, worker: RemoteWorker[Any]) -> None:
        """Remove a worker that has ended and isn't read any more. Idempotent."""
        if worker in self._homeless:
            self._homeless.remove(worker)

    def end_host(self) -> None:
        """Do nothing: a worker without a host has none that it could be stuck in."""

    def wake(self) -> None:
        self._changed.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._homeless.clear()
        for worker in self._workers:
            worker.fail(failure)
            worker.close()

    @property
    def _least(self) -> int:
        """How many hosts there must be."""
        return min(self._elasticity.least, len(self._hosts))

    # What is decided ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                await self._tasks.gate.passage()
                self._changed = anyio.Event()
                if self._short:
                    await self._wait_for_another()
                else:
                    self._settle()
                    await wait_at_rest(self._changed.wait())
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self.fail(failure)
        finally:
            self._end()

    @property
    def _short(self) -> bool:
        """Whether workers wait for another host."""
        return len(self._there) < self._least and not all(worker.finished for worker in self._homeless)

    async def _wait_for_another(self) -> None:
        """Wait until there are more hosts; a pause stops the clock, and begins it anew."""
        before = len(self._there)
        with anyio.move_on_after(self._elasticity.timeout_s) as patience:
            while self._short and len(self._there) <= before:
                await wait_at_rest(self._changed.wait())
                self._changed = anyio.Event()
        self.wake()
        if patience.cancelled_caught and not self._tasks.gate.holding:
            raise self._elasticity.missing(self._hosts, len(self._there), self._least)

    def _settle(self) -> None:
        """Give workers without a host one, then move some to hosts that have fewer."""
        homeless, self._homeless = sorted(self._homeless, key=lambda worker: worker.number), []
        if not self._there:
            self._homeless = homeless  # all of them are over
            return
        loads: dict[Home, list[RemoteWorker[Any]]] = {home: [] for home in self._there}
        for worker, home in self._homes.items():
            if home in loads and not worker.finished:
                loads[home].append(worker)
        fewest = [(len(load), at, home) for at, (home, load) in enumerate(loads.items())]
        heapify(fewest)
        for worker in homeless:
            if self.crash_report.waits(worker) and worker is not self.crash_report.turn:
                self._homeless.append(worker)
            elif not worker.finished:
                load, at, home = fewest[0]
                heapreplace(fewest, (load + 1, at, home))
                loads[home].append(worker)
                self._homes[worker] = home
                home.take(worker)
        self._balance(loads)

    def _balance(self, loads: dict[Home, list[RemoteWorker[Any]]]) -> None:
        while True:
            most, least = (each(loads, key=lambda home: len(loads[home])) for each in (max, min))
            movable = [worker for worker in loads[most] if worker.movable]
            if len(loads[most]) < len(loads[least]) + 2 or not movable:
                return
            worker = movable[-1]
            loads[most].remove(worker)
            loads[least].append(worker)
            self._homes[worker] = least
            worker.close_to_reopen()

    def _end(self) -> None:
        self._over = True
        for worker in self._homeless:
            worker.close()
