"""Features of a run, as the consumer sees them at one host or one worker: their messages, and what they do at its end.

A `HostConnection` tells its `HostPart`s what becomes of the host, a `RemoteWorker` its `WorkerPart`s; a message that is
a feature's alone is handled by its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from streamline.backends.ipc.exceptions import decode_skipped
from streamline.backends.ipc.messages import (
    Hello,
    HostFailed,
    Message,
    MetricsUpdate,
    Observe,
    OpenWorker,
    PauseHost,
    PauseStatus,
    PermitsIssued,
    PermitsReturned,
    PermitsWanted,
    ResumeHost,
    SetKnobs,
    SkippedItem,
    WorkerClosed,
)
from streamline.core.duplicate_check import Beginning, DuplicateCheck
from streamline.core.limits import CallLimits

if TYPE_CHECKING:
    from streamline.backends.ipc.link import Link
    from streamline.core.gate import Gate
    from streamline.core.knobs import KnobValues
    from streamline.core.meters import HostMeter, Meters
    from streamline.core.state import Tree
    from streamline.core.tasks import Session, Tasks

Handlers: TypeAlias = Mapping[type, Callable[[Any], None]]
"""By the type of the message."""


class HostPart:
    """One feature of a run, at one host. A subclass overrides what concerns it; the rest does nothing.

    Attributes:
      link: to the host; None: there is none at the moment.
    """

    link: Link | None = None

    def handlers(self) -> Handlers:
        """Return what handles the feature's messages."""
        return {}

    def begin(self) -> None:
        """The run begins to connect to the host; called once."""

    def join(self, link: Link, hello: Hello) -> Hello:
        """Take a new link; return its first message with what the host needs for this feature."""
        self.link = link
        return hello

    def take_over(self, shard: int) -> None:
        """A worker comes from another host."""

    def on_lost(self) -> None:
        """The link is closed. Idempotent."""
        self.link = None

    def on_exit(self) -> None:
        """The host of the lost link is known to have ended, and all calls in it."""

    def close(self) -> None:
        """The run is over, here. Called once, after `on_lost`."""


class WorkerPart:
    """One feature of one worker. A subclass overrides what concerns it; the rest does nothing."""

    handles: ClassVar[tuple[type, ...]] = ()
    """The types of its messages."""

    @property
    def starved(self) -> bool:
        """Whether this is why the worker gives nothing: there is nothing to read."""
        return False

    def handle(self, message: Any) -> None:
        """Take one of its messages."""

    def complete(self, message: OpenWorker) -> OpenWorker:
        """Return the message that opens the worker, with what the host needs for this feature."""
        return message

    def on_open(self, link: Link, state: Tree | None) -> None:
        """The worker is being opened at the other end of `link`."""

    def on_items(self, items: int, state: Callable[[], Tree | None]) -> None:
        """So many items have arrived, or progress; `state` returns the worker's after them."""

    def on_lost(self) -> None:
        """The worker has no host, or is being closed in it, to be opened elsewhere."""

    def on_end(self) -> None:
        """Nothing is read of the worker any more. Idempotent."""


class PermitsOfHost(HostPart):
    """`sl.Limit`: the host holds permits of the consumer's, which are taken from it when it has ended."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._limits = tasks.session.services.get(CallLimits)

    def handlers(self) -> Handlers:
        return {PermitsWanted: self._ask, PermitsReturned: lambda message: self._limits.take_back(self, *message)}

    def on_exit(self) -> None:
        self._limits.leave(self)

    def _ask(self, message: PermitsWanted) -> None:
        limit = message.limit
        issuer = self._limits.issuer(limit, self._tasks.gate, self._tasks.start)
        issuer.join(self, partial(self._issue, limit.key))
        issuer.ask(self, message.permits)

    def _issue(self, key: str, permits: int, share: int) -> None:
        if self.link is not None:
            self.link.send(PermitsIssued(key, permits, share))


class KnobsOfHost(HostPart):
    """Turns knobs in the host as here."""

    def __init__(self, values: KnobValues) -> None:
        self._values = values

    def begin(self) -> None:
        self._values.followers.append(self._turn)

    def join(self, link: Link, hello: Hello) -> Hello:
        return super().join(link, hello)._replace(widths=self._values.values)

    def close(self) -> None:
        self._values.followers.remove(self._turn)

    def _turn(self, values: Mapping[str, int]) -> None:
        if self.link is not None:
            self.link.send(SetKnobs(values))


class TraceOfHost(HostPart):
    """Lets the host report spans while a trace is recorded, and count in the run's own meters where it can."""

    def __init__(self, meters: Meters, meter: HostMeter) -> None:
        self._meters = meters
        self._meter = meter

    def begin(self) -> None:
        self._meters.hooks.on_observed.append(self._observe)

    def join(self, link: Link, hello: Hello) -> Hello:
        meters = self._meters
        within = meters.within(self._meter) if meters.on and not link.copies else None
        return super().join(link, hello)._replace(meters=within, observed=meters.hooks.observer is not None)

    def close(self) -> None:
        self._meters.hooks.on_observed.remove(self._observe)

    def _observe(self) -> None:
        """Say whether a trace is recorded; called in any thread."""
        if (link := self.link) is not None:
            link.send_threadsafe(Observe(self._meters.hooks.observer is not None))


