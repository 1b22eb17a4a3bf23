"""CSV files, read from any record on: slices of whole lines to records, and records to items.

The standard library's `csv` decides what a record is (RFC 4180, strictly): a line end inside quotes belongs to a field.
A slice may end inside a record, which is then *open*, and is read again with more lines.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any, ClassVar

from streamline.core.flow import Chunk, StageContext
from streamline.core.forks import ForkSafeLock
from streamline.errors import DataError, PlanError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Place
from streamline.io.formats.line_decoding import BOM, SLICE_BYTES, DecodedSlice, Fault, Splitter, not_utf8, wrong_with
from streamline.io.formats.lines import SLICE_LINES, TextCursor, TextFormat, TooLong, slices

MAX_RECORD_BYTES = 16 * 1024 * 1024
"""The longest record that is read unless the user says otherwise: more is likely a quote that isn't closed."""

HEAD_BYTES = 64 * 1024
"""Read of a file's beginning for its header: as the first block of a local file."""

Header = bool | tuple[str, ...]
"""Whether a file's first record names its columns; or their names, if it doesn't."""


@dataclass(frozen=True)
class Dialect:
    """How fields are told apart; a `quotechar` of None: quotes mean nothing, and every line is a record."""

    delimiter: str = ","
    quotechar: str | None = '"'

    def reader(self, lines: Iterable[str]) -> Any:
        if self.quotechar is None:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quotechar, strict=True)


@dataclass(frozen=True, kw_only=True)
class CsvFormat(TextFormat[Any]):
    """CSV files. Place: see `lines`; `line` is the last line of a record. With a `header` of False, items are lists."""

    kind: ClassVar[str] = "read_csv"
    reread: ClassVar[str] = "seeks to its record, and reads the header (compressed: unpacks up to it)"
    same_columns: ClassVar[bool] = True

    header: Header = True
    dialect: Dialect = field(default_factory=Dialect)
    max_record_bytes: int = MAX_RECORD_BYTES

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return PlanError(
            f"{path} can't be split into {num_shards} shards, because a line end in a CSV file may stand inside "
            "quotes, which only reading it from its start tells: split it into several files, or write "
            f'.shard({num_shards}, mode="replicated"): each shard reads all of it'
        )

    def options(self) -> dict[str, Any]:
        header = list(self.header) if isinstance(self.header, tuple) else self.header
        return {"header": header, "delimiter": self.dialect.delimiter, "quotechar": self.dialect.quotechar}

    async def cursor(self, file: File, begin: Place, after: Place, name: str) -> _CsvCursor:
        cursor = _CsvCursor(self, name, file.path, begin, after)
        if begin["byte"] and cursor.records is None:
            await cursor.learn_from_start(file)
        return cursor


