"""Files of records for tests: TFRecord and MDS as they are documented, ArrayRecord and Lance by their libraries."""

from __future__ import annotations

import json
import struct
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import google_crc32c
import lance
import pyarrow as pa
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


class Folder(bytes):
    """A folder, as a tar archive of what is in it."""


def put(path: Path, content: bytes) -> Path:
    """Write a file, or a folder."""
    if isinstance(content, Folder):
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            archive.extractall(path, filter="data")
    else:
        path.write_bytes(content)
    return path


def lance_dataset(columns: Mapping[str, Any], fragment_rows: int = 1000, deleted: str = "") -> Folder:
    """Return a dataset without the rows for which `deleted` is true."""
    file = BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        dataset = lance.write_dataset(pa.table(columns), folder, max_rows_per_file=fragment_rows)
        if deleted:
            dataset.delete(deleted)
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, ".")
    return Folder(file.getvalue())
