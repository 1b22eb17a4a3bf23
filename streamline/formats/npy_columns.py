"""The rows of one array, wherever they are: mapped, fetched by ranges, or unpacked from the start."""

from __future__ import annotations

import math
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from streamline.errors import DataError, ReadError
from streamline.fetching.file import File
from streamline.formats.npy_header import MAGIC, Layout, header_bytes, layout_of
from streamline.formats.npy_zip import Member, inflated

__all__ = ["Blocks", "Column", "InThread", "column_of", "first_bytes"]


HEAD_BYTES = 4096
"""Asked for first: nearly every header takes 128 bytes, and a request as long as it takes."""


InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


Blocks: TypeAlias = "AsyncGenerator[np.ndarray[Any, Any], None]"


class Column(ABC):
    """An array whose rows can be had, block by block.

    Attributes:
      name: of the array in its archive; "": the file is the array.
      layout: of its rows.
      good: rows that are there: fewer than the header says where the file was cut short.
    """

    def __init__(self, name: str, layout: Layout, good: int) -> None:
        self.name = name
        self.layout = layout
        self.good = good

    @property
    def read_bytes(self) -> int:
        """Bytes that are fetched or unpacked for a row."""
        return self.layout.row_bytes

    @abstractmethod
    def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        """Yield the rows of each (start, stop), whole, in ascending order.

        Raises:
          DataError: damaged; it says no place.
          ReadError: they can't be had.
        """


class Mapped(Column):
    """A local file, mapped: a row is read when it is looked at."""

    def __init__(self, name: str, layout: Layout, good: int, array: np.ndarray[Any, Any]) -> None:
        super().__init__(name, layout, good)
        self._array = array

    @property
    def read_bytes(self) -> int:
        return 0

    async def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        for start, stop in spans:
            yield self._array[start:stop]


class Ranged(Column):
    """A remote file, by ranges."""

    def __init__(self, name: str, layout: Layout, good: int, file: File, base: int, seed: tuple[int, int]) -> None:
        super().__init__(name, layout, good)
        self._file = file
        self._base = base + layout.start
        self._crc, self._wanted = seed

    async def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        size, layout, base = self.layout.row_bytes, self.layout, self._base
        spans = list(spans)
        checked = bool(self.name and spans) and spans[0][0] == 0  # else its beginning is not here
        if not size:
            for start, stop in spans:
                yield layout.empty(stop - start)
            return
        crc = self._crc
        ranges = self._file.ranges((base + start * size, base + stop * size) for start, stop in spans)
        async with aclosing(ranges) as fetched:
            for start, stop in spans:
                data = await anext(fetched)
                if checked:
                    crc = zlib.crc32(data, crc)
                    if stop == layout.rows and crc != self._wanted:
                        raise DataError(f"array {self.name!r} is damaged: its checksum (CRC-32) is not as it was")
                yield layout.array(data, stop - start)


class Packed(Column):
    """A deflated member of an archive, unpacked from its start."""

    def __init__(self, layout: Layout, file: File, member: Member) -> None:
        super().__init__(member.name, layout, layout.rows)
        self._file = file
        self._member = member

    async def blocks(self, spans: Iterable[tuple[int, int]]) -> Blocks:
        layout = self.layout
        size, at, held = layout.row_bytes, 0, bytearray()  # `held` begins at byte `at` of the member
        async with aclosing(inflated(self._file, self._member)) as pieces:
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
                if end == self._member.size:
                    async for _ in pieces:  # to its checksum, which is behind its last byte
                        raise DataError(f"array {self.name!r} is damaged: it goes on behind its last row")
                yield layout.array(data, stop - start)


async def column_of(file: File, member: Member | None, head: bytes, in_thread: InThread) -> Column:
    """Return what has the rows of a file, or of a member of an archive.

    Args:
      head: the first bytes of the file, or of the member where it isn't packed, as far as somebody has read them.
      in_thread: calls a sync function in a thread.

    Raises:
      DataError: it is no array, or not one whose rows can be had; it says no place.
      ReadError: it can't be had.
    """
    packed = member is not None and member.packed
    base = 0 if member is None else member.start
    head = await _header(file, member, head)
    layout = layout_of(head)
    size = (await file.found()).size if member is None else member.size
    name = "" if member is None else member.name
    if size is not None and size > layout.stop:
        raise DataError(
            f"there are {size - layout.stop:,} bytes behind the array: was another one saved into the same file? Use "
            "np.savez for several"
        )
    good = layout.rows
    if size is not None and size < layout.stop:
        good = 0 if layout.fortran else max(0, size - layout.start) // layout.row_bytes
    if packed:
        if good < layout.rows or layout.fortran:
            raise DataError(_fortran() if layout.fortran else f"array {name!r} is shorter than its header says")
        assert member is not None
        return Packed(layout, file, member)
    if file.local:
        found = await in_thread(lambda: _mapped(file, layout, base, good))
        if isinstance(found, BaseException):
            raise found
        return Mapped(name, layout, good, found)
    if layout.fortran:
        raise DataError(_fortran())
    seed = (zlib.crc32(head[: layout.start]), 0 if member is None else member.crc)
    return Ranged(name, layout, good, file, base, seed)


def _fortran() -> str:
    return (
        "the array is in Fortran order, so each row is spread over all of it: save np.ascontiguousarray(array), or "
        "read an uncompressed local copy, which is mapped"
    )


async def first_bytes(file: File) -> bytes:
    """Return the first bytes of a file: in nearly every case, all of the header, if it is an npy file."""
    return await _gathered(file.blocks(0, HEAD_BYTES))


async def _gathered(blocks: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(blocks):
        return b"".join([block async for block in blocks])


async def _header(file: File, member: Member | None, head: bytes) -> bytes:
    """Return the bytes of a header, and perhaps some behind it."""
    if member is not None and member.packed:
        async with aclosing(inflated(file, member)) as pieces:
            async for piece in pieces:
                head += piece
                if len(head) >= len(MAGIC) + 6 and len(head) >= header_bytes(head):
                    break
        return head
    base, limit = (0, math.inf) if member is None else (member.start, member.size)
    if not head:
        head = await _gathered(file.blocks(base, base + int(min(HEAD_BYTES, limit))))
    if len(head) < (wanted := int(min(limit, header_bytes(head)))):
        head += await _gathered(file.blocks(base + len(head), base + wanted))
    return head


def _mapped(file: File, layout: Layout, base: int, good: int) -> np.ndarray[Any, Any] | BaseException:
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
