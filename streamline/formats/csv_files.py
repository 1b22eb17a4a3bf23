"""CSV files, read from any record on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from streamline.core.counters import HoldTimer, StageMeter, Working
from streamline.core.flow import LIST_ITEMS, Chunk, Demand, Lists
from streamline.errors import DataError, PlanError
from streamline.fetching.file import File
from streamline.formats.base import Format, Place
from streamline.formats.compression import named
from streamline.formats.csv_records import Records, too_long
from streamline.formats.csv_rows import Dialect, Row, bytes_of
from streamline.formats.line_slices import TooLong, slices
from streamline.formats.lines import BOM, SLICE_BYTES, Decoded, Fault, Splitter
from streamline.formats.positions import LineState, LineStates, Slice, stands

__all__ = ["MAX_RECORD_BYTES", "CsvFormat", "Header"]


MAX_RECORD_BYTES = 16 * 1024 * 1024
"""The longest record that is read unless the user says otherwise: more is likely a quote that isn't closed."""


HEAD_BYTES = 64 * 1024
"""Read of a file's beginning for its header: as the first block of a local file."""


SLICE_RECORDS = LIST_ITEMS * 7 // 8
"""Lines that a slice should have, as for files of lines."""


Header = bool | tuple[str, ...]
"""Whether a file's first record names its columns; or their names, if it doesn't."""


@dataclass(frozen=True, kw_only=True)
class CsvFormat(Format[Any]):
    """CSV files. Place: `formats.positions`; `line` is the last line of a record.

    Attributes:
      header: as `Header`; False: items are lists.
      dialect: how fields are told apart.
      max_record_bytes: a longer record is an error.
    """

    kind: ClassVar[str] = "read_csv"
    reread: ClassVar[str] = "seeks to its record, and reads the header (compressed: unpacks up to it)"

    header: Header = True
    dialect: Dialect = field(default_factory=Dialect)
    max_record_bytes: int = MAX_RECORD_BYTES

    def begin(self, path: str | None) -> Place:
        return {"file": path, "line": 0, "byte": 0}

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return PlanError(
            f"{path} can't be split into {num_shards} shards, because a line end in a CSV file may stand inside "
            "quotes, which only reading it from its start tells: split it into several files, or write "
            f'.shard({num_shards}, mode="replicated"): each shard reads all of it'
        )

    def grows(self, path: str) -> bool:
        return named(path) is None

    def options(self) -> dict[str, Any]:
        header = list(self.header) if isinstance(self.header, tuple) else self.header
        return {"header": header, "delimiter": self.dialect.delimiter, "quotechar": self.dialect.quotechar}

    def stands(self, place: Place) -> str:
        return stands(place)

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[Any]:
        meter = demand.meter
        cursor = _Cursor(self, name, file.path, begin, after)
        if begin["byte"] and cursor.records is None:
            with Working(meter):
                await _learn_from_start(cursor, file)
        skipping = demand.skips is not None and demand.skips.active
        async with aclosing(slices(file, begin["byte"], cursor.splitter, cursor.too_long, skipping)) as found:
            while True:
                with Working(meter):
                    part = await anext(found, None)
                chunks = cursor.chunks(*(part or (b"", True)), demand)
                while (chunk := _decoded(chunks, meter)) is not None:
                    yield chunk
                if part is None:
                    return


def _decoded(chunks: Iterator[Chunk[Any]], meter: StageMeter | None) -> Chunk[Any] | None:
    with HoldTimer(meter):
        return next(chunks, None)


async def _learn_from_start(cursor: _Cursor, file: File) -> None:
    """Let a cursor inside a file know what the file's first record says: a bounded read, nothing is read ahead.

    Raises:
      DataError: there is none within the bytes that a record may have.
    """
    for stop in (HEAD_BYTES, cursor.most_bytes + HEAD_BYTES):
        start = cursor.at_start()
        async with aclosing(slices(file, 0, start.splitter, start.too_long, skipping=False, stop=stop)) as found:
            try:
                async for raw, _ in found:
                    if start.learns(raw, final=False):
                        cursor.records = start.records
                        return
            except DataError:
                if stop > HEAD_BYTES:
                    raise  # else a compressed file was cut short by `stop`
    raise start.too_long("")


