"""Files of lines, read from any line on: as slices of whole lines, and the states of these.

The place of a reader of lines is {"file", "line", "byte"}. `file` is named as it was opened; `line` is the 1-based
number of the last line consumed, 0 before the first; `byte` is the offset after it, in decompressed bytes. A `file` of
None means that nothing is left. In a contiguous shard other than the first, lines are counted from the shard's own
start, because what is before it has not been read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Generic, TypeVar

from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Lists, StageContext
from streamline.core.meters import HoldTimer, Working
from streamline.core.state import State, States, Tally, Tree
from streamline.errors import DataError
from streamline.io.fetch.file import File, FilePart
from streamline.io.formats.base import Format, Place
from streamline.io.formats.byte_stream import pieces
from streamline.io.formats.compression import compression_of_name
from streamline.io.formats.line_decoding import (
    BOM,
    MAX_LINE_BYTES,
    Decode,
    DecodedSlice,
    Fault,
    Splitter,
    check_lengths,
)
from streamline.sharding.split import byte_range

T = TypeVar("T")

SLICE_LINES = LIST_ITEMS * 7 // 8
"""Lines that a slice should have: the length of the next ones is a guess, and more than a list makes two of it."""


@dataclass(frozen=True)
class TooLong:
    """A line that is too long, and was skipped; `size`: its bytes, with its end; 0: reading ends there."""

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

    counts: ClassVar[tuple[str, ...]] = ("line", "byte")

    def grows(self, path: str) -> bool:
        return compression_of_name(path) is None

    def stands(self, place: Place) -> str:
        path, line, byte = place["file"], place["line"], place["byte"]
        if path is None:
            return "nothing is left"
        how = "seeks" if compression_of_name(path) is None else f"decompresses {byte:,} bytes to get there"
        return f"{path}, line {line:,}, byte {byte:,}{f' ({how})' if byte else ''}"

    async def chunks(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[T]:
        meter, skipping = context.meter, context.skips is not None and context.skips.active
        with Working(meter):
            cursor = await self.cursor(file, begin, after, name)
        async with aclosing(slices(file, cursor.byte, cursor.splitter, cursor.wrong, skipping)) as parts:
            part: tuple[bytes | TooLong, bool] | None = (b"", False)
            while part is not None and not cursor.over:
                with Working(meter):
                    part = await anext(parts, None)
                chunks = cursor.chunks(*(part or (b"", True)), context)
                while True:
                    with HoldTimer(meter):
                        chunk = next(chunks, None)
                    if chunk is None:
                        break
                    yield chunk

    @abstractmethod
    async def cursor(self, file: File, begin: Place, after: Place, name: str) -> TextCursor[T]:
        """Return what reads from `begin` on."""


class LineSlice:
    """Some lines of one file, and where they are.

    Args:
      shard: " (of shard 2)" where lines are counted from the shard's own start, else "".
      line: lines before it.
      byte: where it begins.
      raw: whole lines.
      successor: the place after the last line, where that is another one: the next file's.
    """

    __slots__ = ("_asked", "_byte", "_ends", "_file", "_line", "_lines", "_raw", "_shard", "_stop", "_successor")

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
        self._ends: list[int] | None = None  # where each line ends: where the bytes are not here, or it is asked often
        self._asked = False

    def cut(self, first: int, count: int) -> LineSlice:
        """Return lines first ... first + count - 1 of this slice, without their bytes: to be sent."""
        successor = self._successor if first + count == self._lines else None
        found = LineSlice(self._file, self._shard, self._line + first, self._byte, b"", count, successor)
        found._ends = self._all_ends()[first : first + count]
        return found

    def _all_ends(self) -> list[int]:
        if self._ends is None:
            lengths = map(len, self._raw.split(b"\n", self._lines - 1)[:-1])
            ends = [self._byte + end + at for at, end in enumerate(accumulate(lengths), 1)]
            self._ends = [*ends, self._stop]
        return self._ends

    def after(self, index: int) -> Place:
        asked, self._asked = self._asked, True
        if self._ends is not None or asked:  # finding all of them takes as long as finding two
            byte = self._all_ends()[index]
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


@dataclass(slots=True, eq=False)
class LineState(State):
    """The state after a line; turned into a place only when it is read."""

    _name: str
    _slice: LineSlice
    _index: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the other lines."""
        return LineState, (self._name, self._slice.cut(self._index, 1), 0)

    def json(self, until: State | None = None) -> Tree:
        return {self._name: dict(self._slice.json(self._index))}

    def tally(self, found: Tally) -> None:
        """A source adds nothing."""

    def where(self) -> str:
        return self._slice.where(self._index)


