"""Figures of a stage, a channel, a host and a source's requests, the meters that count them, and their labels.

A figure is declared once: meters write the classes that `stats` gives to users, and hosts send them. Its one writer is
the event loop's thread; any may read it, exact but for the list that is being counted. Times are `perf_counter`'s.

Details are what only one kind of stage counts: cycles of a cache, components of a mixture, bytes copied to a device. A
stage registers a function that reads them (`StageMeter.details_from`), called only when figures are read. They travel
from worker processes with the other counts, are aggregated over workers here, and are shown by name.
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
      value: of all workers together: their sum, or of "now" the least.
      part: which part of the stage it is of, the name of a component, say; "": all of it.
      how: "count": since the stream was opened. "total": a sum that the state has, so that it goes on after a resume.
        "now": how it stands, each worker its own.
    """

    name: str
    value: float
    part: str = ""
    how: How = "count"


Details: TypeAlias = tuple[Detail, ...]

ReadDetails: TypeAlias = Callable[[], Details]
"""Called in any thread; keeps no items alive, for it stays as long as the meter."""


def later(before: Details, now: Details) -> Details:
    """Return the details of a stage that was opened again, in another pass or another process: counts go on."""
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
    """Return what was added since `earlier`; what is no count is as it stands."""
    were = {(detail.part, detail.name): detail.value for detail in earlier}
    return tuple(
        replace(detail, value=max(0, detail.value - were.get((detail.part, detail.name), 0)))
        if detail.how == "count"
        else detail
        for detail in now
    )


Executor: TypeAlias = Literal["inline", "task", "thread"]
"""Where a stage does its work: in the event loop, which stands still meanwhile; awaited; in threads."""

HostKind: TypeAlias = Literal["process", "thread"]

FROM_HOST = " (border)"
"""Suffix of the name of a channel whose items come from a host; the stage may fill another channel there."""


def label(name: str, kind: str) -> str:
    """Return a stage as it is printed: "map(decode)"; where its name says no more than its kind, "read_jsonl"."""
    if kind == "numbering":  # what makes the generators of .map(seed=)
        return f"rng({name.removesuffix('.rng')})"
    return kind if name.startswith(kind) or kind.endswith(f"_{name}") else printable(f"{kind}({name})")


def host_label(number: int, kind: HostKind, pid: int | None, node: str = "", *, shared: bool = False) -> str:
    """Return a host as it is printed: "process 2, pid 4711", "shared process 2 on node7, pid 4711", "thread 0"."""
    whose = "shared " if shared else ""
    return (
        f"{whose}{kind} {number}"
        + (f" on {node}" if node else "")
        + (f", pid {pid}" if kind == "process" and pid else "")
    )


GROWING = frozenset({
    "items", "bytes", "copied_bytes", "slabs_made", "slabs_reused", "errors", "padded", "requests", "retries",
    "cache_hits", "cache_misses", "cache_bytes", "elapsed_s", "consumer_wait_s", "consumer_held_s", "ranks_wait_s",
    "busy_s", "held_s", "wait_input_s", "wait_output_s", "arrival_s", "looked_s", "collecting_s", "gil_looks",
    "gil_waits", "quota_periods", "quota_throttled", "memory_wait_s", "cpu_s", "core_wait_s",
})  # fmt: skip
"""Fields that grow. The others, depths, peaks, pids, memory, are as they stand."""

KEYS = {
    "stages": "name", "channels": "name", "hosts": "number", "reads": "name", "per_worker": "shard",
    "threads": "number",
}  # fmt: skip
"""Fields that are tuples of figures, each with the field of those that tells them apart."""


class Summable:
    """Figures, a dataclass: `+` and `-` are of its fields that grow; all else is as on the left."""

    grows: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        fields = vars(cls).get("__annotations__", {})
        cls.grows = (*cls.grows, *(name for name in fields if name in GROWING))
        cls.parts = (*cls.parts, *(name for name in fields if name in KEYS and fields[name].startswith("tuple")))

    def __add__(self, other: Self) -> Self:
        return total((self, other))

    def __sub__(self, earlier: Summable) -> Self:
        """Return what was added since `earlier`, at which the same was counted."""
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
        """Count what was counted elsewhere, too."""
        for name in more.grows:
            setattr(self, name, getattr(self, name) + getattr(more, name))


