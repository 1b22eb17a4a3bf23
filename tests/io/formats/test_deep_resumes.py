"""A resume deep inside a large file reads little before its first item: the bytes that are asked for are counted."""

from __future__ import annotations

import io
import json
import re
import struct
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

import streamline as sl
from streamline.core.byte_budget import PART_BYTES
from streamline.core.flow import Site
from streamline.core.tasks import Tasks
from streamline.io.storage import local
from streamline.io.storage.local import LocalStorage
from streamline.sources.base import Part
from tests.io.formats.archives import archive
from tests.io.formats.records import array_record_file, lance_dataset, put, record_file
from tests.serving import Server, named

SIZE, DEEP = 1_000_000_000, 900_000_064
HEAD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Sparse:
    """A gigabyte of zeros with a beginning and something deep inside."""

    begin: bytes
    deep: bytes

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(SIZE)
        found = bytearray(max(0, stop - start))
        for at, held in ((0, self.begin), (DEEP, self.deep)):
            first, last = max(start, at), min(stop, at + len(held))
            if first < last:
                found[first - start : last - start] = held[first - at : last - at]
        return bytes(found)

    def write(self, path: Path) -> None:
        """Write a file that takes no space."""
        with path.open("wb") as file:
            file.write(self.begin)
            file.seek(DEEP)
            file.write(self.deep)
            file.truncate(SIZE)


def npy_head() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": ((SIZE - 128) // 8,)})
    return file.getvalue()


def mds_head() -> bytes:
    """Return what begins a shard of 9 samples, of which one is nearly all of it, and the last two are deep inside."""
    text = json.dumps({"column_names": ["x"], "column_encodings": ["int"], "column_sizes": [8]}).encode()
    begin = 4 + 4 * 10 + len(text)
    return struct.pack("<11I", 9, *[begin] * 7, DEEP, DEEP + 8, SIZE) + text


def hdf5_head() -> bytes:
    """Return the metadata of a file whose rows, of which none is written, fill the rest of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.h5")
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(path, "w") as file:
            space = h5py.h5s.create_simple(((SIZE - HDF5_BYTES) // 8,))
            made = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I64LE, space, early)
            assert made.get_offset() == HDF5_BYTES
        assert path.stat().st_size == SIZE
        with path.open("rb") as written:
            return written.read(HDF5_BYTES)


HDF5_BYTES = 2048
"""What h5py writes before the rows."""

LINES = {"line": 7, "byte": DEEP}
LARGE: dict[str, tuple[Any, Sparse, dict[str, Any], Any]] = {
    "lines": (sl.read_lines, Sparse(b"a\n", b"one\ntwo\n"), LINES, "one"),
    "jsonl": (sl.read_jsonl, Sparse(b"1\n", b"[1]\n[2]\n"), LINES, [1]),
    "csv": (sl.read_csv, Sparse(b"a,b\n1,2\n", b"3,4\n5,6\n"), LINES, {"a": "3", "b": "4"}),
    "tar": (
        sl.read_tar,
        Sparse(archive([("0.x", b"0")])[:1024], archive([("7.x", b"seven"), ("8.x", b"")])),
        {"byte": DEEP, "sample": 7},
        {"__key__": "7", "x": b"seven"},
    ),
    "tfrecord": (
        sl.read_tfrecord,
        Sparse(record_file([b"first"]), record_file([b"seventh", b"eighth"])),
        {"byte": DEEP, "record": 7},
        b"seventh",
    ),
    "mds": (sl.read_mds, Sparse(mds_head(), (4711).to_bytes(8, "little")), {"row": 7}, {"x": 4711}),
    "hdf5": (
        sl.read_hdf5,
        Sparse(hdf5_head(), (4711).to_bytes(8, "little")),
        {"row": (DEEP - HDF5_BYTES) // 8},
        {"x": 4711},
    ),
    "npy": (sl.read_npy, Sparse(npy_head(), (4711).to_bytes(8, "little")), {"row": (DEEP - 128) // 8}, 4711),
}


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what tells how many bytes of local files were read so far."""
    given_out = 0
    blocks = LocalStorage.blocks

    async def counting(*arguments: Any) -> AsyncGenerator[bytes, None]:
        nonlocal given_out
        async with aclosing(blocks(*arguments)) as found:
            async for block in found:
                given_out += len(block)
                yield block

    monkeypatch.setattr(LocalStorage, "blocks", counting)
    return lambda: given_out


async def first_at(source: Any, place: dict[str, Any]) -> Any:
    """Return the first item that a resume gives."""
    async with anyio.create_task_group() as group:
        tasks = Tasks(group)
        flow = source.open(Site(tasks), Part(mode="file"), {source.name: place})
        async with aclosing(flow):
            item = await anext(flow)
        tasks.clean_up()
        group.cancel_scope.cancel()
    return item


@pytest.mark.parametrize("kind", LARGE)
async def test_a_local_file_is_read_less_than_two_blocks(
    tmp_path: Path, read_bytes: Callable[[], int], kind: str
) -> None:
    read, content, place, expected = LARGE[kind]
    path = tmp_path / "x.mds"
    content.write(path)
    source = read(path).plan.source
    assert await first_at(source, {"file": str(path), **place}) == expected
    assert read_bytes() < 2 * local.BLOCK_BYTES
    assert read_bytes() or kind in ("npy", "hdf5")  # an array is mapped, and h5py reads for itself


