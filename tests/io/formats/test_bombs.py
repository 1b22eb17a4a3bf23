"""Small files that unpack to much, or say that they have it: memory stays bounded, or a clear error says why."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import anyio.to_thread
import google_crc32c
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from backports import zstd
from pyarrow import ipc

import streamline as sl
from streamline.errors import DataError
from streamline.io.formats.arrow_messages import blocks
from streamline.io.formats.tfrecord import masked
from tests.serving import Server

MIB = 2**20


def packed(blocks: int, head: bytes = b"") -> bytes:
    """Return so many MiB of zeros as gzip."""
    packer = zlib.compressobj(6, wbits=31)
    return packer.compress(head) + b"".join(packer.compress(bytes(MIB)) for _ in range(blocks)) + packer.flush()


def peak_of(pipe: sl.Pipeline[Any], most: int | None = None) -> tuple[int, Exception | None, int]:
    """Return how many items came, of `most`, what it failed with, and the most memory that Python held, in MiB."""
    count, failure = 0, None
    tracemalloc.start()
    try:
        with pipe.open() as stream:
            for _ in islice(stream, most):
                count += 1
    except DataError as error:
        failure = error
    peak = tracemalloc.get_traced_memory()[1] // MIB
    tracemalloc.stop()
    return count, failure, peak


@pytest.mark.one_in(2, 1)
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


@pytest.mark.long
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


TRILLION = 10**12

LENGTH = TRILLION.to_bytes(8, "little")


def hdf5(shape: tuple[int, ...], dtype: Any = "i4", **options: Any) -> bytes:
    """Return a file of some kB that says that it has a data set of this shape."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.create_dataset("x", shape, dtype, **options)
    return content.getvalue()


