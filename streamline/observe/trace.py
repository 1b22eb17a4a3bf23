"""A trace of what every stage did and when, written while it runs, for Perfetto and chrome://tracing.

Its size is bounded: a file that has half of `max_bytes` becomes "NAME.previous.json", in place of an earlier one, and
another begins, so that the newest half is always there.

The file is the JSON array form of the trace-event format and can be loaded at any moment: viewers accept an array
without its end, so events are written whole, each with the comma before it, and the end comes last.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from os import PathLike
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any, Self, TypeAlias

import msgspec

from streamline.core.figures import Doing
from streamline.core.meters import Meters, StageMeter
from streamline.core.options import check_int
from streamline.errors import PlanError, printable

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Of both files: some 400,000 events, which a browser still opens in seconds."""

LEAST_BYTES = 1 << 20
"""Both files begin with the names of all tracks: some 200 bytes for each stage of each worker."""

ROUNDING_S = 1e-9
"""By so much a span may seem to begin before the one before it ended."""

COUNT_EVERY_S = 0.1

FLUSH_S, FLUSH_BYTES = 1.0, 64 << 10

MOST_WORKERS = 10_000
"""Of a stage whose tracks stand together; those of more workers get mixed up with the next stage's."""

MOST_LANES = 64
"""Of one stage in one worker: calls that overlap are drawn side by side."""

NAMES: dict[Doing, str] = {"work": "work", "wait_input": "waits for input", "wait_output": "waits for room"}

