import gzip
import json
import pickle
import random
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given as example_of
from hypothesis import settings
from hypothesis import strategies as st

import streamline as sl
from streamline.core.flow import Site
from streamline.core.tasks import Session
from streamline.errors import DataError, PlanError, PlanTypeError, ReadError, ResumeError
from streamline.io.storage.base import FoundObject
from streamline.io.storage.options import HttpOptions
from streamline.sources.base import Part
from streamline.sources.files import Files
from streamline.testing.checks import check_resume
from tests.file_kit import Read, check_every_resume
from tests.laws.profile import sampled
from tests.serving import named


def read_lines(paths: Any, **options: Any) -> Files[str]:
    source = sl.read_lines(paths, **options).plan.source
    assert isinstance(source, Files)
    return source


def read_jsonl(paths: Any, **options: Any) -> Files[Any]:
    source = sl.read_jsonl(paths, **options).plan.source
    assert isinstance(source, Files)
    return source


CONTENTS = {
    "0-plain": b"a\nbc\n\nd\n",
    "1-empty": b"",
    "2-crlf": b"x\r\ny\r\n\r\nz\r",
    "3-open": "ö\n\n€uro".encode(),
    "4-newline": b"\n",
    "5-mark": b"\xef\xbb\xbfa\r\n\xef\xbb\xbfb",
    "6-only a mark": b"\xef\xbb\xbf",
    "7-two marks": b"\xef\xbb\xbf\xef\xbb\xbf\n",
}
LINES = ["a", "bc", "", "d", "x", "y", "", "z\r", "ö", "", "€uro", "", "a", "\ufeffb", "\ufeff"]

RECORDS = [{"id": 1}, None, 3, "v\nier", [5], {"ü": 6.5}, 7, "\ufeff8"]
JSONL = [
    b'{"id":1}\n\nnull\n',
    b"\n  \n\r\n",
    '3\r\n"v\\nier"\n\n[5]\n\n{"ü":6.5}'.encode(),
    '\ufeff\n7\n"\ufeff8"\n'.encode(),
    b"\xef\xbb\xbf",
]


@pytest.mark.one_in(5, 4)
async def test_lines_resume_anywhere(put: Any, read: Read, slices: None) -> None:
    paths = [put(name, data) for name, data in CONTENTS.items()]
    await check_every_resume(read, named(read_lines(paths)).resolved(), LINES)


