"""Cuts an endless response into items: lines, JSON lines, server-sent events or bytes. No I/O.

Each connection has a new framer. Server-sent events: WHATWG HTML, 9.2.5 and 9.2.6. Own code: the decoders for Python
(aiohttp-sse-client2 0.3, httpx-sse) split lines elsewhere than the standard, or fail at lines of more than 64 KiB, and
bring a client of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from streamline.errors import DataError
from streamline.io.formats.line_decoding import BOM, Decode, check_lengths, decode_json, decode_text

T = TypeVar("T")

Framing = Literal["lines", "jsonl", "sse", "bytes"]

FRAMINGS: tuple[Framing, ...] = ("lines", "jsonl", "sse", "bytes")


class Framer(ABC, Generic[T]):
    """Cuts the bytes of one connection into items.

    Attributes:
      unit: the name of an item, for messages.
      waiting: bytes of an item whose end has not come yet.
    """

    unit: str
    waiting = 0

    @abstractmethod
    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the items that end in `data`; a DataError, without a place, if it is no item, or too long."""

    def finish(self) -> Iterator[T]:
        """Yield the item that the end of a whole response ends, if there is one."""
        return iter(())


class LineFramer(Framer[T]):
    """Lines, decoded as by `read_lines` and `read_jsonl`, without a byte order mark at the beginning.

    The last line of a response that was sent whole may lack its end.
    """

    unit = "line"

    def __init__(self, decode: Decode[T], max_item_bytes: int) -> None:
        self._decode = decode
        self._max = max_item_bytes
        self._tail: list[bytes] = []
        self._lines = 0
        self._begun = False

    def feed(self, data: bytes) -> Iterator[T]:
        end = data.rfind(b"\n") + 1
        if end:
            raw = b"".join((*self._tail, data[:end]))
            self._tail.clear()
            self.waiting = 0
            yield from self._decoded(raw)
        if rest := data[end:]:
            self._tail.append(rest)
            self.waiting += len(rest)
        if self.waiting > self._max + (0 if self._begun else len(BOM)):
            raise _too_long("a line", self._max)

    def finish(self) -> Iterator[T]:
        raw = b"".join(self._tail)
        self._tail.clear()
        self.waiting = 0
        if raw:
            yield from self._decoded(raw)

    def _decoded(self, raw: bytes) -> Iterator[T]:
        if not self._begun:
            self._begun = True
            raw = raw.removeprefix(BOM)
        long = check_lengths(raw, self._max)
        decoded = self._decode(raw if long is None else raw[: long.at])
        yield from decoded.items
        self._lines += decoded.lines
        if decoded.fault is not None:
            raise DataError(f"line {self._lines + 1:,} of this connection: {decoded.fault.reason}")
        if long is not None:
            raise _too_long("a line", self._max)


class ServerSentEvent(NamedTuple):
    """A server-sent event.

    Attributes:
      data: its lines of data, joined by a line feed.
      event: its type.
      id: the last one up to this event: the server is asked to go on after it. "": there was none.
    """

    data: str
    event: str = "message"
    id: str = ""


class BytesFramer(Framer[bytes]):
    """Bytes as they come: where one item ends and the next one begins is chance."""

    unit = "chunk"

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data


def framer_of(framing: Framing, max_item_bytes: int, last_id: str) -> Framer[Any]:
    """Return the framer of a new connection; `last_id` is the last event's, if there was one."""
    if framing == "sse":
        return SseFramer(max_item_bytes, last_id)
    if framing == "bytes":
        return BytesFramer()
    return LineFramer(decode_text if framing == "lines" else decode_json, max_item_bytes)


# Server-sent events ---------------------------------------------------------------------------------------------------

MIME_TYPE = "text/event-stream"

MAX_RETRY_MS = 24 * 60 * 60 * 1000
"""The longest pause that a `retry` field sets: a day, so that a wrong value doesn't end a feed."""


class SseFramer(Framer[ServerSentEvent]):
    """Server-sent events. One that is cut off by the end of a response is none; bytes that are no UTF-8 become U+FFFD.

    Args:
      max_event_bytes: of the fields of one event together, and of one line.
      last_id: of the last event of the connection before. (By the letter, the standard forgets it at a new connection
        whose first events have none; browsers keep it, and so does this: else events would come twice.)

    Attributes:
      last_id: of the last event, or of the last empty one: sent to the server by a new connection.
      retry_s: how long the server asks to wait before a new connection; None if it hasn't.
    """

    unit = "event"

    def __init__(self, max_event_bytes: int, last_id: str = "") -> None:
        self.last_id = last_id
        self.retry_s: float | None = None
        self._max = max_event_bytes
        self._fields = 0  # bytes of whole lines of the event whose end has not come yet
        self._begun = 0  # bytes of the line whose end has not come yet
        self._id = last_id
        self._type = ""
        self._data: list[str] = []
        self._line: list[bytes] = []  # the beginning of a line whose end has not come yet
        self._first = True
        self._after_cr = False

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # of a pair that was cut in two
        elif not data:
            return
        self._after_cr = data.endswith(b"\r")
        for line in data.splitlines(keepends=True):  # of bytes: at \n, \r and \r\n only
            self._begun += len(line)
            if self.waiting > self._max:
                raise _too_long("an event", self._max)
            if not line.endswith((b"\n", b"\r")):
                self._line.append(line)
                return
            if self._line:
                line = b"".join((*self._line, line))
                self._line.clear()
            if not line.startswith(b":"):  # a comment, which belongs to no event
                self._fields += self._begun
            self._begun = 0
            if (event := self._take(line.rstrip(b"\r\n"))) is not None:
                yield event

    @property
    def waiting(self) -> int:  # type: ignore[override]
        return self._fields + self._begun

    def _take(self, line: bytes) -> ServerSentEvent | None:
        if self._first:
            self._first = False
            line = line.removeprefix(BOM)
        if not line:
            return self._dispatch()
        name, _, rest = line.partition(b":")
        value = rest.removeprefix(b" ").decode(errors="replace")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        elif name == b"id" and "\0" not in value:
            self._id = value
        elif name == b"retry" and value.isascii() and value.isdecimal():
            self.retry_s = min(int(value[:20]), MAX_RETRY_MS) / 1000
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        self.last_id, self._fields = self._id, 0
        data, kind = self._data, self._type
        self._data, self._type = [], ""
        return ServerSentEvent("\n".join(data), kind or "message", self.last_id) if data else None


def _too_long(what: str, most: int) -> DataError:
    return DataError(f"expected {what} of at most {most:,} bytes, got a longer one: raise max_item_bytes")
