"""One worker in a host, as the consumer sees it: its channel's receiving end, and its latest state.

Items that arrive are put into an ordinary channel; when its reader has consumed them, the host gets credit. When the
host dies, the worker is opened again after the last item that arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import anyio

from streamline.backends.hosts.live_forwarding import LiveForwarding
from streamline.backends.hosts.restarts import RestartPolicy
from streamline.backends.ipc.exceptions import decode_failure
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import (
    CloseWorker,
    CrashingCall,
    Credit,
    FlushAt,
    ItemsMessage,
    OpenWorker,
    ProgressMessage,
    WorkerEnded,
    WorkerOpened,
)
from streamline.backends.ipc.state_codec import ColumnDecoder
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Feeder, FlushPoints, Inbox
from streamline.core.counters import FROM_HOST
from streamline.core.flow import Chunk, Site
from streamline.core.state import Reference, Tree
from streamline.errors import TransportError, WorkerDied, printable
from streamline.plan.plan import Plan
from streamline.plan.worker import BeginState

T = TypeVar("T")

START_S = 30.0
"""Seconds for a host to open a worker, before it counts as stuck: imports, mostly."""

CLOSE_S = 5.0
"""Seconds for user code in a host to end when asked to; then the host is killed."""


class WorkerConnection(Protocol[T]):
    """The part of a `HostConnection`, or while it has none, of a `Placement`, that a worker uses."""

    def forget(self, worker: RemoteWorker[T]) -> None: ...

    def end_host(self) -> None: ...


class RemoteWorker(Feeder, Generic[T]):
    """One worker in a host, with this number on the link, opened at `state` or at the start.

    Args:
      size: bytes of its items that may be in flight.
      feed: what it reads of a shared live source; None: it reads its source itself.

    Attributes:
      connection: which has it.
      link: to its host; None: it has no host at the moment.
      closed: set when it has ended in the host, with all that it opened.
      heard_at: `perf_counter` of its last message; before the first one, when that is due.
    """

    def __init__(
        self, number: int, plan: Plan, site: Site, state: Tree | None, size: int, feed: Inbox[Any] | None
    ) -> None:
        self.number = number
        self.site = site
        self.connection: WorkerConnection[T] | None = None
        self.link: Link | None = None
        self.closed = anyio.Event()
        self.restart_policy = RestartPolicy()
        self.heard_at = 0.0
        self._state = state
        self._size = size
        self._capacity = plan.worker_capacity(site.num_shards)
        self._begin = BeginState(plan, site, state)
        self._states = ColumnDecoder(plan.worker_logs)
        self._last: Reference | None = None  # the last item that has arrived
        self.forwarding = (
            None if feed is None else LiveForwarding(number, plan.source.name, feed, self._consumed, site.tasks)
        )
        self.channel = Channel[T](self._begin, Capacity(self._capacity), self)
        self.channel.join(site.tasks.session)
        self._capacity = self.channel.capacity.items
        self._start: Callable[[], None] = lambda: None
        self._in_flight = InFlightBytes()  # arrived, not consumed
        self._credit = 0  # items consumed, and not yet credited
        self._credit_bytes = 0
        self._opened_after = 0  # items
        self._leaving = False
        self._close_deadline = 0.0  # by when user code must end
        self._closing = False  # in order to be opened again

    def connect(self, start: Callable[[], None], filled_by: str) -> Inbox[T]:
        """Return the inbox, which gets the items of the stage `filled_by`; its first pull calls `start`."""
        channel, tasks = self.channel, self.site.tasks
        if tasks.session.meters.on:
            channel.meter = tasks.session.meters.channel(filled_by + FROM_HOST, self.site.shard, channel.capacity.items)
        self._start = start
        tasks.own(channel.abandon)
        return channel.inbox

    def start(self) -> None:
        self._start()

    def on_closed(self) -> None:
        self.site.tasks.disown(self.channel.abandon)
        if self.connection is not None:
            self.connection.forget(self)

    # Messages to the host ---------------------------------------------------------------------------------------------

    def open(self, link: Link) -> None:
        """Open it at the other end of `link`, after the last item that has arrived."""
        state = self._state
        if self._last is not None:
            last = self._last.get()
            state = last.json()
            self._states.restarted(last)
        self.link = link
        self._credit = self._credit_bytes = 0  # this host gets what is in flight with `OpenWorker`
        self.heard_at = perf_counter() + START_S
        self.restart_policy.calls.clear()
        self._opened_after = self.channel.sent
        site = self.site
        link.send(
            OpenWorker(
                self.number,
                site.shard,
                site.num_shards,
                site.epoch,
                dict(site.skipped),
                state,
                items=self._capacity,
                size=self._size,
                in_flight=self._in_flight.items,
                in_flight_bytes=self._in_flight.size,
                live_capacity=0 if self.forwarding is None else self.forwarding.capacity,
                track_calls=self.restart_policy.track_calls,
                crashing_call=self.restart_policy.crashing_call,
                flush_points=self._flush_points,
            )
        )
        if self.forwarding is not None:
            self.forwarding.open(link, state)

    @property
    def finished(self) -> bool:
        """Whether it has finished or is being closed."""
        return self.channel.finished or self._leaving

    def cancel(self) -> None:
        """Ask it to end, without waiting."""
        if not self._leaving:
            self._leaving = True
            self._close_deadline = perf_counter() + CLOSE_S
            self._end_forwarding()
            if self.link is None:
                self.closed.set()
            else:
                self.link.send(CloseWorker(self.number))

    def on_host_lost(self) -> None:
        """Note that its host has ended."""
        self.link = None
        self._closing = False
        if self.forwarding is not None:
            self.forwarding.lost()

    def apply_verdict(self, fault: CrashingCall | WorkerDied) -> None:
        """Go on without the call that crashes its hosts, or fail."""
        if isinstance(fault, CrashingCall):
            self.restart_policy.crashing_call = fault
        else:
            self.fail(fault)
            self.gone()

    @property
    def has_room(self) -> bool:
        """Whether it has room to send; once full, it waits until a quarter is free."""
        return self.channel.capacity.held <= self._capacity * 3 // 4 and self._in_flight.size <= self._size * 3 // 4

    @property
    def movable(self) -> bool:
        """Whether it runs in a host, and isn't on its way to another."""
        return self.link is not None and not self._closing and not self.finished

    def close_to_reopen(self) -> None:
        """Close it in its host, in order to open it again, there or elsewhere, once what it has sent has arrived."""
        assert self.link is not None
        self._closing = True
        self.link.send(CloseWorker(self.number))
        if self.forwarding is not None:
            self.forwarding.lost()

    @property
    def to_reopen(self) -> bool:
        """Whether it is opened again once it is closed: it was closed for that, or the host has detached it."""
        return not self.finished

    def reopening(self) -> bool:
        """Return `to_reopen`, once."""
        reopening = self.to_reopen
        self._closing = False
        return reopening

    @property
    def held(self) -> int:
        """Items that have arrived and are not consumed."""
        return self.channel.capacity.held

    @property
    def position(self) -> str:
        """Its position in the source, for a person."""
        return "" if self._last is None else printable(self._last.get().where())

    @property
    def starved(self) -> bool:
        """Whether it waits for an item of a live source."""
        return self.forwarding is not None and self.forwarding.starved

    def gone(self) -> None:
        """Note that its host has ended, and no other will run it."""
        self.link = None
        self.closed.set()

    def fail(self, failure: BaseException) -> None:
        """Fail the channel after what has arrived."""
        if not self.channel.finished:
            self.channel.fail(failure)
        self._end_forwarding()

    def _end_forwarding(self) -> None:
        if self.forwarding is not None:
            self.forwarding.end()

    async def stop(self) -> None:
        """Close it in its host and wait; if user code doesn't end, kill the host."""
        self.cancel()
        with anyio.move_on_after(self._close_deadline - perf_counter(), shield=True):
            await self.closed.wait()
        if not self.closed.is_set() and self.connection is not None:
            self.connection.end_host()
            with anyio.CancelScope(shield=True):
                await self.closed.wait()

    def on_freed(self) -> None:
        """Give credit for what was consumed; not for every list."""
        freed = self._in_flight.items - self.channel.capacity.held
        self._credit += freed
        self._credit_bytes += self._in_flight.take(freed)
        items, size = self._credit, self._credit_bytes
        if not items or (self.channel.capacity.held and items < self._capacity // 4 and size < self._size // 4):
            return
        self._credit = self._credit_bytes = 0
        if self.link is not None and not self.finished:
            self.link.send(Credit(self.number, items, size))

    @property
    def _flush_points(self) -> FlushPoints | None:
        """Where the host's lists may end, as it counts items."""
        points = self.channel.flush_points
        return None if points is None else points._replace(first=points.first - self._opened_after)

    def on_flush_points(self) -> None:
        if self.link is not None and not self.finished and (points := self._flush_points) is not None:
            self.link.send(FlushAt(self.number, points))

    # Messages from the host -------------------------------------------------------------------------------------------

    def opened(self, message: WorkerOpened) -> None:
        """Take the state that it was opened at."""
        self.heard_at = perf_counter()
        self.channel.capacity.limit_to(message.items)
        self._capacity = self.channel.capacity.items
        begin = self._states.load_state(message.begin)
        if self._last is None:
            self._begin.actual = begin

    def items(self, message: ItemsMessage, link: Link) -> None:
        """Post items from `link`, which may be closed by now."""
        if self.finished:
            return
        packed = message.packed
        try:
            items = link.unpack(packed)
        except BaseException as failure:
            self.fail(self._unreadable(failure))
            return
        states, after = self._states.load(message.states, len(items))
        self._in_flight.add(len(items), packed.nbytes)
        self.channel.reserve(len(items))
        self._arrived(Chunk(items, states, after))
        self._stop_tracking()

    def progress(self, message: ProgressMessage, link: Link) -> None:
        """Post progress from `link`."""
        if self.finished:
            return
        states, after = self._states.load(message.states, 0)
        self._arrived(Chunk((), states, after))
        link.send(Credit(self.number, 0, 0))

    def _arrived(self, chunk: Chunk[T]) -> None:
        self.restart_policy.on_items(len(chunk.items))
        self.heard_at = perf_counter()
        self._last = chunk.end_reference
        self.channel.post(chunk)
        if self.forwarding is not None:
            self.forwarding.trim()

    def _stop_tracking(self) -> None:
        if self.restart_policy.track_calls and self.restart_policy.stable and self.link is not None:
            self.restart_policy.track_calls = False
            if not self._closing:
                self.close_to_reopen()

    def ended(self, message: WorkerEnded) -> None:
        """Finish or fail the channel."""
        if message.failure is not None:
            self.fail(decode_failure(message.failure))
        elif not self.channel.finished:
            self.channel.finish()
        self._end_forwarding()

    def _consumed(self) -> int:
        """Return how many items of its feed its state covers."""
        assert self.forwarding is not None
        tree = self._state if self._last is None else self._last.get().json()
        consumed: int = 0 if tree is None else tree[self.forwarding.name]
        return consumed

    def _unreadable(self, failure: BaseException) -> BaseException:
        error = TransportError(
            f"items of shard {self.site.shard} have left its worker's process, and can't be made again here: "
            f"{type(failure).__name__}: {failure}. What unpickles them has to be importable here, too"
        )
        error.__cause__ = failure
        return error