class _CsvCursor(TextCursor[Any]):
    """`records` makes items; None: the first record, which says what they are like, isn't there yet."""

    def __init__(self, format: CsvFormat, name: str, path: str, begin: Place, after: Place) -> None:
        splitter = Splitter(format.max_record_bytes, SLICE_LINES)
        super().__init__(name, path, "", begin["line"], begin["byte"], after, splitter)
        self._format = format
        self._pending = bytearray()  # whole lines that begin there, not read yet
        self._wanted = 0  # bytes of these before another look at a record that was open
        self.records: Records | None = None
        if isinstance(format.header, tuple):
            self._expect(format.header, len(format.header))

    async def learn_from_start(self, file: File) -> None:
        """Find out, inside a file, what its first record says: a bounded read, nothing is read ahead."""
        format = self._format
        for stop in (HEAD_BYTES, format.max_record_bytes + HEAD_BYTES):
            start = _CsvCursor(format, self._name, self._path, format.begin(self._path), self._after)
            async with aclosing(slices(file, 0, start.splitter, start.wrong, skipping=False, stop=stop)) as found:
                try:
                    async for raw, _ in found:
                        if isinstance(raw, TooLong):
                            raise raw.error
                        start._feed(raw)
                        if start._learn(final=False):
                            self.records = start.records
                            return
                except DataError:
                    if stop > HEAD_BYTES:
                        raise  # else a compressed file was cut short by `stop`
        raise start.wrong()

    def wrong(self, reason: str = "") -> DataError:
        """Return the exception for the next record, which doesn't end in time."""
        return super().wrong(too_long(self._format.max_record_bytes))

    def chunks(self, raw: bytes | TooLong, final: bool, context: StageContext) -> Iterator[Chunk[Any]]:
        if not isinstance(raw, TooLong):
            self._feed(raw)
            if final or len(self._pending) >= min(self._wanted, self._format.max_record_bytes + 1):
                yield from self._read(final, context)
            return
        yield from self._read(True, context)  # what is open there would be longer still
        if not raw.size or self.records is None:
            raise raw.error
        yield self._leave_out(self.wrong(), raw.head, 1, raw.size, final, context)

    def _read(self, final: bool, context: StageContext) -> Iterator[Chunk[Any]]:
        """Yield the records that are pending; one that is open stays."""
        pending = self._pending
        if self.records is None and not self._learn(final):
            return
        assert self.records is not None
        while pending:
            raw = self._next_lines()
            whole = len(raw) == len(pending)
            decoded, size = self.records.decode(raw, final and whole)
            if not size and decoded.fault is None:  # an open record
                self._wanted = 2 * max(len(raw), self._wanted)
                if whole:
                    return
                continue
            self._wanted = 0
            del pending[:size]
            if size:
                self.splitter.learn(max(1, len(decoded.items)), size)
                last = final and not pending
                yield self._take_lines(decoded, raw[:size], self._after if last else None)
            if (fault := decoded.fault) is not None:
                bad = raw[size : size + bytes_of(raw[size:], fault.lines)]
                del pending[: len(bad)]
                error = self.error(Fault(0, 0, fault.reason, fault.cause))
                yield self._leave_out(error, bad, fault.lines, len(bad), final and not pending, context)

    def _next_lines(self) -> bytes:
        """Return the pending lines that are read at once: a slice of them, or as many as an open record wants."""
        pending, size = self._pending, max(SLICE_BYTES, self._wanted)
        if len(pending) - size < size // 4:
            return bytes(pending)  # a short rest would be a list of its own
        return bytes(pending[: pending.rfind(b"\n", 0, size) + 1 or pending.find(b"\n", size) + 1 or len(pending)])

    def _feed(self, raw: bytes) -> None:
        if not self._pending:
            if not self.byte and raw.startswith(BOM):
                raw = raw[len(BOM) :]
                self.byte = len(BOM)
            if self.byte <= len(BOM) and raw[:4] == b"sep=" and raw[5:6] in (b"\r", b"\n"):
                way = f"leave the line out, and write delimiter={chr(raw[4])!r}"
                raise self.error(Fault(0, 0, f"expected a record, got Excel's {raw[:5].decode()!r}: {way}"))
            if not self.byte and b"\0" in raw[:2]:
                raise self.error(Fault(0, 0, f"expected CSV: {wrong_with(raw, None)}"))
        self._pending += raw

    def _learn(self, final: bool) -> bool:
        """Find out what the records are like from the first one; return whether it is there."""
        format, raw = self._format, bytes(self._pending)
        found, _ = Records(format.dialect, None, None, format.max_record_bytes).decode(raw, final)
        if not found.items:
            if found.fault is not None:
                raise self.error(found.fault)
            self._wanted = 2 * len(raw)
            return False
        first: Row = found.items[0]
        if format.header is not True:
            self._expect(None, len(first))
            return True
        twice = [repr(name) for name, count in Counter(first).items() if count > 1]
        lines = 1 if found.kept is None else found.kept[0] + 1
        if twice:
            reason = f"expected a header that names each column once, got {', '.join(twice[:5])} more than once"
            raise self.error(Fault(lines - 1, 0, f"{reason}: give other names, with header=[...]"))
        self._expect(first, len(first))
        size = bytes_of(raw, lines)
        del self._pending[:size]
        self._pass(lines, size)
        return True

    def _expect(self, names: Sequence[str] | None, width: int) -> None:
        self.records = Records(self._format.dialect, names, width, self._format.max_record_bytes)


