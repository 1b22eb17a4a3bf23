"""Decompressors, fed block by block: what is whole comes out, what is damaged is said, and nothing gets large."""

import bz2
import gzip
import lzma
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import DataError
from streamline.io.formats import compression
from streamline.io.formats.compression import (
    PIECE_BYTES,
    Decompressor,
    compression_of_head,
    compression_of_name,
    undecided,
)
from tests.file_kit import zstd_library
from tests.laws.profile import examples, sampled

CompressionParameter = zstd_library.CompressionParameter

DATA = bytes(random.Random(0).choices(b"abcdefgh\n", k=700))

Pack = Callable[[bytes], bytes]


def zstd(data: bytes) -> bytes:
    return zstd_library.compress(data, options={CompressionParameter.checksum_flag: 1})


def skippable(data: bytes) -> bytes:
    return b"\x5a\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


PACK: dict[str, Pack] = {"gzip": gzip.compress, "zstd": zstd, "bzip2": bz2.compress, "xz": lzma.compress}
KINDS = {kind.name: kind for kind in compression.KINDS}
PART = {"gzip": "member", "zstd": "frame", "bzip2": "stream", "xz": "stream"}


def unpack(kind: str, data: bytes, block_bytes: int) -> bytes:
    decoder = Decompressor(KINDS[kind])
    found: list[bytes] = []
    for at in range(0, len(data), block_bytes):
        found += decoder.feed(data[at : at + block_bytes])
    decoder.check_end()
    return b"".join(found)


@pytest.mark.parametrize("kind", PACK)
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4), block_bytes=st.integers(1, 50))
@examples(25)
def test_parts_come_as_one_stream(kind: str, parts: list[bytes], block_bytes: int) -> None:
    assert unpack(kind, b"".join(map(PACK[kind], parts)), block_bytes) == b"".join(parts)


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz"])
@pytest.mark.parametrize("zeros", [4, 12, 70_000])
@pytest.mark.parametrize("block_bytes", [1, 100_000])
def test_zeros_after_a_part_are_padding(kind: str, zeros: int, block_bytes: int) -> None:
    part = PACK[kind](DATA) + bytes(zeros if block_bytes > 1 else zeros % 100)
    assert unpack(kind, part * 2, block_bytes) == DATA * 2


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
def test_skippable_frames_are_skipped(block_bytes: int) -> None:
    data = skippable(b"seek table") + zstd(DATA) + skippable(b"") + skippable(bytes(500)) + zstd(b"end")
    assert unpack("zstd", data, block_bytes) == DATA + b"end"
    assert unpack("zstd", skippable(b"nothing else"), block_bytes) == b""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("level", [-5, 1, 19])
@pytest.mark.parametrize("options", [{}, {CompressionParameter.checksum_flag: 1}])
def test_frames_of_many_blocks_of_each_kind(level: int, options: dict[int, int]) -> None:
    draw = random.Random(1)
    data = bytes(300_000) + draw.randbytes(300_000) + b"text " * 60_000 + b"end"  # repeated, raw, compressed
    stream = zstd_library.ZstdCompressor(options={CompressionParameter.compression_level: level, **options})
    assert unpack("zstd", stream.compress(data) + stream.flush(), 10_007) == data


@pytest.mark.one_in(5, 4)
@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("block_bytes", [1, 7, 10_000])
def test_a_cut_at_any_byte_is_found(kind: str, block_bytes: int) -> None:
    first = PACK[kind](DATA[:200])
    packed = first + PACK[kind](DATA[200:])
    for cut in sampled(range(len(packed)), 1 if block_bytes == 7 else 5):
        if cut != len(first):
            message = rf"the {kind} data is truncated: it ends at compressed byte {cut}, inside a {PART[kind]}"
            with pytest.raises(DataError, match=message):
                unpack(kind, packed[:cut], block_bytes)


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("garbage", [b"x", b"\x1f\x8c", b"\0\0x", b"plain text\n"])
def test_garbage_after_a_part_is_an_error(kind: str, garbage: bytes) -> None:
    with pytest.raises(DataError, match=f"garbage after a {kind} {PART[kind]}, or damaged, .*compressed byte"):
        unpack(kind, PACK[kind](DATA) + garbage + b" and more of it", 100)


@pytest.mark.parametrize("kind", PACK)
def test_what_is_something_else_is_an_error(kind: str) -> None:
    with pytest.raises(DataError, match=f"not {kind} data"):
        unpack(kind, b"plain text\n" * 9, 100)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", PACK)
