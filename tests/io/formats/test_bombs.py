"""Small files that unpack to much: memory stays bounded, or a clear error says why it ends."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamline as sl
from streamline.errors import DataError

MIB = 2**20


def packed(blocks: int, head: bytes = b"") -> bytes:
    """Return so many MiB of zeros as gzip."""
    packer = zlib.compressobj(6, wbits=31)
    return packer.compress(head) + b"".join(packer.compress(bytes(MIB)) for _ in range(blocks)) + packer.flush()


def peak_of(pipe: sl.Pipeline[Any]) -> tuple[int, Exception | None, int]:
    """Return how many items came, what it failed with, and the most memory that Python held, in MiB."""
    count, failure = 0, None
    tracemalloc.start()
    try:
        with pipe.open() as stream:
            for _ in stream:
                count += 1
    except DataError as error:
        failure = error
    peak = tracemalloc.get_traced_memory()[1] // MIB
    tracemalloc.stop()
    return count, failure, peak


@pytest.mark.parametrize("read", [sl.read_lines, sl.read_jsonl, sl.read_csv], ids=["lines", "jsonl", "csv"])
def test_one_line_that_never_ends(tmp_path: Path, read: Any) -> None:
    (tmp_path / "x.gz").write_bytes(packed(48))
    option = "max_record_bytes" if read is sl.read_csv else "max_line_bytes"
    count, failure, peak = peak_of(read(tmp_path / "x.gz", **{option: MIB}))
    assert count == 0
    assert f"at most {MIB:,} bytes" in str(failure)
    assert peak < 16


def test_a_sample_of_an_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 48 * MIB
    (tmp_path / "x.tar.gz").write_bytes(packed(48, info.tobuf()))
    count, failure, peak = peak_of(sl.read_tar(tmp_path / "x.tar.gz", max_sample_bytes=MIB))
    assert count == 0
    assert "raise max_sample_bytes" in str(failure)
    assert peak < 16


def test_rows_of_a_deflated_array_come_as_they_are_unpacked(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as file,
    ):
        header: Any = {"descr": "|u1", "fortran_order": False, "shape": (1024, 2**16)}
        np.lib.format.write_array_header_1_0(file, header)
        for _ in range(64):
            file.write(bytes(MIB))
    count, failure, peak = peak_of(sl.read_npy(tmp_path / "x.npz").map(len).prefetch(1))
    assert (count, failure) == (1024, None)
    assert peak < 60


def test_texts_that_a_table_keeps_once_are_not_unpacked_for_all_rows_at_once(tmp_path: Path) -> None:
    rows, file = 40_000, io.BytesIO()
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * 8192]))
    pq.write_table(pa.table({"text": texts}), file, store_schema=False, compression="zstd", row_group_size=rows)
    (tmp_path / "x.parquet").write_bytes(file.getvalue())
    assert len(file.getvalue()) < 1000
    before = pa.total_allocated_bytes()
    with sl.read_parquet(tmp_path / "x.parquet").map(lambda row: len(row["text"])).open() as stream:
        seen = [pa.total_allocated_bytes() - before for _ in zip(range(3000), stream, strict=False)]
    assert max(seen) < 80 * MIB, "of 312 MiB"
