"""Caches on disk: a pass is drawn once for all that read it, resumed by reading, and served whole or not at all."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import CacheFull, DataError, PlanError, PlanTypeError, ReadError, ResumeError
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from streamline.transforms.cache_files import ROOT
from tests.laws.profile import long_but
from tests.laws.stages import erratic


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", 4)
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_S", math.inf)
    with monkeypatch.context() as quick:
        quick.setattr(os, "fsync", lambda descriptor: None)  # some thousand files: only a power cut would tell
        yield


def counted(read: Counter[int]) -> Any:
    def look(item: int) -> int:
        read[item] += 1
        return item

    return look


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cache"))


# Reading once -------------------------------------------------------------------------------------------------------


def test_passes_later_openings_and_epochs_read_nothing(tmp_path: Path) -> None:
    read = Counter[int]()
    pipe = sl.from_items(range(30)).shard(3).shuffle(window=10).map(counted(read)).cache(path=tmp_path / "a" / "b")
    first = list(pipe.merge())
    assert list(pipe.repeat(3).merge()) != first  # three passes
    assert list(pipe.merge()) == first
    with pipe.merge().loader() as loader:
        assert [list(loader) for _ in range(2)] == [first, first]
    with pipe.merge().open(epoch=7, backend=sl.Threads(2)) as stream:
        assert list(stream) == first
    assert set(read.values()) == {1}


def test_what_a_run_has_left_is_gone_on_with(tmp_path: Path) -> None:
    read = Counter[int]()
    pipe = sl.from_items(range(900)).map(counted(read)).cache(path=tmp_path)
    with pipe.open() as stream:
        assert [next(stream) for _ in range(13)] == list(range(13))
    kept = 4 * len(files(tmp_path))
    assert 12 <= kept < 900
    read.clear()
    assert list(pipe) == list(range(900))
    assert sorted(read) == list(range(kept, 900))


def test_a_resume_seeks(tmp_path: Path) -> None:
    read = Counter[int]()
    pipe = sl.from_items(range(40)).map(counted(read)).cache(path=tmp_path).repeat(2)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(57)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        rest = list(stream)
    read.clear()
    for path in files(tmp_path)[:4]:
        path.chmod(0)  # it has no need of these
    with pipe.open(resume=snapshot) as stream:
        assert list(stream) == rest
    assert not read
    assert first + rest == [*range(40)] * 2
    assert "computed again" in str(pipe.explain(snapshot))


@pytest.mark.one_in(2)
def test_hosts_serve_the_same_and_resume_it(tmp_path: Path, backend: Any) -> None:
    pipe = sl.from_items(range(25)).shard(2).shuffle(window=9).cache(path=tmp_path).repeat(3).merge()
    with pipe.open(backend=backend) as stream:
        first = [next(stream) for _ in range(31)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        rest = list(stream)
    with pipe.open(backend=backend, resume=snapshot) as stream:
        assert list(stream) == rest
    assert first + rest == list(pipe)


# Laws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", long_but(["left", "behind the merge"], ["repeat", "left", "nothing", "behind the merge", "window"])
)
def test_compositions_keep_the_laws(tmp_path: Path, name: str) -> None:
    made: dict[str, Any] = {
        "repeat": lambda pipe: pipe.shuffle(window=4).cache(path=tmp_path).repeat(2),
        "left": lambda pipe: pipe.shuffle(window=4).cache(path=tmp_path).take(6).repeat(3),
        "nothing": lambda pipe: pipe.filter(lambda item: False).cache(path=tmp_path).repeat(3),
        "behind the merge": lambda pipe: pipe.shard(3).merge().cache(path=tmp_path).repeat(2),
        "window": lambda pipe: pipe.cache(path=tmp_path).shuffle(window=7).repeat(2),
    }
    check_resume(made[name](sl.from_items(range(8))), generations=2)
    assert name == "nothing" or files(tmp_path)


@pytest.mark.long
def test_a_pass_that_was_chosen_is_repeated_as_it_was_chosen(tmp_path: Path) -> None:
    for stop in (0, 3, 5, 8, 12, 19, 23):
        folder = tmp_path / str(stop)
        pipe = sl.from_items(range(11)).map(erratic, concurrency=4, ordered=False).cache(path=folder).repeat(3)
        with pipe.open() as stream:
            first = [next(stream) for _ in range(stop)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            if folder.exists():  # it may be writing
                shutil.copytree(folder, tmp_path / f"{stop} then", ignore=shutil.ignore_patterns("*.tmp"))
            rest = list(stream)
        with pipe.open(resume=snapshot) as stream:
            assert list(stream) == rest
        assert first + rest == (first + rest)[:11] * 3
        if (tmp_path / f"{stop} then").exists():  # killed there: some blocks are missing
            shutil.rmtree(folder)
            (tmp_path / f"{stop} then").rename(folder)
            with pipe.open(resume=snapshot) as stream:
                assert Counter(first + list(stream)) == Counter(first + rest)


@pytest.mark.long
def test_every_state_is_exact_with_the_files_of_that_moment_and_without_any(tmp_path: Path) -> None:
    pipe = sl.from_items(range(13)).shuffle(window=6).cache(path=tmp_path / "cache").repeat(2)
    (tmp_path / "cache").mkdir()
    then, whole = list[sl.Snapshot](), list[int]()
    with pipe.open() as stream:
        for item in stream:
            whole.append(item)
            shutil.copytree(tmp_path / "cache", tmp_path / str(len(whole)), ignore=shutil.ignore_patterns("*.tmp"))
            then.append(sl.Snapshot.from_json(stream.snapshot().to_json()))
            if (tip := then[-1].worker_states[0]["cache"]["tip"]) != ROOT:  # its block is there before it is heard of
                assert len(list((tmp_path / str(len(whole))).glob(f"*-{tip}.*"))) == 1
    for at, snapshot in enumerate(then, 1):
        for folder in (tmp_path / str(at), tmp_path / "nothing"):
            shutil.rmtree(tmp_path / "cache")
            shutil.copytree(folder, tmp_path / "cache") if folder.exists() else None
            with pipe.open(resume=snapshot) as stream:
                assert list(stream) == whole[at:]
            (tmp_path / "cache").mkdir(exist_ok=True)


# What it is of ------------------------------------------------------------------------------------------------------


def test_a_cache_of_something_else_is_never_served(tmp_path: Path) -> None:
    def plus(item: int) -> int:
        return item + 1

    def minus(item: int) -> int:
        return item - 1

    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("a\nb\n")
    folder = tmp_path / "cache"
    numbers = sl.from_items(range(9))
    pipes: list[Pipeline[Any]] = [
        numbers.cache(path=folder),
        sl.from_items(range(8)).cache(path=folder),
        numbers.map(plus).cache(path=folder),
        numbers.map(minus, name="plus").cache(path=folder),
        numbers.shard(1).shuffle(window=9, seed=0).cache(path=folder),
        numbers.shard(1).shuffle(window=9, seed=1).cache(path=folder),
        numbers.shard(2).cache(path=folder).merge(),
        sl.mix({"a": numbers, "b": numbers}, weights={"a": 1, "b": 1}).cache(path=folder),
        sl.mix({"a": numbers, "b": numbers}, weights={"a": 3, "b": 1}).cache(path=folder),
        sl.mix({"a": numbers.cache(path=folder), "b": numbers.map(plus).cache(path=folder)}),
        sl.read_lines(f"{data}/*.txt").cache(path=folder),
    ]
    expected = [list(pipe.open(epoch=0).sync_stream()) for pipe in pipes]
    assert [list(pipe) for pipe in pipes] == expected
    for pipe, items in zip(pipes, expected, strict=True):
        shutil.rmtree(folder)
        assert list(pipe) == items
    (data / "b.txt").write_text("c\n")
    assert sorted(pipes[-1]) == ["a", "b", "c"]


def test_what_comes_slowly_is_written_in_smaller_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", 100)
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_S", 0)
    assert list(sl.from_items(range(9)).cache(path=tmp_path)) == list(range(9))
    assert len(files(tmp_path)) > 1


def test_what_is_large_is_written_in_blocks_of_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", 100)
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_BYTES", 2500)
    pipe = sl.from_items(range(20)).map(lambda n: np.full(1000, n, np.uint8)).batch(1, collate=None).unbatch()
    assert [int(item[0]) for item in pipe.shuffle(window=1).cache(path=tmp_path)] == list(range(20))
    assert all(path.stat().st_size < 4000 for path in files(tmp_path))
    assert len(files(tmp_path)) == 7


def test_files_of_another_name_are_not_served(tmp_path: Path) -> None:
    pipe = sl.from_items(range(12)).cache(path=tmp_path)
    list(pipe)
    one, other = [path for path in files(tmp_path) if ".end" not in path.name][:2]
    content = one.read_bytes()
    other.write_bytes(content)
    assert list(pipe) == list(range(12))


# Whole or not at all ------------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_damage_is_drawn_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    pipe = sl.from_items(range(14)).map(np.int64).shuffle(window=5).cache(path=folder).repeat(2)
    whole = list(pipe)
    with pipe.open() as stream:
        stop = data.draw(st.integers(0, 27))
        _ = [next(stream) for _ in range(stop)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    there = files(folder)
    assert len(there) == 4
    for number in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)):
        path = there[number]
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, 10**6)) % len(content)
        kind = data.draw(st.sampled_from(["bit", "short", "gone", "long"]))
        if kind == "bit":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "short":
            del content[at:]
        elif kind == "long":
            content += b"x"
        path.write_bytes(content) if kind != "gone" else path.unlink()
    with pipe.open(resume=snapshot) as stream:
        assert list(stream) == whole[stop:]
    assert list(pipe) == whole
    shutil.rmtree(folder)


@pytest.mark.parametrize("merge", [False, True], ids=["map", "merge"])
def test_after_what_chooses_a_pass_whose_files_are_gone_is_an_error_that_names_them(
    merge: bool, tmp_path: Path
) -> None:
    numbers = sl.from_items(range(20))
    chosen = numbers.map(erratic, concurrency=4, ordered=False)
    pipe = (numbers.shard(2).merge("best_effort") if merge else chosen).cache(path=tmp_path).repeat(2)
    with pipe.open() as stream:
        _ = [next(stream) for _ in range(26)]
        snapshot = stream.snapshot()
    shutil.rmtree(tmp_path)
    message = r"in the middle of its pass: files of it in .* are damaged or gone"
    with pytest.raises(ResumeError, match=message), pipe.open(resume=snapshot) as stream:
        list(stream)


def test_two_runs_that_draw_side_by_side_leave_each_other_alone(tmp_path: Path) -> None:
    pipe = sl.from_items(range(22)).map(erratic, concurrency=4, ordered=False).cache(path=tmp_path).repeat(3)
    with pipe.open() as one, pipe.open() as other:
        found: list[list[int]] = [[], []]
        for _ in range(66):
            found[0].append(next(one))
            found[1].append(next(other))
    for items in found:
        assert sorted(items[:22]) == list(range(22))
        assert items == items[:22] * 3
    assert list(pipe)[:22] in (found[0][:22], found[1][:22])


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(("window", "lost"), [(1, True), (8, False), (8, True)])
def test_a_resume_is_of_its_own_run_of_two_that_chose(window: int, lost: bool, tmp_path: Path) -> None:
    """A window goes back to items of which later ones were delivered; lost is the block that was being drawn."""
    for stop in (3, 10, 19):
        folder = tmp_path / str(stop)
        pipe = sl.from_items(range(22)).map(erratic, concurrency=4, ordered=False).cache(path=folder)
        pipe = pipe.shuffle(window=window) if window > 1 else pipe
        with pipe.open() as one, pipe.open() as other:
            ran = [[next(stream) for _ in range(stop)] for stream in (one, other)]
            snapshots = [sl.Snapshot.from_json(stream.snapshot().to_json()) for stream in (one, other)]
            assert all(
                sorted(items + list(stream)) == list(range(22)) for items, stream in zip(ran, (one, other), strict=True)
            )
        for items, snapshot in zip(ran, snapshots, strict=True):
            drawn = list(folder.glob(f"*-{snapshot.worker_states[0]['cache']['next']}.*")) if lost else []
            contents = [path.read_bytes() for path in drawn]
            for path in drawn:
                path.unlink()
            with pipe.open(resume=snapshot) as stream:
                assert sorted(items + list(stream)) == list(range(22))
            for path, content in zip(drawn, contents, strict=True):
                path.write_bytes(content)  # the other may be behind it


def test_damage_is_drawn_again_once_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = Counter[int]()
    pipe = sl.from_items(range(40)).map(counted(read)).cache(path=tmp_path)
    list(pipe)
    (damaged,) = tmp_path.glob("*.000000000008.*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert list(pipe) == list(range(40))
    assert f"{damaged} is cut short: drawing it again, and all later ones" in caplog.text
    assert read == Counter([*range(40), *range(4, 40)])
    for _ in range(3):
        assert list(pipe) == list(range(40))
    assert read.total() == 76
    assert len(files(tmp_path)) == 11  # and nothing is left of those behind it


def test_a_bound_holds_on_disk(tmp_path: Path) -> None:
    pipe = sl.from_items(range(100)).map(lambda n: np.zeros(1000, np.uint8))
    message = r"cache of shard 0 has files of [\d,]+ bytes, .* doesn't fit into max_bytes=20,000"
    with pytest.raises(CacheFull, match=message):
        list(pipe.cache(path=tmp_path, max_bytes=20_000))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 20_000
    with pytest.raises(CacheFull):
        list(pipe.cache(path=tmp_path, max_bytes=20_000))
    assert len(list(pipe.cache(path=tmp_path, max_bytes=150_000).repeat(2))) == 200


def test_what_cannot_be_kept_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"\.cache\(path=\) writes down .* got object: turn it .* before \.cache"):
        list(sl.from_items(range(3)).map(lambda n: object()).cache(path=tmp_path))
    with pytest.raises(DataError, match=r"writes down .* NumPy arrays, .* got MaskedArray: turn it"):
        list(sl.from_items([np.ma.array([1, 2], mask=[True, False])]).cache(path=tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadError, match=r"can't look into .*name a folder"):
        list(sl.from_items(range(3)).cache(path=tmp_path / "file"))
    wrong: Any = 3
    with pytest.raises(PlanTypeError, match=r"\.cache\(path=\) is the path of a folder"):
        sl.from_items(range(3)).cache(path=wrong)
    for nowhere in ("", "s3://bucket/cache"):
        with pytest.raises(PlanError, match=r"path of a folder of this machine, .* got "):
            sl.from_items(range(3)).cache(path=nowhere)
        with pytest.raises(PlanError, match=r"\.regenerate\(spill=\) is the path of a folder"):
            sl.from_items(range(3)).regenerate(2, spill=nowhere)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamline.core.atomic_file.os.write", full)
    with pytest.raises(ReadError, match=r"can't keep a pass in .*: No space left on device; .* with room for a pass"):
        list(sl.from_items(range(3)).cache(path=tmp_path))
    assert not files(tmp_path)


def test_a_look_before_the_run_writes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a\nb\n")
    pipe = sl.read_lines(str(data)).cache(path=tmp_path / "cache").regenerate(2, spill=tmp_path / "cycles")
    assert pipe.check().ok
    assert list(tmp_path.iterdir()) == [data]


def test_what_was_left_out_of_a_pass_of_nothing_is_counted_by_later_runs(tmp_path: Path) -> None:
    def refuse(item: int) -> int:
        raise ValueError(item)

    for _ in range(2):
        with sl.from_items(range(3)).map(refuse).cache(path=tmp_path).open(on_error="skip") as stream:
            assert list(stream) == []
            assert stream.errors.total == 3


def test_what_was_left_out_of_a_kept_pass_is_counted(tmp_path: Path) -> None:
    def picky(item: int) -> int:
        if item % 5 == 1:
            raise ValueError(item)
        return item

    pipe = sl.from_items(range(20)).map(picky).cache(path=tmp_path).repeat(2)
    for _ in range(2):
        with pipe.open(on_error="skip") as stream:
            assert len(list(stream)) == 32
            assert stream.errors.total == 4


KILLED = """
import sys
import numpy as np
import streamline as sl
import streamline.transforms.cache_disk as disk

