import gzip
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import DataError
from streamline.formats.gunzip import PIECE_BYTES, Gunzip

DATA = bytes(random.Random(0).choices(b"abcdefgh\n", k=700))


def unzip(data: bytes, block_bytes: int) -> bytes:
    decoder = Gunzip()
    found = []
    for at in range(0, len(data), block_bytes):
        found += list(decoder.feed(data[at : at + block_bytes]))
    found.append(decoder.finish())
    decoder.check_end()
    return b"".join(found)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 50), st.integers(0, 20))
def test_members_come_as_one_stream_and_zeros_are_padding(members: list[bytes], block_bytes: int, zeros: int) -> None:
    zipped = (b"\0" * zeros).join(map(gzip.compress, members)) + b"\0" * zeros
    assert unzip(zipped, block_bytes) == b"".join(members)


@pytest.mark.parametrize("block_bytes", [1, 7, 10_000])
def test_a_cut_at_any_byte_is_found(block_bytes: int) -> None:
    zipped = gzip.compress(DATA[:200]) + gzip.compress(DATA[200:])
    border = len(gzip.compress(DATA[:200]))
    for cut in range(len(zipped)):
        if cut != border:
            with pytest.raises(DataError, match=f"truncated: it ends at compressed byte {cut}"):
                unzip(zipped[:cut], block_bytes)


@pytest.mark.parametrize("garbage", [b"x", b"\x1f\x8c", b"\0\0x", b"plain text\n"])
def test_garbage_behind_a_member_is_an_error(garbage: bytes) -> None:
    with pytest.raises(DataError, match="garbage behind a gzip member"):
        unzip(gzip.compress(DATA) + garbage + b" and more of it", 100)


def test_what_is_no_gzip_data_is_an_error() -> None:
    with pytest.raises(DataError, match="not gzip data"):
        unzip(b"plain text\n", 100)


def test_a_flipped_bit_is_found() -> None:
    zipped = bytearray(gzip.compress(DATA))
    zipped[-6] ^= 1  # in the checksum
    with pytest.raises(DataError, match="compressed byte"):
        unzip(bytes(zipped), 100)


def test_a_bomb_is_unpacked_in_bounded_memory() -> None:
    zipped = gzip.compress(bytes(64 * 1024 * 1024))
    decoder, total = Gunzip(), 0
    tracemalloc.start()
    for piece in decoder.feed(zipped):
        assert len(piece) <= PIECE_BYTES
        total += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 64 * 1024 * 1024
    assert peak < 4 * PIECE_BYTES
