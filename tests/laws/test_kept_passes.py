"""Stages with files of their own, in each pass and mixture, before each stage that reads again: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import streamline as sl
from streamline.errors import PlanError
from streamline.testing.checks import check_resume
from tests.laws.passes import AnyPipeline, in_threes, numbers
from tests.laws.profile import in_turn, mostly_long


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", 3)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


KEEPING: dict[str, Callable[[AnyPipeline, Path], AnyPipeline]] = {
    "cache": lambda pipe, path: pipe.cache(path=path),
    "shuffled, cache": lambda pipe, path: pipe.shuffle(window=4, name="before").cache(path=path),
    "cycles": lambda pipe, path: pipe.regenerate(4, spill=path),
    "cycles ahead": lambda pipe, path: pipe.regenerate(3, overlap=True, reuse=2, spill=path),
}

PLANS: dict[str, Callable[[Callable[[AnyPipeline], AnyPipeline]], AnyPipeline]] = {
    "once": lambda made: made(numbers(11)),
    "repeated": lambda made: made(numbers(7)).repeat(3),
    "repeated before": lambda made: made(numbers(5).repeat(3)),
    "sharded, repeated": lambda made: made(numbers(9).shard(2)).repeat(2).merge(),
    "mixed": lambda made: sl.mix({"a": made(numbers(7)), "b": numbers(6, 100)}),
    "repeated, mixed": lambda made: sl.mix({"a": made(numbers(5)).repeat(2), "b": numbers(6, 100)}),
    "mixed, repeated": lambda made: sl.mix({"a": made(numbers(5)), "b": numbers(4, 100)}).repeat(2),
    "one after the other": lambda made: sl.concat(made(numbers(7)), numbers(5, 100)),
    "repeated, one after the other": lambda made: sl.concat(made(numbers(4)).repeat(2), numbers(5, 100)),
    "one after the other, repeated": lambda made: sl.concat(made(numbers(5)), numbers(4, 100)).shard(1).repeat(2),
    "zipped, repeated": lambda made: sl.zip(made(numbers(5)), numbers(30, 100)).map(list).repeat(2),
}

READING: dict[str, Callable[[AnyPipeline, Path], AnyPipeline]] = {
    "window": lambda pipe, path: pipe.shuffle(window=5),
    "long window": lambda pipe, path: pipe.shuffle(window=14),
    "flat map": lambda pipe, path: pipe.flat_map(lambda item: [item, item]),
    "unbatch": lambda pipe, path: pipe.batch(5, collate=None).unbatch(),
    "custom": lambda pipe, path: pipe.through(in_threes),
    "cache": lambda pipe, path: pipe.cache(name="end"),
    "cache on disk": lambda pipe, path: pipe.cache(name="end", path=path),
    "cycles": lambda pipe, path: pipe.regenerate(6, name="end"),
    "windows": lambda pipe, path: pipe.window(3),
    "nothing": lambda pipe, path: pipe,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kept", "reading"), mostly_long(in_turn([*product(PLANS, KEEPING)], [*READING]), 5))
def test_what_is_in_files_is_exact_at_every_item_or_refused(
    kept: tuple[str, str], reading: str, tmp_path: Path
) -> None:
    plan, keeping = kept
    passes = "repeated" in plan and "before" not in plan

    def made() -> AnyPipeline:
        return READING[reading](PLANS[plan](lambda pipe: KEEPING[keeping](pipe, tmp_path)), tmp_path)

    if passes and keeping.startswith("cycles") and reading != "nothing":
        with pytest.raises(
            PlanError, match=r"\.repeat goes through what .* keeps in the files of one pass, so .* could"
        ):
            list(made())
    else:
        check_resume(made())
