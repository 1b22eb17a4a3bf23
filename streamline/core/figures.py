"""Figures: what is counted of stages, channels, hosts, requests, and of a stream as a whole; with units.

A figure is declared once, here: meters write these classes, hosts send them, `stats` gives them to users, and sums
and differences follow from the list of fields that grow. Times are in seconds.

Details are what only one kind of stage counts: cycles of a cache, components of a mixture, bytes copied to a device.
They travel from worker processes with the other counts, are aggregated over workers here, and are shown by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

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

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others of its stage."""
        return self.part, self.name


Details: TypeAlias = tuple[Detail, ...]


def later(before: Details, now: Details) -> Details:
    """Return the details of a stage that was opened again, in another pass or process: counts are added up."""
    known = {detail.key: detail for detail in before}
    for detail in now:
        was = known.get(detail.key)
        if was is not None and detail.how == "count":
            detail = replace(detail, value=was.value + detail.value)
        known[detail.key] = detail
    return tuple(known.values())


def together(workers: Iterable[Details]) -> Details:
    """Return the details of all workers of a stage."""
    found: dict[tuple[str, str], Detail] = {}
    for detail in chain.from_iterable(workers):
        other = found.get(detail.key)
        if other is not None:
            value = min(other.value, detail.value) if detail.how == "now" else other.value + detail.value
            detail = replace(detail, value=value)
        found[detail.key] = detail
    return tuple(found.values())


def since(earlier: Details, now: Details) -> Details:
    """Return what was added since `earlier`; details that aren't counts keep their value."""
    were = {detail.key: detail.value for detail in earlier}
    return tuple(
        replace(detail, value=max(0, detail.value - were.get(detail.key, 0))) if detail.how == "count" else detail
        for detail in now
    )


Executor: TypeAlias = Literal["inline", "task", "thread"]
"""Where a stage does its work: in the event loop, which it blocks; awaited; in threads."""

HostKind: TypeAlias = Literal["process", "thread"]

Doing: TypeAlias = Literal["work", "wait_input", "wait_output"]

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
    """Figures, a dataclass: `total` and `-` apply to fields that grow; the others are those of the first."""

    grows: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        fields = vars(cls).get("__annotations__", {})
        cls.grows = (*cls.grows, *(name for name in fields if name in GROWING))
        cls.parts = (*cls.parts, *(name for name in fields if name in KEYS and fields[name].startswith("tuple")))

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
            if each.key == (part, name):
                return each.value
        there = ", ".join(_name_of(each.name, each.part) for each in self.details) or "none"
        raise KeyError(f"{self} has no detail {_name_of(name, part)}; it has {there}")

    def add_items(self, items: int, size: int) -> None:
        """Count items that came out of it, in so many bytes."""
        self.items += items
        self.bytes += size

    def add_hold(self, seconds: float) -> None:
        self.busy_s += seconds
        self.held_s += seconds

    def add_wait(self, doing: Doing, seconds: float) -> None:
        if doing == "wait_input":
            self.wait_input_s += seconds
        else:
            self.wait_output_s += seconds

    @property
    def limited_s(self) -> float:
        """Seconds that its calls waited for permits of a limit, all together."""
        return sum(each.value for each in self.details if each.name == "limited_s")

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


@dataclass(frozen=True, kw_only=True)
class ThreadStats(Summable):
    """A thread of this process, since it was started.

    Attributes:
      number: the system's.
      name: Python's.
      cpu_s: that it has computed, in Python or outside of it.
      core_wait_s: that it could have, and no core was free.
    """

    number: int
    name: str
    cpu_s: float = 0.0
    core_wait_s: float = 0.0

    @property
    def runnable_s(self) -> float:
        """For how long it computed, or could have."""
        return self.cpu_s + self.core_wait_s


@dataclass(frozen=True, kw_only=True)
class ContentionStats(Summable):
    """What slows all stages of this process alike; not those in processes of their own.

    Attributes:
      looked_s: when that was seen, by `time.perf_counter`; between two moments: how long that was.
      collecting_s: in which Python's garbage collector stopped all threads.
      gil_looks: how many times it was looked whether a thread holds the GIL.
      gil_waits: how many times one did.
      quota_periods: of the control group's CPU quota, since it was made; 0: there is none.
      quota_throttled: of those, in which the quota was used up.
      memory_wait_s: in which programs waited for memory that the kernel had to free, in this process's control group,
        or on this machine; 0 where the kernel doesn't tell.
      threads: of Python's, each with its times; none where the system doesn't tell them.
      loop: the number of the thread of the pipeline's event loop.
    """

    looked_s: float = 0.0
    collecting_s: float = 0.0
    gil_looks: int = 0
    gil_waits: int = 0
    quota_periods: int = 0
    quota_throttled: int = 0
    memory_wait_s: float = 0.0
    threads: tuple[ThreadStats, ...] = ()
    loop: int | None = None


@dataclass(frozen=True, kw_only=True)
class Figures(Summable):
    """A stream at one moment, or between two.

    Attributes:
      elapsed_s: since it was opened; it stops at the end, or when the stream is closed.
      items: that the consumer got.
      consumer_wait_s: that it waited for them.
      stages: in the plan's order, the source first, the merge where it stands.
      channels: likewise.
      consumer_held_s: with `async for`: how long the loop's body held the event loop, as far as it can be seen: from
        the first item of a list until it first awaits something.
      ranks_wait_s: of its waits, those for other ranks to say whether they have another item, where all end together.
      hosts: threads or processes in which workers run, by number, those that aren't there yet among them; none where
        workers run in the stream's event loop.
      cpus: that this process may use, within its control group's quota.
      reads: what sources have asked of servers, by name; of those that have asked any.
      dropped: items of this rank that are not given, so that all ranks end together; as `stream.ends` has it.
      padded: items that were given again for that; a resume goes on counting.
      contention: what slows all stages of this process alike.
    """

    elapsed_s: float
    items: int
    consumer_wait_s: float
    stages: tuple[StageStats, ...] = ()
    channels: tuple[ChannelStats, ...] = ()
    consumer_held_s: float = 0.0
    ranks_wait_s: float = 0.0
    hosts: tuple[HostStats, ...] = ()
    cpus: int = 1
    reads: tuple[ReadStats, ...] = ()
    dropped: int = 0
    padded: int = 0
    contention: ContentionStats = ContentionStats()

    def __sub__(self, earlier: Figures) -> Self:  # type: ignore[override]
        """Return what was added since an earlier moment of the same stream; depths and peaks are those of now."""
        return replace(super().__sub__(earlier), contention=self.contention - earlier.contention)

    @property
    def waits(self) -> float:
        """The share of the time for which the consumer waited."""
        return min(1.0, max(0.0, self.consumer_wait_s / self.elapsed_s)) if self.elapsed_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """Items that the consumer got, per second."""
        return self.items / self.elapsed_s if self.elapsed_s > 0 else 0.0


def per_s(rate: float) -> str:
    """Return a number of items per second as text."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
