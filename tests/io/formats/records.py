"""TFRecord files for tests, as TensorFlow's documentation describes them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import accumulate

import google_crc32c


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
