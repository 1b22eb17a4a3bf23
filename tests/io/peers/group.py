"""Machines for tests: folders of their own, each served at an address of its own on loopback."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamline.core.meters import Traffic
from streamline.core.tls import Certificates
from streamline.errors import ReadError
from streamline.io.peers.client import PeerClient
from streamline.io.peers.node import Where, node_of, released
from streamline.io.storage.base import FoundObject, Storage
from streamline.io.storage.object_cache import CachedStorage, ObjectCache

KEY = b"0123456789abcdef" * 4

URL = "far://host/object"

DATA = bytes(range(256)) * 40


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@dataclass
class Store(Storage):
    """Objects in memory, for any event loops, with a log of the ranges that were asked for.

    Attributes:
      gate: waited for before each block, if there is one.
    """

    objects: dict[str, bytes] = field(default_factory=lambda: {URL: DATA})
    log: list[tuple[str, int, int | None]] = field(default_factory=list)
    looks: int = 0
    block: int = 1000
    gate: asyncio.Semaphore | None = None
    failing: bool = False

    async def stat(self, path: str) -> FoundObject:
        self.looks += 1
        return FoundObject(path, len(self.objects[path]), etag_of(self.objects[path]))

    async def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        self.log.append((path, start, stop))
        data = self.objects[path]
        for at in range(start, len(data) if stop is None else stop, self.block):
            if self.gate is not None:
                await self.gate.acquire()
            await asyncio.sleep(0)
            if self.failing:
                raise ReadError("the store failed")
            if etag not in (None, etag_of(self.objects[path])):
                raise ReadError(f"its ETag was {etag} and is {etag_of(self.objects[path])}")
            yield data[at : min(at + self.block, len(data) if stop is None else stop)]

    async def aclose(self) -> None:
        """Nothing is open."""


class Machine:
    """One machine's origin, as `Storages` is one; `client()` is a process of it."""

    cache: ObjectCache | None
    concurrency = 64

    def __init__(
        self,
        store: Store,
        folder: Path,
        listed: tuple[tuple[str, int], ...],
        key: bytes = KEY,
        scope: str = "",
        tls: Certificates | None = None,
    ) -> None:
        self.store = store
        self._scope = scope
        self.where = Where(str(folder), listed, key, tls)
        cache = self.cache = ObjectCache(str(folder), None)
        self.cached = CachedStorage(store, cache, scope)
        self.storages: list[CachedStorage] = []

    def of(self, path: str) -> Storage:
        return self.cached if path.startswith("far://") else self.store

    def scope(self, path: str) -> str:
        return self._scope

    async def aclose(self) -> None:
        await self.cached.aclose()
        await self.cached.cache.aclose()

    def client(self, folder: Path | None = None) -> CachedStorage:
        """Return the storage of a process of this machine."""
        folder = folder or Path(self.where.folder)
        cache = ObjectCache(str(folder), None, Traffic())
        peers = PeerClient(self.where, Machine(self.store, folder, self.where.listed), cache.traffic)
        self.storages.append(CachedStorage(self.store, cache, "", peers))
        return self.storages[-1]


@asynccontextmanager
async def serving(machine: Machine) -> AsyncIterator[Any]:
    """Let a machine serve; yield its node."""
    node = node_of(machine.where, machine)
    try:
        await asyncio.wrap_future(node.ready)
        yield node
    finally:
        for storage in machine.storages:
            await storage.aclose()
            await storage.cache.aclose()
        await released(node, machine)


async def content(storage: CachedStorage, path: str = URL, start: int = 0, stop: int | None = None) -> bytes:
    async with aclosing(storage.blocks(path, start, stop)) as blocks:
        return b"".join([block async for block in blocks])