@dataclass(slots=True, eq=False)
class LineStates:
    """The states after the items of a slice; `kept` are their lines, None: item i is line i."""

    _name: str
    _slice: LineSlice
    _kept: Sequence[int] | None

    def __getitem__(self, index: int, /) -> State:
        return LineState(self._name, self._slice, index if self._kept is None else self._kept[index])

    def trimmed(self, first: int, count: int) -> States:
        if self._kept is None:
            return LineStates(self._name, self._slice.cut(first, count), None)
        kept = self._kept[first : first + count]
        start = kept[0]
        part = self._slice.cut(start, kept[-1] + 1 - start)
        return LineStates(self._name, part, [line - start for line in kept])


class TextCursor(ABC, Generic[T]):
    """Where the reading of one file is, and what turns the next slice into chunks.

    Attributes:
      line: lines before the next slice.
      byte: where the next slice begins.
      over: whether all that belongs to this part of the file has been taken.
    """

    over = False

    def __init__(
        self, name: str, path: str, shard: str, line: int, byte: int, after: Place, splitter: Splitter
    ) -> None:
        self._name, self._path, self._shard, self._after = name, path, shard, after
        self.line, self.byte, self.splitter = line, byte, splitter

    @abstractmethod
    def chunks(self, raw: bytes | TooLong, final: bool, context: StageContext) -> Iterator[Chunk[T]]:
        """Yield the items of the next slice, b"" at the end; after something that is left out, only the place."""

    def wrong(self, reason: str) -> DataError:
        """Return the exception for the next line."""
        return self.error(Fault(0, 0, reason))

    def error(self, fault: Fault) -> DataError:
        """Return the exception for a line of the next slice."""
        line, byte = self.line + fault.line + 1, self.byte + fault.at
        error = DataError(f"{self._path} line {line}{self._shard} (byte {byte}): {fault.reason}")
        error.__cause__ = fault.cause
        return error

    def _take_lines(self, decoded: DecodedSlice[T], raw: bytes, successor: Place | None) -> Chunk[T]:
        """Go on after the lines `raw`, and return their items."""
        name, kept, last = self._name, decoded.kept, decoded.lines - 1
        where = LineSlice(self._path, self._shard, self.line, self.byte, raw, decoded.lines, successor)
        self._pass(decoded.lines, len(raw))
        trailing = kept is not None and (not kept or kept[-1] != last)  # skipped lines after the last item
        after = LineState(name, where, last) if trailing else None
        return Chunk(decoded.items, LineStates(name, where, kept), after)

    def _leave_out(
        self, error: DataError, raw: bytes, lines: int, size: int, final: bool, context: StageContext
    ) -> Chunk[T]:
        """Go on after the next lines, which are bad, if they may be left out."""
        context.skip_or_raise(error, raw, self._state_after(lines, size, None))
        after = self._state_after(lines, size, self._after if final else None)
        self._pass(lines, size)
        return Chunk((), (), after)

    def _state_after(self, lines: int, size: int, successor: Place | None) -> LineState:
        where = LineSlice(self._path, self._shard, self.line + lines - 1, self.byte + size, b"", 1, successor)
        return LineState(self._name, where, 0)

    def _pass(self, lines: int, size: int) -> None:
        self.line += lines
        self.byte += size


