"""A trace of what every stage did and when, written while it runs, for Perfetto and chrome://tracing.

It is bounded. Adjacent segments of one track are merged until they are long enough to see, and the longer, the more of
them come. A file that has half of `max_bytes` becomes "NAME.previous.json", in place of an earlier one, and another
begins: the newest half is always there, all of a run of minutes, the last hours of one of weeks.

The file is the JSON array form of the trace-event format and can be loaded at any moment: viewers accept an array
without its end, so events are written whole, each with the comma before it, and the end comes last.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from os import PathLike
from pathlib import Path
from threading import RLock
from time import perf_counter
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from streamline.core.counters import Doing, StageMeter
from streamline.core.meters import Meters
from streamline.core.options import check_int
from streamline.errors import PlanError, printable

__all__ = ["EVENTS_PER_S", "MAX_BYTES", "Event", "Trace", "TraceFile", "previous_of"]


logger = logging.getLogger(__name__)


MAX_BYTES = 64 << 20
"""Of both files: some 400,000 events, which a browser still opens in seconds."""


LEAST_BYTES = 1 << 20
"""Both files begin with the names of all tracks: some 200 bytes for each stage of each worker."""


EVENTS_PER_S = 500
"""From here on, more segments are merged: `MAX_BYTES` then hold a quarter of an hour of a busy pipeline."""


FINEST_S, COARSEST_S = 0.0001, 60.0
"""Segments that are within so much of a track are one span: what is shorter is seldom seen."""


LONGEST_S = 1.0
"""Adjacent segments of one kind make no longer span: what goes on for hours is to be seen meanwhile."""


ROUNDING_S = 1e-9
"""By so much a segment may seem to begin before the one before it ended."""


COUNT_EVERY_S = 0.1


FLUSH_S = 1.0


MOST_WORKERS = 10_000
"""Of a stage whose tracks stand together; those of more workers get mixed up with the next stage's."""


MOST_LANES = 64
"""Of one stage in one worker: calls that overlap are drawn side by side."""


NAMES: dict[Doing, str] = {"work": "work", "wait_input": "waits for input", "wait_output": "waits for room"}


class Trace:
    """A trace that is being written; `stream.trace` makes it. As a context manager, it stops at the end.

    A disk that is full, or a file that can't be written any more, stops the trace with a warning; the run goes on.

    Args:
      path: of the file, which is overwritten.
      meters: of the run that is traced.
      max_bytes: of the file and its predecessor together.
      rank: of this process.
      after_merge: names of the stages that a rank has one of, those downstream of the merge and a live reader.

    Raises:
      PlanError: `max_bytes` is less than 1 MiB, or another trace of the same stream is being written.
      OSError: the file can't be made.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        meters: Meters,
        *,
        max_bytes: int = MAX_BYTES,
        rank: int = 0,
        after_merge: Collection[str] = (),
    ) -> None:
        max_bytes = check_int(".trace(max_bytes=)", max_bytes, LEAST_BYTES)
        if meters.observer is not None:
            raise PlanError("this stream is being traced already: .stop() that trace first")
        self.path = Path(path)
        self._meters = meters
        self._place = f"rank {rank}"
        self._after_merge = after_merge
        self._lock = RLock()  # a garbage collection within `_observe` may stop this
        self._tracks: dict[StageMeter, _Track] = {}
        self._processes: dict[int, str] = {}
        self._lanes = 0
        self._resolution = _Resolution()
        self._counters = _Counters(meters)
        self._flushed_at = perf_counter()
        self._file: TraceFile | None = TraceFile(self.path, max_bytes // 2, self._heads)
        self._observer = self._observe  # one and the same object each time, so that it can be compared
        meters.observe(self._observer)
        self._guarded(lambda file: file.flush())

    @property
    def previous(self) -> Path:
        """Where the file goes when it is full, and another one begins."""
        return previous_of(self.path)

    def stop(self) -> None:
        """Write what is left, and the end. From any thread, at any time; idempotent."""
        if self._meters.observer is self._observer:
            self._meters.observe(None)
        with self._lock:
            self._finish_spans(perf_counter())
            self._guarded(lambda file: file.close())
            self._file = None
            self._tracks.clear()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _observe(self, meter: StageMeter, doing: Doing, began: float, ended: float) -> None:
        with self._lock:
            if self._file is None:
                return
            lane = self._lane(meter, began)
            if lane is None:
                return  # more calls side by side than a viewer can show
            span = lane.add(doing, began, ended, self._resolution.seconds)
            if span is not None:
                self._write(_span(lane, span, self._us))
                self._resolution.count(1, ended)
            if ended - self._counters.counted_at >= max(COUNT_EVERY_S, self._resolution.seconds):
                for event in self._counters.read(ended, self._us(ended)):
                    self._write(event)
            if ended - self._flushed_at >= FLUSH_S:
                self._flushed_at = ended
                self._guarded(lambda file: file.flush())

    def _lane(self, meter: StageMeter, at: float) -> _TraceThread | None:
        """Return a lane of a stage's track on which nothing else is from `at` on."""
        track = self._tracks.get(meter)
        if track is None:
            place = self._place if meter.name in self._after_merge else f"shard {meter.shard}"
            order = self._meters.order
            nth = order.index(meter.name) if meter.name in order else len(order)
            sort = (nth * MOST_WORKERS + meter.shard) * MOST_LANES
            pid = 1 if meter.host is None else 2 + meter.host.number
            if meter.host is not None and pid not in self._processes:
                self._processes[pid] = str(meter.host)
                self._write(_process(pid, f"streamline, {self._place}, {meter.host}"))
            track = self._tracks[meter] = _Track(f"{place} · {meter}", sort, pid)
        for lane in track.lanes:
            if lane.end <= at + ROUNDING_S:
                return lane
        if len(track.lanes) == MOST_LANES:
            return None
        self._lanes += 1
        track.lanes.append(lane := _TraceThread(self._lanes, track.pid))
        for event in track.names(len(track.lanes) - 1):
            self._write(event)
        return lane

    def _finish_spans(self, now: float) -> None:
        """Write the spans that are being merged, and the work that is going on."""
        for meter, track in list(self._tracks.items()):
            for lane in track.lanes:
                if lane.span is not None:
                    self._write(_span(lane, lane.span, self._us))
                    lane.span = None
            since = meter.since
            if since is not None and (free := self._lane(meter, since)) is not None:
                self._write(_span(free, _Span("work", since, now), self._us) | {"name": "work, not done yet"})

    def _heads(self) -> Iterator[Event]:
        yield _process(1, f"streamline, {self._place}")
        for pid, host in self._processes.items():
            yield _process(pid, f"streamline, {self._place}, {host}")
        for track in self._tracks.values():
            for at in range(len(track.lanes)):
                yield from track.names(at)

    def _us(self, at: float) -> float:
        """Return a time in µs since the stream was opened, whole ns: so what touches doesn't overlap."""
        return max(0, round((at - self._meters.consumer.opened_at) * 1e9)) / 1e3

    def _write(self, event: Event) -> None:
        self._guarded(lambda file: file.write(event))

    def _guarded(self, work: Callable[[TraceFile], None]) -> None:
        """Do something with the file; if that fails, this was all."""
        file = self._file
        if file is None:
            return
        try:
            work(file)
        except (OSError, ValueError) as error:  # ValueError: it was closed, by an exit in the middle of a write, say
            self._file = None
            file.give_up()
            logger.warning("the trace %s ends here, and the run goes on: %s", printable(str(self.path)), error)


