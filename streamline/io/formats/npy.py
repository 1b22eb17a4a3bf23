"""npy and npz files: rows along the first axis, from any row on.

The rows of an array are mapped (a local file), fetched by ranges (a remote one), or decompressed from the start
(deflated). `numpy.lib.format` reads the header.
"""

from __future__ import annotations

import math
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from io import BytesIO
from itertools import tee
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from streamline.core.lazy_numpy import np
from streamline.errors import DataError, ReadError
from streamline.io.fetch.file import File
from streamline.io.formats.base import InThread
from streamline.io.formats.npz import MAGICS, ArchivedArray, inflate, members
from streamline.io.formats.rows import BLOCK_BYTES, BLOCK_ROWS, RowFormat, RowTable, dicts, row_spans


@dataclass(frozen=True)
class ArrayTable(RowTable):
    """Columns of one length.

    Attributes:
      columns: in the order of the archive.
      archive: items are dicts; else the only column's rows.
    """

    columns: tuple[ArrayColumn, ...]
    archive: bool

    @classmethod
    def of(cls, columns: Sequence[ArrayColumn], archive: bool) -> ArrayTable:
        rows = columns[0].layout.rows
        return cls(tuple(columns), archive, rows=rows, missing=rows - min(column.good for column in columns))

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the blocks of the rows from `start` to `stop`, the same for all columns."""
        row_bytes = sum(column.read_bytes for column in self.columns)
        return row_spans(start, stop, max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, row_bytes))))

    async def blocks(self, start: int, stop: int) -> AsyncGenerator[Sequence[Sequence[Any]], None]:
        async with AsyncExitStack() as opened:
            columns = []
            for column in self.columns:
                spans = self.spans(start, stop)
                columns.append(await opened.enter_async_context(aclosing(column.blocks(spans))))
            for _ in self.spans(start, stop):
                block: list[Any] = [await anext(column) for column in columns]
                yield block

    def items(self, block: Sequence[Sequence[Any]]) -> list[Any]:
        if not self.archive:
            return list(block[0])
        return dicts([column.name for column in self.columns], block)

    def cut_short(self) -> str:
        short: ArrayColumn = min(self.columns, key=lambda column: column.good)
        which = f"array {short.name!r}" if short.name else "the file"
        return f"{which} is truncated: its header says {short.layout.rows:,} rows, and {short.good:,} are there"


@dataclass(frozen=True, kw_only=True)
class NpyFormat(RowFormat):
    """npy files, whose items are rows, and npz files, whose items are dicts of rows. Place: `row`, rows before it.

    Attributes:
      arrays: those of an npz file that are read; None: all.
    """

    kind: ClassVar[str] = "read_npy"
    reread: ClassVar[str] = "computes its row's byte (deflated: unpacks up to it)"

    arrays: tuple[str, ...] | None = None

    def options(self) -> dict[str, Any]:
        return {} if self.arrays is None else {"arrays": list(self.arrays)}

    async def table(self, file: File, in_thread: InThread[Any]) -> ArrayTable:
        head = await _join(file.blocks(0, HEAD_BYTES))  # nearly always all of the header, if it is an npy file
        if not head.startswith(MAGICS):
            return ArrayTable.of([await column_of(file, None, head, in_thread)], archive=False)
        found = {member.name: member for member in await members(file)}
        names = found if self.arrays is None else self.arrays
        missing = [name for name in names if name not in found]
        if missing or not found:
            raise DataError(f"expected arrays {list(names)}, the archive has {list(found)}")
        columns = []
        for name in names:
            try:
                columns.append(await column_of(file, found[name], b"", in_thread))
            except DataError as error:
                said = str(error)
                raise DataError(said if said.startswith("array ") else f"array {name!r}: {said}") from error.__cause__
        lengths = {column.name: column.layout.rows for column in columns}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"expected arrays with as many rows, got {lengths}: name those that belong together, arrays=[...]"
            )
        return ArrayTable.of(columns, archive=True)


HEAD_BYTES = 4096
"""Asked for first: nearly every header takes 128 bytes, and a request as long as it takes."""

Blocks: TypeAlias = "AsyncGenerator[np.ndarray[Any, Any], None]"


@dataclass(frozen=True)
class ArrayColumn(ABC):
    """An array whose rows can be read, block by block.

    Attributes:
      name: of the array in its archive; "": the file is the array.
      good: rows that are there: fewer than the header says where the file was cut short.
    """

    name: str
    layout: Layout
    good: int

    @property
    def read_bytes(self) -> int:
        """Bytes that are fetched or unpacked for a row."""
        return self.layout.row_bytes

    @abstractmethod
    def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        """Yield the rows of each (start, stop), whole, in ascending order.

        Raises:
          DataError: damaged; it says no place.
          ReadError: they can't be read.
        """


@dataclass(frozen=True)
class Mapped(ArrayColumn):
    """A local file, mapped: a row is read when it is looked at."""

    array: np.ndarray[Any, Any]

    @property
    def read_bytes(self) -> int:
        return 0

    async def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        for start, stop in spans:
            yield self.array[start:stop]


@dataclass(frozen=True)
class Ranged(ArrayColumn):
    """A remote file, by ranges.

    Attributes:
      start: the byte of the file at which the first row begins.
      crc: of the header.
      wanted: the CRC of all, as the archive says it.
    """

    file: File
    start: int
    crc: int
    wanted: int

    async def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        size, layout, base = self.layout.row_bytes, self.layout, self.start
        if not size:
            for start, stop in spans:
                yield layout.empty(stop - start)
            return
        spans, asked = tee(spans)
        crc, checked = self.crc, False
        ranges = self.file.ranges((base + start * size, base + stop * size) for start, stop in asked)
        async with aclosing(ranges) as fetched:
            for start, stop in spans:
                data = await anext(fetched)
                checked = bool(self.name) and (checked or not start)  # else its beginning is not here
                if checked:
                    crc = zlib.crc32(data, crc)
                    if stop == layout.rows and crc != self.wanted:
                        raise DataError(f"array {self.name!r} is damaged: its checksum (CRC-32) is not as it was")
                yield layout.array(data, stop - start)


@dataclass(frozen=True)
class DeflatedColumn(ArrayColumn):
    """A deflated member of an archive, unpacked from its start."""

    file: File
    member: ArchivedArray

    async def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        layout = self.layout
        size, at, held = layout.row_bytes, 0, bytearray()  # `held` begins at byte `at` of the member
        async with aclosing(inflate(self.file, self.member)) as pieces:
            for start, stop in spans:
                begin, end = layout.start + start * size, layout.start + stop * size
                while at + len(held) < end:
                    held += await anext(pieces)
                    if at < begin:
                        gone = min(begin - at, len(held))
                        del held[:gone]
                        at += gone
                data = bytes(memoryview(held)[begin - at : end - at]) if size else b""
                if size:
                    del held[: end - at]
                    at = end
                if end == self.member.size:
                    async for _ in pieces:  # to its checksum, which follows its last byte
                        raise DataError(f"array {self.name!r} is damaged: it goes on after its last row")
                yield layout.array(data, stop - start)


async def column_of(file: File, member: ArchivedArray | None, head: bytes, in_thread: InThread[Any]) -> ArrayColumn:
    """Return what has the rows of a file, or of a member of an archive.

    Args:
      head: the first bytes of the file, or of the member where it isn't packed, as far as they have been read.
    """
    packed = member is not None and member.packed
    base = 0 if member is None else member.start
    head = await _header(file, member, head)
    layout = layout_of(head)
    size = (await file.found()).size if member is None else member.size
    name = "" if member is None else member.name
    if size is not None and size > layout.stop:
        raise DataError(
            f"there are {size - layout.stop:,} bytes after the array: was another one saved into the same file? Use "
            "np.savez for several"
        )
    good = layout.rows
    if size is not None and size < layout.stop:
        good = 0 if layout.fortran else max(0, size - layout.start) // layout.row_bytes
    if packed:
        if good < layout.rows or layout.fortran:
            raise DataError(_fortran() if layout.fortran else f"array {name!r} is shorter than its header says")
        assert member is not None
        return DeflatedColumn(name, layout, good, file, member)
    if file.local:
        found = await in_thread(lambda: _map(file, layout, base, good))
        if isinstance(found, BaseException):
            raise found
        return Mapped(name, layout, good, found)
    if layout.fortran:
        raise DataError(_fortran())
    crc = zlib.crc32(head[: layout.start])
    return Ranged(name, layout, good, file, base + layout.start, crc, 0 if member is None else member.crc)


def _fortran() -> str:
    return (
        "the array is in Fortran order, so each row is spread over all of it: save np.ascontiguousarray(array), or "
        "read an uncompressed local copy, which is mapped"
    )


async def _join(blocks: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(blocks):
        return b"".join([block async for block in blocks])


async def _header(file: File, member: ArchivedArray | None, head: bytes) -> bytes:
    """Return the bytes of a header, and perhaps some after it."""
    if member is not None and member.packed:
        async with aclosing(inflate(file, member)) as pieces:
            async for piece in pieces:
                head += piece
                if len(head) >= len(MAGIC) + 6 and len(head) >= header_bytes(head):
                    break
        return head
    base, limit = (0, math.inf) if member is None else (member.start, member.size)
    if not head:
        head = await _join(file.blocks(base, base + int(min(HEAD_BYTES, limit))))
    if len(head) < (wanted := int(min(limit, header_bytes(head)))):
        head += await _join(file.blocks(base + len(head), base + wanted))
    return head


def _map(file: File, layout: Layout, base: int, good: int) -> np.ndarray[Any, Any] | BaseException:
    """Return a local array, mapped, read-only; or what went wrong. For a thread."""
    path, listed = file.path, file.part.found.size
    if not layout.row_bytes or not good:
        return layout.empty(good)
    try:
        size = Path(path).stat().st_size
        if listed is not None and size != listed:
            # A map of a file that is shorter than it was ends the process when it is looked at.
            return ReadError(f"{path} changed since it was listed: it had {listed:,} bytes, and has {size:,}")
        mapped = np.memmap(
            os.fspath(path),
            layout.dtype,
            "r",
            base + layout.start,
            (good, *layout.row_shape),
            "F" if layout.fortran else "C",
        )
    except (OSError, ValueError) as error:
        return ReadError(f"can't map {path} into memory: {error}")
    return mapped.view(np.ndarray)


MAGIC = b"\x93NUMPY"

LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
"""Bytes of the header's length, after the magic and the version. Source: NEP 1, and `numpy.lib.format`."""