disk.BLOCK_ITEMS = 7
folder = sys.argv[1]

def teacher(number):
    return np.full(3000, number)

pipe = sl.from_items(range(60)).shard(2).map(teacher).shuffle(window=16).cache(path=folder + "/cache").repeat().merge()
snapshot = sl.Snapshot.load(folder + "/ckpt.json", missing_ok=True)
begin = 0 if snapshot is None else sum(snapshot.produced)
with pipe.open(resume=snapshot) as stream:
    for step, item in enumerate(stream, begin):
        print(step, int(item[-1]), flush=True)
        if step % 10 == 9:
            stream.snapshot().save(folder + "/ckpt.json")
"""


@pytest.mark.long
def test_a_run_that_is_killed_anywhere_serves_the_same_passes(tmp_path: Path) -> None:
    dice, delivered = random.Random(), dict[int, int]()
    for _ in range(3):
        with (tmp_path / "log").open("w") as log:
            child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=log, stderr=subprocess.PIPE)
            try:
                while not (tmp_path / "cache").exists() and child.poll() is None:
                    time.sleep(0.005)
                time.sleep(0.15 * dice.random())
            finally:
                child.send_signal(signal.SIGKILL)
                _, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors.decode()
        for line in (tmp_path / "log").read_text().rpartition("\n")[0].splitlines():
            step, number = map(int, line.split())
            assert delivered.setdefault(step, number) == number
    items = [delivered[step] for step in sorted(delivered)]
    assert sorted(delivered) == list(range(len(items)))
    for start in range(0, len(items) - 59, 60):
        assert sorted(items[start : start + 60]) == list(range(60))
        assert items[start : start + 60] == items[:60]
