"""Small random files of every format, and what plain libraries read of them: csv, json, tarfile, pyarrow, numpy."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
from hypothesis import strategies as st

import streamline as sl
from streamline.io.formats.mds import MdsFormat
from streamline.io.formats.whole_files import WholeFile
from streamline.pipeline import Pipeline
from streamline.readers import pipeline_of
from streamline.sharding.split import byte_range, contiguous
from tests.file_kit import PACK
from tests.io.formats.archives import archive
from tests.io.formats.records import array_record_file, lance_dataset, mds_file, record_file

__all__ = ["BROKEN", "FORMATS", "REMOTE", "Broken", "Format", "Written", "numbered"]

Read = Callable[[Sequence[str]], Pipeline[Any]]


class Broken(Exception):  # noqa: N818 - what stands for an item that can't be decoded
    """A record that no library reads; and, of a file that isn't there, all of it."""


@dataclass(frozen=True)
class Written:
    """A file, and what it holds.

    Attributes:
      suffix: of its name.
      data: its bytes.
      items: what is read of it, in order; without the path where that is part of one.
      starts: the byte at which each item begins: a split is at bytes. None: it is one of `groups`.
      groups: items of each row group; None: the file can't be split, unless there are `starts`.
    """

    suffix: str
    data: bytes
    items: list[Any]
    starts: list[int] | None = None
    groups: list[int] | None = None

    def share(self, shard: int, num_shards: int) -> list[Any]:
        """Return the items that a shard owns of it."""
        if self.starts is not None:
            start, stop = byte_range(len(self.data), num_shards, shard)
            return [item for item, at in zip(self.items, self.starts, strict=True) if start <= at < stop]
        assert self.groups is not None
        owned = contiguous(len(self.groups), num_shards, shard)
        return self.items[sum(self.groups[: owned.start]) : sum(self.groups[: owned.stop])]


@dataclass(frozen=True)
class Format:
    """A format, with options of its own.

    Attributes:
      text: for a person.
      read: makes the pipeline.
      write: draws a file of about so many items, numbered from some number on.
    """

    text: str
    read: Read
    write: Callable[[st.DrawFn, range], Written]

    def __repr__(self) -> str:
        return self.text


# Text ---------------------------------------------------------------------------------------------------------------

MARK = st.sampled_from(["", "", "", "\ufeff"])
"""A byte order mark, which some tools begin a text with."""

PADDING = st.sampled_from(["", "", " ", " ö", ' "x,"', " " + "y" * 90])


def packed(draw: st.DrawFn, data: bytes) -> tuple[str, bytes, bool]:
    """Return a suffix, perhaps compressed data, and whether they can be split."""
    how = draw(st.sampled_from(["plain", "plain", "plain", *PACK, "parts", "unnamed"]))
    if how == "plain":
        return ".txt", data, True
    if how == "parts":
        cut = draw(st.integers(0, len(data)))
        suffix, pack = PACK[draw(st.sampled_from(list(PACK)))]
        return suffix, pack(data[:cut]) + pack(data[cut:]), False
    suffix, pack = PACK["gzip" if how == "unnamed" else how]
    return ".txt" if how == "unnamed" else suffix, pack(data), False


def raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def of_lines(draw: st.DrawFn, lines: list[str], decode: Callable[[str], list[Any]]) -> Written:
    """Return a file of lines with ends of any kind, of which `decode` makes an item, or none; "\\udcff" is no text."""
    mark = draw(MARK)
    ends = [draw(st.sampled_from(["\n", "\n", "\r\n"])) for _ in lines]
    if ends and lines[-1] and draw(st.booleans()):
        ends[-1] = ""
    suffix, data, plain = packed(draw, raw(mark + "".join(map("".join, zip(lines, ends, strict=True)))))
    items, starts, at = list[Any](), list[int](), 0
    for line, end in zip(lines, ends, strict=True):
        found = decode(line)
        items += found
        starts += [at] * len(found)
        at += len(raw((line + end) if at else (mark + line + end)))
    return Written(suffix, data, items, starts if plain else None)


def lines_file(draw: st.DrawFn, numbers: range) -> Written:
    lines = [draw(st.sampled_from([f"{number}", "", f"{number}"])) + draw(PADDING) for number in numbers]
    return of_lines(draw, lines, lambda line: [line])


def jsonl_file(draw: st.DrawFn, numbers: range) -> Written:
    values: list[Any] = [
        draw(st.sampled_from([number, {"n": number, "ö": [None, "x"]}, None, "", []])) for number in numbers
    ]
    lines = [json.dumps(value, ensure_ascii=draw(st.booleans())) for value in values]
    for _ in range(draw(st.integers(0, 2))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["", "  "])))
    return of_lines(draw, lines, lambda line: [json.loads(line)] if line.strip() else [])


