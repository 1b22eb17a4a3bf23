"""Items to bytes: how each format that can be written makes a shard of items, one by one, in bounded memory.

The counterparts of the readers of the same formats: what these give is what was written, but for what JSON and Arrow
have no word for. What an encoder does depends on the items of its shard and on `common` only, so a shard that is
written again after a kill has the same bytes.
"""

from __future__ import annotations

import base64
import math
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import msgspec

from streamline.core.item_codec import dtype_of, dtype_to_json
from streamline.core.lazy_numpy import has_more, loaded_np, np
from streamline.core.options import type_and_repr
from streamline.core.state import Json
from streamline.core.text import safe_text
from streamline.core.tree import nbytes, parts_of
from streamline.errors import PlanError, PlanTypeError, ReadError
from streamline.io.formats.compression import WRITABLE, Compressor
from streamline.io.formats.tar import part_of
from streamline.io.formats.tar_reader import BLOCK, TarHeader, rounded
from streamline.io.storage.base import ShardFile

if TYPE_CHECKING:
    import pyarrow as pa

WRITE_BYTES = 256 * 1024
"""What is gathered for one write, unless one item is larger: it stays in a core's own cache."""

FINITE = frozenset({str, int, bool, type(None)})
"""Types of values in which no NaN is. To look for it in the JSON takes as long as to make that."""

STR = frozenset({str})
PLAIN = FINITE | {float, bytes}  # values in which there are no keys

GROUP_BYTES = 16 * 1024 * 1024
"""A row group of a Parquet file, in memory: a resume of a reader fetches one again."""

SLICES_A_GROUP = 8
"""Pieces of a row group, that rows become columns in: rows as Python objects take ten times the memory."""

INFERRED_ROWS = 1000
"""Rows out of which the columns of a job are inferred, unless fewer make a shard."""


class UnwritableItemError(Exception):
    """An item that can't be written; says why. `ago`: which one; 0 is the last that was added."""

    def __init__(self, reason: str, ago: int = 0) -> None:
        super().__init__(reason)
        self.ago = ago


class Encoder(ABC):
    """Writes a shard's items. `common`: what all shards of a job share, as JSON; None: nothing, or not known yet."""

    common: Json = None

    @abstractmethod
    def add(self, item: Any) -> int:
        """Take the next item; return how many bytes the shard has so far.

        Raises:
          UnwritableItemError: this, or an earlier one, can't be written.
          OSError: what the target raises.
        """

    @abstractmethod
    def finish(self) -> None:
        """Write what is left, and what ends a file. Raises as `add`."""

    def abandon(self) -> None:  # noqa: B027 - most hold nothing that writes by itself
        """Write nothing more: the target is gone."""


@dataclass(frozen=True)
class OutputFormat(ABC):
    """How shards are written.

    Attributes:
      kind: "jsonl".
      compressions: that it has.
      compression: one of these; None: as is usual for the format.
    """

    kind: ClassVar[str]
    compressions: ClassVar[tuple[str, ...]] = ()

    compression: str | None = field(default=None, kw_only=True)

    @property
    def suffix(self) -> str:
        """What the names of its files end with: ".jsonl.gz"."""
        return f".{self.kind}"

    def compressed(self, compression: object) -> Self:
        """Return it with this compression; a PlanTypeError or PlanError if it has no such, or that isn't installed."""
        option = f"write_{self.kind}(compression=)"
        if not self.compressions:
            raise PlanError(f"{option}: {self.kind} files are mapped into memory as they are: leave it out")
        if compression not in self.compressions:
            wrong, shown = (
                (PlanError, repr(compression))
                if isinstance(compression, str)
                else (PlanTypeError, type_and_repr(compression))
            )
            raise wrong(f"{option} is None or one of {', '.join(map(repr, self.compressions))}, got {shown}")
        return replace(self, compression=compression)

    @abstractmethod
    def encoder(self, target: ShardFile, shard_bytes: int, common: Json) -> Encoder:
        """Return what writes a shard of about so many bytes; `common` is that of the shards before, or None."""


Write: TypeAlias = Callable[[bytes | memoryview], object]
"""Appends bytes to a shard."""


