"""The consumer's connection to one host of a run: its workers, their messages, and the host's replacement."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio

from streamline.backends.hosts.hang_detection import HangDetector
from streamline.backends.hosts.host import Host
from streamline.backends.hosts.remote_metrics import RemoteMetrics
from streamline.backends.hosts.remote_worker import CLOSE_S, RemoteWorker
from streamline.backends.hosts.restarts import CrashReport, CrashTracking, crash_verdict
from streamline.backends.ipc.exceptions import decode_failure, decode_skipped
from streamline.backends.ipc.link import Link, LinkClosed
from streamline.backends.ipc.messages import (
    CallProgress,
    Hello,
    HostFailed,
    HostReady,
    ItemsMessage,
    LiveCredit,
    Message,
    MetricsUpdate,
    Observe,
    PauseHost,
    PauseStatus,
    PermitsIssued,
    PermitsReturned,
    PermitsWanted,
    ProgressMessage,
    ResumeHost,
    SetKnobs,
    Shutdown,
    SkippedItem,
    TaskStacks,
    WorkerClosed,
    WorkerEnded,
    WorkerOpened,
)
from streamline.core.counters import HostMeter
from streamline.core.duplicate_check import Beginning
from streamline.core.gate import Gate, resting
from streamline.core.tasks import Tasks
from streamline.errors import ClosedError

if TYPE_CHECKING:
    from streamline.backends.hosts.placement import Placement

logger = logging.getLogger("streamline.hosts")

OPENING = 16
"""Workers that a host opens at a time; some 20 ms of its work."""


class HostConnection:
    """The workers of a run that one host runs.

    Args:
      own: the host ends with the run.
      placement: gives it workers, and takes them away; None: it has those that were added, for good.
      share: as in `Hello`.
    """

    def __init__(
        self,
        host: Host,
        payload: Any,
        tasks: Tasks,
        crash_tracking: CrashTracking,
        *,
        own: bool,
        placement: Placement | None = None,
        share: bytes = b"",
    ) -> None:
        self._hosts = [host]  # and what has taken its place
        self._payload = payload
        self._tasks = tasks
        self._gate = tasks.gate
        self._own = own
        self._placement = placement
        self._share = share
        self._link: Link | None = None
        self._workers: dict[int, RemoteWorker[Any]] = {}
        self._wanted: set[int] = set()
        self._unopened: deque[RemoteWorker[Any]] = deque()  # in the host
        self._opening: set[int] = set()
        self._crash_report = (
            CrashReport[RemoteWorker[Any]](crash_tracking) if placement is None else placement.crash_report
        )
        self._hang_detector = HangDetector(host, crash_tracking, tasks, self._running_workers)
        self._meters = tasks.session.meters
        self._meter = _meter_of(self._hosts)
        self._meters.hosts.append(self._meter)
        self._remote_metrics = RemoteMetrics(self._meters, self._meter)
        self._remote_pause = RemotePause(self._gate, self._busy, self._handle, self._fail_all)
        self._widths = None if host.shared else tasks.session.widths
        self._begun = False
        self._leaving = False
        if own:
            tasks.own(self._abandon)
        self._changed: anyio.Event | None = None
        self._failure: BaseException | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            HostReady: self._ready,
            WorkerOpened: self._opened,
            CallProgress: lambda message: self._forward(message, lambda worker, it: worker.restart_policy.calling(it)),
            WorkerEnded: lambda message: self._forward(message, self._ended),
            LiveCredit: self._live_credit,
            WorkerClosed: self._closed,
            PermitsWanted: self._permits_wanted,
            PermitsReturned: lambda message: tasks.session.limits.take_back(self, *message),
            SkippedItem: self._skipped,
            PauseStatus: self._pause_status,
            Beginning: tasks.session.duplicate_check.compare,
            MetricsUpdate: self._remote_metrics.show,
            HostFailed: self._broken,
            TaskStacks: self._hang_detector.on_stacks,
        }

    @property
    def host(self) -> Host:
        """The host, or what has taken its place."""
        return self._hosts[-1]

    def add(self, worker: RemoteWorker[Any]) -> None:
        """Add a worker; `start` runs it."""
        self._workers[worker.number] = worker
        self._meter.shards.add(worker.site.shard)
        worker.connection = self

    def take(self, worker: RemoteWorker[Any]) -> None:
        """Run a worker that another host may have run before."""
        self.add(worker)
        self._remote_metrics.took(worker.site.shard)
        self.start(worker)

    def forget(self, worker: RemoteWorker[Any]) -> None:
        """Remove a worker that has ended and isn't read any more. Idempotent."""
        self._wanted.discard(worker.number)
        self._workers.pop(worker.number, None)

    def begin(self) -> None:
        """Start the task that connects to the host, once."""
        if not self._begun:
            self._begun = True
            name = f"connection to {self.host.name}"
            self._tasks.start(partial(self._gate.participate, name, self._serve), name, self._abandon)
            self._hang_detector.start()

    def start(self, worker: RemoteWorker[Any]) -> None:
        """Start a worker."""
        self._wanted.add(worker.number)
        self.begin()
        if self._failure is not None:
            self._fail_all(self._failure)
        elif self._leaving:  # the run is ending: nothing will come
            worker.gone()
        elif self._link is not None:
            self._unopened.append(worker)
            self._open_next()
        elif self._changed is not None:
            self._changed.set()

    def end_host(self) -> None:
        """Kill the host: user code in it didn't end when its worker was closed."""
        if self._link is not None:
            logger.warning(
                "user code in %s has not ended %g s after it was asked to: it is killed", self.host.name, CLOSE_S
            )
            self.host.kill(self._link)

    def _running_workers(self) -> Collection[RemoteWorker[Any]]:
        return [worker for worker in self._workers.values() if worker.link is not None and not worker.finished]

    # The task ---------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._meters.hooks.on_observed.append(self._observe)
        if self._widths is not None:
            self._widths.followers.append(self._turn)
        try:
            while True:
                await self._connected()
                try:
                    await self._listen()
                except LinkClosed:
                    await self._host_died()
                    await self._wait_until_wanted()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self._fail_all(failure)
        finally:
            self._meters.hooks.on_observed.remove(self._observe)
            if self._widths is not None:
                self._widths.followers.remove(self._turn)
            with anyio.CancelScope(shield=True):
                await self._leave()

    async def _connected(self) -> None:
        """Connect, and open the wanted workers; waits for the end of a pause."""
        await self._gate.passage()
        session, meters = self._tasks.session, self._meters
        errors = session.errors
        connecting = self.host.connect(self._payload, lambda question: errors.decide(decode_skipped(question)))
        link = await resting(connecting)
        link.on_mapped = session.on_mapped
        self._link = self._hang_detector.link = link
        self._meter.figures.alive = True
        self._remote_pause.connected(link)
        counted, ask = (None, None) if link.copies else (meters.within(self._meter), session.errors.decide)
        observed, answer = meters.hooks.observer is not None, self._placement is not None
        widths = None if self._widths is None else self._widths.values
        link.send(Hello(self.host.name, counted if meters.on else None, observed, ask, answer, self._share, widths))
        self._tasks.start(link.flush, f"connection to {self.host.name}, writing", lambda: None)
        self._unopened.extend(self._workers[number] for number in sorted(self._wanted))
        self._open_next()
        self._next_turn()

    async def _wait_until_wanted(self) -> None:
        """After a host's death, wait for a worker to run: there is none while the run is ending."""
        if self._placement is not None and self._placement.needed:
            return
        while all(self._workers[number].finished for number in self._wanted if number in self._workers):
            self._changed = anyio.Event()
            await resting(self._changed.wait())

    async def _listen(self) -> None:
        link = self._link
        assert link is not None
        while True:
            for message in await resting(link.receive()):
                self._remote_pause.arrived(link, message, in_order=self._reopens(message))
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
        packed, began = message.packed, perf_counter()
        worker.items(message, link)
        took_s = perf_counter() - began
        self._meter.figures.arrived(packed.count, packed.nbytes, packed.copied_bytes, packed.slabs, took_s)
        self._end_turn(worker)

    def _progress(self, link: Link, message: ProgressMessage) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.progress(message, link)
            self._end_turn(worker)

    async def _host_died(self) -> None:
        """Count the host's death; `_connected` starts the next host."""
        link, self._link = self._link, None
        assert link is not None
        link.close()
        self._unopened.clear()
        self._opening.clear()
        self._disconnected()
        if self._placement is not None:
            self._placement.host_lost(self)
        if self.host.closed:
            raise ClosedError("the pool of hosts that this stream's workers ran in was closed") from None
        lost = [worker for number in sorted(self._wanted) if (worker := self._workers.get(number)) is not None]
        for worker in lost:
            worker.on_host_lost()
            if worker.finished:
                worker.gone()
        await self._gate.passage()  # then all that has arrived is handled
        name = self.host.name
        ended, crash, counts = await self._tasks.threads.run(partial(self.host.exit_reason, link))
        self._tasks.session.limits.leave(self)
        stuck_s, self._hang_detector.ended_for_s = self._hang_detector.ended_for_s, None
        if stuck_s is not None:
            ended = f"{ended}: it was stuck for {stuck_s:.3g} s"
        self._meter.figures.restarts += 1
        for worker in lost:
            if worker.finished:
                worker.gone()
        lost = [worker for worker in lost if not worker.finished]
        if lost:
            then = "another one takes its place" if self._placement is None else "the others take over its workers"
            logger.warning("%s has ended with %s: %s%s", name, ended, then, crash and f"\n{crash}")
        for worker in self._crash_report.died(lost, stuck=stuck_s is not None) if counts else ():
            worker.apply_verdict(crash_verdict(worker, self.host.number, name, ended))
        if any(worker.restart_policy.track_calls for worker in lost):
            self._hosts.append(self.host.isolated())
            self._hang_detector.host = self.host
        for worker in lost:
            worker.restart_policy.calls.clear()
            self._release(worker)

    def _release(self, worker: RemoteWorker[Any]) -> bool:
        """Let the placement find a host for a worker; False: there is none, and this host keeps it."""
        if self._placement is None:
            return False
        self.forget(worker)
        self._meter.shards.discard(worker.site.shard)
        self._placement.released(worker)
        return True

    def _open_next(self) -> None:
        """Open workers in the host, some at a time: it opens them before it sends what the first ones give."""
        while self._unopened and self._link is not None and not self._leaving and len(self._opening) < OPENING:
            worker = self._unopened.popleft()
            mine = worker.connection is self and worker.link is None and not worker.finished
            if mine and not self._crash_report.waits(worker):
                self._opening.add(worker.number)
                worker.open(self._link)

    def _is_open(self, number: int) -> None:
        """Note that the host has opened a worker, or that it won't."""
        if number in self._opening:
            self._opening.remove(number)
            self._open_next()

    def _next_turn(self) -> None:
        """Open the worker whose turn it is, if workers take turns."""
        worker = self._crash_report.turn
        if self._placement is not None:
            self._placement.wake()
        elif worker is not None and worker.link is None and self._link is not None:
            worker.open(self._link)

    def _end_turn(self, worker: RemoteWorker[Any]) -> None:
        if self._crash_report.turn_over(worker):
            self._next_turn()

    async def _leave(self) -> None:
        """Let the host clean up after this run; one that takes too long is killed."""
        link = self._link
        self._leaving = True
        if self._placement is not None:
            self._placement.host_lost(self)
        if link is not None:
            link.send(Shutdown())
            with anyio.move_on_after(CLOSE_S) as patience:
                await link.drain()  # the writing task was cancelled
                while True:
                    try:
                        for message in await link.receive():
                            if type(message) in (WorkerClosed, MetricsUpdate, SkippedItem):
                                self._handlers[type(message)](message)
                    except LinkClosed:
                        break
            if patience.cancelled_caught:
                self.host.kill(link)
            link.close()
        for worker in self._workers.values():
            worker.gone()
        self._disconnected()
        self._remote_pause.close()
        if self._own:
            await self._tasks.threads.run(self._hosts[0].close)

    def _disconnected(self) -> None:
        """Mark the host as gone."""
        self._meter.gone()
        self._remote_metrics.lost()
        self._remote_pause.lost()
        self._hang_detector.link = None

    def _abandon(self) -> None:
        """End without an event loop."""
        link, self._link = self._link, None
        if link is not None:
            if self._own and not self.host.shared:
                self.host.kill(link)
            link.close()
        if self._own:
            self._hosts[0].close()
        for worker in self._workers.values():
            worker.gone()  # raises where the event loop is closed and something waits for it

    def _fail_all(self, failure: BaseException) -> None:
        self._failure = failure
        if self._placement is not None:
            self._placement.fail(failure)
        for worker in self._workers.values():
            worker.fail(failure)
            worker.gone()

    # Messages ---------------------------------------------------------------------------------------------------------

    def _forward(self, message: Any, handle: Callable[[RemoteWorker[Any], Any], None]) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            handle(worker, message)

    def _ready(self, _: HostReady) -> None:
        if self._placement is not None and self._link is not None:  # else it has died since
            self._placement.host_ready(self)

    def _opened(self, message: WorkerOpened) -> None:
        self._forward(message, RemoteWorker.opened)
        self._is_open(message.worker)

    def _ended(self, worker: RemoteWorker[Any], message: WorkerEnded) -> None:
        worker.ended(message)
        self._is_open(worker.number)
        self._end_turn(worker)

    def _live_credit(self, message: LiveCredit) -> None:
        worker = self._workers.get(message.worker)
        if worker is not None and worker.forwarding is not None:
            worker.forwarding.on_credit(message)

    def _permits_wanted(self, message: PermitsWanted) -> None:
        tasks, limit = self._tasks, message.limit
        issuer = tasks.session.limits.issuer(limit, tasks.gate, tasks.start)
        issuer.join(self, partial(self._permits_issued, limit.key))
        issuer.ask(self, message.permits)

    def _permits_issued(self, key: str, permits: int, share: int) -> None:
        if self._link is not None:
            self._link.send(PermitsIssued(key, permits, share))

    def _closed(self, message: WorkerClosed) -> None:
        worker = self._workers.get(message.worker)
        if self._link is None:
            return  # deferred in a pause, and the host has died since
        self._is_open(message.worker)
        if worker is not None and worker.reopening() and self._link is not None:
            worker.link = None
            if not self._release(worker):
                worker.open(self._link)
            return
        if worker is not None:
            self.forget(worker)
            worker.gone()
            self._end_turn(worker)

    def _reopens(self, message: Message) -> bool:
        """Whether a worker is opened again because of a message: where it stands, what came before this tells."""
        if not isinstance(message, WorkerClosed):
            return False
        worker = self._workers.get(message.worker)
        return worker is not None and worker.to_reopen

    def _skipped(self, message: SkippedItem) -> None:
        failure = decode_skipped(message.failure)
        self._tasks.session.errors.record_skip(message.key, failure, message.epoch, message.number)

    def _broken(self, message: HostFailed) -> None:
        raise decode_failure(message.failure)

    # Pauses, traces, knobs --------------------------------------------------------------------------------------------

    def _pause_status(self, message: PauseStatus) -> None:
        self._remote_pause.at_work(message, self.host.name)

    def _busy(self) -> tuple[str, ...]:
        """Name what seems to be at work in the host."""
        meters = [meter for meter in list(self._meters.stages.values()) if meter.host is self._meter]
        busy = [f"{meter} of shard {meter.figures.shard}" for meter in meters if meter.since is not None]
        return tuple(f"{name} in {self.host.name}" for name in busy) or (self.host.name,)

    def _observe(self) -> None:
        """Tell the host whether a trace is recorded; called in any thread."""
        if self._link is not None:
            self._link.send_threadsafe(Observe(self._meters.hooks.observer is not None))

    def _turn(self, widths: Mapping[str, int]) -> None:
        """SetKnobs knobs in the host."""
        if self._link is not None:
            self._link.send(SetKnobs(widths))


