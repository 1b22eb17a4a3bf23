"""The host side of a run: opens its workers, and sends their items to the consumer.

Each worker is a chain of stages with a task of its own, driven as everywhere (`streamline.core.driver`); its output
goes into an `ItemSender` instead of a channel. Items of a live source come in through an `ItemReceiver`: its feed is
read by the consumer, once for all workers. `serve` is the entry point of a host thread, `serve_socket` that of a
process, and of one that ranks share, `streamline.backends.hosts.shared_runs.serve_socket`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, cast

import anyio

from streamline.backends.hosts.item_sender import ItemSender
from streamline.backends.hosts.remote_metrics import MetricsReporter
from streamline.backends.hosts.stdio_relay import asker
from streamline.backends.ipc.exceptions import decode_failure, encode_skipped, pickle_exception, pickle_skipped
from streamline.backends.ipc.link import Link, LinkClosed
from streamline.backends.ipc.messages import (
    CloseWorker,
    Credit,
    FlushAt,
    Hello,
    HostFailed,
    HostReady,
    LiveCredit,
    LiveEnd,
    LiveItems,
    Message,
    Observe,
    OpenWorker,
    PauseHost,
    PauseStatus,
    PermitsIssued,
    PermitsReturned,
    PermitsWanted,
    ResumeHost,
    SetKnobs,
    Shutdown,
    SkippedItem,
    StacksRequest,
    TaskStacks,
    WorkerClosed,
    WorkerOpened,
)
from streamline.backends.ipc.pickling import load
from streamline.backends.ipc.socket_link import SocketLink
from streamline.backends.ipc.state_codec import ColumnEncoder
from streamline.core.byte_budget import Budget
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Feeder, Inbox
from streamline.core.driver import drive
from streamline.core.duplicate_check import DuplicateCheck
from streamline.core.error_policy import Decision, Errors, Failure, Policy
from streamline.core.flow import Chunk, Site
from streamline.core.knobs import KnobValues
from streamline.core.limits import CallLimits
from streamline.core.meters import Meters
from streamline.core.place import CURRENT_PLACE, Lender, Place
from streamline.core.state import At, CountedStates
from streamline.core.tasks import MEMORY_BYTES, Job, Session, Tasks, supervise
from streamline.core.tracebacks import waiting_tasks
from streamline.plan.plan import Plan
from streamline.plan.worker import worker_flow


def host_policy(policy: Policy) -> Policy:
    """Return the policy for a host, without the user's handler: the host asks the consumer."""
    return policy if isinstance(policy.on_error, str) else replace(policy, on_error=_never_called)


def _never_called(failure: Failure) -> Decision:
    raise AssertionError("the consumer decides")


class RemoteErrors(Errors):
    """Errors of a host's stages, decided and counted by the consumer.

    An `on_error` handler is the user's function, which may append to a list; and a skipped item counts when it would
    have been consumed.

    Args:
      decide: where the link doesn't copy; None: a question to the consumer does.
      answer: as in `serve`.
    """

    def __init__(
        self,
        policy: Policy,
        link: Link,
        decide: Callable[[Failure], object] | None,
        answer: Callable[[object], object] | None,
    ) -> None:
        super().__init__(policy)
        self._decide = decide
        self._link = link
        self._answer = answer

    def decide(self, failure: Failure) -> object:
        if isinstance(self.policy.on_error, str):
            return super().decide(failure)
        if self._decide is not None:
            return self._decide(failure)
        answer = self._answer or asker()
        assert answer is not None, "the handler is in the consumer, and there is no connection to ask over"
        return answer(pickle_skipped(failure))

    def record_skip(self, key: tuple[int, str], failure: Failure, epoch: tuple[int, ...], number: int) -> None:
        self._link.send(SkippedItem(key, encode_skipped(self._link, failure), epoch, number))


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a host needs of a run: its plan, the error policy without the user's handler, and its session's options.

    Attributes:
      place: the consumer's, whose memory this host shares; None: it doesn't, or there is none.
    """

    plan: Plan
    policy: Policy
    most_ahead: int | None = None
    metered: bool = True
    memory: int = MEMORY_BYTES
    place: Place | None = None

    @classmethod
    def of(cls, plan: Plan, session: Session, memory: int | None = None) -> Spec:
        """Return the spec of a run with this session; `memory`: bytes, None: the session's."""
        policy = host_policy(session.errors.policy)
        plan = replace(plan, after=())  # those stages run in the consumer, and may hold anything: a model on a GPU
        return cls(
            plan=plan,
            policy=policy,
            most_ahead=session.most_ahead,
            metered=session.meters.on,
            memory=session.budget.most if memory is None else memory,
        )


async def serve_socket(sock: socket.socket, payload: int) -> None:
    await serve_link(SocketLink(sock), payload)


async def serve_link(link: SocketLink, payload: int, load: Callable[[int], Spec] = load) -> None:
    if await first_message(link, payload) is not None and (spec := await load_spec(link, payload, load)) is not None:
        await serve(link, spec)