def test_a_flipped_bit_never_gives_other_data_in_silence(kind: str) -> None:
    packed = PACK[kind](DATA)
    found = 0
    for at in range(len(packed) * 8):
        flipped = bytearray(packed)
        flipped[at // 8] ^= 1 << at % 8
        try:
            same = unpack(kind, bytes(flipped), 100) == DATA
        except DataError as error:
            same = "compressed byte" in str(error)
            found += 1
        assert same  # some bits say nothing of the data: gzip's date
    assert found > len(packed) * 8 - 200


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("kind", PACK)
def test_a_bomb_is_unpacked_in_bounded_memory(kind: str) -> None:
    size = 32 * 1024 * 1024
    packed = _zeros(kind, size)
    assert len(packed) < size / 500
    decoder, total = Decompressor(KINDS[kind]), 0
    tracemalloc.start()
    for piece in decoder.feed(packed):
        assert len(piece) <= PIECE_BYTES
        total += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    decoder.check_end()
    assert total == size
    assert peak < len(packed) * 2 + 8 * PIECE_BYTES + (8 << 20 if kind == "xz" else 0)  # its dictionary


def _zeros(kind: str, size: int) -> bytes:
    if kind == "bzip2":
        return bz2.compress(bytes(size // 16)) * 16
    if kind == "xz":
        return lzma.compress(bytes(size // 16), preset=0) * 16
    return PACK[kind](bytes(size))


def test_blocks_of_one_repeated_byte_are_bounded_too() -> None:
    block = (128 * 1024 << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    decoder, total = Decompressor(KINDS["zstd"]), 0
    for piece in decoder.feed(b"\x28\xb5\x2f\xfd\x00\x58" + block * 500 + b"\x01\x00\x00"):
        assert len(piece) <= PIECE_BYTES
        total += len(piece)
    decoder.check_end()
    assert total == 500 * 128 * 1024


def test_an_empty_or_reserved_block_does_no_harm() -> None:
    head = b"\x28\xb5\x2f\xfd\x00\x58"
    assert unpack("zstd", head + bytes(3) * 1000 + b"\x01\x00\x00", 1000) == b""
    with pytest.raises(DataError, match="damaged, near compressed byte 0"):
        unpack("zstd", head + b"\x07\x00\x00", 100)


def test_a_window_that_is_too_large_is_refused_before_memory_is_gone() -> None:
    stream = zstd_library.ZstdCompressor(options={CompressionParameter.window_log: 28})
    packed = stream.compress(b"x" * 100) + stream.flush()
    with pytest.raises(DataError, match=r"window is larger than 128 MiB: .*zstd --long=27.*near compressed byte 0"):
        unpack("zstd", packed, 100)


def test_a_frame_that_needs_a_dictionary_says_so() -> None:
    frame = bytearray(zstd(DATA))
    frame[4] |= 1  # the header says that a dictionary of a number of one byte is needed
    frame.insert(5 if frame[4] & 32 else 6, 77)
    with pytest.raises(DataError, match="it needs a dictionary: compress it again, without one"):
        unpack("zstd", bytes(frame), 100)


def test_xz_that_asks_for_too_much_memory_is_refused() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 4096}]
    packed = bytearray(lzma.compress(b"x", filters=filters))
    assert packed[12 + 4] == 0  # the dictionary's size, in the block's header
    packed[12 + 4] = 40
    packed[20:24] = _crc32(bytes(packed[12:20]))
    with pytest.raises(DataError, match="takes more than 256 MiB"):
        unpack("xz", bytes(packed), 100)


def _crc32(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("path", "kind"),
    {
        "a.gz": "gzip",
        "a.jsonl.ZST": "zstd",
        "dir.gz/a": None,
        "a.bz2": "bzip2",
        "a.csv.xz": "xz",
        "https://host/a.jsonl.zst?token=x.gz": "zstd",
        "https://host/a.txt?name=b.gz": None,
        "s3://bucket/a.gz#top": "gzip",
        "what?.gz": "gzip",
        "http://[::1/a.gz": "gzip",
        "tar.tgz": "gzip",
    }.items(),
)
def test_names_say_how_a_file_is_compressed(path: str, kind: str | None) -> None:
    found = compression_of_name(path)
    assert (found and found.name) == kind


@pytest.mark.parametrize("data", [b"", DATA, bytes(5000)], ids=["empty", "text", "zeros"])
@pytest.mark.parametrize("kind", PACK)
def test_first_bytes_say_how_a_file_is_compressed(kind: str, data: bytes) -> None:
    packed = PACK[kind](data)
    found = compression_of_head(packed)
    assert found is not None
    assert found.name == kind
    decided = next(size for size in range(len(packed)) if not undecided(packed[:size]))
    assert compression_of_head(packed[:decided]) is found


@pytest.mark.parametrize("text", [b"", b"{", b"BZh9 is a word", b"(", b"[1]", b"P*", b"\xfd", b"\xef\xbb\xbf1"])
def test_texts_are_not_taken_for_compressed(text: bytes) -> None:
    assert compression_of_head(text) is None