def _meter_of(hosts: Sequence[Host]) -> HostMeter:
    host, pid, node = hosts[0], (lambda: hosts[-1].pid), (lambda: hosts[-1].node)
    resident, stacks = (lambda: hosts[-1].resident_bytes()), (lambda: hosts[-1].stacks())
    return HostMeter(host.number, host.kind, pid, resident, stacks, node, shared=host.shared)


AT_ONCE = (PauseStatus, HostFailed, WorkerClosed, MetricsUpdate)
"""Messages that move no items."""


class RemotePause:
    """The gate's participant for all workers of a host.

    During a pause, messages that arrive are deferred, bounded by the items in flight, and handled when it ends. Without
    a host, it is at rest. Until the host reports what is at work there, `busy` names it, in any thread.
    """

    def __init__(
        self,
        gate: Gate,
        busy: Callable[[], tuple[str, ...]],
        handle: Callable[[Link, Message], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._gate = gate
        self._busy = busy
        self._handle = handle
        self._failed = failed
        self._participant = gate.remote_participant("")
        self._participant.names = self._names
        self._reported: tuple[str, ...] = ()
        self._link: Link | None = None
        self._number = 0
        self._deferred: deque[tuple[Link, Message]] = deque()
        gate.on_pause(self._pause, self._resume)

    def connected(self, link: Link) -> None:
        """Take the link to a host; the caller has passed the gate."""
        self._link = link

    def lost(self) -> None:
        """Be at rest: the host has ended."""
        self._link = None
        self._set_resting()

    def close(self) -> None:
        """Leave the gate: the run is over."""
        self._gate.forget_pause(self._pause)
        self._gate.unregister(self._participant)
        self._deferred.clear()

    def arrived(self, link: Link, message: Message, *, in_order: bool = False) -> None:
        """Handle a message, or defer it until the pause ends.

        Args:
          in_order: after those that came before it, whatever it is.
        """
        if self._gate.holding and (in_order or not isinstance(message, AT_ONCE)):
            self._deferred.append((link, message))
        else:
            self._handle(link, message)

    def at_work(self, message: PauseStatus, host: str) -> None:
        """Take the host's report of what is at work there."""
        if message.number != self._number or not self._gate.holding:
            return  # of a pause that is over
        if message.names:
            self._reported = tuple(f"{name} in {host}" for name in message.names)
        else:
            self._set_resting()

    def _names(self) -> tuple[str, ...]:
        return self._reported or self._busy()

    def _pause(self) -> None:
        if self._link is not None:
            self._number += 1
            self._reported = ()
            self._link.send(PauseHost(self._number))
            if self._participant.rests:
                self._participant.wake()

    def _resume(self) -> None:
        self._set_resting()
        if self._link is not None:
            self._link.send(ResumeHost())
        try:
            while self._deferred:
                self._handle(*self._deferred.popleft())
        except BaseException as failure:
            self._failed(failure)

    def _set_resting(self) -> None:
        if not self._participant.rests:
            self._participant.rest()
