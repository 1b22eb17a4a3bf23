"""Reading files of lines, one after the other, from any line on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from streamline.errors import DataError, ReadError
from streamline.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.formats.lines import Decode, Fault, Splitter, check_lengths
from streamline.meters.stage_meter import Holding, StageMeter, Working
from streamline.sharding import byte_range
from streamline.sources.pieces import pieces
from streamline.sources.positions import OVER, LineState, LineStates, Place, Slice, begin_of
from streamline.sources.storage import HttpOptions, Storage, Storages

__all__ = ["FilePart", "LineReader"]

T = TypeVar("T")

SLICE_LINES = LIST_ITEMS * 7 // 8
"""Lines that a slice should have: the length of the next ones is a guess, and more than a list makes two of it."""


@dataclass(frozen=True)
class FilePart:
    """A file, or the part of it that one of several shards owns.

    Attributes:
      path: path or URL.
      shard: owns the lines that begin in its share of the bytes.
      num_shards: shards that share the file; 1: it is read whole.
    """

    path: str
    shard: int = 0
    num_shards: int = 1


@dataclass(frozen=True)
class LineReader(Generic[T]):
    """Makes chunks of items out of files.

    Attributes:
      name: of the source; states are kept under it.
      decode: makes items of lines.
      max_line_bytes: a longer line is an error.
      meter: told of the time spent in reading and decoding; None: nobody counts.
    """

    name: str
    decode: Decode[T]
    max_line_bytes: int
    meter: StageMeter | None = None

    async def lists(
        self, parts: Sequence[FilePart], place: Place, http: HttpOptions | None, demand: Demand
    ) -> Lists[T]:
        """Yield what is left.

        Args:
          parts: the file in which `place` is, and those behind it.
          place: where to begin.
          http: how URLs are read.
          demand: says what is done about a line that can't be decoded.

        Raises:
          DataError: a line that can't be decoded, unless it is to be left out; what is before it has been yielded.
          ReadError: a file that can't be read.
          PlanError: a gzip file that was to be split.
        """
        async with aclosing(Storages(http)) as storages:
            for index, part in enumerate(parts):
                begin = begin_of(part.path) if index else place
                after = begin_of(parts[index + 1].path) if index + 1 < len(parts) else OVER
                async with aclosing(self._file(part, begin, after, storages.of(part.path), demand)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _file(self, part: FilePart, begin: Place, after: Place, storage: Storage, demand: Demand) -> Lists[T]:
        with Working(self.meter):
            cursor = await _cursor(self, part, begin, after, storage)
        if cursor.done():
            return
        skipping = demand.skips is not None and demand.skips.active
        async with aclosing(_slices(cursor, storage, part, skipping)) as slices:
            while True:
                with Working(self.meter):
                    found = await anext(slices, None)
                if found is None:
                    return
                chunks = cursor.chunks(*found, demand)
                while (chunk := self._decoded(chunks)) is not None:
                    yield chunk
                if cursor.done():
                    return

    def _decoded(self, chunks: Iterator[Chunk[T]]) -> Chunk[T] | None:
        """Return the next list out of a block, decoded; None: there are no more."""
        with Holding(self.meter):
            return next(chunks, None)


async def _cursor(reader: LineReader[T], part: FilePart, begin: Place, after: Place, storage: Storage) -> _Cursor[T]:
    """Return a cursor at `begin`; the beginning of a share of a file is where its first line is."""
    start, stop = 0, None
    if part.num_shards > 1:
        size = await storage.size(part.path)
        if size is None:
            raise ReadError(f"{part.path}: the server doesn't tell its size, which splitting it into shards needs")
        start, stop = byte_range(size, part.num_shards, part.shard)
    byte, in_line = begin["byte"], False
    if start and not byte:
        byte, in_line = start - 1, True
    return _Cursor(reader, part, after, begin["line"], byte, in_line, stop)


@dataclass(frozen=True)
class _TooLong:
    """A line that was passed over, unread: its bytes with its end, what is wrong with it, and how it begins."""

    size: int
    error: DataError
    head: bytes


async def _slices(
    cursor: _Cursor[T], storage: Storage, part: FilePart, skipping: bool
) -> AsyncGenerator[tuple[bytes | _TooLong, bool], None]:
    """Yield slices of whole lines from the cursor on, and whether one is known to be the file's last."""
    splitter = cursor.splitter
    long: _TooLong | None = None
    async with aclosing(pieces(storage, part.path, cursor.byte, part.num_shards)) as blocks:
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
                wrong = cursor.error(Fault(0, 0, str(error)))
                if not skipping:
                    raise wrong from None
                long = _TooLong(0, wrong, splitter.begin_dropping())
    if long is not None:
        yield replace(long, size=splitter.dropped), True
    elif raw := splitter.rest():
        yield raw, True


