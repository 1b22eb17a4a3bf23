"""The far end: the workers of one running, in a host.

Each worker is a chain of stages with a task of its own, driven as everywhere (`streamline.core.driver`); what comes out
goes into an `Outlet` instead of a channel, and crosses the border.

What a host process does with a link that it is handed: takes in what was shipped, and runs the workers of it.

Where a live source's items come into a host: its feed is read at the other end, once for all workers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import anyio

from streamline.backends.hosts.item_sender import ItemSender
from streamline.backends.hosts.plan_shipping import load
from streamline.backends.hosts.remote_errors import RemoteErrors, far_policy
from streamline.backends.hosts.remote_metrics import MetricsReporter
from streamline.backends.hosts.restarts import CallLog, careful, one_ahead
from streamline.backends.ipc.codec import StatesOut, failure_in
from streamline.backends.ipc.exceptions import carry
from streamline.backends.ipc.link import Link, LinkClosed
from streamline.backends.ipc.messages import (
    AtWork,
    Broken,
    Close,
    Closed,
    Credit,
    Hello,
    Hold,
    Leave,
    LiveEnd,
    LiveItems,
    Observe,
    Open,
    Release,
    Taken,
    WaitingTasks,
    WhatWaits,
    WorkerOpened,
)
from streamline.backends.ipc.socket_link import SocketLink
from streamline.core.channel import Channel, Inbox
from streamline.core.driver import drive
from streamline.core.error_policy import Policy
from streamline.core.flow import Chunk, Site
from streamline.core.session import MEMORY_BYTES, Session
from streamline.core.state import At, CountedStates
from streamline.core.tasks import Job, Tasks, supervise
from streamline.observe.stacks import waiting_tasks
from streamline.plan.plan import Plan
from streamline.plan.worker import worker_flow
from streamline.sources.live import FedSource

__all__ = ["ItemReceiver", "Spec", "attend", "serve"]


async def attend(sock: socket.socket, payload: int) -> None:
    """Run the workers of a running; where its plan can't be taken in, tell it why."""
    link = SocketLink(sock)
    try:
        spec = load(payload)
    except BaseException as error:  # the import of a user's module may raise anything
        link.send(Broken(carry(error)))
        await link.drain()
        link.close()
        return
    await serve(link, spec)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a host is told of a running: its plan, and what its session is like.

    Attributes:
      most_ahead: as in `Session`, like `metered` and `memory`.
      policy: what is done with items on which user code fails.
    """

    plan: Plan
    policy: Policy
    most_ahead: int | None = None
    metered: bool = True
    memory: int = MEMORY_BYTES

    @classmethod
    def of(cls, plan: Plan, session: Session, memory: int | None = None) -> Spec:
        """Return what a host is told of a running that has this session; `memory` is its own, None: the session's."""
        policy = far_policy(session.errors.policy)
        plan = replace(plan, after=())  # what stands there may be of any kind: a model on a GPU
        return cls(
            plan=plan,
            policy=policy,
            most_ahead=session.most_ahead,
            metered=session.meters.on,
            memory=session.budget.most if memory is None else memory,
        )


async def serve(link: Link, spec: Spec, answer: Callable[[Any], Any] | None = None) -> None:
    """Run workers as the other end of the link says, until it says no more; then leave nothing behind.

    Args:
      answer: answers what is asked of the other end; None: as the process was told, see `talk.asker`.
    """
    session = Session(most_ahead=spec.most_ahead, metered=spec.metered, memory=spec.memory)
    session.duplicate_check.tell = link.send
    errors = session.errors = RemoteErrors(spec.policy, link, answer)
    telling = MetricsReporter(link, session) if spec.metered and link.copies else None
    try:
        stop = anyio.Event()
        await supervise(lambda tasks: _HostedRun(link, spec, tasks, stop, errors, telling).start(), stop, session)
        if telling is not None:
            telling.close()
        with anyio.CancelScope(shield=True):
            await link.drain()
    finally:
        if telling is not None:
            telling.close()
        link.close()


