"""One worker that runs in a host, as the running sees it: the receiving end of its channel, and how far it has come.

Items that have arrived lie in an ordinary channel; what its reader has dealt with goes back to the host as credit. When
the host dies, the worker is opened anew behind the last item that arrived.

The state of a worker that has given nothing yet, and may not even run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar, cast

import anyio

from streamline.backends.hosts.live_forwarding import LiveForwarding
from streamline.backends.hosts.restarts import RestartPolicy
from streamline.backends.ipc.codec import StatesIn, failure_in
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import (
    Close,
    Credit,
    Culprit,
    Ended,
    ItemsMessage,
    Open,
    ProgressMessage,
    WorkerOpened,
)
from streamline.core.channel import Channel, Inbox
from streamline.core.counters import BORDER
from streamline.core.flow import Chunk, Site
from streamline.core.session import Session
from streamline.core.state import At, Reference, State, Tally, Tree
from streamline.core.tasks import Tasks
from streamline.errors import TransportError, WorkerDied
from streamline.plan.plan import Plan
from streamline.plan.worker import worker_flow
from streamline.sources.base import Source
from streamline.sources.live import FedSource

__all__ = ["CLOSE_S", "BeginState", "RemoteWorker"]


class BeginState(State):
    """What the worker says once it has been opened; until then, what opening it here, unread, would say.

    Attributes:
      actual: what it has said; None: nothing yet.
    """

    __slots__ = ("_plan", "_site", "_state", "actual")

    def __init__(self, plan: Plan, site: Site, state: Tree | None) -> None:
        self.actual: State | None = None
        self._plan = plan
        self._site = site
        self._state = state

    def json(self, until: State | None = None) -> Tree:
        return self._now().json(None if until is None else until.latest)

    @property
    def latest(self) -> State:
        return self._now().latest

    def tally(self, found: Tally) -> None:
        self._now().tally(found)

    def where(self) -> str:
        return self._now().where()

    def _now(self) -> State:
        if self.actual is None:
            self.actual = self._opened()
        return self.actual

    def _opened(self) -> State:
        """Return the state of the worker's flow, opened here and closed again: that does no I/O."""
        tasks = Tasks(cast(Any, None), Session(metered=False))
        tasks.session.errors = self._site.tasks.session.errors
        plan, site = self._plan, replace(self._site, tasks=tasks)
        if plan.mode == "shared":
            name = plan.source.name
            inbox = Channel[Any](At(name, 0 if self._state is None else self._state[name]), 1)
            source: Source[Any] = FedSource(name=name, inbox=inbox.inbox)
            tasks.own(inbox.abandon)
            plan = replace(plan, source=source)
        try:
            return worker_flow(plan, site, self._state).state
        finally:
            tasks.finished()


T = TypeVar("T")


START_S = 30.0
"""Seconds that a host may take until it has opened a worker, which is no user code being stuck: imports, mostly."""


CLOSE_S = 5.0
"""Seconds that user code in a host has to end when it is asked to; then the host is killed."""


class WorkerConnection(Protocol[T]):
    """What has to be known here of the host's part of the running."""

    def forget(self, worker: RemoteWorker[T]) -> None:
        """The worker was closed."""

    def end_host(self) -> None:
        """User code there doesn't end: end the host."""


