"""A file's content as a stream of bytes, whether it is compressed or not, from any byte on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import TypeAlias

from streamline.core.pace import Pace
from streamline.core.threads import OneThread
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.compression import (
    HEAD_BYTES,
    Compression,
    Decompressor,
    check_not_foreign,
    named,
    not_splittable,
    sniffed,
    undecided,
)
from streamline.io.storage.base import too_short

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
        async with aclosing(file.blocks(0, HEAD_BYTES)) as first:
            kind = sniffed(await _head(first))
    async with aclosing(file.blocks(start if kind is None else 0, stop)) as blocks:
        head = b""
        if kind is None and not start:
            head = await _head(blocks)
            if (kind := sniffed(head)) is None:
                check_not_foreign(path, head)
        if kind is not None and num_shards > 1:
            raise not_splittable(path, num_shards, kind)
        async with aclosing(
            _plain(head, blocks) if kind is None else _decompressed(path, kind, head, blocks, start)
        ) as marked:
            async for piece in marked:
                yield piece


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
                raise too_short(path, position, start)
        except Exception as error:
            failure = error
    if held:
        yield held, failure is None
    if failure is not None:
        raise failure


async def _unpacked(
    path: str, kind: Compression, head: bytes, blocks: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces that are not empty. The event loop gets its turn between them, or a thread makes them."""
    decoder, pace, loop = Decompressor(kind), Pace(), asyncio.get_running_loop()
    thread = OneThread("streamline unpacking") if kind.threaded else None
    try:
        async for block, _ in _plain(head, blocks):
            step = partial(next, decoder.feed(block), None)
            while (piece := await loop.run_in_executor(thread, step) if thread is not None else step()) is not None:
                if piece:
                    yield piece
                if thread is None:
                    await pace.breathe()
        decoder.check_end()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    finally:
        if thread is not None:
            thread.shutdown()
