"""The consumer's connection to one host of a run: its workers, their messages, and the host's replacement."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import anyio

from streamline.backends.hosts.hang_detection import HangDetector
from streamline.backends.hosts.host import Host, HostSlot
from streamline.backends.hosts.parts import ErrorsOfHost, HostPart, KnobsOfHost, PermitsOfHost, RemotePause, TraceOfHost
from streamline.backends.hosts.placement import FixedPlacement, Placement
from streamline.backends.hosts.remote_metrics import RemoteMetrics
from streamline.backends.hosts.remote_worker import CLOSE_S, RemoteWorker
from streamline.backends.hosts.restarts import CrashTracking, crash_verdict
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
    ProgressMessage,
    Shutdown,
    SkippedItem,
    WorkerClosed,
    WorkerEnded,
    WorkerOpened,
)
from streamline.core.gate import wait_at_rest
from streamline.core.knobs import KnobValues
from streamline.core.place import Lender
from streamline.core.tasks import Tasks
from streamline.errors import ClosedError

logger = logging.getLogger("streamline.hosts")

OPENING = 16
"""Workers that a host opens at a time; some 20 ms of its work."""

WHILE_LEAVING = (WorkerClosed, MetricsUpdate, SkippedItem)
"""Messages of a host that cleans up after a run; no others are handled."""


class Hosting(NamedTuple):
    """What a run asks of each of its hosts.

    Attributes:
      payload: what the host gets of the run.
      own: the host ends with the run.
      share: as in `Hello`.
    """

    payload: Any
    crash_tracking: CrashTracking
    own: bool
    share: bytes = b""


class WorkersOfHost:
    """The workers of a run that one host runs; the host opens `OPENING` of them at a time.

    Attributes:
      known: those that were added, by number.
      wanted: the numbers of those that were started.
      opening: the numbers of those that the host was told to open, and hasn't opened yet.
    """

    def __init__(self) -> None:
        self.known: dict[int, RemoteWorker[Any]] = {}
        self.wanted: set[int] = set()
        self.opening: set[int] = set()
        self._unopened: deque[RemoteWorker[Any]] = deque()
        self._started: anyio.Event | None = None

    def start(self, worker: RemoteWorker[Any]) -> None:
        self.wanted.add(worker.number)
        if self._started is not None:
            self._started.set()

    def forget(self, worker: RemoteWorker[Any]) -> None:
        self.wanted.discard(worker.number)
        self.known.pop(worker.number, None)

    @property
    def started(self) -> list[RemoteWorker[Any]]:
        """Those that were started, by number."""
        return [worker for number in sorted(self.wanted) if (worker := self.known.get(number)) is not None]

    @property
    def running(self) -> list[RemoteWorker[Any]]:
        """Those that are open in the host, or being opened, and go on."""
        return [worker for worker in self.known.values() if worker.link is not None and not worker.finished]

    async def wait_for_one(self) -> None:
        """Wait for one to run: there is none while the run is ending."""
        while all(worker.finished for worker in self.started):
            self._started = anyio.Event()
            await wait_at_rest(self._started.wait())

    def to_open(self, worker: RemoteWorker[Any]) -> None:
        """Let the host open a worker when it is its turn."""
        self._unopened.append(worker)

    def next_to_open(self) -> RemoteWorker[Any] | None:
        """Return the next worker for the host to open; None: there is none, or it has enough to do."""
        return self._unopened.popleft() if self._unopened and len(self.opening) < OPENING else None

    def host_lost(self) -> None:
        """None is opened: the host has ended."""
        self._unopened.clear()
        self.opening.clear()

    def fail(self, failure: BaseException) -> None:
        """Fail all of them: no host will run them."""
        for worker in self.known.values():
            worker.fail(failure)
            worker.close()

    def close(self) -> None:
        """No host will run them any more."""
        for worker in self.known.values():
            worker.close()


class HostConnection:
    """The workers of a run that one host runs.

    Args:
      placement: gives it workers, and takes them away; None: it has those that were added, for good.
    """

    def __init__(self, host: Host, hosting: Hosting, tasks: Tasks, placement: Placement | None = None) -> None:
        self._slot = HostSlot(host)
        self._hosting = hosting
        self._tasks = tasks
        self._placement = FixedPlacement(hosting.crash_tracking) if placement is None else placement
        self._link: Link | None = None
        self._workers = WorkersOfHost()
        self._begun = False
        self._leaving = False
        self._failure: BaseException | None = None
        session = tasks.session
        meters, meter = session.meters, self._slot.meter
        meters.hosts.append(meter)
        self._pause = RemotePause(tasks.gate, lambda: self.host.name, meters, meter, self._handle, self._fail_all)
        self._parts: list[HostPart] = [
            RemoteMetrics(meters, meter),
            self._pause,
            HangDetector(self._slot, hosting.crash_tracking, tasks, lambda: self._workers.running),
            TraceOfHost(meters, meter),
            ErrorsOfHost(session),
            PermitsOfHost(tasks),
        ]
        knobs = session.services.find(KnobValues)
        if knobs is not None and not host.shared:
            self._parts.append(KnobsOfHost(knobs))
        self._handlers: dict[type, Callable[[Any], None]] = {
            HostReady: self._on_ready,
            HostFailed: self._on_failed,
            WorkerOpened: self._on_opened,
            WorkerEnded: self._on_ended,
            WorkerClosed: self._on_closed,
            CallProgress: self._forward,
            LiveCredit: self._forward,
        }
        for part in self._parts:
            self._handlers.update(part.handlers())
        if hosting.own:
            tasks.add_cleanup(self._abandon)

    @property
    def host(self) -> Host:
        """The host, or what has taken its place."""
        return self._slot.host

    def add(self, worker: RemoteWorker[Any]) -> None:
        """Add a worker; `start` runs it."""
        self._workers.known[worker.number] = worker
        self._slot.meter.shards.add(worker.site.shard)
        worker.connection = self

    def take(self, worker: RemoteWorker[Any]) -> None:
        """Run a worker that another host may have run before."""
        self.add(worker)
        for part in self._parts:
            part.take_over(worker.site.shard)
        self.start(worker)

    def forget(self, worker: RemoteWorker[Any]) -> None:
        """Remove a worker that has ended and isn't read any more. Idempotent."""
        self._workers.forget(worker)

    def begin(self) -> None:
        """Start the task that connects to the host, once."""
        if not self._begun:
            self._begun = True
            name = f"connection to {self.host.name}"
            self._tasks.start(partial(self._tasks.gate.participate, name, self._serve), name, self._abandon)

    def start(self, worker: RemoteWorker[Any]) -> None:
        self._workers.start(worker)
        self.begin()
        if self._failure is not None:
            self._fail_all(self._failure)
        elif self._leaving:  # the run is ending: nothing will come
            worker.close()
        elif self._link is not None:
            self._workers.to_open(worker)
            self._open_next()

    def end_host(self) -> None:
        """Kill the host: user code in it didn't end when its worker was closed."""
        if self._link is not None:
            logger.warning(
                "user code in %s has not ended %g s after it was asked to: it is killed", self.host.name, CLOSE_S
            )
            self.host.kill(self._link)

    # The task ---------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        for part in self._parts:
            part.begin()
        try:
            while True:
                await self._connect()
                try:
                    await self._listen()
                except LinkClosed:
                    await self._replace_host()
                    if not self._placement.needed:
                        await self._workers.wait_for_one()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self._fail_all(failure)
        finally:
            with anyio.CancelScope(shield=True):
                await self._leave()

    async def _connect(self) -> None:
        """Connect, and open the wanted workers; waits for the end of a pause."""
        await self._tasks.gate.passage()
        session, hosting = self._tasks.session, self._hosting
        errors = session.errors
        connecting = self.host.connect(hosting.payload, lambda question: errors.decide(decode_skipped(question)))
        link = await wait_at_rest(connecting)
        link.on_mapped = session.services.get(Lender).on_mapped
        self._link = link
        hello = Hello(self.host.name, answer=self._placement.elastic, share=hosting.share)
        for part in self._parts:
            hello = part.join(link, hello)
        link.send(hello)
        self._tasks.start(link.flush, f"connection to {self.host.name}, writing", lambda: None)
        for worker in self._workers.started:
            self._workers.to_open(worker)
        self._open_next()
        self._next_turn()

    async def _listen(self) -> None:
        link = self._link
        assert link is not None
        while True:
            for message in await wait_at_rest(link.receive()):
                self._pause.receive(link, message, in_order=self._reopens(message))
                del message

    async def _replace_host(self) -> None:
        """Find what becomes of the workers of a host that has ended; `_connect` starts the next host."""
        link, self._link = self._link, None
        assert link is not None
        link.close()
        self._workers.host_lost()
        self._disconnected()
        self._placement.host_lost(self)
        if self.host.closed:
            raise ClosedError("the pool of hosts that this stream's workers ran in was closed") from None
        lost = self._workers.started
        for worker in lost:
            worker.on_host_lost()
            if worker.finished:
                worker.close()
        await self._tasks.gate.passage()  # then all that has arrived is handled
        name = self.host.name
        ended, crash, counts = await self._tasks.threads.run(partial(self.host.exit_reason, link))
        for part in self._parts:
            part.on_exit()
        stuck_s, self._slot.stuck_s = self._slot.stuck_s, None
        if stuck_s is not None:
            ended = f"{ended}: it was stuck for {stuck_s:.3g} s"
        self._slot.meter.figures.restarts += 1
        for worker in lost:
            if worker.finished:
                worker.close()
        lost = [worker for worker in lost if not worker.finished]
        if lost:
            then = "the others take over its workers" if self._placement.elastic else "another one takes its place"
            logger.warning("%s has ended with %s: %s%s", name, ended, then, crash and f"\n{crash}")
        report = self._placement.crash_report
        for worker in report.died(lost, stuck=stuck_s is not None) if counts else ():
            worker.apply_verdict(crash_verdict(worker, self.host.number, name, ended))
        if any(worker.restart_policy.track_calls for worker in lost):
            self._slot.isolate()
        for worker in lost:
            worker.restart_policy.calls.clear()
            self._release(worker)

    def _release(self, worker: RemoteWorker[Any]) -> bool:
        """Let the placement find a host for a worker; False: this host keeps it."""
        if not self._placement.elastic:
            return False
        self.forget(worker)
        self._slot.meter.shards.discard(worker.site.shard)
        self._placement.rehome(worker)
        return True

    def _open_next(self) -> None:
        """Open workers in the host, some at a time: it opens them before it sends what the first ones give."""
        while self._link is not None and not self._leaving and (worker := self._workers.next_to_open()) is not None:
            mine = worker.connection is self and worker.link is None and not worker.finished
            if mine and not self._placement.crash_report.waits(worker):
                self._workers.opening.add(worker.number)
                worker.open(self._link)

    def _end_opening(self, number: int) -> None:
        """The host has opened a worker, or won't."""
        if number in self._workers.opening:
            self._workers.opening.remove(number)
            self._open_next()

    def _next_turn(self) -> None:
        """Open the worker whose turn it is, if workers take turns."""
        self._placement.wake()
        worker = None if self._placement.elastic else self._placement.crash_report.turn
        if worker is not None and worker.link is None and self._link is not None:
            worker.open(self._link)

    def _end_turn(self, worker: RemoteWorker[Any]) -> None:
        if self._placement.crash_report.turn_over(worker):
            self._next_turn()

    async def _leave(self) -> None:
        """Let the host clean up after this run; one that takes too long is killed."""
        link = self._link
        self._leaving = True
        self._placement.host_lost(self)
        if link is not None:
            link.send(Shutdown())
            with anyio.move_on_after(CLOSE_S) as patience:
                await link.drain()  # the writing task was cancelled
                while True:
                    try:
                        for message in await link.receive():
                            if isinstance(message, WHILE_LEAVING):
                                self._handlers[type(message)](message)
                    except LinkClosed:
                        break
            if patience.cancelled_caught:
                self.host.kill(link)
            link.close()
        self._workers.close()
        self._disconnected()
        for part in self._parts:
            part.close()
        if self._hosting.own:
            await self._tasks.threads.run(self._slot.first.close)

    def _disconnected(self) -> None:
        for part in self._parts:
            part.on_lost()

    def _abandon(self) -> None:
        """End without an event loop."""
        link, self._link = self._link, None
        own = self._hosting.own
        if link is not None:
            if own and not self.host.shared:
                self.host.kill(link)
            link.close()
        if own:
            self._slot.first.close()
        self._workers.close()  # raises where the event loop is closed and something waits for it

    def _fail_all(self, failure: BaseException) -> None:
        self._failure = failure
        self._placement.fail(failure)
        self._workers.fail(failure)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _handle(self, link: Link, message: Message) -> None:
        if isinstance(message, ItemsMessage):
            self._items(link, message)
        elif isinstance(message, ProgressMessage):
            self._progress(link, message)
        else:
            self._handlers[type(message)](message)

    def _items(self, link: Link, message: ItemsMessage) -> None:
        if (worker := self._workers.known.get(message.worker)) is None:
            return
        packed, began = message.packed, perf_counter()
        worker.items(message, link)
        took_s = perf_counter() - began
        self._slot.meter.figures.count_list(packed.count, packed.nbytes, packed.copied_bytes, packed.slabs, took_s)
        self._end_turn(worker)

    def _progress(self, link: Link, message: ProgressMessage) -> None:
        if (worker := self._workers.known.get(message.worker)) is not None:
            worker.progress(message, link)
            self._end_turn(worker)

    def _forward(self, message: CallProgress | LiveCredit) -> None:
        if (worker := self._workers.known.get(message.worker)) is not None:
            worker.handle(message)

    def _on_ready(self, _: HostReady) -> None:
        if self._link is not None:  # else it has died since
            self._placement.host_ready(self)

    def _on_failed(self, message: HostFailed) -> None:
        raise decode_failure(message.failure)

    def _on_opened(self, message: WorkerOpened) -> None:
        if (worker := self._workers.known.get(message.worker)) is not None:
            worker.on_opened(message)
        self._end_opening(message.worker)

    def _on_ended(self, message: WorkerEnded) -> None:
        if (worker := self._workers.known.get(message.worker)) is not None:
            worker.on_ended(message)
            self._end_opening(worker.number)
            self._end_turn(worker)

    def _on_closed(self, message: WorkerClosed) -> None:
        worker = self._workers.known.get(message.worker)
        if self._link is None:
            return  # deferred in a pause, and the host has died since
        self._end_opening(message.worker)
        if worker is not None and worker.reopening() and self._link is not None:
            worker.link = None
            if not self._release(worker):
                worker.open(self._link)
            return
        if worker is not None:
            self.forget(worker)
            worker.close()
            self._end_turn(worker)

    def _reopens(self, message: Message) -> bool:
        """Whether a worker is opened again because of a message: where it stands, what came before this tells."""
        if not isinstance(message, WorkerClosed):
            return False
        worker = self._workers.known.get(message.worker)
        return worker is not None and worker.to_reopen
