"""Where the arrays of an npz file are: a zip archive's directory, read by `zipfile` over the bytes at the file's end.

Members' names are keys of items, and never names of files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from streamline.core.pace import Pace
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.compression import Compression, Decompressor, Inflate
from streamline.io.formats.sparse_file import AbsentError, SparseFile

MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
"""How an archive begins, and how an empty one does (APPNOTE.TXT 4.3.7, 4.3.16)."""

TAIL_BYTES = 64 * 1024
"""Asked for first: the directory of a thousand arrays."""

MAX_DIRECTORY_BYTES = 64 * 2**20
"""More is damage: it would be the directory of a million arrays."""

LOCAL_HEADER = struct.Struct("<4s2xHH4xIIIHH")
"""A member's own header: magic, flags, method, CRC, packed and unpacked size, and the lengths of the name and of the
extra field after it (APPNOTE.TXT 4.3.7)."""

EXTRA_BYTES = 64
"""Of the extra field, fetched with the header: the sizes of 64 bits that `np.savez` writes there take 20."""

END = struct.Struct("<4s6xH10x")
"""The directory's end: its magic and the number of members (APPNOTE.TXT 4.3.16)."""

ELSEWHERE = 0xFFFF
"""In the place of a number that is larger: it is elsewhere."""

SIZES_FOLLOW = 0x8
"""The flag of a member whose sizes and CRC follow its data: the header doesn't have them."""

UTF_8 = 0x800
"""The flag of a name in UTF-8; any other is in code page 437."""

SIZE_IN_EXTRA = 0xFFFFFFFF
"""In the place of a size that is in the extra field, under `ZIP64`."""

ZIP64 = 1

DEFLATE = Compression("deflate", "stream", (), (), partial(Inflate, -zlib.MAX_WBITS), padded=False)


@dataclass(frozen=True)
class ArchivedArray:
    """An array's file within an archive.

    Attributes:
      name: of the array, without ".npy".
      start: the byte of the archive at which its bytes begin.
      stored: its bytes in the archive.
      size: its bytes, unpacked.
      packed: they are deflated.
      crc: of the unpacked bytes.
    """

    name: str
    start: int
    stored: int
    size: int
    packed: bool
    crc: int


async def members(file: File) -> list[ArchivedArray]:
    size = await file.size("reading the directory at an npz file's end")
    found: list[ArchivedArray] = []
    for info in await _directory(file, size):
        name = info.filename.removesuffix(".npy")
        if name == info.filename:
            raise DataError(
                f"member {info.filename!r} is no array: expected names that end in .npy, as np.savez writes"
            )
        if info.flag_bits & 1 or info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            how = "encrypted" if info.flag_bits & 1 else f"packed by zip's method {info.compress_type}"
            raise DataError(f"array {name!r} is {how}: expected stored or deflated, as np.savez writes")
        if any(other.name == name for other in found):
            raise DataError(f"array {name!r} is there twice")
        packed = info.compress_type == ZIP_DEFLATED
        start = await _start(file, info, size)
        found.append(ArchivedArray(name, start, info.compress_size, info.file_size, packed, info.CRC))
    return found


async def _directory(file: File, size: int) -> list[ZipInfo]:
    tail = max(0, size - TAIL_BYTES)
    fetched, end = _Fetched(size), await file.read(tail, size)
    parts = [(tail, end)]
    while True:
        fetched.hold(parts)
        try:
            with ZipFile(cast(BinaryIO, fetched)) as archive:
                found = archive.infolist()
            _check_count(end, archive.comment, len(found))
            return found
        except DataError:
            raise
        except AbsentError as missing:
            if missing.stop - missing.start > MAX_DIRECTORY_BYTES:
                raise DataError("the zip archive's directory is damaged: it can't be so long") from None
            parts.append((missing.start, await file.read(missing.start, missing.stop)))
        except BadZipFile as error:
            raise DataError(f"expected a zip archive, as np.savez writes: {error} (cut short?)") from error
        except Exception as error:  # of zipfile, on garbage: struct.error, UnicodeDecodeError, NotImplementedError, ...
            raise DataError(f"the zip archive's directory is damaged: {error}") from error


