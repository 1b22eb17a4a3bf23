"""Which files are compressed, and how: by their names, or by their first bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from streamline.errors import DataError, PlanError
from streamline.formats.compression_steps import Decompressor, bunzip, gunzip, unxz
from streamline.formats.compression_zstd import Unzstd

__all__ = ["HEAD_BYTES", "Compression", "check_not_foreign", "named", "not_splittable", "sniffed", "undecided"]

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
