"""One case of each file format, for `test_contract.py`: how it is written and read, and what may go wrong with it.

A new format enters here with one `FormatCase`; what only it has is tested in a file of its own.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

import streamline as sl
from streamline.io.formats.tar import Member
from tests.io.formats.archives import archive, ends
from tests.io.formats.records import array_record_file, lance_dataset, mds_file, record_file, starts_of

ALL = range(30)

GROUP = 5
"""Records that are stored together, in formats that have groups."""


@dataclass(frozen=True)
class Damage:
    """A file of `ALL` in which the records of the numbers `lost` can't be read; and what the error says."""

    content: bytes
    lost: range
    says: str


@dataclass(frozen=True)
class FormatCase:
    """A format.

    Attributes:
      read: makes a pipeline of paths.
      write: returns a file with the records of some numbers.
      item: what is read of a number.
      suffix: of the file's name.
      splits: whether shards can share a file.
      packs: whether it may be compressed.
      remote: whether it may be on a server.
      damage: makes a damaged file; None: nothing in it can be told from other data.
      whole_at: where a file of six may be cut, and is whole all the same; None: anywhere, or it is no file.
      watched: whether a local file is read in pieces by a library, and must not change meanwhile.
    """

    read: Callable[..., sl.Pipeline[Any]]
    write: Callable[[Sequence[int]], bytes]
    item: Callable[[int], Any]
    suffix: str = ""
    splits: bool = True
    packs: bool = False
    remote: bool = True
    damage: Callable[[], Damage] | None = None
    whole_at: Callable[[bytes], Collection[int]] | None = lambda content: ()
    watched: bool = False

    def items(self, numbers: Sequence[int]) -> list[Any]:
        return [self.item(number) for number in numbers]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def csv_file(numbers: Sequence[int]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["n", "text"], *([number, f'"{number}",\nö' * (number % 3)] for number in numbers)])
    return file.getvalue().encode()


def jsonl_file(numbers: Sequence[int]) -> bytes:
    return b"".join(b'{"n": %d}\n' % number for number in numbers)


def tar_file(numbers: Sequence[int], second: str = "y") -> bytes:
    """Return an archive; with another name, the second members of 13 and later."""
    names = {number: ("x", second if number == 13 else "y") for number in numbers}
    return archive([(f"{number}.{name}", b"%d" % number * 200) for number in numbers for name in names[number]])


def record(number: int) -> bytes:
    return b"%d" % number * (number % 4)


def records_file(numbers: Sequence[int]) -> bytes:
    return record_file(map(record, numbers))


def npy_file(numbers: Sequence[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([[number, 2 * number] for number in numbers], "<i8").reshape(-1, 2))
    return file.getvalue()


def npz_file(numbers: Sequence[int], save: Any) -> bytes:
    file, values = io.BytesIO(), np.array(numbers, "<i8")
    save(file, x=values, y=values.reshape(-1, 1) / 8)
    return file.getvalue()


def npz_item(number: int) -> Any:
    return {"x": np.int64(number), "y": np.array([number / 8])}


def hdf5_file(numbers: Sequence[int]) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5.create_dataset("x", data=np.array(numbers, "i8"), chunks=(GROUP,), maxshape=(None,), fletcher32=True)
        h5.create_dataset("in/texts", data=[f"né{number}" for number in numbers], dtype=h5py.string_dtype())
        ragged = h5.create_dataset(
            "ragged", (len(numbers),), dtype=h5py.vlen_dtype(np.uint8), chunks=(4,), maxshape=(None,)
        )
        for at, number in enumerate(numbers):
            ragged[at] = np.arange(number % 7)
    return file.getvalue()


def bad_hdf5() -> Damage:
    content = hdf5_file(ALL)
    with h5py.File(io.BytesIO(content), "r") as h5:
        at = h5["x"].id.get_chunk_info_by_coord((10,)).byte_offset
    return Damage(flipped(content, at), range(10, 15), "row 10: h5py can't read it")


def mds_shard(numbers: Sequence[int]) -> bytes:
    samples = [[number.to_bytes(8, "little"), b"%d" % number * (number % 4)] for number in numbers]
    return mds_file({"id": ("int", 8), "text": ("str", None)}, samples)


def mds_item(number: int) -> Any:
    return {"id": number, "text": f"{number}" * (number % 4)}


def bad_mds() -> Damage:
    content = mds_shard(ALL).replace(b"111111", b"\xff" * 6)
    return Damage(content, range(11, 12), "row 11: a sample is damaged: UnicodeDecodeError")


def noise(number: int) -> bytes:
    """Return random bytes: they aren't compressed, so that each group takes as much of the file."""
    return np.random.default_rng(number).bytes(100)


def array_records(numbers: Sequence[int], group: int) -> bytes:
    return array_record_file(map(noise, numbers), group)


def bad_array_record(group: int) -> Damage:
    content, first = array_records(ALL, group), 12 // group * group
    lost = range(first, min(len(ALL), first + group))
    return Damage(flipped(content, content.index(noise(12)) + 50), lost, f"row {first}: array_record can't read it")


def arrow_table(numbers: Sequence[int]) -> Any:
    return pa.table({"n": pa.array(numbers, pa.int64()), "text": pa.array(map("ü{}".format, numbers), pa.string())})


def arrow_item(number: int) -> Any:
    return {"n": number, "text": f"ü{number}"}


def arrow_file(numbers: Sequence[int], new: Any) -> bytes:
    file, table = io.BytesIO(), arrow_table(numbers)
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=GROUP)
    return file.getvalue()


