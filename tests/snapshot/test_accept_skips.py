"""What was skipped before a stage was renamed, removed or moved stays counted, and its dead letters stay written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import streamline as sl

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}


def inv(item: int) -> int:
    return 60 // item


def inv2(item: int) -> int:
    return 60 // item


DATA = [1, 0, 2, 0, 3, 4, 0, 5]
PIPE = sl.from_items(DATA).map(inv)
RENAMED = sl.from_items(DATA).map(inv2)
REMOVED = sl.from_items(DATA)
BEHIND = sl.from_items(DATA).shard(1).merge()
NEW_NAME = ["inv2.fn", "inv2.name"]
OLD_NAME = ["inv.fn", "inv.name"]


class Leg:
    """A run from a snapshot: what came, what was counted, which lines there are behind it."""

    def __init__(
        self,
        pipe: sl.Pipeline[Any],
        take: int | None,
        path: Path,
        before: Leg | None = None,
        accept: Sequence[str] = (),
        **options: Any,
    ) -> None:
        resume = None if before is None else before.snapshot
        options = {**SKIP, "dead_letters": path, "resume": resume, "accept": accept, **options}
        with pipe.open(**options) as stream:
            self.items = list(islice(stream, take))
            self.stages = dict(stream.errors.stages)
            self.snapshot: sl.Snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            assert stream.errors.total == sum(self.stages.values())
        self.letters = letters(path)


def letters(path: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["stage"], line["n"]) for line in lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bad.jsonl"


TWO = [("inv", 1), ("inv", 2)]


@pytest.mark.parametrize("behind", [False, True])
def test_a_renamed_stage_loses_no_count_and_no_line_however_often_the_run_is_resumed(path: Path, behind: bool) -> None:
    pipe, renamed = (BEHIND.map(inv), BEHIND.map(inv2)) if behind else (PIPE, RENAMED)
    one = Leg(pipe, 3, path)
    two = Leg(renamed, 1, path, one, NEW_NAME)
    three = Leg(renamed, 0, path, two)
    assert (one.stages, two.stages, three.stages) == ({"inv": 2}, {"inv": 2}, {"inv": 2})
    assert (one.letters, two.letters, three.letters) == (TWO, TWO, TWO)
    end = Leg(renamed, None, path, three)
    assert end.items == [12]
    assert end.stages == {"inv": 2, "inv2": 1}
    assert end.letters == [*TWO, ("inv2", 1)]
    again = Leg(renamed, None, path, end)
    assert (again.stages, again.letters) == (end.stages, end.letters)


def test_a_stage_that_gets_its_old_name_back_goes_on_with_its_count(path: Path) -> None:
    one = Leg(PIPE, 2, path)
    two = Leg(RENAMED, 2, path, one, NEW_NAME)
    end = Leg(PIPE, None, path, two, OLD_NAME)
    assert end.stages == {"inv": 2, "inv2": 1}
    assert sorted(end.letters) == [*TWO, ("inv2", 1)]


def test_behind_a_rename_the_older_snapshot_still_resumes_the_older_plan(path: Path) -> None:
    one = Leg(PIPE, 2, path)
    Leg(RENAMED, 3, path, one, NEW_NAME)
    end = Leg(PIPE, None, path, one)
    assert (end.stages, end.letters) == ({"inv": 3}, [*TWO, ("inv", 3)])


def test_stages_that_swap_their_names_lose_nothing(path: Path) -> None:
    def both(first: str, second: str) -> sl.Pipeline[Any]:
        return sl.from_items(DATA).map(inv, name=first).filter(lambda item: 1 / (item - 60) < 1, name=second)

    one = Leg(both("a", "b"), 1, path)
    assert one.stages == {"a": 1, "b": 1}
    two = Leg(both("b", "a"), 1, path, one, ["a.name", "b.name"])
    end = Leg(both("b", "a"), None, path, two)
    assert sum(end.stages.values()) == len(end.letters) == len(set(end.letters)) == 4


@pytest.mark.parametrize("behind", [False, True])
def test_a_removed_stages_count_stays_under_its_name(path: Path, behind: bool) -> None:
    pipe, removed = (BEHIND.map(inv), BEHIND) if behind else (PIPE, REMOVED)
    one = Leg(pipe, 3, path)
    two = Leg(removed, 1, path, one, ["inv.removed"])
    three = Leg(removed, 1, path, two)
    assert (two.items, three.items) == ([4], [0])
    assert (two.stages, three.stages) == ({"inv": 2}, {"inv": 2})
    assert (two.letters, three.letters) == (TWO, TWO)
    back = Leg(pipe, None, path, two, ["inv.added"])
    assert (back.stages, back.letters) == ({"inv": 3}, [*TWO, ("inv", 3)])


def test_max_errors_counts_what_a_removed_stage_has_skipped(path: Path) -> None:
    one = Leg(PIPE, 3, path)
    with (
        REMOVED.open(on_error="skip", max_errors=1, resume=one.snapshot, accept=["inv.removed"]) as stream,
        pytest.raises(sl.errors.TooManyErrors, match="inv 2"),
    ):
        next(stream)


def test_a_run_that_skips_nothing_keeps_the_count(path: Path) -> None:
    one = Leg(PIPE, 3, path)
    with RENAMED.open(resume=one.snapshot, accept=NEW_NAME) as stream:
        next(stream)
        snapshot = stream.snapshot()
    with RENAMED.open(resume=snapshot, **SKIP) as stream:
        list(stream)
        assert stream.errors.stages == {"inv": 2, "inv2": 1}


@pytest.mark.parametrize("merged_first", [False, True])
def test_a_stage_that_is_moved_over_the_merge_goes_on_counting(path: Path, merged_first: bool) -> None:
    data = sl.from_items([*DATA, *DATA])
    pipes = [data.shard(2).map(inv).merge(), data.shard(2).merge().map(inv)]
    before, after = reversed(pipes) if merged_first else pipes
    accept = ["inv.removed", "inv.added"]
    one = Leg(before, 4, path)
    two = Leg(after, 2, path, one, accept)
    three = Leg(before, 1, path, two, accept)
    end = Leg(before, None, path, three)
    assert end.stages == {"inv": 6}
    assert len(end.letters) == 6
    shards = [(json.loads(line)["shard"], json.loads(line)["n"]) for line in path.read_text().splitlines()]
    assert len(set(shards)) == 6


@pytest.mark.parametrize("behind", [False, True])
def test_both_ranks_of_a_job_keep_what_they_have_counted(tmp_path: Path, behind: bool) -> None:
    data = sl.from_items([1, 1, 0, 0, 0, 2, 3, 3, 4, 4, 5, 0]).shard(4)
    pipe, renamed = (data.merge().map(inv), data.merge().map(inv2)) if behind else (data.map(inv), data.map(inv2))

    def leg(pipe: sl.Pipeline[Any], take: int | None, resume: str | None, save: str, accept: Any = ()) -> list[Any]:
        found = []
        for rank in (0, 1):
            snapshot = None if resume is None else sl.Snapshot.load(tmp_path / resume)
            options = {"rank": rank, "world_size": 2, "resume": snapshot, "accept": accept, "ends": "allow", **SKIP}
            with pipe.open(**options, dead_letters=tmp_path / "bad.jsonl") as stream:
                list(islice(stream, take))
                stream.snapshot().save(tmp_path / save)
                found.append(dict(stream.errors.stages))
        return found

    leg(pipe, 2, None, "one")
    first = leg(renamed, 1, "one", "two", NEW_NAME)
    again = leg(renamed, 0, "two", "three")
    of_rank_0 = {"inv": 2} if behind else {"inv": 1, "inv2": 1}
    assert first == again == [of_rank_0, {"inv": 1}]
    assert leg(renamed, None, "three", "end") == [of_rank_0, {"inv": 1, "inv2": 1}]
    files = [tmp_path / f"bad-rank-0000{rank}-of-00002.jsonl" for rank in (0, 1)]
    assert [len(letters(file)) for file in files] == [2, 2]


def test_repeats_behind_the_merge_keep_what_was_counted_and_what_it_is_a_rate_of() -> None:
    def passes(fn: Any) -> sl.Pipeline[Any]:
        return sl.from_items([*range(1, 2000)]).map(fn, name=fn.__name__).merge().repeat(3)

    def bad(item: int) -> int:
        return 1 // (item % 50)

    def good(item: int) -> int:
        return item

    with passes(bad).open(**SKIP) as stream:
        list(islice(stream, 1000))
        one = stream.snapshot()
        counted = stream.errors.total
    assert counted == 20
    with passes(good).open(resume=one, accept=["good.fn", "good.name"], **SKIP) as stream:
        list(islice(stream, 3500))
        two = stream.snapshot()
    with passes(good).open(resume=two, on_error="skip", max_errors=counted / 4400) as stream:
        assert len(list(stream)) > 0  # of the last pass alone it would be too many
        assert stream.errors.stages == {"bad": counted}
