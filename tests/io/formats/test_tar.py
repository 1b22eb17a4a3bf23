import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from hypothesis import given as example_of
from hypothesis import settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError, StreamlineError
from streamline.io.formats.tar import part_of
from streamline.io.formats.tar_reader import Scanner, TarHeader, parse_plain
from streamline.io.storage.base import FoundObject
from streamline.sources.files import Files
from tests.io.formats.archives import MEMBERS, SAMPLES, archive, edited, ends, special

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "ö" * 90 + "/" + "n" * 120


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    def put_(data: bytes, name: str = "a.tar") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return put_


def source_of(paths: Any, **options: Any) -> Files[Any]:
    source = sl.read_tar(paths, **options).plan.source
    assert isinstance(source, Files)
    if "://" in str(paths):  # the server is in the test's own loop: nobody can be asked before it runs
        return replace(source, found=tuple(map(FoundObject, source.paths)))
    return source.resolved()


def failing(pipeline: sl.Pipeline[Any]) -> tuple[list[Any], str]:
    """Return what comes before a failure, and its message."""
    items: list[Any] = []
    with pytest.raises(StreamlineError) as failed:  # noqa: PT012 - what came before is asked for, too
        for item in pipeline:
            items.append(item)  # noqa: PERF402 - extend would take none of them
    return items, str(failed.value)


# What is read -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_members_are_grouped_by_key(put: Any, blocks: None, format: int) -> None:
    assert list(sl.read_tar(put(archive(format=format)))) == SAMPLES


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_single_members(put: Any, blocks: None, format: int) -> None:
    members = [*MEMBERS, ("README", b"r"), (".hidden", b"h"), ("__meta__/x.y", b"m")]
    items = list(sl.read_tar(put(archive(members, format)), group=False))
    assert items == members
    assert items[0].name == "train/0.JPG"
    assert items[0].data == b"j0" * 300


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a.jpg", ("a", "jpg")),
        ("d.e/a.B.Gz", ("d.e/a", "b.gz")),
        ("./a.jpg", ("./a", "jpg")),
        ("/a.jpg", ("/a", "jpg")),
        ("../../etc/a.cls", ("../../etc/a", "cls")),
        ("a.", ("a", "")),
        ("a", None),
        ("d.e/a", None),
        (".a", None),
        ("d/.a.b", None),
        ("__a__", None),
        ("__a__/b.c", None),
        ("__a__b.c", ("__a__b", "c")),
        ("__a.c__", None),
        ("d/__a__.c", ("d/__a__", "c")),
        ("__a.c", ("__a", "c")),
    ],
)
def test_keys_are_those_of_webdataset(name: str, part: Any) -> None:
    assert part_of(TarHeader(name, 0, True, ""), True) == part


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_long_names(put: Any, blocks: None, format: str) -> None:
    data = archive([(f"{LONG}.a", b"1"), (f"{LONG}.b", b"2"), ("c.d", b"3")], FORMATS[format])
    assert list(sl.read_tar(put(data))) == [{"__key__": LONG, "a": b"1", "b": b"2"}, {"__key__": "c", "d": b"3"}]


def test_ustar_prefixes(put: Any) -> None:
    name = "p" * 100 + "/" + "n" * 90
    assert [item["__key__"] for item in sl.read_tar(put(archive([(f"{name}.a", b"")])))] == [name]


def test_old_headers_without_magic(put: Any) -> None:
    def v7(head: bytearray) -> None:
        head[156:157] = b"\0"
        head[257:] = bytes(255)

    data = archive([("a.b", b"1")])
    assert list(sl.read_tar(put(edited(data, v7)))) == [{"__key__": "a", "b": b"1"}]


def test_a_global_header_as_git_writes_it(put: Any) -> None:
    data = archive(format=tarfile.PAX_FORMAT, pax_headers={"comment": "0123abcd"})
    assert b"comment=0123" in data[:1024]
    assert list(sl.read_tar(put(data))) == SAMPLES


def test_a_size_in_base_256(put: Any) -> None:
    data = archive([("a.b", b"12345")])
    edit = edited(data, lambda head: head.__setitem__(slice(124, 136), b"\x80" + (5).to_bytes(11, "big")))
    assert list(sl.read_tar(put(edit))) == [{"__key__": "a", "b": b"12345"}]