MAX_HEADER_BYTES = 2**20
"""More is damage: numpy itself reads no header of more than 10,000 characters by default."""


@dataclass(frozen=True)
class Layout:
    """Where the rows of an array are.

    Attributes:
      start: the byte at which the first one begins, from the header's first byte on.
      rows: length of the first axis.
      fortran: the first axis varies fastest, so the bytes of a row are spread over the whole array.
    """

    start: int
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte after the last row, from the header's first byte on."""
        return self.start + self.rows * self.row_bytes

    def array(self, data: bytes, rows: int) -> np.ndarray[Any, Any]:
        """Return the bytes of some rows as an array over them, read-only."""
        if not self.row_bytes:
            return self.empty(rows)
        return np.frombuffer(data, self.dtype).reshape(rows, *self.row_shape)

    def empty(self, rows: int) -> np.ndarray[Any, Any]:
        """Return rows that have no bytes."""
        found = np.empty((rows, *self.row_shape), self.dtype)
        found.flags.writeable = False
        return found


def header_bytes(head: bytes) -> int:
    """Return how many bytes a file's header takes, out of its first 12 bytes or more."""
    if not head.startswith(MAGIC):
        raise DataError(f"expected an npy file, which begins with {MAGIC!r}, got {head[: len(MAGIC)]!r}")
    version = (head[6], head[7]) if len(head) > 7 else (0, 0)
    if version not in LENGTHS:
        raise DataError(f"expected an npy file of version 1.0, 2.0 or 3.0, got {version[0]}.{version[1]}, or its end")
    begin = 8 + LENGTHS[version]
    if len(head) < begin:
        raise DataError(f"the npy header is truncated: the file ends at its byte {len(head)}")
    size = begin + int.from_bytes(head[8:begin], "little")
    if size > MAX_HEADER_BYTES:
        raise DataError(f"the npy header is damaged: it says that it has {size:,} bytes")
    return size


