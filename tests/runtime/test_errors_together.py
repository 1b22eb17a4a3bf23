"""Skipped items together with what else a pipeline has: every one counts once, and its dead letter is its own."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.core.dead_letters import DeadLetters
from streamline.pipeline import Pipeline

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}


def check(item: int) -> int:
    if item % 5 == 1:
        raise ValueError(item)
    return item


def check_again(item: int) -> int:
    return check(item)


async def check_soon(item: int) -> int:
    return check(item)


def letters(path: Path) -> list[tuple[Any, ...]]:
    """Return who skipped what, in order."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(letter["shard"], letter["stage"], letter["n"], letter["passes"], letter["item"]) for letter in found]


@pytest.mark.parametrize("where", ["worker", "behind the merge"])
def test_what_is_skipped_before_a_batch_that_does_not_wait_counts(where: str, tmp_path: Path) -> None:
    source = sl.from_items(range(12)) if where == "worker" else sl.from_items(range(12)).merge()
    pipe = source.map(check).batch(3, collate=None, max_wait_s=60)
    with pipe.open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        assert list(stream) == [[0, 2, 3], [4, 5, 7], [8, 9, 10]]
        assert stream.errors.total == 3
    assert len(letters(tmp_path / "bad.jsonl")) == 3
    with pipe.open(on_error="skip", max_errors=2) as stream, pytest.raises(sl.errors.TooManyErrors):
        list(stream)


CHANGED: dict[str, tuple[Callable[[Pipeline[Any]], Pipeline[Any]], list[str]]] = {
    "renamed": (lambda pipe: pipe.map(check_again), ["check_again.name", "check_again.fn"]),
    "removed": (lambda pipe: pipe, ["check.removed"]),
}


@pytest.mark.parametrize("section", ["worker", "behind the merge"])
@pytest.mark.parametrize("how", CHANGED)
def test_what_a_stage_skipped_that_was_changed_counts_in_every_later_resume(
    how: str, section: str, tmp_path: Path
) -> None:
    change, accept = CHANGED[how]
    source = sl.from_items(range(40)).shard(2)
    source = source if section == "worker" else source.merge()
    path = tmp_path / "bad.jsonl"
    with source.map(check).open(**SKIP, dead_letters=path) as stream:
        assert len(list(itertools.islice(stream, 16))) == 16
        snapshot, before = stream.snapshot(), letters(path)
    assert len(before) >= 3
    for _ in range(2):
        with change(source).open(**SKIP, dead_letters=path, resume=snapshot, accept=accept) as stream:
            next(stream)
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            assert stream.errors.total == len(letters(path))
    with change(source).open(**SKIP, dead_letters=path, resume=snapshot, accept=accept) as stream:
        list(stream)
        assert stream.errors.total == len(letters(path)) == (8 if how == "renamed" else len(before))
    assert letters(path)[: len(before)] == before
    assert len({letter[:3] for letter in letters(path)}) == len(letters(path))


def test_what_a_pass_skipped_beyond_its_end_is_not_taken_for_skips_of_the_next(tmp_path: Path) -> None:
    pipe = sl.from_items(range(30)).map(check_soon, concurrency=8).take(3).repeat(3)
    with pipe.open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        assert list(stream) == [0, 2, 3] * 3
        assert [failure.item for failure in stream.errors.last] == [1, 1, 1]
    assert letters(tmp_path / "bad.jsonl") == [(0, "check_soon", n, [n - 1], "1") for n in (1, 2, 3)]


def test_a_snapshot_by_a_signals_handler_while_errors_are_counted_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler runs between any two steps of the consumer's thread; here it does in the middle of the writing."""
    append, inside = DeadLetters.append, list[sl.Snapshot]()

    def interrupted(self: DeadLetters, letters: Any) -> None:
        written = list(letters)
        if written:
            inside.append(stream.snapshot())
            assert stream.errors is not None
        append(self, written)

    pipe = sl.from_items(range(100)).map(check)
    with pipe.open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        monkeypatch.setattr(DeadLetters, "append", interrupted)
        delivered = list(stream)
        assert stream.errors.total == 20
    assert [letter[2] for letter in letters(tmp_path / "bad.jsonl")] == list(range(1, 21))
    monkeypatch.undo()
    assert inside
    with pipe.open(**SKIP, resume=inside[0]) as stream:
        rest = list(stream)
        assert stream.errors.total == 20
    assert delivered[len(delivered) - len(rest) :] == rest


def test_ctrl_c_while_errors_are_counted_loses_no_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = DeadLetters.append

    def struck(self: DeadLetters, letters: Any) -> None:
        if list(letters):
            monkeypatch.setattr(DeadLetters, "append", append)
            raise KeyboardInterrupt

    path = tmp_path / "bad.jsonl"
    with (  # noqa: PT012 - it strikes in the middle
        pytest.raises(KeyboardInterrupt),
        sl.from_items(range(10)).map(check).open(**SKIP, dead_letters=path) as stream,
    ):
        assert next(stream) == 0
        monkeypatch.setattr(DeadLetters, "append", struck)
        list(stream)
    assert [letter[2] for letter in letters(path)] == list(range(1, 1 + stream.errors.total))
    assert stream.errors.total


def test_a_worker_whose_items_are_all_skipped_holds_a_strict_merge_up_no_longer() -> None:
    def odd(item: int) -> int:
        if item % 2 == 0:
            raise ValueError(item)
        return item

    with sl.from_items(range(3000)).shard(2).map(odd).merge().open(**SKIP) as stream:
        assert list(stream) == list(range(1, 3000, 2))
        assert stream.errors.total == 1500


def test_too_many_errors_with_a_pause_and_progress_on_comes_behind_the_pause() -> None:
    pipe = sl.from_items(range(2000)).map(check)
    with pipe.open(on_error="skip", max_errors=0, progress=True) as stream:
        assert next(stream) == 0
        with stream.paused():
            snapshot = stream.snapshot()
        with pytest.raises(sl.errors.TooManyErrors):
            list(stream)
        with stream.paused():
            assert stream.snapshot().produced
    with pipe.open(**SKIP, resume=snapshot) as stream:
        assert list(stream) == [item for item in range(1, 2000) if item % 5 != 1]


def test_a_long_run_with_skipped_items_snapshots_and_stats_holds_on_to_nothing() -> None:
    """A fifth is skipped; what is held is what was read ahead, which goes up and down."""
    pipe = sl.from_iterable(itertools.count).shard(2).map(check).shuffle(window=8).merge().batch(50, collate=None)
    held = []
    with pipe.open(**SKIP) as stream:
        for step in range(1, 801):
            next(stream)
            if step % 20 == 0:
                assert stream.snapshot().produced
                assert stream.stats()
            if step in (200, 800):
                gc.collect()
                held.append(len(gc.get_objects()))
        assert stream.errors.total > 9_000
    assert held[1] - held[0] < 3_000  # of 7,500 items that were skipped in between, each is at least one object
