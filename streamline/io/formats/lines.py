"""Files of lines, read from any line on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

from streamline.core.counters import Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.errors import DataError, PlanError
from streamline.io.fetch.file import File, FilePart
from streamline.io.formats.base import Place
from streamline.io.formats.compression import named, not_splittable
from streamline.io.formats.line_decoding import BOM, MAX_LINE_BYTES, Decode, Fault, Splitter, check_lengths
from streamline.io.formats.line_reader import LineSlice, LineState, LineStates, TextFormat, TooLong, next_chunk, slices
from streamline.sharding.split import byte_range

T = TypeVar("T")

SLICE_LINES = LIST_ITEMS * 7 // 8
"""Lines that a slice should have: the length of the next ones is a guess, and more than a list makes two of it."""


@dataclass(frozen=True, kw_only=True)
class LineFormat(TextFormat[T]):
    """Files of lines. Place: see `line_reader`.

    Attributes:
      made_by: the public function.
      decode: makes items of lines.
      max_line_bytes: a longer line is an error.
    """

    reread: ClassVar[str] = "seeks to its line (compressed: unpacks up to it)"

    made_by: str
    decode: Decode[T] = field(repr=False)
    max_line_bytes: int = MAX_LINE_BYTES

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.made_by

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        kind = named(path)
        return None if kind is None else not_splittable(path, num_shards, kind)

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[T]:
        meter = demand.meter
        with Working(meter):
            cursor = await _cursor(self, file, begin, after, name)
        if cursor.done():
            return
        skipping = demand.skips is not None and demand.skips.active
        async with aclosing(slices(file, cursor.byte, cursor.splitter, cursor.wrong, skipping)) as found_slices:
            while True:
                with Working(meter):
                    found = await anext(found_slices, None)
                if found is None:
                    return
                chunks = cursor.chunks(*found, demand)
                while (chunk := next_chunk(chunks, meter)) is not None:
                    yield chunk
                if cursor.done():
                    return


async def _cursor(reader: LineFormat[T], file: File, begin: Place, after: Place, name: str) -> _LineCursor[T]:
    """Return a cursor at `begin`; the beginning of a share of a file is where its first line is."""
    part, start, stop = file.part, 0, None
    if part.num_shards > 1:
        size = await file.size("splitting it into shards")
        start, stop = byte_range(size, part.num_shards, part.shard)
    byte, in_line = begin["byte"], False
    if start and not byte:
        byte, in_line = start - 1, True
    return _LineCursor(reader, name, part, after, begin["line"], byte, in_line, stop)


class _LineCursor(Generic[T]):
    """Where the reading of one file is, and what turns the next slice into a chunk.

    Attributes:
      line: lines before the next slice.
      byte: where the next slice begins.
      in_line: whether it begins inside a line that belongs to the shard before.
    """

    def __init__(
        self,
        reader: LineFormat[T],
        name: str,
        part: FilePart,
        after: Place,
        line: int,
        byte: int,
        in_line: bool,
        stop: int | None,
    ) -> None:
        self._reader = reader
        self._name = name
        self._path = part.path
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

    def chunks(self, raw: bytes | TooLong, final: bool, demand: Demand) -> Iterator[Chunk[T]]:
        """Yield the items of the next slice; after a line that is left out, only the place."""
        if isinstance(raw, TooLong):
            if not raw.size:
                raise raw.error
            if self.in_line:  # the shard before says so
                self.in_line = False
                self._pass(raw.size)
                return
            demand.judge(raw.error, raw.head, self._after_line(raw.size, None))
            yield Chunk((), (), self._left_out(raw.size, self._after if final else None))
            return
        raw = self._owned(raw)
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
            demand.judge(error, raw[:size], self._after_line(size, None))
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
        where = LineSlice(self._path, self._shard, self.line, self.byte, raw, decoded.lines, successor)
        self.line += decoded.lines
        self.byte += len(raw)
        self.splitter.learn(decoded.lines, len(raw))
        name, kept, last = self._name, decoded.kept, decoded.lines - 1
        trailing = kept is not None and (not kept or kept[-1] != last)  # skipped lines after the last item
        after = LineState(name, where, last) if trailing else None
        return Chunk(decoded.items, LineStates(name, where, kept), after), fault

    def _after_line(self, size: int, successor: Place | None) -> LineState:
        """Return the state after the next line, of `size` bytes with its end."""
        where = LineSlice(self._path, self._shard, self.line, self.byte + size, b"", 1, successor)
        return LineState(self._name, where, 0)

    def _left_out(self, size: int, successor: Place | None) -> LineState:
        """Go on after the next line, and return the state there."""
        after = self._after_line(size, successor)
        self.line += 1
        self._pass(size)
        return after

    def _pass(self, size: int) -> None:
        self.byte += size
        self._over = self._over or (self._stop is not None and self.byte >= self._stop)

    def wrong(self, reason: str) -> DataError:
        """Return the exception for the next line."""
        return self.error(Fault(0, 0, reason))

    def error(self, fault: Fault) -> DataError:
        """Return the exception for a line of the next slice."""
        line, byte = self.line + fault.line + 1, self.byte + fault.at
        error = DataError(f"{self._path} line {line}{self._shard} (byte {byte}): {fault.reason}")
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
