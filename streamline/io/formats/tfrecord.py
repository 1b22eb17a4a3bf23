"""TFRecord files: records of bytes, each with its length and two checksums, read from any record on.

A record is its length (8 bytes, little-endian), a checksum of that, the data, and a checksum of these; a checksum is a
masked CRC-32C (TensorFlow, tensorflow/core/lib/io/record_writer.h). Nothing else says where a record begins: past a
length that is damaged, the rest of a file can't be read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any, ClassVar

from streamline.core.flow import StageContext
from streamline.core.lazy_numpy import np
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Place
from streamline.io.formats.byte_stream import BadItem, CutFormat, CutItems, Cutter

MAX_RECORD_BYTES = 256 * 2**20
"""The longest record unless the user says otherwise: as the longest line."""

HEAD = Struct("<QI")
LENGTH, CHECKSUM = Struct("<Q"), Struct("<I")

MOST_HEADS = 4096
"""Lengths of records that are known by their bytes: as many as most files have, in some 500 kB."""

SLICE_BYTES = 2**20
"""Bytes of records that are checked and copied between two turns of the event loop: some 0.3 ms."""


@dataclass(frozen=True, kw_only=True)
class TFRecordFormat(CutFormat[bytes]):
    """Records of bytes. Place: {"file", "byte", "record"}: where the next one begins, and how many are before it."""

    kind: ClassVar[str] = "read_tfrecord"
    reread: ClassVar[str] = "seeks to its record (compressed: unpacks up to it)"
    counts: ClassVar[tuple[str, ...]] = ("byte", "record")

    max_record_bytes: int = MAX_RECORD_BYTES

    async def cutter(self, file: File, begin: Place, context: StageContext) -> tuple[Cutter, int]:
        return RecordCutter(file.path, begin["byte"], begin["record"], self.max_record_bytes), begin["record"]


class RecordCutter(Cutter):
    """Cuts a file into records.

    Args:
      at: the byte at which the first block begins, and a record.
      record: how many records are before it.

    Attributes:
      at, record: likewise, of the next record.
    """

    def __init__(self, path: str, at: int, record: int, max_bytes: int) -> None:
        import google_crc32c

        self.path, self.begin, self.at, self.record = path, at, at, record
        self._last = False  # whether the last block was fed
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

    def feed(self, block: bytes, last: bool) -> None:
        self._last = last
        if self._skip:
            block, self._skip = block[self._skip :], max(0, self._skip - len(block))
        if block:
            self._rest.append((block, 0))
            self._held += len(block)

    def cut(self, most: int) -> CutItems:
        found, heads, data, at = CutItems(), self._heads, self._data, self._from
        records, ends, need, held = found.items, found.ends, self._need, self._held
        enough, byte, wrong, sums = held - SLICE_BYTES, self.at, None, list[bytes]()
        while held >= need and len(records) < most and held > enough:
            if at == len(data):
                data, at = self._rest.popleft()
            if len(data) - at < need:
                data, at = self._joined(data[at:], need), 0
            begin = at + HEAD.size
            if (size := heads.get(data[at:begin])) is None and (size := self._learn_length(data[at:begin])) is None:
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
        if (good := self._count_undamaged(records, sums)) < len(records):
            wrong = partial(self._damaged, records[good])
            byte = self._put_back(found, sums, good)
        self.at = byte
        self.record += len(records)
        if wrong is None:
            self.over = self._last and self.empty
        else:
            found.wrong = wrong()
            self.over = found.wrong.end is None
            if not self.over:
                self._pass()
        found.more = self._held >= self._need
        return found

    def finish(self) -> CutItems:
        if self.empty:
            return CutItems()
        end, inside = self.at + self._held - self._skip, self.record if self._skip else self.record + 1
        error = DataError(f"{self.path} is truncated: it ends at byte {end:,}, inside record {inside}")
        return CutItems(wrong=BadItem(error, b"", None))

    def _learn_length(self, head: bytes) -> int | None:
        """Return the length in a record's head, and keep it: heads are few, and looked up faster than checked."""
        size, checksum = HEAD.unpack(head)
        if masked(self._crc(head[: LENGTH.size])) != checksum:
            return None
        if len(self._heads) == MOST_HEADS:
            self._heads.clear()
        self._heads[head] = size
        return int(size)

    def _count_undamaged(self, records: list[bytes], sums: list[bytes]) -> int:
        """Return how many of the records, from the first one on, have the checksums that are stored with them."""
        if not records:
            return 0
        stored = np.frombuffer(b"".join(sums), "<u4")
        wrong = masked(np.fromiter(map(self._crc, records), np.uint32, len(records))) != stored
        return int(wrong.argmax()) if wrong.any() else len(records)

    def _put_back(self, found: CutItems, sums: list[bytes], good: int) -> int:
        """Take the records from `good` on back out of `found`; return the byte at which the first of them begins."""
        frames = [
            (LENGTH.pack(len(record)), record, checksum)
            for record, checksum in zip(found.items[good:], sums[good:], strict=True)
        ]
        back = b"".join(
            length + CHECKSUM.pack(masked(self._crc(length))) + record + checksum for length, record, checksum in frames
        )
        byte = found.ends[-1] - len(back)
        self._rest.appendleft((self._data, self._from))
        self._data, self._from, self._need = back, 0, HEAD.size + len(found.items[good]) + CHECKSUM.size
        self._held += len(back)
        del found.items[good:], found.ends[good:]
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

    def _lost(self) -> BadItem:
        what = "damaged" if self.at else "no TFRecord file, or damaged"
        why = "its length's checksum is wrong, so neither it nor what follows in the file can be read"
        return BadItem(self._error(f"{why}: the file is {what}"), b"", None)

    def _too_long(self, size: int) -> BadItem:
        limit = f"expected {self._max_bytes:,} at most: raise max_record_bytes, if that is no damage"
        return BadItem(self._error(f"it has {size:,} bytes, {limit}"), b"", self.at + self._need)

    def _damaged(self, record: bytes) -> BadItem:
        error = self._error(f"its data ({len(record):,} bytes) are damaged: their checksum is wrong")
        return BadItem(error, record, self.at + self._need)

    def _error(self, why: str) -> DataError:
        return DataError(f"{self.path} record {self.record + 1} (byte {self.at:,}): {why}")


def masked(crc: Any) -> Any:
    """Return a CRC, or an array of them, as it is stored: one of data that hold CRCs would say little."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