class StreamOutput(OutputFormat):
    """A format whose files are read from their start: they may be compressed, each as one stream."""

    compressions = tuple(WRITABLE)

    @property
    def suffix(self) -> str:
        return super().suffix + ("" if self.compression is None else WRITABLE[self.compression][0])

    @abstractmethod
    def plain(self, write: Write) -> Encoder:
        """Return what writes a shard that isn't compressed."""

    def compressed(self, compression: object) -> Self:
        found = super().compressed(compression)
        try:
            WRITABLE[str(compression)][1]()
        except ReadError as error:
            raise PlanError(f"write_{self.kind}(compression={compression!r}): {error}") from error
        return found

    def encoder(self, target: ShardFile, shard_bytes: int, common: Json) -> Encoder:
        if self.compression is None:
            return self.plain(target.write)
        return _Compressed(self.plain, WRITABLE[self.compression][1](), target.write)


class _Compressed(Encoder):
    """Compresses what another encoder writes; counts bytes as that does, before it."""

    def __init__(self, plain: Callable[[Write], Encoder], stream: Compressor, write: Write) -> None:
        self._stream = stream
        self._write = write
        self._encoder = plain(self._compress)

    def add(self, item: Any) -> int:
        return self._encoder.add(item)

    def finish(self) -> None:
        self._encoder.finish()
        self._write(self._stream.flush())

    def _compress(self, content: bytes | memoryview) -> None:
        if part := self._stream.compress(content):
            self._write(part)


# Lines of JSON --------------------------------------------------------------------------------------------------------


class JsonlOutput(StreamOutput):
    """A JSON value a line, as msgspec writes it."""

    kind = "jsonl"

    def plain(self, write: Write) -> Encoder:
        return _JsonLines(write)


class _JsonLines(Encoder):
    def __init__(self, write: Write) -> None:
        self._write = write
        self._encode_into = msgspec.json.Encoder(enc_hook=_plain).encode_into
        self._lines = bytearray()  # an object for each line would take half of the time
        self._written = 0

    def add(self, item: Any) -> int:
        lines = self._lines
        start = len(lines)
        try:
            self._encode_into(item, lines, start)
        except Exception as error:
            raise UnwritableItemError(str(error) or type(error).__name__) from error
        flat = type(item) is dict and FINITE.issuperset(map(type, item.values()))
        if not flat and lines.find(b"null", start) >= 0 and (what := _not_finite(item)):
            raise UnwritableItemError(f"it holds {what}, which JSON has no word for: write None for it, or a string")
        for key in _odd_keys(item):
            raise UnwritableItemError(f"it has the key {key!r}, which would come back as a string: write str(key)")
        lines += b"\n"
        size = self._written + len(lines)
        if len(lines) >= WRITE_BYTES:
            self.finish()
        return size

    def finish(self) -> None:
        with memoryview(self._lines) as lines:
            self._write(lines)
        self._written += len(self._lines)
        self._lines.clear()


def _plain(value: Any) -> Any:
    """Return what msgspec doesn't know as what it knows."""
    if isinstance(value, loaded_np.generic):
        found = value.item()  # of nanoseconds, a number of them
        return str(value) if value.dtype.kind in "mM" and isinstance(found, int) else found
    if isinstance(value, loaded_np.ndarray):
        return value.tolist() if value.dtype.kind not in "mM" else list(value)
    raise TypeError(f"JSON has no word for a {type(value).__module__}.{type(value).__qualname__}: .map it to one")


def _odd_keys(value: Any) -> Iterator[Any]:
    """Yield the keys in an item that are no strings, at any depth."""
    if isinstance(value, Mapping) and not STR.issuperset(map(type, value)):
        yield from (key for key in value if not isinstance(key, str))
    parts = value.values() if type(value) is dict else _within(value)
    if not PLAIN.issuperset(map(type, parts)):
        for part in parts:
            yield from _odd_keys(part)


def _within(value: Any) -> Collection[Any]:
    """Return the parts of what JSON makes an object or a list of; none of anything else."""
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value).values()
    return [part for _, part in parts_of(value) or ()]


def _not_finite(value: Any) -> str | None:
    """Return the float in an item that JSON would write as null; None: there is none."""
    if isinstance(value, float | loaded_np.floating):
        return None if math.isfinite(value) else repr(float(value))
    array = isinstance(value, loaded_np.ndarray)
    parts = (value.tolist() if value.ndim else [value.item()]) if array else _within(value)
    return next((found for part in parts if (found := _not_finite(part))), None)


