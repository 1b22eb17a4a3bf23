"""One host's part of a running: the near end of the link between them, and what becomes of it when the host dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from time import perf_counter
from typing import Any

import anyio

from streamline.backends.hosts.hang_detection import HangDetector
from streamline.backends.hosts.host import Host
from streamline.backends.hosts.remote_errors import answers
from streamline.backends.hosts.remote_metrics import RemoteMetrics
from streamline.backends.hosts.remote_pause import RemotePause
from streamline.backends.hosts.remote_worker import CLOSE_S, RemoteWorker
from streamline.backends.hosts.restarts import CrashReport, CrashTracking, at_fault
from streamline.backends.ipc.codec import failure_in, left_out_in
from streamline.backends.ipc.link import Link, LinkClosed
from streamline.backends.ipc.messages import (
    AtWork,
    Broken,
    CallProgress,
    Closed,
    Counts,
    Ended,
    Hello,
    ItemsMessage,
    Leave,
    Message,
    Observe,
    ProgressMessage,
    SkippedItem,
    Taken,
    WaitingTasks,
    WorkerOpened,
)
from streamline.core.counters import HostMeter
from streamline.core.duplicate_check import Beginning
from streamline.core.gate import resting
from streamline.core.tasks import Tasks
from streamline.errors import ClosedError

__all__ = ["HostConnection"]


logger = logging.getLogger("streamline.hosts")


class HostConnection:
    """The workers of a running that one host runs.

    Args:
      payload: what a host is given to begin with.
      care: how long its death, or its silence, is borne.
      own: whether the host ends with the running.
    """

    def __init__(self, host: Host, payload: Any, tasks: Tasks, care: CrashTracking, *, own: bool) -> None:
        self.host = host
        self._payload = payload
        self._tasks = tasks
        self._gate = tasks.gate
        self._own = own
        self._link: Link | None = None
        self._workers: dict[int, RemoteWorker[Any]] = {}
        self._wanted: set[int] = set()
        self._inquest = CrashReport[RemoteWorker[Any]](care)
        self._watch = HangDetector(host, care, tasks, self._running)
        self._meters = tasks.session.meters
        self._meter = HostMeter(host.number, host.kind, lambda: host.pid, host.resident_bytes, host.stacks)
        self._meters.hosts.append(self._meter)
        self._mirror = RemoteMetrics(self._meters, self._meter)
        self._holding = RemotePause(self._gate, self._busy, self._handle, self._fail_all)
        self._begun = False
        self._left = False
        if own:
            tasks.own(self._abandon)
        self._news: anyio.Event | None = None
        self._failure: BaseException | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            WorkerOpened: lambda message: self._to(message, RemoteWorker.opened),
            CallProgress: lambda message: self._to(message, lambda worker, message: worker.deaths.calling(message)),
            Ended: lambda message: self._to(message, self._ended),
            Taken: self._taken,
            Closed: self._closed,
            SkippedItem: self._left_out,
            AtWork: self._at_work,
            Beginning: tasks.session.duplicate_check.compare,
            Counts: self._mirror.show,
            Broken: self._broken,
            WaitingTasks: self._watch.answered,
        }

    def add(self, worker: RemoteWorker[Any]) -> None:
        """Let a worker run here, once it is started."""
        self._workers[worker.number] = worker
        self._meter.shards.add(worker.site.shard)

    def forget(self, worker: RemoteWorker[Any]) -> None:
        """Nobody reads it any more, and it has ended; idempotent."""
        self._wanted.discard(worker.number)
        self._workers.pop(worker.number, None)

    def begin(self) -> None:
        """Start the host, if it doesn't run, and the task that listens to it."""
        if not self._begun:
            self._begun = True
            name = f"border of {self.host.name}"
            self._tasks.start(partial(self._gate.participate, name, self._serve), name, self._abandon)
            self._watch.start()

    def start(self, worker: RemoteWorker[Any]) -> None:
        """Start a worker."""
        self._wanted.add(worker.number)
        self.begin()
        if self._failure is not None:
            self._fail_all(self._failure)
        elif self._left:  # a pass that begins while all ends: nothing will come, and nobody is to wait for its end
            worker.gone()
        elif self._link is not None:
            worker.open(self._link)
        elif self._news is not None:
            self._news.set()

    def end_host(self) -> None:
        """End a host in which user code doesn't end although its worker was closed."""
        if self._link is not None:
            logger.warning(
                "user code in %s has not ended %g s after it was asked to: it is killed", self.host.name, CLOSE_S
            )
            self.host.kill(self._link)

    def _running(self) -> Collection[RemoteWorker[Any]]:
        return [worker for worker in self._workers.values() if worker.link is not None and not worker.over]

    # The task ---------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._meters.on_observed.append(self._observe)
        try:
            while True:
                await self._connected()
                try:
                    await self._listen()
                except LinkClosed:
                    await self._died()
                    await self._somebody_wanted()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self._fail_all(failure)
        finally:
            self._meters.on_observed.remove(self._observe)
            with anyio.CancelScope(shield=True):
                await self._leave()

    async def _connected(self) -> None:
        """Connect, and open the workers that are wanted; not during a pause."""
        await self._gate.passage()
        session, meters = self._tasks.session, self._meters
        link = self._link = self._watch.link = self.host.connect(self._payload, answers(session.errors))
        self._meter.alive = True
        self._holding.connected(link)
        counted, ask = (None, None) if link.copies else (meters.within(self._meter), session.errors.decide)
        link.send(Hello(self.host.name, counted if meters.on else None, meters.observer is not None, ask))
        self._tasks.start(link.flush, f"border of {self.host.name}, writing", lambda: None)
        for number in sorted(self._wanted):
            worker = self._workers[number]
            if not worker.over and not self._inquest.waits(worker):
                worker.open(link)
        self._next_turn()

    async def _somebody_wanted(self) -> None:
        """Behind a death, wait until there is a worker to go on with: there is none where the running is being left."""
        while all(self._workers[number].over for number in self._wanted if number in self._workers):
            self._news = anyio.Event()
            await resting(self._news.wait())

    async def _listen(self) -> None:
        link = self._link
        assert link is not None
        while True:
            for message in await resting(link.receive()):
                self._holding.arrived(link, message)
                del message

    def _handle(self, link: Link, message: Message) -> None:
        if isinstance(message, ItemsMessage):
            self._items(link, message)
        elif isinstance(message, ProgressMessage):
            self._progress(link, message)
        else:
            self._handlers[type(message)](message)

    def _items(self, link: Link, message: ItemsMessage) -> None:
        if (worker := self._workers.get(message.worker)) is None:
            return
        meter, packed, began = self._meter, message.packed, perf_counter()
        worker.items(message, link)
        meter.arrival_s += perf_counter() - began
        meter.items += packed.count
        meter.bytes += packed.nbytes
        self._turn_over(worker)

    def _progress(self, link: Link, message: ProgressMessage) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.progress(message, link)
            self._turn_over(worker)

    async def _died(self) -> None:
        """Count the death, and let another host take over."""
        link, self._link = self._link, None
        assert link is not None
        link.close()
        self._gone()
        if self.host.closed:
            raise ClosedError("the pool of hosts that this stream's workers ran in was closed") from None
        lost = [worker for number in sorted(self._wanted) if (worker := self._workers.get(number)) is not None]
        for worker in lost:
            worker.lost()
            if worker.over:
                worker.gone()
        await self._gate.passage()  # behind it, all that has arrived has been dealt with
        name = self.host.name
        fell = await self._tasks.threads.run(partial(self.host.fell, link))
        ended, _, crash = fell.partition("\n")
        stuck_s, self._watch.ended_for_s = self._watch.ended_for_s, None
        if stuck_s is not None:
            ended = f"{ended}: it was stuck for {stuck_s:.3g} s"
        self._meter.restarts += 1
        for worker in lost:
            if worker.over:
                worker.gone()
        lost = [worker for worker in lost if not worker.over]
        if lost:
            logger.warning("%s has ended with %s: another one takes its place%s", name, ended, crash and f"\n{crash}")
        for worker in self._inquest.died(lost, stuck=stuck_s is not None):
            worker.given_up(at_fault(worker, self.host.number, name, ended))
        for worker in lost:
            worker.deaths.calls.clear()

    def _next_turn(self) -> None:
        """Open the one of those that take turns whose turn it is, if it isn't."""
        worker = self._inquest.turn
        if worker is not None and worker.link is None and self._link is not None:
            worker.open(self._link)

    def _turn_over(self, worker: RemoteWorker[Any]) -> None:
        if self._inquest.turn_over(worker):
            self._next_turn()

    async def _leave(self) -> None:
        """Let the host clean up behind this running; one that takes too long is ended."""
        link = self._link
        self._left = True
        if link is not None:
            link.send(Leave())
            with anyio.move_on_after(CLOSE_S) as patience:
                await link.drain()  # the task that writes has been cancelled
                while True:
                    try:
                        for message in await link.receive():
                            if type(message) in (Closed, Counts, SkippedItem):
                                self._handlers[type(message)](message)
                    except LinkClosed:
                        break
            if patience.cancelled_caught:
                self.host.kill(link)
            link.close()
        for worker in self._workers.values():
            worker.gone()
        self._gone()
        self._holding.close()
        if self._own:
            await self._tasks.threads.run(self.host.close)

    def _gone(self) -> None:
        """Take note that there is no host for now."""
        self._meter.gone()
        self._mirror.lost()
        self._holding.lost()
        self._watch.link = None

    def _abandon(self) -> None:
        """There is no event loop any more to leave in peace."""
        link, self._link = self._link, None
        if link is not None:
            if self._own:
                self.host.kill(link)
            link.close()
        for worker in self._workers.values():
            worker.gone()
        if self._own:
            self.host.close()

    def _fail_all(self, failure: BaseException) -> None:
        self._failure = failure
        for worker in self._workers.values():
            worker.fail(failure)
            worker.gone()

    # Messages ---------------------------------------------------------------------------------------------------------

    def _to(self, message: Any, handle: Callable[[RemoteWorker[Any], Any], None]) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            handle(worker, message)

    def _ended(self, worker: RemoteWorker[Any], message: Ended) -> None:
        worker.ended(message)
        self._turn_over(worker)

    def _taken(self, message: Taken) -> None:
        worker = self._workers.get(message.worker)
        if worker is not None and worker.feeding is not None:
            worker.feeding.taken(message)

    def _closed(self, message: Closed) -> None:
        worker = self._workers.get(message.worker)
        if worker is not None and worker.calm() and self._link is not None:
            worker.open(self._link)
            return
        if worker is not None:
            self.forget(worker)
            worker.gone()
            self._turn_over(worker)

    def _left_out(self, message: SkippedItem) -> None:
        failure = left_out_in(message.failure)
        self._tasks.session.errors.happened(message.key, failure, message.epoch, message.number)

    def _broken(self, message: Broken) -> None:
        raise failure_in(message.failure)

    # Pauses, traces ---------------------------------------------------------------------------------------------------

    def _at_work(self, message: AtWork) -> None:
        self._holding.at_work(message, self.host.name)

    def _busy(self) -> tuple[str, ...]:
        """Name what seems to be at work there."""
        meters = [meter for meter in list(self._meters.stages.values()) if meter.host is self._meter]
        busy = [f"{meter} of shard {meter.shard}" for meter in meters if meter.since is not None]
        return tuple(f"{name} in {self.host.name}" for name in busy) or (self.host.name,)

    def _observe(self) -> None:
        """Tell the host whether a trace wants to know of all that it does; in the thread of whoever traces."""
        if self._link is not None:
            self._link.tell(Observe(self._meters.observer is not None))
