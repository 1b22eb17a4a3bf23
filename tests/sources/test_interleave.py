import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given as example_of
from hypothesis import settings
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.flow import Chunk
from streamline.core.state import At, trimmed
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.io.fetch.file import File
from streamline.io.formats import line_decoding as lines
from streamline.sources.interleave import ShardPlace, in_turn
from streamline.testing.checks import check_resume
from tests.io.formats.archives import archive
from tests.laws.files import turned

SIZES = [5, 0, 2, 9, 1, 4, 3]


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[Path]]:
    """Make files of as many lines; line 3 of file 2 is "2.3"."""

    def make(sizes: list[int], suffix: str = ".txt") -> list[Path]:
        made = []
        for number, size in enumerate(sizes):
            path = tmp_path / f"{number}{suffix}"
            text = "".join(f'"{number}.{line}"\n' for line in range(size)).encode()
            if suffix == ".tar":
                text = archive([(f"{number}.x.{line}.t"[2:], b"%d.%d" % (number, line)) for line in range(size)])
            path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
            made.append(path)
        return made

    return make


def oracle(sizes: list[int], k: int) -> list[str]:
    """Return what comes of files with so many items, k of them in turn."""
    return turned([[f"{number}.{line}" for line in range(size)] for number, size in enumerate(sizes)], k)


def source_of(paths: Any) -> Any:
    return sl.read_jsonl(paths).plan.source.resolved()