class _HostedRun:
    """The workers of one running."""

    def __init__(
        self,
        link: Link,
        spec: Spec,
        tasks: Tasks,
        stop: anyio.Event,
        errors: RemoteErrors,
        telling: MetricsReporter | None,
    ) -> None:
        self._link = link
        self._tasks = tasks
        self._stop = stop
        self._plan = spec.plan
        self._errors = errors
        self._telling = telling
        self._workers: dict[int, _Worker] = {}
        self._pause = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Hello: self._hello,
            Observe: self._observe,
            Open: self._open,
            Credit: self._credit,
            Close: self._close,
            LiveItems: self._feed,
            LiveEnd: self._feed_end,
            Hold: self._hold,
            Release: self._release,
            Leave: lambda _: stop.set(),
            WhatWaits: lambda _: link.send(WaitingTasks(waiting_tasks())),
        }

    def start(self) -> None:
        """Begin to listen."""
        self._tasks.start(self._link.flush, "border, writing", lambda: None)
        self._tasks.start(self._listen, "border, reading", lambda: None)

    async def _listen(self) -> None:
        try:
            while True:
                for message in await self._link.receive():
                    self._handlers[type(message)](message)
                if self._telling is not None:
                    self._telling.wake()
        except LinkClosed:
            self._stop.set()

    def _hello(self, message: Hello) -> None:
        session = self._tasks.session
        session.where = message.host
        self._link.host = message.host.partition(",")[0]
        self._errors.ask = message.ask or self._errors.ask
        if message.meters is not None:
            session.meters = message.meters
        self._observe(Observe(message.observed))

    def _observe(self, message: Observe) -> None:
        if self._telling is not None:
            self._telling.observe(message.observed)

    # Workers ----------------------------------------------------------------------------------------------------------

    def _open(self, message: Open) -> None:
        link, tasks = self._link, self._tasks
        states = StatesOut(link, self._plan.worker_logs)
        outlet = ItemSender[Any](
            link, states, message.worker, message.items, message.size, message.held, message.held_size
        )
        worker = self._workers[message.worker] = _Worker(outlet)
        site = Site(tasks, message.shard, message.num_shards, message.epoch, message.skipped)
        plan = self._plan
        if message.fed:
            name = plan.source.name
            done = 0 if message.state is None else message.state[name]
            worker.inlet = ItemReceiver(link, message.worker, name, done, message.fed)
            worker.inlet.channel.join(tasks.session)
            plan = replace(plan, source=FedSource(name=name, inbox=worker.inlet.channel.inbox))
        if message.careful:
            plan = careful(plan, CallLog(link, message.worker, message.culprit))
            site = replace(site, tasks=one_ahead(tasks))
            outlet.one_by_one = True
        try:
            flow = worker_flow(plan, site, message.state)
        except Exception as failure:
            outlet.fail(failure)
            return
        outlet.filler = flow.meter
        own = isinstance(flow, Inbox) and not message.careful  # then it is as short as can be
        own = own and not (message.fed and not plan.worker)  # then it is the feed's end
        room = outlet.keep(cast("Inbox[Any]", flow)) if own else message.items
        link.send(WorkerOpened(message.worker, states.state(flow.state), room))
        if self._telling is not None:
            outlet.on_edge = self._telling.tell
        name = f"worker of shard {message.shard}"
        work = partial(tasks.gate.participate, name, partial(drive, flow, outlet, tasks.gate))
        worker.job = tasks.start(work, name, outlet.abandon)

    def _credit(self, message: Credit) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.outlet.credit(message.items, message.size)

    def _close(self, message: Close) -> None:
        worker, number = self._workers.pop(message.worker, None), message.worker
        if worker is None:  # it was closed before
            self._link.send(Closed(number))
            return

        async def close() -> None:
            if worker.job is not None:
                await self._tasks.stop(worker.job)
            if worker.inlet is not None:
                worker.inlet.channel.abandon()
            self._link.send(Closed(number))

        self._tasks.start(close, "close", lambda: None)

    def _feed(self, message: LiveItems) -> None:
        inlet = self._inlet(message.worker)
        if inlet is not None:
            inlet.put(message)

    def _feed_end(self, message: LiveEnd) -> None:
        inlet = self._inlet(message.worker)
        if inlet is not None:
            inlet.end(None if message.failure is None else failure_in(message.failure))

    def _inlet(self, number: int) -> ItemReceiver | None:
        worker = self._workers.get(number)
        return None if worker is None else worker.inlet

    # Pauses -----------------------------------------------------------------------------------------------------------

    def _hold(self, message: Hold) -> None:
        """Let nothing move from now on: what is handled next may start a task."""
        gate = self._tasks.gate
        self._pause = message.number
        gate.on_rest = self._some_rest
        gate.hold()
        self._some_rest()

    def _some_rest(self) -> None:
        """Say what doesn't rest yet."""
        gate = self._tasks.gate
        names = gate.at_work
        if not names:
            gate.insist()
        self._link.send(AtWork(self._pause, names))

    def _release(self, _: Release) -> None:
        self._tasks.gate.on_rest = None
        self._tasks.gate.resume()


class _Worker:
    """One worker's ends in the host."""

    def __init__(self, outlet: ItemSender[Any]) -> None:
        self.outlet = outlet
        self.inlet: ItemReceiver | None = None
        self.job: Job | None = None


class ItemReceiver:
    """One worker's end of the feed.

    Args:
      name: the source's.
      done: items that the worker's state is behind.
      capacity: items that may be here.
    """

    def __init__(self, link: Link, worker: int, name: str, done: int, capacity: int) -> None:
        self.channel = Channel[Any](At(name, done), capacity)
        self.channel.on_freed = self._freed
        self._link = link
        self._worker = worker
        self._name = name
        self._put = 0
        self._freed_items = 0
        self._closed = False
        self.channel.inbox.on_closed = self._close

    def put(self, message: LiveItems) -> None:
        """Take items in; those that come behind the worker's end are dropped."""
        if self._closed:
            return
        try:
            items = self._link.unpack(message.packed)
        except BaseException as failure:
            self.end(failure)
            return
        self._put += len(items)
        self.channel.reserve(len(items))
        self.channel.post(Chunk(items, CountedStates(self._name, message.first + 1)))

    def end(self, failure: BaseException | None) -> None:
        """There is no more."""
        if self._closed or self.channel.finished:
            return
        if failure is None:
            self.channel.finish()
        else:
            self.channel.fail(failure)

    def _close(self) -> None:
        self._closed = True

    def _freed(self) -> None:
        taken = self._put - self.channel.held - self._freed_items
        if taken:
            self._freed_items += taken
            self._link.send(Taken(self._worker, taken))
