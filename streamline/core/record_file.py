"""Binary files with checksums: packs, written once, and logs, appended to. All numbers are little-endian.

A pack (`.cache(path=)`, `.regenerate(spill=)`) is written atomically: a magic line, the length of a header (8 bytes),
the header, JSON, the bytes of the arrays, and the CRC-32 of all that (4 bytes).

A log (`from_stream(journal=)`) is a magic line, then frames: three uint32 (length of the payload, its CRC-32, the
CRC-32 of these first eight bytes), then the payload. A kill leaves a prefix of what was written: a last frame that is
cut short, a *torn tail*. A power cut may leave zeros there. Anything else that is inconsistent is damage.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedReader, FileIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from zlib import crc32

from streamline.core.atomic_file import open_own, write_parts
from streamline.core.item_codec import Buffer, Read, bytes_of, pack
from streamline.core.state import Json

R = TypeVar("R")
Parts = list[Buffer]

FORMS_AT_ONCE = 256
"""Forms that are encoded together: each takes ten times the memory of its JSON, and a call costs as much as three."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_LENGTH = struct.Struct("<Q")
_SUM = struct.Struct("<I")

DECODING_ERRORS = (
    ArithmeticError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
)
"""What decoding damaged bytes raises, before the checksum is compared: NumPy parses types, and warns of some, which a
filter may turn into an error."""


class DamagedError(ValueError):
    """A file isn't as it was written; the message goes after its name: "is cut short"."""


def whose(name: str, shard: int, num_shards: int) -> str:
    """Return the beginning of the names of one stage's files in one shard."""
    return f"{quote(name, safe='')}.shard-{shard}-of-{num_shards}"


def _json_list(forms: Iterable[Json]) -> bytes:
    """Return forms as a list in JSON; only some are in memory at a time."""
    source, texts = iter(forms), list[str]()
    while some := list(islice(source, FORMS_AT_ONCE)):
        texts.append(_ENCODER.encode(some)[1:-1])
    return f"[{','.join(texts)}]".encode()


def pack_parts(magic: bytes, writer: str, items: Iterable[Any], body: Mapping[str, Json], **others: Any) -> Parts:
    """Return a pack's content without its checksum; `body` and the packed `others` are further entries of the header.

    Raises `DataError`, naming the `writer`, ".cache(path=)" say: an item can't be written.
    """
    buffers: list[Buffer] = []
    forms = _json_list(pack(item, buffers, writer) for item in items)
    rest = {name: pack(value, buffers, writer) for name, value in others.items()} | dict(body)
    header = b'{"items":%b,%b' % (forms, _ENCODER.encode(rest).encode()[1:])
    return [magic, _LENGTH.pack(len(header)), header, *buffers]


def size_of(parts: Parts) -> int:
    return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts) + _SUM.size


def write_pack(path: Path, parts: Parts, family: str) -> None:
    """Write a pack durably; `family` is how the names of such files begin, see `whose`."""
    write_parts(path, _with_checksum(parts), family)


def _with_checksum(parts: Parts) -> Iterable[bytes | memoryview]:
    found = 0
    for part in parts:
        content = bytes_of(part)
        found = crc32(content, found)
        yield content
    yield _SUM.pack(found)


def read_pack(path: Path, magic: bytes, unpack_body: Callable[[Json, Read], R]) -> R:
    """Return `unpack_body` of a file's body; it reads all buffers. Raises `DamagedError`, `OSError`."""
    found = 0
    with BufferedReader(FileIO(open_own(path, os.O_RDONLY))) as file:

        def read(buffer: memoryview) -> None:
            nonlocal found
            if file.readinto(buffer) != len(buffer):
                raise EOFError
            found = crc32(buffer, found)

        def some(size: int) -> bytearray:
            content = bytearray(size)
            read(memoryview(content))
            return content

        try:
            if some(len(magic)) != magic:
                raise ValueError("it doesn't begin as such a file does")
            (length,) = _LENGTH.unpack(some(_LENGTH.size))
            if length > os.fstat(file.fileno()).st_size:
                raise EOFError
            made, expected = unpack_body(json.loads(some(length)), read), found
            if some(_SUM.size) != _SUM.pack(expected) or file.read(1):
                raise ValueError("its checksum is another one")
        except EOFError:
            raise DamagedError("is cut short") from None
        except DECODING_ERRORS as error:
            raise DamagedError(f"is damaged ({error})") from error
    return made


# Logs -----------------------------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<II")


class DamagedFrameError(ValueError):
    """A frame of a log is damaged; `what`: "a frame's checksum"."""

    def __init__(self, byte: int, what: str) -> None:
        super().__init__(byte, what)
        self.byte, self.what = byte, what


def frame(payload: bytes) -> bytes:
    """Return a payload with its length and checksums."""
    head = _HEAD.pack(len(payload), crc32(payload))
    return head + _SUM.pack(crc32(head)) + payload


def frames(content: bytes, start: int, *, last: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the payload of each frame from byte `start` on, with the byte at which it ends.

    Raises `DamagedFrameError`: one is damaged; or torn, unless it is the `last` content, whose tail may be.
    """
    while start < len(content):
        begin = start + _HEAD.size + _SUM.size
        whole = begin <= len(content)
        if whole and content[start + _HEAD.size : begin] != _SUM.pack(crc32(content[start : start + _HEAD.size])):
            if last and not content[start:].strip(b"\0"):
                return
            raise DamagedFrameError(start, "the checksum of a frame's length")
        length, check = _HEAD.unpack_from(content, start) if whole else (0, 0)
        if not whole or begin + length > len(content):
            if last:
                return
            raise DamagedFrameError(
                start, "the file ends within a frame, and it is not the journal's last one: its end"
            )
        payload = content[begin : begin + length]
        if crc32(payload) != check:
            raise DamagedFrameError(start, "a frame's checksum")
        start = begin + length
        yield start, payload