def test_a_name_that_is_no_utf8_is_kept_as_python_does(put: Any) -> None:
    data = archive([("aXb.c", b"1")])
    edit = edited(data, lambda head: head.__setitem__(1, 0xFF))
    assert next(iter(sl.read_tar(put(edit))))["__key__"] == "a\udcffb"


def test_what_is_no_file_is_passed_over(put: Any, blocks: None) -> None:
    others = [
        special("d.x", tarfile.DIRTYPE),
        special("s.x", tarfile.SYMTYPE, "a.b"),
        special("f.x", tarfile.FIFOTYPE),
        special("c.x", tarfile.CHRTYPE),
        special("v.x", b"V", size=700),
    ]
    data = archive([others[0], ("a.b", b"1"), *others, ("a.c", b"2"), others[4], ("b.b", b"3"), others[1]])
    expected = [{"__key__": "a", "b": b"1", "c": b"2"}, {"__key__": "b", "b": b"3"}]
    assert list(sl.read_tar(put(data))) == expected
    assert [item.name for item in sl.read_tar(put(data), group=False)] == ["a.b", "a.c", "b.b"]


@pytest.mark.parametrize("behind", [0, 1, 511, 512, 1024, 10240, 10241])
def test_any_number_of_zeros_may_follow_the_first_block_of_the_end_mark(put: Any, blocks: None, behind: int) -> None:
    whole = archive()
    data = whole[: ends(whole)[-1] + 512] + bytes(behind)
    assert list(sl.read_tar(put(data))) == SAMPLES


def test_an_archive_without_members(put: Any) -> None:
    paths = [put(archive([]), "0.tar"), put(archive(), "1.tar"), put(bytes(512), "2.tar")]
    assert list(sl.read_tar(paths)) == SAMPLES


def test_a_sample_ends_with_its_archive(put: Any) -> None:
    paths = [put(archive([("a.b", b"1")]), "0.tar"), put(archive([("a.c", b"2")]), "1.tar")]
    assert list(sl.read_tar(paths)) == [{"__key__": "a", "b": b"1"}, {"__key__": "a", "c": b"2"}]


@pytest.mark.long
@settings(max_examples=200, deadline=None, derandomize=True)
@example_of(st.data())
def test_plain_headers_are_read_as_tarfile_reads_them(data: Any) -> None:
    name = data.draw(st.text("aö./\x00", min_size=1, max_size=30)) + "x"
    format = data.draw(st.sampled_from(list(FORMATS.values())))
    head = bytearray(archive([(name.replace("\0", "_"), b"12345")], format)[:512])
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.sampled_from([*range(10), *range(124, 136), *range(148, 157), *range(257, 265), 345, 400]))
        head[at] = data.draw(st.sampled_from([0, 32, 48, 49, 55, 56, 128, 255]))
    if data.draw(st.booleans()):
        head = bytearray(edited(bytes(head), lambda _: None))
    found = parse_plain(bytes(head))
    if found is not None:
        info = tarfile.TarInfo.frombuf(bytes(head), "utf-8", "surrogateescape")
        assert found == (info.name, info.size, info.isreg(), "")


def test_most_headers_are_plain() -> None:
    for format in FORMATS.values():
        assert parse_plain(archive(format=format)[:512]) == (MEMBERS[0][0], 600, True, "")
    assert parse_plain(
        edited(archive([("n" * 99, b"")]), lambda head: head.__setitem__(slice(0, 99), b"\xff" * 99))[:512]
    )


# Where it stands ----------------------------------------------------------------------------------------------------


async def test_a_place_is_the_header_of_the_next_sample(put: Any, read: Any) -> None:
    data = archive()
    path = put(data)
    states = (await read(source_of(path))).states
    assert [state["read_tar"] for state in states[:2]] == [
        {"file": str(path), "byte": ends(data)[1], "sample": 1},
        {"file": str(path), "byte": ends(data)[3], "sample": 2},
    ]


# What is wrong ------------------------------------------------------------------------------------------------------