class _Cursor:
    """Where the reading of one file is, and what turns the next slice into chunks.

    Attributes:
      splitter: cuts the file into slices.
      records: makes items; None: the first record, which says what they are like, isn't there yet.
    """

    def __init__(self, format: CsvFormat, name: str, path: str, begin: Place, after: Place) -> None:
        self._format = format
        self._name = name
        self._path = path
        self._after = after
        self._line, self._byte = begin["line"], begin["byte"]
        self._parts: list[bytes] = []  # whole lines that begin there, not read yet
        self._size = 0  # of them
        self._needed = 0  # bytes, before another look at a record that was open
        self._window = SLICE_BYTES
        self.splitter = Splitter(format.max_record_bytes, SLICE_RECORDS)
        self.records: Records | None = None
        if isinstance(format.header, tuple):
            self._expect(format.header, len(format.header))

    @property
    def most_bytes(self) -> int:
        """A record at the most."""
        return self._format.max_record_bytes

    def at_start(self) -> _Cursor:
        """Return a cursor at the beginning of the same file."""
        return _Cursor(self._format, self._name, self._path, self._format.begin(self._path), self._after)

    def too_long(self, reason: str) -> DataError:
        """Return the exception for the next record, which doesn't end in time."""
        return self._error(Fault(0, 0, too_long(self._format.max_record_bytes)))

    def learns(self, raw: bytes | TooLong, final: bool) -> bool:
        """Find out what the first record says, and pass it if it is a header; whether it is there.

        Raises:
          DataError: it can't be a header, or doesn't end.
        """
        if isinstance(raw, TooLong):
            raise raw.error
        self._feed(raw)
        return self._learn(self._pending(), final)

    def chunks(self, raw: bytes | TooLong, final: bool, demand: Demand) -> Iterator[Chunk[Any]]:
        """Yield the items of the next slice; behind a record that is left out, only the place."""
        if not isinstance(raw, TooLong):
            self._feed(raw)
            if final or self._size >= self._needed or self._size > self._format.max_record_bytes:
                yield from self._read(final, demand)
            return
        yield from self._read(True, demand)  # what is open there would be longer still
        if not raw.size or self.records is None:
            raise raw.error
        yield self._leave_out(self.too_long(""), raw.head, 1, raw.size, final, demand)

    def _read(self, final: bool, demand: Demand) -> Iterator[Chunk[Any]]:
        raw = self._pending()
        if not raw or (self.records is None and not self._learn(raw, final)):
            return
        raw, at = self._pending(), 0
        assert self.records is not None
        while at < len(raw):
            part = raw[at : _window(raw, at, self._window)]
            whole = at + len(part) == len(raw)
            decoded = self.records.decode(part, final and whole)
            size = decoded.size
            at += size
            if size:
                yield self._take(decoded, part[:size], final and at == len(raw))
                self._window = SLICE_BYTES
            if (fault := decoded.fault) is not None:
                bad = part[size : size + bytes_of(part[size:], fault.lines)]
                at += len(bad)
                error = self._error(Fault(0, 0, fault.reason, fault.cause))
                yield self._leave_out(error, bad, fault.lines, len(bad), final and at == len(raw), demand)
            elif size < len(part) and whole:
                break  # an open record
            elif not size:
                self._window *= 2
        self._parts, self._size = [raw[at:]], len(raw) - at
        self._needed = 2 * self._size

    def _take(self, decoded: Decoded[Any], raw: bytes, final: bool) -> Chunk[Any]:
        successor = self._after if final and decoded.fault is None else None
        lines, kept = decoded.lines, decoded.kept
        where = Slice(self._path, "", self._line, self._byte, raw, lines, successor)
        self._pass(lines, len(raw))
        self.splitter.learn(max(1, len(decoded.items)), len(raw))
        trailing = kept is not None and (not kept or kept[-1] != lines - 1)  # blank lines behind the last item
        after = LineState(self._name, where, lines - 1) if trailing else None
        return Chunk(decoded.items, LineStates(self._name, where, kept), after)

    def _leave_out(
        self, error: DataError, raw: bytes, lines: int, size: int, final: bool, demand: Demand
    ) -> Chunk[Any]:
        """Go on behind the next record, which is bad, if it may be left out."""
        demand.judge(error, raw, self._behind(lines, size, None))
        behind = self._behind(lines, size, self._after if final else None)
        self._pass(lines, size)
        return Chunk((), (), behind)

    def _behind(self, lines: int, size: int, successor: Place | None) -> LineState:
        where = Slice(self._path, "", self._line + lines - 1, self._byte + size, b"", 1, successor)
        return LineState(self._name, where, 0)

    def _pass(self, lines: int, size: int) -> None:
        self._line += lines
        self._byte += size

    def _feed(self, raw: bytes) -> None:
        if not self._byte and not self._size and raw.startswith(BOM):
            raw = raw[len(BOM) :]
            self._byte = len(BOM)
        if raw:
            self._parts.append(raw)
            self._size += len(raw)

    def _pending(self) -> bytes:
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def _learn(self, raw: bytes, final: bool) -> bool:
        format = self._format
        found = Records(format.dialect, None, None, format.max_record_bytes).decode(raw, final)
        if not found.items:
            if found.fault is not None:
                raise self._error(found.fault)
            return False
        first: Row = found.items[0]
        if format.header is not True:
            self._expect(None, len(first))
            return True
        twice = [repr(name) for name, count in Counter(first).items() if count > 1]
        lines = (found.kept[0] if found.kept is not None else 0) + 1
        if twice:
            reason = f"expected a header that names each column once, got {', '.join(twice[:5])} more than once"
            raise self._error(Fault(lines - 1, 0, f"{reason}: give other names, with header=[...]"))
        self._expect(first, len(first))
        size = bytes_of(raw, lines)
        self._parts, self._size = [raw[size:]], self._size - size
        self._pass(lines, size)
        return True

    def _expect(self, names: Sequence[str] | None, width: int) -> None:
        self.records = Records(self._format.dialect, names, width, self._format.max_record_bytes)

    def _error(self, fault: Fault) -> DataError:
        """Return the exception for a record of what is pending."""
        line, byte = self._line + fault.line + 1, self._byte + fault.at
        error = DataError(f"{self._path} line {line} (byte {byte}): {fault.reason}")
        error.__cause__ = fault.cause
        return error


def _window(raw: bytes, at: int, size: int) -> int:
    """Return where the whole lines end that are in the next `size` bytes or a few more, or the next line."""
    stop = at + size
    if len(raw) - stop < size // 4:
        return len(raw)  # a short rest would be a list of its own
    return raw.rfind(b"\n", at, stop) + 1 or raw.find(b"\n", stop) + 1 or len(raw)
