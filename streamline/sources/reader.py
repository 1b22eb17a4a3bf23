"""Reading files of lines, one after the other, from any line on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamline.errors import DataError, ReadError
from streamline.flow import LIST_ITEMS, Chunk, Lists
from streamline.formats.lines import Decode, Fault, Splitter, check_lengths
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
    """

    name: str
    decode: Decode[T]
    max_line_bytes: int

    async def lists(self, parts: Sequence[FilePart], place: Place, http: HttpOptions | None) -> Lists[T]:
        """Yield what is left.

        Args:
          parts: the file in which `place` is, and those behind it.
          place: where to begin.
          http: how URLs are read.

        Raises:
          DataError: a line that can't be decoded; what is before it has been yielded.
          ReadError: a file that can't be read.
          PlanError: a gzip file that was to be split.
        """
        async with aclosing(Storages(http)) as storages:
            for index, part in enumerate(parts):
                begin = begin_of(part.path) if index else place
                after = begin_of(parts[index + 1].path) if index + 1 < len(parts) else OVER
                async with aclosing(self._file(part, begin, after, storages.of(part.path))) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _file(self, part: FilePart, begin: Place, after: Place, storage: Storage) -> Lists[T]:
        cursor = await _cursor(self, part, begin, after, storage)
        if cursor.done():
            return
        async with aclosing(_slices(cursor, storage, part)) as slices:
            async for raw, final in slices:
                chunk = cursor.take(raw, final)
                if chunk is not None:
                    yield chunk
                if cursor.failure is not None:
                    raise cursor.failure
                if cursor.done():
                    return


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


async def _slices(cursor: _Cursor[T], storage: Storage, part: FilePart) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Yield slices of whole lines from the cursor on, and whether one is known to be the file's last."""
    splitter = cursor.splitter
    async with aclosing(pieces(storage, part.path, cursor.byte, part.num_shards)) as blocks:
        async for block, last in blocks:
            splitter.feed(block)
            try:
                while raw := splitter.cut():
                    yield raw, last and splitter.empty
            except DataError as error:
                raise cursor.error(Fault(0, 0, str(error))) from None
    if raw := splitter.rest():
        yield raw, True


class _Cursor(Generic[T]):
    """Where the reading of one file is, and what turns the next slice into a chunk.

    Attributes:
      line: lines before the next slice.
      byte: where the next slice begins.
      in_line: whether it begins inside a line that belongs to the shard before.
      failure: what is to be raised behind the last chunk.
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
        self.failure: Exception | None = None
        self._over = stop is not None and byte + in_line >= stop

    def done(self) -> bool:
        """Whether all that belongs to this part of the file has been taken."""
        return self._over

    def take(self, raw: bytes, final: bool) -> Chunk[T] | None:
        """Return the items of the next slice; None if there is nothing in it."""
        raw = self._owned(raw)
        fault = check_lengths(raw, self._reader.max_line_bytes)
        decoded = self._reader.decode(raw if fault is None else raw[: fault.at])
        fault = decoded.fault or fault
        if fault is not None:
            self.failure = self.error(fault)
            raw = raw[: fault.at]
        if not decoded.lines:
            return None
        successor = self._after if final and fault is None else None
        where = Slice(self._part.path, self._shard, self.line, self.byte, raw, decoded.lines, successor)
        self.line += decoded.lines
        self.byte += len(raw)
        self.splitter.learn(decoded.lines, len(raw))
        name, kept, last = self._reader.name, decoded.kept, decoded.lines - 1
        trailing = kept is not None and (not kept or kept[-1] != last)  # skipped lines behind the last item
        return Chunk(decoded.items, LineStates(name, where, kept), LineState(name, where, last) if trailing else None)

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
