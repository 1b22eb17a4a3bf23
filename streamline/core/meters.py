"""Meters: what counts the figures of a run: of its stages, channels, hosts, consumer, and its sources' requests.

Meters count once a list, or once an awaited call, never once an item. `collect` in `streamline.observe.stats` takes
their values at one moment. Each has one writer, the event loop's thread or the consumer's, and may be read in any
thread: it is exact but for the list that is being counted. Times are those of `time.perf_counter`.

A stage registers a function that reads its details (`StageMeter.details_from`), called only when figures are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from streamline.core.figures import ChannelStats, Details, Doing, HostKind, HostStats, ReadStats, StageStats, later
from streamline.core.tree import nbytes

ReadDetails: TypeAlias = Callable[[], Details]
"""Called in any thread; refers to no items, as it lives as long as the meter."""


class HostMeter:
    """One host of one run. Its writer is the run's event loop.

    `pid`, `resident`, `stacks` and `node` return what is known now; None, 0 and "": nothing.
    """

    def __init__(
        self,
        number: int,
        kind: HostKind,
        pid: Callable[[], int | None],
        resident: Callable[[], int] = lambda: 0,
        stacks: Callable[[], str] = lambda: "",
        node: Callable[[], str] = lambda: "",
        *,
        shared: bool = False,
    ) -> None:
        self.figures = HostStats(number=number, kind=kind, shared=shared, alive=False)
        self.shards: set[int] = set()
        self.stacks = stacks
        self._pid, self._resident, self._node = pid, resident, node

    def __str__(self) -> str:
        self.figures.see(self._pid(), self._node())
        return self.figures.name

    def see(self) -> None:
        """Read its process, machine and memory; of one that has ended, the last values stay. From any thread."""
        self.figures.see(self._pid(), self._node(), self._resident() if self.figures.alive else 0)

    def note_end(self) -> None:
        """Note that the host has ended."""
        self.see()
        self.figures.alive = False


Observer: TypeAlias = Callable[["StageMeter", Doing, float, float], None]
"""Called with what a meter counts: meter, what was done, began, ended."""

HOLD_S = 0.1
"""A sync function that blocks the consumer's event loop for so long is worth a hint."""

SAMPLE_LISTS = 64
"""Lists between two samples of an item's size; at first, after 1, 2, 4, 8 ... lists."""


class LoopMeter:
    """The event loop in which all inline functions run, and how long they blocked it; `thread`: the system's number."""

    __slots__ = ("held_s", "thread")

    def __init__(self) -> None:
        self.held_s = 0.0
        self.thread: int | None = None


class MeterHooks:
    """Functions that are called with what the stages of a run count.

    Attributes:
      observer: called with every segment of work and of waiting; a trace, say. None: the usual case.
      on_observed: called, in the tracing thread, when a trace begins and when it ends.
      on_hold: called with a segment of at least `HOLD_S` that blocked the stream's own event loop; None: not called.
    """

    __slots__ = ("observer", "on_hold", "on_observed")

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.on_observed: list[Callable[[], None]] = []
        self.on_hold: Callable[[StageMeter, float], None] | None = None

    def observe(self, observer: Observer | None) -> None:
        self.observer = observer
        for notify in list(self.on_observed):
            notify()


class Ongoing(NamedTuple):
    """What a stage in a worker does now, with the times at which it began.

    Attributes:
      begun: the segment of work that blocks the event loop; None: none does.
      slots: the awaited or threaded calls; 0.0: none.
      waits: by slot.
    """

    begun: float | None = None
    slots: tuple[float, ...] = ()
    waits: tuple[tuple[int, tuple[Doing, float]], ...] = ()

    def shifted(self, by: float) -> Ongoing:
        """Return the same with the times of a clock that is `by` seconds ahead."""
        return Ongoing(
            None if self.begun is None else self.begun + by,
            tuple(began and began + by for began in self.slots),
            tuple((slot, (doing, began + by)) for slot, (doing, began) in self.waits),
        )