T = TypeVar("T", bound=Summable)


def total(parts: Sequence[T]) -> T:
    """Return the figures of all parts together: sums of what grows, and all else as in the first one."""
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
      workers: how many of it run on this rank: its figures in seconds are of all of them together.
      concurrency: calls that one of them may have at work at once.
      items: that came out of it.
      bytes: of those, estimated from samples; `streamline.core.tree.nbytes` says what is counted.
      busy_s: at its own work: in the user's function, in reading. Summed over workers and calls, so it may exceed the
        time that has passed; an awaited call counts from its start to its result.
      wait_input_s: waiting for an item from before it; of a concurrent stage, summed over the calls that it might make.
      wait_output_s: waiting for room downstream; likewise.
      errors: items that it skipped.
      held_s: the part of `busy_s` in which the event loop stood still: sync functions that are called inline.
      executor: where it does its work.
      ordered: whether items leave in the order of their inputs; of a merge, whether it is a strict one.
      per_worker: the same of each worker, by shard; of one worker, nothing.
      hosts: threads or processes in which its workers run; 0: they run in the stream's own event loop.
      details: what only this kind of stage counts; docs/seeing.md says which, and what they are.
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
          part: of what: a component of a mixture, by its name; "": of the whole stage.

        Raises:
          KeyError: it has no such number; the message says which it has.
        """
        for each in self.details:
            if (each.name, each.part) == (name, part):
                return each.value
        there = ", ".join(_name_of(each.name, each.part) for each in self.details) or "none"
        raise KeyError(f"{self} has no detail {_name_of(name, part)}; it has {there}")

    def add_hold(self, seconds: float) -> None:
        """Count work in which the event loop stood still."""
        self.busy_s += seconds
        self.held_s += seconds

    def add_wait(self, doing: Doing, seconds: float) -> None:
        """Count a wait for an item from before the stage, or for room downstream."""
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
      shard: of one worker's, the worker's.
      items: that went through.
      depth: items in them now; after a concurrent map, its inputs at work count too.
      peak: the most that were in one of them at once.
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


@dataclass(kw_only=True)
class HostStats(Summable):
    """A thread or a process in which workers run, since the stream was opened.

    Attributes:
      number: among its backend's, from 0 on.
      kind: "process" or "thread".
      pid: of its process, the last one's if there were several; None: it hasn't started.
      node: the machine that it runs on, or ran on at last; "": this one, or it hasn't started.
      shards: of its workers.
      items: of theirs that have arrived.
      bytes: of those, pickled, with their buffers; 0 of a thread, where nothing is copied.
      copied_bytes: of those, that were copied to be sent; the others were written where they are read.
      slabs_made: slabs of shared memory that came from it with items for the first time; 0 where nothing is shared.
      slabs_reused: how many times one came again: memory that needn't be made.
      busy_s: that its event loop was held by its stages.
      wait_input_s: that its stages waited for items, summed over stages and calls.
      wait_output_s: that they waited for room, likewise.
      arrival_s: that the stream's own event loop was held by taking its items in.
      restarts: how many times another one has taken its place.
      resident_bytes: memory that it holds, or held when it was last seen, shared pages included; 0 of a thread: it is
        this process's.
      alive: it has been started, and hasn't ended.
      shared: by the ranks of this machine; its memory is counted by the one that owns it.
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

    def arrived(self, items: int, size: int, copied_bytes: int, slabs: tuple[int, int], took_s: float) -> None:
        """Count a list of items that has come from it, in `size` bytes, and slabs: new ones, and those used again."""
        self.items += items
        self.bytes += size
        self.copied_bytes += copied_bytes
        self.slabs_made += slabs[0]
        self.slabs_reused += slabs[1]
        self.arrival_s += took_s

    def see(self, pid: int | None, node: str, resident_bytes: int = 0) -> None:
        """Note its process, its machine and its memory; what isn't known now stays what it was at last."""
        self.pid, self.node = pid or self.pid, node or self.node
        self.resident_bytes = resident_bytes or self.resident_bytes

    @property
    def name(self) -> str:
        """How messages call it: "process 2, pid 4711", "shared process 2 on node7, pid 4711", "thread 0"."""
        return host_label(self.number, self.kind, self.pid, self.node, shared=self.shared)


