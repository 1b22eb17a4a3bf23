"""What an endless response is made of: bytes to items, without I/O. A framer is made anew for each connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

from streamline.errors import DataError
from streamline.io.formats.line_decoding import BOM, Decode, check_lengths, decode_json, decode_text
from streamline.sources.sse import EventParser, ServerSentEvent, too_long

__all__ = ["FRAMINGS", "BytesFramer", "Framer", "Framing", "LineFramer", "SseFramer", "framer_of"]

T = TypeVar("T")

Framing = Literal["lines", "jsonl", "sse", "bytes"]
FRAMINGS: tuple[Framing, ...] = ("lines", "jsonl", "sse", "bytes")


class Framer(ABC, Generic[T]):
    """Cuts what one connection brings into items.

    Attributes:
      unit: what it cuts out, for messages.
      waiting: bytes of an item whose end has not come yet.
    """

    unit: str

    @abstractmethod
    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the items that end in `data`.

        Raises:
          DataError: what came can't be an item, or is too long for one; it says no place.
        """

    def finish(self) -> Iterator[T]:
        """Yield the item that the end of a whole response ends, if there is one."""
        return iter(())

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Bytes of an item whose end has not come yet."""


class LineFramer(Framer[T]):
    """Lines, decoded as `read_lines` and `read_jsonl` do: a byte order mark at the beginning is no part of them.
    The last line of a response that was sent whole may lack its end."""

    unit = "line"

    def __init__(self, decode: Decode[T], max_item_bytes: int) -> None:
        self._decode = decode
        self._max = max_item_bytes
        self._tail: list[bytes] = []
        self._waiting = 0
        self._lines = 0
        self._begun = False

    @property
    def waiting(self) -> int:
        return self._waiting

    def feed(self, data: bytes) -> Iterator[T]:
        end = data.rfind(b"\n") + 1
        if end:
            raw = b"".join((*self._tail, data[:end]))
            self._tail.clear()
            self._waiting = 0
            yield from self._decoded(raw)
        if rest := data[end:]:
            self._tail.append(rest)
            self._waiting += len(rest)
        if self._waiting > self._max + (0 if self._begun else len(BOM)):
            raise too_long("a line", self._max)

    def finish(self) -> Iterator[T]:
        raw = b"".join(self._tail)
        self._tail.clear()
        self._waiting = 0
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
            raise too_long("a line", self._max)


class SseFramer(Framer[ServerSentEvent]):
    """Server-sent events. One that the end of a response cuts off is none, as the standard has it."""

    unit = "event"

    def __init__(self, parser: EventParser) -> None:
        self._parser = parser

    @property
    def waiting(self) -> int:
        return self._parser.waiting

    @property
    def last_id(self) -> str:
        """Of the last event: what the next connection tells the server."""
        return self._parser.last_id

    @property
    def retry_s(self) -> float | None:
        """How long the server asks to wait before the next connection; None: it hasn't."""
        return self._parser.retry_s

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        return self._parser.feed(data)


class BytesFramer(Framer[bytes]):
    """Bytes as they come: where one item ends and the next one begins is chance."""

    unit = "chunk"

    @property
    def waiting(self) -> int:
        return 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data


def framer_of(framing: Framing, max_item_bytes: int, last_id: str) -> Framer[Any]:
    """Return what cuts up a new connection; `last_id` is that of the last event, where there was one."""
    if framing == "sse":
        return SseFramer(EventParser(max_item_bytes, last_id))
    if framing == "bytes":
        return BytesFramer()
    return LineFramer(decode_text if framing == "lines" else decode_json, max_item_bytes)