class StageMeter:
    """One stage in one worker.

    Attributes:
      figures: what it has counted; `totals` adds details.
      begun: when the segment of work began that blocks the loop now; None: none does.
      slots: when each running awaited or threaded call began; 0.0: none.
      loop: in which its inline functions run, with those of the others.
      host: in which the worker runs; None: in the stream's own event loop.
    """

    __slots__ = (
        "_item_bytes", "_lists", "_next_sample", "_read", "_sizes", "_waits", "begun", "figures", "hooks", "host",
        "loop", "slots",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        kind: str,
        shard: int,
        concurrency: int = 1,
        loop: LoopMeter | None = None,
        hooks: MeterHooks | None = None,
        host: HostMeter | None = None,
    ) -> None:
        self.figures = StageStats(name=name, kind=kind, shard=shard, concurrency=concurrency)
        self.begun: float | None = None
        self.slots: list[float] = []
        self.loop = loop or LoopMeter()
        self.hooks = hooks or MeterHooks()
        self.host = host
        self._waits: dict[int, tuple[Doing, float]] = {}
        self._sizes: list[int] = []  # of the last samples: sizes may drift
        self._item_bytes = 0.0
        self._lists = 0
        self._next_sample = 1
        self._read: ReadDetails = tuple

    def __str__(self) -> str:
        return str(self.figures)

    @property
    def since(self) -> float | None:
        """When the oldest running call began; None: none runs."""
        if self.begun is not None:
            return self.begun
        return min(filter(None, list(self.slots)), default=None)

    def count_work(self, began: float, ended: float) -> None:
        """Count a segment of awaited or threaded work."""
        self.figures.busy_s += ended - began
        if self.hooks.observer is not None:
            self.hooks.observer(self, "work", began, ended)

    def count_hold(self, began: float, ended: float) -> None:
        """Count a segment of work that blocked the event loop."""
        self.begun = None
        spent = ended - began
        self.figures.add_hold(spent)
        self.loop.held_s += spent
        hooks = self.hooks
        if hooks.observer is not None:
            hooks.observer(self, "work", began, ended)
        if spent >= HOLD_S and hooks.on_hold is not None and self.host is None:
            hooks.on_hold(self, spent)

    def count_wait(self, doing: Doing, began: float, ended: float) -> None:
        """Count a wait for an item from upstream ("wait_input"), or for room downstream ("wait_output")."""
        self.figures.add_wait(doing, ended - began)
        if self.hooks.observer is not None:
            self.hooks.observer(self, doing, began, ended)

    def wait_begins(self, doing: Doing, slot: int = 0) -> None:
        """Record that a wait begins; of several at once, each has a slot."""
        self._waits[slot] = doing, perf_counter()

    def wait_ends(self, slot: int = 0) -> None:
        """Count the wait in a slot."""
        doing, began = self._waits.pop(slot)
        self.count_wait(doing, began, perf_counter())

    def count(self, items: Sequence[Any]) -> None:
        """Count a list that came out of the stage, and sometimes sample the size of an item."""
        self._lists += 1
        if self._lists >= self._next_sample and items:
            self._next_sample += min(self._lists, SAMPLE_LISTS)
            self._sizes = [*self._sizes[-7:], _size(items[0])]
            self._item_bytes = sum(self._sizes) / len(self._sizes)
        self.figures.add_items(len(items), round(len(items) * self._item_bytes))

    def details_from(self, read: ReadDetails) -> None:
        """Read details from this function; counts of an earlier one are kept. At the stage's first pull."""
        self.figures.details, self._read = self.details, read

    @property
    def details(self) -> Details:
        """What only this kind of stage counts. From any thread."""
        return later(self.figures.details, self._read())

    @property
    def ongoing(self) -> Ongoing:
        """What it does now. From any thread."""
        return Ongoing(self.begun, tuple(self.slots), tuple(self._waits.items()))

    def totals(self) -> StageStats:
        """Return what was counted, without what is ongoing. From any thread."""
        return self.figures.copy(details=self.details)

    def until(self, now: float) -> StageStats:
        """Return what was counted up to `now`, with what is ongoing. From any thread."""
        found = self.totals()  # first: what ends meanwhile is missed once rather than counted twice
        begun, slots, waits = self.ongoing
        if begun is not None:
            found.add_hold(max(0.0, now - begun))
        found.busy_s += sum(max(0.0, now - began) for began in slots if began)
        for _, (doing, began) in waits:
            found.add_wait(doing, now - began)
        return found

    def show(self, gained: StageStats, ongoing: Ongoing) -> None:
        """Add what a meter elsewhere has counted, and show what it does; skipped items are counted here."""
        figures = self.figures
        errors, details = figures.errors, later(figures.details, gained.details)
        figures.add(gained)
        figures.errors, figures.details = errors, details
        figures.concurrency, figures.executor, figures.ordered = gained.concurrency, gained.executor, gained.ordered
        self._go_on(ongoing)

    def stop(self, now: float) -> None:
        """Count what is ongoing elsewhere up to `now`, and end it."""
        self.figures = self.until(now)
        self._go_on(Ongoing())

    def _go_on(self, ongoing: Ongoing) -> None:
        self.begun, self.slots, self._waits = ongoing.begun, list(ongoing.slots), dict(ongoing.waits)


