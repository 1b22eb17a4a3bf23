"""A loader that skips: items are counted anew in each pass, and each has one line, however it is interrupted."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from tests.laws.profile import examples

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}
BAD = (0, 3, 4, 8, 9)
LENGTH = 10
EPOCHS = 3


def check(item: int) -> int:
    if item in BAD:
        raise ValueError(item)
    return item


PIPES: dict[str, sl.Pipeline[Any]] = {
    "map": sl.from_items(range(LENGTH)).map(check),
    "shuffle": sl.from_items(range(LENGTH)).map(check).shuffle(window=4),
    "shards": sl.from_items(range(LENGTH)).shard(2).map(check).merge().batch(2, collate=None),
    "timed": sl.from_items(range(LENGTH)).map(check).batch(2, collate=None, max_wait_s=60),
    "shuffled": sl.from_items(range(LENGTH)).shuffle().map(check),
}


def letters(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_epochs(path: Path) -> Counter[tuple[int, str]]:
    return Counter((letter["epoch"], letter["item"]) for letter in letters(path))


def expected(epochs: int) -> Counter[tuple[int, str]]:
    return Counter((epoch, str(item)) for epoch in range(epochs) for item in BAD)


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("way", ["inside", "behind"])
@examples(6)
@given(stops=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=5))
def test_each_skipped_item_of_each_epoch_has_one_line(
    name: str, way: str, stops: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("letters") / "bad.jsonl"
    state: dict[str, Any] | None = None
    for saved_at, crashed_behind in stops:
        with PIPES[name].loader(**SKIP, dead_letters=path) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            state = interrupted(loader, saved_at, crashed_behind, way)
    with PIPES[name].loader(**SKIP, dead_letters=path) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(loader.epoch, EPOCHS):
            list(loader)
    assert of_epochs(path) == expected(EPOCHS)
    numbers = [(letter["epoch"], letter["shard"], letter["n"]) for letter in letters(path)]
    assert len(set(numbers)) == len(numbers)


def interrupted(loader: sl.Loader[Any], saved_at: int, crashed_behind: int, way: str) -> dict[str, Any]:
    """Return the state behind some items; the loader goes on for a while, as one that crashes does."""
    if loader.epoch >= EPOCHS:
        return loader.state_dict()
    iteration = iter(loader)
    list(islice(iteration, saved_at))
    if way == "behind":
        del iteration  # as break does
        state = loader.state_dict()
        if loader.epoch < EPOCHS:
            list(islice(loader, crashed_behind))
        return state
    state = loader.state_dict()
    list(islice(iteration, crashed_behind))
    return state


def test_a_state_behind_the_last_good_item_has_written_the_bad_ones_behind_it(tmp_path: Path) -> None:
    """It resumes in the next epoch, so nobody would come to them any more."""
    path = tmp_path / "bad.jsonl"
    with PIPES["map"].loader(**SKIP, dead_letters=path) as loader:
        iteration = iter(loader)
        assert list(islice(iteration, 5)) == [1, 2, 5, 6, 7]
        state = loader.state_dict()
        assert of_epochs(path) == expected(1)
    with PIPES["map"].loader(**SKIP, dead_letters=path) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 1
        assert list(loader) == [1, 2, 5, 6, 7]
    assert of_epochs(path) == expected(2)


def test_a_limit_is_of_each_pass_and_goes_through_its_resumes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with PIPES["map"].loader(on_error="skip", max_errors=5) as loader:
        for _ in range(EPOCHS):
            assert len(list(loader)) == 5
    said = [record.message for record in caplog.records if record.name == "streamline.skipping"]
    assert said == ["5 items were skipped: check 5"] * EPOCHS

    with PIPES["map"].loader(on_error="skip", max_errors=4) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    with PIPES["map"].loader(on_error="skip", max_errors=4) as loader:
        loader.load_state_dict(state)
        with pytest.raises(sl.errors.TooManyErrors, match="5 items were skipped: check 5"):
            list(loader)


def test_epochs_of_steps_write_a_line_for_each_pass_of_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    state: dict[str, Any] | None = None
    for _ in range(5):  # 3 steps each: three passes of 5
        with PIPES["map"].loader(steps_per_epoch=3, **SKIP, dead_letters=path) as loader:
            if state is not None:
                loader.load_state_dict(state)
            assert len(list(loader)) == 3
            state = loader.state_dict()
            list(islice(loader, 2))
    assert all(count == 1 for count in of_epochs(path).values())
    assert of_epochs(path) >= expected(2)


def test_a_fixed_epoch_has_the_lines_of_its_last_pass(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    with PIPES["map"].loader(fixed_epoch=True, **SKIP, dead_letters=path) as loader:
        for _ in range(2):
            list(loader)
            assert of_epochs(path) == expected(1)
