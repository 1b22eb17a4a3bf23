"""A file's content as a stream of bytes, compressed or not, from any byte on, and formats that cut items out of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from streamline.core.flow import Chunk, Lists, StageContext
from streamline.core.meters import HoldTimer, Working
from streamline.core.pace import Pace
from streamline.core.state import At
from streamline.core.threads import SerialExecutor
from streamline.errors import DataError, ReadError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Format, IndexedStates, Place
from streamline.io.formats.compression import (
    HEAD_BYTES,
    Compression,
    Decompressor,
    check_not_foreign,
    compression_of_head,
    compression_of_name,
    not_splittable,
    undecided,
)
from streamline.io.storage.base import too_short

T = TypeVar("T")

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
    kind = compression_of_name(path)
    if kind is None and start:
        async with aclosing(file.blocks(0, HEAD_BYTES)) as first:
            kind = compression_of_head(await _head(first))
    async with aclosing(file.blocks(start if kind is None else 0, stop)) as blocks:
        head = b""
        if kind is None and not start:
            head = await _head(blocks)
            if (kind := compression_of_head(head)) is None:
                check_not_foreign(path, head)
        if kind is not None and num_shards > 1:
            raise not_splittable(path, num_shards, kind)
        async with aclosing(
            _plain(head, blocks) if kind is None else _decompress(path, kind, head, blocks, start)
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


async def _decompress(
    path: str, kind: Compression, head: bytes, blocks: AsyncIterator[bytes], start: int
) -> AsyncGenerator[Marked, None]:
    held = b""
    failure: Exception | None = None
    async with aclosing(_unpack(path, kind, head, blocks)) as unpacked:
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


async def _unpack(
    path: str, kind: Compression, head: bytes, blocks: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces that are not empty. The event loop gets its turn between them, or a thread makes them."""
    decoder, pace, loop = Decompressor(kind), Pace(), asyncio.get_running_loop()
    thread = SerialExecutor("streamline unpacking") if kind.threaded else None
    try:
        async for block, _ in _plain(head, blocks):
            step = partial(next, decoder.feed(block), None)
            while (piece := await loop.run_in_executor(thread, step) if thread is not None else step()) is not None:
                if piece:
                    yield piece
                if thread is None:
                    await pace.maybe_yield()
        decoder.check_end()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    finally:
        if thread is not None:
            thread.shutdown()


# Formats --------------------------------------------------------------------------------------------------------------


class BadItem(NamedTuple):
    """An item that can be left out: its error, what is known of it, the byte of the next one; None: none follows."""

    error: DataError
    item: Any
    end: int | None


@dataclass(slots=True)
class CutItems:
    """Items that were cut out of a file.

    Attributes:
      ends: for each, the byte at which the next one begins.
      wrong: the item after them, if that is bad and can be left out.
      failure: what is wrong with the file after them; None: nothing.
      more: whether there may be more in what was fed.
    """

    items: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    wrong: BadItem | None = None
    failure: DataError | None = None
    more: bool = False


class Cutter(ABC):
    """Is fed the blocks of a file, and cuts them into items. No I/O.

    Attributes:
      begin: the byte at which the first block begins, and an item.
      over: whether all of this part of the file has been cut.
    """

    begin: int
    over: bool = False

    @abstractmethod
    def feed(self, block: bytes, last: bool) -> None:
        """Take the next block; `last`: it is known to be the file's last."""

    @abstractmethod
    def cut(self, most: int) -> CutItems:
        """Return some items, up to `most` where they may be many; fewer if it has taken long, or the next is bad."""

    @abstractmethod
    def finish(self) -> CutItems:
        """Return what is left at the end of the file; all of it has been fed."""

    def rest(self) -> CutItems:
        """Return what is left where the file can't be read any further."""
        return CutItems()


@dataclass(frozen=True, kw_only=True)
class CutFormat(Format[T]):
    """Files whose items are cut out of their bytes. A place counts bytes and items: those before the next one."""

    @abstractmethod
    async def cutter(self, file: File, begin: Place, context: StageContext) -> tuple[Cutter, int] | None:
        """Return what cuts from `begin` on, and how many items are before it; None: nothing of this part is left."""

    async def chunks(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[T]:
        meter, pace = context.meter, Pace()
        with Working(meter):
            opened = await self.cutter(file, begin, context)
        if opened is None:
            yield Chunk((), (), At(name, dict(after)))
            return
        cutter, number = opened
        chunks = _CutChunks(cutter, number, self.counts[1], file.path, after, name, context)
        async with aclosing(pieces(file, cutter.begin)) as blocks:
            while True:
                failure: Exception | None = None
                with Working(meter):
                    try:
                        block = await anext(blocks, None)
                    except (DataError, ReadError) as error:
                        failure = error
                if failure is not None:
                    for chunk in chunks.of(cutter.rest()):
                        yield chunk
                    raise failure
                if block is None:
                    break
                cutter.feed(*block)
                more = True
                while more:
                    with HoldTimer(meter):
                        found = cutter.cut(context.max_items)
                    for chunk in chunks.of(found):
                        yield chunk
                    if cutter.over:
                        return
                    more = found.more
                    await pace.maybe_yield()
        with HoldTimer(meter):
            found = cutter.finish()
        for chunk in chunks.of(found, final=True):
            yield chunk


@dataclass
class _CutChunks:
    """Makes chunks of the items of one file, of which `number` are before the next one."""

    cutter: Cutter
    number: int
    count: str
    path: str
    after: Place
    name: str
    context: StageContext

    def of(self, found: CutItems, *, final: bool = False) -> Iterator[Chunk[Any]]:
        """Yield the items of a cut; after one that is left out, only the place."""
        last = (self.cutter.over or final) and found.wrong is None and found.failure is None
        if found.items:
            first, self.number = self.number + 1, self.number + len(found.items)
            columns = {"byte": found.ends, self.count: range(first, self.number + 1)}
            states = IndexedStates(self.name, {"file": self.path}, columns, self.after if last else None)
            yield Chunk(found.items, states)
        elif last:
            yield Chunk((), (), At(self.name, dict(self.after)))
        if found.failure is not None:
            raise found.failure
        if found.wrong is not None:
            self.number += 1
            end = found.wrong.end
            place = dict(self.after) if end is None else {"file": self.path, "byte": end, self.count: self.number}
            self.context.skip_or_raise(found.wrong.error, found.wrong.item, At(self.name, place))
            yield Chunk((), (), At(self.name, place))
