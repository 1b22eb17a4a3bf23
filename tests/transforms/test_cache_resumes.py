"""What a resume of a cache finds changed: the plan, the folder, what other runs have written or reset there."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

import streamline as sl
from streamline.core.tasks import Tasks
from streamline.errors import ResumeError
from streamline.pipeline import Pipeline
from streamline.testing.subjects import ChainSubject, opened, run
from streamline.transforms import cache_disk as disk
from streamline.transforms.cache import Cache
from streamline.transforms.cache_files import CacheFiles
from tests.laws.profile import covering, sampled
from tests.laws.stages import erratic


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", 4)
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_S", math.inf)
    with monkeypatch.context() as quick:
        quick.setattr(os, "fsync", lambda descriptor: None)
        yield


def snapshot_of(stream: Any) -> sl.Snapshot:
    return sl.Snapshot.from_json(stream.snapshot().to_json())


def begun(pipe: Pipeline[Any], stop: int, resume: sl.Snapshot | None = None) -> tuple[list[Any], sl.Snapshot]:
    """Return the first items of a run, and the state behind them."""
    with pipe.open(resume=resume) as stream:
        return [next(stream) for _ in range(stop)], snapshot_of(stream)


def rest(pipe: Pipeline[Any], snapshot: sl.Snapshot, *accept: str) -> list[Any]:
    with pipe.open(resume=snapshot, accept=accept) as stream:
        return list(stream)


def directly(pipe: Pipeline[Any]) -> ChainSubject:
    """Return the stages of a pipeline, without anything that would run ahead of the consumer."""
    stages, chosen = list[Any](), False
    for stage in pipe.stages:
        stages.append(replace(stage, chosen=chosen) if isinstance(stage, Cache) else stage)
        chosen = chosen or stage.chooses
    return ChainSubject(pipe.source, stages)


def drawn(number: int) -> str:
    """Return how files of a drawing are found."""
    return f"*.drawing-{number}.*.cache"


# Another plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 4, 10, 13])
def test_what_is_left_of_a_pass_is_not_kept_as_one_where_a_cache_is_new(stop: int, tmp_path: Path) -> None:
    items = sl.from_items(range(10)).shard(1)
    _, snapshot = begun(items.repeat(3), stop)
    pipe = items.cache(path=tmp_path).repeat(3)
    assert rest(pipe, snapshot, "cache.added") == [*range(10)][stop % 10 :] + [*range(10)] * (2 - stop // 10)
    assert list(pipe) == [*range(10)] * 3


def test_a_cache_that_was_on_disk_and_one_that_was_not_resume_each_other(tmp_path: Path) -> None:
    source = sl.from_items(range(10)).shuffle(window=6)
    disk, memory = source.cache(path=tmp_path).repeat(2), source.cache().repeat(2)
    whole = list(memory)
    for stop in range(20):
        assert rest(disk, begun(memory, stop)[1]) == whole[stop:]
    assert list(disk) == whole
    message = r"cache.* is in the files of a folder: resume it with \.cache\(path=\) as it was"
    with pytest.raises(ResumeError, match=message):
        rest(memory, begun(disk, 5)[1])


@pytest.mark.parametrize(("stop", "why"), [(3, "draws the 3 items"), (6, "has served 6"), (20, "has served 10")])
def test_a_cache_in_whose_files_the_pass_is_can_not_be_left_out(stop: int, why: str, tmp_path: Path) -> None:
    items = sl.from_items(range(10)).shard(1)
    kept = items.cache(path=tmp_path).repeat(3)
    with pytest.raises(ResumeError, match=rf"cache\.removed: at this snapshot it {why}"):
        rest(items.repeat(3), begun(kept, stop)[1], "cache.removed")
    assert rest(items.repeat(3), begun(kept, 0)[1], "cache.removed") == [*range(10)] * 3


def test_what_a_resume_draws_again_is_told(tmp_path: Path) -> None:
    pipe = sl.from_items(range(10)).cache(path=tmp_path).repeat(2)
    for stop, told in ((6, "draws the 2 items of its pass again"), (13, "nothing"), (20, "nothing")):
        assert told in str(pipe.explain(begun(pipe, stop)[1]))
        shutil.rmtree(tmp_path)


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("kind", ["memory", "disk", "gone"])
def test_a_pass_that_was_left_is_the_same_after_a_resume_at_its_last_item(kind: str, tmp_path: Path) -> None:
    """Nothing more of it is pulled then: the next pass has to know by itself how it was drawn."""
    source = sl.from_items(range(11)).shuffle(window=4)
    whole = list(source.cache().take(6).repeat(3))
    for stop in sampled(range(len(whole) + 1), 3):
        pipe = source.cache(path=None if kind == "memory" else tmp_path).take(6).repeat(3)
        items, snapshot = begun(pipe, stop)
        assert items == whole[:stop]
        if kind == "gone":
            shutil.rmtree(tmp_path, ignore_errors=True)
        assert rest(pipe, snapshot) == whole[stop:]


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_what_can_be_drawn_no_more_is_an_error_that_says_how_much(disk: bool, tmp_path: Path) -> None:
    there = 9
    source = sl.from_iterable(lambda: range(there))
    pipe = source.cache(path=tmp_path if disk else None)
    _, snapshot = begun(pipe, 7)
    if disk:
        shutil.rmtree(tmp_path)
    there = 2
    message = r"had served 7 items of a pass, and only \d of them can be drawn again: what is before it gives fewer"
    with pytest.raises(ResumeError, match=message):
        rest(pipe, snapshot)


def test_a_mixture_of_other_parts_is_something_else(tmp_path: Path) -> None:
    def plus(item: int) -> int:
        return item + 1

    def minus(item: int) -> int:
        return item - 1

    numbers = sl.from_items(range(6))
    parts = [numbers, numbers.map(plus), numbers.map(minus, name="plus"), numbers.filter(bool)]
    parts += [sl.mix({"c": numbers, "d": numbers.map(plus)}, weights={"c": 1, "d": weight}) for weight in (1, 9)]
    mixed: list[Pipeline[Any]] = [sl.mix({"a": part, "b": numbers}) for part in parts]
    zipped: list[Pipeline[Any]] = [sl.zip(numbers, part) for part in parts]
    for pipe in (*mixed, *zipped):
        assert list(pipe.cache(path=tmp_path)) == list(pipe)


# What was left out --------------------------------------------------------------------------------------------------


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize(
    ("kind", "bad", "block"), covering(["memory", "disk", "gone"], [(1, 6, 9, 12, 13), (1, 6)], [4, 100])
)
def test_what_was_left_out_is_counted_once_wherever_a_run_is_resumed(
    kind: str, bad: tuple[int, ...], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", block)

    def picky(item: int) -> int:
        if item in bad:
            raise ValueError(item)
        return item

    passes = 1 if kind == "gone" else 2
    items = [item for item in range(14) if item not in bad] * passes
    source = sl.from_items(range(14)).map(picky)
    for stop in (0, 1, 2, 5, 8, len(items) - 1, len(items)):
        folder = tmp_path / str(stop)
        pipe = source.cache(path=None if kind == "memory" else folder).repeat(passes)
        with pipe.open(on_error="skip") as stream:
            assert [next(stream) for _ in range(stop)] == items[:stop]
            snapshot = snapshot_of(stream)
        if kind == "gone":
            shutil.rmtree(folder, ignore_errors=True)
        with pipe.open(on_error="skip", resume=snapshot) as stream:
            assert list(stream) == items[stop:]
            assert stream.errors.total == len(bad)


class Turns:
    """Chooses an order of twenty items, and from `back` on another one."""

    def __init__(self) -> None:
        self.back = False

    def pipe(self) -> Pipeline[int]:
        async def wait(item: int) -> int:
            for _ in range(5 * (3 - item % 4 if self.back else item % 4)):
                await anyio.lowlevel.checkpoint()
            return item

        return sl.from_items(range(20)).map(wait, concurrency=4, ordered=False)


# What others do in the folder ---------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("window", "gone"), [(1, False), (12, True)])
def test_a_reset_by_others_changes_no_pass_of_a_run_and_of_its_resumes(window: int, gone: bool, tmp_path: Path) -> None:
    """The window reaches over passes before the reset and after it, and nothing runs ahead of the consumer."""
    for at, stop in [(2, 3), (2, 11), (7, 8), (9, 16), (12, 20)]:
        folder = tmp_path / f"{at}-{stop}"
        numbers = sl.from_items(range(5)).map(lambda item, rng: (item, int(rng.integers(10**9))), seed=0)
        pipe = numbers.cache(path=folder).repeat(8).shuffle(window=window)
        subject = directly(pipe)

        async def first(
            tasks: Tasks, subject: Any = subject, folder: Path = folder, at: int = at, k: int = stop
        ) -> tuple[list[Any], str]:
            flow = subject.open(tasks, None)
            items = [await anext(flow) for _ in range(at)]
            CacheFiles(str(folder), "cache", "cache", "0" * 16, 0, 1).reset()
            items += [await anext(flow) for _ in range(k)]
            text = subject.write(flow.state)
            return items + [item async for item in flow], text

        async def then(tasks: Tasks, text: str, subject: Any = subject) -> list[Any]:
            return [item async for item in subject.open(tasks, text)]

        whole, text = run(first)
        assert Counter(item for item, _ in whole) == Counter([*range(5)] * 8)
        assert len(set(whole)) == 5  # one drawing
        if gone:
            shutil.rmtree(folder)
        assert run(partial(then, text=text)) == whole[at + stop :]


@pytest.mark.parametrize(("window", "stop"), [(1, 6), (10, 2), (10, 9)])
def test_a_pass_that_was_reset_meanwhile_is_not_kept_any_more(stop: int, window: int, tmp_path: Path) -> None:
    """A window goes back to the beginning of the pass."""
    pipe = sl.from_items(range(10)).shard(1).shuffle(window=10).cache(path=tmp_path).shuffle(window=window)
    with pipe.open() as stream:
        items = [next(stream) for _ in range(stop)]
        snapshot = snapshot_of(stream)
        items += stream
    with pipe.open() as other:
        other.close()
        other.reset_cache()
    with pipe.open(epoch=1) as other:
        assert rest(pipe, snapshot) == items[stop:]  # whether its files are there
        again = list(other)
    assert again != items
    assert not list(tmp_path.glob(drawn(0)))
    assert rest(pipe, snapshot) == items[stop:]  # or not
    assert not list(tmp_path.glob(drawn(0)))
    assert list(pipe.open(epoch=1).sync_stream()) == again


def test_each_of_two_that_chose_goes_on_with_its_own_pass(tmp_path: Path) -> None:
    turns = Turns()
    subject = directly(turns.pipe().cache(path=tmp_path).repeat(3))

    async def work(tasks: Tasks) -> None:
        async with opened(tasks, subject, None) as one, opened(tasks, subject, None) as other:
            ours = [await anext(one) for _ in range(20)]
            turns.back = True
            theirs = [await anext(other) for _ in range(20)]
            assert ours != theirs
            for _ in range(2):
                assert [await anext(one) for _ in range(20)] == ours
                assert [await anext(other) for _ in range(20)] == theirs

    run(work)


def test_a_pass_is_that_of_the_pass_before_whatever_others_have_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count(1)
    monkeypatch.setattr(
        "streamline.transforms.cache_disk.new_id", lambda: f"{next(numbers):016x}"
    )  # later ones are preferred
    turns = Turns()
    subjects = [directly(turns.pipe().cache(path=tmp_path / name).repeat(2)) for name in "ab"]

    async def drawn(tasks: Tasks, subject: ChainSubject) -> list[Any]:
        async with opened(tasks, subject, None) as flow:
            return [await anext(flow) for _ in range(21)][:20]

    async def work(tasks: Tasks) -> None:
        ours = await drawn(tasks, subjects[0])
        turns.back = True
        theirs = await drawn(tasks, subjects[1])
        assert ours != theirs
        async with opened(tasks, subjects[0], None) as flow:
            assert [await anext(flow) for _ in range(20)] == ours
            shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
            assert [item async for item in flow] == ours
        assert await drawn(tasks, subjects[0]) == theirs

    run(work)


@pytest.mark.parametrize("stop", [9, 30])
def test_a_pass_is_gone_on_with_in_another_epoch_as_it_was_begun(stop: int, tmp_path: Path) -> None:
    pipe = sl.from_items(range(30)).shard(1).shuffle(window=7).cache(path=tmp_path)
    whole = list(pipe)

    def lose() -> None:
        for path in tmp_path.glob("*.cache"):
            if int(path.name.split(".")[4]) > 8:
                path.unlink()

    lose()
    with pipe.open(epoch=7) as stream:
        assert [next(stream) for _ in range(stop)] == whole[:stop]
        snapshot = snapshot_of(stream)
        assert list(stream) == whole[stop:]
    lose()
    assert rest(pipe, snapshot) == whole[stop:]


# Damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True], ids=["fixed", "chosen"])
@pytest.mark.parametrize("lost", ["gone", "damaged"])
def test_what_is_damaged_while_it_is_served_is_drawn_again_or_an_error(
    chosen: bool, lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = sl.from_items(range(18)).shuffle(window=18)
    pipe = (numbers.map(erratic, concurrency=4, ordered=False) if chosen else numbers).cache(path=tmp_path).repeat(3)
    subject = directly(pipe)

    def lose() -> Path:
        paths = [path for stop in ("08", "12") for path in tmp_path.glob(f"*.0000000000{stop}.*")]
        for path in paths:
            path.unlink() if lost == "gone" else path.write_bytes(path.read_bytes()[:-9])
        return paths[-1]

    async def work(tasks: Tasks) -> None:
        flow = subject.open(tasks, None)
        first = [await anext(flow) for _ in range(18)]
        assert [await anext(flow) for _ in range(5)] == first[:5]
        path = lose()
        assert [await anext(flow) for _ in range(3)] == first[5:8]
        if chosen:
            with pytest.raises(ResumeError, match="can't go on in the middle of its pass"):
                await anext(flow)
        else:
            assert [item async for item in flow] == [*first[8:], *first]
        assert f"{path} is {'gone' if lost == 'gone' else 'cut short'}: drawing it again" in caplog.text
        await flow.aclose()

    run(work)


@pytest.mark.parametrize("stop", [1, 6, 19])
def test_after_what_chose_a_window_is_not_filled_from_another_order(stop: int, tmp_path: Path) -> None:
    chosen = sl.from_items(range(20)).map(erratic, concurrency=4, ordered=False)
    pipe = chosen.cache(path=tmp_path).shuffle(window=20)
    _, snapshot = begun(pipe, stop)
    shutil.rmtree(tmp_path)
    with pytest.raises(ResumeError, match="can't go on in the middle of its pass"):
        rest(pipe, snapshot)


@pytest.mark.parametrize("kinds", [("best_effort", "strict"), ("strict", "best_effort")])
def test_nor_where_the_merge_was_or_is_another_one(kinds: tuple[Any, Any], tmp_path: Path) -> None:
    """Or twice another one: what the snapshot's pass is of, each snapshot after it says again."""
    first, then = (
        sl.from_items(range(20)).shard(2).merge(kind).cache(path=tmp_path).shuffle(window=20) for kind in kinds
    )
    items, snapshot = begun(first, 6)
    more, again = begun(then, 2, snapshot)
    assert sorted(items + more + rest(first, again)) == list(range(20))
    shutil.rmtree(tmp_path)
    for pipe in (first, then) if kinds[0] == "best_effort" else (then,):
        for one in (snapshot, again):
            with pytest.raises(ResumeError, match="can't go on in the middle of its pass"):
                rest(pipe, one)