class _Span:
    """What is drawn as one: a segment, or several that are merged.

    Attributes:
      seconds: how much of it was spent at what.
    """

    __slots__ = ("began", "ended", "seconds", "segments")

    def __init__(self, doing: Doing, began: float, ended: float) -> None:
        self.began, self.ended, self.segments = began, ended, 1
        self.seconds: dict[Doing, float] = {doing: ended - began}

    def takes(self, doing: Doing, began: float, ended: float, resolution: float) -> bool:
        """Whether a later segment belongs to this span."""
        length = ended - self.began
        if length <= resolution:
            return True
        alike = len(self.seconds) == 1 and doing in self.seconds
        return alike and length <= LONGEST_S and began - self.ended <= resolution / 10

    def add(self, doing: Doing, began: float, ended: float) -> None:
        self.ended = ended
        self.segments += 1
        self.seconds[doing] = self.seconds.get(doing, 0.0) + ended - began


class _TraceThread:
    """One line of a track, on which nothing overlaps: what a viewer calls a thread."""

    __slots__ = ("end", "number", "pid", "span")

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.end = float("-inf")
        self.span: _Span | None = None

    def add(self, doing: Doing, began: float, ended: float, resolution: float) -> _Span | None:
        """Take a segment; return the span before it if that is finished now."""
        span, began, self.end = self.span, max(began, self.end), ended
        if span is not None and span.takes(doing, began, ended, resolution):
            span.add(doing, began, ended)
            return None
        self.span = _Span(doing, began, ended)
        return span


