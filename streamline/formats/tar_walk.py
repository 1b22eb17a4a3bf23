"""Where in a tar archive the samples of each share begin: found by a walk over its headers, past the data.

An archive has no index, and data may look like headers (an archive in an archive), so nothing but the headers from the
first on says where a member begins.
"""

from __future__ import annotations

from contextlib import aclosing

import anyio

from streamline.core.pace import Pace
from streamline.errors import ReadError
from streamline.fetching.file import File
from streamline.formats.pieces import pieces
from streamline.formats.tar_samples import part_of
from streamline.formats.tar_scanner import Scanner
from streamline.sharding.split import byte_range

__all__ = ["Begin", "Walk", "walk_of"]

Begin = tuple[int, int]
"""Where a sample begins, in bytes, and how many are before it."""

SEEK_BYTES = 1024 * 1024
"""Data to pass over that are worth another request, rather than to be read: some 1 to 10 ms of reading."""

FIRST_BYTES = 64 * 1024
"""Read at first, and behind data that were passed over."""

MOST_BYTES = 4 * 1024 * 1024
"""Read at a time where members are small."""

SLICE_HEADERS = 64
"""Headers between two looks at the clock: some 1 ms."""


class Walk:
    """The walk over one archive, for all shares that one event loop reads: whoever waits for his share takes a step.

    Args:
      path: for messages.
      size: of the archive in bytes.
      num_shards: shares.
      group: whether members are grouped into samples.

    Attributes:
      size: as it was given.
    """

    def __init__(self, path: str, size: int, num_shards: int, *, group: bool) -> None:
        self.size = size
        self._num_shards = num_shards
        self._group = group
        self._scanner = Scanner(path, 0)
        self._key: str | None = None
        self._samples = 0
        self._found: list[Begin | None] = []
        self._read = 0  # bytes of the archive that were fed or passed over
        self._window = FIRST_BYTES
        self._lock = anyio.Lock()

    async def begin(self, file: File, shard: int) -> Begin | None:
        """Return where the first sample of a share begins; None: it has none.

        Raises:
          DataError: the archive is damaged before it.
          ReadError: the archive can't be read.
          PlanError: it is compressed.
        """
        while len(self._found) <= shard:
            async with self._lock:
                if len(self._found) <= shard:
                    await self._step(file)
        return self._found[shard]

    async def _step(self, file: File) -> None:
        """Read a window and walk through it. Cancelled, it has done nothing that can't be done again."""
        start = self._read
        stop = min(start + self._window, self.size)
        if start >= stop:  # whoever reads the last sample says whether the archive is whole
            self._found += [None] * (self._num_shards - len(self._found))
            return
        if not start:
            await _check_plain(file)
        self._scanner.feed(await file.read(start, stop))
        self._read = stop
        self._window = min(2 * self._window, MOST_BYTES)
        pace = Pace()
        while self._walk():
            await pace.breathe()
        if self._scanner.ended:
            self._read = self.size
        elif self._scanner.beyond >= SEEK_BYTES:
            self._scanner.jump()
            self._read, self._window = self._scanner.at, FIRST_BYTES

    def _walk(self) -> bool:
        """Walk over some headers; return whether there may be more in what was fed."""
        scanner = self._scanner
        for _ in range(SLICE_HEADERS):
            header = scanner.header()
            if header is None:
                return False
            scanner.skip()
            part = part_of(header, self._group)
            if part is None or (self._group and part[0] == self._key):
                continue
            self._key = part[0]
            while len(self._found) < self._num_shards and self._starts_at(len(self._found)) <= scanner.start:
                self._found.append((scanner.start, self._samples))
            self._samples += 1
        return True

    def _starts_at(self, shard: int) -> int:
        return byte_range(self.size, self._num_shards, shard)[0]


async def walk_of(file: File, group: bool) -> Walk:
    """Return the walk over an archive; the same for all of its shares that one event loop reads.

    Raises:
      ReadError: the server doesn't tell its size.
    """
    size = (await file.found()).size
    if size is None:
        raise ReadError(f"{file.path}: the server doesn't tell its size, which splitting it into shards needs")
    made = Walk(file.path, size, file.part.num_shards, group=group)
    walk: Walk = file.notes.setdefault(f"walk over {size} bytes of {file.path}", made)
    return walk


async def _check_plain(file: File) -> None:
    async with aclosing(pieces(file, 0)) as blocks:  # says so if it is compressed
        await anext(blocks, None)