def test_cut_anywhere_gives_whole_samples_and_an_error(put: Any) -> None:
    data = archive([("a.x", b"1" * 600), ("a.y", b"2"), ("b.x", b"3"), ("c.x", b"4" * 512)], tarfile.PAX_FORMAT)
    bounds = ends(data)
    samples = list(sl.read_tar(put(data)))
    for cut in range(0, bounds[-1] + 1, 128):
        items, message = failing(sl.read_tar(put(data[:cut])))
        assert items == samples[: len(items)]
        assert len(items) == sum(cut >= bounds[member] + 512 for member in (1, 2)), cut
        assert "a.tar" in message
        assert f"{cut:,}" in message or not cut
    assert "is empty" in failing(sl.read_tar(put(b"")))[1]


def test_truncated_names_the_member_and_its_header(put: Any) -> None:
    data = archive()
    assert failing(sl.read_tar(put(data[:1800])))[1] == (
        f"{put(data[:1800])} is truncated: it ends at byte 1,800, inside the header at byte 1,536, after 'train/0.JPG'"
    )
    cut = ends(data)[2] + 600
    message = failing(sl.read_tar(put(data[:cut])))[1]
    assert "inside 'train/1.seg.png' (its header is at byte 3,072)" in message


def test_a_missing_end_mark_is_an_error_that_can_be_skipped(put: Any) -> None:
    data = archive()
    path = put(data[: ends(data)[-1]])
    items, message = failing(sl.read_tar(path))
    assert items == SAMPLES[:3]
    assert "after '3.a', without the end mark" in message
    with sl.read_tar([path, put(data, "b.tar")]).open(on_error="skip") as stream:
        assert list(stream) == [*SAMPLES[:3], *SAMPLES]
        assert stream.errors.total == 1
    assert failing(sl.read_tar(path, group=False))[0] == MEMBERS


@pytest.mark.parametrize("at", [0, 3, 100, 124, 148, 200, 300, 511])
def test_a_damaged_header_is_an_error_never_the_end(put: Any, blocks: None, at: int) -> None:
    data = bytearray(archive())
    start = ends(bytes(data))[3]
    data[start + at] ^= 0x55
    items, message = failing(sl.read_tar(put(bytes(data))))
    assert items == SAMPLES[:1]
    assert f"a.tar, byte {start:,}: the tar header there after 'train/1.seg.png' can't be read" in message


def test_a_block_of_zeros_among_members_is_no_end(put: Any, blocks: None) -> None:
    data = archive()
    start = ends(data)[3]
    holed = data[:start] + bytes(512) + data[start + 512 :]
    items, message = failing(sl.read_tar(put(holed)))
    assert items == SAMPLES[:2]
    assert f"data after its end mark, at byte {start + 512:,} (the mark follows 'train/1.seg.png')" in message
    assert "joined with cat" in failing(sl.read_tar(put(data + data)))[1]


def test_no_archive_at_all(put: Any) -> None:
    assert "a.tar doesn't begin with a tar header" in failing(sl.read_tar(put(b"hello " * 1000)))[1]


def test_a_second_member_for_a_field(put: Any) -> None:
    data = archive([("a.x", b"1"), ("b.x", b"1"), ("b.X", b"2"), ("b.y", b"3"), ("c.x", b"4")])
    items, message = failing(sl.read_tar(put(data)))
    assert items == [{"__key__": "a", "x": b"1"}]
    assert "member 'b.X' (byte 2,048) is the second one for 'x' of the sample 'b' (byte 1,024)" in message
    with sl.read_tar(put(data)).open(on_error="skip") as stream:
        assert [item["__key__"] for item in stream] == ["a", "c"]
        assert stream.errors.total == 1


def test_a_field_that_is_called_like_the_key(put: Any) -> None:
    assert "second one for '__key__'" in failing(sl.read_tar(put(archive([("a.__key__", b"")]))))[1]


def test_a_hard_link(put: Any) -> None:
    data = archive([("a.x", b"1"), special("b.x", tarfile.LNKTYPE, "a.x"), ("c.x", b"2")])
    items, message = failing(sl.read_tar(put(data)))
    assert items == [{"__key__": "a", "x": b"1"}]
    assert "member 'b.x' (byte 1,024) is a hard link to 'a.x'" in message
    with sl.read_tar(put(data), group=False).open(on_error="skip") as stream:
        assert [item.name for item in stream] == ["a.x", "c.x"]


