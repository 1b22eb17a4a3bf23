"""Compressed files: which they are, by name or first bytes, and how they are read and written, in bounded memory.

A file may hold several streams, one after the other (gzip calls them members, zstd frames), and means the content of
all. After a stream of gzip, bzip2 or xz, zeros are padding, as xz, tapes and some file systems leave it; anything else
there is an error.

To add a kind, add an entry to `KINDS`. Its decoder is any class that decodes one stream as `bz2.BZ2Decompressor` does:

    Compression("lz4", "frame", (".lz4",), (b"\\x04\\x22\\x4d\\x18",), lz4.frame.LZ4FrameDecompressor),
"""

from __future__ import annotations

import re
import sys
import zlib
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from lzma import FORMAT_XZ, LZMADecompressor
from typing import Any, Protocol

from streamline.errors import DataError, PlanError, ReadError, install

PIECE_BYTES = 256 * 1024
"""The largest piece: about a millisecond of work for gzip, so that the event loop can run between two."""

STEP_BYTES = 64 * 1024
"""Given to a decoder at a time, which copies what it hasn't used."""

GZIP_BITS = 16 + zlib.MAX_WBITS
"""Says to zlib that it is gzip. The time that zlib writes is 0: the same data make the same file."""

XZ_BYTES = 256 * 1024 * 1024
"""Memory that decompressing xz may take: `xz -9` asks for 65 MiB; a header may ask for 4 GiB."""

ZSTD_WINDOW_LOG = 27
"""The largest window, 128 MiB, as the zstd tool has it (`zstd --long=27`): a header may ask for terabytes."""


class Decoder(Protocol):
    """Decodes one stream; as `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class Compressor(Protocol):
    """Encodes one stream; as `bz2.BZ2Compressor`."""

    def compress(self, data: bytes | memoryview, /) -> bytes: ...
    def flush(self) -> bytes: ...


@dataclass(frozen=True)
class Compression:
    """A kind of compression.

    Attributes:
      name: for messages.
      part: what a stream is called: "member".
      suffixes: of names, in lower case.
      magics: the bytes that a file may begin with.
      decoder: makes what decodes one stream.
      encoder: makes what encodes one, the same bytes each time; None: such files are read only.
      threaded: whether one step takes so long that it must not be made in the event loop.
      padded: whether zeros after a stream are padding.
      refusals: what decoders say of sound data that they refuse, and what to do then.
    """

    name: str
    part: str
    suffixes: tuple[str, ...]
    magics: tuple[bytes, ...] = field(repr=False)
    decoder: Callable[[], Decoder] = field(repr=False)
    encoder: Callable[[], Compressor] | None = field(default=None, repr=False)
    threaded: bool = False
    padded: bool = True
    refusals: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)


class Decompressor:
    """Decompresses the blocks of one file, fed one after the other."""

    def __init__(self, kind: Compression) -> None:
        self._kind = kind
        self._decoder = kind.decoder()
        self._fed = 0  # compressed bytes that came before the step that `feed` is at
        self._streams = 0  # that have ended

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield what the next block decompresses to, in pieces of at most `PIECE_BYTES`; an empty one is a pause.

        Raises:
          DataError: the data is damaged; it names the compressed byte, but no file.
        """
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
        """Check that the data ended where a stream did."""
        if not self._decoder.eof:
            raise DataError(
                f"the {self._kind.name} data is truncated: it ends at compressed byte {self._fed:,}, inside a "
                f"{self._kind.part}"
            )

    def _next_stream(self, data: bytes) -> bytes:
        if self._kind.padded:
            data = data.lstrip(b"\0")
        if data:
            self._streams += 1
            self._decoder = self._kind.decoder()
        return data

    def _piece(self, data: bytes, end: int) -> bytes:
        try:
            return self._decoder.decompress(data, PIECE_BYTES)
        except MemoryError:
            raise
        except Exception as error:  # each kind has a type of its own, and some raise several
            raise DataError(f"{self._why(error)}, near compressed byte {end - len(data):,}: {error}") from error

    def _why(self, error: Exception) -> str:
        kind, text = self._kind, str(error)
        refused = next((why for said, why in kind.refusals.items() if said in text), None)
        if refused is not None:
            return refused
        what = f"garbage after a {kind.name} {kind.part}" if self._streams else f"not {kind.name} data"
        return f"{what}, or damaged"


class Inflate:
    """One stream of zlib's, a gzip member unless `bits` say otherwise, as `bz2.BZ2Decompressor` has one."""

    def __init__(self, bits: int = GZIP_BITS) -> None:
        self._inflating = zlib.decompressobj(bits)
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


