"""Compressed files: which they are, by name or first bytes, and how they are decompressed, in bounded memory.

gzip, bzip2 and xz files may hold several streams (gzip calls them members), and mean the content of all. Zeros after a
stream are padding, as xz, tapes and some file systems leave it; anything else there is an error.

zstd (RFC 8878): one frame or several, skippable ones among them. libzstd unpacks blocks of at most 128 KiB, and a few
bytes may say that one is full of zeros. The `zstandard` package returns all that its input unpacks to, so the input is
fed to it block by block; three bytes before each block say where it ends, and nothing else is decoded here.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from lzma import FORMAT_XZ, LZMADecompressor, LZMAError
from typing import Any, Protocol

from streamline.errors import DataError, PlanError, ReadError

__all__ = [
    "HEAD_BYTES",
    "PIECE_BYTES",
    "Compression",
    "Decompressor",
    "Unzstd",
    "bunzip",
    "check_not_foreign",
    "gunzip",
    "named",
    "not_splittable",
    "sniffed",
    "undecided",
    "unxz",
]


HEAD_BYTES = 10
"""First bytes that tell how a file is compressed: those of bzip2 take most."""


NEEDED = {0x1F: 2, 0x28: 4, **dict.fromkeys(range(0x50, 0x60), 4), 0xFD: 6, 0x42: HEAD_BYTES}
"""How many are needed to tell, by the first of them; of others, no more."""


@dataclass(frozen=True)
class Compression:
    """A kind of compression.

    Attributes:
      name: for a person.
      suffixes: of names, in lower case.
      magic: matches the first `HEAD_BYTES`, or as many as there are.
      decompressor: makes one, for one file.
      threaded: whether one step takes so long that it must not be made in the event loop.
    """

    name: str
    suffixes: tuple[str, ...]
    magic: re.Pattern[bytes] = field(repr=False)
    decompressor: Callable[[], Decompressor] = field(repr=False)
    threaded: bool = False


class Decompressor(ABC):
    """Decompresses the blocks of one file, fed one after the other."""

    @abstractmethod
    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield what the next block decompresses to, in pieces of at most `PIECE_BYTES`; an empty one is a pause.

        Raises:
          DataError: the data is damaged; it names the compressed byte, but no file.
        """

    @abstractmethod
    def check_end(self) -> None:
        """Check that the data ended where a stream did.

        Raises:
          DataError: it was cut short.
        """


