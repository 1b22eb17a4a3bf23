"""TFRecord files: what is read, damaged at every byte, cut anywhere, resumed anywhere."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError
from streamline.io.formats import tfrecord
from streamline.io.storage import local
from tests.io.formats.records import checksum, framed, record_file, starts_of
from tests.laws.profile import sampled

RECORDS = [b"one", b"", b"three" * 40, bytes(range(256)), b"five"]
DATA = record_file(RECORDS)
STARTS = starts_of(RECORDS)

GOLDEN = bytes.fromhex("0500000000000000eab2043e68656c6c6fbb1f1c19")
"""One record, "hello", as `tf.io.TFRecordWriter` and the package tfrecord write it."""


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    def put_(data: bytes, name: str = "a.tfrecord") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return put_


def left_out(path: Path, **options: Any) -> tuple[list[bytes], list[str]]:
    """Return the records that come where bad ones are left out, and the errors."""
    messages: list[str] = []
    with sl.read_tfrecord(path, **options).open(
        on_error=lambda failure: messages.append(str(failure.error)) or "skip"  # type: ignore[func-returns-value]
    ) as stream:
        return list(stream), messages


@pytest.mark.usefixtures("blocks")
def test_records_come_as_they_were_written(put: Callable[..., Path]) -> None:
    assert list(sl.read_tfrecord(put(GOLDEN))) == [b"hello"]
    assert list(sl.read_tfrecord(put(DATA))) == RECORDS
    assert list(sl.read_tfrecord(put(gzip.compress(DATA), "b.tfrecord.gz"))) == RECORDS
    assert list(sl.read_tfrecord([put(DATA), put(b"", "b"), put(DATA, "c")])) == [*RECORDS, *RECORDS]


def test_a_state_is_the_byte_of_the_next_record(put: Callable[..., Path]) -> None:
    path = put(DATA)
    with sl.read_tfrecord(path).open() as stream:
        places = [stream.snapshot().flow_state for _ in zip(stream, range(4), strict=False)]
    assert [str(STARTS[number]) in str(place) for number, place in enumerate(places, 1)] == [True] * 4


def test_any_damaged_byte_is_found(put: Callable[..., Path]) -> None:
    whole, begin = record_file([b"one", b"three", b"five"]), len(framed(b"one"))
    for at in range(len(framed(b"three"))):
        data = bytearray(whole)
        data[begin + at] ^= 0x10
        path = put(bytes(data))
        records, (message,) = left_out(path)
        assert records == ([b"one"] if at < 12 else [b"one", b"five"])
        assert message.startswith(f"{path} record 2 (byte {begin}): its {'length' if at < 12 else 'data'}")


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("bad", [[0], [1, 2], [0, 3, 4], [4], [0, 1, 2, 3, 4]])
def test_damaged_records_of_one_list_are_left_out(put: Callable[..., Path], bad: list[int]) -> None:
    data = bytearray(DATA)
    for number in bad:
        data[STARTS[number + 1] - 1] ^= 1
    path = put(bytes(data))
    records, messages = left_out(path)
    assert records == [record for number, record in enumerate(RECORDS) if number not in bad]
    told = [f"{path} record {number + 1} (byte {STARTS[number]}): its data" for number in bad]
    assert [message[: len(begin)] for message, begin in zip(messages, told, strict=True)] == told


def test_lengths_of_any_number_are_known_and_checked(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "MOST_HEADS", 3)
    records = [bytes(size % 7) for size in range(100)]
    data = bytearray(record_file(records))
    assert list(sl.read_tfrecord(put(bytes(data)))) == records
    data[starts_of(records)[70]] ^= 1
    got, (message,) = left_out(put(bytes(data)))
    assert (got, "length's checksum is wrong" in message) == (records[:70], True)


@pytest.mark.long
def test_a_file_that_is_cut_anywhere_is_said_to_be(put: Callable[..., Path]) -> None:
    for end in sampled(range(1, len(DATA)), 3):
        whole = max(number for number, start in enumerate(STARTS) if start <= end)
        path = put(DATA[:end])
        records, messages = left_out(path)
        assert records == RECORDS[:whole]
        truncated = f"{path} is truncated: it ends at byte {end}, inside record {whole + 1}"
        assert messages == ([] if end in STARTS else [truncated])
    with pytest.raises(DataError, match="is truncated"):
        list(sl.read_tfrecord(put(DATA[:-1])))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("packed", [False, True])
def test_a_record_that_is_too_long_is_passed_over_unread(put: Callable[..., Path], packed: bool) -> None:
    data = record_file([b"one", b"x" * 5000, b"three"])
    path = put(gzip.compress(data) if packed else data, "a.gz" if packed else "a")
    with pytest.raises(DataError, match=r"record 2 \(byte 19\): it has 5,000 bytes, expected 4,999 at most"):
        list(sl.read_tfrecord(path, max_record_bytes=4999))
    assert left_out(path, max_record_bytes=4999)[0] == [b"one", b"three"]
    assert len(list(sl.read_tfrecord(path, max_record_bytes=5000))) == 3
    cut = put(data[:3000], "cut")
    records, messages = left_out(cut, max_record_bytes=4999)
    assert records == [b"one"]
    assert "truncated" in messages[-1]


def test_what_is_no_tfrecord_file_is_said_to_be_none(put: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"record 1 \(byte 0\): .*no TFRecord file, or damaged"):
        list(sl.read_tfrecord(put(b'{"id": 1}\n' * 10)))
    with pytest.raises(DataError, match="a NumPy array"):
        list(sl.read_tfrecord(put(b"\x93NUMPY" + bytes(100))))


def test_a_length_of_nearly_2_to_the_64_takes_no_memory(put: Callable[..., Path]) -> None:
    length = b"\xff" * 8
    path = put(length + checksum(length) + b"x")
    with pytest.raises(DataError, match="18,446,744,073,709,551,615 bytes, expected"):
        list(sl.read_tfrecord(path))
    assert left_out(path)[0] == []


def test_only_what_lies_across_blocks_is_joined(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    joined = 0
    found = tfrecord.RecordCutter._joined

    def counting(cutter: tfrecord.RecordCutter, begin: bytes, size: int) -> bytes:
        nonlocal joined
        joined += size
        return found(cutter, begin, size)

    monkeypatch.setattr(tfrecord.RecordCutter, "_joined", counting)
    records = [b"%d" % number for number in range(20_000)]
    data = record_file(records)
    assert list(sl.read_tfrecord(put(data))) == records
    blocks = 2 + len(data) // local.FIRST_BLOCK_BYTES
    assert joined <= blocks * 2 * len(framed(records[-1]))


def test_options_are_checked(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="at least 1"):
        sl.read_tfrecord("a", max_record_bytes=0)
    with pytest.raises(PlanTypeError, match="an integer"):
        sl.read_tfrecord("a", max_record_bytes="1")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"can't be split into 2 shards \(read_tfrecord\)"):
        list(sl.read_tfrecord(put(DATA)).shard(2, mode="contiguous"))
    monkeypatch.setattr("streamline.core.options.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"read_tfrecord needs google-crc32c.*streamline-data\[tfrecord\]"):
        sl.read_tfrecord("a")
