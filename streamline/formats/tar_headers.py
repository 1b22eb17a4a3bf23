"""The headers of a tar archive (POSIX.1-2001, "pax interchange format", and GNU's): blocks of 512 bytes, no I/O.

The standard library's `tarfile` reads them; what is here decides how many bytes it needs for one member, and which
members a stream can read.
"""

from __future__ import annotations

import re
import tarfile
from io import BytesIO
from typing import NamedTuple
from zlib import adler32

__all__ = ["BLOCK", "ZEROS", "BadHeaderError", "Header", "extension", "parsed", "plain", "rounded"]


BLOCK = tarfile.BLOCKSIZE
"""Bytes that everything in an archive is a multiple of: 512."""


ZEROS = bytes(BLOCK)


TYPE = 156
"""Where in a header its type is."""


EXTENDING = (b"x", b"X", b"g", b"L", b"K")
"""Types of headers whose data belong to the next one: pax, Solaris' pax, pax for all that follow, GNU's long names."""


MAX_EXTENSION_BYTES = 1024 * 1024
"""Most bytes before a member's own header: names of some thousand bytes are real, more is damage or an attack."""


SPARSE = re.compile(rb"(?:^|\n)\d+ GNU\.sparse\.")


GLOBAL = re.compile(rb"(?:^|\n)\d+ (?:path|linkpath|size|GNU\.sparse\.[a-z.]+)=")


class BadHeaderError(Exception):
    """A header that can't be read; says why."""


class Header(NamedTuple):
    """One member, without its data.

    Attributes:
      name: as the archive has it.
      size: bytes of data that follow, without the padding to whole blocks.
      regular: whether it is a file: neither a directory, nor a link, nor a device.
      link: for a hard link, the member that has its data; else "".
    """

    name: str
    size: int
    regular: bool
    link: str


def rounded(size: int) -> int:
    """Return a number of bytes with its padding to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def extension(head: bytes) -> int:
    """Return how many bytes of data a header block has that belong to the next header; -1: it is a member's own.

    Raises:
      BadHeaderError: it is damaged, or no header.
    """
    if head[TYPE : TYPE + 1] not in EXTENDING:
        return -1
    size = _info(head).size
    if not 0 <= size <= MAX_EXTENSION_BYTES:
        raise BadHeaderError(f"its name and attributes take {size:,} bytes, expected {MAX_EXTENSION_BYTES:,} at most")
    return rounded(size)


def parsed(group: bytes) -> Header:
    """Return what a member's header says, with those before it that extend it.

    Raises:
      BadHeaderError: one of them is damaged, or no header; the member can't be read from a stream.
    """
    if (header := plain(group)) is not None:
        return header
    info = _info(group) if len(group) == BLOCK else _extended(group)
    if info.type == tarfile.GNUTYPE_SPARSE:
        raise BadHeaderError(_sparse(info.name))
    if info.type == b"M":
        raise BadHeaderError(f"{info.name!r} goes on from another volume: join the volumes with tar, then write one")
    regular = info.isreg()
    if info.size < 0:
        raise BadHeaderError(f"{info.name!r} has a size of {info.size:,} bytes")
    size = info.size if regular or info.type not in tarfile.SUPPORTED_TYPES else 0  # as tarfile does
    return Header(info.name, size, regular, info.linkname if info.islnk() else "")


def plain(head: bytes) -> Header | None:
    """Return what the header of a plain file says, written as most are; None: ask `tarfile`, which takes 5 x as long.

    A sum of 256 bytes is the lower half of their Adler-32 less 1 (RFC 1950), which is quicker than `sum`.
    """
    size, checksum = head[124:135], head[148:154]
    if len(head) != BLOCK or head[TYPE : TYPE + 1] != b"0" or head[257:262] != b"ustar" or head[345]:
        return None
    if not (size.isdigit() and checksum.isdigit() and head[135] in b"\0 " and head[154:156] == b"\0 "):
        return None
    total = (adler32(head[:256]) & 0xFFFF) + (adler32(head[256:]) & 0xFFFF) - 2
    try:
        if total - sum(head[148:156]) + 8 * ord(" ") != int(checksum, 8):
            return None
        name = head[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
        return Header(name, int(size, 8), True, "")
    except ValueError:
        return None


def _info(head: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise BadHeaderError(f"it is damaged: {error}") from error


def _extended(group: bytes) -> tarfile.TarInfo:
    at = 0
    while (size := extension(group[at : at + BLOCK])) >= 0:
        data, kind = group[at + BLOCK : at + BLOCK + size], group[at + TYPE : at + TYPE + 1]
        if kind in b"xXg" and SPARSE.search(data):
            raise BadHeaderError(_sparse(_info(group[-BLOCK:]).name))
        if kind == b"g" and (found := GLOBAL.search(data)):
            raise BadHeaderError(f"it sets {found[0].split()[-1].decode()[:-1]!r} for all members that follow")
        at += BLOCK + size
    try:
        info = tarfile.TarFile(fileobj=BytesIO(group), encoding="utf-8", errors="surrogateescape").next()
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise BadHeaderError(f"it is damaged: {error}") from error
    if info is None:
        raise BadHeaderError("it is damaged: nothing follows its extension")
    return info


def _sparse(name: str) -> str:
    return f"{name!r} is a sparse file, whose holes are left out: write the archive without --sparse"
