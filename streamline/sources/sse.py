"""Server-sent events: the text/event-stream format, without I/O.

Source: WHATWG HTML, section 9.2 "Server-sent events", 9.2.5 and 9.2.6 (parsing and interpreting an event stream).

Own code: what there is for Python (aiohttp-sse-client2 0.3, httpx-sse's decoder) splits lines at other places than the
standard, or fails at lines of more than 64 KiB, and brings a client of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamline.errors import DataError
from streamline.io.formats.line_decoding import BOM

__all__ = ["MIME_TYPE", "EventParser", "ServerSentEvent", "too_long"]

MIME_TYPE = "text/event-stream"


MAX_RETRY_MS = 24 * 60 * 60 * 1000
"""The longest pause that a `retry` field sets: a day, so that no slip of the finger ends a feed."""


class ServerSentEvent(NamedTuple):
    """A server-sent event.

    Attributes:
      data: its lines of data, joined by a line feed.
      event: its type.
      id: of the last event that had one, up to this one: where the server goes on behind it. "": there was none.
    """

    data: str
    event: str = "message"
    id: str = ""


class EventParser:
    """Makes events of bytes, cut anywhere. Bytes that are no UTF-8 become U+FFFD, as the standard has it.

    Args:
      max_event_bytes: of the fields of one event together, and of one line.
      last_id: of the last event of the connection before. (By the letter, the standard forgets it at a new connection
        whose first events have none; browsers keep it, and so does this: else events would come twice.)

    Attributes:
      last_id: of the last event, or of the last empty one: what a new connection tells the server.
      retry_s: how long the server asks to wait before a new connection; None if it hasn't.
    """

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
        self._behind_cr = False

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that end in `data`.

        Raises:
          DataError: one is too long.
        """
        if self._behind_cr and data.startswith(b"\n"):
            data = data[1:]  # of a pair that was cut in two
        elif not data:
            return
        self._behind_cr = data.endswith(b"\r")
        for line in data.splitlines(keepends=True):  # of bytes: at \n, \r and \r\n only
            self._begun += len(line)
            if self.waiting > self._max:
                raise too_long("an event", self._max)
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
    def waiting(self) -> int:
        """Bytes of an event whose end has not come yet."""
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


def too_long(what: str, most: int) -> DataError:
    """Return the error for an item that is longer than allowed."""
    return DataError(f"expected {what} of at most {most:,} bytes, got a longer one: raise max_item_bytes")