@pytest.mark.one_in(3)
async def test_json_resumes_anywhere(put: Any, read: Read, slices: None) -> None:
    paths = [put(f"part-{number}", data) for number, data in enumerate(JSONL)]
    await check_every_resume(read, named(read_jsonl(paths)).resolved(), RECORDS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shards", [1, 3, 30])
async def test_a_mark_at_the_beginning_of_a_file_is_no_text_wherever_it_is_split(
    tmp_path: Path, read: Read, slices: None, shards: int
) -> None:
    path = tmp_path / "a.txt"
    for text in ("\ufeff1\n2\n\ufeff3\n4", "\ufeff", "\ufeff\n", "\ufeff1", "\ufeff\ufeff1\n"):
        path.write_text(text)
        source = read_lines(path).resolved()
        found = list[str]()
        for shard in range(shards):
            options = {"mode": "contiguous", "shard": shard, "num_shards": shards}
            part = await read(source, **options)
            for done, state in enumerate(part.states):
                assert (await read(source, json.loads(json.dumps(state)), **options)).items == part.items[done + 1 :]
            found += part.items
        assert found == text.removeprefix("\ufeff").splitlines()


async def test_a_mark_counts_where_bytes_are_counted_and_not_where_a_line_is_measured(
    tmp_path: Path, read: Read, slices: None
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf12345\n6\n")
    whole = await read(read_lines(path, max_line_bytes=5))
    assert whole.items == ["12345", "6"]
    assert [state["read_lines"] for state in whole.states] == [
        {"file": str(path), "line": 1, "byte": 9},
        {"file": str(path), "line": 2, "byte": 11},
    ]
    failed = await read(read_lines(path, max_line_bytes=4))
    assert failed.items == []
    assert f"{path} line 1 (byte " in str(failed.failure)
    path.write_bytes(b"\xef\xbb\xbf{]\n\xef\xbb\xbf6\n")
    assert f"{path} line 1 (byte 3): expected one JSON value" in str((await read(read_jsonl(path))).failure)
    with sl.read_jsonl(path).open(on_error="skip", max_errors=None) as stream:
        assert list(stream) == []
        assert stream.errors.total == 2


async def test_a_state_names_file_line_and_byte(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"ö":1}\n\n\n{"b":2}\r\n'.encode())
    whole = await read(read_jsonl(path))
    assert whole.begin == {"read_jsonl": {"file": str(path), "line": 0, "byte": 0}}
    assert whole.states == [
        {"read_jsonl": {"file": str(path), "line": 1, "byte": 9}},
        {"read_jsonl": {"file": str(path), "line": 4, "byte": 20}},
    ]
    assert whole.wheres == [f"{path} line 1 (ends at byte 9)", f"{path} line 4 (ends at byte 20)"]


async def test_a_resume_at_a_files_end_does_not_read_it_again(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(name.encode() + b"\n"))
    source = read_lines(str(tmp_path / "*.gz")).resolved()
    whole = await read(source)
    assert whole.states[0]["read_lines"] == {"file": str(tmp_path / "b.gz"), "line": 0, "byte": 0}
    assert whole.wheres[0].startswith(str(tmp_path / "a.gz") + " line 1")
    assert whole.end["read_lines"]["file"] is None
    (tmp_path / "a.gz").unlink()
    assert (await read(source, whole.states[0])).items == ["b"]
    (tmp_path / "b.gz").unlink()
    assert (await read(source, whole.end)).items == []


async def test_a_resume_over_http_asks_for_the_bytes_from_there_on(server: Any, read: Read) -> None:
    server.objects["x.txt"] = b"one\ntwo\nthree\n"
    source = read_lines(server.url("x.txt"))
    whole = await read(source, mode="file")
    server.requests.clear()
    assert (await read(source, whole.states[1], mode="file")).items == ["three"]
    assert [request.headers["range"] for request in server.requests] == [
        "bytes=0-9",
        "bytes=8-8388615",
    ]  # the magic bytes, then


async def test_skipped_lines_are_progress(tmp_path: Path, read: Read) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n" + b"\n" * 1000)
    whole = await read(read_jsonl(tmp_path / "x.jsonl"))
    assert whole.end["read_jsonl"] == {"file": str(tmp_path / "x.jsonl"), "line": 1001, "byte": 1002}


async def test_one_huge_line_over_several_blocks(put: Any, read: Read) -> None:
    text = "x" * 3_000_000
    whole = await check_every_resume(
        read, read_lines(put("x", f"a\n{text}\nb".encode())), ["a", text, "b"], mode="file"
    )
    assert len(whole.states) == 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("line", sampled(range(6), 5))
async def test_a_line_that_is_not_utf8_fails_after_those_before(put: Any, read: Read, slices: None, line: int) -> None:
    texts = [b"eins", "zwö".encode(), b"", b"vier", b"f\xc3\xbcnf", b"sechs"]
    texts[line] += b"\xff"
    path, byte = put("x", b"\n".join(texts)), len(b"".join(text + b"\n" for text in texts[:line]))
    whole = await read(read_lines(path), mode="file")
    assert whole.items == [text.decode() for text in texts[:line]]
    assert isinstance(whole.failure, DataError)
    assert str(whole.failure).startswith(f"{path} line {line + 1} (byte {byte}): expected UTF-8, got 0xff")
    assert isinstance(whole.failure.__cause__, UnicodeDecodeError)
    assert whole.end["read_lines"] == {"file": path, "line": line, "byte": byte}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("line", sampled(range(6), 5))
async def test_a_malformed_record_fails_after_those_before_and_a_fix_lets_a_resume_go_on(
    put: Any, read: Read, slices: None, line: int
) -> None:
    texts = [b"1", b"", b'{"a": 2}', b" ", b"[3]", b"4"]
    bad = [*texts]
    bad[line] = b'{"a" 2}'
    path, byte = put("x", b"\n".join(bad)), len(b"".join(text + b"\n" for text in bad[:line]))
    whole = await read(read_jsonl(path), mode="file")
    good = [json.loads(text) for text in texts[:line] if text.strip()]
    assert whole.items == good
    assert isinstance(whole.failure, DataError)
    start = f"{path} line {line + 1} (byte {byte}): expected one JSON value, got '{{\"a\" 2}}': JSON is malformed"
    assert str(whole.failure).startswith(start)
    assert "byte 5" in str(whole.failure)
    put("x", b"\n".join(texts))  # the fix
    rest = await read(read_jsonl(path), whole.end, mode="file")
    assert good + rest.items == [1, {"a": 2}, [3], 4]


async def test_a_line_that_is_too_long_fails_after_those_before(put: Any, read: Read, slices: None) -> None:
    path = put("x", b"ok\n12345\n")
    whole = await read(read_lines(path, max_line_bytes=4), mode="file")
    assert whole.items == ["ok"]
    assert str(whole.failure).startswith(f"{path} line 2 (byte 3): expected a line of at most 4 bytes")


async def test_gzip_that_is_cut_at_any_byte_fails_after_its_lines(tmp_path: Path, read: Read) -> None:
    text = "".join(f"line {number}\n" for number in range(40))
    data, path = gzip.compress(text.encode()), tmp_path / "x.gz"
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = await read(read_lines(path))
        assert isinstance(whole.failure, DataError)
        assert str(whole.failure).startswith(f"{path}: the gzip data is truncated: it ends at compressed byte {cut}")
        assert whole.items == text.splitlines()[: len(whole.items)]
    assert len(whole.items) == 40  # only the checksum was missing
    path.write_bytes(data)
    assert (await read(read_lines(path), whole.end)).items == []


@pytest.mark.parametrize("data", [b"plain\n", gzip.compress(b"a\n") + b"garbage"], ids=["plain", "garbage"])
async def test_what_is_named_gzip_and_is_not_fails(tmp_path: Path, read: Read, data: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(data)
    whole = await read(read_lines(tmp_path / "x.gz"))
    assert isinstance(whole.failure, DataError)
    assert "x.gz: " in str(whole.failure)
    assert whole.items == (["a"] if data[0] == 0x1F else [])


async def test_a_server_that_gives_up_fails_after_what_has_come(server: Any, read: Read) -> None:
    server.objects["x.txt"] = b"one\ntwo\nthree\n"
    server.script = [server.faulty(cut=9)] + [server.faulty("status", code="503 Busy")] * 9
    source = read_lines(server.url("x.txt"), http=HttpOptions(retries=2))
    whole = await read(source)
    assert whole.items == ["one", "two"]
    assert isinstance(whole.failure, ReadError)
    assert "at byte 9" in str(whole.failure)
    server.script = []
    assert (await read(source, whole.end)).items == ["three"]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("num_shards", range(1, 10))
@pytest.mark.parametrize("http", [False, True])
async def test_contiguous_shards_split_a_file_unread(
    tmp_path: Path, server: Any, read: Read, num_shards: int, http: bool, slices: None
) -> None:
    draw = random.Random(num_shards)
    for end in (b"", b"\n"):
        texts = [
            b"ab\xc3\xb6"[: draw.choice([0, 0, 1, 2, 4])] * draw.choice([1, 1, 30])
            for _ in range(draw.choice([0, 1, 5, 30]))
        ]
        data = b"\n".join(texts) + end
        (tmp_path / "x.txt").write_bytes(data)
        server.objects["x.txt"] = data
        source = read_lines(server.url("x.txt") if http else tmp_path / "x.txt")
        found: list[str] = []
        for shard in range(num_shards):
            whole = await read(source, shard=shard, num_shards=num_shards, mode="contiguous")
            assert whole.failure is None
            found += whole.items
            for done, state in enumerate(whole.states if len(whole.items) < 9 else []):
                rest = await read(source, state, shard=shard, num_shards=num_shards, mode="contiguous")
                assert rest.items == whole.items[done + 1 :]
        expected = data.decode().split("\n")
        assert found == (expected if expected[-1] else expected[:-1])


async def test_a_message_of_a_contiguous_shard_says_whose_line_it_counts(tmp_path: Path, read: Read) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n2\n3\n4\n5\nbad\n")
    whole = await read(read_jsonl(tmp_path / "x.jsonl"), mode="contiguous", shard=1, num_shards=2)
    assert whole.items == [5]
    assert "x.jsonl line 2 of shard 1 (byte 10): " in str(whole.failure)
    assert whole.wheres[0].endswith("x.jsonl line 1 of shard 1 (ends at byte 10)")


async def test_contiguous_mode_is_refused_where_it_can_not_be(tmp_path: Path, read: Read) -> None:
    for name in ("a.gz", "b.txt", "hidden"):
        (tmp_path / name).write_bytes(gzip.compress(b"a\n") if name != "b.txt" else b"a\n")
    split = {"mode": "contiguous", "num_shards": 2}
    with pytest.raises(PlanError, match=r"gzip file.*can't be split into 2 shards"):
        await read(read_lines(tmp_path / "a.gz"), **split)
    with pytest.raises(PlanError, match=r'there are 2: write .shard\(2, mode="file"\)'):
        await read(read_lines([tmp_path / "a.gz", tmp_path / "b.txt"]), **split)
    for shard in range(2):
        whole = await read(read_lines(tmp_path / "hidden"), shard=shard, **split)
        assert isinstance(whole.failure, PlanError)
    assert (await read(read_lines(tmp_path / "a.gz"), mode="contiguous")).items == ["a"]


async def test_contiguous_over_http_needs_a_size(server: Any, read: Read) -> None:
    server.objects["x.txt"] = b"a\nb\n"
    server.script = [server.faulty(chunked=True, ranges=False)]
    whole = await read(read_lines(server.url("x.txt")), mode="contiguous", num_shards=2)
    assert "doesn't tell its size" in str(whole.failure)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
async def test_whole_files_go_to_shards_in_turn(tmp_path: Path, read: Read, num_shards: int) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number}a\n{number}b\n")
    source = read_lines(tmp_path / "*.txt").resolved()
    for shard in range(num_shards):
        expected = [f"{number}{letter}" for number in range(shard, 5, num_shards) for letter in "ab"]
        await check_every_resume(read, source, expected, mode="file", shard=shard, num_shards=num_shards)
        replicated = await read(source, mode="replicated", shard=shard, num_shards=num_shards)
        assert len(replicated.items) == 10  # the stride is a stage of its own


async def test_shuffled_files_are_each_read_once(tmp_path: Path, read: Read) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    source = read_lines(tmp_path / "*.txt").resolved()
    orders = []
    for seed in range(3):
        shards = [await read(source, mode="file", shard=s, num_shards=2, shuffle_seed=seed) for s in range(2)]
        assert sorted(shards[0].items + shards[1].items) == list("012345678")
        orders.append(shards[0].items + shards[1].items)
    assert len(set(map(tuple, orders))) == 3


@pytest.mark.parametrize("name", ["ö ü.txt", "a b.txt", "100%.txt", "日本語.txt", "x#y?.txt", "[1].txt"])
async def test_names_may_hold_anything(tmp_path: Path, read: Read, name: str) -> None:
    (tmp_path / name).write_text("a\nb\n")
    await check_every_resume(read, read_lines(tmp_path / name), ["a", "b"])


def test_shuffled_files_may_be_replicated(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number}a\n{number}b\n")
    pipe = sl.read_lines(tmp_path / "*.txt").shuffle_files(seed=3)
    whole = list(pipe)
    assert whole != sorted(whole)
    assert list(pipe.shard(3, mode="replicated")) == whole
    check_resume(pipe.take(7).shard(2, mode="replicated"), generations=2)


async def test_a_file_that_is_gone_fails_when_it_is_read(tmp_path: Path, read: Read) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"{name}\n")
    source = read_lines([tmp_path / "a", tmp_path / "b"]).resolved()
    (tmp_path / "b").unlink()
    whole = await read(source)
    assert whole.items == ["a"]
    assert isinstance(whole.failure, ReadError)
    assert "no such file" in str(whole.failure)


async def test_a_snapshot_of_other_files_is_refused(tmp_path: Path, read: Read) -> None:
    (tmp_path / "a").write_text("a\n")
    with pytest.raises(ResumeError, match=r"stands in b, line 3, .*which is not among the 1 files of shard 0 of 1"):
        await read(read_lines(tmp_path / "a"), {"read_lines": {"file": "b", "line": 3, "byte": 9}})


async def test_a_file_shorter_than_the_state_is_an_error(put: Any, read: Read) -> None:
    path = put("x", b"a\n")
    whole = await read(read_lines(path), {"read_lines": {"file": path, "line": 9, "byte": 99}}, mode="file")
    assert isinstance(whole.failure, ReadError)
    assert "expected more than 99" in str(whole.failure)


def test_the_files_are_listed_with_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    source = read_lines(tmp_path / "*.txt")
    assert source.listing() == [{"path": str(tmp_path / "a.txt"), "size": 3}]


def test_files_are_looked_up_once_and_travel_with_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    source = read_lines(tmp_path / "*.txt").resolved()
    (tmp_path / "b.txt").write_text("b")
    assert (
        pickle.loads(pickle.dumps(source)).files
        == source.resolved().files
        == (FoundObject(str(tmp_path / "a.txt"), 1),)
    )


def test_one_file_is_split_and_several_go_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert read_lines(tmp_path / "*.txt").resolved().default_mode == "contiguous"
    assert read_lines(tmp_path / "a.txt").default_mode == "contiguous"
    (tmp_path / "b.txt").write_text("b")
    assert read_lines(tmp_path / "*.txt").default_mode == "file"
    with pytest.raises(ReadError, match="no such file"):
        read_lines(tmp_path / "missing").resolved()


@pytest.mark.parametrize(
    "options", [{"max_line_bytes": 0}, {"max_line_bytes": 1.5}, {"max_line_bytes": True}, {"http": {}}]
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((PlanError, PlanTypeError), match=r"expected|is an integer|at least"):
        read_jsonl("x", **options)


async def test_a_remainder_can_not_be_dropped(tmp_path: Path, read: Read) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(PlanError, match="can't drop a remainder"):
        await read(read_lines(tmp_path / "a.txt"), drop_remainder=True)


@settings(max_examples=25, deadline=None)
@example_of(
    st.lists(st.sampled_from([b"", b"a", b"\r", "ö".encode(), b"long" * 20]), max_size=30),
    st.sampled_from([b"", b"\n"]),
    st.integers(1, 9),
)
def test_contiguous_shards_of_any_file_are_the_file(texts: list[bytes], end: bytes, num_shards: int) -> None:
    data = b"\n".join(texts) + end
    expected = data.decode().replace("\r\n", "\n").split("\n")

    async def shards(path: str) -> list[str]:
        found: list[str] = []
        for shard in range(num_shards):
            site = Site(cast(Any, SimpleNamespace(session=Session())), shard, num_shards)
            async with aclosing(read_lines(path).open(site, Part(mode="contiguous"))) as flow:
                found += [line async for line in flow]
        return found

    with TemporaryDirectory() as folder:
        path = Path(folder, "x")
        path.write_bytes(data)
        assert anyio.run(shards, str(path)) == (expected if expected[-1] else expected[:-1])


def test_reading_local_files_does_not_import_an_http_client() -> None:
    code = "import sys, streamline.sources.files; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
