"""CSV: slices of whole lines to records, and records to items.

What a record is, `formats.csv_rows` says. A slice may end inside one, which is then *open*, and is tried again with
more lines behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamline.formats.csv_rows import Dialect, Row, Rows, bytes_of, read
from streamline.formats.lines import Decoded, Fault

__all__ = ["Items", "Records", "too_long"]


@dataclass(slots=True)
class Items(Decoded[Any]):
    """What a slice holds, up to the first record that is bad or open.

    Attributes:
      size: of its lines, in bytes.
    """

    size: int = 0


class Records:
    """Makes items out of slices.

    Args:
      dialect: of the file.
      names: of the columns; None: items are lists.
      width: fields in a record; None: any number.
      max_bytes: a record at the most, without its end.
    """

    def __init__(self, dialect: Dialect, names: Sequence[str] | None, width: int | None, max_bytes: int) -> None:
        self._dialect = dialect
        self._names = names
        self._width = width
        self._max_bytes = max_bytes

    def decode(self, raw: bytes, final: bool) -> Items:
        """Return the items of whole lines; never raises for what is in them.

        Args:
          raw: begins where a record does.
          final: nothing comes behind it: what is open never ends.

        Returns:
          As `Decoded`. Its `lines` are fewer than the slice has, without a fault, where the last record is open.
        """
        try:
            text, wrong = raw.decode(), None
        except UnicodeDecodeError as error:
            text, wrong = raw.decode(errors="replace"), error
        found = read(self._dialect, raw, text)
        decoded = self._items(found, raw, wrong)
        decoded.size = found.size if decoded.lines == found.lines else bytes_of(raw, decoded.lines)
        if decoded.fault is None and found.bad is not None:
            decoded.fault = Fault(found.lines, 0, f"expected CSV: {found.bad}", found.bad)
        elif decoded.fault is None and found.size < len(raw):
            decoded.fault = self._open(len(raw) - found.size, found.lines, final)
        if (fault := decoded.fault) is not None:
            decoded.fault = Fault(fault.line, decoded.size, fault.reason, fault.cause, fault.lines)
        return decoded

    def _items(self, found: Rows, raw: bytes, wrong: UnicodeDecodeError | None) -> Items:
        rows, names = found.rows, self._names
        if wrong is None and len(raw) <= self._max_bytes and all(rows):
            kept = None if found.ends is None else [end - 1 for end in found.ends]
            try:
                if names is not None:
                    return Items([dict(zip(names, row, strict=True)) for row in rows], found.lines, kept)
                if self._width is None or set(map(len, rows)) <= {self._width}:
                    return Items(rows, found.lines, kept)
            except ValueError:
                pass  # which of them it is, is told below
        ends = range(1, len(rows) + 1) if found.ends is None else found.ends
        items: list[Any] = []
        kept = []
        begin = 0
        check = self._checks(raw, wrong)
        for row, end in zip(rows, ends, strict=True):
            if row:
                fault = check(row, begin, end)
                if fault is not None:
                    return Items(items, begin, kept, fault)
                items.append(row if names is None else dict(zip(names, row, strict=True)))
                kept.append(end - 1)
            begin = end
        return Items(items, begin, kept)

    def _checks(self, raw: bytes, wrong: UnicodeDecodeError | None) -> Any:
        """Return what says what is wrong with a record of some lines."""
        bad_line = None if wrong is None else raw.count(b"\n", 0, wrong.start)
        lines = raw.split(b"\n") if len(raw) > self._max_bytes else None

        def check(row: Row, begin: int, end: int) -> Fault | None:
            if bad_line is not None and begin <= bad_line < end:
                assert wrong is not None
                return Fault(begin, 0, _not_utf8(wrong, raw, begin), wrong, end - begin)
            if lines is not None and sum(map(len, lines[begin:end])) + end - begin - 1 > self._max_bytes:
                return Fault(begin, 0, too_long(self._max_bytes), None, end - begin)
            if self._width in (None, len(row)):
                return None
            return Fault(begin, 0, self._misfit(row, self._width), None, end - begin)

        return check

    def _open(self, size: int, line: int, final: bool) -> Fault | None:
        if size - 1 > self._max_bytes:
            return Fault(line, 0, too_long(self._max_bytes))
        if final:
            return Fault(line, 0, "expected the end of a field that is in quotes, got the end of the file")
        return None

    def _misfit(self, row: Row, width: int) -> str:
        count = f"expected {width} fields, got {len(row)}"
        if self._names is None:
            return f"{count}: the file's first record has {width}"
        if len(row) < width:
            return f"{count}: none for {', '.join(map(repr, self._names[len(row) :][:5]))}"
        shown = ", ".join(repr(field[:40]) for field in row[width:][:5])
        return f"{count}: no column for {shown}"


def too_long(max_record_bytes: int) -> str:
    """Return what is wrong with a record that doesn't end in time."""
    return (
        f"expected a record of at most {max_record_bytes:,} bytes, found no end of it in them: a quote that isn't "
        "closed, or raise max_record_bytes"
    )


def _not_utf8(error: UnicodeDecodeError, raw: bytes, line: int) -> str:
    """Return what is wrong with a record that begins with a line of a slice."""
    at = error.start - raw.rfind(b"\n", 0, error.start) - 1
    more = raw.count(b"\n", 0, error.start) - line
    where = f"byte {at} of the line" if not more else f"byte {at} of line {more + 1} of the record"
    return f"expected UTF-8, got 0x{raw[error.start]:02x} ({error.reason}) in {where}"
