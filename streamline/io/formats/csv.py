"""CSV files, read from any record on: slices of whole lines to records, and records to items.

The standard library's `csv` decides what a record is (RFC 4180, strictly): a line end inside quotes belongs to a field.
It is fed a record at a time where counting quotes tells the records apart, which is faster than a line at a time; its
answer is the proof. A slice may end inside a record, which is then *open*, and is tried again with more lines.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise
from typing import Any, ClassVar

from streamline.core.flow import Chunk, Demand
from streamline.core.forks import ForkSafeLock
from streamline.core.lazy_numpy import np
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
    """How fields are told apart.

    Attributes:
      delimiter: one character.
      quotechar: one character; None: quotes mean nothing, and every line is a record.
    """

    delimiter: str = ","
    quotechar: str | None = '"'

    def reader(self, lines: Iterable[str]) -> Any:
        if self.quotechar is None:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quotechar, strict=True)

    def every_line_is_a_record(self, text: str) -> bool:
        """Whether that can be seen at once, and none is blank."""
        if self.quotechar is not None and self.quotechar in text:
            return False
        return not ("\n\n" in text or "\n\r" in text or text.startswith(("\n", "\r")))


@dataclass(frozen=True, kw_only=True)
class CsvFormat(TextFormat[Any]):
    """CSV files. Place: see `lines`; `line` is the last line of a record.

    Attributes:
      header: as `Header`; False: items are lists.
      max_record_bytes: a longer record is an error.
    """

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
    """Where the reading of one file is.

    Attributes:
      records: makes items; None: the first record, which says what they are like, isn't there yet.
    """

    def __init__(self, format: CsvFormat, name: str, path: str, begin: Place, after: Place) -> None:
        splitter = Splitter(format.max_record_bytes, SLICE_LINES)
        super().__init__(name, path, "", begin["line"], begin["byte"], after, splitter)
        self._format = format
        self._parts: list[bytes] = []  # whole lines that begin there, not read yet
        self._size = 0  # of them
        self._needed = 0  # bytes, before another look at a record that was open
        self._window = SLICE_BYTES
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
                        if start._learn(start._pending(), final=False):
                            self.records = start.records
                            return
                except DataError:
                    if stop > HEAD_BYTES:
                        raise  # else a compressed file was cut short by `stop`
        raise start.wrong()

    def wrong(self, reason: str = "") -> DataError:
        """Return the exception for the next record, which doesn't end in time."""
        return super().wrong(too_long(self._format.max_record_bytes))

    def chunks(self, raw: bytes | TooLong, final: bool, demand: Demand) -> Iterator[Chunk[Any]]:
        if not isinstance(raw, TooLong):
            self._feed(raw)
            if final or self._size >= self._needed or self._size > self._format.max_record_bytes:
                yield from self._read(final, demand)
            return
        yield from self._read(True, demand)  # what is open there would be longer still
        if not raw.size or self.records is None:
            raise raw.error
        yield self._leave_out(self.wrong(), raw.head, 1, raw.size, final, demand)

    def _read(self, final: bool, demand: Demand) -> Iterator[Chunk[Any]]:
        raw = self._pending()
        if not raw or (self.records is None and not self._learn(raw, final)):
            return
        raw, at = self._pending(), 0
        assert self.records is not None
        while at < len(raw):
            part = raw[at : _window(raw, at, self._window)]
            whole = at + len(part) == len(raw)
            decoded, size = self.records.decode(part, final and whole)
            at += size
            if size:
                yield self._take(decoded, part[:size], final and at == len(raw))
                self._window = SLICE_BYTES
            if (fault := decoded.fault) is not None:
                bad = part[size : size + bytes_of(part[size:], fault.lines)]
                at += len(bad)
                error = self.error(Fault(0, 0, fault.reason, fault.cause))
                yield self._leave_out(error, bad, fault.lines, len(bad), final and at == len(raw), demand)
            elif size < len(part) and whole:
                break  # an open record
            elif not size:
                self._window *= 2
        self._parts, self._size = [raw[at:]], len(raw) - at
        self._needed = 2 * self._size

    def _take(self, decoded: DecodedSlice[Any], raw: bytes, final: bool) -> Chunk[Any]:
        self.splitter.learn(max(1, len(decoded.items)), len(raw))
        return self._taken(decoded, raw, self._after if final and decoded.fault is None else None)

    def _feed(self, raw: bytes) -> None:
        if not self.byte and not self._size and raw.startswith(BOM):
            raw = raw[len(BOM) :]
            self.byte = len(BOM)
        if self.byte <= len(BOM) and not self._size and raw[:4] == b"sep=" and raw[5:6] in (b"\r", b"\n"):
            way = f"leave the line out, and write delimiter={chr(raw[4])!r}"
            raise self.error(Fault(0, 0, f"expected a record, got Excel's {raw[:5].decode()!r}: {way}"))
        if not self.byte and not self._size and b"\0" in raw[:2]:
            raise self.error(Fault(0, 0, f"expected CSV: {wrong_with(raw, None)}"))
        if raw:
            self._parts.append(raw)
            self._size += len(raw)

    def _pending(self) -> bytes:
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def _learn(self, raw: bytes, final: bool) -> bool:
        format = self._format
        found, _ = Records(format.dialect, None, None, format.max_record_bytes).decode(raw, final)
        if not found.items:
            if found.fault is not None:
                raise self.error(found.fault)
            return False
        first: Row = found.items[0]
        if format.header is not True:
            self._expect(None, len(first))
            return True
        twice = [repr(name) for name, count in Counter(first).items() if count > 1]
        lines = (found.kept[0] if found.kept is not None else 0) + 1
        if twice:
            reason = f"expected a header that names each column once, got {', '.join(twice[:5])} more than once"
            raise self.error(Fault(lines - 1, 0, f"{reason}: give other names, with header=[...]"))
        self._expect(first, len(first))
        size = bytes_of(raw, lines)
        self._parts, self._size = [raw[size:]], self._size - size
        self._pass(lines, size)
        return True

    def _expect(self, names: Sequence[str] | None, width: int) -> None:
        self.records = Records(self._format.dialect, names, width, self._format.max_record_bytes)


