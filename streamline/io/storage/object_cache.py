"""A storage whose objects are kept on local disk, in front of a remote one.

What is read is also written, by a thread, after the consumer has it; nothing is read for the cache's sake. An object is
kept once every byte of it has been read, in any order, and of one version: that of its ETag. So a file that is streamed
is kept, and so is one that is fetched in ranges that cover it; one of which only a footer and some columns are read is
not. A part of an object is dropped, at the latest when the stream ends.

Where the ETag isn't known from a listing, the server is asked for it, each time that an object is opened. Without a
strong one nothing tells two versions apart, and the object is read past the cache.

Several flows may read one object at once. In one event loop they write the same part together; what another process is
writing is read past the cache. No reader waits for another, so none hangs when a process dies.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from time import monotonic

import anyio

from streamline.core.meters import Traffic
from streamline.core.threads import SerialExecutor
from streamline.errors import printable
from streamline.io.storage.base import MODIFIED, FoundObject, Storage, join_blocks, too_short
from streamline.io.storage.object_cache_folder import CachedObject, CacheFolder, PartialObject, digest

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1024 * 1024
"""What is read from disk at once, as for local files."""

VERSION_S = 5.0
"""Seconds for which an ETag that a server sent holds for more ranges of the object: a file that is read in a hundred
ranges asks once. Opening an object from its start asks anew."""

IDLE_PARTS = 64
"""Parts without a reader that are kept open for more ranges. Of more, the oldest is dropped."""

CLOSE_S = 2.0
"""Seconds that closing waits at the most for a disk that hangs; its thread ends whenever that does."""


class ObjectCache:
    """A folder of objects, for the storages of one event loop. Opened when it is first used."""

    def __init__(self, cache_dir: str, max_bytes: int | None, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        self._options = (cache_dir, max_bytes)
        self._folder: CacheFolder | None = None
        self._reads = SerialExecutor("streamline cache reads")
        self._writes = SerialExecutor("streamline cache writes")
        self._parts: dict[str, CachePart] = {}
        self._keeping: dict[str, asyncio.Future[None]] = {}  # the last ones are over
        self._said = False
        self._making = threading.Lock()

    async def open(self, name: str) -> CachedObject | None:
        """Return what is kept under a name, open; `close` it."""
        while True:
            if (keeping := self._keeping.get(name)) is not None:
                await asyncio.wait([keeping])
            opening = asyncio.wrap_future(self._reads.submit(lambda: self._open_folder().open(name)))
            try:
                kept = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_result)
                raise
            if kept is not None or self._keeping.get(name) is keeping:
                break  # else it was kept just after that look, and would be read once more
        self.traffic.cache_hits += kept is not None
        self.traffic.cache_misses += kept is None
        return kept

    async def read(self, kept: CachedObject, start: int, stop: int) -> bytes:
        """Return bytes of an open object; fewer if it was cut."""
        data = await asyncio.wrap_future(self._reads.submit(lambda: kept.read(start, stop)))
        self.traffic.cache_bytes += len(data)
        return data

    def close(self, kept: CachedObject) -> None:
        """Close an object, after what is being read of it."""
        self._reads.submit(kept.close)

    @contextmanager
    def part(self, name: str) -> Iterator[CachePart]:
        """Give what writes down the object of a name, while it is read."""
        part = self._parts.pop(name, None) or CachePart(name, self._open_folder, self._writes)
        self._parts[name] = part  # the last one is the one used last
        part.users += 1
        try:
            yield part
        finally:
            part.users -= 1
            self._tidy(name, part)

    def _tidy(self, name: str, part: CachePart) -> None:
        """Forget a part that is done, and idle ones beyond some."""
        if part.keeping is not None and self._keeping.get(name) is not part.keeping:
            self._keeping.pop(name, None)
            self._keeping[name] = part.keeping
            over = [name for name, keeping in self._keeping.items() if keeping.done()]
            for old in over[: max(0, len(self._keeping) - IDLE_PARTS)]:
                del self._keeping[old]
        if part.done and not part.users:
            self._parts.pop(name, None)
        idle = [name for name, part in self._parts.items() if not part.users]
        for name in idle[: max(0, len(idle) - IDLE_PARTS)]:
            self._parts.pop(name).drop()

    def not_kept(self, path: str) -> None:
        """Say, once, that an object isn't kept because nothing tells its versions apart."""
        if not self._said:
            self._said = True
            logger.warning(
                "%s has no strong ETag, which would tell its versions apart: it isn't kept in cache_dir",
                printable(path),
            )

    async def settle(self) -> None:
        """Wait until all that was asked of the disk so far is done."""
        for thread in (self._reads, self._writes):
            await asyncio.shield(asyncio.wrap_future(thread.submit(lambda: None)))

    async def aclose(self) -> None:
        """Drop what is there in part, and end the threads. Idempotent."""
        parts, self._parts = self._parts, {}
        for part in parts.values():
            part.drop()
        with anyio.move_on_after(CLOSE_S, shield=True):
            await self.settle()
        self._reads.shutdown()
        self._writes.shutdown()

    def _open_folder(self) -> CacheFolder:
        with self._making:
            if self._folder is None:
                self._folder = CacheFolder(*self._options)
            return self._folder


