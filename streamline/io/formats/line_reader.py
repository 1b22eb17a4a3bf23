"""A file as slices of whole lines, from any byte on, and the states of its lines.

The place of a reader of lines is {"file", "line", "byte"}. `file` is named as it was opened; `line` is the 1-based
number of the last line consumed, 0 before the first; `byte` is the offset after it, in decompressed bytes. A `file` of
None means that nothing is left. In a contiguous shard other than the first, lines are counted from the shard's own
start, because what is before it has not been read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

from streamline.core.counters import HoldTimer, StageMeter
from streamline.core.flow import LIST_ITEMS, Chunk, Demand
from streamline.core.state import State, States, Tally, Tree
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Format, Place
from streamline.io.formats.byte_stream import pieces
from streamline.io.formats.compression import named
from streamline.io.formats.line_decoding import DecodedSlice, Fault, Splitter

T = TypeVar("T")

SLICE_LINES = LIST_ITEMS * 7 // 8
"""Lines that a slice should have: the length of the next ones is a guess, and more than a list makes two of it."""


@dataclass(frozen=True)
class TooLong:
    """A line that is too long, and was skipped.

    Attributes:
      size: its bytes with its end; 0: reading ends there.
      error: what is wrong with it.
      head: how it begins.
    """

    size: int
    error: DataError
    head: bytes


async def slices(
    file: File,
    start: int,
    splitter: Splitter,
    wrong: Callable[[str], DataError],
    skipping: bool,
    stop: int | None = None,
) -> AsyncGenerator[tuple[bytes | TooLong, bool], None]:
    """Yield slices of whole lines from byte `start` on, and whether one is known to be the file's last.

    Args:
      splitter: cuts them; empty.
      wrong: makes the error for the line after the slice yielded last, from the reason.
      skipping: go on after a line that is too long; else it is the last that is yielded.
      stop: as `pieces`.
    """
    long: TooLong | None = None
    async with aclosing(pieces(file, start, stop)) as blocks:
        async for block, last in blocks:
            splitter.feed(block)
            if long is not None and splitter.drop():
                yield replace(long, size=splitter.dropped), last and splitter.empty
                long = None
            if long is not None:
                continue
            try:
                while raw := splitter.cut():
                    yield raw, last and splitter.empty
            except DataError as error:
                long = TooLong(0, wrong(str(error)), splitter.begin_dropping())
                if not skipping:
                    yield long, False
                    return
    if long is not None:
        yield replace(long, size=splitter.dropped), True
    elif raw := splitter.rest():
        yield raw, True


@dataclass(frozen=True, kw_only=True)
class TextFormat(Format[T]):
    """Lines, or records of lines."""

    def begin(self, path: str | None) -> Place:
        return {"file": path, "line": 0, "byte": 0}

    def grows(self, path: str) -> bool:
        return named(path) is None

    def stands(self, place: Place) -> str:
        path, line, byte = place["file"], place["line"], place["byte"]
        if path is None:
            return "nothing is left"
        how = "seeks" if named(path) is None else f"decompresses {byte:,} bytes to get there"
        return f"{path}, line {line:,}, byte {byte:,}{f' ({how})' if byte else ''}"


def next_chunk(chunks: Iterator[Chunk[T]], meter: StageMeter | None) -> Chunk[T] | None:
    """Decode the next list of a block; None: there are no more."""
    with HoldTimer(meter):
        return next(chunks, None)


class LineSlice:
    """Some lines of one file, and where they are.

    Args:
      file: as opened.
      shard: " (of shard 2)" where lines are counted from the shard's own start, else "".
      line: lines before it.
      byte: where it begins.
      raw: whole lines.
      lines: how many.
      successor: the place after the last line, where that is another one: the next file's.
    """

    __slots__ = ("_byte", "_ends", "_file", "_line", "_lines", "_raw", "_shard", "_stop", "_successor")

    def __init__(
        self, file: str, shard: str, line: int, byte: int, raw: bytes, lines: int, successor: Place | None
    ) -> None:
        self._file = file
        self._shard = shard
        self._line = line
        self._byte = byte
        self._stop = byte + len(raw)
        self._raw = raw if lines > 1 else b""  # one line may be huge, and its end is known
        self._lines = lines
        self._successor = successor
        self._ends: list[int] | None = None  # where each line ends, where the bytes themselves are not here

    def cut(self, first: int, count: int) -> LineSlice:
        """Return lines first ... first + count - 1 of this slice, without their bytes: to be sent."""
        if self._ends is None:
            lengths = map(len, self._raw.split(b"\n", self._lines - 1)[:-1])
            self._ends = [self._byte + end + at for at, end in enumerate(accumulate(lengths), 1)]
            self._ends.append(self._stop)
        successor = self._successor if first + count == self._lines else None
        found = LineSlice(self._file, self._shard, self._line + first, self._byte, b"", count, successor)
        found._ends = self._ends[first : first + count]
        return found

    def after(self, index: int) -> Place:
        """Return the place after line `index` of this slice."""
        if self._ends is not None:
            byte = self._ends[index]
        else:
            byte = self._stop - (0 if index == self._lines - 1 else len(self._raw.split(b"\n", index + 1)[-1]))
        return {"file": self._file, "line": self._line + index + 1, "byte": byte}

    def json(self, index: int) -> Place:
        """Return where a resume after line `index` begins to read."""
        if index == self._lines - 1 and self._successor is not None:
            return self._successor
        return self.after(index)

    def where(self, index: int) -> str:
        """Return where line `index` is, for messages."""
        place = self.after(index)
        return f"{self._file} line {place['line']}{self._shard} (ends at byte {place['byte']})"


class LineState(State):
    """The state after a line; turned into a place only when it is read."""

    __slots__ = ("_index", "_name", "_slice")

    def __init__(self, name: str, of: LineSlice, index: int) -> None:
        self._name = name
        self._slice = of
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the other lines."""
        return LineState, (self._name, self._slice.cut(self._index, 1), 0)

    def json(self, until: State | None = None) -> Tree:
        return {self._name: dict(self._slice.json(self._index))}

    def tally(self, found: Tally) -> None:
        """A source adds nothing."""

    def where(self) -> str:
        return self._slice.where(self._index)