@dataclass
class ReadStats(Summable):
    """What one source has asked of servers, in all hosts together, since the stream was opened.

    Attributes:
      name: of the source.
      requests: that were sent, tries again and redirects among them.
      retries: tries again, each after a failure: a drop, a stall, a busy server.
      bytes: that arrived; what arrived twice counts twice.
      cache_hits: objects, or ranges of one, that were read from `cache_dir`.
      cache_misses: those that weren't there, and were asked for.
      cache_bytes: that were read from there.
      in_flight: requests, as it stands: sent, and no answer has begun to come.
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

    Args:
      pid: returns that of its process; None: there is none yet.
      resident: returns how many bytes of memory it holds; 0: unknown.
      stacks: returns what its threads are at, for a person; "": unknown.
      node: returns the machine that it runs on; "": this one, or none yet.
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
        """Note what can be seen of it now; of one that has ended, that is what was seen at last. From any thread."""
        self.figures.see(self._pid(), self._node(), self._resident() if self.figures.alive else 0)

    def gone(self) -> None:
        """There is no host for now: its pid, its machine and its memory stay what they were at last."""
        self.see()
        self.figures.alive = False


Doing: TypeAlias = Literal["work", "wait_input", "wait_output"]

Observer: TypeAlias = Callable[["StageMeter", Doing, float, float], None]
"""Called with what a meter counts: meter, what was done, began, ended."""

HOLD_S = 0.1
"""A sync function that holds a consumer's own event loop for so long is worth a hint."""

SAMPLE_LISTS = 64
"""Lists between two looks at the size of an item; at first, after 1, 2, 4, 8 ... lists."""


class LoopMeter:
    """The event loop in which all inline functions run.

    Attributes:
      held_s: how long they held it, all together.
      thread: the system's number of the thread in which it runs; None: it doesn't yet.
    """

    __slots__ = ("held_s", "thread")

    def __init__(self) -> None:
        self.held_s = 0.0
        self.thread: int | None = None


class MeterHooks:
    """What is called with what all stages of a run count.

    Attributes:
      observer: called with every segment of work and of waiting; a trace, say. None: the usual case.
      on_observed: called, in the tracing thread, when a trace begins and when it ends.
      on_hold: called with how long a segment of at least `HOLD_S` held the stream's own event loop; None: not called.
    """

    __slots__ = ("observer", "on_hold", "on_observed")

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.on_observed: list[Callable[[], None]] = []
        self.on_hold: Callable[[StageMeter, float], None] | None = None

    def observe(self, observer: Observer | None) -> None:
        """Call `observer` with every segment of work and of waiting; None: nothing is called."""
        self.observer = observer
        for notify in list(self.on_observed):
            notify()


class Ongoing(NamedTuple):
    """What a stage in a worker is at, with when each of it began.

    Attributes:
      begun: the segment of work that holds the event loop; None: none does.
      slots: the awaited or threaded calls; 0.0: none.
      waits: by slot.
    """

    begun: float | None = None
    slots: tuple[float, ...] = ()
    waits: tuple[tuple[int, tuple[Doing, float]], ...] = ()

    def shifted(self, by: float) -> Ongoing:
        """Return it with the times of a clock that shows `by` seconds more."""
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
        """Return the bytes of the first `items`, all that have come."""
        return int(self._bytes + (items - self._items) * self._item_bytes)

    def sample(self, item: Any, items: int) -> None:
        """Look at one of `items`, all that have come."""
        if self._samples:
            self._bytes, self._items = self.of(items), items
        self._samples = [*self._samples[-7:], _size(item)]  # the last ones: sizes may drift
        self._item_bytes = sum(self._samples) / len(self._samples)