# Tar archives ---------------------------------------------------------------------------------------------------------


class TarOutput(StreamOutput):
    """WebDataset's samples: a member for each field of a dict, whose "__key__" they begin with."""

    kind = "tar"

    def plain(self, write: Write) -> Encoder:
        return _TarSamples(write)


class _TarSamples(Encoder):
    def __init__(self, write: Write) -> None:
        self._append = write
        self._key = ""
        self._parts: list[bytes] = []
        self._size = self._written = 0

    def add(self, item: Any) -> int:
        key = item.get("__key__") if isinstance(item, Mapping) else None
        if not isinstance(key, str) or len(item) < 2:
            raise UnwritableItemError(
                'expected a dict as read_tar gives it, {"__key__": "train/0001", "jpg": bytes, …}: .map it to one'
            )
        if key == self._key:
            raise UnwritableItemError(f"its __key__, {key!r}, is that of the sample before: both would be read as one")
        parts = [part for name, data in item.items() if name != "__key__" for part in _member(key, name, data)]
        self._key = key
        self._parts += parts
        self._size += sum(map(len, parts))
        if self._size - self._written >= WRITE_BYTES:
            self._write()
        return self._size

    def finish(self) -> None:
        self._parts.append(bytes(2 * BLOCK))
        self._write()

    def _write(self) -> None:
        self._append(b"".join(self._parts))
        self._parts.clear()
        self._written = self._size


def _member(key: str, name: object, data: object) -> Iterator[bytes]:
    content = data.encode() if isinstance(data, str) else data
    if not isinstance(content, bytes | bytearray | memoryview):
        raise UnwritableItemError(
            f"its field {name!r} is of type {type(data).__name__}, expected bytes or str: .map it"
        )
    content = bytes(content)
    info = tarfile.TarInfo(f"{key}.{name}")
    info.size = len(content)
    header = TarHeader(info.name, info.size, regular=True, link="")
    if "\0" in info.name or part_of(header, group=True) != (key, name):  # a NUL ends a name
        raise UnwritableItemError(
            f"the member {info.name!r} would be read as another sample or field: the last part of a __key__ has no "
            "dot and isn't empty, its first is not like __this__, fields are in lower case, and neither has a NUL"
        )
    try:
        yield info.tobuf(tarfile.PAX_FORMAT)
    except (ValueError, UnicodeError) as error:
        raise UnwritableItemError(f"the member {info.name!r} can't be in an archive: {error}") from error
    yield content
    yield bytes(rounded(len(content)) - len(content))


# NumPy files ----------------------------------------------------------------------------------------------------------


class NpyOutput(OutputFormat):
    """Arrays of one shape and type, stacked along a new first axis; or numbers."""

    kind = "npy"

    def encoder(self, target: ShardFile, shard_bytes: int, common: Json) -> Encoder:
        return _NpyRows(target, common)


class _NpyRows(Encoder):
    def __init__(self, target: ShardFile, common: Json) -> None:
        self._target = target
        self.common = common
        self._rows: list[bytes] = []
        self._count = self._size = self._written = 0

    def add(self, item: Any) -> int:
        if not isinstance(item, loaded_np.ndarray | loaded_np.generic | bool | int | float | complex):
            raise UnwritableItemError("expected a NumPy array or a number: .map it to one")
        row = np.asanyarray(item)
        if (descr := dtype_to_json(row)) is None:
            raise UnwritableItemError(
                "it is of Python objects, masked or of another class, or of fields that overlap or aren't in order, "
                "which npy files can't hold: .map it to numbers, .filled(…), or np.lib.recfunctions.repack_fields(…)"
            )
        common = {"descr": descr, "shape": list(row.shape)}
        self.common = self.common or common
        if common != self.common:
            raise UnwritableItemError(
                f"expected {_shape_text(self.common)}, as all rows are, got {_shape_text(common)}"
            )
        if not self._count:
            self._put(self._header())
        self._put(np.ascontiguousarray(row).tobytes())
        self._count += 1
        if self._size - self._written >= WRITE_BYTES:
            self._write()
        return self._size

    def finish(self) -> None:
        self._write()
        self._target.write_start(self._header())

    def _put(self, content: bytes) -> None:
        self._rows.append(content)
        self._size += len(content)

    def _write(self) -> None:
        self._target.write(b"".join(self._rows))
        self._rows.clear()
        self._written = self._size

    def _header(self) -> bytes:
        """Return the header for the rows so far; it leaves room for the number of rows to become larger."""
        made = BytesIO()
        shape = (self._count, *self.common["shape"])
        descr = np.lib.format.dtype_to_descr(dtype_of(self.common["descr"]))
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        try:
            np.lib.format.write_array_header_2_0(made, header)
        except UnicodeEncodeError as error:
            raise UnwritableItemError(f"the names of its fields are more than Latin letters: {error}") from error
        return made.getvalue()


