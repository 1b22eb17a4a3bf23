"""Trace events in a file that is bounded, and can be loaded at every moment.

The JSON array form of the trace-event format: an array that lacks its end is put up with by its viewers, so events are
written whole, each with the comma before it, and the end comes last. A file that has its share becomes
"NAME.previous.json", in place of an earlier one, and another begins.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

__all__ = ["Event", "TraceFile", "previous_of"]

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
        """Take one event; it is in the file behind the next `flush`, or sooner."""
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
        """Close behind a write that failed: with an end if there is room for so much."""
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
