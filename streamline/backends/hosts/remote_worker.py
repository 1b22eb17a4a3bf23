"""One worker in a host, as the consumer sees it: its channel's receiving end, and its latest state.

Items that arrive are put into an ordinary channel; when its reader has consumed them, the host gets credit. When the
host dies, the worker is opened again after the last item that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import anyio

from streamline.backends.hosts.live_forwarding import LiveForwarding
from streamline.backends.hosts.parts import WorkerPart
from streamline.backends.hosts.restarts import RestartPolicy
from streamline.backends.ipc.exceptions import decode_failure
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import (
    CallProgress,
    CloseWorker,
    CrashingCall,
    Credit,
    Encoded,
    FlushAt,
    ItemsMessage,
    LiveCredit,
    OpenWorker,
    ProgressMessage,
    WorkerEnded,
    WorkerOpened,
)
from streamline.backends.ipc.state_codec import ColumnDecoder
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Feeder, FlushPoints, Inbox
from streamline.core.figures import FROM_HOST
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


class ResumePoint:
    """Where a worker is opened: at its first state, or after the last item that has arrived.

    Attributes:
      begin: the state before its first item.
      arrived: items that had arrived when it was opened last.
    """

    def __init__(self, plan: Plan, site: Site, state: Tree | None) -> None:
        self.begin = BeginState(plan, site, state)
        self.arrived = 0
        self._first = state
        self._decoder = ColumnDecoder(plan.worker_logs)
        self._last: Reference | None = None  # the last item that has arrived

    def reopen(self, arrived: int) -> Tree | None:
        """Return the state to open it at, after so many items; what arrives from now on begins there."""
        self.arrived = arrived
        state = self.state()
        if self._last is not None:
            self._decoder.restart_at(self._last.get())
        return state

    def note_begin(self, begin: Encoded) -> None:
        """Take the state that it was opened at."""
        state = self._decoder.load_state(begin)
        if self._last is None:
            self.begin.actual = state

    def decode(self, items: Sequence[T], states: Encoded) -> Chunk[T]:
        """Return items, or progress, with their states."""
        columns, after = self._decoder.load(states, len(items))
        return Chunk(items, columns, after)

    def pass_to(self, chunk: Chunk[Any]) -> None:
        """Continue after a chunk."""
        self._last = chunk.end_reference

    def state(self) -> Tree | None:
        """Return the state after the last item that has arrived; None: the worker's first one, of a new run."""
        return self._first if self._last is None else self._last.get().json()

    def __str__(self) -> str:
        return "" if self._last is None else printable(self._last.get().where())


class HostCredit:
    """What a worker's host may send: at most `items` in flight, of `size` bytes. `in_flight`: arrived, not consumed."""

    def __init__(self, items: int, size: int) -> None:
        self.items = items
        self.size = size
        self.in_flight = InFlightBytes()
        self._due_items = self._due_bytes = 0  # consumed, and not yet credited

    def restart(self) -> None:
        """Owe nothing: another host gets what is in flight with `OpenWorker`."""
        self._due_items = self._due_bytes = 0

    def consume(self, held: int) -> tuple[int, int]:
        """Count items as consumed, so that `held` are left; return the credit to give, in items and bytes.

        Not for every list: 0 where there will soon be more.
        """
        consumed = self.in_flight.items - held
        self._due_items += consumed
        self._due_bytes += self.in_flight.take(consumed)
        items, size = self._due_items, self._due_bytes
        if held and items < self.items // 4 and size < self.size // 4:
            return 0, 0
        self._due_items = self._due_bytes = 0
        return items, size

    def has_room(self, held: int) -> bool:
        """Whether the host may send something; once full, it waits until a quarter is free."""
        return held <= self.items * 3 // 4 and self.in_flight.size <= self.size * 3 // 4


class Closing:
    """How far the end of a worker in its host has come.

    Attributes:
      to_reopen: it is being closed in order to be opened again.
      deadline: by when user code must end, as `perf_counter`; None: it needn't, the worker goes on.
      done: set when it has ended, with all that it opened.
    """

    def __init__(self) -> None:
        self.to_reopen = False
        self.deadline: float | None = None
        self.done = anyio.Event()

    async def wait(self) -> None:
        """Wait until it is done, but no longer than until the deadline. Shielded."""
        assert self.deadline is not None
        with anyio.move_on_after(self.deadline - perf_counter(), shield=True):
            await self.done.wait()


