"""A file's text as a stream of bytes, whether it is compressed or not, from any byte on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from streamline.errors import DataError, PlanError, ReadError
from streamline.formats.gunzip import MAGIC, Gunzip
from streamline.pace import Pace
from streamline.sources.storage import Storage

__all__ = ["named_gzip", "not_splittable", "pieces"]

Marked = tuple[bytes, bool]
"""Some bytes, and whether they are known to be the last."""


def named_gzip(path: str) -> bool:
    """Whether a path's or URL's name says that it is a gzip file."""
    return path.split("?")[0].lower().endswith(".gz")


def not_splittable(path: str, num_shards: int) -> PlanError:
    """Return the error for splitting a gzip file."""
    return PlanError(
        f"{path} is a gzip file, which can only be read from its start, so it can't be split into {num_shards} shards: "
        f'split it into several files, or write .shard({num_shards}, mode="replicated"): each shard reads all of it'
    )


async def pieces(storage: Storage, path: str, start: int, num_shards: int) -> AsyncGenerator[Marked, None]:
    """Yield the bytes of a file from `start` on, decompressed if it is a gzip file by its name or its first bytes.

    The last piece of a gzip file is marked, so that no resume has to decompress a file to find that nothing is left.
    One piece is kept back for that.

    Args:
      storage: what holds the file.
      path: of the file.
      start: in decompressed bytes.
      num_shards: how many shards it is split into.

    Raises:
      ReadError: as `Storage.blocks`; the file has no byte `start`.
      DataError: the compressed data is damaged or cut short; what is before that has been yielded.
      PlanError: it is a gzip file, and to be split.
    """
    zipped = named_gzip(path) or (start > 0 and await _begins_with_magic(storage, path))
    async with aclosing(storage.blocks(path, 0 if zipped else start)) as blocks:
        head = b""
        if not zipped and not start:
            head = await _head(blocks)
            zipped = head.startswith(MAGIC)
        if zipped and num_shards > 1:
            raise not_splittable(path, num_shards)
        async with aclosing(_decompressed(path, head, blocks, start) if zipped else _plain(head, blocks)) as marked:
            async for piece in marked:
                yield piece


async def _begins_with_magic(storage: Storage, path: str) -> bool:
    async with aclosing(storage.blocks(path, 0, len(MAGIC))) as blocks:
        return await _head(blocks) == MAGIC


async def _head(blocks: AsyncIterator[bytes]) -> bytes:
    """Return the first blocks, as many as it takes to see whether they are gzip data."""
    head = b""
    async for block in blocks:
        head += block
        if len(head) >= len(MAGIC):
            break
    return head


async def _plain(head: bytes, blocks: AsyncIterator[bytes]) -> AsyncGenerator[Marked, None]:
    if head:
        yield head, False
    async for block in blocks:
        yield block, False


async def _decompressed(
    path: str, head: bytes, blocks: AsyncIterator[bytes], start: int
) -> AsyncGenerator[Marked, None]:
    held = b""
    failure: Exception | None = None
    async with aclosing(_gunzipped(path, head, blocks)) as unzipped:
        try:
            position = 0
            async for piece in unzipped:
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


async def _gunzipped(path: str, head: bytes, blocks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    decoder, pace = Gunzip(), Pace()
    try:
        for piece in decoder.feed(head):
            yield piece
        async for block in blocks:
            for piece in decoder.feed(block):
                yield piece
                await pace.breathe()
        if piece := decoder.finish():
            yield piece
        decoder.check_end()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