class HoldTimer:
    """`with HoldTimer(meter):` counts a segment of work that blocks the event loop."""

    __slots__ = ("_began", "_meter")

    def __init__(self, meter: StageMeter | None) -> None:
        self._meter = meter
        self._began = 0.0

    def __enter__(self) -> None:
        if self._meter is not None:
            self._meter.begun = self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        if meter is not None:
            meter.count_hold(self._began, perf_counter())


class Working:
    """`with Working(meter):` counts a segment of awaited work; a stage has one at a time."""

    __slots__ = ("_meter",)

    def __init__(self, meter: StageMeter | None) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        if self._meter is not None:
            self._meter.slots = [perf_counter()]

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        if meter is not None:
            (began,), meter.slots = meter.slots, []
            meter.count_work(began, perf_counter())


def _size(item: Any) -> int:
    """Return the size of an item in bytes; a failure to measure must not end a run."""
    try:
        return nbytes(item)
    except Exception:  # an attribute of the user's, a container that holds itself
        return sys.getsizeof(item)


# Of a run ------------------------------------------------------------------------------------------------------------

QUICK_S = 0.001
"""Of bodies of the consumer's loop that take less, one in `BODIES_PER_SAMPLE` is timed."""

BODIES_PER_SAMPLE = 8


class ConsumerMeter:
    """The training loop, as seen from the pipeline.

    Attributes:
      items: that it was given, in whole lists: up to a list more than it has seen.
      ranks_wait_s: the part of its waits in which other ranks had not said whether they have another item.
      waiting_since: when the current wait began; None: it doesn't wait.
      held_s: how long its loop's body blocked the event loop that it shares with the pipeline.
      closed_at: when the stream ended or was closed; None: it is open.
    """

    __slots__ = (
        "_body", "_quick", "_unseen", "closed_at", "held_s", "items", "loop", "opened_at", "ranks_wait_s", "wait_s",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, opened_at: float, loop: LoopMeter | None = None) -> None:
        self.opened_at = opened_at
        self.items = 0
        self.wait_s = 0.0
        self.ranks_wait_s = 0.0
        self.waiting_since: float | None = None
        self.held_s = 0.0
        self.closed_at: float | None = None
        self.loop = loop or LoopMeter()
        self._body: tuple[float, float] | None = None
        self._quick = False
        self._unseen = 0

    def wait_begins(self, now: float) -> None:
        self.waiting_since = now

    def wait_ends(self, now: float) -> None:
        if self.waiting_since is not None:
            self.wait_s += now - self.waiting_since
            self.waiting_since = None

    def wait_s_until(self, now: float) -> float:
        """Return how long it has waited up to `now`, the current wait included."""
        since = self.waiting_since
        return self.wait_s + (0.0 if since is None else max(0.0, now - since))

    def body_begins(self, now: float) -> bool:
        """Begin to time its loop's body, in the pipeline's event loop; return whether this one is timed.

        Of quick bodies, one in `BODIES_PER_SAMPLE` is, and stands for the others: timing one costs as much as it takes.
        """
        self._unseen += 1
        if self._quick and self._unseen < BODIES_PER_SAMPLE:
            return False
        self._body = now, self.loop.held_s
        return True

    def body_ends(self) -> None:
        """End the timing: the body asks for more, or the event loop runs other tasks, which don't count."""
        if self._body is not None:
            (began, held_s), self._body = self._body, None
            spent = max(0.0, perf_counter() - began - (self.loop.held_s - held_s))
            self.held_s += spent * self._unseen
            self._unseen = 0
            self._quick = spent < QUICK_S

    def close(self, unseen: int = 0) -> None:
        """Stop the clock, and don't count items that it will never see. Idempotent."""
        self.items -= unseen
        if self.closed_at is None:
            self.closed_at = perf_counter()


