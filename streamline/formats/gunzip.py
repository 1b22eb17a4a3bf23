"""gzip, decompressed step by step in bounded memory: one member or several (RFC 1952)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from streamline.errors import DataError

__all__ = ["MAGIC", "Gunzip"]

MAGIC = b"\x1f\x8b"

PIECE_BYTES = 256 * 1024
"""A piece at the most: about a millisecond of work, so that the event loop goes on between two."""

STEP_BYTES = 64 * 1024
"""Given to zlib at a time, which copies what it hasn't used for each piece."""

GZIP = 16 + zlib.MAX_WBITS


class Gunzip:
    """Decompresses blocks, fed one after the other.

    Zeros behind a member are padding, as tapes and some file systems leave it; anything else there is an error.
    """

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(GZIP)
        self._fed = 0  # compressed bytes that came before what `feed` is dealing with
        self._members = 0

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield what the next block decompresses to, in pieces of bounded size, none of them empty.

        Raises:
          DataError: the data is damaged; it names the compressed byte, but no file.
        """
        for at in range(0, len(block), STEP_BYTES):
            data = block[at : at + STEP_BYTES]
            end = self._fed + len(data)
            while data:
                if self._decoder.eof and not (data := self._next_member(data, end)):
                    break
                if piece := self._piece(data, end):
                    yield piece
                data = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
            self._fed = end

    def finish(self) -> bytes:
        """Return what is left at the end of the data; `check_end` says whether that was an end."""
        try:
            return b"" if self._decoder.eof else self._decoder.flush()
        except zlib.error:
            return b""

    def check_end(self) -> None:
        """Check that the data ended where a member did.

        Raises:
          DataError: it was cut short.
        """
        if not self._decoder.eof:
            raise DataError(f"the gzip data is truncated: it ends at compressed byte {self._fed:,}, inside a member")

    def _next_member(self, data: bytes, end: int) -> bytes:
        data = data.lstrip(b"\0")
        if data:
            self._members += 1
            self._decoder = zlib.decompressobj(GZIP)
        return data

    def _piece(self, data: bytes, end: int) -> bytes:
        try:
            return self._decoder.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            what = "not gzip data, or damaged" if not self._members else "garbage behind a gzip member, or damaged"
            raise DataError(f"{what}, near compressed byte {end - len(data):,}: {error}") from error