class RemoteWorker(Generic[T]):
    """One worker.

    Args:
      number: by which both ends of its host's links know it.
      state: where it is opened; None: at the beginning.
      size: bytes of its items that may be on their way.
      feed: what it reads of a live source; None: it reads by itself.

    Attributes:
      link: to its host; None: there is none at the moment.
      closed: it has ended in the host, with all that it opened.
      deaths: of its hosts.
      heard_at: when it last gave something, or was opened in its host; until then, when it should have been.
    """

    def __init__(
        self, number: int, plan: Plan, site: Site, state: Tree | None, size: int, feed: Inbox[Any] | None
    ) -> None:
        self.number = number
        self.site = site
        self.link: Link | None = None
        self.closed = anyio.Event()
        self.deaths = RestartPolicy()
        self.heard_at = 0.0
        self._state = state
        self._size = size
        self._capacity = plan.worker_capacity(site.num_shards)
        self._begin = BeginState(plan, site, state)
        self._states = StatesIn(plan.worker_logs)
        self._behind: Reference | None = None  # the last item that has arrived
        self.feeding = None if feed is None else LiveForwarding(number, plan.source.name, feed, self._done, site.tasks)
        self.channel = Channel[T](self._begin, self._capacity)
        self.channel.join(site.tasks.session)
        self._capacity = self.channel.capacity
        self.channel.on_freed = self._freed
        self._parcels = InFlightBytes()  # that have arrived and are not dealt with
        self._owed = 0  # items that have been dealt with, and for which there was no credit yet
        self._owed_bytes = 0
        self._leaving = False
        self._patience_ends = 0.0  # for user code to end when it was asked to
        self._closing = False  # in order to be opened anew

    def wire(self, lane: WorkerConnection[T], start: Callable[[], None], filled_by: str) -> Inbox[T]:
        """Return the inbox, whose first pull calls `start`.

        Args:
          filled_by: the name of the stage whose items it gets.
        """
        channel, tasks = self.channel, self.site.tasks
        inbox, meters = channel.inbox, tasks.session.meters
        if meters.on:
            channel.meter = meters.channel(filled_by + BORDER, self.site.shard, channel.capacity)

        def begin() -> RemoteWorker[T]:
            start()
            return self

        inbox.starter = begin
        inbox.stopper = lambda _: self._stopped(lane)

        def closed() -> None:
            tasks.disown(channel.abandon)
            lane.forget(self)

        inbox.on_closed = closed
        tasks.own(channel.abandon)
        return inbox

    # What the host is told --------------------------------------------------------------------------------------------

    def open(self, link: Link) -> None:
        """Let it run at the other end of `link`, from behind the last item that has arrived."""
        state = self._state
        if self._behind is not None:
            behind = self._behind.get()
            state = behind.json()
            self._states.restarted(behind)
        self.link = link
        self._owed = self._owed_bytes = 0  # this host is told of what is held, and sends as if the rest had never been
        self.heard_at = perf_counter() + START_S
        self.deaths.calls.clear()
        site = self.site
        link.send(
            Open(
                self.number,
                site.shard,
                site.num_shards,
                site.epoch,
                dict(site.skipped),
                state,
                items=self._capacity,
                size=self._size,
                held=self._parcels.items,
                held_size=self._parcels.size,
                fed=0 if self.feeding is None else self.feeding.capacity,
                careful=self.deaths.careful,
                culprit=self.deaths.culprit,
            )
        )
        if self.feeding is not None:
            self.feeding.open(link, state)

    @property
    def over(self) -> bool:
        """Whether nothing more is wanted of it, or comes."""
        return self.channel.finished or self._leaving

    def cancel(self) -> None:
        """Ask it to end; do not wait."""
        if not self._leaving:
            self._leaving = True
            self._patience_ends = perf_counter() + CLOSE_S
            self._end_feed()
            if self.link is None:
                self.closed.set()
            else:
                self.link.send(Close(self.number))

    def lost(self) -> None:
        """Its host is gone."""
        self.link = None
        self._closing = False
        if self.feeding is not None:
            self.feeding.lost()

    def given_up(self, fault: Culprit | WorkerDied) -> None:
        """Its hosts die: go on without the call that is at fault, or fail."""
        if isinstance(fault, Culprit):
            self.deaths.culprit = fault
        else:
            self.fail(fault)
            self.gone()

    @property
    def has_room(self) -> bool:
        """Whether it could give something; behind a full border it waits for a quarter of it."""
        return self.channel.held <= self._capacity * 3 // 4 and self._parcels.size <= self._size * 3 // 4

    def calm(self) -> bool:
        """Whether it was closed in order to be opened anew, careful no more."""
        calm = self._closing and not self.over
        self._closing = False
        return calm

    @property
    def held(self) -> int:
        """Items that have arrived and are not dealt with."""
        return self.channel.held

    @property
    def position(self) -> str:
        """Where it stands in the source, for a person."""
        return "" if self._behind is None else self._behind.get().where()

    @property
    def hungry(self) -> bool:
        """Whether it waits for an item of a live source."""
        return self.feeding is not None and self.feeding.hungry

    def gone(self) -> None:
        """Its host is gone, and none will take its place for this worker."""
        self.link = None
        self.closed.set()

    def fail(self, failure: BaseException) -> None:
        """Let the reader have what has arrived, then `failure`."""
        if not self.channel.finished:
            self.channel.fail(failure)
        self._end_feed()

    def _end_feed(self) -> None:
        if self.feeding is not None:
            self.feeding.end()

    async def _stopped(self, lane: WorkerConnection[T]) -> None:
        """End it in its host, and wait for that; where user code there doesn't end, end the host."""
        self.cancel()
        with anyio.move_on_after(self._patience_ends - perf_counter(), shield=True):
            await self.closed.wait()
        if not self.closed.is_set():
            lane.end_host()
            with anyio.CancelScope(shield=True):
                await self.closed.wait()

    def _freed(self) -> None:
        """Give credit for what was dealt with; not for every list."""
        freed = self._parcels.items - self.channel.held
        self._owed += freed
        self._owed_bytes += self._parcels.take(freed)
        items, size = self._owed, self._owed_bytes
        if not items or (self.channel.held and items < self._capacity // 4 and size < self._size // 4):
            return
        self._owed = self._owed_bytes = 0
        if self.link is not None and not self.over:
            self.link.send(Credit(self.number, items, size))

    # What the host says -----------------------------------------------------------------------------------------------

    def opened(self, message: WorkerOpened) -> None:
        """It stands at its beginning, or behind the last item that has arrived."""
        self.heard_at = perf_counter()
        self.channel.bound(message.items)
        self._capacity = self.channel.capacity
        begin = self._states.state(message.begin)
        if self._behind is None:
            self._begin.actual = begin

    def items(self, message: ItemsMessage, link: Link) -> None:
        """Take in items that came over `link`, whether or not that is still there."""
        if self.over:
            return
        packed = message.packed
        try:
            items = link.unpack(packed)
        except BaseException as failure:
            self.fail(self._unreadable(failure))
            return
        states, after = self._states.column(message.states, len(items))
        self._parcels.add(len(items), packed.nbytes)
        self.channel.reserve(len(items))
        self._arrived(Chunk(items, states, after))
        self._calm_down()

    def progress(self, message: ProgressMessage, link: Link) -> None:
        """Take note of progress that came over `link`."""
        if self.over:
            return
        states, after = self._states.column(message.states, 0)
        self._arrived(Chunk((), states, after))
        link.send(Credit(self.number, 0, 0))

    def _arrived(self, chunk: Chunk[T]) -> None:
        self.deaths.gave(len(chunk.items))
        self.heard_at = perf_counter()
        self._behind = chunk.end_reference
        self.channel.post(chunk)
        if self.feeding is not None:
            self.feeding.trim()

    def _calm_down(self) -> None:
        if self.deaths.careful and self.deaths.in_peace and self.link is not None:
            self.deaths.careful, self._closing = False, True
            self.link.send(Close(self.number))
            if self.feeding is not None:
                self.feeding.lost()

    def ended(self, message: Ended) -> None:
        """It has given all that it has."""
        if message.failure is not None:
            self.fail(failure_in(message.failure))
        elif not self.channel.finished:
            self.channel.finish()
        self._end_feed()

    def _done(self) -> int:
        """Return how many items of its feed its state is behind."""
        assert self.feeding is not None
        tree = self._state if self._behind is None else self._behind.get().json()
        done: int = 0 if tree is None else tree[self.feeding.name]
        return done

    def _unreadable(self, failure: BaseException) -> BaseException:
        error = TransportError(
            f"items of shard {self.site.shard} have left its worker's process, and can't be made again here: "
            f"{type(failure).__name__}: {failure}. What unpickles them has to be importable here, too"
        )
        error.__cause__ = failure
        return error
