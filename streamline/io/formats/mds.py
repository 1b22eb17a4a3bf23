"""MDS shards, as MosaicML's streaming writes them: samples from any one on.

A shard is the number of its samples, the byte at which each begins (and the last one ends), a JSON text that describes
its columns, and the samples. A sample is the sizes of those columns whose size isn't fixed, and the columns. All
numbers are little-endian, of 32 bits (mosaicml/streaming, streaming/base/format/mds/writer.py).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import msgspec

from streamline.core.item_codec import decode_json
from streamline.core.lazy_numpy import np
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import InThread
from streamline.io.formats.byte_stream import pieces
from streamline.io.formats.rows import BLOCK_BYTES, BLOCK_ROWS, RowFormat, RowTable

SUFFIX = ".mds"

MAX_SHARD_BYTES = 256 * 2**20
"""Of a compressed shard, unpacked: streaming writes 64 MiB by default."""

HEAD_BYTES = 64 * 1024
"""Read at first, in one request: what it says of itself, if it has fewer than some 16,000 samples."""

DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
"""Of arrays, by the byte that says it; the ones below 4 are those of an array's shape."""

SHAPES = {0: "u1", 1: "u2", 2: "u4", 3: "u8"}

KINDS = {"u": "uint", "i": "int", "f": "float"}

SCALARS = {f"{KINDS[code[0]]}{8 * int(code[1])}": code for code in DTYPES.values()}
"""The same by their names: "uint8"."""

PLAIN: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda data: data.decode(),
    "int": lambda data: int(np.frombuffer(data, "<i8", 1)[0]),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    "jpeg": bytes,
    "jpeg_array": bytes,
    "jpegarray": bytes,
    "png": bytes,
}


class Columns(msgspec.Struct):
    """What a shard says of its columns."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]


@dataclass(frozen=True, kw_only=True)
class MdsFormat(RowFormat):
    """MDS shards, whose items are dicts by column.

    Attributes:
      check_hashes: whether shards that aren't compressed are read whole, too, and checked.
      max_shard_bytes: of one that is compressed, unpacked.
      hashes: of their contents, by path and algorithm, as far as an index has them.
    """

    kind: ClassVar[str] = "read_mds"
    reread: ClassVar[str] = "looks up its sample's byte (compressed: unpacks the shard)"

    check_hashes: bool = False
    max_shard_bytes: int = MAX_SHARD_BYTES
    hashes: Mapping[str, Mapping[str, str]] = field(default_factory=dict, compare=False, repr=False)

    async def table(self, file: File, in_thread: InThread[Any]) -> MdsTable:
        packed = None
        if self.check_hashes or not file.path.partition("?")[0].endswith(SUFFIX):
            packed = whole = await _unpack(file, self.max_shard_bytes)
            await in_thread(lambda: check_hash(whole, self.hashes.get(file.path, {}), needed=self.check_hashes))
        size = await file.size("reading an MDS shard") if packed is None else len(packed)

        head = await file.read(0, min(size, HEAD_BYTES)) if packed is None else packed

        async def read(start: int, stop: int) -> bytes | bytearray:
            if stop > size:
                raise DataError(f"it is no MDS shard, or was cut short: expected {stop:,} bytes or more, got {size:,}")
            return head[start:stop] if stop <= len(head) else await file.read(start, stop)

        count = int.from_bytes(await read(0, 4), "little")
        begin = 4 + 4 * (count + 1)
        if int.from_bytes(await read(4, 8), "little") < begin:
            raise DataError("it is no MDS shard, or is damaged: its first sample begins before the list of them ends")
        starts = np.frombuffer(await read(4, begin), "<u4").astype("i8")
        if (np.diff(starts) < 0).any():
            raise DataError("it is no MDS shard, or is damaged: the bytes at which its samples begin can't be")
        text = await read(begin, int(starts[0]))
        named = decode_json(text, _columns, lambda why: DataError(f"what it says of its columns can't be read: {why}"))
        good = int(np.searchsorted(starts[1:], size, side="right"))
        sizes = struct.Struct(f"<{sum(not fixed for _, _, fixed in named)}I")
        rows = len(starts) - 1
        return MdsTable(file, packed, starts, named, sizes, rows=rows, missing=rows - good)


def check_hash(content: bytes | bytearray, expected: Mapping[str, str], *, needed: bool) -> None:
    """Compare a shard's content with the first of its hashes that can be computed here."""
    known = next((name for name in expected if name in hashlib.algorithms_guaranteed), None)
    if known is None:
        if needed:
            raise DataError(
                f"check_hashes= needs a hash of it in an index.json, one of hashlib's, got {list(expected)}: write the "
                'shards with hashes=["sha1"]'
            )
        return
    if (found := hashlib.new(known, content).hexdigest()) != expected[known]:
        raise DataError(f"it is damaged, or was replaced: its {known} is {found}, expected {expected[known]}")


