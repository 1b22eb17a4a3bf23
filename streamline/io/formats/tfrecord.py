"""TFRecord files: records of bytes, each with its length and two checksums, read from any record on.

A record is its length (8 bytes, little-endian), a checksum of that, the data, and a checksum of these; a checksum is a
masked CRC-32C (TensorFlow, tensorflow/core/lib/io/record_writer.h). Nothing else says where a record begins: past a
length that is damaged, the rest of a file can't be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any, ClassVar

from streamline.core.counters import HoldTimer, Working
from streamline.core.flow import Chunk, Demand, Lists
from streamline.core.lazy_numpy import np
from streamline.core.pace import Pace
from streamline.core.state import At
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Format, IndexedStates, Place
from streamline.io.formats.byte_stream import pieces

MAX_RECORD_BYTES = 256 * 2**20
"""The longest record unless the user says otherwise: as the longest line."""

HEAD = Struct("<QI")
LENGTH, CHECKSUM = Struct("<Q"), Struct("<I")

MOST_HEADS = 4096
"""Lengths of records that are known by their bytes: as many as most files have, in some 500 kB."""

SLICE_BYTES = 2**20
"""Bytes of records that are checked and copied between two turns of the event loop: some 0.3 ms."""


@dataclass(frozen=True, kw_only=True)
class TFRecordFormat(Format[bytes]):
    """Records of bytes. Place: {"file", "byte", "record"}: where the next one begins, and how many are before it.

    Attributes:
      max_record_bytes: a longer record is an error.
    """

    kind: ClassVar[str] = "read_tfrecord"
    reread: ClassVar[str] = "seeks to its record (compressed: unpacks up to it)"

    max_record_bytes: int = MAX_RECORD_BYTES

    def begin(self, path: str | None) -> Place:
        return {"file": path, "byte": 0, "record": 0}

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[bytes]:
        cutter = RecordCutter(file.path, begin["byte"], begin["record"], self.max_record_bytes)
        meter, pace = demand.meter, Pace()
        async with aclosing(pieces(file, cutter.at)) as blocks:
            while True:
                with Working(meter):
                    block = await anext(blocks, None)
                if block is None:
                    break
                data, final = block
                cutter.feed(data)
                while cutter.ready:
                    with HoldTimer(meter):
                        found = cutter.cut(demand.want)
                    for chunk in _chunks(cutter, found, after, name, demand, final=final and cutter.empty):
                        yield chunk
                    if found.wrong is not None and found.wrong.ends:
                        return
                    await pace.breathe()
        for chunk in _chunks(cutter, cutter.end(), after, name, demand):
            yield chunk
        yield Chunk((), (), At(name, dict(after)))


@dataclass(slots=True)
class BadRecord:
    """A record that can be left out: its error, its data as far as they are read, and whether the file ends for it."""

    error: DataError
    data: bytes = b""
    ends: bool = False


@dataclass(slots=True)
class CutRecords:
    """Some records, where each ends, and what is wrong with the one after them."""

    records: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    wrong: BadRecord | None = None


def _chunks(
    cutter: RecordCutter, found: CutRecords, after: Place, name: str, demand: Demand, *, final: bool = False
) -> Iterator[Chunk[bytes]]:
    """Yield the records of a cut, of which the last one may be the file's; after one that is left out, its place."""
    wrong, stop = found.wrong, cutter.record + 1
    if wrong is not None and not wrong.ends:
        stop -= 1
    if found.records:
        columns = {"byte": found.ends, "record": range(stop - len(found.records), stop)}
        last = after if final and wrong is None else None
        yield Chunk(found.records, IndexedStates(name, {"file": cutter.path}, columns, last))
    if wrong is not None:
        place = dict(after) if wrong.ends else {"file": cutter.path, "byte": cutter.at, "record": cutter.record}
        demand.judge(wrong.error, wrong.data, At(name, place))
        yield Chunk((), (), At(name, place))


