"""A file's content as a stream of bytes, whether it is compressed or not, from any byte on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, closing
from functools import partial
from typing import TypeAlias

from streamline.core.pace import Pace
from streamline.core.threads import OneThread
from streamline.errors import DataError, ReadError
from streamline.io.fetch.file import File
from streamline.io.formats.compression import (
    HEAD_BYTES,
    Compression,
    check_not_foreign,
    named,
    not_splittable,
    sniffed,
    undecided,
)

Marked: TypeAlias = tuple[bytes, bool]
"""Some bytes, and whether they are known to be the last."""


async def pieces(file: File, start: int, stop: int | None = None) -> AsyncGenerator[Marked, None]:
    """Yield the bytes of a file from `start` on, decompressed if it is compressed by its name or its first bytes.

    The last piece of a compressed file is marked, so that no resume has to decompress a file to find that nothing is
    left. One piece is kept back for that. Pieces of compressed files have at most 256 KiB, whatever they unpack to,
    and the event loop gets its turn between them.

    Args:
      start: in decompressed bytes; what is before it is decompressed and dropped.
      stop: where reading the file ends, in bytes of the file; None: its end.

    Raises:
      ReadError: as `Storage.blocks`; the file has no byte `start`.
      DataError: the compressed data is damaged or cut short; what is before that has been yielded. Or the file begins
        as one of another format.
      PlanError: it is compressed, and to be split.
    """
    path, num_shards = file.path, file.part.num_shards
    kind = named(path)
    if kind is None and start:
        kind = sniffed(await _first(file))
    async with aclosing(file.blocks(start if kind is None else 0, stop)) as blocks:
        head = b""
        if kind is None and not start:
            head = await _head(blocks)
            kind = sniffed(head)
            check_not_foreign(path, head)
        if kind is not None and num_shards > 1:
            raise not_splittable(path, num_shards, kind)
        async with aclosing(
            _plain(head, blocks) if kind is None else _decompressed(path, kind, head, blocks, start)
        ) as marked:
            async for piece in marked:
                yield piece


async def _first(file: File) -> bytes:
    async with aclosing(file.blocks(0, HEAD_BYTES)) as blocks:
        return await _head(blocks)


async def _head(blocks: AsyncIterator[bytes]) -> bytes:
    """Return the first blocks, as many as it takes to see whether they are compressed."""
    head = b""
    async for block in blocks:
        head = head + block if head else block
        if not undecided(head):
            break
    return head


async def _plain(head: bytes, blocks: AsyncIterator[bytes]) -> AsyncGenerator[Marked, None]:
    if head:
        yield head, False
    async for block in blocks:
        yield block, False


async def _decompressed(
    path: str, kind: Compression, head: bytes, blocks: AsyncIterator[bytes], start: int
) -> AsyncGenerator[Marked, None]:
    held = b""
    failure: Exception | None = None
    async with aclosing(_unpacked(path, kind, head, blocks)) as unpacked:
        try:
            position = 0
            async for piece in unpacked:
                begin, position = position, position + len(piece)
                if position <= start:
                    continue
                if held:
                    yield held, False
                held = piece[max(0, start - begin) :]
            if position < start:
                raise ReadError(f"{path} has {position:,} bytes, expected more than {start:,}: has it been replaced?")
        except Exception as error:
            failure = error
    if held:
        yield held, failure is None
    if failure is not None:
        raise failure


async def _unpacked(
    path: str, kind: Compression, head: bytes, blocks: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    decoder = kind.decompressor()
    with closing(_DecompressionSteps(kind.threaded)) as steps:
        try:
            async with aclosing(steps.of(decoder.feed(head))) as first:
                async for piece in first:
                    yield piece
            async for block in blocks:
                async with aclosing(steps.of(decoder.feed(block))) as more:
                    async for piece in more:
                        yield piece
            decoder.check_end()
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


class _DecompressionSteps:
    """Where steps of decompressing are made: in the event loop, which gets its turn between them, or in a thread."""

    def __init__(self, threaded: bool) -> None:
        self._pace = Pace()
        self._thread = OneThread("streamline unpacking") if threaded else None

    async def of(self, feed: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the pieces that are not empty."""
        if self._thread is None:
            for piece in feed:
                if piece:
                    yield piece
                await self._pace.breathe()
            return
        loop, step = asyncio.get_running_loop(), partial(next, feed, None)
        while (found := await loop.run_in_executor(self._thread, step)) is not None:
            if found:
                yield found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
