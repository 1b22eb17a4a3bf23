"""A tar archive's bytes, cut into headers and data as they come (POSIX.1-2001, "pax", and GNU's). No I/O.

The standard library's `tarfile` parses the headers; what is here decides how many bytes it needs for one member, and
which members a stream can read.
"""

from __future__ import annotations

import re
import tarfile
from collections import deque
from io import BytesIO
from typing import NamedTuple
from zlib import adler32

from streamline.errors import DataError

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


class TarHeader(NamedTuple):
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
    """Return how many bytes of data a header block has that belong to the next header; -1: it is a member's own."""
    if head[TYPE : TYPE + 1] not in EXTENDING:
        return -1
    size = _info(head).size
    if not 0 <= size <= MAX_EXTENSION_BYTES:
        raise BadHeaderError(f"its name and attributes take {size:,} bytes, expected {MAX_EXTENSION_BYTES:,} at most")
    return rounded(size)


def parse_header(group: bytes) -> TarHeader:
    """Return what a member's header says, with those before it that extend it."""
    if (header := parse_plain(group)) is not None:
        return header
    info = _info(group) if len(group) == BLOCK else _parse_extended(group)
    if info.type == tarfile.GNUTYPE_SPARSE:
        raise BadHeaderError(_sparse(info.name))
    if info.type == b"M":
        raise BadHeaderError(f"{info.name!r} goes on from another volume: join the volumes with tar, then write one")
    regular = info.isreg()
    if info.size < 0:
        raise BadHeaderError(f"{info.name!r} has a size of {info.size:,} bytes")
    size = info.size if regular or info.type not in tarfile.SUPPORTED_TYPES else 0  # as tarfile does
    return TarHeader(info.name, size, regular, info.linkname if info.islnk() else "")


def parse_plain(head: bytes) -> TarHeader | None:
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
        return TarHeader(name, int(size, 8), True, "")
    except ValueError:
        return None