class Unzstd(Decompressor):
    """Raises ReadError where the zstandard package is missing."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise ReadError("zstd files need the zstandard package: pip install 'streamline[zstd]'") from None
        self._zstd = zstandard
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._frame: _ZstdFrame | None = None
        self._frames = 0
        self._skip = 0  # bytes of a skippable frame to come
        self._data = b""  # not used yet: less than a block
        self._at = 0  # in `_data`
        self._used = 0  # compressed bytes before `_data`

    def feed(self, block: bytes) -> Iterator[bytes]:
        self._used += self._at
        self._data, self._at = self._data[self._at :] + block, 0
        while (piece := self._step()) is not None:
            yield piece

    def check_end(self) -> None:
        if self._frame is not None or self._skip or not self._frames or self._left():
            byte = self._used + len(self._data)
            raise DataError(f"the zstd data is truncated: it ends at compressed byte {byte:,}, inside a frame")

    def _left(self) -> int:
        return len(self._data) - self._at

    def _byte(self) -> int:
        return self._used + self._at

    def _step(self) -> bytes | None:
        """Return what the next few bytes unpack to, perhaps nothing; None: more bytes are needed."""
        if self._skip:
            size = min(self._skip, self._left())
            self._skip -= size
            self._at += size
            return b"" if size else None
        if self._frame is None:
            return self._begin()
        return self._block(self._frame) if self._frame.in_blocks else self._checksum(self._frame)

    def _begin(self) -> bytes | None:
        if self._left() < 4:
            return None
        head = self._data[self._at : self._at + HEADER_BYTES]
        if head[1:4] == SKIPPABLE and head[0] >> 4 == 5:
            if len(head) < 8:
                return None
            self._skip = int.from_bytes(head[4:8], "little")
            self._at += 8
            self._frames += 1
            return b""
        if not head.startswith(MAGIC):
            what = "garbage behind a zstd frame, or damaged" if self._frames else "not zstd data, or damaged"
            raise DataError(f"{what}, at compressed byte {self._byte():,}")
        if len(head) < 5:
            return None
        size = self._decoded(self._zstd.frame_header_size, head)
        if len(head) < size:
            return None
        parameters = self._decoded(self._zstd.get_frame_parameters, head)
        self._check(parameters)
        self._frame = _ZstdFrame(self._decompressor.decompressobj(), 4 if parameters.has_checksum else 0)
        self._frames += 1
        return self._decode(self._frame, size)

    def _check(self, parameters: Any) -> None:
        at = f"the zstd frame at compressed byte {self._byte():,}"
        if parameters.window_size > WINDOW_BYTES:
            raise DataError(
                f"{at} has a window of {parameters.window_size >> 20:,} MiB, expected {WINDOW_BYTES >> 20} at the "
                "most: compress it again, with `zstd --long=27` or without --long"
            )
        if parameters.dict_id:
            raise DataError(f"{at} needs dictionary {parameters.dict_id}: compress it again, without a dictionary")

    def _block(self, frame: _ZstdFrame) -> bytes | None:
        if self._left() < 3:
            return None
        head = int.from_bytes(self._data[self._at : self._at + 3], "little")
        last, kind, size = head & 1, head >> 1 & 3, head >> 3
        if size > BLOCK_BYTES or kind == RESERVED:
            raise DataError(f"damaged, at compressed byte {self._byte():,}: no zstd block begins there")
        size = 3 + (1 if kind == RLE else size)
        if self._left() < size:
            return None
        piece = self._decode(frame, size)
        if last:
            frame.in_blocks = False
            if not frame.checksum_bytes:
                self._end(frame)
        return piece

    def _checksum(self, frame: _ZstdFrame) -> bytes | None:
        if self._left() < frame.checksum_bytes:
            return None
        piece = self._decode(frame, frame.checksum_bytes)
        self._end(frame)
        return piece

    def _end(self, frame: _ZstdFrame) -> None:
        if not frame.decoder.eof:
            raise DataError(f"damaged, near compressed byte {self._byte():,}: a zstd frame should end there")
        self._frame = None

    def _decode(self, frame: _ZstdFrame, size: int) -> bytes:
        data = memoryview(self._data)[self._at : self._at + size]
        piece: bytes = self._decoded(frame.decoder.decompress, data)
        self._at += size
        return piece

    def _decoded(self, decode: Any, data: bytes | memoryview) -> Any:
        try:
            return decode(data)
        except self._zstd.ZstdError as error:
            raise DataError(f"damaged, near compressed byte {self._byte():,}: {error}") from error


class _Streams(Decompressor):
    """Streams one behind the other.

    Args:
      what: "gzip".
      part: what a stream is called: "member".
      decoder: makes what decodes one.
    """

    def __init__(self, what: str, part: str, decoder: Callable[[], _Decoder]) -> None:
        self._what = what
        self._part = part
        self._new = decoder
        self._decoder = decoder()
        self._fed = 0  # compressed bytes that came before the step that `feed` is at
        self._streams = 0

    def feed(self, block: bytes) -> Iterator[bytes]:
        for at in range(0, len(block), STEP_BYTES):
            data = block[at : at + STEP_BYTES]
            end = self._fed + len(data)
            while data or not (self._decoder.eof or self._decoder.needs_input):
                if self._decoder.eof and not (data := self._next_stream(data)):
                    break
                yield self._piece(data, end)
                data = self._decoder.unused_data if self._decoder.eof else b""
            self._fed = end

    def check_end(self) -> None:
        if not self._decoder.eof:
            raise DataError(
                f"the {self._what} data is truncated: it ends at compressed byte {self._fed:,}, inside a {self._part}"
            )

    def _next_stream(self, data: bytes) -> bytes:
        data = data.lstrip(b"\0")
        if data:
            self._streams += 1
            self._decoder = self._new()
        return data

    def _piece(self, data: bytes, end: int) -> bytes:
        try:
            return self._decoder.decompress(data, PIECE_BYTES)
        except FAILURES as error:
            raise DataError(f"{self._why(error)}, near compressed byte {end - len(data):,}: {error}") from error

    def _why(self, error: Exception) -> str:
        if "emory usage limit" in str(error):
            return f"unpacking it takes more than {XZ_BYTES >> 20} MiB: compress it again, with `xz -9` at the most"
        if not self._streams:
            return f"not {self._what} data, or damaged"
        return f"garbage behind a {self._what} {self._part}, or damaged"


bunzip = partial(_Streams, "bzip2", "stream", BZ2Decompressor)


class _Inflate:
    """One gzip member, decoded with the others' manners."""

    def __init__(self) -> None:
        self._inflating = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._full = False

    @property
    def eof(self) -> bool:
        return self._inflating.eof

    @property
    def needs_input(self) -> bool:
        return not (self._full or self._inflating.unconsumed_tail)

    @property
    def unused_data(self) -> bytes:
        return self._inflating.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        tail = self._inflating.unconsumed_tail
        piece = self._inflating.decompress(tail + data if tail else data, max_length)
        self._full = len(piece) == max_length  # there may be more, although all input is used
        return piece


