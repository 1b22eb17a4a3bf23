"""Figures of a stage, a channel, a host and a source's requests, the meters that count them, and their labels.

A figure is declared once: meters write the classes that `stats` gives to users, and hosts send them. Its one writer is
the event loop's thread; any may read it, exact but for the list that is being counted. Times are `perf_counter`'s.

Details are what only one kind of stage counts: cycles of a cache, components of a mixture, bytes copied to a device. A
stage registers a function that reads them (`StageMeter.details_from`). Worker processes send them with other counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

from streamline.core.tree import nbytes
from streamline.errors import printable

How: TypeAlias = Literal["count", "total", "now"]


@dataclass(frozen=True, slots=True)
class Detail:
    """A number that only one kind of stage has.

    Attributes:
      name: what it is; the unit at its end, "_s" or "_bytes".
      value: summed over workers; of "now", their least.
      part: the part of the stage that it is of, such as a component by name; "": all of it.
      how: "count": since the stream was opened. "total": a sum in the state, which continues after a resume. "now": the
        current value in each worker.
    """

    name: str
    value: float
    part: str = ""
    how: How = "count"


Details: TypeAlias = tuple[Detail, ...]

ReadDetails: TypeAlias = Callable[[], Details]
"""Called in any thread; refers to no items, as it lives as long as the meter."""


def later(before: Details, now: Details) -> Details:
    """Return the details of a stage that was opened again, in another pass or process: counts are added up."""
    if not before:
        return now
    known = {(detail.part, detail.name): detail for detail in before}
    for detail in now:
        key = detail.part, detail.name
        if detail.how == "count" and key in known:
            detail = replace(detail, value=known[key].value + detail.value)
        known[key] = detail
    return tuple(known.values())


def together(workers: Iterable[Details]) -> Details:
    """Return the details of all workers of a stage."""
    found: dict[tuple[str, str], Detail] = {}
    for detail in (detail for details in workers for detail in details):
        key = detail.part, detail.name
        if key in found:
            other = found[key].value
            value = min(other, detail.value) if detail.how == "now" else other + detail.value
            detail = replace(detail, value=value)
        found[key] = detail
    return tuple(found.values())


def since(earlier: Details, now: Details) -> Details:
    """Return what was added since `earlier`; details that aren't counts keep their value."""
    were = {(detail.part, detail.name): detail.value for detail in earlier}
    found: list[Detail] = []
    for detail in now:
        if detail.how == "count":
            gained = detail.value - were.get((detail.part, detail.name), 0)
            detail = replace(detail, value=max(0, gained))
        found.append(detail)
    return tuple(found)


Executor: TypeAlias = Literal["inline", "task", "thread"]
"""Where a stage does its work: in the event loop, which it blocks; awaited; in threads."""

HostKind: TypeAlias = Literal["process", "thread"]

FROM_HOST = " (border)"
"""Suffix of the name of a channel whose items come from a host; the stage may fill another channel there."""


def label(name: str, kind: str) -> str:
    """Return a stage as it is printed: "map(decode)"; "read_jsonl" if its name says no more than its kind."""
    if kind == "numbering":  # what makes the generators of .map(seed=)
        return f"rng({name.removesuffix('.rng')})"
    return kind if name.startswith(kind) or kind.endswith(f"_{name}") else printable(f"{kind}({name})")


def host_label(number: int, kind: HostKind, pid: int | None, node: str = "", *, shared: bool = False) -> str:
    """Return a host as it is printed: "process 2, pid 4711", "shared process 2 on node7, pid 4711", "thread 0"."""
    whose, where = "shared " if shared else "", f" on {node}" if node else ""
    process = f", pid {pid}" if kind == "process" and pid else ""
    return f"{whose}{kind} {number}{where}{process}"


GROWING = frozenset({
    "items", "bytes", "copied_bytes", "slabs_made", "slabs_reused", "errors", "padded", "requests", "retries",
    "cache_hits", "cache_misses", "cache_bytes", "elapsed_s", "consumer_wait_s", "consumer_held_s", "ranks_wait_s",
    "busy_s", "held_s", "wait_input_s", "wait_output_s", "arrival_s", "looked_s", "collecting_s", "gil_looks",
    "gil_waits", "quota_periods", "quota_throttled", "memory_wait_s", "cpu_s", "core_wait_s",
})  # fmt: skip
"""Fields that only grow; not depths, peaks, pids, memory."""

KEYS = {
    "stages": "name", "channels": "name", "hosts": "number", "reads": "name", "per_worker": "shard",
    "threads": "number",
}  # fmt: skip
"""Fields that are tuples of figures, and by which field these are identified."""