def _info(head: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise BadHeaderError(f"it is damaged: {error}") from error


def _parse_extended(group: bytes) -> tarfile.TarInfo:
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


class NoEndMarkError(DataError):
    """An archive stops after a member, without the mark that says that it is whole."""


class Scanner:
    """Is fed blocks; returns a member's header, then its data, if they are wanted.

    Args:
      at: where in the archive the first block begins; a header is there.

    Attributes:
      at: where in the archive what comes next begins.
      start: where the last header began, with what extends it.
      name: of the last header; "": there was none yet.
      ended: whether the end mark has been seen.
      mark: where it begins.
    """

    def __init__(self, path: str, at: int) -> None:
        self._path = path
        self._blocks: deque[bytes] = deque()
        self._from = 0  # of the first block: bytes that were taken
        self._have = 0
        self._skip = 0
        self._size = self._padding = 0
        self._open = False  # whether there was a header whose data are neither taken nor skipped
        self.at = self.start = self.mark = at
        self.name = ""
        self.ended = False

    def feed(self, block: bytes) -> None:
        self._blocks.append(block)
        self._have += len(block)

    def header(self) -> TarHeader | None:
        """Return the next member's header; None: more has to be fed, or, if it has `ended`, nothing follows.

        Raises:
          DataError: it is damaged, or of a kind that a stream can't read; something follows the end mark.
        """
        if self._skip and not self._pass_on():
            return None
        if self.ended:
            self._check_zeros()
            return None
        if self._have < BLOCK:
            return None
        try:
            group = self._group()
            if group is None:
                return None
            if group == ZEROS:
                self.ended, self.mark = True, self.at
                self._check_zeros()
                return None
            header = parse_header(group)
        except BadHeaderError as error:
            raise self.error(str(error)) from error
        self.start, self.name = self.at, header.name
        self._drop(len(group))
        self._open = True
        self._size, self._padding = header.size, rounded(header.size) - header.size
        return header

    def data(self) -> bytes | None:
        """Return the data of the last header; None: more has to be fed."""
        if self._have < self._size:
            return None
        found = self._peek(0, self._size)
        self._drop(self._size)
        self._skip, self._open = self._padding, False
        return found

    def skip(self) -> None:
        self._skip, self._open = self._size + self._padding, False

    @property
    def beyond(self) -> int:
        """Bytes to skip after what was fed."""
        return max(0, self._skip - self._have)

    def jump(self) -> None:
        """Skip without being fed what is to be skipped: the next block begins at `at`."""
        self._pass_on()
        self.at += self._skip
        self._skip = 0

    def finish(self) -> None:
        """Check that the archive is whole; all of it has been fed.

        Raises:
          NoEndMarkError: it stops after a member.
          DataError: it stops in the middle of one.
        """
        if not self._open:
            self.header()
        if self.ended:
            return
        end = self.at + self._have
        if self._open or self._skip > self._padding:
            inside = f"inside {self.name!r} (its header is at byte {self.start:,})"
        elif self._have and self._peek(0, self._have).strip(b"\0"):
            inside = f"inside the header at byte {self.at:,}" + (f", after {self.name!r}" if self.name else "")
        else:
            stops = f"stops at byte {end:,}{f', after {self.name!r},' if self.name else ''}" if end else "is empty,"
            raise NoEndMarkError(
                f"{self._path} {stops} without the end mark of an archive (blocks of zeros), so it may have been cut "
                'short: write it anew, or leave out what follows its last sure sample with on_error="skip"'
            )
        raise DataError(f"{self._path} is truncated: it ends at byte {end:,}, {inside}")

    def error(self, why: str) -> DataError:
        """Return the error for what is at `at`."""
        if not self.at:
            return DataError(
                f"{self._path} doesn't begin with a tar header, so it is no tar archive, or damaged: {why}"
            )
        after = f" after {self.name!r}" if self.name else ""
        return DataError(f"{self._path}, byte {self.at:,}: the tar header there{after} can't be read: {why}")

    def _group(self) -> bytes | None:
        """Return the next header's bytes, with those that extend it; None: more has to be fed."""
        length = 0
        while self._have >= length + BLOCK:
            head = self._peek(length, BLOCK)
            if (size := extension(head)) < 0:
                return self._peek(0, length + BLOCK) if length else head
            if (length := length + BLOCK + size) > 4 * MAX_EXTENSION_BYTES:  # there may be several
                raise BadHeaderError(f"what extends it takes more than {4 * MAX_EXTENSION_BYTES:,} bytes")
        return None

    def _pass_on(self) -> bool:
        """Skip what is to be skipped, as far as it was fed; return whether that is all."""
        count = min(self._skip, self._have)
        self._drop(count)
        self._skip -= count
        return not self._skip

    def _peek(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, which are here; copied once."""
        first, start = self._blocks[0] if self._blocks else b"", self._from + offset
        if start + size <= len(first):
            return first[start : start + size]
        parts: list[memoryview] = []
        for block in self._blocks:
            if start < len(block):
                parts.append(memoryview(block)[start : start + size])
                size -= len(parts[-1])
                if not size:
                    break
            start = max(0, start - len(block))
        return b"".join(parts)

    def _drop(self, size: int) -> None:
        self.at += size
        self._have -= size
        self._from += size
        while self._blocks and self._from >= len(self._blocks[0]):
            self._from -= len(self._blocks.popleft())

    def _check_zeros(self) -> None:
        """Drop what follows the end mark; anything but zeros is an error."""
        while self._blocks:
            block = self._blocks[0][self._from :]
            if block != bytes(len(block)):
                byte = self.at + len(block) - len(block.lstrip(b"\0"))
                raise DataError(
                    f"{self._path} has data after its end mark, at byte {byte:,} (the mark follows {self.name!r}): "
                    "it is damaged, or archives were joined with cat. Join them with tar --concatenate, or cut off "
                    "what is no archive"
                )
            self._drop(len(block))