class StageMeter:
    """One stage in one worker.

    Attributes:
      figures: what it has counted; bytes, and details that are read now, are added when they are read.
      begun: when the segment of work that holds the loop now began; None: none does.
      slots: when each awaited or threaded call that is at work now began; 0.0: none.
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
        """When the work that is going on now began, the oldest call's; None: it is at rest, or waits."""
        if self.begun is not None:
            return self.begun
        return min(filter(None, list(self.slots)), default=None)

    def worked(self, began: float, ended: float) -> None:
        """Count a segment of the stage's own work in which others could run: in a call that is awaited, or a thread."""
        self.figures.busy_s += ended - began
        if self.hooks.observer is not None:
            self.hooks.observer(self, "work", began, ended)

    def held(self, began: float, ended: float) -> None:
        """Count a segment of the stage's own work in which the event loop stood still."""
        self.begun = None
        spent = ended - began
        self.figures.add_hold(spent)
        self.loop.held_s += spent
        if self.hooks.observer is not None or spent >= HOLD_S:
            self._report_held(began, ended)

    def _report_held(self, began: float, ended: float) -> None:
        hooks = self.hooks
        if hooks.observer is not None:
            hooks.observer(self, "work", began, ended)
        if ended - began >= HOLD_S and hooks.on_hold is not None and self.host is None:
            hooks.on_hold(self, ended - began)

    def waited(self, doing: Doing, began: float, ended: float) -> None:
        """Count a wait: for an item from before the stage ("wait_input"), or for room downstream ("wait_output")."""
        self.figures.add_wait(doing, ended - began)
        if self.hooks.observer is not None:
            self.hooks.observer(self, doing, began, ended)

    def wait_begins(self, doing: Doing, slot: int = 0) -> None:
        """Record a wait that begins, so that it is seen while it lasts; of several at once, each has a slot."""
        self._waits[slot] = doing, perf_counter()

    def wait_ends(self, slot: int = 0) -> None:
        """Count the wait that has begun in a slot."""
        doing, began = self._waits.pop(slot)
        self.waited(doing, began, perf_counter())

    def count(self, items: Sequence[Any]) -> None:
        """Count a list that came out of the stage; now and then, look at how large an item is."""
        self.figures.items += len(items)
        self._lists += 1
        if self._lists >= self._next_sample and items:
            self._next_sample += min(self._lists, SAMPLE_LISTS)
            self._sizes.sample(items[0], self.figures.items)

    @property
    def bytes(self) -> int:
        """Of the items, estimated from the sizes of a few."""
        return self.figures.bytes + self._sizes.of(self.figures.items)

    def details_from(self, read: ReadDetails) -> None:
        """Read details from this function from now on; counts of the one before go on. At the stage's first pull."""
        self.figures.details, self._read = self.details, read

    @property
    def details(self) -> Details:
        """What only this kind of stage counts. From any thread."""
        return later(self.figures.details, self._read())

    @property
    def ongoing(self) -> Ongoing:
        """What it is at now. From any thread."""
        return Ongoing(self.begun, tuple(self.slots), tuple(self._waits.items()))

    def counted(self) -> StageStats:
        """Return what was counted, without what goes on. From any thread."""
        return self.figures.copy(bytes=self.bytes, details=self.details)

    def until(self, now: float) -> StageStats:
        """Return what was counted up to `now`, with what goes on. From any thread."""
        found = self.counted()  # first: what ends meanwhile is missed once rather than counted twice
        begun, slots, waits = self.ongoing
        if begun is not None:
            found.add_hold(max(0.0, now - begun))
        found.busy_s += sum(max(0.0, now - began) for began in slots if began)
        for _, (doing, began) in waits:
            found.add_wait(doing, now - began)
        return found

    def show(self, gained: StageStats, ongoing: Ongoing) -> None:
        """Count what a meter elsewhere has counted, too, and show what it is at; what is skipped is counted here."""
        figures = self.figures
        errors, details = figures.errors, later(figures.details, gained.details)
        figures.add(gained)
        figures.errors, figures.details = errors, details
        figures.concurrency, figures.executor, figures.ordered = gained.concurrency, gained.executor, gained.ordered
        self._go_on(ongoing)

    def stop(self, now: float) -> None:
        """Count what goes on elsewhere up to `now`, as over."""
        self.figures = self.until(now)
        self._go_on(Ongoing())

    def _go_on(self, ongoing: Ongoing) -> None:
        self.begun, self.slots, self._waits = ongoing.begun, list(ongoing.slots), dict(ongoing.waits)


class HoldTimer:
    """`with HoldTimer(meter):` counts a segment of work in which the event loop stands still."""

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
            meter.held(self._began, perf_counter())


class Working:
    """`with Working(meter):` counts a segment of work that is awaited; a stage does one at a time."""

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
            meter.worked(began, perf_counter())


def _size(item: Any) -> int:
    """Return the size of an item in bytes; whatever it is, being measured must not end a run."""
    try:
        return nbytes(item)
    except Exception:  # an attribute of the user's, a container that holds itself
        return sys.getsizeof(item)