gunzip = partial(_Streams, "gzip", "member", _Inflate)


XZ_BYTES = 256 * 1024 * 1024
"""Memory that unpacking xz may take: `xz -9` asks for 65 MiB; a header may ask for 4 GiB."""


unxz = partial(_Streams, "xz", "stream", partial(LZMADecompressor, FORMAT_XZ, XZ_BYTES))


KINDS = (
    Compression("gzip", (".gz", ".gzip", ".tgz"), re.compile(rb"\x1f\x8b"), gunzip),
    Compression("zstd", (".zst", ".zstd", ".tzst"), re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), Unzstd),
    # "BZh9" may be a text: the number that the first block, or the end, begins with belongs to it
    Compression(
        "bzip2",
        (".bz2", ".tbz2", ".tbz"),
        re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
        bunzip,
        threaded=True,
    ),
    Compression("xz", (".xz", ".txz"), re.compile(rb"\xfd7zXZ\x00"), unxz),
)
"""RFC 1952 (gzip), RFC 8878 (zstd, with skippable frames), bzip2 1.0, the .xz format 1.1. A piece of xz takes some
3 ms; bzip2 unpacks blocks of 900 kB, at some 30 ms each."""


def named(path: str) -> Compression | None:
    """Return what a path's or a URL's name says; None: that it isn't compressed. A query string is no part of it."""
    name = (re.split("[?#]", path, maxsplit=1)[0] if "://" in path else path).lower()
    return next((kind for kind in KINDS if name.endswith(kind.suffixes)), None)


def sniffed(head: bytes) -> Compression | None:
    """Return what a file's first bytes say; None: that it isn't compressed."""
    return next((kind for kind in KINDS if kind.magic.match(head)), None)


def check_not_foreign(path: str, head: bytes) -> None:
    """Insist on a file that doesn't begin as one of another format.

    Raises:
      DataError: it does; with the way to read it.
    """
    for magic, (name, way) in FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {name}, whatever its name says: {way}")


FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "unzip it, or pack its files into a tar; arrays in an .npz are for sl.read_npy"),
    b"PAR1\x15": ("a Parquet file", "sl.read_parquet reads it"),
    b"ARROW1\x00\x00": ("an Arrow file", "sl.read_arrow reads it"),
    b"\x93NUMPY": ("a NumPy array", "sl.read_npy reads it"),
    b"\x89HDF\r\n": ("an HDF5 file", "sl.from_items of a dataset in it reads rows"),
    b"SQLite format 3\x00": ("an SQLite database", "sl.from_iterable(lambda: connect().execute(query)) reads rows"),
}
"""First bytes of files that are no lines, records or tar archives, what they are, and the way to read them."""


def undecided(head: bytes) -> bool:
    """Whether more bytes than these are needed to tell."""
    return not head or len(head) < NEEDED.get(head[0], 1)


def not_splittable(path: str, num_shards: int, kind: Compression) -> PlanError:
    """Return the error for splitting a compressed file."""
    return PlanError(
        f"{path} is a {kind.name} file, which can only be read from its start, so it can't be split into {num_shards} "
        f'shards: split it into several files, or write .shard({num_shards}, mode="replicated"): each shard reads '
        "all of it"
    )


PIECE_BYTES = 256 * 1024
"""A piece at the most: about a millisecond of work for gzip, so that the event loop goes on between two."""


STEP_BYTES = 64 * 1024
"""Given to a decoder at a time, which copies what it hasn't used."""


FAILURES = (zlib.error, LZMAError, OSError, EOFError, ValueError)
"""What decoders raise for damaged data: OSError is bzip2's."""


class _Decoder(Protocol):
    """Decodes one stream; as `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


MAGIC = b"\x28\xb5\x2f\xfd"


SKIPPABLE = b"\x2a\x4d\x18"
"""Behind a byte of 0x50 to 0x5f: a skippable frame, of the size that the next four bytes say."""


HEADER_BYTES = 18
"""A frame's header at the most."""


WINDOW_BYTES = 128 * 1024 * 1024
"""The window at the most, as the zstd tool has it (`zstd --long=27`): a header may ask for terabytes of memory."""


RLE, RESERVED = 1, 3
"""Kinds of blocks: a byte, repeated; and none that there is."""


BLOCK_BYTES = 128 * 1024
"""A block at the most, packed and unpacked."""


@dataclass
class _ZstdFrame:
    """A frame that has begun. `decoder`: decodes it."""

    decoder: Any
    checksum_bytes: int
    in_blocks: bool = True