def _close_result(opening: asyncio.Future[CachedObject | None]) -> None:
    if not opening.cancelled() and opening.exception() is None and (kept := opening.result()) is not None:
        kept.close()


class CachedStorage(Storage):
    """Reads objects of `remote`, from disk where they are kept.

    Args:
      remote: is closed with this.
      cache: isn't.
      scope: as for `digest`.
    """

    def __init__(self, remote: Storage, cache: ObjectCache, scope: str = "") -> None:
        self.remote = remote
        self._scope = scope
        self.cache = cache
        self._versions: dict[str, tuple[float, FoundObject]] = {}

    async def list(self, pattern: str) -> list[FoundObject]:
        return await self.remote.list(pattern)

    async def stat(self, path: str) -> FoundObject:
        found = await self.remote.stat(path)
        self._keep(found)
        return found

    def note(self, found: FoundObject) -> None:
        self.remote.note(found)
        if found.etag:
            self._keep(found)  # else it would be asked for, to see whether all of the object has been read

    def _keep(self, found: FoundObject) -> None:
        """Keep what the remote storage, or a listing, says of an object that is about to be read."""
        now, path = monotonic(), found.path
        while self._versions and now - next(iter(self._versions.values()))[0] > VERSION_S:
            del self._versions[next(iter(self._versions))]
        self._versions.pop(path, None)
        self._versions[path] = (now, found)  # the last one is the newest

    def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        return self._through(self.remote.blocks, path, start, stop, etag)

    async def read(self, path: str, start: int, stop: int | None, etag: str | None = None) -> bytes:
        async with aclosing(self._through(self._at_once, path, start, stop, etag)) as blocks:
            return join_blocks(path, [block async for block in blocks], start, stop)

    async def _at_once(self, path: str, start: int, stop: int | None, etag: str | None) -> AsyncGenerator[bytes, None]:
        yield await self.remote.read(path, start, stop, etag)

    async def _through(
        self,
        remote: Callable[[str, int, int | None, str | None], AsyncGenerator[bytes, None]],
        path: str,
        start: int,
        stop: int | None,
        etag: str | None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to `stop` (None: the end), from disk, or as `remote` yields them, written down."""
        etag = etag or await self._etag(path, start, stop)
        if not _strong(etag):
            self.cache.not_kept(path)
            async with aclosing(remote(path, start, stop, etag)) as blocks:
                async for block in blocks:
                    yield block
            return
        assert etag is not None
        name, position = digest(path, etag, self._scope), start
        if (kept := await self.cache.open(name)) is not None:
            end = self._end(path, kept, start, stop)
            async with aclosing(self._from_folder(path, kept, start, end)) as blocks:
                async for block in blocks:
                    position += len(block)
                    yield block
            if position == end:
                return
        with self.cache.part(name) as part:
            async with aclosing(remote(path, position, stop, etag)) as blocks:
                async for block in blocks:
                    await part.write(position, block)
                    position += len(block)
                    yield block
            await self._check_whole(part, path, etag, position if stop is None else None)

    async def _from_folder(self, path: str, kept: CachedObject, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield bytes of an open object, up to where the file was cut meanwhile."""
        try:
            while start < end:
                block = await self.cache.read(kept, start, min(end, start + BLOCK_BYTES))
                if not block:
                    logger.warning("%s was cut in the cache while it was read: fetching the rest", printable(path))
                    return
                start += len(block)
                yield block
        finally:
            self.cache.close(kept)

    def _end(self, path: str, kept: CachedObject, start: int, stop: int | None) -> int:
        """Return where a read of an open object ends; close the object if it has no byte `start`."""
        if start > kept.size:
            self.cache.close(kept)
            raise too_short(printable(path), kept.size, start)
        return kept.size if stop is None else min(stop, kept.size)

    async def _check_whole(self, part: CachePart, path: str, etag: str, size: int | None) -> None:
        """Check whether all of an object has been read; ask for its size where that may be."""
        if size is None and part.size is None and not part.asked and part.spans.from_start:
            part.asked = True
            known = self._versions.get(path)
            found = await self.stat(path) if known is None or known[1].etag != etag else known[1]
            size = found.size if found.etag == etag else None
        part.ended(size)

    async def _etag(self, path: str, start: int, stop: int | None) -> str | None:
        """Return the ETag that the server says now; for an object that is read in ranges, at most `VERSION_S` ago."""
        known = self._versions.get(path)
        if known is not None and (start or stop is not None) and monotonic() - known[0] <= VERSION_S:
            return known[1].etag
        return (await self.stat(path)).etag

    async def aclose(self) -> None:
        await self.remote.aclose()


def _strong(etag: str | None) -> bool:
    """Whether an ETag tells any two contents apart (RFC 9110, section 8.8.1)."""
    return bool(etag) and not str(etag).startswith(("W/", MODIFIED))


class Spans:
    """A set of bytes as disjoint spans that don't touch, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add bytes `start` to `stop`; what is there already stays once."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first span that ends at `start` or later
        last = bisect_right(self._starts, stop)  # after the last one that begins at `stop` or before it
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def cover(self, size: int) -> bool:
        """Whether bytes 0 to `size` are all there."""
        return not size or (bool(self._stops) and self._starts[0] == 0 and self._stops[0] >= size)

    @property
    def from_start(self) -> bool:
        """Whether all that is there is one piece from byte 0 on."""
        return len(self._starts) == 1 and self._starts[0] == 0


@dataclass
class CachePart:
    """An object that is being read, in any order, and what of it has been written.

    Attributes:
      name: under which it will be kept.
      made: returns the folder; called in the thread only.
      done: whether it is kept, or given up.
      keeping: done when it is kept.
      spans: what of it has been handed to the thread.
    """

    name: str
    made: Callable[[], CacheFolder]
    thread: SerialExecutor
    size: int | None = None
    asked: bool = False
    users: int = 0
    done: bool = False
    keeping: asyncio.Future[None] | None = None
    spans: Spans = field(default_factory=Spans)
    _part: PartialObject | None = None
    _begun: bool = False
    _failed: bool = False
    _last: asyncio.Future[None] | None = None

    async def write(self, position: int, data: bytes) -> None:
        """Write bytes after those of the calls before; waits until all but these are on disk."""
        if self.done:
            return
        if self._failed:
            self.drop()
            return
        last, self._last = self._last, asyncio.wrap_future(self.thread.submit(lambda: self._write(position, data)))
        self.spans.add(position, position + len(data))
        if last is not None:
            await asyncio.wait([last])

    def ended(self, size: int | None) -> None:
        """Something was read, perhaps up to the end; if nothing is missing now, keep it."""
        self.size = size if self.size is None else self.size
        if not self.done and self.size is not None and self.spans.cover(self.size):
            self.done = True
            self.keeping = asyncio.wrap_future(self.thread.submit(self._keep))

    def drop(self) -> None:
        """Give it up. Idempotent."""
        if not self.done:
            self.done = True
            self.thread.submit(self._drop)

    def _write(self, position: int, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._part = self.made().begin(self.name)
        if self._part is None or self._failed:
            self._failed = True
            return
        try:
            fits = self.size is None or self.made().fits(self.size)
            if fits and self.made().admit(len(data)):
                self._part.write(position, data)
                return
        except OSError as error:
            self.made().failed(error)
        self._failed = True
        self._part.drop()

    def _keep(self) -> None:
        if not self._begun:  # it has no bytes
            self._write(0, b"")
        if self._part is None or self._failed:
            return
        assert self.size is not None
        try:
            self._part.keep(self.size)
        except OSError as error:
            self.made().failed(error)
            self._part.drop()

    def _drop(self) -> None:
        if self._part is not None:
            self._part.drop()