def npy(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": dtype, "fortran_order": False, "shape": shape})
    return content.getvalue()


CLAIMS: dict[str, tuple[Callable[..., Any], bytes]] = {
    "hdf5": (sl.read_hdf5, hdf5((TRILLION,))),
    "hdf5, chunks": (sl.read_hdf5, hdf5((TRILLION, 2), chunks=(1000, 2))),
    "hdf5, large chunks": (sl.read_hdf5, hdf5((TRILLION,), chunks=(10**9,), compression="gzip")),
    "hdf5, large rows": (sl.read_hdf5, hdf5((TRILLION, 1000, 1000), "u1", chunks=(1000, 1000, 1000))),
    "hdf5, texts": (sl.read_hdf5, hdf5((TRILLION, 10), h5py.string_dtype(), chunks=(1000, 10))),
    "npy": (sl.read_npy, npy((TRILLION, 0))),
}


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("name", CLAIMS)
async def test_the_first_rows_of_a_file_that_says_it_has_trillions(
    tmp_path: Path, server: Server, name: str, remote: bool
) -> None:
    read, content = CLAIMS[name]
    server.objects["x"] = content
    (tmp_path / "x").write_bytes(content)
    pipe = read(server.url("x") if remote else tmp_path / "x")
    count, failure, peak = await anyio.to_thread.run_sync(peak_of, pipe, 10)
    assert (count, failure) == (10, None)
    assert peak < 64


def test_the_first_rows_of_a_sparse_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        space = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        space.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT8, h5py.h5s.create_simple((TRILLION,)), space)
    assert (tmp_path / "x.h5").stat().st_size > TRILLION
    count, failure, peak = peak_of(sl.read_hdf5(tmp_path / "x.h5").shard(3).merge(), 10)
    assert (count, failure) == (10, None)
    assert peak < 64


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.h5", hdf5((3, TRILLION)), "it says that a row has 4,000,000,000,000 bytes"),
        ("x.npy", npy((5, 10**18, 10**18)), "the npy header can't be"),
        ("x.npy", npy((2**63, 0)), "the npy header can't be"),
        ("x.npy", npy((TRILLION, TRILLION)), "the npy header can't be"),
        ("x.npy", npy((TRILLION, 1000)), "says 1,000,000,000,000 rows, and 0 are there"),
        ("x.mds", (2**32 - 1).to_bytes(4, "little") + bytes(MIB), "begins before the list of them ends"),
        ("x.mds", (2**24).to_bytes(4, "little") + b"\xff" * MIB, "expected 67,108,872 bytes or more, got 1,048,580"),
        ("x.tfrecord", LENGTH + masked(google_crc32c.value(LENGTH)).to_bytes(4, "little"), "raise max_record_bytes"),
    ],
)
def test_what_a_file_says_it_has_is_not_made_room_for(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    read: Any = {"h5": sl.read_hdf5, "npy": sl.read_npy, "mds": sl.read_mds, "tfrecord": sl.read_tfrecord}
    count, failure, peak = peak_of(read[name.partition(".")[2]](tmp_path / name))
    assert count == 0
    assert message in str(failure)
    assert peak < 16


@pytest.mark.one_in(2)
@pytest.mark.parametrize("suffix", ["zstd", "gz"])
def test_a_compressed_shard_of_samples_is_bounded(tmp_path: Path, suffix: str) -> None:
    pack = zstd.compress if suffix == "zstd" else lambda data: packed(len(data) // MIB)
    path = tmp_path / f"x.mds.{suffix}"
    path.write_bytes(pack(bytes(48 * MIB)))
    assert path.stat().st_size < 50_000
    count, failure, peak = peak_of(sl.read_mds(path, max_shard_bytes=MIB))
    assert count == 0
    assert f"unpacks to more than {MIB:,} bytes: raise max_shard_bytes" in str(failure)
    assert peak < 16


def test_headers_that_only_extend_the_next_one_are_bounded(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    info.type, info.size = tarfile.XHDTYPE, MIB - 512
    (tmp_path / "x.tar.gz").write_bytes(packed(0, (info.tobuf() + bytes(MIB - 512)) * 48))
    count, failure, peak = peak_of(sl.read_tar(tmp_path / "x.tar.gz"))
    assert count == 0
    assert "what extends it takes more than 4,194,304 bytes" in str(failure)
    assert peak < 64


def test_nulls_of_a_table_are_made_some_at_a_time(tmp_path: Path) -> None:
    rows = 20 * MIB
    pq.write_table(pa.table({"x": pa.nulls(rows, pa.int64())}), tmp_path / "x.parquet", row_group_size=rows)
    assert (tmp_path / "x.parquet").stat().st_size < 50_000
    seen = pa.total_allocated_bytes()
    with sl.read_parquet(tmp_path / "x.parquet").open() as stream:
        most = max(pa.total_allocated_bytes() - seen for _ in islice(stream, 1000))
    assert most < 80 * MIB, "of 219 MiB"


def arrow(new: Any, table: Any) -> bytes:
    content = io.BytesIO()
    with new(content, table.schema, options=ipc.IpcWriteOptions(allow_64bit=True)) as writer:
        writer.write(table)
    return content.getvalue()


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("new", [ipc.new_file, ipc.new_stream], ids=["file", "stream"])
def test_a_batch_of_trillions_of_nulls_is_filtered_some_at_a_time(tmp_path: Path, new: Any) -> None:
    (tmp_path / "x.arrow").write_bytes(
        arrow(new, pa.record_batch({"x": pa.Array.from_buffers(pa.null(), TRILLION, [None])}))
    )
    seen, wanted = pa.total_allocated_bytes(), pc.field("x").is_null()
    with sl.read_arrow(tmp_path / "x.arrow", filter=wanted).open() as stream:
        most = max(pa.total_allocated_bytes() - seen for _ in islice(stream, 1000))
    assert most < 80 * MIB


def test_a_message_longer_than_its_file_is_not_waited_for(tmp_path: Path) -> None:
    whole = arrow(ipc.new_stream, pa.record_batch({"x": pa.array([2**40 + 1], pa.int64())}))
    body = (8).to_bytes(8, "little")
    assert whole.count(body) == 2  # of the message, and of its buffer
    (tmp_path / "x.arrow").write_bytes(whole.replace(body, TRILLION.to_bytes(8, "little")) + bytes(48 * MIB))
    count, failure, peak = peak_of(sl.read_arrow(tmp_path / "x.arrow"))
    assert count == 0
    assert "was cut short" in str(failure)
    assert peak < 16


async def test_dictionaries_that_lie_over_one_another_are_refused(server: Server) -> None:
    columns = {name: pa.array([name * MIB]).dictionary_encode() for name in ("a", "b")}
    whole = arrow(ipc.new_file, pa.record_batch(columns))
    dictionaries, _ = blocks(whole[-10 - int.from_bytes(whole[-10:-6], "little") : -10])
    first, second = (block.start.to_bytes(8, "little") for block in dictionaries)
    footer = whole.rindex(second)
    bad = whole[:footer] + first + whole[footer + 8 : footer + 16]
    bad += (2 * MIB).to_bytes(8, "little") + whole[footer + 24 :]
    server.objects["x.arrow"] = bad

    def read() -> tuple[int, Exception | None, int]:
        return peak_of(sl.read_arrow(server.url("x.arrow")))

    count, failure, _ = await anyio.to_thread.run_sync(read)
    assert count == 0
    assert "its dictionaries take more than its" in str(failure)
