"""Files of lines, read from any line on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from streamline.core.counters import Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.errors import DataError, PlanError
from streamline.io.fetch.file import File, FilePart
from streamline.io.formats.base import Place
from streamline.io.formats.compression import named, not_splittable
from streamline.io.formats.line_decoding import BOM, MAX_LINE_BYTES, Decode, Fault, Splitter, check_lengths
from streamline.io.formats.line_reader import SLICE_LINES, TextCursor, TextFormat, TooLong, next_chunk, slices
from streamline.sharding.split import byte_range

T = TypeVar("T")


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


class _LineCursor(TextCursor[T]):
    """Where the reading of one file is, and what turns the next slice into chunks.

    Attributes:
      in_line: whether the next slice begins inside a line that belongs to the shard before.
    """

    def __init__(
        self, reader: LineFormat[T], name: str, part: FilePart, after: Place, line: int, byte: int, in_line: bool,
        stop: int | None,
    ) -> None:  # fmt: skip
        splitter = Splitter(reader.max_line_bytes, SLICE_LINES, LIST_ITEMS)
        shard = f" of shard {part.shard}" if part.shard else ""
        super().__init__(name, part.path, shard, line, byte, after, splitter)
        self._reader, self._stop = reader, stop
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
                self._pass(0, raw.size)
                return
            yield self._leave_out(raw.error, raw.head, 1, raw.size, final, demand)
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
            yield self._leave_out(error, raw[:size], 1, size, final and size == len(raw), demand)
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
        return self._taken(decoded, raw, self._after if final and fault is None else None), fault

    def _pass(self, lines: int, size: int) -> None:
        super()._pass(lines, size)
        self._over = self._over or (self._stop is not None and self.byte >= self._stop)

    def wrong(self, reason: str) -> DataError:
        """Return the exception for the next line."""
        return self.error(Fault(0, 0, reason))

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
