"""Figures of a stream at one moment, or between two: frozen, with units."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from streamline.core.counters import Details, Executor, HostKind, host_label, label, since

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """A stage in one worker; seconds as in `StageStats`.

    Attributes:
      shard: the worker's; downstream of the merge, the rank.
      details: what only this kind of stage counts.
    """

    shard: int
    items: int = 0
    busy_s: float = 0.0
    wait_input_s: float = 0.0
    wait_output_s: float = 0.0
    details: Details = ()


@dataclass(frozen=True, kw_only=True)
class StageStats:
    """One stage, all its workers together, since the stream was opened.

    Attributes:
      name: the stage's, unique in the pipeline.
      kind: "map", "read_jsonl", "merge".
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
      per_worker: the same of each worker, by shard.
      hosts: threads or processes in which its workers run; 0: they run in the stream's own event loop.
      details: what only this kind of stage counts; docs/seeing.md says which, and what they are.
    """

    name: str
    kind: str
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
    per_worker: tuple[WorkerStats, ...] = ()
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

    @property
    def slots(self) -> int:
        """Calls that all workers together may have at work at once."""
        return self.workers * self.concurrency

    def __str__(self) -> str:
        return label(self.name, self.kind)


def _name_of(detail: str, part: str) -> str:
    return f"{detail!r} of {part!r}" if part else f"{detail!r}"


@dataclass(frozen=True, kw_only=True)
class ChannelStats:
    """One kind of channel, over all workers.

    Attributes:
      name: of the stage that fills it; with the suffix " (border)" if its items come from a host.
      items: that went through.
      depth: items in them now; after a concurrent map, its inputs at work count too.
      peak: the most that were in one of them at once.
      capacity: of one of them.
      channels: how many there are: one a worker, or one.
    """

    name: str
    items: int = 0
    depth: int = 0
    peak: int = 0
    capacity: int = 0
    channels: int = 1


@dataclass(frozen=True, kw_only=True)
class HostStats:
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

    @property
    def name(self) -> str:
        """How messages call it: "process 2, pid 4711", "shared process 2 on node7, pid 4711", "thread 0"."""
        return host_label(self.number, self.kind, self.pid, self.node, shared=self.shared)


@dataclass(frozen=True)
class ReadStats:
    """What one source has asked of servers, in all hosts together, since the stream was opened.

    The fields after the name stand in the order of `Traffic.counts`.

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

    name: str
    requests: int = 0
    retries: int = 0
    bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0
    in_flight: int = 0


@dataclass(frozen=True, kw_only=True)
class ThreadStats:
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
class ContentionStats:
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
class Figures:
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

    @property
    def waits(self) -> float:
        """The share of the time for which the consumer waited."""
        return min(1.0, max(0.0, self.consumer_wait_s / self.elapsed_s)) if self.elapsed_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """Items that the consumer got, per second."""
        return self.items / self.elapsed_s if self.elapsed_s > 0 else 0.0


COUNTERS = frozenset({
    "items", "bytes", "copied_bytes", "slabs_made", "slabs_reused", "errors", "padded", "requests", "retries",
    "cache_hits", "cache_misses", "cache_bytes", "elapsed_s", "consumer_wait_s", "consumer_held_s", "ranks_wait_s",
    "busy_s", "held_s", "wait_input_s", "wait_output_s", "arrival_s", "looked_s", "collecting_s", "gil_looks",
    "gil_waits", "quota_periods", "quota_throttled", "memory_wait_s", "cpu_s", "core_wait_s",
})  # fmt: skip
"""Fields that grow. The others, depths, peaks, pids, memory, are as they stand."""

F = TypeVar("F", bound="DataclassInstance")

M = TypeVar("M", bound=Figures)


def per_s(rate: float) -> str:
    """Return a number of items per second as text."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def between(earlier: Figures, later: M) -> M:
    """Return what was added from one moment to another of the same stream; depths and peaks are those of the later."""
    return replace(
        _gained(later, earlier),
        stages=_each(later.stages, earlier.stages, "name"),
        channels=_each(later.channels, earlier.channels, "name"),
        hosts=_each(later.hosts, earlier.hosts, "number"),
        reads=_each(later.reads, earlier.reads, "name"),
        contention=replace(
            _gained(later.contention, earlier.contention),
            threads=_each(later.contention.threads, earlier.contention.threads, "number"),
        ),
    )


def _each(later: tuple[F, ...], earlier: tuple[F, ...], key: str) -> tuple[F, ...]:
    before = {getattr(each, key): each for each in earlier}
    return tuple(_gained(each, before.get(getattr(each, key))) for each in later)


def _gained(now: F, before: DataclassInstance | None) -> F:
    """Return figures with what their counters gained since `before`; None: since the stream was opened."""
    if before is None:
        return now
    these, earlier = vars(now), vars(before)
    gained: dict[str, Any] = {}
    for name, counts, in_s in _columns(type(now)):  # of each worker and stage: most of what a reading takes
        value = these[name] - earlier[name] if counts else these[name]
        gained[name] = 0.0 if in_s and value < 0 else value
    if isinstance(now, WorkerStats | StageStats) and (now.details or earlier["details"]):
        gained["details"] = since(earlier["details"], now.details)
    if isinstance(now, StageStats):
        gained["per_worker"] = _each(now.per_worker, earlier["per_worker"], "shard")
    return type(now)(**gained)


@cache
def _columns(kind: type[DataclassInstance]) -> tuple[tuple[str, bool, bool], ...]:
    """Return the names of fields, whether each counts, and whether it counts seconds."""
    names = [field.name for field in fields(kind)]
    return tuple((name, name in COUNTERS, name in COUNTERS and name.endswith("_s")) for name in names)
