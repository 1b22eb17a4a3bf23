"""Lines that can't be decoded are left out: reading goes on behind them, in every mode, after any resume."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import DataError, ReadError
from tests.laws.profile import examples

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}

MAX = 40

BAD = {
    "json": b'{"n": ',
    "utf8": b'"\xff\xfe"',
    "mark": b"?\xef\xbb\xbf1",
    "long": b'"' + b"x" * (MAX + 5) + b'"',
    "longest": b'"' + b"y" * 200_000 + b'"',  # longer than a block
}


def read(path: Path, shards: int = 1, **options: Any) -> sl.Pipeline[Any]:
    return sl.read_jsonl(str(path), max_line_bytes=MAX).shard(shards, **options)


def write(path: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    content = b"\n".join(lines) + end
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


kinds = st.lists(st.sampled_from(["good", "good", "blank", *BAD]), max_size=9)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@examples(8)
@given(kinds=kinds, end=st.sampled_from([b"\n", b""]), shards=st.integers(1, 3))
def test_good_lines_arrive_and_bad_ones_are_counted_once(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, kinds: list[str], end: bytes, shards: int
) -> None:
    good = [b"%d" % number for number, kind in enumerate(kinds) if kind == "good"]
    lines = [b"%d" % number if kind == "good" else BAD.get(kind, b"") for number, kind in enumerate(kinds)]
    path = write(tmp_path_factory.mktemp("lines") / f"lines.jsonl{suffix}", lines, end)
    bad = sum(kind in BAD for kind in kinds)
    pipe = read(path, 1 if suffix else shards).merge()
    for k in range(len(good) + 1):
        with pipe.open(**SKIP) as stream:
            before = list(islice(stream, k))
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        with pipe.open(resume=snapshot, **SKIP) as stream:
            assert sorted(before + list(stream)) == sorted(map(int, good))
            assert stream.errors.total == bad
            assert stream.errors.stages == ({"read_jsonl": bad} if bad else {})
            end_of_it = stream.snapshot()
    with pipe.open(resume=end_of_it, **SKIP) as stream:
        assert list(stream) == []
        assert stream.errors.total == bad


def test_a_failure_names_the_line_and_shows_how_it_begins(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b"1", *BAD.values(), b"2", b"[3", b"4"])
    with read(path).open(**SKIP) as stream:
        assert list(stream) == [1, 2, 4]
        report = stream.errors
    assert report.total == 6
    failures = report.last
    assert [failure.kind for failure in failures] == ["read_jsonl"] * 5
    starts = [bytes(failure.item).strip()[:10] for failure in failures]
    assert starts == [line[:10] for line in [*list(BAD.values())[1:], b"[3"]]
    assert all(isinstance(failure.error, DataError) for failure in failures)
    assert len(failures[3].item) < 5_000
    byte = len(b"\n".join([b"1", *BAD.values(), b"2", b""]))
    assert str(failures[4].error).startswith(f"{path} line 8 (byte {byte}): expected one JSON value, got '[3'")
    assert failures[4].position == f"{path} line 8 (ends at byte {byte + 3})"


def test_a_line_of_another_shard_that_is_too_long_is_not_this_ones_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b"1", BAD["longest"], b"2"])
    with read(path, 8).open(**SKIP) as stream:
        assert sorted(stream) == [1, 2]
        assert stream.errors.total == 1


def test_text_goes_on_behind_a_line_that_isnt_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", [b"a", b"\xff", b"", b"b\r", b"\xfe", b"c"])
    with sl.read_lines(str(path)).open(**SKIP) as stream:
        assert list(stream) == ["a", "", "b", "c"]
        assert stream.errors.total == 2


@pytest.mark.long
def test_many_bad_lines_in_a_row_cost_no_more_than_time(tmp_path: Path) -> None:
    lines = [b"[" if number % 3 else b"%d" % number for number in range(900)]
    with read(write(tmp_path / "a.jsonl", lines)).open(**SKIP) as stream:
        assert list(stream) == list(range(0, 900, 3))
        assert stream.errors.total == 600


def test_without_skipping_the_first_bad_line_is_raised_as_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b"1", b"[", b"2"])
    for bad in (b"[", BAD["long"], BAD["longest"]):
        write(path, [b"1", bad, b"2"])
        with read(path).open() as stream:
            assert next(stream) == 1
            with pytest.raises(DataError, match=r"a.jsonl line 2 \(byte 2\)"):
                next(stream)


def test_damaged_data_and_missing_bytes_are_never_skipped(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join(b"%d" % number for number in range(9)))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole[:-6])
    with sl.read_jsonl(str(path)).open(**SKIP) as stream, pytest.raises(DataError, match="truncated"):
        list(stream)
    (tmp_path / "b.jsonl").write_text("1\n")
    pipe = sl.read_jsonl(str(tmp_path / "b.jsonl"))
    opened = pipe.open(**SKIP)
    (tmp_path / "b.jsonl").unlink()
    with opened as stream, pytest.raises(ReadError):
        list(stream)


def test_a_bad_line_is_a_dead_letter_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b"1", b"[", b"2"])
    letters = tmp_path / "bad.jsonl"
    with read(path).open(**SKIP, dead_letters=letters) as stream:
        assert list(stream) == [1, 2]
    (letter,) = map(json.loads, letters.read_text().splitlines())
    assert letter["stage"] == "read_jsonl"
    assert letter["item"] == repr(b"[\n")
    assert letter["position"] == f"{path} line 2 (ends at byte 4)"
    assert "DataError" in letter["traceback"]


TABLE = "name,n\nä,1\nb,2\n"

VALUES = "".join(f'{{"a": {n}}}\n' for n in range(3))

UTF_16 = r"it seems to be text in UTF-16: convert the file, `iconv -f UTF-16 -t UTF-8`"

LONE_CR = r"a line ends with \\n or \\r\\n, and there is \\r alone: convert the file, `tr '\\r' '\\n'`"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("lines", TABLE.encode("utf-16"), rf"line 1 \(byte 0\): expected UTF-8, got 0xff .*: {UTF_16}"),
        ("csv", TABLE.encode("utf-16"), rf"line 1 \(byte 0\): expected UTF-8, got 0xff .*: {UTF_16}"),
        ("csv", b"\xfe\xff" + TABLE.encode("utf-16-be"), rf"expected UTF-8, got 0xfe .*: {UTF_16}"),
        ("csv", TABLE.encode("utf-16-le"), UTF_16),
        ("csv", TABLE.replace("ä", "a").encode("utf-16-le"), rf"line 1 .*expected CSV: {UTF_16}"),
        ("jsonl", VALUES.encode("utf-16"), rf"line 1 \(byte 0\): expected UTF-8, got 0xff .*: {UTF_16}"),
        ("jsonl", VALUES.encode("utf-16-le"), rf"line 1 \(byte 0\): expected one JSON value, got .*: {UTF_16}"),
        ("jsonl", VALUES.replace("\n", "\r").encode(), rf"line 1 .*: {LONE_CR}"),
        ("csv", TABLE.replace("\n", "\r").encode(), rf"line 1 .*expected CSV: {LONE_CR}"),
        ("csv", b"a,b\r\n1,2\r3,4\r\n", rf"line 2 .*expected CSV: {LONE_CR}"),
        ("csv", b"sep=;\r\na;b\r\n1;2\r\n", r"line 1 .*got Excel's 'sep=;': leave the line out, .*delimiter=';'"),
        ("csv", b"\xef\xbb\xbfsep=,\na,b\n1,2\n", r"line 1 .*got Excel's 'sep=,'"),
        ("jsonl", json.dumps([{"a": 1}, {"a": 2}], indent=2).encode(), r"line 1 .*: `jq -c '\.\[\]'` makes .* element"),
        ("jsonl", json.dumps({"a": {"b": 2}}, indent=2).encode(), r"line 1 .*: `jq -c \.` makes a line of each value"),
        ("jsonl", VALUES.encode() + bytes(9), r"line 4 .*: the file is damaged there, it has a run of NULs"),
        ("csv", bytes(512) + TABLE.encode(), r"line 1 .*: the file is damaged there, it has a run of NULs"),
        ("jsonl", VALUES.encode()[:-3], r"line 3 .*the value is truncated: the file was cut off"),
    ],
)  # fmt: skip
def test_what_a_text_is_instead_and_the_way_out_are_said(
    kind: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(getattr(sl, f"read_{kind}")(path))


def test_brotli_is_named_by_its_files_name_unless_that_holds_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.br"
    path.write_bytes(bytes.fromhex("1b2a00f88da4b6d5e1ff9a0cc0de"))
    with pytest.raises(DataError, match=r"x\.jsonl\.br is a brotli file, .*`brotli -d`"):
        list(sl.read_jsonl(path))
    path.write_bytes(VALUES.encode())
    assert len(list(sl.read_jsonl(path))) == 3