def _check_count(end: bytes, comment: bytes, found: int) -> None:
    """Insist on as many members as the directory's end says: `zipfile` goes by their lengths, which may be damaged."""
    record = end[: len(end) - len(comment)][-END.size :]
    magic, count = END.unpack(record) if len(record) == END.size else (b"", found)
    if magic == MAGICS[1] and count not in (found, ELSEWHERE):
        raise DataError(f"the zip archive's directory is damaged: it says that it has {count} members, and has {found}")


async def _start(file: File, info: ZipInfo, size: int) -> int:
    """Return the byte at which a member's data begins, after its own header, which must say what the directory says."""
    at, named = info.header_offset, info.orig_filename.encode("utf-8" if info.flag_bits & UTF_8 else "cp437")
    if not 0 <= at <= size - LOCAL_HEADER.size:
        raise DataError(f"the zip archive's directory is damaged: {info.filename!r} begins at byte {at:,} of {size:,}")
    head = await file.read(at, min(size, at + LOCAL_HEADER.size + len(named) + EXTRA_BYTES))
    magic, flags, method, *sizes, name, extra = LOCAL_HEADER.unpack_from(head)
    start: int = at + LOCAL_HEADER.size + name + extra
    if magic != MAGICS[0] or start + info.compress_size > size:
        raise DataError(f"the zip archive is damaged: {info.filename!r} isn't at byte {at:,}, where its directory says")
    begin = LOCAL_HEADER.size + len(named)
    own = head[LOCAL_HEADER.size : LOCAL_HEADER.size + name]
    differ: tuple[str, object, object] | None = None
    if own != named or (flags ^ info.flag_bits) & UTF_8:
        differ = "name", info.orig_filename, own.decode("utf-8" if flags & UTF_8 else "cp437", "replace")
    elif method != info.compress_type:
        differ = "method", info.compress_type, method
    elif not flags & SIZES_FOLLOW:
        listed = [info.CRC, info.compress_size, info.file_size]
        found = _with_long_sizes(sizes, head[begin : begin + extra])
        differ = None if found == listed else ("CRC-32 and sizes", listed, found)
    if differ is not None:
        what, directory, header = differ
        raise DataError(
            f"the zip archive is damaged: its directory gives {info.filename!r} the {what} {directory!r}, and the "
            f"member's own header at byte {at:,} says {header!r}; use a copy of the file"
        )
    return start


def _with_long_sizes(sizes: list[int], extra: bytes) -> list[int]:
    """Return CRC, packed and unpacked size of a header, with what its extra field says of them."""
    crc, stored, size = sizes
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == ZIP64:
            long = [value for (value,) in struct.iter_unpack("<Q", extra[4 : 4 + length // 8 * 8])]
            if size == SIZE_IN_EXTRA and long:
                size = long.pop(0)
            if stored == SIZE_IN_EXTRA and long:
                stored = long.pop(0)
        extra = extra[4 + length :]
    return [crc, stored, size]


async def inflate(file: File, member: ArchivedArray) -> AsyncGenerator[bytes, None]:
    """Yield what a packed member holds, in pieces of bounded size.

    Raises:
      DataError: damaged; the last piece is kept back until the checksum has shown that it isn't. It says no place.
    """
    decoder, pace, crc, size, held = Decompressor(DEFLATE), Pace(), 0, 0, b""
    try:
        async with aclosing(file.blocks(member.start, member.start + member.stored)) as blocks:
            async for block in blocks:
                for piece in decoder.feed(block):
                    crc, size = zlib.crc32(piece, crc), size + len(piece)
                    if size > member.size:
                        raise DataError("its length is not what the archive's directory says")
                    if piece:
                        if held:
                            yield held
                        held = piece
                    await pace.maybe_yield()
        decoder.check_end()
        if size != member.size or crc != member.crc:
            what = "its checksum (CRC-32)" if size == member.size else "its length"
            raise DataError(f"{what} is not what the archive's directory says")
    except DataError as error:
        raise DataError(f"array {member.name!r} is damaged: {error}") from error
    if held:
        yield held


class _Fetched(SparseFile):
    """The fetched parts of a file, as `zipfile` reads them."""

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]  # zipfile searches in it
        return bytes(super().read(size))