def bad_arrow(new: Any) -> Damage:
    content = arrow_file(ALL, new).replace("ü11".encode(), b"\xff\xff11")
    return Damage(content, range(10, 15), "record batch 2: can't be decoded")


def parquet_file(numbers: Sequence[int]) -> bytes:
    file = io.BytesIO()
    pq.write_table(arrow_table(numbers), file, row_group_size=GROUP, write_page_checksum=True)
    return file.getvalue()


def bad_parquet() -> Damage:
    content = parquet_file(ALL)
    about = pq.read_metadata(io.BytesIO(content)).row_group(2).column(0)
    at = about.data_page_offset + about.total_compressed_size // 2
    return Damage(flipped(content, at), range(10, 15), "row group 2: can't be decoded")


def lance_folder(numbers: Sequence[int]) -> bytes:
    return lance_dataset({"n": pa.array(numbers, pa.int64())}, GROUP)


CASES: dict[str, FormatCase] = {
    "csv": FormatCase(
        sl.read_csv,
        csv_file,
        lambda n: {"n": str(n), "text": f'"{n}",\nö' * (n % 3)},
        splits=False,
        packs=True,
        damage=lambda: Damage(csv_file(ALL).replace(b"\n13,", b"\n13,x,"), range(13, 14), "expected 2 fields, got 3"),
        whole_at=None,
    ),
    "jsonl": FormatCase(
        sl.read_jsonl,
        jsonl_file,
        lambda n: {"n": n},
        packs=True,
        damage=lambda: Damage(jsonl_file(ALL).replace(b": 13", b" 13"), range(13, 14), "expected one JSON value"),
        whole_at=None,
    ),
    "tar": FormatCase(
        sl.read_tar,
        tar_file,
        lambda n: {"__key__": f"{n}", "x": b"%d" % n * 200, "y": b"%d" % n * 200},
        packs=True,
        damage=lambda: Damage(tar_file(ALL, second="X"), range(13, 14), "is the second one for 'x' of the sample '13'"),
        whole_at=lambda content: range(ends(content)[-1] + 512, len(content)),
    ),
    "tar, members": FormatCase(
        partial(sl.read_tar, group=False),
        lambda numbers: archive([(f"{number}.x", b"%d" % number) for number in numbers]),
        lambda n: Member(f"{n}.x", b"%d" % n),
        whole_at=lambda content: range(ends(content)[-1] + 512, len(content)),
    ),
    "tfrecord": FormatCase(
        sl.read_tfrecord,
        records_file,
        record,
        splits=False,
        packs=True,
        damage=lambda: Damage(
            flipped(records_file(ALL), starts_of(map(record, ALL))[14] - 1), range(13, 14), "their checksum is wrong"
        ),
        whole_at=lambda content: starts_of(map(record, range(6))),
    ),
    "npy": FormatCase(sl.read_npy, npy_file, lambda n: np.array([n, 2 * n], "<i8")),
    "npz, stored": FormatCase(sl.read_npy, partial(npz_file, save=np.savez), npz_item),
    "npz, deflated": FormatCase(sl.read_npy, partial(npz_file, save=np.savez_compressed), npz_item),
    "hdf5": FormatCase(
        sl.read_hdf5,
        hdf5_file,
        lambda n: {"in/texts": f"né{n}", "ragged": np.arange(n % 7, dtype="u1"), "x": np.int64(n)},
        damage=bad_hdf5,
        watched=True,
    ),
    "mds": FormatCase(sl.read_mds, mds_shard, mds_item, suffix=".mds", damage=bad_mds),
    "mds, gzip": FormatCase(
        sl.read_mds, lambda numbers: gzip.compress(mds_shard(numbers)), mds_item, suffix=".mds.gz", splits=False
    ),
    **{
        f"array_record, groups of {group}": FormatCase(
            sl.read_array_record,
            partial(array_records, group=group),
            noise,
            remote=False,
            damage=partial(bad_array_record, group),
            watched=True,
        )
        for group in (1, GROUP, 100)
    },
    "lance": FormatCase(sl.read_lance, lance_folder, lambda n: {"n": n}, remote=False, whole_at=None),
    "parquet": FormatCase(sl.read_parquet, parquet_file, arrow_item, damage=bad_parquet, watched=True),
    "arrow file": FormatCase(
        sl.read_arrow,
        partial(arrow_file, new=ipc.new_file),
        arrow_item,
        damage=partial(bad_arrow, ipc.new_file),
        watched=True,
    ),
    "arrow stream": FormatCase(
        sl.read_arrow,
        partial(arrow_file, new=ipc.new_stream),
        arrow_item,
        splits=False,
        damage=partial(bad_arrow, ipc.new_stream),
    ),
}
