"""zstd, decompressed block by block in bounded memory: one frame or several, skippable ones among them (RFC 8878).

libzstd unpacks blocks of at most 128 KiB, and a few bytes may say that one of them is full of zeros. What the
`zstandard` package offers gives out all that its input unpacks to, so the input is given to it in blocks: where they
end is told by three bytes before each, and nothing else is decoded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamline.errors import DataError, ReadError
from streamline.formats.compression_steps import Decompressor

__all__ = ["Unzstd"]


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
class _Frame:
    """A frame that has begun. `decoder`: decodes it."""

    decoder: Any
    checksum_bytes: int
    in_blocks: bool = True


class Unzstd(Decompressor):
    """Raises ReadError where the zstandard package is missing."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise ReadError("zstd files need the zstandard package: pip install 'streamline[zstd]'") from None
        self._zstd = zstandard
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._frame: _Frame | None = None
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
        self._frame = _Frame(self._decompressor.decompressobj(), 4 if parameters.has_checksum else 0)
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

    def _block(self, frame: _Frame) -> bytes | None:
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

    def _checksum(self, frame: _Frame) -> bytes | None:
        if self._left() < frame.checksum_bytes:
            return None
        piece = self._decode(frame, frame.checksum_bytes)
        self._end(frame)
        return piece

    def _end(self, frame: _Frame) -> None:
        if not frame.decoder.eof:
            raise DataError(f"damaged, near compressed byte {self._byte():,}: a zstd frame should end there")
        self._frame = None

    def _decode(self, frame: _Frame, size: int) -> bytes:
        data = memoryview(self._data)[self._at : self._at + size]
        piece: bytes = self._decoded(frame.decoder.decompress, data)
        self._at += size
        return piece

    def _decoded(self, decode: Any, data: bytes | memoryview) -> Any:
        try:
            return decode(data)
        except self._zstd.ZstdError as error:
            raise DataError(f"damaged, near compressed byte {self._byte():,}: {error}") from error