def _zstd() -> Any:
    """Return the module for zstd: the standard library's from Python 3.14 on."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise ReadError(f"zstd files need the backports.zstd package: {install('zstd')}") from None
    return zstd


def _unzstd() -> Decoder:
    """Return the decoder of a zstd frame, skippable ones included."""
    zstd = _zstd()
    made: Decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})
    return made


def _to_zstd() -> Compressor:
    """Return the encoder of a zstd frame, with a checksum, as the zstd tool writes it."""
    zstd = _zstd()
    made: Compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
    return made


KINDS = (
    Compression(
        "gzip", "member", (".gz", ".gzip", ".tgz"), (b"\x1f\x8b",), Inflate, partial(zlib.compressobj, wbits=GZIP_BITS)
    ),
    Compression(
        "zstd",
        "frame",
        (".zst", ".zstd", ".tzst"),
        (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
        _unzstd,
        _to_zstd,
        padded=False,
        refusals={
            "too much memory": "its window is larger than 128 MiB: compress it again, with `zstd --long=27` or without "
            "--long",
            "Dictionary mismatch": "it needs a dictionary: compress it again, without one",
        },
    ),
    # "BZh9" may be a text: the number that the first block, or the end, begins with belongs to it
    Compression(
        "bzip2",
        "stream",
        (".bz2", ".tbz2", ".tbz"),
        tuple(b"BZh%d" % level + what for level in range(1, 10) for what in (b"1AY&SY", b"\x17rE8P\x90")),
        BZ2Decompressor,
        threaded=True,
    ),
    Compression(
        "xz",
        "stream",
        (".xz", ".txz"),
        (b"\xfd7zXZ\x00",),
        partial(LZMADecompressor, FORMAT_XZ, XZ_BYTES),
        refusals={
            "emory usage limit": f"decompressing it takes more than {XZ_BYTES >> 20} MiB: compress it again, with "
            "`xz -9` at the most"
        },
    ),
)
"""RFC 1952 (gzip), RFC 8878 (zstd, with skippable frames), bzip2 1.0, the .xz format 1.1. A piece of xz takes some
3 ms; bzip2 decompresses blocks of 900 kB, at some 30 ms each."""

WRITABLE = {kind.name: (kind.suffixes[0], kind.encoder) for kind in KINDS if kind.encoder is not None}
"""What files can be written with, by name: the suffix of theirs, and what makes the encoder of one."""

HEAD_BYTES = max(len(magic) for kind in KINDS for magic in kind.magics)
"""First bytes that tell how a file is compressed."""


def compression_of_name(path: str) -> Compression | None:
    """Return what a path's or a URL's name says; None: it isn't compressed. The query of a URL is ignored."""
    name = (re.split("[?#]", path, maxsplit=1)[0] if "://" in path else path).lower()
    return next((kind for kind in KINDS if name.endswith(kind.suffixes)), None)


def compression_of_head(head: bytes) -> Compression | None:
    """Return what a file's first bytes say; None: it isn't compressed."""
    return next((kind for kind in KINDS if head.startswith(kind.magics)), None)


def undecided(head: bytes) -> bool:
    """Whether more bytes than these are needed to tell."""
    return any(len(head) < len(magic) and magic.startswith(head) for kind in KINDS for magic in kind.magics)


FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "unzip it, or pack its files into a tar; arrays in an .npz are for sl.read_npy"),
    b"PAR1\x15": ("a Parquet file", "sl.read_parquet reads it"),
    b"ARROW1\x00\x00": ("an Arrow file", "sl.read_arrow reads it"),
    b"\x93NUMPY": ("a NumPy array", "sl.read_npy reads it"),
    b"\x89HDF\r\n": ("an HDF5 file", "sl.read_hdf5 reads it"),
    b"SQLite format 3\x00": ("an SQLite database", "sl.from_iterable(lambda: connect().execute(query)) reads rows"),
    b"\x04\x22\x4d\x18": ("an lz4 file", "unpack it with `lz4 -d`, or write gzip or zstd"),
    b"\xff\x06\x00\x00sNaPpY": ("a snappy file", "unpack it with `snzip -d`, or write gzip or zstd"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it with `7z x`, or write gzip or zstd"),
}
"""First bytes of files that are no lines, records or tar archives, what they are, and the way to read them."""


def check_not_foreign(path: str, head: bytes) -> None:
    for magic, (name, way) in FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {name}, whatever its name says: {way}")
    if path.partition("?")[0].lower().endswith(".br") and "\ufffd" in head[:-4].decode(errors="replace"):
        raise DataError(f"{path} is a brotli file, as it seems: unpack it with `brotli -d`")  # it has no mark


def not_splittable(path: str, num_shards: int, kind: Compression) -> PlanError:
    return PlanError(
        f"{path} is a {kind.name} file, which can only be read from its start, so it can't be split into {num_shards} "
        f'shards: split it into several files, or write .shard({num_shards}, mode="replicated"): each shard reads '
        "all of it"
    )
