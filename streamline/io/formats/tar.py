"""Tar archives, read from any sample on: WebDataset's (consecutive members that share a key), or single members.

An archive has no index, and data may look like headers (an archive in an archive). So where the samples of each share
begin is found by a walk over the headers from the first on, past the data.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import anyio

from streamline.core.flow import StageContext
from streamline.core.pace import Pace
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Place
from streamline.io.formats.byte_stream import BadItem, CutFormat, CutItems, Cutter, pieces
from streamline.io.formats.tar_reader import NoEndMarkError, Scanner, TarHeader
from streamline.sharding.split import byte_range

MAX_SAMPLE_BYTES = 256 * 1024 * 1024
"""The most data that a sample has unless the user says otherwise: as long as the longest line."""


@dataclass(frozen=True, kw_only=True)
class TarFormat(CutFormat[Any]):
    """Tar archives. Place: {"file", "byte", "sample"}: where the next sample begins, and how many are before it.

    A byte of 0 in a share other than the first: where its first sample begins has not been looked for yet.

    Attributes:
      group: whether members are grouped into samples; otherwise each is one.
    """

    kind: ClassVar[str] = "read_tar"
    reread: ClassVar[str] = "seeks to its sample (compressed: unpacks up to it)"
    counts: ClassVar[tuple[str, ...]] = ("byte", "sample")
    splits: ClassVar[bool] = True

    group: bool = True
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def options(self) -> dict[str, Any]:
        return {"group": self.group}

    async def cutter(self, file: File, begin: Place, context: StageContext) -> tuple[Cutter, int] | None:
        part, byte, sample, stop = file.part, begin["byte"], begin["sample"], None
        if part.num_shards > 1:
            size = await file.size("splitting it into shards")
            stop = byte_range(size, part.num_shards, part.shard)[1] if part.shard < part.num_shards - 1 else None
            if part.shard and not byte:
                made = Walk(file.path, size, part.num_shards, group=self.group)
                walk: Walk = file.notes.setdefault(f"walk over {size} bytes of {file.path}", made)
                found = await walk.begin(file, part.shard)
                if found is None:
                    return None
                byte, sample = found
        patient = context.skips is not None and context.skips.active
        return Samples(file.path, byte, stop, self.group, self.max_sample_bytes, patient), sample


SLICE_MEMBERS = 128
"""Members between two returns: some 0.3 ms, or 1.5 ms where their headers are not plain."""


class Member(NamedTuple):
    """A file in an archive; its name is never used as one here."""

    name: str
    data: bytes


def part_of(header: TarHeader, group: bool) -> tuple[str | None, str] | None:
    """Return the key of the sample that a member belongs to, and the member's field in it; None: it belongs to none.

    A key ends at the first dot of a name's last part, as in WebDataset's `base_plus_ext`. A member belongs to no sample
    if nothing stands before the dot, if there is no dot, or if its top directory is called __so__. Without `group`,
    each file is a sample, without a key.
    """
    name = header.name
    if not header.regular and not header.link:
        return None
    if not group:
        return None, name
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    top = name.partition("/")[0] if name.startswith("__") else ""
    if dot <= slash or (len(top) >= 4 and top.endswith("__")):
        return None
    return name[:dot], name[dot + 1 :].lower()


@dataclass
class Samples(Cutter):
    """Is fed the blocks of an archive, and makes samples of them.

    A sample is whole when the next one begins, or when the archive has been found to be whole: until then it is kept.

    Attributes:
      stop: samples that begin at this byte or later belong to the next share; None: there is none.
      group: whether there are samples; otherwise each member is one.
      max_bytes: of the data of a sample; more is wrong with it.
      patient: whether a bad sample is read to its end before its error is returned.
      over: whether the next sample belongs to the next share.
    """

    path: str
    begin: int
    stop: int | None
    group: bool
    max_bytes: int
    patient: bool
    over: bool = False
    _header: TarHeader | None = None  # of the next sample's first member
    _item: Any = None  # the part read so far of the current sample; None: none is
    _key: str | None = None
    _begin: int = 0
    _bytes: int = 0
    _field: str | None = None  # of the member whose data come next
    _error: DataError | None = None  # what is wrong with the sample

    def __post_init__(self) -> None:
        self._scanner = Scanner(self.path, self.begin)

    def feed(self, block: bytes, last: bool) -> None:
        self._scanner.feed(block)

    def cut(self, most: int) -> CutItems:
        found = CutItems()
        for _ in range(SLICE_MEMBERS):
            try:
                more = self._step(found)
            except DataError as error:
                self._keep(found)
                found.failure = error
                return found
            if self._error is not None and (self._header is not None or not self.patient):
                found.wrong, found.more = self._left_out(self._error, self._scanner.start), True
                return found
            if not more:
                return found
        found.more = True
        return found

    def finish(self) -> CutItems:
        found = CutItems()
        try:
            self._scanner.finish()
        except NoEndMarkError as error:
            if not self.group:
                self._keep(found)
            found.wrong = self._left_out(error, None)
        except DataError as error:
            self._keep(found)
            found.failure = error
        else:
            if self._error is not None:
                found.wrong = self._left_out(self._error, None)
            self._keep(found)
        return found

    def rest(self) -> CutItems:
        found = CutItems()
        self._keep(found)
        return found

    def _step(self, found: CutItems) -> bool:
        """Take one member; return whether there may be another in what was fed."""
        if self._field is not None:
            return self._take(self._field)
        scanner = self._scanner
        header, self._header = self._header or scanner.header(), None
        if header is None:
            return False
        part = part_of(header, self.group)
        if part is None:
            scanner.skip()
            return True
        key, field = part
        if self._item is None or not self.group or key != self._key:
            if self._error is not None:
                self._header = header
                return True
            if self._item is not None:
                found.items.append(self._item)
                found.ends.append(scanner.start)
                self._item = None
            if self.stop is not None and scanner.start >= self.stop:
                self.over = True
                return False
            self._key, self._begin, self._bytes = key, scanner.start, 0
            self._item = {"__key__": key} if self.group else header.name
        self._bytes += header.size
        if self._error is None:
            self._error = self._fault(header, field)
        if self._error is not None:
            scanner.skip()
            return True
        return self._take(field)

    def _take(self, field: str) -> bool:
        data = self._scanner.data()
        if data is None:
            self._field = field
            return False
        self._field = None
        if self.group:
            self._item[field] = data
        else:
            self._item = Member(field, data)
        return True

    def _fault(self, header: TarHeader, field: str) -> DataError | None:
        """Return what is wrong with a sample because of its next member."""
        start = self._scanner.start
        what = f"{self.path}, member {header.name!r} (byte {start:,})"
        if header.link:
            return DataError(
                f"{what} is a hard link to {header.link!r}, whose data are elsewhere in the archive: write it with "
                "tar --hard-dereference"
            )
        if self.group and field in self._item:
            return DataError(
                f"{what} is the second one for {field!r} of the sample {self._key!r} (byte {self._begin:,}): give each "
                "sample a name of its own, or read members with group=False"
            )
        if self._bytes > self.max_bytes:
            of = f"makes its sample {self._bytes:,} bytes long" if self.group else f"has {self._bytes:,} bytes"
            return DataError(
                f"{what} {of}, expected {self.max_bytes:,} at most: raise max_sample_bytes, if that is no damage"
            )
        return None

    def _left_out(self, error: DataError, end: int | None) -> BadItem:
        """Return what is wrong with the sample that is being read, and forget it."""
        item = {"__key__": self._key} if self.group and self._item is not None else self._item
        self._item = self._error = None
        return BadItem(error, item, end)

    def _keep(self, found: CutItems) -> None:
        """Add the sample that is being read, if it is known to be whole."""
        whole = self._scanner.ended or not self.group
        if self._item is not None and self._error is None and self._field is None and whole:
            found.items.append(self._item)
            found.ends.append(self._scanner.mark if self._scanner.ended else self._scanner.at)
            self._item = None


Begin = tuple[int, int]
"""Where a sample begins, in bytes, and how many are before it."""

SEEK_BYTES = 1024 * 1024
"""Data that are skipped by another request, rather than read: some 1 to 10 ms of reading."""

FIRST_BYTES = 64 * 1024
"""Read at first, and after data that were skipped."""

MOST_BYTES = 4 * 1024 * 1024
"""Read at a time where members are small."""

SLICE_HEADERS = 64
"""Headers between two looks at the clock: some 1 ms."""


class Walk:
    """The walk over one archive, for all its shares that one event loop reads: a flow that waits takes a step."""

    def __init__(self, path: str, size: int, num_shards: int, *, group: bool) -> None:
        self._size = size
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
        """Return where the first sample of a share begins; None: it has none."""
        while len(self._found) <= shard:
            async with self._lock:
                if len(self._found) <= shard:
                    await self._step(file)
        return self._found[shard]

    async def _step(self, file: File) -> None:
        """Read a window and walk through it. Cancelled, it has done nothing that can't be done again."""
        start = self._read
        stop = min(start + self._window, self._size)
        if start >= stop:  # the reader of the last sample checks whether the archive is whole
            self._found += [None] * (self._num_shards - len(self._found))
            return
        if not start:
            async with aclosing(pieces(file, 0)) as blocks:  # says so if it is compressed
                await anext(blocks, None)
        self._scanner.feed(await file.read(start, stop))
        self._read = stop
        self._window = min(2 * self._window, MOST_BYTES)
        pace = Pace()
        while self._walk():
            await pace.maybe_yield()
        if self._scanner.ended:
            self._read = self._size
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
            while (shard := len(self._found)) < self._num_shards:
                if byte_range(self._size, self._num_shards, shard)[0] > scanner.start:
                    break
                self._found.append((scanner.start, self._samples))
            self._samples += 1
        return True
