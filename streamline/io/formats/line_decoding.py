"""Lines: cutting blocks of bytes into slices of whole lines, and slices into items.

A line ends after b"\\n", and nowhere else; the last may lack it. Work is done a slice at a time: some hundred lines as
one piece of bytes, decoded and split by one call each, which is faster than a loop over the lines. Where line i of a
slice ends is computed only when a state is read (`lines`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from streamline.core.lazy_numpy import np
from streamline.errors import DataError

T = TypeVar("T")

BOM = b"\xef\xbb\xbf"
"""A byte order mark: at the beginning of a file it is no part of the text, anywhere else it is."""

MAX_LINE_BYTES = 256 * 1024 * 1024
"""The longest line that is read unless the user says otherwise: more is likely a file that has no lines."""

SLICE_BYTES = 128 * 1024
"""A slice's size at the most, unless one line is longer: parsing as much JSON takes 0.2 ms."""

SAMPLED_PART = 16
"""A part of a slice, from its end, in which lines are counted to see whether they have become shorter."""

HEAD_BYTES = 2048
"""What is kept of a line that is too long, to be shown."""

FIRST_SLICE_BYTES = 4 * 1024
"""The first slice's size, before anything is known of the lines' length."""


@dataclass(frozen=True)
class Fault:
    """A line that can't be decoded.

    Attributes:
      line: its index in the slice.
      at: where it begins in the slice, in bytes.
      reason: what was expected, and what arrived.
      lines: that it takes up: a record of a CSV file may have several.
    """

    line: int
    at: int
    reason: str
    cause: Exception | None = None
    lines: int = 1


@dataclass(slots=True)  # not frozen: one is made per slice, and freezing makes that four times as slow
class DecodedSlice(Generic[T]):
    """What a slice holds, up to the first line that can't be decoded.

    Attributes:
      lines: lines that were decoded or skipped.
      kept: the line of each item, as an index in the slice; None: item i is line i.
      fault: what stopped it.
    """

    items: list[T]
    lines: int
    kept: Sequence[int] | None = None
    fault: Fault | None = None


Decode = Callable[[bytes], DecodedSlice[T]]
"""Decodes a slice of whole lines; never raises for what is in them."""


class Splitter:
    """Cuts blocks, fed one after the other, into slices of whole lines.

    Args:
      max_line_bytes: the longest line, without its end.
      lines: how many lines a slice should have; it learns how long they are from the slices before.
      most: how many it has at the most: a guess may be far off where lines suddenly are short.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES, lines: int = 1, most: int | None = None) -> None:
        self._max = max_line_bytes
        self._lines = lines
        self._most = math.inf if most is None else most
        self._size = FIRST_SLICE_BYTES
        self._block = b""
        self._at = 0
        self._tail: list[bytes] = []  # of a line that goes on in the next block; joined once, however many they are
        self._tail_bytes = 0
        self.dropped = 0

    def feed(self, block: bytes) -> None:
        """Take the next block; the one before must have been cut up: `cut` returned nothing."""
        self._block = block
        self._at = 0

    def cut(self) -> bytes:
        """Return the next slice, at least one whole line; b"" if another block is needed.

        Raises:
          DataError: the line that is next is too long; it says no place.
        """
        block, at = self._block, self._at
        stop = at + self._size
        if len(block) - stop < self._size // 4:
            stop = len(block)  # a short rest would be a list of its own
        end = block.rfind(b"\n", at, stop) + 1 or block.find(b"\n", stop) + 1
        if not end:
            self._keep(block[at:])
            return b""
        if self._seems_crowded(at, end) and block.count(b"\n", at, end) > self._most:
            end -= len(block[at:end].split(b"\n", int(self._most))[-1])
        self._at = end
        if not self._tail:
            return block[at:end]
        self._tail.append(block[at:end])
        return self.rest()

    def begin_dropping(self) -> bytes:
        """Drop the line that was too long, up to its end; return its beginning."""
        head = b"".join(self._tail)[:HEAD_BYTES]
        self.dropped = self._tail_bytes
        self._tail.clear()
        self._tail_bytes = 0
        return head

    def drop(self) -> bool:
        """Drop what was fed of a line that is too long; whether its end was found. `dropped` are its bytes so far."""
        end = self._block.find(b"\n", self._at) + 1
        stop = end or len(self._block)
        self.dropped += stop - self._at
        self._at = stop
        return bool(end)

    def rest(self) -> bytes:
        """Return what came after the last line end: at the end of the data, a line that lacks its end, or b""."""
        joined = b"".join(self._tail)
        self._tail.clear()
        self._tail_bytes = 0
        return joined

    @property
    def empty(self) -> bool:
        """Whether all that was fed has been cut off."""
        return not self._tail and self._at == len(self._block)

    def learn(self, lines: int, size: int) -> None:
        """Adapt the size of slices: one of `size` bytes held `lines` lines."""
        self._size = min(SLICE_BYTES, max(1, size * self._lines // lines))

    def _seems_crowded(self, at: int, end: int) -> bool:
        """Whether the lines of a slice are short at its end: counting those of all slices takes a third of decoding."""
        size = max(1, (end - at) // SAMPLED_PART)
        return self._block.count(b"\n", end - size, end) * (end - at) > self._most * size

    def _keep(self, part: bytes) -> None:
        self._block = b""
        self._at = 0
        if part:
            self._tail.append(part)
            self._tail_bytes += len(part)
        if self._tail_bytes > self._max + len(BOM):  # it may begin a file, and is no part of the line then
            raise DataError(_too_long(self._max))


def _too_long(max_line_bytes: int) -> str:
    return (
        f"expected a line of at most {max_line_bytes:,} bytes, found no line end (\\n) in them: "
        "a file without lines, or raise max_line_bytes"
    )


def check_lengths(raw: bytes, max_line_bytes: int) -> Fault | None:
    """Return the first line of a slice that is too long, if there is one."""
    if len(raw) <= max_line_bytes:
        return None
    at = 0
    for index, line in enumerate(raw.split(b"\n")):
        if len(line) > max_line_bytes:
            return Fault(index, at, _too_long(max_line_bytes))
        at += len(line) + 1
    return None


def decode_text(raw: bytes) -> DecodedSlice[str]:
    """Return the lines as text, without their ends: "\\n" or "\\r\\n"."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        at = raw.rfind(b"\n", 0, error.start) + 1
        good = decode_text(raw[:at])
        reason = not_utf8(error, f"byte {error.start - at} of the line")
        return DecodedSlice(good.items, good.lines, None, Fault(good.lines, at, reason, error))
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    items = text.split("\n")
    if not items[-1]:
        items.pop()
    return DecodedSlice(items, len(items))


