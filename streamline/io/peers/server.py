"""What serves this machine's folder to the others, and fetches for them what isn't there.

Bytes that several machines want at once are asked of the store once: a *run* fetches a range, writes it into the
object's part in the folder as it comes, and all who want bytes of it read them there. A run goes on at the store's
speed, not at that of the slowest reader, and ends when nobody waits for it. What can't be written (a full disk, an
object larger than the folder, a part that another process writes) isn't served: those who ask turn to the store.

A request names an object by its digest, and says of what; the path only goes to the store, never to a file system, and
must make that digest with the options of this process. So what is fetched here is what the asking machine would fetch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from streamline.errors import ReadError, printable
from streamline.io.peers.peer import PeerRequest
from streamline.io.storage.base import FoundObject, Storage
from streamline.io.storage.object_cache import BLOCK_BYTES, CachedStorage, CachePart, ObjectCache
from streamline.io.storage.object_cache_folder import digest

logger = logging.getLogger(__name__)

SEND_S = 60.0
"""Seconds that a peer may take for a block, before its connection is dropped."""


class Origin(Protocol):
    """The storages of one `Access`, with the cache of this machine. Used in the server's event loop only."""

    cache: ObjectCache | None
    concurrency: int

    def of(self, path: str) -> Storage: ...

    def scope(self, path: str) -> str: ...

    async def aclose(self) -> None: ...


class NotHereError(Exception):
    """The bytes are to be had of the store."""


class ObjectServer:
    """Answers requests of peers.

    Attributes:
      origins: which are asked; a request goes to the first that makes the same digest of the path.
    """

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self._pulls: dict[tuple[Origin, str], _Pull] = {}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send the bytes of an object; 404: they aren't to be had here."""
        try:
            wanted = PeerRequest.of(request.raw_path, request.headers) if request.method == "GET" else None
        except ValueError as error:
            return web.Response(status=400, text=str(error))
        if wanted is None:
            return web.Response(status=405)
        response = web.StreamResponse(status=206, headers=wanted.answer())
        response.content_length = wanted.stop - wanted.start
        try:
            async with aclosing(self._blocks(wanted)) as blocks:
                async for block in blocks:
                    async with asyncio.timeout(SEND_S):
                        if not response.prepared:
                            await response.prepare(request)
                        await response.write(block)
        except (NotHereError, ReadError) as error:
            if not response.prepared:
                return web.Response(status=404, text=printable(str(error)))
            _drop(request)
        except OSError:  # it has hung up, or takes too long
            _drop(request)
        return response

    async def forget(self, origin: Origin) -> None:
        """Fetch no more from an origin, and close it."""
        for key in [key for key in self._pulls if key[0] is origin]:
            await self._pulls.pop(key).aclose()
        await origin.aclose()

    async def aclose(self) -> None:
        for origin in list(self.origins):
            await self.forget(origin)

    async def _blocks(self, wanted: PeerRequest) -> AsyncGenerator[bytes, None]:
        origin = next((one for one in list(self.origins) if _names(one, wanted)), None)
        if (
            origin is None
            or origin.cache is None
            or not isinstance(storage := origin.of(wanted.found.path), CachedStorage)
        ):
            raise NotHereError("another object by that name, or none that is kept")
        if wanted.found.size is not None:
            storage.note(wanted.found)
        position, in_vain = wanted.start, False
        while position < wanted.stop:
            came = position
            async with aclosing(self._more(origin, origin.cache, storage, wanted, position)) as blocks:
                async for block in blocks:
                    position += len(block)
                    yield block
            if (in_vain and position == came) or origin not in self.origins:
                raise NotHereError("it isn't kept here")
            in_vain = position == came  # once: another process may have kept it just now

    async def _more(
        self, origin: Origin, cache: ObjectCache, storage: CachedStorage, wanted: PeerRequest, position: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes from `position` on, from a whole object, or from a part until that is whole."""
        if (kept := await cache.open(wanted.name)) is not None:
            try:
                while block := await cache.read(kept, position, min(wanted.stop, kept.size, position + BLOCK_BYTES)):
                    position += len(block)
                    yield block
            finally:
                cache.close(kept)
            return
        key = origin, wanted.name
        with cache.part(wanted.name) as part:
            pull = self._pulls.setdefault(key, _Pull(storage, wanted.found, part))
            pull.users += 1
            try:
                async with aclosing(pull.blocks(position, wanted.stop)) as blocks:
                    async for block in blocks:
                        yield block
            finally:
                pull.users -= 1
                if not pull.users and self._pulls.get(key) is pull:
                    del self._pulls[key]
                    await pull.aclose()


def _names(origin: Origin, wanted: PeerRequest) -> bool:
    found = wanted.found
    return digest(found.path, str(found.etag), origin.scope(found.path)) == wanted.name


def _drop(request: web.BaseRequest) -> None:
    """Close a connection amid an answer, so that the other end sees that it is cut."""
    if request.transport is not None:
        request.transport.abort()


@dataclass(eq=False)
class _FetchedRange:
    """A range that is being fetched; `position` is that of the next byte."""

    position: int
    stop: int
    came: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    task: asyncio.Task[None] | None = None

    def turn(self) -> None:
        """Wake all who wait."""
        came, self.came = self.came, asyncio.Event()
        came.set()


@dataclass(eq=False)
class _Pull:
    """An object that is fetched for peers, and what of it is being fetched."""

    storage: CachedStorage
    found: FoundObject
    part: CachePart
    users: int = 0
    runs: list[_FetchedRange] = field(default_factory=list)

    async def blocks(self, position: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Yield bytes as they come; ends early where the whole object is kept by now, or can't be."""
        while position < stop:
            if (end := self.part.spans.end_at(position)) > position:
                block = await self.part.read(position, min(end, stop, position + BLOCK_BYTES))
                if not block:
                    return
                position += len(block)
                yield block
                continue
            run = next((run for run in self.runs if run.position <= position < run.stop), None)
            run = run or self._begun(position, stop)
            await self._passes(run, position)
            if self.part.spans.end_at(position) == position:
                return

    async def aclose(self) -> None:
        for task in [run.task for run in self.runs if run.task is not None]:
            task.cancel()
            await asyncio.wait([task])

    async def _passes(self, run: _FetchedRange, position: int) -> None:
        while run in self.runs and run.position <= position and not self.part.done:
            await run.came.wait()
        if run.error is not None and run.position <= position:
            raise run.error

    def _begun(self, position: int, stop: int) -> _FetchedRange:
        """Begin to fetch from `position` on, up to what is there or on its way."""
        after = [run.position for run in self.runs if run.position > position]
        run = _FetchedRange(position, min([stop, *after, *self.part.spans.starts_after(position)]))
        self.runs.append(run)
        run.task = asyncio.create_task(self._run(run))
        return run

    async def _run(self, run: _FetchedRange) -> None:
        try:
            stream = self.storage.blocks(self.found.path, run.position, run.stop, self.found.etag)
            async with aclosing(stream) as blocks:
                async for block in blocks:
                    run.position += len(block)
                    run.turn()
        except Exception as error:
            run.error = error
        finally:
            self.runs.remove(run)
            run.turn()