# In which order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("slice_bytes", [None, 12])
def test_files_take_turns(files: Any, k: int, slice_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if slice_bytes:
        monkeypatch.setattr(lines, "FIRST_SLICE_BYTES", slice_bytes)
        monkeypatch.setattr(lines, "SLICE_BYTES", slice_bytes)
    pipe = sl.read_jsonl(files(SIZES))
    assert list(pipe.shard(1, interleave=k)) == oracle(SIZES, k)


def test_each_shard_takes_turns_over_its_own_files(files: Any) -> None:
    pipe = sl.read_jsonl(files(SIZES)).shard(2, mode="file", interleave=2).map(lambda item: item).merge()
    shards = [[SIZES[at] for at in range(shard, 7, 2)] for shard in range(2)]
    expected = [
        [f"{2 * int(item[0]) + shard}{item[1:]}" for item in oracle(sizes, 2)] for shard, sizes in enumerate(shards)
    ]
    found = list(pipe)
    assert sorted(found) == sorted(item for part in expected for item in part)
    for shard, part in enumerate(expected):
        assert [item for item in found if int(item[0]) % 2 == shard] == part


def test_many_items_come_in_long_lists(files: Any) -> None:
    sizes = [3000, 2000, 2500, 10]
    assert list(sl.read_jsonl(files(sizes)).shard(1, interleave=3)) == oracle(sizes, 3)


# Where it stands ----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".tar"])
async def test_resumes_at_every_item(files: Any, read: Any, suffix: str) -> None:
    paths = files(SIZES, suffix)
    reader = sl.read_tar(paths, group=False) if suffix == ".tar" else sl.read_jsonl(paths)
    source = reader.plan.source.resolved()
    for k in (2, 4):
        whole = await read(source, mode="file", interleave=k)
        seen = [item.data.decode() for item in whole.items] if suffix == ".tar" else whole.items
        assert seen == oracle(SIZES, k)
        for done, state in enumerate([whole.begin, *whole.states]):
            again = await read(source, json.loads(json.dumps(state)), mode="file", interleave=k)
            assert again.items == whole.items[done:], state
            assert again.states == whole.states[done:]


async def test_a_state_names_the_slots_in_turn_and_the_next_file(files: Any, read: Any) -> None:
    paths = list(map(str, files([2, 2, 2])))
    whole = await read(source_of(paths), mode="file", interleave=2)
    assert whole.states[0]["read_jsonl"] == {
        "slots": [{"file": paths[1], "line": 0, "byte": 0}, {"file": paths[0], "line": 1, "byte": 6}],
        "next": paths[2],
    }
    assert whole.wheres[0].startswith(f"{paths[0]} line 1")
    assert whole.end["read_jsonl"]["next"] is None


async def test_a_finished_shard_opens_nothing(files: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sl.read_tar(files(SIZES, ".tar"), group=False).plan.source.resolved()
    end = (await read(source, mode="file", interleave=3)).end

    def refuse(*_: Any) -> Any:
        raise AssertionError("it opened a file")

    monkeypatch.setattr(File, "blocks", refuse)
    assert (await read(source, end, mode="file", interleave=3)).items == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
def test_laws(files: Any, backend: Any) -> None:
    pipe = sl.read_jsonl(files([3, 0, 2, 1, 2])).shuffle_files(seed=1).shard(2, interleave=2)
    check_resume(pipe, generations=2, backend=backend)


def test_laws_under_stages_that_read_again(files: Any) -> None:
    pipe = sl.read_jsonl(files([3, 2, 1])).shard(1, interleave=2).shuffle(window=3).batch(2, collate=None).repeat(2)
    check_resume(pipe, generations=2)


async def test_over_http_with_hardly_any_memory(server: Any) -> None:
    for number, size in enumerate(SIZES):
        server.objects[f"{number}.txt"] = "".join(f'"{number}.{line}"\n' for line in range(size)).encode()
    pipe = sl.read_jsonl([server.url(f"{number}.txt") for number in range(7)]).shard(2, interleave=3)

    def items(memory: int) -> list[Any]:
        with pipe.open(memory=memory) as stream:
            return list(stream)

    with_little = await anyio.to_thread.run_sync(items, 1)  # the server is in this loop
    assert with_little == await anyio.to_thread.run_sync(items, 2**20)
    assert len(with_little) == sum(SIZES)


def test_in_processes(files: Any, processes: Backend) -> None:
    pipe = sl.read_jsonl(files([40, 30, 10, 20])).shard(2, interleave=2)
    expected = list(pipe)
    with pipe.open(backend=processes) as stream:
        first = [next(stream) for _ in range(33)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with pipe.open(resume=snapshot, backend=processes) as stream:
        assert first + list(stream) == expected


def test_what_is_left_out_is_counted_where_it_is_passed(files: Any, tmp_path: Path) -> None:
    paths = files([4, 4, 4])
    paths[1].write_text('"1.0"\nno\n"1.2"\nno\n')
    paths[2].write_text('no\n"2.1"\n')
    pipe = sl.read_jsonl(paths).shard(1, interleave=2)
    with pipe.open(on_error="skip") as stream:
        whole = list(stream)
        assert stream.errors.total == 3
    assert whole == ["0.0", "1.0", "0.1", "1.2", "0.2", "2.1", "0.3"]
    counts = []
    for done in range(len(whole) + 1):
        with pipe.open(on_error="skip") as stream:
            first = [next(stream) for _ in range(done)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            counts.append(stream.errors.total)
        with pipe.open(resume=snapshot, on_error="skip") as stream:
            assert first + list(stream) == whole
            assert stream.errors.total == 3
    assert counts == sorted(counts)


def test_items_before_a_failure_come_first(files: Any) -> None:
    paths = files([4, 4])
    paths[1].write_text('"1.0"\nno\n')
    found: list[Any] = []
    with pytest.raises(sl.errors.DataError, match="line 2"):  # noqa: PT012 - what came before is asked for, too
        for item in sl.read_jsonl(paths).shard(1, interleave=2):
            found.append(item)  # noqa: PERF402 - extend would take none of them
    assert found == ["0.0", "1.0", "0.1"]


# What has changed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_files_that_are_gone(files: Any, gone: int) -> None:
    paths = files([3, 3, 3, 3, 3])
    pipe = sl.read_jsonl(str(paths[0].parent / "*.txt")).shard(1, interleave=2)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(3)]  # 0.0 1.0 0.1
        snapshot = stream.snapshot()
    paths[gone].unlink()
    with pytest.raises(ResumeError, match="removed_files"):
        pipe.open(resume=snapshot)
    with pipe.open(resume=snapshot, accept=["read_jsonl.removed_files"]) as stream:
        rest = list(stream)
    expected = oracle([3] * 5, 2)[3:]
    assert sorted(rest) == sorted(item for item in expected if int(item[0]) != gone)
    assert first == ["0.0", "1.0", "0.1"]


def test_another_k_is_refused(files: Any) -> None:
    reader = sl.read_jsonl(files([3, 3, 3]))
    with reader.shard(1, interleave=2).open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    for other in (reader.shard(1, interleave=3), reader.shard(1, mode="file")):
        with pytest.raises(ResumeError, match="interleave"):
            other.open(resume=snapshot)
        with pytest.raises(ResumeError, match="where each of its files stands"):
            other.open(resume=snapshot, accept=["shard.interleave"])


async def test_a_file_that_the_shard_does_not_have(files: Any, read: Any) -> None:
    source = source_of(files([3, 3]))
    slot = {"file": "elsewhere", "line": 0, "byte": 0}
    for own in ({"slots": [slot], "next": None}, {"slots": [], "next": "elsewhere"}):
        with pytest.raises(ResumeError, match=r"elsewhere.*not among the 2 files"):
            await read(source, {"read_jsonl": own}, mode="file", interleave=2)


# What is written ----------------------------------------------------------------------------------------------------


def test_options_are_checked_where_they_are_written() -> None:
    reader = sl.read_jsonl(["a", "b"])
    with pytest.raises(PlanError, match="interleave"):
        reader.shard(2, interleave=0)
    with pytest.raises(PlanTypeError, match="interleave"):
        reader.shard(2, interleave="2")  # type: ignore[arg-type]
    for mode in ("contiguous", "replicated"):
        with pytest.raises(PlanError, match='mode="file"'):
            reader.shard(2, mode=mode, interleave=2)
    with pytest.raises(PlanError, match="from_items has no list of files"):
        sl.from_items([1]).shard(2, interleave=2)
    with pytest.raises(PlanError, match="no list of files"):
        sl.from_iterable(list).shard(2, interleave=2)


def test_a_plan_says_it(files: Any) -> None:
    reader = sl.read_jsonl(files([3, 3, 3]))
    pipe = reader.shard(1, interleave=2)
    assert "shard into 1 (file): 2 files of each in turn, item by item" in str(pipe)
    assert pipe.max_in_flight > reader.shard(1, mode="file").max_in_flight


def test_an_explanation_says_where_each_file_stands(files: Any) -> None:
    paths = files([3, 3, 3])
    pipe = sl.read_jsonl(paths).shard(1, interleave=2)
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    said = str(pipe.explain(snapshot))
    assert f"{paths[1]}, line 0" in said
    assert f"{paths[0]}, line 1" in said
    assert f"next {paths[2]}" in said


# By itself ----------------------------------------------------------------------------------------------------------


async def test_files_that_are_open_are_closed() -> None:
    open_: set[str] = set()

    async def one(place: Any) -> Any:
        open_.add(place["file"])
        try:
            for line in range(3):
                yield Chunk([line], [At("x", {**place, "line": line + 1})])
        finally:
            open_.discard(place["file"])

    places = tuple({"file": name, "line": 0} for name in "abcde")
    lists = in_turn("x", ShardPlace(places[:3], places[3:]), one)
    for _ in range(4):
        await anext(lists)
    assert open_ == set("abc")
    await lists.aclose()
    assert not open_


@settings(max_examples=20, deadline=None, derandomize=True)
@example_of(st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_columns_can_be_cut_and_sent(files: list[list[int]], k: int, data: Any) -> None:
    async def one(place: Any) -> Any:
        at = 0
        for size in files[int(place["file"])]:
            yield Chunk(
                [f"{place['file']}.{at + i}" for i in range(size)],
                [At("x", {**place, "line": at + i + 1}) for i in range(size)],
            )
            at += size

    async def run() -> None:
        places = tuple({"file": str(number), "line": 0} for number in range(len(files)))
        found = []
        lists: Any = in_turn("x", ShardPlace(places[:k], places[k:]), one)
        async for chunk in lists:
            count = len(chunk.items)
            states = [chunk.states[index].json() for index in range(count)]
            first = data.draw(st.integers(0, count - 1))
            length = data.draw(st.integers(1, count - first))
            cut = pickle.loads(pickle.dumps(trimmed(chunk.states, first, length)))
            assert [cut[index].json() for index in range(length)] == states[first : first + length]
            again = trimmed(cut, length // 2, length - length // 2)
            assert [again[i].json() for i in range(length - length // 2)] == states[
                first + length // 2 : first + length
            ]
            assert pickle.loads(pickle.dumps(chunk.states[first])).json() == states[first]
            found += chunk.items
        assert found == oracle([sum(sizes) for sizes in files], k)

    anyio.run(run)
