"""`read_*` and `stream_http`: from paths and options to a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from streamline.core.options import check_installed, check_int, type_and_repr
from streamline.errors import PlanError, PlanTypeError
from streamline.io.formats.array_record import ArrayRecordFormat
from streamline.io.formats.arrow import ArrowFormat
from streamline.io.formats.base import Format
from streamline.io.formats.columnar import Predicate
from streamline.io.formats.csv import MAX_RECORD_BYTES, CsvFormat, Dialect, Header
from streamline.io.formats.hdf5 import Hdf5Format
from streamline.io.formats.lance import LanceFormat
from streamline.io.formats.line_decoding import MAX_LINE_BYTES, Decode, decode_json, decode_text
from streamline.io.formats.lines import LineFormat
from streamline.io.formats.mds import MAX_SHARD_BYTES, MdsFormat
from streamline.io.formats.npy import NpyFormat
from streamline.io.formats.parquet import ParquetFormat
from streamline.io.formats.tar import MAX_SAMPLE_BYTES, Member, TarFormat
from streamline.io.formats.tfrecord import MAX_RECORD_BYTES as MAX_TFRECORD_BYTES
from streamline.io.formats.tfrecord import TFRecordFormat
from streamline.io.formats.whole_files import WholeFile, WholeFormat
from streamline.io.storage.options import Access, AccessOptions, HttpOptions
from streamline.io.storage.paths import Paths, given_paths, is_remote
from streamline.pipeline import Pipeline
from streamline.sources.files import Files
from streamline.sources.framing import Framing, ServerSentEvent
from streamline.sources.http_stream import (
    GIVE_UP_S,
    IDLE_TIMEOUT_S,
    MAX_ITEM_BYTES,
    EndlessRequest,
    HttpFeed,
    codec_of,
)
from streamline.sources.items import Items
from streamline.sources.live import MAX_AHEAD, MAX_AHEAD_BYTES, live_of
from streamline.sources.self_listed import LanceDatasets, MdsShards
from streamline.sources.table_rows import ARROW, rows_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

T = TypeVar("T")


class _TableOptions(AccessOptions, total=False):
    columns: Sequence[str] | None
    filter: pc.Expression | None
    name: str


class _CsvOptions(AccessOptions, total=False):
    delimiter: str
    quotechar: str | None
    max_record_bytes: int
    name: str


class _TarOptions(AccessOptions, total=False):
    max_sample_bytes: int
    name: str


def read_lines(
    paths: Paths, *, max_line_bytes: int = MAX_LINE_BYTES, name: str = "read_lines", **access: Unpack[AccessOptions]
) -> Pipeline[str]:
    r"""Read the lines of text files (UTF-8), without their ends, "\n" or "\r\n"; empty lines are items.

    A byte order mark at the beginning of a file is no part of its first line.

    A resume goes on at the byte; in a compressed file, it decompresses what is before it once more.

    Args:
      paths: local paths and objects of stores (s3://, gs://, az://), with globs; http(s) URLs; all with braces:
        part-{000..127}.txt; one or several. gzip, zstd, bzip2 and xz are unpacked.
      max_line_bytes: a longer line is an error; >= 1.
      name: its part of a state is kept under it.
      access: how bytes are had: `http`, `concurrency`, `cache_dir`, `cache_max_bytes`, `storage_options`,
        see `streamline.io.storage.options.Access`.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for what can't be decoded, each with file, line and byte.
    """
    return _lines("read_lines", decode_text, paths, name, max_line_bytes, **access)


def read_jsonl(
    paths: Paths, *, max_line_bytes: int = MAX_LINE_BYTES, name: str = "read_jsonl", **access: Unpack[AccessOptions]
) -> Pipeline[Any]:
    """Read the JSON values of files with one a line; blank lines are skipped. Otherwise as `read_lines`."""
    return _lines("read_jsonl", decode_json, paths, name, max_line_bytes, **access)


def _lines(
    kind: str, decode: Decode[T], paths: Paths, name: str, max_line_bytes: int, **access: Unpack[AccessOptions]
) -> Pipeline[T]:
    max_line_bytes = check_int(f"{kind}(max_line_bytes=)", max_line_bytes, 1)
    return pipeline_of(LineFormat(made_by=kind, decode=decode, max_line_bytes=max_line_bytes), paths, name, **access)


def read_array_record(
    paths: Paths, *, name: str = "read_array_record", **access: Unpack[AccessOptions]
) -> Pipeline[bytes]:
    """Read the records of ArrayRecord files, as bytes; `.map(sl.decode.example())` parses `tf.train.Example`.

    A resume reads the group of its record again. One file is split over shards by ranges of records. Files are local:
    array_record reads no others. Needs `pip install 'streamline-data[array_record]'`.

    Args:
      paths: as `read_lines`, local ones.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError (damaged, or cut short) has file and record.
      PlanError: array_record isn't installed; a path isn't local.
    """
    check_installed("read_array_record", "array_record", "array_record", "array_record")
    given_ = given_paths(paths)
    if (remote := next(filter(is_remote, given_), None)) is not None:
        raise PlanError(f"read_array_record reads local files only, as array_record does: copy {remote} to a disk")
    return pipeline_of(ArrayRecordFormat(), given_, name, **access)


@overload
def read_arrow(
    paths: Paths, *, batch_rows: None = None, **options: Unpack[_TableOptions]
) -> Pipeline[dict[str, Any]]: ...


@overload
def read_arrow(paths: Paths, *, batch_rows: int, **options: Unpack[_TableOptions]) -> Pipeline[pa.RecordBatch]: ...


def read_arrow(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: int | None = None,
    name: str = "read_arrow",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    """Read the rows of Arrow IPC files ("feather") as dicts, or as record batches. Needs the extra `arrow`.

    Fetched are the footer, and then whole record batches; a resume fetches one again, and one file is split over shards
    by them. Files in the stream format are known by their first bytes, and read from the start: a resume reads again
    what is before its record batch, and they can't be split.

    Args:
      paths: as `read_lines`.
      columns: names of top columns, otherwise as `read_parquet`; the others are fetched along with them, but in a local
        file.
      filter: as `read_parquet`, but nothing says beforehand which record batches have no such rows.
      batch_rows: as `read_parquet`; no batch is larger than it is in the file.
      name, access: as `read_lines`.

    Raises:
      As `read_parquet`.
    """
    return pipeline_of(ArrowFormat(**selecting("read_arrow", columns, filter, batch_rows)), paths, name, **access)


@overload
def read_csv(
    paths: Paths, *, header: Literal[True] | Sequence[str] = True, **options: Unpack[_CsvOptions]
) -> Pipeline[dict[str, str]]: ...


@overload
def read_csv(paths: Paths, *, header: Literal[False], **options: Unpack[_CsvOptions]) -> Pipeline[list[str]]: ...


def read_csv(
    paths: Paths,
    *,
    header: bool | Sequence[str] = True,
    delimiter: str = ",",
    quotechar: str | None = '"',
    max_record_bytes: int = MAX_RECORD_BYTES,
    name: str = "read_csv",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    r"""Read the records of CSV files (RFC 4180) in UTF-8, as dicts by column; all values are strings.

    Delimiters, line ends and doubled quotes may stand inside quotes. Lines end with "\n" or "\r\n". Blank lines, and a
    byte order mark, are skipped. A record with too few or too many fields is an error. A resume goes on at the byte,
    and reads the header again; in a compressed file, it decompresses what is before it once more.

    Args:
      paths: as `read_lines`.
      header: True: each file's first record names its columns. A list of names: no file has such a record. False:
        none has, and items are lists.
      delimiter: between fields; one character: "\t".
      quotechar: around fields; one character; None: a quote means nothing, and every line is a record.
      max_record_bytes: a longer record is an error: a quote that isn't closed swallows the rest of its file; >= 1.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`.
    """
    max_record_bytes = check_int("read_csv(max_record_bytes=)", max_record_bytes, 1)
    format = CsvFormat(
        header=_csv_header(header), dialect=_csv_dialect(delimiter, quotechar), max_record_bytes=max_record_bytes
    )
    return pipeline_of(format, paths, name, **access)


def _csv_header(header: Any) -> Header:
    if isinstance(header, bool):
        return header
    if isinstance(header, str) or not isinstance(header, Sequence) or not all(isinstance(one, str) for one in header):
        raise PlanTypeError(f"read_csv(header=): expected True, False or a list of names, got {type_and_repr(header)}")
    if not header or len(set(header)) != len(header):
        raise PlanError(f"read_csv(header=): expected names, each of them once, got {type_and_repr(header)}")
    return tuple(header)


def _csv_dialect(delimiter: Any, quotechar: Any) -> Dialect:
    for what, value in {"delimiter": delimiter, "quotechar": quotechar}.items():
        if not (isinstance(value, str) or (value is None and what == "quotechar")):
            raise PlanTypeError(f"read_csv({what}=): expected one character, got {type_and_repr(value)}")
        if value is not None and (len(value) != 1 or value in "\r\n"):
            raise PlanError(f"read_csv({what}=): expected one character, no line end, got {value!r}")
    if delimiter == quotechar:
        raise PlanError(f"read_csv(): expected delimiter and quotechar to differ, both are {delimiter!r}")
    return Dialect(delimiter, quotechar)


def read_mds(
    paths: Paths,
    *,
    check_hashes: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    name: str = "read_mds",
    **access: Unpack[AccessOptions],
) -> Pipeline[dict[str, Any]]:
    """Read the samples of MDS shards, as MosaicML's streaming writes them, as dicts by column. Needs nothing else.

    Images come as they are stored, as bytes, for `sl.decode.image()`. A resume looks up its sample, and one shard is
    split by samples. A compressed shard is unpacked into memory first, by a resume too, and can't be split.

    Args:
      paths: a folder, "s3://bucket/train", of which the shards that its index.json lists are read, compressed ones too
        (zstd, gzip, bzip2); without an index, its *.mds. Or the shards themselves, as `read_lines`:
        "train/*.mds.zstd".
      check_hashes: compare each shard with its hash in the index before its first sample: it is read whole for that,
        by a resume, too. Compressed ones are compared in any case.
      max_shard_bytes: a compressed shard that unpacks to more is an error; >= 1.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError (damaged, or cut short; another hash; a column of pickles, or of `pil`) has file and
      row. When the pipeline is opened: ReadError for a shard of the index that is missing, or of another size.
    """
    if not isinstance(check_hashes, bool):
        raise PlanTypeError(f"expected read_mds(check_hashes=) as True or False, got {type_and_repr(check_hashes)}")
    most = check_int("read_mds(max_shard_bytes=)", max_shard_bytes, 1)
    format = MdsFormat(check_hashes=check_hashes, max_shard_bytes=most)
    return Pipeline(MdsShards(name=name, format=format, paths=given_paths(paths), access=access_of(format, access)))


def read_npy(
    paths: Paths, *, arrays: Iterable[str] | None = None, name: str = "read_npy", **access: Unpack[AccessOptions]
) -> Pipeline[Any]:
    """Read the rows of NumPy files, along the first axis: arrays, or NumPy's scalars where it is the only axis.

    Of an npz file, whose arrays have as many rows, an item is a dict {name: row}. A local file is mapped into memory,
    and rows are read-only views of it; a remote one is read by ranges. What is deflated (`np.savez_compressed`) is
    unpacked from its start, by a resume and by each shard too. Arrays of Python objects are refused: they are pickles.

    Args:
      paths: as `read_lines`; npy and npz are told apart by their first bytes.
      arrays: names of those that are read of an npz file; None: all.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError (damaged, or no such array) has file and row.
    """
    return pipeline_of(NpyFormat(arrays=_names("read_npy(arrays=)", arrays)), paths, name, **access)


def read_hdf5(
    paths: Paths, *, datasets: Iterable[str] | None = None, name: str = "read_hdf5", **access: Unpack[AccessOptions]
) -> Pipeline[dict[str, Any]]:
    """Read the rows of HDF5 files, along the first axis: dicts {data set: row}. Needs `streamline-data[hdf5]`.

    The data sets of a file have as many rows. Rows are views of the chunks that were read, NumPy's scalars where the
    first axis is the only one, and str where they are UTF-8. One file is split over shards by ranges of rows. Of a
    remote file, the chunks are read by ranges.

    Args:
      paths: as `read_lines`.
      datasets: names of those that are read, with their groups: "train/x". None: all of the file.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError (damaged, or no such data set) has file and row.
      PlanError: h5py isn't installed.
    """
    check_installed("read_hdf5", "h5py", "h5py", "hdf5")
    return pipeline_of(Hdf5Format(datasets=_names("read_hdf5(datasets=)", datasets)), paths, name, **access)


def read_lance(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    version: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
    name: str = "read_lance",
) -> Pipeline[dict[str, Any]]:
    """Read the rows of Lance datasets as dicts. Needs `pip install 'streamline-data[lance]'`.

    A run reads one version of a dataset, which its snapshots name, and a resume reads on in that one, at its row,
    whatever was written since. One dataset is split over shards by ranges of rows. Lance reads local folders and
    stores itself, in threads of its own: `memory=`, `concurrency` and `cache_dir` don't count for it.

    Args:
      paths: a dataset, or several: folders, with globs, or s3://, gs:// and az:// URLs, as Lance takes them.
      columns: names of the columns that are wanted, in the order in which they are to come. None: all.
      filter: rows for which this isn't true are left out: `pc.field("year") > 2020`. It may look at columns that
        aren't wanted. Rows are read, and then left out: Lance's indices aren't used.
      version: the number, or the tag, of the version that is read. None: the newest when the pipeline is opened; of a
        resume, the snapshot's.
      storage_options: how stores are reached, by Lance's names; in no message and no snapshot.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value; pylance isn't installed.
      When the pipeline is opened: ReadError for what can't be opened. While it runs: ReadError for a version that is
      gone, DataError (damaged, or no such column) with the dataset, and the fragment.
    """
    check_installed("read_lance", "lance", "pylance", "lance")
    if version is not None and not isinstance(version, str):
        version = check_int("read_lance(version=)", version, 1)
    if storage_options is not None and not (
        isinstance(storage_options, Mapping)
        and all(isinstance(one, str) for pair in storage_options.items() for one in pair)
    ):
        raise PlanTypeError("read_lance(storage_options=) is a mapping of strings to strings, got something else")
    options = selecting("read_lance", columns, filter, None)
    format = LanceFormat(**options, version=version, storage_options=storage_options)
    return Pipeline(LanceDatasets(name=name, format=format, paths=given_paths(paths)))


@overload
def read_parquet(
    paths: Paths, *, batch_rows: None = None, **options: Unpack[_TableOptions]
) -> Pipeline[dict[str, Any]]: ...


@overload
def read_parquet(paths: Paths, *, batch_rows: int, **options: Unpack[_TableOptions]) -> Pipeline[pa.RecordBatch]: ...


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: int | None = None,
    name: str = "read_parquet",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    """Read the rows of Parquet files as dicts, or as record batches. Needs `pip install 'streamline-data[arrow]'`.

    Fetched are the footer, and then the wanted columns of the wanted row groups; a resume fetches one row group again.
    One file is split over shards by row groups.

    Args:
      paths: as `read_lines`.
      columns: the columns that are wanted, in the order in which they are to come; dotted names mean parts of structs:
        "image.width". None: all.
      filter: rows for which this isn't true are left out: `pc.field("year") > 2020`. Row groups in which it can't be
        true, as their statistics say, aren't fetched. It may look at columns that aren't wanted.
      batch_rows: items are `pyarrow.RecordBatch`es of at most so many rows, each of one row group and >= 1, so the last
        ones of a row group may be fewer; a filter takes rows out of them. None: items are rows, as `to_pylist()` of
        pyarrow gives them, but for times in nanoseconds: docs/parquet.md.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError (damaged, or other columns than the file before) has the file, and the row group.
      PlanError: pyarrow isn't installed.
    """
    options = selecting("read_parquet", columns, filter, batch_rows)
    return pipeline_of(ParquetFormat(**options), paths, name, **access)


def from_arrow(data: Any, *, name: str = "items") -> Pipeline[Any]:
    """Read the rows of a pyarrow Table, RecordBatch or dataset as dicts, with the values of `read_parquet`.

    A table is read by position, in slices, as by `from_items`; of an Array or a ChunkedArray, items are its values. A
    dataset of Parquet or Arrow files is read as `read_parquet` and `read_arrow` read its files, with its filter.

    Args:
      data: read, never changed.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: it is something else: a reader, which can be read once.
      PlanError: a table with two columns of one name; a dataset that its files alone don't tell: with columns of its
        paths, of other types, of another format, or elsewhere than on local disk.
    """
    if "FileSystemDataset" in (kinds := {base.__name__ for base in type(data).__mro__}):
        return pipeline_of(_format_of(data), data.files, name)
    if type(data).__module__.partition(".")[0] != "pyarrow" or not kinds & {*ARROW}:
        way = {"InMemoryDataset": "sl.from_arrow(dataset.to_table())", "RecordBatchReader": "its .read_all()"}
        hint = way.get(type(data).__name__, "sl.from_items(data) reads what has an index, another library's table, too")
        raise PlanTypeError(
            f"from_arrow reads a pyarrow Table, RecordBatch, Array or dataset, got {type(data).__name__}: {hint}"
        )
    return Pipeline(Items(name=name, items=rows_of(data)))


def _format_of(dataset: Any) -> Format[Any]:
    """Return what reads a pyarrow dataset from its files alone."""
    formats: dict[str, type[ParquetFormat | ArrowFormat]] = {"parquet": ParquetFormat, "arrow": ArrowFormat}
    format = formats.get(dataset.format.default_extname)
    why = None
    if format is None:
        why = (
            f"the format of its files is {dataset.format.default_extname!r}: sl.read_csv(dataset.files), sl.read_jsonl"
        )
    elif type(dataset.filesystem).__name__ != "LocalFileSystem":
        why = "its files are elsewhere: sl.read_parquet('s3://bucket/*.parquet')"
    elif not _same_schema(dataset):
        why = "its files have other columns, or other types: sl.from_arrow(dataset.to_table())"
    if format is None or why is not None:
        raise PlanError(f"from_arrow reads a dataset of local Parquet or Arrow files as they are, and {why}")
    wanted = dataset._scan_options.get("filter")
    return format(**selecting("from_arrow", dataset.schema.names, wanted, None))


def _same_schema(dataset: Any) -> bool:
    """Whether a dataset's first file has its columns: some may be of its paths, or cast."""
    files = dataset.files
    there = dataset.format.inspect(files[0], dataset.filesystem) if files else dataset.schema
    names = set(there.names)
    return all(column.name in names and there.field(column.name).type == column.type for column in dataset.schema)


def selecting(function: str, columns: object, filter: object, batch_rows: object) -> dict[str, Any]:
    """Return the options of a `Columnar` format, checked."""
    check_installed(function, "pyarrow", "pyarrow", "arrow")
    if batch_rows is not None:
        batch_rows = check_int(f"{function}(batch_rows=)", batch_rows, 1)
    return {
        "columns": _names(f"{function}(columns=)", columns),
        "predicate": _predicate(f"{function}(filter=)", filter),
        "batch_rows": batch_rows,
    }


def _names(option: str, names: object) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = None if isinstance(names, str | bytes) or not isinstance(names, Iterable) else tuple(names)
    if found is None or not all(isinstance(name, str) for name in found):
        raise PlanTypeError(f'{option} is a list of names, ["x", "y"], got {type_and_repr(names)}')
    if not found or len(set(found)) < len(found):
        twice = next((f": {name!r} is there twice" for at, name in enumerate(found) if name in found[:at]), "")
        raise PlanError(f"{option} is at least one name, each once, got {list(found)}{twice}; None means all")
    return found


def _predicate(option: str, expression: object) -> Predicate | None:
    if expression is None:
        return None
    import pyarrow.compute as pc  # imported already, where there is an expression

    if not isinstance(expression, pc.Expression):
        hint = "; pyarrow.parquet.filters_to_expression makes one of a list" if isinstance(expression, list) else ""
        raise PlanTypeError(f"{option} is a pyarrow.compute.Expression, got {type_and_repr(expression)}{hint}")
    if "FieldPath(" in str(expression):
        raise PlanError(f"{option} names its columns, got {expression}: a number is of another column elsewhere")
    return Predicate.of(expression)


@overload
def read_tar(
    paths: Paths, *, group: Literal[True] = True, **options: Unpack[_TarOptions]
) -> Pipeline[dict[str, Any]]: ...


@overload
def read_tar(paths: Paths, *, group: Literal[False], **options: Unpack[_TarOptions]) -> Pipeline[Member]: ...


@overload
def read_tar(paths: Paths, *, group: bool, **options: Unpack[_TarOptions]) -> Pipeline[Any]: ...


def read_tar(
    paths: Paths,
    *,
    group: bool = True,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    name: str = "read_tar",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    """Read the samples of tar archives (WebDataset's): consecutive members that share a key.

    The key of "train/0001.seg.png" is "train/0001", its field "seg.png", in lower case. An item is a dict: "__key__",
    and the bytes of each field. Members without a key ("README", ".hidden", "__meta__/…"), folders, symbolic links and
    devices are passed over; hard links, sparse files, and a second member for a field are errors.

    A resume goes on at the byte; in a compressed archive, it decompresses what is before it once more. Split into
    shards ("contiguous"), each owns the samples that begin in its share of the bytes; to find the first one, each
    process walks once over the headers before it, past the data where they are long.

    Args:
      paths: as `read_lines`.
      group: False: each file in the archive is an item, whatever it is called, with its `name` and `data`.
      max_sample_bytes: a sample with more data is an error; >= 1.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError (damaged, or cut short) has file, member and byte.
    """
    if not isinstance(group, bool):
        raise PlanTypeError(f"expected read_tar(group=) as True or False, got {type_and_repr(group)}")
    max_sample_bytes = check_int("read_tar(max_sample_bytes=)", max_sample_bytes, 1)
    return pipeline_of(TarFormat(group=group, max_sample_bytes=max_sample_bytes), paths, name, **access)


def read_tfrecord(
    paths: Paths,
    *,
    max_record_bytes: int = MAX_TFRECORD_BYTES,
    name: str = "read_tfrecord",
    **access: Unpack[AccessOptions],
) -> Pipeline[bytes]:
    """Read the records of TFRecord files, as bytes; `.map(sl.decode.example())` parses them.

    Both checksums of each record are checked. A resume goes on at the byte; in a compressed file, it decompresses what
    is before it once more. Nothing in a file says where its records begin, so one file can't be split over shards.
    Needs `pip install 'streamline-data[tfrecord]'`.

    Args:
      paths: as `read_lines`.
      max_record_bytes: a longer record is an error; >= 1.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a DataError has file, record and byte. Where a length is damaged, `on_error="skip"` leaves out
      the rest of the file, since nothing in it can be found.
      PlanError: google-crc32c isn't installed.
    """
    check_installed("read_tfrecord", "google_crc32c", "google-crc32c", "tfrecord")
    max_record_bytes = check_int("read_tfrecord(max_record_bytes=)", max_record_bytes, 1)
    return pipeline_of(TFRecordFormat(max_record_bytes=max_record_bytes), paths, name, **access)


def read_files(paths: Paths, *, name: str = "read_files", **access: Unpack[AccessOptions]) -> Pipeline[WholeFile]:
    """Read whole files: one item for each, in order, with its `path` and its `data`, bytes as they are.

    A resume goes on with the next file. Many files are fetched at a time, `concurrency=` of them. One file is one item,
    so it can't be split over shards.

    Args:
      paths: as `read_lines`; nothing is unpacked.
      name, access: as `read_lines`.

    Raises:
      As `read_lines`; a ReadError of a file comes after the items before it, and `on_error="skip"` leaves it out.
    """
    return pipeline_of(WholeFormat(), paths, name, **access)


class _StreamHttpOptions(TypedDict, total=False):
    name: str
    http: HttpOptions | None
    idle_timeout_s: float
    give_up_s: float
    max_item_bytes: int
    max_ahead: int
    max_ahead_bytes: int
    partitioned: bool
    journal: str | PathLike[str] | None


@overload
def stream_http(url: str, *, framing: Literal["lines"], **options: Unpack[_StreamHttpOptions]) -> Pipeline[str]: ...


@overload
def stream_http(
    url: str, *, framing: Literal["sse"], **options: Unpack[_StreamHttpOptions]
) -> Pipeline[ServerSentEvent]: ...


@overload
def stream_http(url: str, *, framing: Literal["bytes"], **options: Unpack[_StreamHttpOptions]) -> Pipeline[bytes]: ...


@overload
def stream_http(url: str, *, framing: Literal["jsonl"], **options: Unpack[_StreamHttpOptions]) -> Pipeline[Any]: ...


def stream_http(
    url: str,
    *,
    framing: Framing,
    name: str = "stream_http",
    http: HttpOptions | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    give_up_s: float = GIVE_UP_S,
    max_item_bytes: int = MAX_ITEM_BYTES,
    max_ahead: int = MAX_AHEAD,
    max_ahead_bytes: int = MAX_AHEAD_BYTES,
    partitioned: bool = False,
    journal: str | PathLike[str] | None = None,
) -> Pipeline[Any]:
    """Read an endless HTTP response: a live source, read once and journalled as `from_stream`.

    It connects again whenever a connection ends, fails, or is silent for too long, after a pause that doubles while
    nothing comes. What a dropped connection cuts off is never an item. With server-sent events, the server is told the
    last id that was read, after a resume too, so nothing is lost or doubled if it goes on from there; for the other
    framings HTTP has no such word, and what the server sends between two connections is gone.

    Args:
      url: one http(s) URL.
      framing: "lines": text, each without its end; "jsonl": a JSON value a line, blank lines skipped; "sse":
        server-sent events, as `ServerSentEvent`; "bytes": as they come.
      name: its part of a state is kept under it.
      http: how it is asked for: headers, retries until the server has answered once.
      idle_timeout_s: seconds of silence after which a connection counts as dropped; `math.inf`: none.
      give_up_s: seconds for which it may fail without an answer, once it has had one; `math.inf`: for ever.
      max_item_bytes: a longer line or event is an error.
      max_ahead, max_ahead_bytes, partitioned, journal: see `from_stream`.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
      While it runs: ReadError for a server that refuses (401, 404, ...) or has failed for too long, DataError for what
      can't be an item, and as `from_stream`.
    """
    request = EndlessRequest(
        url=url, framing=framing, http=http, idle_timeout_s=idle_timeout_s, give_up_s=give_up_s,
        max_item_bytes=max_item_bytes,
    )  # fmt: skip
    codec = codec_of(framing)
    return Pipeline(
        live_of(
            name, HttpFeed(request), encode=codec.encode, decode=codec.decode, max_ahead=max_ahead,
            max_ahead_bytes=max_ahead_bytes, partitioned=partitioned, journal=journal,
        )
    )  # fmt: skip


def pipeline_of(
    format: Format[T], paths: Paths, name: str | None = None, **access: Unpack[AccessOptions]
) -> Pipeline[T]:
    """Return the pipeline that reads files of a format, one of your own, too; it is named after its kind by default.

    Raises:
      PlanTypeError: an option that there is none of.
      As `given_paths` and `Access`.
    """
    found = access_of(format, access)
    return Pipeline(Files(name=name or format.kind, format=format, paths=given_paths(paths), access=found))


def access_of(format: Format[Any], access: Mapping[str, Any]) -> Access:
    """Return the access to a format's files, of the options that were given. As `pipeline_of`."""
    if unknown := sorted(access.keys() - AccessOptions.__annotations__.keys()):
        known = ", ".join(f"{option}=" for option in AccessOptions.__annotations__)
        raise PlanTypeError(f"{format.kind} takes no {unknown[0]}=; beside those of its format it takes {known}")
    return Access(**access)
