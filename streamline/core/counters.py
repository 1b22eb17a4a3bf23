"""Counters of one stage, one channel and one host while a stream runs, and the labels under which they are shown.

Each counter has one writer, the event loop's thread, and may be read in any thread: it is exact but for the list that
is being counted. Times are those of `time.perf_counter`.

Details are what only one kind of stage counts: cycles of a cache, components of a mixture, bytes copied to a device. A
stage registers a function that reads them (`StageMeter.details_from`), called only when figures are read. They travel
from worker processes with the other counts, are aggregated over workers here, and are shown by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from streamline.core.tree import nbytes
from streamline.errors import printable


class ChannelMeter:
    """One channel: who fills it, and how full it was."""

    __slots__ = ("capacity", "depth", "items", "name", "peak", "shard")

    def __init__(self, name: str, shard: int, capacity: int) -> None:
        self.name = name
        self.shard = shard
        self.capacity = capacity
        self.items = 0
        self.depth = 0
        self.peak = 0


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


class HostMeter:
    """One host of one run. Its writer is the run's event loop.

    Args:
      pid: returns that of its process; None: there is none yet.
      resident: returns how many bytes of memory it holds; 0: unknown.
      stacks: returns what its threads are at, for a person; "": unknown.
      node: returns the machine that it runs on; "": this one, or none yet.

    Attributes:
      shards: of its workers.
      items: of theirs that have arrived, of `bytes` bytes, of which `copied_bytes` were copied to be sent.
      slabs_made: of shared memory that they came in, new ones; `slabs_reused`: uses of one again.
      arrival_s: that taking them in has held the event loop.
      restarts: how many times another one has taken its place.
      alive: it has been started, and hasn't ended.
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
        self.number = number
        self.shared = shared
        self.kind: HostKind = kind
        self.stacks = stacks
        self.shards: set[int] = set()
        self.items = 0
        self.bytes = 0
        self.copied_bytes = 0
        self.slabs_made = 0
        self.slabs_reused = 0
        self.arrival_s = 0.0
        self.restarts = 0
        self.alive = False
        self._pid = pid
        self._last_pid: int | None = None
        self._node = node
        self._last_node = ""
        self._resident = resident
        self._seen_bytes = 0

    def __str__(self) -> str:
        return host_label(self.number, self.kind, self.pid, self.node, shared=self.shared)

    @property
    def node(self) -> str:
        """The machine that it runs on, or ran on at last; "": this one, or there was none yet."""
        self._last_node = self._node() or self._last_node
        return self._last_node

    @property
    def pid(self) -> int | None:
        """Of its process, the last one if it has ended; None: there was none yet."""
        self._last_pid = self._pid() or self._last_pid
        return self._last_pid

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds, or held when it was last seen. From any thread."""
        if self.alive:
            self._seen_bytes = self._resident() or self._seen_bytes
        return self._seen_bytes

    def gone(self) -> None:
        """There is no host for now: its pid, its machine and its memory stay what they were at last."""
        self._last_pid, self._last_node, self._seen_bytes = self.pid, self.node, self.resident_bytes
        self.alive = False


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


R = TypeVar("R")

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


class StageCounts(NamedTuple):
    """What a `StageMeter` has counted, and what goes on: enough to show it elsewhere. Pickles; `StageMeter.shows`."""

    name: str
    kind: str
    shard: int
    concurrency: int
    executor: Executor
    ordered: bool
    items: int
    bytes: int
    worked_s: float
    held_s: float
    wait_input_s: float
    wait_output_s: float
    begun: float | None
    slots: tuple[float, ...]
    waits: tuple[tuple[int, tuple[Doing, float]], ...]
    details: Details = ()

    def shifted(self, by: float) -> StageCounts:
        """Return it with the times of a clock that shows `by` seconds more."""
        return self._replace(
            begun=None if self.begun is None else self.begun + by,
            slots=tuple(began + by for began in self.slots),
            waits=tuple((slot, (doing, began + by)) for slot, (doing, began) in self.waits),
        )

    def without(self, earlier: StageCounts | None) -> StageCounts:
        """Return it less what had been counted of it `earlier`; None: nothing."""
        if earlier is None:
            return self
        gained = {name: getattr(self, name) - getattr(earlier, name) for name in SUMMED}
        return self._replace(**gained, details=since(earlier.details, self.details))


SUMMED = {"items", "bytes", "worked_s", "held_s", "wait_input_s", "wait_output_s"}
"""Of `StageCounts`: what adds up where a stage is opened again in another process."""


class StageMeter:
    """One stage in one worker.

    Attributes:
      shard: the worker's; downstream of the merge, the rank.
      worked_s: that it was at its own work while others could run: it waited for a call, or was in a thread.
      held_s: that it was at its own work while the event loop stood still.
      begun: when the segment of work that holds the loop now began; None: none does.
      loop: in which its inline functions run, with those of the others.
      slots: when each awaited or threaded call that is at work now began; 0.0: none.
      observer: called with every segment of work and of waiting; a trace, say. None: the usual case.
      on_hold: called with how long a segment of at least `HOLD_S` held the event loop; None: not called.
      host: in which the worker runs; None: in the stream's own event loop.
    """

    __slots__ = (
        "_details", "_item_bytes", "_lists", "_sample_at", "_sampled_bytes", "_sampled_items", "_samples", "_waits",
        "begun", "concurrency", "errors", "executor", "held_s", "host", "items", "kind", "loop", "name", "observer",
        "on_hold", "ordered", "shard", "slots", "wait_input_s", "wait_output_s", "worked_s",
    )  # fmt: skip

    def __init__(self, name: str, kind: str, shard: int, concurrency: int = 1) -> None:
        self.name = name
        self.kind = kind
        self.shard = shard
        self.concurrency = concurrency
        self.executor: Executor = "inline"
        self.ordered = True
        self.items = 0
        self.worked_s = 0.0
        self.held_s = 0.0
        self.wait_input_s = 0.0
        self.wait_output_s = 0.0
        self.errors = 0
        self.slots: list[float] = []
        self.loop = LoopMeter()
        self.observer: Observer | None = None
        self.on_hold: Callable[[StageMeter, float], None] | None = None
        self.begun: float | None = None
        self.host: HostMeter | None = None
        self._waits: dict[int, tuple[Doing, float]] = {}
        self._details: tuple[Details, ReadDetails] = (), tuple
        self._lists = 0
        self._sample_at = 1
        self._samples: list[int] = []
        self._item_bytes = 0.0
        self._sampled_bytes = 0
        self._sampled_items = 0

    def __str__(self) -> str:
        return label(self.name, self.kind)

    @property
    def since(self) -> float | None:
        """When the work that is going on now began, the oldest call's; None: it is at rest, or waits."""
        if self.begun is not None:
            return self.begun
        return min(filter(None, list(self.slots)), default=None)

    @since.setter
    def since(self, began: float | None) -> None:
        self.begun = began

    @property
    def busy_s(self) -> float:
        """How long it was at its own work, all calls together."""
        return self.worked_s + self.held_s

    def worked(self, began: float, ended: float) -> None:
        """Count a segment of the stage's own work: in the user's function, in reading."""
        self.worked_s += ended - began
        if self.observer is not None:
            self.observer(self, "work", began, ended)

    def held(self, began: float, ended: float) -> None:
        """Count a segment of the stage's own work in which the event loop stood still."""
        self.begun = None
        spent = ended - began
        self.held_s += spent
        self.loop.held_s += spent
        if self.observer is not None or spent >= HOLD_S:
            self._report_held(began, ended)

    def _report_held(self, began: float, ended: float) -> None:
        if self.observer is not None:
            self.observer(self, "work", began, ended)
        if ended - began >= HOLD_S and self.on_hold is not None:
            self.on_hold(self, ended - began)

    def waited(self, doing: Doing, began: float, ended: float) -> None:
        """Count a wait: for an item from before the stage ("wait_input"), or for room downstream ("wait_output")."""
        if doing == "wait_input":
            self.wait_input_s += ended - began
        else:
            self.wait_output_s += ended - began
        if self.observer is not None:
            self.observer(self, doing, began, ended)

    def wait_begins(self, doing: Doing, slot: int = 0) -> None:
        """Record a wait that begins, so that it is seen while it lasts; of several at once, each has a slot."""
        self._waits[slot] = doing, perf_counter()

    def wait_ends(self, slot: int = 0) -> None:
        """Count the wait that has begun in a slot."""
        doing, began = self._waits.pop(slot)
        self.waited(doing, began, perf_counter())

    def count(self, items: Sequence[Any]) -> None:
        """Count a list that came out of the stage; now and then, look at how large an item is."""
        self.items += len(items)
        self._lists += 1
        if self._lists >= self._sample_at and items:
            self._sample(items[0])

    @property
    def bytes(self) -> int:
        """Of the items, estimated from the sizes of a few."""
        return int(self._sampled_bytes + (self.items - self._sampled_items) * self._item_bytes)

    def _sample(self, item: Any) -> None:
        if not self._samples:
            self._item_bytes = _size(item)
        self._sampled_bytes, self._sampled_items = self.bytes, self.items
        self._sample_at += min(self._lists, SAMPLE_LISTS)
        self._samples = [*self._samples[-7:], _size(item)]  # the last ones: sizes may drift
        self._item_bytes = sum(self._samples) / len(self._samples)

    def details_from(self, read: ReadDetails) -> None:
        """Read details from this function from now on; counts of the one before go on. At the stage's first pull."""
        self._details = self.details, read

    @property
    def details(self) -> Details:
        """What only this kind of stage counts. From any thread."""
        before, read = self._details
        return later(before, read())

    def held_until(self, now: float) -> float:
        """Return how long the stage held the event loop up to `now`, with what is going on."""
        begun = self.begun
        return self.held_s + (0.0 if begun is None else max(0.0, now - begun))

    def busy_until(self, now: float) -> float:
        """Return how long it was at its own work up to `now`, with what is going on."""
        calls = sum(max(0.0, now - began) for began in list(self.slots) if began)
        return self.worked_s + calls + self.held_until(now)

    def waited_until(self, doing: Doing, now: float) -> float:
        """Return how long it waited up to `now`, with the waits that are going on."""
        waited = self.wait_input_s if doing == "wait_input" else self.wait_output_s
        return waited + sum(now - began for what, began in list(self._waits.values()) if what == doing)

    def counted(self) -> StageCounts:
        """Return what was counted, and what goes on. From any thread."""
        return StageCounts(
            self.name, self.kind, self.shard, self.concurrency, self.executor, self.ordered, self.items, self.bytes,
            self.worked_s, self.held_s, self.wait_input_s, self.wait_output_s, self.begun, tuple(self.slots),
            tuple(self._waits.items()), self.details,
        )  # fmt: skip

    def shows(self, counted: StageCounts, more: StageCounts | None = None) -> None:
        """Show what a meter elsewhere has counted, and what goes on there, in place of what was here.

        Args:
          more: had been counted before that meter began; nothing of it is in progress any more.
        """
        if more is not None:
            summed = {name: getattr(counted, name) + getattr(more, name) for name in SUMMED}
            counted = counted._replace(**summed, details=later(more.details, counted.details))
        for name in SUMMED - {"bytes"}:
            setattr(self, name, getattr(counted, name))
        self._sampled_items, self._sampled_bytes = counted.items, counted.bytes
        self.concurrency = counted.concurrency
        self.executor, self.ordered, self._details = counted.executor, counted.ordered, (counted.details, tuple)
        self.begun, self.slots, self._waits = counted.begun, list(counted.slots), dict(counted.waits)

    def stopped(self, now: float) -> StageCounts:
        """Count what goes on up to `now`, as over; return what was counted then."""
        held_s = self.held_until(now)
        counted = self.counted()._replace(
            worked_s=self.busy_until(now) - held_s,
            held_s=held_s,
            wait_input_s=self.waited_until("wait_input", now),
            wait_output_s=self.waited_until("wait_output", now),
            begun=None,
            slots=(),
            waits=(),
        )
        self.shows(counted)
        return counted


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