def _shape_text(common: Json) -> str:
    return f"shape {tuple(common['shape'])} of {dtype_of(common['descr'])}"


# Parquet files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParquetOutput(OutputFormat):
    """Rows as dicts, or record batches; a `schema` of None is inferred from the first rows."""

    kind = "parquet"
    compressions = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")

    schema: pa.Schema | None = field(default=None)

    def __post_init__(self) -> None:
        import pyarrow as pa

        if self.schema is not None and not isinstance(self.schema, pa.Schema):
            raise PlanTypeError(f"write_parquet(schema=) is a pyarrow.Schema, got {type_and_repr(self.schema)}")

    def compressed(self, compression: object) -> Self:
        import pyarrow as pa

        found = super().compressed(compression)
        if compression != "none" and not pa.Codec.is_available(str(compression)):
            raise PlanError(f"write_parquet(compression={compression!r}): this pyarrow was built without it")
        return found

    def encoder(self, target: ShardFile, shard_bytes: int, common: Json) -> Encoder:
        compression = self.compression or "snappy"
        return _ParquetRows(target, min(GROUP_BYTES, shard_bytes), common or _common(self.schema, 1), compression)


def _common(schema: pa.Schema | None, slice_rows: int) -> Json:
    if schema is None:
        return None
    return {"schema": base64.b64encode(schema.serialize()).decode(), "slice_rows": slice_rows}