def layout_of(head: bytes) -> Layout:
    """Return what a whole header says; what follows it is not looked at."""
    size = header_bytes(head)
    if len(head) < size:
        raise DataError(
            f"the npy header is truncated: expected {size:,} bytes, the file ends at its byte {len(head):,}"
        )
    begin = 8 + LENGTHS[head[6], head[7]]
    try:
        shape, fortran, dtype = _parse(head[6], head[begin:size])
    except Exception as error:  # of numpy's parser, on garbage: ValueError, TypeError, RecursionError, ...
        raise DataError(f"the npy header can't be read: {error}") from error
    if dtype.hasobject:
        raise DataError(
            f"the array holds Python objects ({dtype}), which are pickled: reading them could run anything, so they "
            "are never read. Save numbers, strings of a fixed length or a structured dtype"
        )
    if not shape:
        raise DataError("expected an array with rows, got a single value (0 axes): np.load reads it")
    too_large = math.prod(filter(None, shape)) * max(1, dtype.itemsize) > sys.maxsize
    if min(shape) < 0 or too_large or dtype.subdtype is not None:
        raise DataError(f"the npy header can't be: shape {shape}, dtype {dtype}")
    return Layout(size, shape[0], shape[1:], dtype, fortran and len(shape) > 1)


def _parse(version: int, text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    if version == 3:
        # numpy's public functions read versions 1 and 2, which are Latin-1. Beyond ASCII there is nothing in a header
        # but names in quotes, so escaped it means the same.
        text = text.decode().encode("ascii", "backslashreplace")
    parsed = np.lib.format.read_array_header_2_0(BytesIO(len(text).to_bytes(4, "little") + text))
    shape, fortran, dtype = parsed
    return tuple(int(length) for length in shape), bool(fortran), dtype