def _window(raw: bytes, at: int, size: int) -> int:
    """Return where the whole lines end that are in the next `size` bytes or a few more, or the next line."""
    stop = at + size
    if len(raw) - stop < size // 4:
        return len(raw)  # a short rest would be a list of its own
    return raw.rfind(b"\n", at, stop) + 1 or raw.find(b"\n", stop) + 1 or len(raw)


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
        found = read(self.dialect, raw, text)
        decoded = self._items(found, raw, wrong)
        size = found.size if decoded.lines == found.lines else bytes_of(raw, decoded.lines)
        if decoded.fault is None and found.bad is not None:
            decoded.fault = Fault(found.lines, 0, f"expected CSV: {wrong_with(b'', found.bad)}", found.bad)
        elif decoded.fault is None and found.size < len(raw):
            decoded.fault = self._open(len(raw) - found.size, found.lines, final)
        if decoded.fault is not None:
            decoded.fault = replace(decoded.fault, at=size)
        return decoded, size

    def _items(self, found: CsvRows, raw: bytes, wrong: UnicodeDecodeError | None) -> DecodedSlice[Any]:
        rows, names = found.rows, self.names
        if wrong is None and len(raw) <= self.max_bytes and all(rows):
            kept = None if found.ends is None else [end - 1 for end in found.ends]
            try:
                if names is not None:
                    return DecodedSlice([dict(zip(names, row, strict=True)) for row in rows], found.lines, kept)
                if self.width is None or set(map(len, rows)) <= {self.width}:
                    return DecodedSlice(rows, found.lines, kept)
            except ValueError:
                pass  # the loop below finds the record
        ends = range(1, len(rows) + 1) if found.ends is None else found.ends
        items: list[Any] = []
        kept = []
        begin = 0
        check = self._checks(raw, wrong)
        for row, end in zip(rows, ends, strict=True):
            if row:
                fault = check(row, begin, end)
                if fault is not None:
                    return DecodedSlice(items, begin, kept, fault)
                items.append(row if names is None else dict(zip(names, row, strict=True)))
                kept.append(end - 1)
            begin = end
        return DecodedSlice(items, begin, kept)

    def _checks(self, raw: bytes, wrong: UnicodeDecodeError | None) -> Any:
        bad_line = None if wrong is None else raw.count(b"\n", 0, wrong.start)
        lines = raw.split(b"\n") if len(raw) > self.max_bytes else None

        def check(row: Row, begin: int, end: int) -> Fault | None:
            if bad_line is not None and begin <= bad_line < end:
                assert wrong is not None
                return Fault(begin, 0, _not_utf8(wrong, raw, begin), wrong, end - begin)
            if lines is not None and sum(map(len, lines[begin:end])) + end - begin - 1 > self.max_bytes:
                return Fault(begin, 0, too_long(self.max_bytes), None, end - begin)
            if self.width in (None, len(row)):
                return None
            return Fault(begin, 0, self._misfit(row, self.width), None, end - begin)

        return check

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