@dataclass(frozen=True)
class Records:
    """Makes items out of slices.

    Attributes:
      names: of the columns; None: items are lists.
      width: fields in a record; None: any number.
      max_bytes: a record at the most, without its end.
    """

    dialect: Dialect
    names: Sequence[str] | None
    width: int | None
    max_bytes: int

    def decode(self, raw: bytes, final: bool) -> tuple[DecodedSlice[Any], int]:
        """Return the items of whole lines, and the size of these in bytes; never raises for what is in them.

        Args:
          raw: begins where a record does.
          final: nothing follows: what is open never ends.

        Returns:
          As `DecodedSlice`. Its `lines` are fewer than the slice has, without a fault, where the last record is open.
        """
        try:
            text, wrong = raw.decode(), None
        except UnicodeDecodeError as error:
            text, wrong = raw.decode(errors="replace"), error
        rows, ends, bad = read(self.dialect, text)
        decoded = self._items(rows, ends, raw, wrong)
        size = bytes_of(raw, decoded.lines)
        if decoded.fault is None and bad is not None:
            decoded.fault = Fault(decoded.lines, 0, f"expected CSV: {wrong_with(b'', bad)}", bad)
        elif decoded.fault is None and size < len(raw):
            decoded.fault = self._open(len(raw) - size, decoded.lines, final)
        if decoded.fault is not None:
            decoded.fault = replace(decoded.fault, at=size)
        return decoded, size

    def _items(
        self, rows: list[Row], ends: list[int], raw: bytes, wrong: UnicodeDecodeError | None
    ) -> DecodedSlice[Any]:
        names, lines = self.names, ends[-1] if ends else 0
        if wrong is None and len(raw) <= self.max_bytes and all(rows):
            kept = None if lines == len(ends) else [end - 1 for end in ends]
            try:
                if names is not None:
                    return DecodedSlice([dict(zip(names, row, strict=True)) for row in rows], lines, kept)
                if self.width is None or set(map(len, rows)) <= {self.width}:
                    return DecodedSlice(rows, lines, kept)
            except ValueError:
                pass  # the loop below finds the record
        return self._items_before_fault(rows, ends, raw, wrong)

    def _items_before_fault(
        self, rows: list[Row], ends: list[int], raw: bytes, wrong: UnicodeDecodeError | None
    ) -> DecodedSlice[Any]:
        items, kept, begin, lines = list[Any](), list[int](), 0, raw.split(b"\n")
        bad_line = -1 if wrong is None else raw.count(b"\n", 0, wrong.start)
        for row, end in zip(rows, ends, strict=True):
            reason = None
            if wrong is not None and begin <= bad_line < end:
                reason = _not_utf8(wrong, raw, begin)
            elif sum(map(len, lines[begin:end])) + end - begin - 1 > self.max_bytes:
                reason = too_long(self.max_bytes)
            elif row and self.width is not None and len(row) != self.width:
                reason = self._misfit(row, self.width)
            if reason is not None:
                return DecodedSlice(items, begin, kept, Fault(begin, 0, reason, wrong, end - begin))
            if row:
                items.append(row if self.names is None else dict(zip(self.names, row, strict=True)))
                kept.append(end - 1)
            begin = end
        return DecodedSlice(items, begin, kept)

    def _open(self, size: int, line: int, final: bool) -> Fault | None:
        if size - 1 > self.max_bytes:
            return Fault(line, 0, too_long(self.max_bytes))
        if final:
            return Fault(line, 0, "expected the end of a field that is in quotes, got the end of the file")
        return None

    def _misfit(self, row: Row, width: int) -> str:
        count = f"expected {width} fields, got {len(row)}"
        if self.names is None:
            return f"{count}: the file's first record has {width}"
        if len(row) < width:
            return f"{count}: none for {', '.join(map(repr, self.names[len(row) :][:5]))}"
        shown = ", ".join(repr(field[:40]) for field in row[width:][:5])
        return f"{count}: no column for {shown}"


def too_long(max_record_bytes: int) -> str:
    return (
        f"expected a record of at most {max_record_bytes:,} bytes, found no end of it in them: a quote that isn't "
        "closed, or raise max_record_bytes"
    )


def _not_utf8(error: UnicodeDecodeError, raw: bytes, line: int) -> str:
    """Return what is wrong with a record that begins with a line of a slice."""
    at = error.start - raw.rfind(b"\n", 0, error.start) - 1
    more = raw.count(b"\n", 0, error.start) - line
    return not_utf8(error, f"byte {at} of the line" if not more else f"byte {at} of line {more + 1} of the record")


Row = list[str]

OPEN = "unexpected end of data"
"""What `csv` says of a record whose quote isn't closed."""

FIELD_CHARACTERS = 131_072
"""What `csv` allows in a field, unless its limit was raised for the whole process."""


def read(dialect: Dialect, text: str) -> tuple[list[Row], list[int], csv.Error | None]:
    """Return the records of whole lines, up to one that is open or bad.

    Args:
      text: begins where a record does.

    Returns:
      The fields of each, none for a blank line; how many lines end with it or before; why what follows is no record,
      None: nothing follows, or an open record.
    """
    rows, ends = list[Row](), list[int]()
    reader = dialect.reader(StringIO(text, newline="\n"))
    try:
        with _fields_of(len(text)):
            for row in reader:
                rows.append(row)
                ends.append(reader.line_num)
    except csv.Error as error:
        return rows, ends, None if str(error) == OPEN else error
    return rows, ends, None


@contextmanager
def _fields_of(size: int) -> Iterator[None]:
    """Let `csv` read fields of `size` characters."""
    if size <= FIELD_CHARACTERS:
        yield
        return
    with _limit:
        before = csv.field_size_limit(max(size, csv.field_size_limit()))
        try:
            yield
        finally:
            csv.field_size_limit(before)


_limit = ForkSafeLock()


def bytes_of(raw: bytes, lines: int) -> int:
    """Return how many bytes the first lines of a slice have, with their ends."""
    if not lines:
        return 0
    if raw.endswith(b"\n") and raw.count(b"\n") == lines:
        return len(raw)
    parts = raw.split(b"\n", lines)
    return len(raw) - len(parts[-1]) if len(parts) > lines else len(raw)