class RecordCutter:
    """Is fed a file's blocks, and cuts them into records.

    Args:
      at: the byte at which the first block begins, and a record.
      record: how many records are before it.

    Attributes:
      at, record: likewise, of the next record.
      ready: whether what was fed may have a whole record.
    """

    def __init__(self, path: str, at: int, record: int, max_bytes: int) -> None:
        import google_crc32c

        self.path, self.at, self.record = path, at, record
        self.ready = False
        self._crc: Any = google_crc32c.value
        self._max_bytes = max_bytes
        self._heads: dict[bytes, int] = {}  # lengths whose checksums were right
        self._data, self._from = b"", 0  # a block, and how much of it was taken
        self._rest = deque[tuple[bytes, int]]()  # the blocks after it, likewise
        self._held = 0  # bytes that were fed and not taken
        self._need = HEAD.size  # bytes that the next step takes
        self._skip = 0  # bytes that are left out before they are fed

    @property
    def empty(self) -> bool:
        """Whether all that was fed has been cut."""
        return not (self._held or self._skip)

    def feed(self, block: bytes) -> None:
        if self._skip:
            block, self._skip = block[self._skip :], max(0, self._skip - len(block))
        if block:
            self._rest.append((block, 0))
            self._held += len(block)
        self.ready = self._held >= self._need

    def cut(self, most: int) -> CutRecords:
        """Return up to `most` records; fewer if more has to be fed, or it has taken long, or the next one is bad."""
        found, heads, data, at = CutRecords(), self._heads, self._data, self._from
        records, ends, need, held = found.records, found.ends, self._need, self._held
        enough, byte, wrong, sums = held - SLICE_BYTES, self.at, None, list[bytes]()
        while held >= need and len(records) < most and held > enough:
            if at == len(data):
                data, at = self._rest.popleft()
            if len(data) - at < need:
                data, at = self._joined(data[at:], need), 0
            begin = at + HEAD.size
            if (size := heads.get(data[at:begin])) is None and (size := self._learned(data[at:begin])) is None:
                wrong = self._lost
                break
            need = HEAD.size + size + CHECKSUM.size
            if size > self._max_bytes:
                wrong = partial(self._too_long, size)
                break
            if len(data) - at < need:
                continue
            stop = begin + size
            records.append(data[begin:stop])
            at = stop + CHECKSUM.size
            sums.append(data[stop:at])
            byte += need
            ends.append(byte)
            held -= need
            need = HEAD.size
        self._data, self._from, self._held, self._need = data, at, held, need
        if (good := self._undamaged(records, sums)) < len(records):
            wrong = partial(self._damaged, records[good])
            byte = self._put_back(found, sums, good)
        self.at = byte
        self.record += len(records)
        if wrong is not None:
            found.wrong = wrong()
            if not found.wrong.ends:
                self._pass()
        self.ready = self._held >= self._need
        return found

    def end(self) -> CutRecords:
        """Return what is left at the end of the file; all of it has been fed."""
        if self.empty:
            return CutRecords()
        end, inside = self.at + self._held - self._skip, self.record if self._skip else self.record + 1
        error = DataError(f"{self.path} is truncated: it ends at byte {end:,}, inside record {inside}")
        return CutRecords(wrong=BadRecord(error, ends=True))

    def _learned(self, head: bytes) -> int | None:
        """Return the length in a record's head, and keep it: heads are few, and looked up faster than checked."""
        size, checksum = HEAD.unpack(head)
        if masked(self._crc(head[: LENGTH.size])) != checksum:
            return None
        if len(self._heads) == MOST_HEADS:
            self._heads.clear()
        self._heads[head] = size
        return int(size)

    def _undamaged(self, records: list[bytes], sums: list[bytes]) -> int:
        """Return how many of the records, from the first one on, have the checksums that are stored with them."""
        if not records:
            return 0
        stored = np.frombuffer(b"".join(sums), "<u4")
        wrong = masked(np.fromiter(map(self._crc, records), np.uint32, len(records))) != stored
        return int(wrong.argmax()) if wrong.any() else len(records)

    def _put_back(self, found: CutRecords, sums: list[bytes], good: int) -> int:
        """Take the records from `good` on back out of `found`; return the byte at which the first of them begins."""
        frames = [
            (LENGTH.pack(len(record)), record, checksum)
            for record, checksum in zip(found.records[good:], sums[good:], strict=True)
        ]
        back = b"".join(
            length + CHECKSUM.pack(masked(self._crc(length))) + record + checksum for length, record, checksum in frames
        )
        byte = found.ends[-1] - len(back)
        self._rest.appendleft((self._data, self._from))
        self._data, self._from, self._need = back, 0, HEAD.size + len(found.records[good]) + CHECKSUM.size
        self._held += len(back)
        del found.records[good:], found.ends[good:]
        return byte

    def _joined(self, begin: bytes, size: int) -> bytes:
        """Return `size` bytes, of which `begin` has the first; the others are taken out of the rest."""
        parts, missing = [begin], size - len(begin)
        while missing:
            block, at = self._rest.popleft()
            part = block[at : at + missing]
            if at + len(part) < len(block):
                self._rest.appendleft((block, at + len(part)))
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _pass(self) -> None:
        """Leave out the next record, whether all of it has been fed or not."""
        here = min(self._need, self._held)
        if here > len(self._data) - self._from:
            self._data, self._from = self._joined(self._data[self._from :], here), 0
        self._from += here
        self._held -= here
        self._skip = self._need - here
        self.at += self._need
        self.record += 1
        self._need = HEAD.size

    def _lost(self) -> BadRecord:
        what = "damaged" if self.at else "no TFRecord file, or damaged"
        why = "its length's checksum is wrong, so neither it nor what follows in the file can be read"
        return BadRecord(self._error(f"{why}: the file is {what}"), ends=True)

    def _too_long(self, size: int) -> BadRecord:
        limit = f"expected {self._max_bytes:,} at most: raise max_record_bytes, if that is no damage"
        return BadRecord(self._error(f"it has {size:,} bytes, {limit}"))

    def _damaged(self, record: bytes) -> BadRecord:
        return BadRecord(self._error(f"its data ({len(record):,} bytes) are damaged: their checksum is wrong"), record)

    def _error(self, why: str) -> DataError:
        return DataError(f"{self.path} record {self.record + 1} (byte {self.at:,}): {why}")


def masked(crc: Any) -> Any:
    """Return a CRC, or an array of them, as it is stored: one of data that hold CRCs would say little."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