@dataclass(slots=True)
class CsvRows:
    """The records of a slice, up to one that is open or bad.

    Attributes:
      rows: the fields of each; none for a blank line.
      ends: how many lines of the slice end with each record or before; None: every line is one.
      lines: that they take up.
      size: of those lines, in bytes.
      bad: why what follows them is no record; None: nothing follows, or an open record.
    """

    rows: list[Row]
    ends: list[int] | None
    lines: int
    size: int
    bad: csv.Error | None = None


def read(dialect: Dialect, raw: bytes, text: str) -> CsvRows:
    """Return the records of a slice, which begins where one does, and of which `text` is what it says."""
    if dialect.every_line_is_a_record(text):
        try:
            with _fields_of(len(text)):
                rows = list(dialect.reader(StringIO(text, newline="\n")))
            return CsvRows(rows, None, len(rows), len(raw))
        except csv.Error:
            pass  # `_read_one_by_one` finds the record
    elif dialect.quotechar is not None and dialect.quotechar.isascii():
        found = _read_between_quotes(dialect, ord(dialect.quotechar), raw)
        if found is not None:
            return found
    return _read_one_by_one(dialect, raw, text)


def _read_between_quotes(dialect: Dialect, quote: int, raw: bytes) -> CsvRows | None:
    """Return the records, if an even number of quotes has been read at the end of each; else None.

    If `csv` makes one row of each of the pieces between such line ends, it makes the same rows of their lines. In a
    piece, a quote follows each line end but the last; and after a line end that isn't inside quotes, as `csv` sees
    them, anything but the piece's end is an error. Where another rule ended a record later, rows would be fewer.
    """
    codes = np.frombuffer(raw, np.uint8)
    line_ends = np.flatnonzero(codes == ord("\n"))
    even = np.flatnonzero(np.searchsorted(np.flatnonzero(codes == quote), line_ends) & 1 == 0)
    stops = [0, *(line_ends[even] + 1).tolist()]
    pieces = [raw[start:stop].decode(errors="replace") for start, stop in pairwise(stops)]
    try:
        with _fields_of(max(map(len, pieces), default=0)):
            rows = list(dialect.reader(pieces))
    except csv.Error:
        return None
    if len(rows) < len(pieces):
        return None
    ends, size = (even + 1).tolist(), stops[-1]
    lines = ends[-1] if ends else 0
    found = CsvRows(rows, None if lines == len(ends) else ends, lines, size)
    if size < len(raw):  # an open record, unless its quotes are unusual
        rest = _read_one_by_one(dialect, raw[size:], raw[size:].decode(errors="replace"))
        found.bad = rest.bad
        if rest.rows:
            return None
    return found


def _read_one_by_one(dialect: Dialect, raw: bytes, text: str) -> CsvRows:
    reader = dialect.reader(StringIO(text, newline="\n"))
    rows: list[Row] = []
    ends: list[int] = []
    bad = None
    try:
        with _fields_of(len(text)):
            for row in reader:
                rows.append(row)
                ends.append(reader.line_num)
    except csv.Error as error:
        bad = None if str(error) == OPEN else error
    lines = ends[-1] if ends else 0
    return CsvRows(rows, ends, lines, bytes_of(raw, lines), bad)


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
    parts = raw.split(b"\n", lines)
    return len(raw) - len(parts[-1]) if len(parts) > lines else len(raw)