class _Track:
    """A stage in a worker.

    Args:
      sort: where its first lane stands among all: the plan's order, then that of the shards.
      pid: what viewers take for a process, under which it stands: this one's is 1, that of host n is n + 2.
    """

    def __init__(self, name: str, sort: int, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._sort = sort
        self.lanes: list[_TraceThread] = []

    def names(self, at: int) -> Iterator[Event]:
        """Yield the events that name lane number `at`."""
        number = self.lanes[at].number
        name = self.name if at == 0 else f"{self.name} #{at + 1}"
        sort = {"sort_index": self._sort + at}
        yield {"ph": "M", "name": "thread_name", "pid": self.pid, "tid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": self.pid, "tid": number, "args": sort}


class _Resolution:
    """How long a span is at least, so that no more than `EVENTS_PER_S` come, in the long run."""

    def __init__(self) -> None:
        self.seconds = FINEST_S
        self._since = float("-inf")
        self._events = 0

    def count(self, events: int, now: float) -> None:
        self._events += events
        if now - self._since >= 1.0:
            if self._events < EVENTS_PER_S / 4:
                self.seconds = max(FINEST_S, self.seconds / 2)
            self._since, self._events = now, 0
        elif self._events >= EVENTS_PER_S:
            self.seconds = min(COARSEST_S, self.seconds * 2)
            self._since, self._events = now, 0


class _Counters:
    """How full the channels are, how fast the consumer is, and how much of its time it waits."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._written: dict[str, dict[str, float]] = {}
        self.counted_at = float("-inf")
        self._items, self._waited = 0, 0.0

    def read(self, now: float, ts: float) -> Iterator[Event]:
        """Yield a counter event for each that has changed."""
        for name, values in (*self._channels(), *self._consumer(now)):
            if self._written.get(name) != values:
                self._written[name] = values
                yield {"ph": "C", "name": name, "pid": 1, "tid": 0, "ts": ts, "args": values}
        self.counted_at = now

    def _channels(self) -> list[tuple[str, dict[str, float]]]:
        held: dict[str, float] = {}
        for (name, _), meter in list(self._meters.channels.items()):
            held[name] = held.get(name, 0) + meter.depth
        return [(f"channel behind {name}", {"items": items}) for name, items in held.items()]

    def _consumer(self, now: float) -> Iterator[tuple[str, dict[str, float]]]:
        consumer = self._meters.consumer
        waited = consumer.waited_until(now)
        items, took = consumer.items, now - max(self.counted_at, consumer.opened_at)
        if took > 0:
            share = min(1.0, max(0.0, (waited - self._waited) / took))
            yield "consumer waits", {"%": round(100 * share, 1)}
            yield "consumer takes", {"items/s": round((items - self._items) / took, 1)}
        self._items, self._waited = items, waited


def _process(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _span(lane: _TraceThread, span: _Span, us: Callable[[float], float]) -> Event:
    """Return a span as an event; one of several segments is called after what took most of it."""
    doing = max(span.seconds, key=lambda kind: span.seconds[kind])
    name = NAMES[doing] if len(span.seconds) == 1 else f"mostly {NAMES[doing]}"
    began = us(span.began)
    dur = round(us(span.ended) - began, 3)
    event: Event = {"ph": "X", "name": name, "cat": doing, "pid": lane.pid, "tid": lane.number, "ts": began, "dur": dur}
    if span.segments > 1:
        spent = {f"{NAMES[kind]}, ms": round(seconds * 1e3, 3) for kind, seconds in span.seconds.items()}
        event["args"] = {"stretches": span.segments, **spent}
    return event


Event: TypeAlias = "dict[str, Any]"


FLUSH_BYTES = 64 << 10


END = b"\n]\n"


def previous_of(path: Path) -> Path:
    """Return where a full file goes: "run.previous.json"."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


class TraceFile:
    """Not thread-safe.

    Args:
      most_bytes: of one file; there are two at the most.
      heads: gives the events that each file begins with: what names the tracks.

    Raises:
      OSError: from each method: it can't be made, or written.
    """

    def __init__(self, path: Path, most_bytes: int, heads: Callable[[], Iterable[Event]]) -> None:
        self._path = path
        self._most = most_bytes
        self._heads = heads
        self._parts: list[bytes] = []
        self._begin()

    def write(self, event: Event) -> None:
        """Take one event; it is in the file after the next `flush`, or sooner."""
        if self._events and self._written + self._waiting > self._most:
            self.close()
            self._path.replace(previous_of(self._path))
            self._begin()
            self.flush()
        self._events += 1
        self._put(event)
        if self._waiting > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits. A write that fails leaves the file as it was."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._waiting = 0
        self._append(data)

    def close(self) -> None:
        """Write what waits, and the end."""
        try:
            self.flush()
            self._append(END)
        finally:
            self._file.close()

    def give_up(self) -> None:
        """Close after a write that failed: with an end if there is room for so much."""
        self._parts.clear()
        if not self._file.closed:
            with suppress(OSError):
                self._append(END)
            with suppress(OSError):
                self._file.close()

    def _begin(self) -> None:
        self._file = FileIO(self._path, "w")
        self._written = self._waiting = self._events = 0
        self._first = True
        for head in self._heads():
            self._put(head)

    def _put(self, event: Event) -> None:
        part = (b"[\n" if self._first else b",\n") + msgspec.json.encode(event)
        self._first = False
        self._parts.append(part)
        self._waiting += len(part)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):  # half an event is what no viewer can read
                self._file.truncate(self._written)
                self._file.seek(self._written)
            raise
        self._written += len(data)