@dataclass(frozen=True, kw_only=True)
class LineFormat(TextFormat[T]):
    reread: ClassVar[str] = "seeks to its line (compressed: unpacks up to it)"
    splits: ClassVar[bool] = True

    made_by: str
    decode: Decode[T] = field(repr=False)
    max_line_bytes: int = MAX_LINE_BYTES

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.made_by

    async def cursor(self, file: File, begin: Place, after: Place, name: str) -> _LineCursor[T]:
        """Return a cursor at `begin`; the beginning of a share of a file is where its first line is."""
        part, start, stop = file.part, 0, None
        if part.num_shards > 1:
            size = await file.size("splitting it into shards")
            start, stop = byte_range(size, part.num_shards, part.shard)
        byte, in_line = begin["byte"], False
        if start and not byte:
            byte, in_line = start - 1, True
        return _LineCursor(self, name, part, after, begin["line"], byte, in_line, stop)


class _LineCursor(TextCursor[T]):
    def __init__(
        self, reader: LineFormat[T], name: str, part: FilePart, after: Place, line: int, byte: int, in_line: bool,
        stop: int | None,
    ) -> None:  # fmt: skip
        splitter = Splitter(reader.max_line_bytes, SLICE_LINES, LIST_ITEMS)
        shard = f" of shard {part.shard}" if part.shard else ""
        super().__init__(name, part.path, shard, line, byte, after, splitter)
        self._reader, self._stop = reader, stop
        self._in_line = in_line  # whether the next slice begins inside a line that belongs to the shard before
        self.over = stop is not None and byte + in_line >= stop

    def chunks(self, raw: bytes | TooLong, final: bool, context: StageContext) -> Iterator[Chunk[T]]:
        if isinstance(raw, TooLong):
            if not raw.size:
                raise raw.error
            if self._in_line:  # the shard before says so
                self._in_line = False
                self._pass(0, raw.size)
                return
            yield self._leave_out(raw.error, raw.head, 1, raw.size, final, context)
            return
        raw = self._own_lines(raw)
        if not self.byte and raw.startswith(BOM):
            raw = raw[len(BOM) :]
            self.byte = len(BOM)
        while raw:
            chunk, fault = self._take(raw, final)
            if fault is None:
                if chunk is not None:
                    yield chunk
                return
            error = self.error(replace(fault, line=0, at=0))  # it is the next line now
            if chunk is not None:
                yield chunk
            raw = raw[fault.at :]
            size = raw.find(b"\n") + 1 or len(raw)
            yield self._leave_out(error, raw[:size], 1, size, final and size == len(raw), context)
            raw = raw[size:]

    def _take(self, raw: bytes, final: bool) -> tuple[Chunk[T] | None, Fault | None]:
        """Return the items of some lines up to the first that can't be decoded, if there are any, and that."""
        fault = check_lengths(raw, self._reader.max_line_bytes)
        decoded = self._reader.decode(raw if fault is None else raw[: fault.at])
        fault = decoded.fault or fault
        if fault is not None:
            raw = raw[: fault.at]
        if not decoded.lines:
            return None, fault
        self.splitter.learn(decoded.lines, len(raw))
        return self._take_lines(decoded, raw, self._after if final and fault is None else None), fault

    def _pass(self, lines: int, size: int) -> None:
        super()._pass(lines, size)
        self.over = self.over or (self._stop is not None and self.byte >= self._stop)

    def _own_lines(self, raw: bytes) -> bytes:
        """Return the lines of a slice that begin in this part of the file."""
        if self._in_line:
            cut = raw.find(b"\n") + 1 or len(raw)
            self._in_line = False
            self.byte += cut
            raw = raw[cut:]
        if self._stop is None or self.byte + len(raw) < self._stop:
            return raw
        self.over = True
        if self.byte >= self._stop:
            return b""
        return raw[: raw.find(b"\n", self._stop - 1 - self.byte) + 1 or len(raw)]
