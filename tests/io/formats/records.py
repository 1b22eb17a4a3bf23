"""Files of records for tests: TFRecord and MDS as they are documented, ArrayRecord by its library."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import google_crc32c
from array_record.python.array_record_module import ArrayRecordWriter


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) % 2**32)


def framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + checksum(length) + record + checksum(record)


def record_file(records: Iterable[bytes]) -> bytes:
    return b"".join(map(framed, records))


def starts_of(records: Iterable[bytes]) -> list[int]:
    """Return where each record begins, and where the last one ends."""
    return list(accumulate((16 + len(record) for record in records), initial=0))


def array_record_file(records: Iterable[bytes], group: int = 1) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        writer = ArrayRecordWriter(file.name, f"group_size:{group}")
        for record in records:
            writer.write(record)
        writer.close()
        return Path(file.name).read_bytes()


def mds_file(columns: dict[str, tuple[str, int | None]], samples: Iterable[list[bytes]]) -> bytes:
    """Return an MDS shard, of columns as (encoding, size where it is fixed)."""
    names, (encodings, sizes) = list(columns), zip(*columns.values(), strict=True)
    text = json.dumps({"column_names": names, "column_encodings": encodings, "column_sizes": sizes}).encode()
    packed = [
        b"".join(struct.pack("<I", len(data)) for data, size in zip(sample, sizes, strict=True) if size is None)
        + b"".join(sample)
        for sample in samples
    ]
    starts = accumulate(map(len, packed), initial=4 + 4 * (len(packed) + 1) + len(text))
    return struct.pack(f"<{len(packed) + 2}I", len(packed), *starts) + text + b"".join(packed)
