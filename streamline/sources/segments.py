"""The files of a journal on disk: records that are only ever appended, each with its length and checksums.

A file is a magic line, then frames: three little-endian uint32 (length of the payload, its CRC-32, the CRC-32 of these
first eight bytes), then the payload. The first frame is the file's header, JSON; each other one is an item: uint32
shard, then `encoding.to_bytes`.

A process that is killed leaves a prefix of what it wrote: a last frame that is cut short, a *torn tail*, in the last
file. A power cut may leave zeros there. Anything else that doesn't add up is damage.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import msgspec

from streamline.core.atomic_file import read_own
from streamline.core.item_codec import EncodedItem, from_bytes, to_bytes
from streamline.errors import JournalError

__all__ = ["MAGIC", "Header", "Segment", "frame", "read_segment", "record"]


MAGIC = b"streamline journal 1\n"


_FRAME = struct.Struct("<III")


_HEAD = struct.Struct("<II")


_SHARD = struct.Struct("<I")


Record: TypeAlias = "tuple[int, EncodedItem]"


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """What a file begins with.

    Attributes:
      id: the feed's.
      read: items that the feed had read before this file.
      behind: where the file before this one ended; less than `read` where a power cut took what a snapshot has passed.
      given: for each shard, items that had been handed to its worker.
      next: the shard whose turn was next.
      mark: of the last item before this file, see `journal.Kept`; left out where there is none.
    """

    id: str
    read: int
    behind: int
    given: dict[int, int]
    next: int
    mark: Any = None

    def begin(self) -> bytes:
        """Return the file's first bytes."""
        body = {**msgspec.structs.asdict(self), "given": {str(shard): n for shard, n in self.given.items()}}
        if self.mark is None:
            del body["mark"]  # what has no use for it stays readable by a streamline that doesn't know it
        return MAGIC + frame(json.dumps(body).encode())


class Segment(msgspec.Struct):
    """A file that was read.

    Attributes:
      header: None: the file was cut short within it, so it holds nothing.
      records: shard and item, in the order in which they were read.
      end: its sound bytes.
      size: its bytes; more than `end`: its tail is torn.
    """

    path: Path
    header: Header | None
    records: list[Record]
    end: int
    size: int

    @property
    def read(self) -> int:
        """Items that the feed had read by its end."""
        return (self.header.read if self.header is not None else 0) + len(self.records)


def record(shard: int, written: EncodedItem) -> bytes:
    """Return an item's frame."""
    return frame(_SHARD.pack(shard) + to_bytes(written))


def frame(payload: bytes) -> bytes:
    """Return a payload with its length and checksums."""
    head = _HEAD.pack(len(payload), crc32(payload))
    return head + struct.pack("<I", crc32(head)) + payload


def read_segment(path: Path, *, last: bool) -> Segment:
    """Read a file.

    Args:
      last: the journal's last one, whose tail may be torn.

    Raises:
      JournalError: it is damaged; the message names the byte.
    """
    content = read_own(path)
    start = len(MAGIC)
    if not content.startswith(MAGIC):
        if last and (MAGIC.startswith(content) or not content.strip(b"\0")):
            return Segment(path, None, [], 0, len(content))
        raise JournalError(f"{path} is damaged at byte 0: it doesn't begin as a journal's file does; use a copy of it")
    header: Header | None = None
    records: list[Record] = []
    end = start
    for stop, payload in _frames(content, start, path, last=last):
        end = stop
        if header is None:
            header = _header(payload, path)
        else:
            records.append((_SHARD.unpack_from(payload)[0], from_bytes(payload[_SHARD.size :])))
    if header is None and not last:
        raise JournalError(f"{path} is damaged at byte {start}: it has no header")
    return Segment(path, header, records, end if header is not None else 0, len(content))


def _frames(content: bytes, start: int, path: Path, *, last: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the payload of each sound frame with the byte at which it ends."""
    while start < len(content):
        rest = len(content) - start
        if rest < _FRAME.size:
            return _torn(path, start, last=last)
        length, check, head_check = _FRAME.unpack_from(content, start)
        if crc32(content[start : start + _HEAD.size]) != head_check:
            if last and not content[start:].strip(b"\0"):
                return None
            raise _damaged(path, start, "the checksum of a frame's length")
        if rest < _FRAME.size + length:
            return _torn(path, start, last=last)
        payload = content[start + _FRAME.size : start + _FRAME.size + length]
        if crc32(payload) != check:
            raise _damaged(path, start, "a frame's checksum")
        start += _FRAME.size + length
        yield start, payload
    return None


def _torn(path: Path, byte: int, *, last: bool) -> None:
    if not last:
        raise _damaged(path, byte, "the file ends within a frame, and it is not the journal's last one: its end")


def _damaged(path: Path, byte: int, what: str) -> JournalError:
    return JournalError(
        f"{path} is damaged at byte {byte:,}: {what} is not as it was written. Use a copy of the journal; without one, "
        f"cutting the file off at this byte loses the items behind it"
    )


def _header(payload: bytes, path: Path) -> Header:
    try:
        return msgspec.convert(json.loads(payload), Header, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise JournalError(f"{path} is damaged at byte {len(MAGIC)}: not a journal's header ({error})") from None