def test_what_stands_at_the_end_of_a_block_needs_none_of_them(tmp_path: Path) -> None:
    read = Counter[int]()

    def look(item: int) -> int:
        read[item] += 1
        return item

    pipe = sl.from_items(range(12)).map(look).cache(path=tmp_path).take(9).repeat(2)
    items, snapshot = begun(pipe, 17)
    assert items == [*range(9), *range(8)]
    assert snapshot.worker_states[0]["cache"]["kept"] == 8
    shutil.rmtree(tmp_path)
    read.clear()
    assert rest(pipe, snapshot) == [8]
    assert min(read) == 8
    assert not list(tmp_path.glob("*"))  # a pass without its beginning


# Runs that choose their order, and runs that don't, over the same files -----------------------------------------------


LENGTH = 3_000
"""Less than a block, more than a stream reads ahead."""


async def slow_in_shard_0(n: int) -> int:
    for _ in range(50 if n % 3 == 0 else 0):
        await anyio.lowlevel.checkpoint()
    return n


def merged(path: Path, kind: Any) -> sl.Pipeline[int]:
    return sl.from_items(range(LENGTH)).shard(3).map(slow_in_shard_0).merge(kind).cache(path=path)


@pytest.mark.long
def test_a_strict_run_does_not_go_on_in_blocks_that_a_best_effort_run_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BLOCK_ITEMS", 16384)
    strict = merged(tmp_path, "strict")
    with strict.open() as stream:
        first = [next(stream) for _ in range(7)]
        snapshot = stream.snapshot()
    assert list(merged(tmp_path, "best_effort")) != list(range(LENGTH))
    with strict.open(resume=snapshot) as stream:
        assert first + list(stream) == list(range(LENGTH))


@pytest.mark.long
def test_a_strict_run_in_blocks_that_were_chosen_goes_on_in_them_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BLOCK_ITEMS", 16384)
    chosen = list(merged(tmp_path, "best_effort"))
    strict = merged(tmp_path, "strict")
    with strict.open() as stream:
        first = [next(stream) for _ in range(7)]
        snapshot = stream.snapshot()
    with strict.open(resume=snapshot) as stream:
        assert first + list(stream) == chosen != list(range(LENGTH))
    for block in tmp_path.iterdir():
        block.unlink()
    with (
        strict.open(resume=snapshot) as stream,
        pytest.raises(ResumeError, match="damaged or gone, and what is before it chooses an order"),
    ):
        next(stream)