class RemoteWorker(Feeder, Generic[T]):
    """One worker in a host, with this number on the link, opened at `state` or at the start.

    Args:
      size: bytes of its items that may be in flight.
      feed: what it reads of a shared live source; None: it reads its source itself.

    Attributes:
      link: to its host; None: it has no host at the moment.
      heard_at: `perf_counter` of its last message; before the first one, when that is due.
    """

    def __init__(
        self, number: int, plan: Plan, site: Site, state: Tree | None, size: int, feed: Inbox[Any] | None
    ) -> None:
        self.number = number
        self.site = site
        self.connection: WorkerConnection[T] | None = None
        self.link: Link | None = None
        self.heard_at = 0.0
        self.restart_policy = RestartPolicy()
        self._parts: list[WorkerPart] = [self.restart_policy]
        if feed is not None:
            self._parts.append(LiveForwarding(number, plan.source.name, feed, site.tasks))
        self._resume = ResumePoint(plan, site, state)
        self.channel = Channel[T](self._resume.begin, Capacity(plan.worker_capacity(site.num_shards)), self)
        self.channel.join(site.tasks.session)
        self._credit = HostCredit(self.channel.capacity.items, size)
        self._closing = Closing()
        self._start: Callable[[], None] = lambda: None

    def connect(self, start: Callable[[], None], filled_by: str) -> Inbox[T]:
        """Return the inbox, which gets the items of the stage `filled_by`; its first pull calls `start`."""
        channel, tasks = self.channel, self.site.tasks
        if tasks.session.meters.on:
            channel.meter = tasks.session.meters.channel(filled_by + FROM_HOST, self.site.shard, channel.capacity.items)
        self._start = start
        tasks.add_cleanup(channel.abandon)
        return channel.inbox

    def start(self) -> None:
        self._start()

    def on_closed(self) -> None:
        self.site.tasks.remove_cleanup(self.channel.abandon)
        if self.connection is not None:
            self.connection.forget(self)

    # Messages to the host ---------------------------------------------------------------------------------------------

    def open(self, link: Link) -> None:
        """Open it at the other end of `link`, after the last item that has arrived."""
        state = self._resume.reopen(self.channel.sent)
        site, credit = self.site, self._credit
        self.link = link
        credit.restart()
        self.heard_at = perf_counter() + START_S
        message = OpenWorker(
            self.number,
            site.shard,
            site.num_shards,
            site.epoch,
            dict(site.skipped),
            state,
            items=credit.items,
            size=credit.size,
            in_flight=credit.in_flight.items,
            in_flight_bytes=credit.in_flight.size,
            flush_points=self._flush_points,
        )
        for part in self._parts:
            message = part.complete(message)
        link.send(message)
        for part in self._parts:
            part.on_open(link, state)

    @property
    def finished(self) -> bool:
        """Whether it has finished or is being closed."""
        return self.channel.finished or self._closing.deadline is not None

    def cancel(self) -> None:
        if self._closing.deadline is None:
            self._closing.deadline = perf_counter() + CLOSE_S
            self._end_parts()
            if self.link is None:
                self._closing.done.set()
            else:
                self.link.send(CloseWorker(self.number))

    def on_host_lost(self) -> None:
        self.link = None
        self._closing.to_reopen = False
        for part in self._parts:
            part.on_lost()

    def apply_verdict(self, fault: CrashingCall | WorkerDied) -> None:
        """Go on without the call that crashes its hosts, or fail."""
        if isinstance(fault, CrashingCall):
            self.restart_policy.crashing_call = fault
        else:
            self.fail(fault)
            self.close()

    @property
    def has_room(self) -> bool:
        return self._credit.has_room(self.held)

    @property
    def movable(self) -> bool:
        """Whether it runs in a host, and isn't on its way to another."""
        return self.link is not None and not self._closing.to_reopen and not self.finished

    def close_to_reopen(self) -> None:
        """Close it in its host, in order to open it again, there or elsewhere, once what it has sent has arrived."""
        assert self.link is not None
        self._closing.to_reopen = True
        self.link.send(CloseWorker(self.number))
        for part in self._parts:
            part.on_lost()

    @property
    def to_reopen(self) -> bool:
        """Whether it is opened again once it is closed: it was closed for that, or the host has detached it."""
        return not self.finished

    def reopening(self) -> bool:
        """Return `to_reopen`, once."""
        self._closing.to_reopen = False
        return self.to_reopen

    @property
    def held(self) -> int:
        """Items that have arrived and are not consumed."""
        return self.channel.capacity.held

    @property
    def position(self) -> str:
        """Its position in the source, for a person."""
        return str(self._resume)

    @property
    def starved(self) -> bool:
        """Whether it waits for an item of a live source."""
        return any(part.starved for part in self._parts)

    def close(self) -> None:
        """Note that its host has ended, and no other will run it."""
        self.link = None
        self._closing.done.set()

    def fail(self, failure: BaseException) -> None:
        """Fail the channel after what has arrived."""
        if not self.channel.finished:
            self.channel.fail(failure)
        self._end_parts()

    def _end_parts(self) -> None:
        for part in self._parts:
            part.on_end()

    async def stop(self) -> None:
        """Close it in its host and wait; if user code doesn't end, kill the host."""
        self.cancel()
        await self._closing.wait()
        if not self._closing.done.is_set() and self.connection is not None:
            self.connection.end_host()
            with anyio.CancelScope(shield=True):
                await self._closing.done.wait()

    def on_freed(self) -> None:
        items, size = self._credit.consume(self.held)
        if items and self.link is not None and not self.finished:
            self.link.send(Credit(self.number, items, size))

    @property
    def _flush_points(self) -> FlushPoints | None:
        """Where the host's lists may end, as it counts items."""
        points = self.channel.flush_points
        return None if points is None else points._replace(first=points.first - self._resume.arrived)

    def on_flush_points(self) -> None:
        if self.link is not None and not self.finished and (points := self._flush_points) is not None:
            self.link.send(FlushAt(self.number, points))

    # Messages from the host -------------------------------------------------------------------------------------------

    def on_opened(self, message: WorkerOpened) -> None:
        """Take the state that it was opened at."""
        self.heard_at = perf_counter()
        self.channel.capacity.limit_to(message.items)
        self._credit.items = self.channel.capacity.items
        self._resume.note_begin(message.begin)

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
        chunk = self._resume.decode(items, message.states)
        self._credit.in_flight.add(len(items), packed.nbytes)
        self.channel.reserve(len(items))
        self._post(chunk)
        self._stop_tracking()

    def progress(self, message: ProgressMessage, link: Link) -> None:
        if self.finished:
            return
        self._post(self._resume.decode((), message.states))
        link.send(Credit(self.number, 0, 0))

    def _post(self, chunk: Chunk[T]) -> None:
        count = len(chunk.items)
        self.heard_at = perf_counter()
        self._resume.pass_to(chunk)
        self.channel.post(chunk)
        for part in self._parts:
            part.on_items(count, self._resume.state)

    def _stop_tracking(self) -> None:
        if self.restart_policy.track_calls and self.restart_policy.stable and self.link is not None:
            self.restart_policy.track_calls = False
            if not self._closing.to_reopen:
                self.close_to_reopen()

    def on_ended(self, message: WorkerEnded) -> None:
        """Finish or fail the channel."""
        if message.failure is not None:
            self.fail(decode_failure(message.failure))
        elif not self.channel.finished:
            self.channel.finish()
        self._end_parts()

    def handle(self, message: CallProgress | LiveCredit) -> None:
        """Take a message of a feature of this worker."""
        for part in self._parts:
            if isinstance(message, part.handles):
                part.handle(message)

    def _unreadable(self, failure: BaseException) -> BaseException:
        error = TransportError(
            f"items of shard {self.site.shard} have left its worker's process, and can't be made again here: "
            f"{type(failure).__name__}: {failure}. What unpickles them has to be importable here, too"
        )
        error.__cause__ = failure
        return error