async def _unpack(file: File, most: int) -> bytearray:
    """Return all of a shard, which may be compressed: one that isn't may be as large as it is."""
    whole, most = bytearray(), max(most, file.part.found.size or 0)
    async with aclosing(pieces(file, 0)) as unpacked:
        async for data, _ in unpacked:
            whole += data
            if len(whole) > most:
                raise DataError(f"it unpacks to more than {most:,} bytes: raise max_shard_bytes, if that is no damage")
    return whole


@dataclass(frozen=True)
class MdsTable(RowTable):
    """The samples of a shard.

    Attributes:
      packed: all of it, where it was compressed.
      starts: the byte at which each sample begins, and the last one ends.
      columns: name, decoder, and size where it is fixed.
      sizes: the others, as a sample begins with them.
    """

    file: File
    packed: bytearray | None
    starts: np.ndarray[Any, np.dtype[np.int64]]
    columns: list[tuple[str, Callable[[bytes], Any], int | None]]
    sizes: struct.Struct

    async def blocks(self, start: int, stop: int) -> AsyncGenerator[Sequence[Sequence[Any]], None]:
        cuts, starts = list(self._cuts(start, stop)), self.starts
        if self.packed is not None:
            for first, last in cuts:
                yield [self._cut(self.packed, 0, first, last)]
            return
        spans = [(int(starts[first]), int(starts[last])) for first, last in cuts]
        async with aclosing(self.file.ranges(spans)) as ranges:
            for (first, last), (begin, _) in zip(cuts, spans, strict=True):
                yield [self._cut(await anext(ranges), begin, first, last)]

    def _cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the samples of each block."""
        while start < stop:
            most = int(np.searchsorted(self.starts, self.starts[start] + BLOCK_BYTES, side="right")) - 1
            last = min(stop, start + BLOCK_ROWS, max(start + 1, most))
            yield start, last
            start = last

    def _cut(self, data: bytes | bytearray, begin: int, first: int, last: int) -> list[memoryview]:
        ends, view = (self.starts[first : last + 1] - begin).tolist(), memoryview(data)
        return [view[at:end] for at, end in pairwise(ends)]

    def items(self, block: Sequence[Sequence[Any]]) -> list[Any]:
        return [self._sample(data) for data in block[0]]

    def _sample(self, data: memoryview) -> dict[str, Any]:
        at, sample = self.sizes.size, dict[str, Any]()
        try:
            sizes = iter(self.sizes.unpack_from(data))
            for name, decode, fixed in self.columns:
                stop = at + (fixed or next(sizes))
                sample[name] = decode(bytes(data[at:stop]))
                at = stop
        except (ValueError, ArithmeticError, LookupError, RecursionError, struct.error) as error:
            raise DataError(f"a sample is damaged: {type(error).__name__}: {error}") from error
        if at != len(data):
            raise DataError(f"a sample is damaged: its columns have {at:,} bytes, expected {len(data):,}")
        return sample


def _columns(said: Any) -> list[tuple[str, Callable[[bytes], Any], int | None]]:
    columns = msgspec.convert(said, Columns)
    decoders = [decoder_of(encoding) for encoding in columns.column_encodings]
    return list(zip(columns.column_names, decoders, columns.column_sizes, strict=True))


def decoder_of(encoding: str) -> Callable[[bytes], Any]:
    """Return what decodes a column's bytes."""
    kind, *how = encoding.split(":")
    if kind in SCALARS:
        dtype = np.dtype(SCALARS[kind])
        return lambda data: np.frombuffer(data, dtype, 1)[0]
    if kind == "ndarray":
        return lambda data: _array(data, *how)
    if encoding not in PLAIN:
        why = "which could run anything, so it is never loaded" if kind == "pkl" else "which isn't supported"
        raise ValueError(f"a column is {encoding!r}, {why}; expected ndarray, {', '.join([*PLAIN, *SCALARS])}")
    return PLAIN[encoding]


def _array(data: bytes, dtype: str | None = None, shape: str | None = None) -> np.ndarray[Any, Any]:
    """Return an array. What the encoding doesn't say, of dtype and shape, is said before its elements."""
    at, kind = (0, np.dtype(SCALARS[dtype])) if dtype else (1, np.dtype(DTYPES[data[0]]))
    if shape:
        sizes = tuple(map(int, shape.split(",")))
    else:
        width, axes = np.dtype(SHAPES[data[at] & 3]), data[at] >> 2
        sizes = tuple(np.frombuffer(data, width, axes, at + 1).tolist())
        at += 1 + axes * width.itemsize
    if len(data) != at + prod(sizes) * kind.itemsize:
        raise ValueError(f"an array of shape {sizes}, {kind}, in {len(data) - at:,} bytes")
    return np.frombuffer(data, kind, offset=at).reshape(sizes)