class Summable:
    """Figures, a dataclass: `+` and `-` apply to fields that grow; the others are the left operand's."""

    grows: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        fields = vars(cls).get("__annotations__", {})
        cls.grows = (*cls.grows, *(name for name in fields if name in GROWING))
        cls.parts = (*cls.parts, *(name for name in fields if name in KEYS and fields[name].startswith("tuple")))

    def __add__(self, other: Self) -> Self:
        return total((self, other))

    def __sub__(self, earlier: Summable) -> Self:
        """Return what was added since `earlier`, a reading of the same figures."""
        gained = self.copy()
        now, before, found = vars(self), vars(earlier), vars(gained)  # quickly: of each worker of each stage
        for name in self.grows:
            more = now[name] - before[name]
            found[name] = 0.0 if more < 0 and name.endswith("_s") else more
        for name in self.parts:
            key = KEYS[name]
            known = {getattr(part, key): part for part in before[name]}
            pairs = [(part, known.get(getattr(part, key))) for part in now[name]]
            found[name] = tuple(part if was is None else part - was for part, was in pairs)
        if found.get("details"):
            found["details"] = since(before["details"], now["details"])
        return gained

    def copy(self, **changes: Any) -> Self:
        found = object.__new__(type(self))
        vars(found).update(vars(self), **changes)
        return found

    def add(self, more: Summable) -> None:
        """Add what was counted elsewhere."""
        for name in more.grows:
            setattr(self, name, getattr(self, name) + getattr(more, name))


T = TypeVar("T", bound=Summable)


def total(parts: Sequence[T]) -> T:
    """Return the sum of what grows; all else is the first part's."""
    found = dict(vars(parts[0]))
    found |= {name: sum(getattr(part, name) for part in parts) for name in parts[0].grows}
    if "details" in found:
        found["details"] = together(part.details for part in parts)  # type: ignore[attr-defined]
    return type(parts[0])(**found)


@dataclass(kw_only=True)
class StageStats(Summable):
    """One stage, in one worker or all of them together, since the stream was opened.

    Attributes:
      name: the stage's, unique in the pipeline.
      kind: "map", "read_jsonl", "merge".
      shard: of one worker, its own; downstream of the merge, the rank.
      workers: how many of it run on this rank: figures in seconds are their sum.
      concurrency: calls that one of them may make at once.
      items: that came out of it.
      bytes: of those, estimated from samples; `streamline.core.tree.nbytes` says what is counted.
      busy_s: at its own work: in the user's function, in reading. Summed over workers and calls, so it may exceed the
        time that has passed; an awaited call counts from its start to its result.
      wait_input_s: waiting for an item from upstream; of a concurrent stage, summed over the calls that it might make.
      wait_output_s: waiting for room downstream; likewise.
      errors: items that it skipped.
      held_s: the part of `busy_s` that blocked the event loop: sync functions that are called inline.
      executor: where it does its work.
      ordered: whether items leave in the order of their inputs; of a merge, whether it is a strict one.
      per_worker: the same of each worker, by shard; of one worker, nothing.
      hosts: threads or processes in which its workers run; 0: the stream's own event loop.
      details: what only this kind of stage counts; see docs/seeing.md.
    """

    name: str
    kind: str
    shard: int = 0
    workers: int = 1
    concurrency: int = 1
    items: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    wait_input_s: float = 0.0
    wait_output_s: float = 0.0
    errors: int = 0
    held_s: float = 0.0
    executor: Executor = "inline"
    ordered: bool = True
    per_worker: tuple[StageStats, ...] = ()
    hosts: int = 0
    details: Details = ()

    def detail(self, name: str, part: str = "") -> float:
        """Return a number that only this kind of stage has: `detail("cycle")`, `detail("served", "web")`.

        Args:
          part: the name of a component of a mixture, say; "": the whole stage.

        Raises:
          KeyError: it has no such number; the message says which it has.
        """
        for each in self.details:
            if (each.name, each.part) == (name, part):
                return each.value
        there = ", ".join(_name_of(each.name, each.part) for each in self.details) or "none"
        raise KeyError(f"{self} has no detail {_name_of(name, part)}; it has {there}")

    def add_hold(self, seconds: float) -> None:
        self.busy_s += seconds
        self.held_s += seconds

    def add_wait(self, doing: Doing, seconds: float) -> None:
        if doing == "wait_input":
            self.wait_input_s += seconds
        else:
            self.wait_output_s += seconds

    @property
    def slots(self) -> int:
        """Calls that all workers together may have at work at once."""
        return self.workers * self.concurrency

    def __str__(self) -> str:
        return label(self.name, self.kind)


def _name_of(detail: str, part: str) -> str:
    return f"{detail!r} of {part!r}" if part else f"{detail!r}"


@dataclass(kw_only=True)
class ChannelStats(Summable):
    """One channel, or those of all workers.

    Attributes:
      name: of the stage that fills it; with the suffix " (border)" if its items come from a host.
      shard: of the worker, for one channel.
      items: that went through.
      depth: items in them now; after a concurrent map, those that calls work on count too.
      peak: the highest depth of one of them.
      capacity: of one of them.
      channels: how many there are: one a worker, or one.
    """

    name: str
    shard: int = 0
    items: int = 0
    depth: int = 0
    peak: int = 0
    capacity: int = 0
    channels: int = 1

    def note_held(self, items: int, capacity: int) -> None:
        self.depth, self.capacity = items, capacity
        if items > self.peak:
            self.peak = items