_decode_value = msgspec.json.Decoder(Any).decode

_decode_values = msgspec.json.Decoder(Any).decode_lines

NO_BEGINS, NO_ENDS = b" \t\r\n,:]}", b" \t\r\n,:[{"
"""Bytes with which no line begins, and none ends, where each line is a value of its own. Between two tokens of one
value is a comma or a colon, or one of them is a bracket: so next to a line end inside a value is one of these."""

BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_json(raw: bytes) -> DecodedSlice[Any]:
    """Return one value per line; blank lines are skipped. What Python's `json` takes for a value is one."""
    lines = _apart(raw)
    if lines:
        try:
            items = _decode_values(raw)  # half as long as line by line; it knows nothing of lines
        except BAD_JSON:
            return _decode_each(raw)
        if len(items) == lines:
            return DecodedSlice(items, lines)
    return _decode_each(raw)


def _apart(raw: bytes) -> int:
    """Return the number of lines, if none is blank, and no value goes over the end of one; else 0."""
    codes = np.frombuffer(raw, np.uint8)
    ends = (codes == ord("\n")).nonzero()[0]
    inner = ends[:-1] if raw.endswith(b"\n") else ends
    firsts, lasts = raw[:1] + codes[inner + 1].tobytes(), codes[ends - 1].tobytes()
    apart = firsts.translate(None, NO_BEGINS) == firsts and lasts.translate(None, NO_ENDS) == lasts
    return len(firsts) if apart else 0


def _decode_each(raw: bytes) -> DecodedSlice[Any]:
    """Do the same line by line, up to the first that is no JSON value."""
    lines = raw.split(b"\n")
    if not lines[-1]:
        lines.pop()
    try:
        return DecodedSlice(list(map(_decode_value, lines)), len(lines))
    except BAD_JSON:
        return _decode_up_to_fault(lines)


def _decode_up_to_fault(lines: Sequence[bytes]) -> DecodedSlice[Any]:
    items: list[Any] = []
    kept: list[int] = []
    at = 0
    for index, line in enumerate(lines):
        if line.strip(b" \t\r"):
            try:
                items.append(_decode_as_json_does(line))
            except BAD_JSON as error:
                return DecodedSlice(items, index, kept, Fault(index, at, _why_not_json(line, error), error))
            kept.append(index)
        at += len(line) + 1
    return DecodedSlice(items, len(lines), kept)


def _decode_as_json_does(line: bytes) -> Any:
    """Return a line's value; what msgspec refuses and `json` doesn't (NaN, Infinity, 1e999, lone surrogates), too."""
    try:
        return _decode_value(line)
    except BAD_JSON as error:
        try:
            return json.loads(line.decode())  # of bytes, it would guess at encodings
        except (ValueError, RecursionError):
            raise error from None


def _why_not_json(line: bytes, error: Exception) -> str:
    if line.startswith(BOM):
        return (
            "expected a JSON value, got a byte order mark, which is none but at a file's beginning: have files been "
            "joined? leave it out"
        )
    try:
        line.decode()
    except UnicodeDecodeError as bad:
        return not_utf8(bad, f"byte {bad.start} of the line")
    shown = line[:60].decode(errors="replace") + ("…" if len(line) > 60 else "")
    return f"expected one JSON value, got {shown!r}: {wrong_with(line, error)}"


UTF_16 = "it seems to be text in UTF-16: convert the file, `iconv -f UTF-16 -t UTF-8`"


def wrong_with(line: bytes, error: Exception | None) -> str:
    """Return what a text is instead, and the way out; else what a parser says of it."""
    said = str(error)
    if b"\0" in line:
        return "the file is damaged there, it has a run of NULs" if b"\0\0\0\0" in line else UTF_16
    if b"\r" in line.strip() or "new-line character" in said:  # csv's words
        return "a line ends with \\n or \\r\\n, and there is \\r alone: convert the file, `tr '\\r' '\\n'`"
    way = "'.[]'` makes a line of each element" if line.lstrip()[:1] == b"[" else ".` makes a line of each value"
    why = f"the file was cut off there, or its JSON goes over several lines: `jq -c {way}"
    return f"the value is truncated: {why}" if "truncated" in said else said  # msgspec's


def not_utf8(error: UnicodeDecodeError, where: str) -> str:
    at, data = error.start, error.object
    hint = f": {UTF_16}" if (not at and data[:2] in (b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:at] else ""
    return f"expected UTF-8, got 0x{data[at]:02x} ({error.reason}) in {where}{hint}"