class LineStates:
    """The states after the items of a slice; `kept` are their lines, None: item i is line i."""

    __slots__ = ("_kept", "_name", "_slice")

    def __init__(self, name: str, of: LineSlice, kept: Sequence[int] | None) -> None:
        self._name = name
        self._slice = of
        self._kept = kept

    def __getitem__(self, index: int, /) -> State:
        return LineState(self._name, self._slice, index if self._kept is None else self._kept[index])

    def trimmed(self, first: int, count: int) -> States:
        if self._kept is None:
            return LineStates(self._name, self._slice.cut(first, count), None)
        kept = self._kept[first : first + count]
        start = kept[0]
        part = self._slice.cut(start, kept[-1] + 1 - start)
        return LineStates(self._name, part, [line - start for line in kept])


class TextCursor(Generic[T]):
    """Where the reading of one file is, and the chunks and states of what comes next.

    Attributes:
      line: lines before the next slice.
      byte: where the next slice begins.
      splitter: cuts the file into slices.
    """

    def __init__(
        self, name: str, path: str, shard: str, line: int, byte: int, after: Place, splitter: Splitter
    ) -> None:
        self._name, self._path, self._shard, self._after = name, path, shard, after
        self.line, self.byte, self.splitter = line, byte, splitter

    def error(self, fault: Fault) -> DataError:
        """Return the exception for a line of the next slice."""
        line, byte = self.line + fault.line + 1, self.byte + fault.at
        error = DataError(f"{self._path} line {line}{self._shard} (byte {byte}): {fault.reason}")
        error.__cause__ = fault.cause
        return error

    def _taken(self, decoded: DecodedSlice[T], raw: bytes, successor: Place | None) -> Chunk[T]:
        """Go on after the lines `raw`, and return their items."""
        name, kept, last = self._name, decoded.kept, decoded.lines - 1
        where = LineSlice(self._path, self._shard, self.line, self.byte, raw, decoded.lines, successor)
        self._pass(decoded.lines, len(raw))
        trailing = kept is not None and (not kept or kept[-1] != last)  # skipped lines after the last item
        after = LineState(name, where, last) if trailing else None
        return Chunk(decoded.items, LineStates(name, where, kept), after)

    def _leave_out(self, error: DataError, raw: bytes, lines: int, size: int, final: bool, demand: Demand) -> Chunk[T]:
        """Go on after the next lines, which are bad, if they may be left out."""
        demand.judge(error, raw, self._state_after(lines, size, None))
        after = self._state_after(lines, size, self._after if final else None)
        self._pass(lines, size)
        return Chunk((), (), after)

    def _state_after(self, lines: int, size: int, successor: Place | None) -> LineState:
        where = LineSlice(self._path, self._shard, self.line + lines - 1, self.byte + size, b"", 1, successor)
        return LineState(self._name, where, 0)

    def _pass(self, lines: int, size: int) -> None:
        self.line += lines
        self.byte += size
