"""A file as a format sees it: bytes from anywhere, read ahead where they are remote."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import tee
from typing import Any

from streamline.errors import ReadError
from streamline.io.fetch.read_ahead import ObjectReader, ReadAhead, parts
from streamline.io.fetch.request import RequestPool
from streamline.io.storage.base import FoundObject, Storage


@dataclass(frozen=True)
class FilePart:
    """A file, or the part of it that one of several shards owns.

    Attributes:
      shard: owns its share of what is in the file; how a share is cut is the format's business.
      num_shards: shards that share the file; 1: it is read whole.
    """

    found: FoundObject
    shard: int = 0
    num_shards: int = 1

    @property
    def path(self) -> str:
        """Local path or URL."""
        return self.found.path

    @property
    def local(self) -> bool:
        return "://" not in self.found.path


@dataclass
class File:
    """One file, opened for one flow. What it reads is of the version that the listing names, if it names one.

    Attributes:
      ahead: reads a remote file from a byte on, and the flow's next files ahead; None: they are not read as streams.
      notes: what formats remember of files, for all flows of the source in this event loop while any of them is open.
    """

    part: FilePart
    storage: Storage = field(repr=False)
    pool: Callable[[], RequestPool] = field(repr=False)
    ahead: Callable[[int], AsyncGenerator[bytes, None]] | None = field(default=None, repr=False)
    notes: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._found = self.part.found

    @property
    def path(self) -> str:
        return self.part.path

    @property
    def local(self) -> bool:
        """Whether it is a local file: one that can be memory-mapped."""
        return self.part.local

    async def found(self) -> FoundObject:
        """Return what is known of the file; asks if the listing doesn't say its size. Raises as `Storage.stat`."""
        if self._found.size is None:
            self._found = await self.storage.stat(self.path)
        return self._found

    async def size(self, need: str) -> int:
        """Return the size in bytes; a ReadError if it is unknown, which `need`, a sentence's subject, doesn't allow."""
        size = (await self.found()).size
        if size is None:
            raise ReadError(f"{self.path}: the server doesn't tell its size, which {need} needs")
        return size

    def blocks(self, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from `start` on, in order, in blocks of bounded size. As `Storage.blocks`."""
        if stop is None and self.ahead is not None:
            return self.ahead(start)
        return self.storage.blocks(self.path, start, stop, self._found.etag)

    async def read(self, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop`. As `Storage.read`."""
        async with aclosing(self.ranges([(start, stop)])) as ranges:
            return await anext(ranges)

    async def ranges(self, spans: Iterable[tuple[int, int]]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of each (start, stop), whole, in order; the next ones are fetched meanwhile.

        `spans` may be endless, and is asked for no more than is fetched.

        Raises:
          ReadError: as `Storage.read`; what is before has been yielded.
        """
        if self.local:
            for start, stop in spans:
                yield await self.storage.read(self.path, start, stop, self._found.etag)
            return
        asked, wanted = tee(spans)
        ahead = ReadAhead(self.pool())
        try:
            reading = ObjectReader(0, self.storage, self._found, spans=parts(asked, ahead.account.part_bytes))
            ahead.add(reading)
            async with aclosing(ahead.blocks(reading)) as blocks:
                for start, stop in wanted:
                    pieces: list[bytes] = []
                    missing = stop - start
                    while missing > 0:
                        pieces.append(await anext(blocks))
                        missing -= len(pieces[-1])
                    yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            await ahead.aclose()