class _ParquetRows(Encoder):
    """Gathers rows, makes columns of a slice of them at a time, and a row group of some slices."""

    def __init__(self, target: ShardFile, group_bytes: int, common: Json, compression: str) -> None:
        import pyarrow as pa

        self._batches = pa.RecordBatch
        self._target = target
        self._group_bytes = group_bytes
        self._compression = compression
        self._schema: pa.Schema | None = None
        self._rows: list[Any] = []
        self._most_rows, self._bytes = INFERRED_ROWS, 0
        self._slices: list[pa.RecordBatch] = []
        self._slices_bytes = 0
        self._file = _AsFile(target)
        self._writer: Any = None
        if common is not None:
            self._learn(common)

    def _learn(self, common: Json) -> None:
        import pyarrow as pa

        self.common = common
        self._schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(common["schema"])))
        self._most_rows = common["slice_rows"]
        self._names = set(self._schema.names)

    def add(self, item: Any) -> int:
        if isinstance(item, dict):
            self._rows.append(item)
            if self._schema is None:
                self._bytes += nbytes(item)
            if len(self._rows) >= self._most_rows or self._bytes >= self._group_bytes:
                self._make_columns()
        elif isinstance(item, self._batches):
            self._make_columns()
            self._take(item)
        else:
            raise UnwritableItemError("expected a row as a dict by column, or a pyarrow.RecordBatch: .map it to one")
        return self._target.size

    def finish(self) -> None:
        self._make_columns()
        self._write_group()
        self._writer.close()

    def abandon(self) -> None:
        self._file.abandoned = True

    def _make_columns(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self._take_rows(rows)

    def _take_rows(self, rows: list[Any]) -> None:
        import pyarrow as pa

        names = rows[0].keys() if self._schema is None else self._names
        if not names or not STR.issuperset(map(type, names)):
            raise UnwritableItemError("expected columns, each with a str as its name", len(rows) - 1)
        for at, row in enumerate(rows):
            if odd := row.keys() ^ names:
                raise UnwritableItemError(_odd(odd, names), len(rows) - 1 - at)
        if odd := {*filter(has_more, {type(value) for row in rows for value in row.values()})}:
            ago = next(ago for ago, row in enumerate(reversed(rows)) if odd & {*map(type, row.values())})
            raise UnwritableItemError("it holds a masked array, or one of another class: .filled() it", ago)
        try:
            batch = pa.RecordBatch.from_pylist(rows, schema=self._schema)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._culprit(rows, error) from error
        nested = {column.name: column.type for column in batch.schema if _has_struct(column.type)}
        for at, row in enumerate(rows if nested else ()):
            for where, there in (found for name, kind in nested.items() for found in _differing(row[name], kind, name)):
                raise UnwritableItemError(_odd([where], () if there else [where]), len(rows) - 1 - at)
        self._take(batch)

    def _culprit(self, rows: list[Any], error: Exception) -> UnwritableItemError:
        """Return what names the first row that doesn't fit."""
        import pyarrow as pa

        for at in range(len(rows)):
            some = rows[: at + 1] if self._schema is None else rows[at : at + 1]
            try:
                pa.RecordBatch.from_pylist(some, schema=self._schema)
            except Exception as own:
                hint = "" if self._schema is None else ": give schema= where the first rows don't show all"
                return UnwritableItemError(f"{safe_text(own, str)}{hint}", len(rows) - 1 - at)
        return UnwritableItemError(safe_text(error, str))

    def _take(self, batch: pa.RecordBatch) -> None:
        import pyarrow.parquet as pq

        if self._writer is None:
            _check_schema(batch.schema)
        if self._schema is None:
            rows = max(1, self._group_bytes // SLICES_A_GROUP * max(1, batch.num_rows) // max(1, batch.nbytes))
            self._learn(_common(batch.schema, min(rows, INFERRED_ROWS)))
        if not batch.schema.equals(self._schema):
            raise UnwritableItemError(f"expected the columns {_columns(self._schema)}, got {_columns(batch.schema)}")
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, self._schema, compression=self._compression)
        self._slices.append(batch)
        self._slices_bytes += batch.nbytes
        if self._slices_bytes >= self._group_bytes:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        if self._slices:
            self._writer.write_table(pa.Table.from_batches(self._slices))
        self._slices, self._slices_bytes = [], 0


def _check_schema(schema: pa.Schema) -> None:
    """Refuse columns that no reader would find again: of one name, structs without fields, too deeply nested ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(set(schema.names)) < max(1, len(schema)):
        raise UnwritableItemError(f"expected columns, each with a name of its own, got {schema.names}")
    made = pa.BufferOutputStream()
    try:
        pq.write_table(schema.empty_table(), made)
        pq.read_schema(pa.BufferReader(made.getvalue()))
    except (pa.ArrowException, OSError) as error:
        raise UnwritableItemError(safe_text(error, str)) from error


def _columns(schema: Any) -> str:
    return ", ".join(f"{column.name}: {column.type}" for column in schema)


def _odd(odd: Collection[str], names: Collection[str]) -> str:
    name = min(odd, key=str)
    what = "lacks the column" if name in names else "has a column that the others lack,"
    return f"it {what} {name!r}: all rows have the same, None where there is nothing"


def _has_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) or any(_has_struct(kind.field(at).type) for at in range(kind.num_fields))


def _differing(value: Any, kind: pa.DataType, where: str) -> Iterator[tuple[str, bool]]:
    """Yield the keys of nested dicts, and whether they are there: those that a column of this type has no room for,
    which pyarrow would leave out, and those that the dicts lack, which it would make."""
    import pyarrow as pa

    if isinstance(value, dict) and pa.types.is_struct(kind):
        fields = {kind.field(at).name: kind.field(at).type for at in range(kind.num_fields)}
        yield from ((f"{where}.{key}", key in value) for key in value.keys() ^ fields.keys())
        for key in value.keys() & fields.keys():
            yield from _differing(value[key], fields[key], f"{where}.{key}")
    elif isinstance(value, list | tuple) and pa.types.is_nested(kind) and kind.num_fields == 1:
        for part in value:
            yield from _differing(part, kind.field(0).type, where)


class _AsFile:
    """A target, as pyarrow writes to it."""

    closed = False
    mode = "wb"

    def __init__(self, target: ShardFile) -> None:
        self._target = target
        self.abandoned = False

    def write(self, content: bytes) -> int:
        if not self.abandoned:  # a writer that is dropped writes the end of its file
            self._target.write(content)
        return len(content)

    def tell(self) -> int:
        return self._target.size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The target is closed by others."""