@pytest.mark.parametrize("group", [True, False])
def test_a_sample_that_is_too_large(put: Any, blocks: None, group: bool) -> None:
    data = archive([("a.x", b"1" * 3000), ("b.x", b"2" * 3001), ("c.x", b"3"), ("d.x", b"4" * 4000)])
    items, message = failing(sl.read_tar(put(data), group=group, max_sample_bytes=3000))
    assert len(items) == 1
    assert "member 'b.x'" in message
    assert "3,001 bytes" in message
    assert "raise max_sample_bytes" in message
    with sl.read_tar(put(data), group=group, max_sample_bytes=3000).open(on_error="skip") as stream:
        assert len(list(stream)) == 2
        assert stream.errors.total == 2


def test_a_size_beyond_all_bounds_is_refused_before_anything_is_read(put: Any) -> None:
    huge = edited(archive([("a.x", b"")]), lambda head: head.__setitem__(slice(124, 136), b"77777777777\0"))
    assert "raise max_sample_bytes" in failing(sl.read_tar(put(huge)))[1]
    negative = edited(huge, lambda head: head.__setitem__(slice(124, 136), b"\xff" * 11 + b"\0"))
    assert "a.tar doesn't begin with a tar header" in failing(sl.read_tar(put(negative)))[1]


@pytest.mark.parametrize("kind", [b"x", b"g", b"L"])
def test_an_extension_beyond_all_bounds(put: Any, kind: bytes) -> None:
    data = archive([("a.x", b"1"), special("b.x", kind, size=2**20 + 1), ("c.x", b"2")])
    items, message = failing(sl.read_tar(put(data)))
    assert items == []
    assert "byte 1,024" in message
    assert "expected 1,048,576 at most" in message


def test_sparse_files_are_refused_by_name(put: Any) -> None:
    old = archive([("a.x", b"1"), special("holes.x", tarfile.GNUTYPE_SPARSE), ("c.x", b"2")])
    assert "'holes.x' is a sparse file" in failing(sl.read_tar(put(old)))[1]
    pax = special("holes.x", tarfile.REGTYPE, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    assert "'holes.x' is a sparse file" in failing(sl.read_tar(put(archive([pax], tarfile.PAX_FORMAT))))[1]


def test_a_global_header_that_names_members_is_refused(put: Any) -> None:
    data = archive(format=tarfile.PAX_FORMAT, pax_headers={"path": "everything"})
    assert "it sets 'path' for all members that follow" in failing(sl.read_tar(put(data)))[1]


def test_another_volume(put: Any) -> None:
    assert "goes on from another volume" in failing(sl.read_tar(put(archive([special("a.x", b"M")]))))[1]


def test_gzip_that_is_cut_short(put: Any) -> None:
    packed = gzip.compress(archive(), 0)
    items, message = failing(sl.read_tar(put(packed[:4000], "a.tar.gz")))
    assert items == SAMPLES[:1]
    assert "a.tar.gz: the gzip data is truncated" in message
    assert failing(sl.read_tar(put(packed[:4000], "a.tar.gz"), group=False))[0] == MEMBERS[:3]


@settings(max_examples=60, deadline=None, derandomize=True)
@example_of(st.data())
def test_damage_gives_an_error_or_the_samples(data: Any) -> None:
    whole = bytearray(archive(format=data.draw(st.sampled_from(list(FORMATS.values())))))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(0, len(whole))) :]
    scanner = Scanner("a.tar", 0)
    step = data.draw(st.integers(1, 2000))
    names: list[str] = []
    failure: DataError | None = None
    try:
        for at in range(0, len(whole), step):
            scanner.feed(bytes(whole[at : at + step]))
            while (header := scanner.header()) is not None:
                names.append(header.name)
                scanner.skip()
        scanner.finish()
    except DataError as error:
        failure = error
    if failure is not None:
        assert "a.tar" in str(failure)
    else:
        with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
            assert names == tar.getnames()


# Shared by shards ---------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("shards", [2, 3, 5, 40])
@pytest.mark.parametrize("group", [True, False])
async def test_shards_own_whole_samples(put: Any, read: Any, server: Any, shards: int, group: bool) -> None:
    members = [(f"{n // 3}.{n % 3}", bytes(n * 97 % 2000)) for n in range(60)]
    for data in (archive(members), archive([(f"{LONG}{name}", x) for name, x in members], tarfile.PAX_FORMAT)):
        path = put(data)
        expected = list(sl.read_tar(path, group=group))
        source = source_of(path, group=group)
        found = [
            (await read(source, shard=shard, num_shards=shards, mode="contiguous")).items for shard in range(shards)
        ]
        assert [item for part in found for item in part] == expected
        assert sum(map(bool, found)) > min(shards, len(expected)) // 2


