"""What every file format promises: each item from each place on, in shares, compressed, damaged, cut short."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, PlanError, ReadError, StreamlineError
from streamline.io.formats import columnar, parquet_table
from streamline.testing.checks import check_resume
from tests.file_kit import PACK
from tests.io.formats.archives import archive
from tests.io.formats.contract import ALL, CASES, FormatCase, arrow_item, parquet_file, record, records_file
from tests.io.formats.records import put
from tests.laws.files import GRAINS
from tests.laws.profile import examples, in_turn, long_but, sampled
from tests.serving import Server

FILES = [range(6), range(0), range(6, 7)]
"""The first has more than a group."""

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}


def of(condition: Callable[[FormatCase], object]) -> list[str]:
    return [name for name, case in CASES.items() if condition(case)]


@pytest.fixture
def grain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces of some size."""
    for module, constants in GRAINS[request.param].items():
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(parquet_table, "STEP_BYTES", columnar.STEP_BYTES)


def ended(pipe: sl.Pipeline[Any], **options: Any) -> tuple[list[Any], StreamlineError | None, int, sl.Snapshot]:
    """Return the items up to the end or a failure, that, how many errors were counted, and where it stands."""
    items, failure = list[Any](), None
    with pipe.open(**options) as stream:
        try:
            items.extend(stream)
        except StreamlineError as error:
            failure = error
        return items, failure, stream.errors.total, sl.Snapshot.from_json(stream.snapshot().to_json())


SMALL = [(name, "small", "remote" if case.remote else "local") for name, case in CASES.items()]
WHOLE = [(name, "as ever", "local") for name in CASES]
PACKED = [(name, "medium", way) for name, way in in_turn(of(lambda case: case.packs), list(PACK))]
TWICE = (" 1", " 100", "deflated", "gzip")
QUICK = [
    ("tfrecord", "small", "remote"),
    *(place for place in WHOLE if not CASES[place[0]].packs and not place[0].endswith(TWICE)),
    *PACKED,
]
"""Each format once."""


@pytest.mark.parametrize(("name", "grain", "way"), long_but(QUICK, SMALL + WHOLE + PACKED), indirect=["grain"])
async def test_it_resumes_at_every_item(tmp_path: Path, server: Server, grain: None, name: str, way: str) -> None:
    """Of several files, one of them without items; and of one that shards share."""
    case, paths = CASES[name], list[str]()
    suffix, pack = PACK.get(way, ("", None))
    for at, numbers in enumerate(FILES):
        content, file = case.write(numbers), f"{at}{case.suffix}{suffix}"
        server.objects[file] = content = content if pack is None else pack(content)
        paths.append(server.url(file) if way == "remote" else str(put(tmp_path / file, content)))
    expected = case.items(range(7))

    def check() -> None:
        check_resume(case.read(paths), expected=expected, generations=2)
        if case.splits and pack is None:
            split = case.read(paths[0]).shard(3)
            shares = [ended(split, rank=shard, world_size=3, ends="allow")[0] for shard in range(3)]
            assert repr([item for share in shares for item in share]) == repr(expected[:6])
            check_resume(split, generations=1)

    await anyio.to_thread.run_sync(check)


def lines_file(numbers: Sequence[int]) -> bytes:
    return b"".join(b"%d\n" % number for number in numbers)


def blank_lines(numbers: Sequence[int]) -> bytes:
    """Return JSON lines among blank ones, at the beginning and the end, too."""
    return b"\n \n" + b"\n\n".join(b"%d" % number for number in numbers) + b"\n\n"


def other_members(numbers: Sequence[int]) -> bytes:
    return archive([("README", b""), *((f"{number}.x", b"") for number in numbers)])


EMPTY: dict[str, FormatCase] = {
    **CASES,
    "lines": FormatCase(sl.read_lines, lines_file, str),
    "lines, gzip": FormatCase(sl.read_lines, lambda numbers: gzip.compress(lines_file(numbers)), str),
    "blank lines": FormatCase(sl.read_jsonl, blank_lines, lambda n: n),
    "blank lines, gzip": FormatCase(sl.read_jsonl, lambda numbers: gzip.compress(blank_lines(numbers)), lambda n: n),
    "csv without a header": FormatCase(partial(sl.read_csv, header=False), lines_file, lambda n: [str(n)]),
    "parquet, filtered": FormatCase(
        partial(sl.read_parquet, filter=pc.field("n") >= 0), lambda numbers: parquet_file([*numbers, -1]), arrow_item
    ),
    "tar, a member of no sample": FormatCase(sl.read_tar, other_members, lambda n: {"__key__": f"{n}", "x": b""}),
    "tar, gzip": FormatCase(
        sl.read_tar, lambda numbers: gzip.compress(other_members(numbers)), lambda n: {"__key__": f"{n}", "x": b""}
    ),
    "tfrecord, gzip": FormatCase(sl.read_tfrecord, lambda numbers: gzip.compress(records_file(numbers)), record),
}
"""And other files that may hold nothing."""