async def first_message(link: SocketLink, payload: int) -> Hello | None:
    """Return the first message, which is received once more; None: the consumer has hung up, and all is closed."""
    try:
        messages = await link.receive()
    except BaseException as error:
        os.close(payload)
        link.close()
        if isinstance(error, LinkClosed):
            return None
        raise
    link.unread(messages)
    hello: Any = messages[0]
    return cast("Hello", hello)


async def load_spec(link: SocketLink, payload: int, load: Callable[[int], Spec]) -> Spec | None:
    """Return the plan and close its descriptor; None: it can't be loaded, which the consumer is told."""
    try:
        return load(payload)
    except BaseException as error:  # the import of a user's module may raise anything
        link.send(HostFailed(pickle_exception(error)))
        await link.drain()
        link.close()
        return None


async def serve(link: Link, spec: Spec, answer: Callable[[Any], Any] | None = None) -> None:
    """Run the workers that the consumer asks for until it hangs up, then clean up.

    Args:
      answer: answers questions to the consumer; None: `stdio_relay.asker` does.
    """
    try:
        hello, *others = await link.receive()
    except BaseException as error:
        link.close()
        if isinstance(error, LinkClosed):
            return
        raise
    assert isinstance(hello, Hello)
    link.host = hello.host.partition(",")[0]
    session = Session(
        hello.host,
        spec.most_ahead,
        Budget(spec.memory),
        meters=Meters(perf_counter(), on=spec.metered) if hello.meters is None else hello.meters,
        errors=RemoteErrors(spec.policy, link, hello.ask, answer),
    )
    if hello.widths is not None:
        session.services.add(KnobValues, KnobValues(hello.widths))
    session.services.get(DuplicateCheck, session.hooks.on_chunk_boundary, link.send)
    session.services.get(
        CallLimits,
        ask=lambda limit, permits: link.send(PermitsWanted(limit, permits)),
        give_back=lambda key, permits, unused: link.send(PermitsReturned(key, permits, unused)),
    )
    session.services.add(Lender, Lender(spec.place if link.place is None else link.place))
    CURRENT_PLACE.set(link.place)
    reporter = MetricsReporter(link, session) if spec.metered and link.copies else None
    try:
        stop = anyio.Event()

        def begin(tasks: Tasks) -> None:
            _HostedRun(link, spec.plan, tasks, stop, reporter).start(hello, others)

        await supervise(begin, stop, session)
        if reporter is not None:
            reporter.close()
        with anyio.CancelScope(shield=True):
            await link.drain()
    finally:
        if reporter is not None:
            reporter.close()
        link.close()


