"""Where the messages of an Arrow IPC file or stream are: pyarrow doesn't tell, and fetching them needs it. Pure.

Format: https://arrow.apache.org/docs/format/Columnar.html, "Serialization and Interprocess Communication", with the
tables of Message.fbs and File.fbs; flatbuffers: https://flatbuffers.dev/internals.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"ARROW1"
"""A file begins and ends with it; a stream doesn't."""

CONTINUATION = b"\xff\xff\xff\xff"
"""A message begins with it since Arrow 0.15, then comes the length of its metadata in 4 bytes; 0: the stream's end."""

PREFIX_BYTES = 8

SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
"""What a message's header may be: the union `MessageHeader`."""


@dataclass(frozen=True)
class MessageBlock:
    """A message in a file: the bytes `start` to `stop`."""

    start: int
    stop: int


def blocks(footer: bytes) -> tuple[list[MessageBlock], list[MessageBlock]]:
    """Return where the dictionaries and the record batches of a file are, as its footer says."""
    try:
        table = _FlatTable.root(footer)
        return table.blocks(2), table.blocks(3)
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"the footer points outside of itself: {error}") from error


@dataclass(frozen=True)
class Message:
    """What a message's metadata say.

    Attributes:
      kind: SCHEMA, DICTIONARY, RECORD_BATCH, or something else.
      body: bytes after the metadata.
    """

    kind: int
    body: int
    rows: int

    @classmethod
    def of(cls, metadata: bytes) -> Message:
        """Read the metadata of a message, without its prefix."""
        try:
            table = _FlatTable.root(metadata)
            kind, body = table.byte(1), table.int64(3)
            rows = table.table(2).int64(0) if kind == RECORD_BATCH else 0
        except (struct.error, IndexError, OverflowError) as error:
            raise ValueError(f"a message points outside of itself: {error}") from error
        if body < 0 or rows < 0:
            raise ValueError(f"a message of {rows} rows in {body} bytes")
        return cls(kind, body, rows)


@dataclass(frozen=True)
class _FlatTable:
    """A table in a flatbuffer: fields by number, each found through the table's own list of offsets."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> _FlatTable:
        return cls(data, _read("<I", data, 0))

    def _field(self, number: int) -> int:
        """Return where a field is; 0: it isn't there."""
        offsets = self.at - _read("<i", self.data, self.at)
        if 4 + 2 * number >= _read("<H", self.data, offsets):
            return 0
        offset = _read("<H", self.data, offsets + 4 + 2 * number)
        return self.at + offset if offset else 0

    def byte(self, number: int) -> int:
        at = self._field(number)
        return self.data[at] if at else 0

    def int64(self, number: int) -> int:
        at = self._field(number)
        return _read("<q", self.data, at) if at else 0

    def table(self, number: int) -> _FlatTable:
        at = self._field(number)
        if not at:
            raise IndexError(f"field {number} is missing")
        return _FlatTable(self.data, at + _read("<I", self.data, at))

    def blocks(self, number: int) -> list[MessageBlock]:
        """Return a vector of the struct `MessageBlock`: offset, length of the metadata, padding, length of the body."""
        at = self._field(number)
        if not at:
            return []
        at += _read("<I", self.data, at)
        count = _read("<I", self.data, at)
        if count * 24 > len(self.data):
            raise IndexError(f"{count:,} blocks in {len(self.data):,} bytes")
        found = [struct.unpack_from("<qi4xq", self.data, at + 4 + 24 * index) for index in range(count)]
        return [MessageBlock(start, start + metadata + body) for start, metadata, body in found]


def _read(kind: str, data: bytes, at: int) -> int:
    if at < 0:
        raise IndexError(f"byte {at}")
    (value,) = struct.unpack_from(kind, data, at)
    return int(value)