def broken_lines_file(draw: st.DrawFn, numbers: range) -> Written:
    lines = [draw(st.sampled_from([f"{number}"] * 3 + ["\udcff"])) + draw(PADDING) for number in numbers]
    return of_lines(draw, lines, lambda line: [Broken(line) if "\udcff" in line else line])


NO_JSON = ["{]", "1 2", '{"a":', '"\udcff"', "nan", "[" * 5000]


def broken_jsonl_file(draw: st.DrawFn, numbers: range) -> Written:
    lines = [draw(st.sampled_from([f"{number}"] * 10 + ["", *NO_JSON])) for number in numbers]

    def decode(line: str) -> list[Any]:
        return [Broken(line)] if line in NO_JSON else [json.loads(line)] if line else []

    return of_lines(draw, lines, decode)


CSV_FIELDS = st.sampled_from(["", "x", "a,b", 'say "hi"', "two\nlines", "two\r\nlines", "ö" * 40])


def csv_file(header: bool) -> Callable[[st.DrawFn, range], Written]:
    def write(draw: st.DrawFn, numbers: range) -> Written:
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator=draw(st.sampled_from(["\n", "\r\n"])))
        if header and (numbers or draw(st.booleans())):
            writer.writerow(["id", "text"])
        for number in numbers:
            writer.writerow([number, draw(CSV_FIELDS)])
            if draw(st.integers(0, 9)) == 0:
                file.write("\n")
        text = file.getvalue()
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        items: list[Any] = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]] if header else rows
        suffix, data, _ = packed(draw, (draw(MARK) + text).encode())
        return Written(suffix, data, items)

    return write


NO_CSV = ["1", "1,2,3", '1,"2"3', "1,\udcff", '"1\n",2,3']


def broken_csv_file(draw: st.DrawFn, numbers: range) -> Written:
    text, items = draw(MARK), list[Any]()
    for number in numbers:
        bad, field = draw(st.sampled_from([""] * 12 + NO_CSV)), draw(st.sampled_from(["", "a,b", "two\nlines", "ö"]))
        text += (bad or f'{number},"{field}"') + draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
        items.append(Broken(bad) if bad else {"id": f"{number}", "text": field})
    suffix, data, _ = packed(draw, raw(text))
    return Written(suffix, data, items)


# Tables -------------------------------------------------------------------------------------------------------------


def table_of(draw: st.DrawFn, numbers: range) -> pa.Table:
    texts = [draw(st.sampled_from([None, "", "x", "ö" * 30])) for _ in numbers]
    return pa.table({"id": pa.array(numbers, pa.int64()), "text": pa.array(texts, pa.string())})


def parquet_file(draw: st.DrawFn, numbers: range) -> Written:
    table, file = table_of(draw, numbers), io.BytesIO()
    rows, codec = draw(st.integers(1, 6)), draw(st.sampled_from(["none", "snappy", "zstd"]))
    pq.write_table(table, file, row_group_size=rows, compression=codec)
    data = file.getvalue()
    about = pq.ParquetFile(io.BytesIO(data)).metadata
    groups = [about.row_group(index).num_rows for index in range(about.num_row_groups)]
    return Written(".parquet", data, pq.read_table(io.BytesIO(data)).to_pylist(), groups=groups)


