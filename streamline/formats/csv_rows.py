"""CSV: what the standard library's `csv` makes of a slice of whole lines, and where each record ends.

`csv` says what a record is (RFC 4180, strictly): a line end inside quotes belongs to a field. It is fed a record at a
time where counting quotes tells the records apart, which is faster than a line at a time; its answer is the proof.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["Dialect", "Row", "Rows", "bytes_of", "read"]


Row = list[str]


OPEN = "unexpected end of data"
"""What `csv` says of a record whose quote isn't closed."""


FIELD_CHARACTERS = 131_072
"""What `csv` allows in a field, unless somebody says otherwise for the whole process."""


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
        """Return a `csv.reader`."""
        if self.quotechar is None:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quotechar, strict=True)

    def every_line_is_a_record(self, text: str) -> bool:
        """Whether it is so, as far as that is seen at once; and none is blank."""
        if self.quotechar is not None and self.quotechar in text:
            return False
        return not ("\n\n" in text or "\n\r" in text or text.startswith(("\n", "\r")))


@dataclass(slots=True)
class Rows:
    """The records of a slice, up to one that is open or can't be told.

    Attributes:
      rows: the fields of each; none for a blank line.
      ends: how many lines of the slice end with each record or before; None: every line is one.
      lines: that they take up.
      size: of those lines, in bytes.
      bad: why what is behind them is no record; None: nothing is there, or an open record.
    """

    rows: list[Row]
    ends: list[int] | None
    lines: int
    size: int
    bad: csv.Error | None = None


def read(dialect: Dialect, raw: bytes, text: str) -> Rows:
    """Return the records of a slice, which begins where one does, and of which `text` is what it says."""
    if dialect.every_line_is_a_record(text):
        try:
            with _fields_of(len(text)):
                rows = list(dialect.reader(StringIO(text, newline="\n")))
            return Rows(rows, None, len(rows), len(raw))
        except csv.Error:
            pass  # where it is, is told below
    elif dialect.quotechar is not None and dialect.quotechar.isascii():
        found = _read_between_quotes(dialect, ord(dialect.quotechar), raw)
        if found is not None:
            return found
    return _read_one_by_one(dialect, raw, text)


def _read_between_quotes(dialect: Dialect, quote: int, raw: bytes) -> Rows | None:
    """Return the records, if each ends with a line behind which an even number of quotes has been; else None.

    If `csv` makes one row of each of the pieces between such line ends, it makes the same rows of their lines. In a
    piece, a quote follows each line end but the last; and behind a line end that isn't inside quotes, as `csv` sees
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
    found = Rows(rows, None if lines == len(ends) else ends, lines, size)
    if size < len(raw):  # an open record, unless its quotes are unusual
        rest = _read_one_by_one(dialect, raw[size:], raw[size:].decode(errors="replace"))
        found.bad = rest.bad
        if rest.rows:
            return None
    return found


def _read_one_by_one(dialect: Dialect, raw: bytes, text: str) -> Rows:
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
    return Rows(rows, ends, lines, bytes_of(raw, lines), bad)


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


_limit = threading.Lock()


def bytes_of(raw: bytes, lines: int) -> int:
    """Return how many bytes the first lines of a slice have, with their ends."""
    if not lines:
        return 0
    parts = raw.split(b"\n", lines)
    return len(raw) - len(parts[-1]) if len(parts) > lines else len(raw)