class ErrorsOfHost(HostPart):
    """Items that the host's stages skip, and how its shards begin."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def handlers(self) -> Handlers:
        check = self._session.services.get(DuplicateCheck, self._session.hooks.on_chunk_boundary)
        return {SkippedItem: self._skip, Beginning: check.compare}

    def join(self, link: Link, hello: Hello) -> Hello:
        ask = None if link.copies else self._session.errors.decide
        return super().join(link, hello)._replace(ask=ask)

    def _skip(self, message: SkippedItem) -> None:
        failure = decode_skipped(message.failure)
        self._session.errors.record_skip(message.key, failure, message.epoch, message.number)


AT_ONCE = (PauseStatus, HostFailed, WorkerClosed, MetricsUpdate)
"""Messages that move no items."""


class RemotePause(HostPart):
    """The gate's participant for all workers of a host.

    During a pause, messages that arrive are deferred, bounded by the items in flight, and handled when it ends. Without
    a host, it is at rest. Until the host reports what is at work there, the meters name it, in any thread.
    """

    def __init__(
        self,
        gate: Gate,
        host_name: Callable[[], str],
        meters: Meters,
        meter: HostMeter,
        handle: Callable[[Link, Message], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._gate = gate
        self._host_name = host_name
        self._meters = meters
        self._meter = meter
        self._handle = handle
        self._failed = failed
        self._participant = gate.remote_participant("")
        self._participant.names = self._names
        self._reported: tuple[str, ...] = ()
        self._number = 0
        self._deferred: deque[tuple[Link, Message]] = deque()
        gate.on_pause(self._pause, self._resume)

    def handlers(self) -> Handlers:
        return {PauseStatus: self._at_work}

    def on_lost(self) -> None:
        super().on_lost()
        self._set_resting()

    def close(self) -> None:
        self._gate.forget_pause(self._pause)
        self._gate.unregister(self._participant)
        self._deferred.clear()

    def receive(self, link: Link, message: Message, *, in_order: bool = False) -> None:
        """Handle a message, or defer it until the pause ends; `in_order`: after those before it, whatever it is."""
        if self._gate.holding and (in_order or not isinstance(message, AT_ONCE)):
            self._deferred.append((link, message))
        else:
            self._handle(link, message)

    def _at_work(self, message: PauseStatus) -> None:
        if message.number != self._number or not self._gate.holding:
            return  # of a pause that is over
        if message.names:
            self._reported = tuple(f"{name} in {self._host_name()}" for name in message.names)
        else:
            self._set_resting()

    def _names(self) -> tuple[str, ...]:
        """Return what the host has reported, else what seems to be at work in it."""
        if self._reported:
            return self._reported
        meters = [meter for meter in list(self._meters.stages.values()) if meter.host is self._meter]
        busy = [f"{meter} of shard {meter.figures.shard}" for meter in meters if meter.since is not None]
        host = self._host_name()
        return tuple(f"{name} in {host}" for name in busy) or (host,)

    def _pause(self) -> None:
        if self.link is not None:
            self._number += 1
            self._reported = ()
            self.link.send(PauseHost(self._number))
            if self._participant.rests:
                self._participant.wake()

    def _resume(self) -> None:
        self._set_resting()
        if self.link is not None:
            self.link.send(ResumeHost())
        try:
            while self._deferred:
                self._handle(*self._deferred.popleft())
        except BaseException as failure:
            self._failed(failure)

    def _set_resting(self) -> None:
        if not self._participant.rests:
            self._participant.rest()