@pytest.mark.one_in(15, 12)
@pytest.mark.parametrize("name", EMPTY)
def test_files_without_records_are_passed_over_wherever_they_are(tmp_path: Path, name: str) -> None:
    """At the ends of shards and among others, in turn, in all passes and epochs; and where there are no others."""
    case = EMPTY[name]

    def read(files: list[int], shards: int, passes: int | None = 1, **how: Any) -> sl.Pipeline[Any]:
        folder = tmp_path / "-".join(map(str, files))
        if not folder.exists():
            folder.mkdir()
            for at, records in enumerate(files):
                put(folder / f"{at}{case.suffix}", case.write(range(records)))
        pipe = case.read(str(folder / f"*{case.suffix}"))
        return (pipe if passes == 1 else pipe.repeat(passes)).shard(shards, mode="file", **how)

    files, expected = [0, 1, 0, 0, 2, 0, 0], list(map(repr, case.items([0, 0, 1])))
    assert list(map(repr, read(files, 1))) == expected
    for shards in (3, 20):
        assert sorted(map(repr, read(files, shards))) == sorted(expected)
    assert sorted(map(repr, read(files, 2, 2, interleave=3))) == sorted(expected * 2)
    with read(files, 9).loader() as loader:
        assert [sorted(map(repr, loader)) for _ in range(2)] == [sorted(expected)] * 2
    with read([0, 2, 0], 3, None).open() as stream:
        assert [repr(next(stream)) for _ in range(5)] == list(map(repr, case.items([0, 1, 0, 1, 0])))
    nothing = [0, 0]
    for pipe in (read(nothing, 1, 3), read(nothing, 2, None), read(nothing, 7), read(nothing, 2, interleave=2)):
        items, _, _, snapshot = ended(pipe)
        assert (items, ended(pipe, resume=snapshot)[0]) == ([], [])


@pytest.mark.one_in(7, 3)
@pytest.mark.parametrize("name", of(lambda case: case.splits))
def test_shards_have_all_of_a_file_whatever_runs_them(tmp_path: Path, name: str, backend: Backend) -> None:
    case = CASES[name]
    pipe = case.read(put(tmp_path / f"a{case.suffix}", case.write(ALL))).shard(4)
    items, failure, _, _ = ended(pipe, backend=backend)
    assert failure is None
    assert sorted(map(repr, items)) == sorted(map(repr, case.items(ALL)))
    assert list(map(repr, items)) == list(map(repr, pipe))


@pytest.mark.parametrize("name", of(lambda case: not case.splits))
def test_a_file_that_shards_can_not_share_is_refused(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    pipe = case.read(put(tmp_path / f"a{case.suffix}", case.write(ALL)))
    with pytest.raises(PlanError, match=r"can't be split into 2 shards"):
        list(pipe.shard(2, mode="contiguous"))


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize(("name", "grain"), in_turn(of(lambda case: case.damage), list(GRAINS)), indirect=["grain"])
def test_of_a_damaged_file_only_what_is_damaged_is_left_out(tmp_path: Path, name: str, grain: None) -> None:
    case = CASES[name]
    assert case.damage is not None
    damage, pipe = case.damage(), case.read(put(tmp_path / "a.mds", case.damage().content))
    before, rest = case.items(ALL[: damage.lost.start]), case.items(ALL[damage.lost.stop :])
    items, failure, _, snapshot = ended(pipe)
    assert repr(items) == repr(before)
    assert isinstance(failure, DataError)
    assert str(tmp_path / "a.mds") in str(failure)
    assert damage.says in str(failure)
    for begun, resume in ((before, None), ([], snapshot)):
        items, failure, errors, _ = ended(pipe, resume=resume, **SKIP)
        assert (repr(items), failure, errors) == (repr(begun + rest), None, len(damage.lost))
    with pipe.open(**SKIP) as stream:
        head = list(islice(stream, len(before) + 2))
        inside = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert repr(head + ended(pipe, resume=inside, **SKIP)[0]) == repr(before + rest)
    if case.splits:
        items, _, errors, _ = ended(pipe.shard(4), **SKIP)
        assert (sorted(map(repr, items)), errors) == (sorted(map(repr, before + rest)), len(damage.lost))


@pytest.mark.parametrize("places", long_but([5], [5, 30]))
@pytest.mark.parametrize("name", of(lambda case: case.whole_at))
async def test_a_file_cut_short_gives_what_is_whole_and_an_error(
    tmp_path: Path, server: Server, name: str, places: int
) -> None:
    case = CASES[name]
    assert case.whole_at is not None
    content, path, items = case.write(range(6)), tmp_path / f"a{case.suffix}", case.items(range(6))
    cuts = sorted({*range(len(content))} - {*case.whole_at(content)})
    for cut in sampled(cuts, max(1, len(content) // places)):
        path.write_bytes(content[:cut])
        found, failure, _, _ = ended(case.read(path))
        assert repr(found) == repr(items[: len(found)])
        assert isinstance(failure, DataError), cut
        assert str(path) in str(failure)
    if case.remote:
        server.objects[path.name] = content[: cuts[len(cuts) // 2]]
        _, failure, _, _ = await anyio.to_thread.run_sync(ended, case.read(server.url(path.name)))
        assert isinstance(failure, DataError)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("tar", "tf", "np", "mds"))])
@given(at=st.integers(0, 10**6), junk=st.binary(min_size=1, max_size=8))
@examples(40)
def test_damage_anywhere_is_an_error_or_changes_no_count(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, junk: bytes
) -> None:
    case = CASES[name]
    content = bytearray(case.write(ALL))
    at %= len(content)
    content[at : at + len(junk)] = junk
    path = tmp_path_factory.getbasetemp() / f"damaged{case.suffix}"
    path.write_bytes(content)
    items, failure, _, _ = ended(case.read(path))
    if failure is None:
        assert len(items) == len(ALL)
    else:
        assert isinstance(failure, DataError | ReadError)
        assert str(path) in str(failure)


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize("name", of(lambda case: case.watched))
@pytest.mark.parametrize("grain", ["small"], indirect=True)
def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, grain: None, name: str) -> None:
    case = CASES[name]
    path = put(tmp_path / "a", case.write(range(2000)))
    with case.read(path).open() as stream:
        assert repr(next(stream)) == repr(case.item(0))
        path.write_bytes(path.read_bytes())
        with pytest.raises(ReadError, match="changed while it was read"):
            list(stream)