class _HostedRun:
    """The workers of one run in this host."""

    def __init__(
        self,
        link: Link,
        plan: Plan,
        tasks: Tasks,
        stop: anyio.Event,
        reporter: MetricsReporter | None,
    ) -> None:
        self._link = link
        self._tasks = tasks
        self._stop = stop
        self._plan = plan
        self._reporter = reporter
        self._workers: dict[int, _Worker] = {}
        self._pause = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Observe: self._observe,
            SetKnobs: self._turn,
            OpenWorker: self._open,
            Credit: self._credit,
            FlushAt: self._flush_at,
            CloseWorker: self._close,
            LiveItems: self._live_items,
            LiveEnd: self._live_end,
            PermitsIssued: lambda message: tasks.session.services.get(CallLimits).grant(*message),
            PauseHost: self._begin_pause,
            ResumeHost: self._end_pause,
            Shutdown: lambda _: stop.set(),
            StacksRequest: lambda _: link.send(TaskStacks(waiting_tasks())),
        }

    def start(self, hello: Hello, messages: Sequence[Message]) -> None:
        """Answer the consumer's first message, and start reading and writing; `messages` have come with it."""
        self._observe(Observe(hello.observed))
        if hello.answer:
            self._link.send(HostReady())
        self._tasks.start(self._link.flush, "link, writing", lambda: None)
        self._tasks.start(partial(self._listen, messages), "link, reading", lambda: None)

    async def _listen(self, messages: Sequence[Message]) -> None:
        try:
            while True:
                for message in messages:
                    self._handlers[type(message)](message)
                if self._reporter is not None:
                    self._reporter.wake()
                messages = await self._link.receive()
        except LinkClosed:
            self._stop.set()

    def _observe(self, message: Observe) -> None:
        if self._reporter is not None:
            self._reporter.observe(message.observed)

    def _turn(self, message: SetKnobs) -> None:
        knobs = self._tasks.session.services.find(KnobValues)
        if knobs is not None:
            knobs.set(message.widths)

    # Workers ----------------------------------------------------------------------------------------------------------

    def _open(self, message: OpenWorker) -> None:
        link, tasks = self._link, self._tasks
        states = ColumnEncoder(self._plan.worker_logs, copies=link.copies)
        sender = ItemSender[Any](
            link, states, message.worker, message.items, message.size, message.in_flight, message.in_flight_bytes
        )
        sender.flush_points = message.flush_points
        worker = self._workers[message.worker] = _Worker(sender, message.shard)
        site = Site(tasks, message.shard, message.num_shards, message.epoch, message.skipped)
        plan = self._plan
        if message.live_capacity:
            from streamline.sources.live import FedSource  # not at the top, as below: hosts start sooner

            name = plan.source.name
            done = 0 if message.state is None else message.state[name]
            worker.receiver = ItemReceiver(link, message.worker, name, done, message.live_capacity)
            worker.receiver.channel.join(tasks.session)
            plan = replace(plan, source=FedSource(name=name, inbox=worker.receiver.channel.inbox))
        if message.track_calls:
            from streamline.backends.hosts.restarts import CallLog, track_calls, unbuffered

            plan = track_calls(plan, CallLog(link, message.worker, message.crashing_call))
            site = replace(site, tasks=unbuffered(tasks))
            sender.capacity.one_by_one = True
        try:
            flow = worker_flow(plan, site, message.state)
        except Exception as failure:
            sender.fail(failure)
            return
        sender.filler = flow.meter
        own = (
            isinstance(flow, Inbox) and not message.track_calls
        )  # the chain ends in a channel: its bounds hold here, too
        own = own and not (message.live_capacity and not plan.worker)  # unless that is the feed's own channel
        room = sender.keep(cast("Inbox[Any]", flow)) if own else message.items
        link.send(WorkerOpened(message.worker, states.dump_state(flow.state), room))
        if self._reporter is not None:
            sender.on_edge = partial(self._reporter.report, message.shard)
        name = f"worker of shard {message.shard}"
        work = partial(tasks.gate.participate, name, partial(drive, flow, sender, tasks.gate))
        worker.job = tasks.start(work, name, sender.abandon)

    def _credit(self, message: Credit) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.sender.credit(message.items, message.size)

    def _flush_at(self, message: FlushAt) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.sender.flush_points = message.points

    def _close(self, message: CloseWorker) -> None:
        worker, number = self._workers.pop(message.worker, None), message.worker
        if worker is None:  # closed already
            self._link.send(WorkerClosed(number))
            return

        async def close() -> None:
            if worker.job is not None:
                await self._tasks.stop(worker.job)
            if worker.receiver is not None:
                worker.receiver.channel.abandon()
            if self._reporter is not None:
                self._reporter.report(worker.shard)  # it may go on elsewhere
            self._link.send(WorkerClosed(number))

        self._tasks.start(close, "close", lambda: None)

    def _live_items(self, message: LiveItems) -> None:
        receiver = self._receiver(message.worker)
        if receiver is not None:
            receiver.put(message)

    def _live_end(self, message: LiveEnd) -> None:
        receiver = self._receiver(message.worker)
        if receiver is not None:
            receiver.end(None if message.failure is None else decode_failure(message.failure))

    def _receiver(self, number: int) -> ItemReceiver | None:
        worker = self._workers.get(number)
        return None if worker is None else worker.receiver

    # Pauses -----------------------------------------------------------------------------------------------------------

    def _begin_pause(self, message: PauseHost) -> None:
        """Pause before the next message is handled: that may start a task."""
        gate = self._tasks.gate
        self._pause = message.number
        gate.on_rest = self._send_pause_status
        gate.hold()
        self._send_pause_status()

    def _send_pause_status(self) -> None:
        """Report what isn't at rest yet."""
        gate = self._tasks.gate
        names = gate.at_work
        if not names:
            gate.insist()
        self._link.send(PauseStatus(self._pause, names))

    def _end_pause(self, _: ResumeHost) -> None:
        self._tasks.gate.on_rest = None
        self._tasks.gate.resume()


class _Worker:
    def __init__(self, sender: ItemSender[Any], shard: int) -> None:
        self.sender = sender
        self.shard = shard
        self.receiver: ItemReceiver | None = None
        self.job: Job | None = None


class ItemReceiver(Feeder):
    """The channel in a host that one worker reads a live source from; its state covers `done` items."""

    def __init__(self, link: Link, worker: int, name: str, done: int, capacity: int) -> None:
        self.channel = Channel[Any](At(name, done), Capacity(capacity), self)
        self._link = link
        self._worker = worker
        self._name = name
        self._put = 0
        self._freed_items = 0
        self._closed = False

    def put(self, message: LiveItems) -> None:
        """Add items; after the worker's end, drop them."""
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
        """End the feed, or fail it."""
        if self._closed or self.channel.finished:
            return
        if failure is None:
            self.channel.finish()
        else:
            self.channel.fail(failure)

    def on_closed(self) -> None:
        self._closed = True

    def on_freed(self) -> None:
        taken = self._put - self.channel.capacity.held - self._freed_items
        if taken:
            self._freed_items += taken
            self._link.send(LiveCredit(self._worker, taken))