@dataclass(kw_only=True)
class HostStats(Summable):
    """A thread or a process in which workers run, since the stream was opened.

    Attributes:
      number: among its backend's, from 0 on.
      kind: "process" or "thread".
      pid: of its process, the last one's after a restart; None: it hasn't started.
      node: the machine that it runs on, or last ran on; "": this one, or it hasn't started.
      shards: of its workers.
      items: of theirs that have arrived.
      bytes: of those, pickled, with their buffers; 0 of a thread, where nothing is copied.
      copied_bytes: of those, that were copied to be sent; the others were written where they are read.
      slabs_made: slabs of shared memory in which it sent items for the first time; 0 where nothing is shared.
      slabs_reused: how often it sent items in a slab again, in place of a new one.
      busy_s: that its stages blocked its event loop.
      wait_input_s: that its stages waited for items, summed over stages and calls.
      wait_output_s: that they waited for room, likewise.
      arrival_s: that taking its items in blocked the stream's own event loop.
      restarts: how often it was replaced after its end.
      resident_bytes: its memory, shared pages included, when last read; 0 of a thread: it is this process's.
      alive: it has been started, and hasn't ended.
      shared: by the ranks of this machine; the rank that owns it counts its memory.
    """

    number: int
    kind: HostKind
    pid: int | None = None
    shards: tuple[int, ...] = ()
    items: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    slabs_made: int = 0
    slabs_reused: int = 0
    busy_s: float = 0.0
    wait_input_s: float = 0.0
    wait_output_s: float = 0.0
    arrival_s: float = 0.0
    restarts: int = 0
    resident_bytes: int = 0
    alive: bool = True
    node: str = ""
    shared: bool = False

    def count_list(self, items: int, size: int, copied_bytes: int, slabs: tuple[int, int], took_s: float) -> None:
        """Count a list of items, in `size` bytes, and slabs: new and reused ones."""
        self.items += items
        self.bytes += size
        self.copied_bytes += copied_bytes
        self.slabs_made += slabs[0]
        self.slabs_reused += slabs[1]
        self.arrival_s += took_s

    def see(self, pid: int | None, node: str, resident_bytes: int = 0) -> None:
        """Set its process, its machine and its memory; unknown ones keep their last value."""
        self.pid, self.node = pid or self.pid, node or self.node
        self.resident_bytes = resident_bytes or self.resident_bytes

    @property
    def name(self) -> str:
        """Its name in messages: "process 2, pid 4711", "shared process 2 on node7, pid 4711", "thread 0"."""
        return host_label(self.number, self.kind, self.pid, self.node, shared=self.shared)


@dataclass
class ReadStats(Summable):
    """What one source has asked of servers, in all hosts together, since the stream was opened.

    Attributes:
      name: of the source.
      requests: that were sent, retries and redirects included.
      retries: each after a failure: a dropped or stalled connection, a busy server.
      bytes: that arrived; bytes that arrived twice count twice.
      cache_hits: objects, or ranges of one, that were read from `cache_dir`.
      cache_misses: those that weren't there, and were requested.
      cache_bytes: that were read from there.
      in_flight: requests that are sent and not answered now.
    """

    name: str = ""
    requests: int = 0
    retries: int = 0
    bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0
    in_flight: int = 0


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


Doing: TypeAlias = Literal["work", "wait_input", "wait_output"]

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


class SizeEstimate:
    """How many bytes the items of a stage have, from the sizes of a few."""

    __slots__ = ("_bytes", "_item_bytes", "_items", "_samples")

    def __init__(self) -> None:
        self._bytes = 0  # of the items that had come at the last sample
        self._items = 0
        self._item_bytes = 0.0  # of one that has come since
        self._samples: list[int] = []

    def of(self, items: int) -> int:
        """Return the bytes of the first `items`."""
        return int(self._bytes + (items - self._items) * self._item_bytes)

    def sample(self, item: Any, items: int) -> None:
        """Measure an item, after `items` of them."""
        if self._samples:
            self._bytes, self._items = self.of(items), items
        self._samples = [*self._samples[-7:], _size(item)]  # the last ones: sizes may drift
        self._item_bytes = sum(self._samples) / len(self._samples)


class StageMeter:
    """One stage in one worker.

    Attributes:
      figures: what it has counted; `totals` adds bytes and details.
      begun: when the segment of work began that blocks the loop now; None: none does.
      slots: when each running awaited or threaded call began; 0.0: none.
      loop: in which its inline functions run, with those of the others.
      host: in which the worker runs; None: in the stream's own event loop.
    """

    __slots__ = (
        "_lists", "_next_sample", "_read", "_sizes", "_waits", "begun", "figures", "hooks", "host", "loop", "slots",
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
        self._sizes = SizeEstimate()
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
        self.figures.items += len(items)
        self._lists += 1
        if self._lists >= self._next_sample and items:
            self._next_sample += min(self._lists, SAMPLE_LISTS)
            self._sizes.sample(items[0], self.figures.items)

    @property
    def bytes(self) -> int:
        """Of the items, estimated from samples."""
        return self.figures.bytes + self._sizes.of(self.figures.items)

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
        return self.figures.copy(bytes=self.bytes, details=self.details)

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