class Meters:
    """All meters of one run. A stage that is opened again (by a repeat, say) keeps its meter.

    Attributes:
      names: of all stages and channels that have a meter.
      order: names of the stages in the plan's order; others come after them.
      on: False: stages and channels aren't counted; for measuring what that costs.
      hosts: in which workers run.
      on_first_list: called with these meters when the consumer gets its first list; None: not called.
      first: what it returned, the figures of the warm-up; None: the consumer has no list yet.
    """

    def __init__(self, opened_at: float, *, on: bool = True) -> None:
        self.stages: dict[tuple[str, int], StageMeter] = {}
        self.channels: dict[tuple[str, int], ChannelStats] = {}
        self.traffics: dict[tuple[str, int | None], Traffic] = {}
        self.names: set[str] = set()
        self.consumer = ConsumerMeter(opened_at)
        self.order: list[str] = []
        self.on = on
        self.hosts: list[HostMeter] = []
        self.hooks = MeterHooks()
        self._host: HostMeter | None = None
        self.on_first_list: Callable[[Meters], Any] | None = None
        self.first: Any = None

    def within(self, host: HostMeter) -> Meters:
        """Return meters for a host that is a thread of this process; they count into these.

        Each stage in each worker has a meter of its own, so each still has one writer.
        """
        part = Meters(self.consumer.opened_at, on=self.on)
        part.stages, part.channels, part.traffics = self.stages, self.channels, self.traffics
        part.hooks, part._host = self.hooks, host
        return part

    @property
    def loop(self) -> LoopMeter:
        """The event loop in which all inline functions run, and the body of an `async for`."""
        return self.consumer.loop

    def stage(self, name: str, kind: str, shard: int, concurrency: int = 1) -> StageMeter:
        meter = self.stages.get((name, shard))
        if meter is None:
            self.names.add(name)
            meter = StageMeter(name, kind, shard, concurrency, self.loop, self.hooks, self._host)
            self.stages[name, shard] = meter
        return meter

    def channel(self, name: str, shard: int, capacity: int) -> ChannelStats:
        """Return the meter of the channel that the stage `name` of a worker fills."""
        meter = self.channels.get((name, shard))
        if meter is None:
            self.names.add(name)
            meter = self.channels[name, shard] = ChannelStats(name=name, shard=shard, capacity=capacity)
        return meter

    def traffic(self, name: str) -> Traffic:
        """Return the counter of what the source `name` asks of servers, in this host."""
        number = None if self._host is None else self._host.figures.number
        return self.traffics.setdefault((name, number), Traffic(name))

    def end_warm_up(self) -> None:
        """Let figures count from now on: what was before was the warm-up."""
        self.first = None if self.on_first_list is None else self.on_first_list(self)

    def count_list(self, items: int) -> None:
        if items and not self.consumer.items:
            self.end_warm_up()
        self.consumer.items += items


class Traffic(ReadStats):
    """What one source asks of servers, in one event loop, its only writer. May be read in any thread."""

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request, which is in flight meanwhile."""
        self.requests += 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
