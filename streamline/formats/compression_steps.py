"""Decompressing step by step in bounded memory: what the standard library does. zstd: `compression_zstd`.

gzip, bzip2 and xz files may hold several streams, one behind the other (gzip calls them members), and mean the content
of all. Zeros behind a stream are padding, as xz, tapes and some file systems leave it; anything else there is an error.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterator
from functools import partial
from lzma import FORMAT_XZ, LZMADecompressor, LZMAError
from typing import Protocol

from streamline.errors import DataError

__all__ = ["PIECE_BYTES", "Decompressor", "bunzip", "gunzip", "unxz"]

PIECE_BYTES = 256 * 1024
"""A piece at the most: about a millisecond of work for gzip, so that the event loop goes on between two."""

STEP_BYTES = 64 * 1024
"""Given to a decoder at a time, which copies what it hasn't used."""

XZ_BYTES = 256 * 1024 * 1024
"""Memory that unpacking xz may take: `xz -9` asks for 65 MiB; a header may ask for 4 GiB."""

FAILURES = (zlib.error, LZMAError, OSError, EOFError, ValueError)
"""What decoders raise for damaged data: OSError is bzip2's."""


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


class _Decoder(Protocol):
    """Decodes one stream; as `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


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
bunzip = partial(_Streams, "bzip2", "stream", BZ2Decompressor)
unxz = partial(_Streams, "xz", "stream", partial(LZMADecompressor, FORMAT_XZ, XZ_BYTES))