Event: TypeAlias = "dict[str, Any]"


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
        if meters.hooks.observer is not None:
            raise PlanError("this stream is being traced already: .stop() that trace first")
        self.path = Path(path)
        self._meters = meters
        self._rank = f"rank {rank}"
        self._after_merge = after_merge
        self._most = max_bytes // 2
        self._lock = RLock()  # a garbage collection within `_observe` may stop this
        self._tracks: dict[StageMeter, list[_Lane]] = {}  # of this file
        self._named: set[tuple[int, int]] = set()  # pids and tids there
        self._counters = _Counters(meters)
        self._flushed_at = perf_counter()
        self._file: TraceFile | None = None
        self._begin()
        self._observer = self._observe  # one and the same object each time, so that it can be compared
        meters.hooks.observe(self._observer)  # from now on other threads write, too

    @property
    def previous(self) -> Path:
        """Where the file goes when it is full, and another one begins."""
        return self.path.with_name(f"{self.path.stem}.previous{self.path.suffix}")

    def _begin(self) -> None:
        """Begin a file, in which each track is named when it is used first."""
        self._tracks.clear()
        self._named.clear()
        self._file = TraceFile(self.path)
        self._name("process", 1, 0, f"streamline, {self._rank}")
        self._guarded(TraceFile.flush)

    def stop(self) -> None:
        """Write what is left, and the end. From any thread, at any time; idempotent."""
        if self._meters.hooks.observer is self._observer:
            self._meters.hooks.observe(None)
        with self._lock:
            now = perf_counter()
            for meter in list(self._meters.stages.values()):
                if meter.since is not None:
                    self._write_span(meter, "work", meter.since, now, "work, not done yet")
            self._guarded(TraceFile.close)
            self._file = None
            self._tracks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _observe(self, meter: StageMeter, doing: Doing, began: float, ended: float) -> None:
        with self._lock:
            if self._file is None:
                return
            if self._file.size > self._most:
                self._guarded(self._begin_another)
            self._write_span(meter, doing, began, ended, NAMES[doing])
            if ended - self._counters.at >= COUNT_EVERY_S:
                for name, values in self._counters.changed(ended).items():
                    event = {"ph": "C", "name": name, "pid": 1, "tid": 0, "ts": self._us(ended), "args": values}
                    self._write(event)
            if ended - self._flushed_at >= FLUSH_S:
                self._flushed_at = ended
                self._guarded(TraceFile.flush)

    def _begin_another(self, file: TraceFile) -> None:
        file.close()
        self.path.replace(self.previous)
        self._begin()

    def _lane(self, meter: StageMeter, at: float) -> _Lane | None:
        """Return a lane of a stage's track that is free from `at` on; None: a viewer can't show more side by side."""
        lanes = self._tracks.setdefault(meter, [])
        for lane in lanes:
            if lane.end <= at + ROUNDING_S:
                return lane
        if len(lanes) == MOST_LANES:
            return None
        host, order, nth = meter.host, self._meters.order, len(lanes)
        pid = 1 if host is None else 2 + host.figures.number
        if (pid, 0) not in self._named:
            self._name("process", pid, 0, f"streamline, {self._rank}, {host}")
        lanes.append(lane := _Lane(pid, len(self._named)))
        place = self._rank if meter.figures.name in self._after_merge else f"shard {meter.figures.shard}"
        stage = order.index(meter.figures.name) if meter.figures.name in order else len(order)
        sort = (stage * MOST_WORKERS + meter.figures.shard) * MOST_LANES + nth
        self._name("thread", pid, lane.tid, f"{place} · {meter}" + (f" #{nth + 1}" if nth else ""))
        self._write({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": lane.tid, "args": {"sort_index": sort}})
        return lane

    def _write_span(self, meter: StageMeter, doing: Doing, began: float, ended: float, name: str) -> None:
        lane = self._lane(meter, began)
        if lane is None:
            return
        ts = self._us(max(began, lane.end))
        lane.end = ended
        dur = round(self._us(ended) - ts, 3)
        self._write({"ph": "X", "name": name, "cat": doing, "pid": lane.pid, "tid": lane.tid, "ts": ts, "dur": dur})

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._named.add((pid, tid))
        self._write({"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}})

    def _us(self, at: float) -> float:
        """Return a time in µs since the stream was opened, whole ns: so what touches doesn't overlap."""
        return max(0, round((at - self._meters.consumer.opened_at) * 1e9)) / 1e3

    def _write(self, event: Event) -> None:
        self._guarded(lambda file: file.write(event))

    def _guarded(self, work: Callable[[TraceFile], None]) -> None:
        """Do something with the file; if that fails, the trace ends."""
        file = self._file
        if file is None:
            return
        try:
            work(file)
        except (OSError, ValueError) as error:  # ValueError: it was closed, by an exit in the middle of a write, say
            self._file = None
            file.give_up()
            logger.warning("the trace %s ends here, and the run goes on: %s", printable(str(self.path)), error)


class _Counters:
    """How full the channels are, how fast the consumer is, and how much of its time it waits."""

    def __init__(self, meters: Meters) -> None:
        self.at = -math.inf
        self._meters = meters
        self._before: dict[str, dict[str, float]] = {}
        self._items, self._waited_s = 0, 0.0

    def changed(self, now: float) -> dict[str, dict[str, float]]:
        """Return those that have changed since the last call, by name, with their units."""
        found: dict[str, dict[str, float]] = {}
        for (name, _), meter in list(self._meters.channels.items()):
            channel = found.setdefault(f"channel after {printable(name)}", {"items": 0})
            channel["items"] += meter.depth
        consumer = self._meters.consumer
        items, waited_s = consumer.items, consumer.wait_s_until(now)
        took = now - max(self.at, consumer.opened_at)
        if took > 0:
            share = min(1.0, max(0.0, (waited_s - self._waited_s) / took))
            found["consumer waits"] = {"%": round(100 * share, 1)}
            found["consumer takes"] = {"items/s": round((items - self._items) / took, 1)}
        self.at, self._items, self._waited_s = now, items, waited_s
        changed = {name: values for name, values in found.items() if self._before.get(name) != values}
        self._before |= found
        return changed


@dataclass(slots=True)
class _Lane:
    """One line of a track, on which nothing overlaps: what a viewer calls a thread."""

    pid: int  # of what viewers take for a process: this one's is 1, that of host n is n + 2
    tid: int
    end: float = -math.inf  # of the last span on it


END = b"\n]\n"


class TraceFile:
    """A file of events. Not thread-safe. Each method raises `OSError`: it can't be made, or written."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path, "w")
        self._waiting = bytearray()
        self._written = 0

    @property
    def size(self) -> int:
        """Bytes in it, and of what waits."""
        return self._written + len(self._waiting)

    def write(self, event: Event) -> None:
        """Take one event; it is in the file after the next `flush`, or sooner."""
        self._waiting += (b",\n" if self.size else b"[\n") + msgspec.json.encode(event)
        if len(self._waiting) > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        data, self._waiting = self._waiting, bytearray()
        self._append(data)

    def close(self) -> None:
        """Write what waits, and the end."""
        try:
            self.flush()
            self._append(END)
        finally:
            self._file.close()

    def give_up(self) -> None:
        """Close after a write that failed: without half an event, and with an end if there is room for so much."""
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._file.truncate(self._written)
            self._file.seek(self._written)
            self._append(END)
        with suppress(OSError):
            self._file.close()

    def _append(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self._written += len(data)