def spans(server: Server) -> list[tuple[int, int]]:
    """Return the bytes that were asked for."""
    found = []
    for request in server.requests:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"])
        assert match is not None, request
        found.append((int(match[1]), int(match[2]) + 1))
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", LARGE)
async def test_of_an_object_its_part_is_asked_for_and_nothing_before(server: Server, kind: str) -> None:
    """What is after the part is asked for, too, and isn't waited for."""
    read, content, place, expected = LARGE[kind]
    server.objects["x.mds"] = cast(bytes, content)

    async def answer(server: Server, request: Any, writer: Any) -> None:
        if request.start > DEEP:
            await writer.wait_closed()
        else:
            await server.serve(server, request, writer)

    server.otherwise = answer
    source = named(read(server.url("x.mds")).plan.source)
    assert await first_at(source, {"file": server.url("x.mds"), **place}) == expected
    waited_for = [(start, stop) for start, stop in spans(server) if start <= DEEP]
    assert [start for start, _ in waited_for if start] == [DEEP] or kind == "npy", spans(server)
    assert sum(stop - start for start, stop in waited_for if start < DEEP) <= 2 * HEAD_BYTES + (kind == "npy") * 2**20
    assert sum(stop - start for start, stop in waited_for) < 2 * PART_BYTES


GROUPS, ROWS, CELL = 48, 32, 4096
GROUP_BYTES = ROWS * CELL


def table_file(kind: str) -> bytes:
    rng, file = np.random.default_rng(0), io.BytesIO()
    cells = pa.array([rng.bytes(CELL) for _ in range(GROUPS * ROWS)], pa.binary(CELL))
    table = pa.table({"id": np.arange(GROUPS * ROWS), "cell": cells})
    if kind == "parquet":
        pq.write_table(
            table, file, row_group_size=ROWS, compression="none", use_dictionary=False, write_statistics=False
        )
    else:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=ROWS)
    return file.getvalue()


TABLES: dict[str, Any] = {"parquet": sl.read_parquet, "arrow": sl.read_arrow}


def place_in(path: Path, kind: str, row: int) -> dict[str, Any]:
    """Return the place after a row, as a stream says it."""
    with TABLES[kind](path).shard(1).open() as stream:
        for _ in range(row + 1):
            next(stream)
        state: Any = stream.snapshot().worker_states[0]
    return dict(json.loads(json.dumps(state))[f"read_{kind}"])


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("kind", TABLES)
def test_of_a_table_less_than_two_groups_and_the_footer_are_read(
    tmp_path: Path, read_bytes: Callable[[], int], kind: str
) -> None:
    path, row = tmp_path / "x", 40 * ROWS + 3
    path.write_bytes(table_file(kind))
    place, before = place_in(path, kind, row), read_bytes()
    source = TABLES[kind](path).plan.source
    assert anyio.run(first_at, source, place)["id"] == row + 1
    assert 0 < read_bytes() - before < 2 * GROUP_BYTES + HEAD_BYTES


@pytest.mark.parametrize("kind", TABLES)
async def test_of_a_table_on_a_server_nothing_before_its_group_is_asked_for(
    server: Server, tmp_path: Path, kind: str
) -> None:
    path, row, data = tmp_path / "x", 40 * ROWS + 3, table_file(kind)
    path.write_bytes(data)
    place = await anyio.to_thread.run_sync(place_in, path, kind, row)
    server.objects["x"] = data
    source = named(TABLES[kind](server.url("x")).plan.source)
    assert (await first_at(source, {**place, "file": server.url("x")}))["id"] == row + 1
    group = [(start, stop) for start, stop in spans(server) if stop - start > 2]
    first = 40 * GROUP_BYTES * 99 // 100  # ids and lengths take some bytes of a group
    assert all(start > first for start, _ in group), spans(server)
    assert sum(stop - start for start, stop in group) < len(data) - first + 3 * HEAD_BYTES


# Libraries that read for themselves -----------------------------------------------------------------------------------


def cells() -> list[bytes]:
    rng = np.random.default_rng(0)
    return [struct.pack("<q", number) + rng.bytes(CELL - 8) for number in range(GROUPS * ROWS)]


OWN: dict[str, tuple[Any, Callable[[list[bytes]], bytes], dict[str, Any]]] = {
    "array_record": (sl.read_array_record, lambda values: array_record_file(values, ROWS), {}),
    "lance": (
        sl.read_lance,
        lambda values: lance_dataset({"x": pa.array(values, pa.binary(CELL))}, 2000),
        {"group": 0},
    ),
}


def read_by_process() -> int:
    """Return how many bytes the threads of this process have read so far, of anything."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.parametrize("kind", OWN)
def test_what_a_library_reads_for_itself_is_less_than_what_is_before(tmp_path: Path, kind: str) -> None:
    read, dump, place = OWN[kind]
    path, row, data = put(tmp_path / "x", dump(cells())), 45 * ROWS + 3, GROUPS * GROUP_BYTES
    source = read(path).plan.source.resolved()
    assert len(list(read(path))) == GROUPS * ROWS  # all is imported now
    before = read_by_process()
    item = anyio.run(first_at, source, {"file": str(path), **place, "row": row})
    assert 0 < read_by_process() - before < data // 4
    assert struct.unpack_from("<q", item if kind == "array_record" else item["x"]) == (row,)
