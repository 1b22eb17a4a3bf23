"""The files of one flow, one after the other; of remote ones, the next are fetched while one is read.

What all flows of one source in one event loop share: its storages, and the tasks that ask them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamline.core.flow import Site
from streamline.core.knobs import KnobValues
from streamline.core.tasks import Session, Tasks
from streamline.errors import ReadError
from streamline.io.fetch.file import File, FilePart
from streamline.io.fetch.read_ahead import ObjectReader, ReadAhead, parts
from streamline.io.fetch.request import RequestPool
from streamline.io.storage.base import Storage
from streamline.io.storage.local import LocalStorage
from streamline.io.storage.options import Access
from streamline.io.storage.registry import Storages
from streamline.sharding.split import byte_range

LIST_BYTES = 4 * 2**20
"""Whole files are yielded together up to this size: more of them would be older than the cache."""

Whole = tuple[int, bytes | ReadError]
"""The index of a file, and all that is in it, or why it can't be read."""


class Fetcher:
    """Opens the files that one flow reads, in an `async with`.

    Args:
      sequential: whether each is read as one stream, all but the first from its beginning, so that the next ones can
        be fetched ahead.
    """

    _shared: SharedStorages

    def __init__(self, name: str, site: Site, access: Access, parts: Sequence[FilePart], *, sequential: bool) -> None:
        self._name = name
        self._site = site
        self._access = access
        self._parts = parts
        self._sequential = sequential
        self._ahead: ReadAhead | None = None
        self._next = 0

    def file(self, index: int) -> File:
        """Return file `index`; those before it are not asked for any more."""
        part = self._parts[index]
        ahead = partial(self._stream, index) if self._sequential and not part.local else None
        return File(part, self._storage(part), self._pool, ahead, self._shared.notes)

    async def wholes(self, index: int, most: int) -> list[Whole]:
        """Return the files from `index` on that are there, whole: one at least, at most `most`, none after an error.

        Files are asked for in order.
        """
        if self._parts[index].local:
            return await self._local(index, most)
        ahead = await self._at(index, 0)
        found: list[Whole] = []
        total = 0
        while len(found) < most and total < LIST_BYTES and ahead.readings and ahead.readings[0].order == index:
            data = ahead.whole()
            if data is None:
                if found:
                    break
                if not ahead.joins:
                    await ahead.arrival()
                    continue
                found.append((index, await self._join_parts(index)))
                break
            content = data[0] if len(data) == 1 else b"".join(data)
            found.append((index, content))
            total += len(content)
            index += 1
        ahead.poke()
        return found

    async def __aenter__(self) -> None:
        self._shared = SharedStorages.lend(self._site.tasks.session, self._name, self._access)

    async def __aexit__(self, *_: object) -> None:
        """Drop what was read ahead, and give the connections back."""
        try:
            if self._ahead is not None:
                await self._ahead.aclose()
        finally:
            await self._shared.release()

    def _storage(self, part: FilePart) -> Storage:
        storage = self._shared.storages.of(part.path)
        if part.found.size is not None and not part.local:
            storage.note(part.found)
        return storage

    def _pool(self) -> RequestPool:
        return self._shared.pool(self._site.tasks)

    async def _join_parts(self, index: int) -> bytes | ReadError:
        """Return a file that comes in several answers, or not at all."""
        try:
            async with aclosing(self.file(index).blocks()) as stream:
                return b"".join([block async for block in stream])
        except ReadError as error:
            return error

    async def _local(self, index: int, most: int) -> list[Whole]:
        storage = self._shared.storages.of(self._parts[index].path)
        if not isinstance(storage, LocalStorage):  # of a remote file that is kept on disk, say
            return [(index, await self._join_parts(index))]
        stop = index + 1
        while stop < min(len(self._parts), index + most) and self._parts[stop].local:
            stop += 1
        found = await storage.wholes([part.path for part in self._parts[index:stop]])
        return list(enumerate(found, index))

    async def _stream(self, index: int, start: int) -> AsyncGenerator[bytes, None]:
        ahead = await self._at(index, start)
        async with aclosing(ahead.blocks(ahead.readings[0])) as blocks:
            async for block in blocks:
                yield block

    async def _at(self, index: int, start: int) -> ReadAhead:
        """Return what reads ahead, with file `index`, from byte `start` on, as its first."""
        if self._ahead is None:
            self._next = index
            self._ahead = ReadAhead(self._pool(), self._following)
        ahead = self._ahead
        while ahead.readings and ahead.readings[0].order < index:
            await ahead.drop(ahead.readings[0])
        first = ahead.readings[0] if ahead.readings else None
        if first is not None and first.order == index and first.start != start:
            await ahead.drop(first)
            first = None
        if first is None or first.order != index:
            self._next = max(self._next, index + 1)
            ahead.add(self._reading(index, start))
        return ahead

    def _following(self) -> ObjectReader | None:
        """Return the reading of the next remote file."""
        while self._next < len(self._parts):
            index = self._next
            self._next += 1
            if not self._parts[index].local:
                return self._reading(index, 0)
        return None

    def _reading(self, index: int, start: int) -> ObjectReader:
        part = self._parts[index]
        found, spans, eager = part.found, None, None
        storage = self._storage(part)
        known = found.size and found.etag and (found.ranged or not hasattr(storage, "fetch"))
        if known and found.size and start < found.size:
            spans = parts([(start, found.size)], self._pool().budget.part_bytes)
        if found.size and part.num_shards > 1:
            eager = byte_range(found.size, part.num_shards, part.shard)[1]
        return ObjectReader(index, storage, found, start, spans, eager)


class OpenStorages(dict[str, "SharedStorages"]):
    """Those of a run, by the name of their source."""


@dataclass
class SharedStorages:
    """The storages of a source, and what asks them, for all its flows in one event loop.

    Attributes:
      notes: what formats remember of files for the source's other flows.
    """

    session: Session
    name: str
    access: Access
    storages: Storages
    notes: dict[str, Any] = field(default_factory=dict)
    _pool: RequestPool | None = None
    _users: int = 0

    @classmethod
    def lend(cls, session: Session, name: str, access: Access) -> SharedStorages:
        """Return those of a source, for one of its flows; the last one that calls `release` closes them."""
        shares = session.services.get(OpenStorages)
        if name not in shares:
            shares[name] = cls(session, name, access, Storages(access, session.meters.traffic(name)))
        shares[name]._users += 1
        return shares[name]

    def pool(self, tasks: Tasks) -> RequestPool:
        """Return what makes the requests of the source; it is made with `tasks` if there is none yet."""
        if self._pool is None:
            self._pool = RequestPool(tasks, self.access.concurrency, self.session.budget)
            if (knobs := self.session.services.find(KnobValues)) is not None:
                knobs.join(self.name, self._pool)
        return self._pool

    async def release(self) -> None:
        self._users -= 1
        if not self._users:
            del self.session.services.get(OpenStorages)[self.name]
            try:
                if self._pool is not None:
                    await self._pool.aclose()
            finally:
                await self.storages.aclose()
