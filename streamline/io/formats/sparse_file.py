"""A file of which only some spans are in memory: those that a reader of columns has fetched. Pure."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, TypeAlias

Span: TypeAlias = tuple[int, int]
"""Bytes from ... to, in a file."""

HOLE_BYTES = 64 * 1024
"""A hole that is read along: it takes as long as 1 ms of waiting at 64 MB/s, less than any request."""

SPAN_BYTES = 32 * 1024 * 1024
"""Spans are not joined beyond this size, so that several requests share a large group. Arrow's own limit."""


def coalesced(spans: Iterable[Span], hole: int = HOLE_BYTES, most: int = SPAN_BYTES) -> list[Span]:
    """Return spans, sorted, with near ones joined; none is cut, so each lies whole in one of the results."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1] + hole:
            begin, end = found[-1]
            if start < end or stop - begin <= most:
                found[-1] = begin, max(end, stop)
                continue
        found.append((start, stop))
    return found


def from_start(start: int, hole: int = HOLE_BYTES) -> int:
    """Return where the first span of a file is read from: what little is before it is read along.

    It isn't needed; but a file that is read whole is kept in a `cache_dir=`.
    """
    return 0 if start <= hole else start


class AbsentError(EOFError):
    """Bytes `start` to `stop` are not in memory."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(f"bytes {start:,} to {stop:,} are not where the file says that its data are")
        self.start = start
        self.stop = stop


class SparseFile(io.RawIOBase):
    """A readable file that gives what has been put into it, without copying, and fails on the rest."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0
        self._held: list[tuple[int, memoryview]] = []

    def hold(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Hold these (start, bytes), and nothing else."""
        self._held = sorted(((start, memoryview(data)) for start, data in pieces), key=_start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("before the file's beginning")
        self._at = at
        return at

    def read(self, size: int = -1) -> memoryview:
        start = self._at
        stop = self._size if size < 0 else min(self._size, start + size)
        if stop <= start:
            return memoryview(b"")
        index = bisect_right(self._held, start, key=_start)
        for begin, data in reversed(self._held[:index]):  # nearly always the first: few spans lie in another one
            if stop <= begin + len(data):
                self._at = stop
                return data[start - begin : stop - begin]
        raise AbsentError(start, stop)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


class AbsentFile(SparseFile):
    """Has a size, and no byte.

    Attributes:
      error: what it raises. pyarrow keeps it for good, so the caller clears its traceback, which holds frames.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.error = EOFError("no data are here")

    def read(self, size: int = -1) -> memoryview:
        raise self.error


def _start(held: tuple[int, memoryview]) -> int:
    return held[0]