def arrow_file(draw: st.DrawFn, numbers: range) -> Written:
    table, file = table_of(draw, numbers), io.BytesIO()
    batches = table.to_batches(max_chunksize=draw(st.integers(1, 6)))
    batches = [part for batch in batches for part in (batch, *[batch[:0]] * (draw(st.integers(0, 5)) == 0))]
    stream, codec = draw(st.booleans()), draw(st.sampled_from([None, "zstd", "lz4"]))
    options = ipc.IpcWriteOptions(compression=codec)
    with (ipc.new_stream if stream else ipc.new_file)(file, table.schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    groups = None if stream else [batch.num_rows for batch in batches]
    return Written(".arrow", file.getvalue(), table.to_pylist(), groups=groups)


# Arrays -------------------------------------------------------------------------------------------------------------


def npy_file(draw: st.DrawFn, numbers: range) -> Written:
    width, order = draw(st.sampled_from([None, 0, 1, 3])), draw(st.sampled_from(["<", ">"]))
    array = np.array(numbers, f"{order}i4")
    if width is not None:
        array = array[:, None] * 10 + np.arange(width, dtype=array.dtype)
    file, kind = io.BytesIO(), draw(st.sampled_from(["npy", "npz", "packed"]))
    rows: list[Any] = list(array)
    if kind == "npy":
        np.save(file, array)
    else:
        other = np.array([f"{number}" for number in numbers], "U4")
        (np.savez if kind == "npz" else np.savez_compressed)(file, x=array, names=other)
        rows = [{"x": row, "names": name} for row, name in zip(array, other, strict=True)]
    return Written(".npz" if kind != "npy" else ".npy", file.getvalue(), rows, groups=[1] * len(numbers))


def hdf5_file(draw: st.DrawFn, numbers: range) -> Written:
    width, texts = draw(st.integers(0, 3)), [f"né{number}" for number in numbers]
    array = np.array(numbers, "i4")[:, None] * 10 + np.arange(width, dtype="i4")
    chunks, packed = draw(st.sampled_from([None, 1, 4])), draw(st.booleans())
    how: Any = {"chunks": (chunks, width), "compression": "gzip" if packed else None} if chunks and width else {}
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5.create_dataset("x", data=array, **({"maxshape": (None, width)} | how if how else {}))
        h5.create_dataset("in/texts", data=texts, dtype=h5py.string_dtype())
    rows = [{"x": row, "in/texts": text} for row, text in zip(array, texts, strict=True)]
    return Written(".h5", file.getvalue(), rows, groups=[1] * len(numbers))


# Archives and whole files -------------------------------------------------------------------------------------------

FIELDS = st.lists(st.sampled_from(["txt", "JPG", "seg.png"]), min_size=1, max_size=3, unique=True)
CONTENT = st.sampled_from([b"", b"x", b"y" * 511, b"z" * 512, b"long" * 400])
NOT_SAMPLES = st.sampled_from(["README", ".hidden", "__meta__/x.y"])


def tar_file(draw: st.DrawFn, numbers: range) -> Written:
    file, form = io.BytesIO(), draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    folder = draw(st.sampled_from(["", "a/", "ö/"]))
    if form != tarfile.USTAR_FORMAT:
        folder = draw(st.sampled_from([folder, "long" * 40 + "/"]))
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for number in numbers:
            names = [f"{folder}{number}.{field}" for field in draw(FIELDS)]
            names += [draw(NOT_SAMPLES)] * (draw(st.integers(0, 4)) == 0)
            for name in names:
                info, content = tarfile.TarInfo(name), draw(CONTENT)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    samples, starts = list[dict[str, Any]](), list[int]()
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as tar:
        for member in tar:
            base = member.name.rpartition("/")[2]
            if base.find(".") < 1 or member.name.startswith("__"):
                continue
            key, _, field = member.name.removesuffix(base), *base.partition(".")[1:]
            key += base.partition(".")[0]
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
                starts.append(member.offset)
            held = tar.extractfile(member)
            assert held is not None
            samples[-1][field.lower()] = held.read()
    suffix, data, plain = packed(draw, file.getvalue())
    return Written(".tar" if suffix == ".txt" else f".tar{suffix}", data, samples, starts if plain else None)


def tfrecord_file(draw: st.DrawFn, numbers: range) -> Written:
    records = [b"%d" % number + draw(CONTENT) for number in numbers]
    suffix, data, _ = packed(draw, record_file(records))
    return Written(".tfrecord" if suffix == ".txt" else f".tfrecord{suffix}", data, records)


def array_record_of(draw: st.DrawFn, numbers: range) -> Written:
    records = [b"%d" % number + draw(CONTENT) for number in numbers]
    data = array_record_file(records, draw(st.integers(1, 4)))
    return Written(".array_record", data, records, groups=[1] * len(numbers))


def mds_of(draw: st.DrawFn, numbers: range) -> Written:
    contents = [draw(CONTENT) for _ in numbers]
    samples = [[n.to_bytes(8, "little"), data] for n, data in zip(numbers, contents, strict=True)]
    suffix, data, plain = packed(draw, mds_file({"id": ("int", 8), "data": ("bytes", None)}, samples))
    items = [{"id": n, "data": held} for n, held in zip(numbers, contents, strict=True)]
    name = ".mds" if suffix == ".txt" else f".mds{suffix}"
    return Written(name, data, items, groups=[1] * len(numbers) if plain else None)


def lance_of(draw: st.DrawFn, numbers: range) -> Written:
    contents = [draw(CONTENT) for _ in numbers]
    columns = {"id": pa.array(numbers, pa.int64()), "data": pa.array(contents, pa.binary())}
    gone = {draw(st.sampled_from(numbers))} if numbers and draw(st.booleans()) else set()
    data = lance_dataset(columns, draw(st.integers(1, 4)), "".join(f"id = {number}" for number in gone))
    items = [{"id": n, "data": held} for n, held in zip(numbers, contents, strict=True) if n not in gone]
    return Written(".lance", data, items, groups=[1] * len(items))


def whole_file(draw: st.DrawFn, numbers: range) -> Written:
    data = b"" if not numbers else f"{numbers[0]}".encode() * draw(st.sampled_from([1, 100]))
    return Written(".bin", data, [WholeFile("", data)])


FORMATS: Sequence[Format] = (
    Format("read_lines", sl.read_lines, lines_file),
    Format("read_jsonl", sl.read_jsonl, jsonl_file),
    Format("read_csv", sl.read_csv, csv_file(header=True)),
    Format("read_csv without a header", lambda paths: sl.read_csv(paths, header=False), csv_file(header=False)),
    Format("read_parquet", sl.read_parquet, parquet_file),
    Format("read_arrow", sl.read_arrow, arrow_file),
    Format("read_npy", sl.read_npy, npy_file),
    Format("read_hdf5", lambda paths: sl.read_hdf5(paths, datasets=["x", "in/texts"]), hdf5_file),
    Format("read_tar", sl.read_tar, tar_file),
    Format("read_tfrecord", sl.read_tfrecord, tfrecord_file),
    Format("read_array_record", sl.read_array_record, array_record_of),
    Format("read_lance", sl.read_lance, lance_of),
    Format("read_mds", sl.read_mds, mds_of),
    Format("read_files", sl.read_files, whole_file),
)

REMOTE = tuple(format for format in FORMATS if format.text not in ("read_array_record", "read_lance"))
"""Formats of which files may be on a server that isn't a store."""

BROKEN: Sequence[Format] = (
    Format("read_lines", sl.read_lines, broken_lines_file),
    Format("read_jsonl", sl.read_jsonl, broken_jsonl_file),
    Format("read_csv with columns", lambda paths: sl.read_csv(paths, header=["id", "text"]), broken_csv_file),
)
"""Formats in which a record may be bad and the next one good; some of theirs are."""


def numbered(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the numbers of each file's items."""
    at = 0
    for size in sizes:
        yield range(at, at + size)
        at += size


def as_npz(values: list[int]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, x=np.array(values))
    return file.getvalue()


def as_mds(values: list[int]) -> bytes:
    return mds_file({"id": ("int", 8)}, [[value.to_bytes(8, "little", signed=True)] for value in values])


def as_hdf5(values: list[int]) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5["id"] = np.array(values)
    return file.getvalue()


def as_table(values: list[int], *, stream: bool = False, parquet: bool = False) -> bytes:
    table, file = pa.table({"id": values}), io.BytesIO()
    if parquet:
        pq.write_table(table, file, row_group_size=3)
        return file.getvalue()
    with (ipc.new_stream if stream else ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return file.getvalue()


def as_tar(values: list[int]) -> bytes:
    return archive([(f"{value}.txt", b"x") for value in values])


def packed_lines(values: list[int], pack: Callable[[bytes], bytes]) -> bytes:
    return pack(as_lines(values))


def as_text(value: int) -> bytes:
    return b"%d" % value


def as_lines(values: list[int]) -> bytes:
    return b"".join(b"%d\n" % value for value in values)


ENDS: dict[str, tuple[Any, Callable[[list[int]], bytes]]] = {
    **{f"lines, {kind}": (sl.read_lines, partial(packed_lines, pack=pack)) for kind, (_, pack) in PACK.items()},
    "jsonl, gzip": (sl.read_jsonl, lambda values: gzip.compress(as_lines(values))),
    "csv, gzip": (partial(sl.read_csv, header=["id"]), lambda values: gzip.compress(as_lines(values))),
    "tar": (sl.read_tar, as_tar),
    "tar, gzip": (sl.read_tar, lambda values: gzip.compress(as_tar(values))),
    "tfrecord, gzip": (sl.read_tfrecord, lambda values: gzip.compress(record_file(map(as_text, values)))),
    "array_record": (sl.read_array_record, lambda values: array_record_file(map(as_text, values))),
    "mds": (partial(pipeline_of, MdsFormat()), as_mds),
    "lance": (sl.read_lance, lambda values: lance_dataset({"id": values}, 3)),
    "npz": (sl.read_npy, as_npz),
    "hdf5": (sl.read_hdf5, as_hdf5),
    "parquet": (sl.read_parquet, partial(as_table, parquet=True)),
    "arrow": (sl.read_arrow, as_table),
    "arrow stream": (sl.read_arrow, partial(as_table, stream=True)),
}
"""Formats that tell when an item is its file's last one: of plain text, only the next block does."""