@pytest.mark.parametrize("shards", [2, 7])
async def test_shards_resume_at_every_sample(put: Any, read: Any, shards: int) -> None:
    source = source_of(put(archive([(f"{n // 2}.{n % 2}", bytes(n * 97 % 900)) for n in range(24)])))
    done = 0
    for shard in range(shards):
        where = {"shard": shard, "num_shards": shards, "mode": "contiguous"}
        whole = await read(source, **where)
        for count, state in enumerate([whole.begin, *whole.states]):
            assert (await read(source, json.loads(json.dumps(state)), **where)).items == whole.items[count:], state
        done += len(whole.items)
        assert [state["read_tar"]["sample"] for state in whole.states[:-1]] == list(
            range(done - len(whole.items) + 1, done)
        )
        assert whole.end["read_tar"]["file"] is None


async def test_an_archive_in_an_archive_is_not_taken_apart(put: Any, read: Any) -> None:
    inner = archive([(f"{n}.x", bytes(400)) for n in range(30)])
    source = source_of(put(archive([("a.tar", inner), ("b.tar", inner), ("c.x", b"1")])))
    found = [(await read(source, shard=shard, num_shards=6, mode="contiguous")).items for shard in range(6)]
    assert [item["__key__"] for part in found for item in part] == ["a", "b", "c"]


async def test_the_walk_goes_past_long_data(read: Any, server: Any) -> None:
    size = 3 * 2**20
    server.objects["a.tar"] = archive([(f"{n}.x", bytes(size)) for n in range(8)])
    source = source_of(server.url("a.tar"))
    last = await read(source, shard=6, num_shards=8, mode="contiguous")
    assert [item["__key__"] for item in last.items] == ["7"]
    starts = [request.start for request in server.requests if request.headers.get("range", "").count("-")]
    assert [start // size for start in sorted(set(starts)) if start > 2] == list(range(1, 8))
    server.requests.clear()
    assert (await read(source, last.states[0], shard=6, num_shards=8, mode="contiguous")).items == []
    assert server.requests == []


async def test_shares_of_one_loop_walk_once(put: Any, server: Any) -> None:
    server.objects["a.tar"] = archive([(f"{n}.x", bytes(900)) for n in range(64)])
    pipe = sl.read_tar(server.url("a.tar")).shard(16)
    keys = [item["__key__"] for item in await anyio.to_thread.run_sync(list, pipe)]  # the server is in this loop
    assert sorted(keys, key=int) == [str(n) for n in range(64)]
    ranges = [request.headers.get("range", "") for request in server.requests]
    assert sum(one.startswith("bytes=0-65535") for one in ranges) == 1


async def test_damage_fails_every_shard_after_it(put: Any, read: Any) -> None:
    data = bytearray(archive([(f"{n}.x", bytes(900)) for n in range(16)]))
    data[5 * 1536 + 3] ^= 1
    source = source_of(put(bytes(data)))
    found = [await read(source, shard=shard, num_shards=4, mode="contiguous") for shard in range(4)]
    assert [len(one.items) for one in found] == [4, 0, 0, 0]  # the fifth may go on where the damage is
    assert all("byte 7,680" in str(one.failure) for one in found)


def test_options_are_checked_where_they_are_written() -> None:
    with pytest.raises(PlanTypeError, match="group"):
        sl.read_tar("a.tar", group=cast(Any, "yes"))
    with pytest.raises(PlanError, match="max_sample_bytes"):
        sl.read_tar("a.tar", max_sample_bytes=0)


def test_an_archive_that_has_grown_is_another_one(put: Any) -> None:
    pipe = sl.read_tar(put(archive()))
    with pipe.open() as stream:
        next(iter(stream))
        snapshot = stream.snapshot()
    put(archive([*MEMBERS, ("4.x", bytes(20_000))]))
    for accept in ((), ("read_tar.changed_files",)):
        with pytest.raises(sl.errors.ResumeError, match=r"(?s)changed_files.*can't grow"):
            pipe.open(resume=snapshot, accept=accept)