class _Cursor(Generic[T]):
    """Where the reading of one file is, and what turns the next slice into a chunk.

    Attributes:
      line: lines before the next slice.
      byte: where the next slice begins.
      in_line: whether it begins inside a line that belongs to the shard before.
    """

    def __init__(
        self, reader: LineReader[T], part: FilePart, after: Place, line: int, byte: int, in_line: bool, stop: int | None
    ) -> None:
        self._reader = reader
        self._part = part
        self._after = after
        self._stop = stop
        self._shard = f" of shard {part.shard}" if part.shard else ""
        self.splitter = Splitter(reader.max_line_bytes, SLICE_LINES, LIST_ITEMS)
        self.line = line
        self.byte = byte
        self.in_line = in_line
        self._over = stop is not None and byte + in_line >= stop

    def done(self) -> bool:
        """Whether all that belongs to this part of the file has been taken."""
        return self._over

    def chunks(self, raw: bytes | _TooLong, final: bool, demand: Demand) -> Iterator[Chunk[T]]:
        """Yield the items of the next slice; behind a line that is left out, only the place."""
        if isinstance(raw, _TooLong):
            if self.in_line:  # the shard before says so
                self.in_line = False
                self._pass(raw.size)
                return
            demand.judge(raw.error, raw.head, self._behind_line(raw.size, None))
            yield Chunk((), (), self._left_out(raw.size, self._after if final else None))
            return
        raw = self._owned(raw)
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
            demand.judge(error, raw[:size], self._behind_line(size, None))
            yield Chunk((), (), self._left_out(size, self._after if final and size == len(raw) else None))
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
        successor = self._after if final and fault is None else None
        where = Slice(self._part.path, self._shard, self.line, self.byte, raw, decoded.lines, successor)
        self.line += decoded.lines
        self.byte += len(raw)
        self.splitter.learn(decoded.lines, len(raw))
        name, kept, last = self._reader.name, decoded.kept, decoded.lines - 1
        trailing = kept is not None and (not kept or kept[-1] != last)  # skipped lines behind the last item
        after = LineState(name, where, last) if trailing else None
        return Chunk(decoded.items, LineStates(name, where, kept), after), fault

    def _behind_line(self, size: int, successor: Place | None) -> LineState:
        """Return the state behind the next line, of `size` bytes with its end."""
        where = Slice(self._part.path, self._shard, self.line, self.byte + size, b"", 1, successor)
        return LineState(self._reader.name, where, 0)

    def _left_out(self, size: int, successor: Place | None) -> LineState:
        """Go on behind the next line, and return the state there."""
        behind = self._behind_line(size, successor)
        self.line += 1
        self._pass(size)
        return behind

    def _pass(self, size: int) -> None:
        self.byte += size
        self._over = self._over or (self._stop is not None and self.byte >= self._stop)

    def error(self, fault: Fault) -> DataError:
        """Return the exception for a line of the next slice."""
        line, byte = self.line + fault.line + 1, self.byte + fault.at
        error = DataError(f"{self._part.path} line {line}{self._shard} (byte {byte}): {fault.reason}")
        error.__cause__ = fault.cause
        return error

    def _owned(self, raw: bytes) -> bytes:
        """Return the lines of a slice that begin in this part of the file."""
        if self.in_line:
            cut = raw.find(b"\n") + 1 or len(raw)
            self.in_line = False
            self.byte += cut
            raw = raw[cut:]
        if self._stop is None or self.byte + len(raw) < self._stop:
            return raw
        self._over = True
        if self.byte >= self._stop:
            return b""
        return raw[: raw.find(b"\n", self._stop - 1 - self.byte) + 1 or len(raw)]
