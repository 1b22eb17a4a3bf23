"""`reset_cache()`: between two epochs, runs that begin later draw anew; within one it is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.errors import PlanError, ReadError
from streamline.pipeline import Pipeline

WITHIN = r"reset_cache\(\) in the middle of an epoch: .* between two epochs: .* write \.regenerate\(n\) in the place of"


def passes(items: list[Any], size: int) -> list[int]:
    """Return the number of the first pass that has the same items in the same order, for each pass."""
    found = [items[start : start + size] for start in range(0, len(items), size)]
    return [found.index(one) for one in found]


def shuffled(path: Path | None, times: int | None = 1) -> Pipeline[int]:
    return sl.from_items(range(12)).shard(2).shuffle(window=20).cache(path=path).repeat(times).merge()


def reset(pipe: Pipeline[Any], **options: Any) -> None:
    with pipe.open(**options) as stream:
        stream.close()
        stream.reset_cache()


@pytest.mark.one_in(2, 1)
def test_a_loader_draws_anew_in_the_epoch_after_a_reset(backend: Any, tmp_path: Path) -> None:
    with shuffled(tmp_path).loader(backend=backend) as loader:
        found = []
        for epoch in range(6):
            if epoch in (2, 4):
                loader.reset_cache()  # the next epoch may have been opened ahead by now
            items = []
            for item in loader:
                items.append(item)
                if len(items) == 5:
                    with pytest.raises(PlanError, match=WITHIN):
                        loader.reset_cache()
            found += items
        assert passes(found, 12) == [0, 0, 2, 2, 4, 4]
        state = loader.state_dict()
    with shuffled(tmp_path).loader(backend=backend) as loader:
        loader.load_state_dict(state)
        assert list(loader) == found[-12:]


def test_a_loader_that_was_left_is_between_epochs_a_loaded_one_is_not(tmp_path: Path) -> None:
    pipe = shuffled(tmp_path)
    with pipe.loader() as loader:
        first = list(itertools.islice(loader, 5))
        state = loader.state_dict()
        loader.reset_cache()
        second = list(loader)
    assert second[:5] != first
    with pipe.loader() as loader:
        loader.load_state_dict(state)
        with pytest.raises(PlanError, match=WITHIN):
            loader.reset_cache()
        assert sorted(first + list(loader)) == sorted(second)
        assert list(loader) == second


def test_a_loader_of_steps_whose_pass_goes_on_is_not_reset() -> None:
    with shuffled(None, None).loader(steps_per_epoch=8) as loader:
        loader.reset_cache()
        items = list(loader)
        with pytest.raises(PlanError, match=WITHIN):
            loader.reset_cache()
        items += [item for _ in range(2) for item in loader]
    assert passes(items, 12) == [0, 0]


async def test_streams_are_reset_after_their_end_or_close_only(tmp_path: Path) -> None:
    for path in (tmp_path, None):
        pipe = shuffled(path, 2)
        with pipe.open() as stream:
            with pytest.raises(PlanError, match=WITHIN):
                stream.reset_cache()
            first = list(stream)
            stream.reset_cache()
        async with pipe.open(epoch=1) as other:
            with pytest.raises(PlanError, match=WITHIN):
                await other.reset_cache()
            second = [item async for item in other]
            await other.reset_cache()
        debug = pipe.debug(epoch=2)
        with pytest.raises(PlanError, match=WITHIN):
            debug.reset_cache()
        assert passes(first + second + list(debug), 12) == [0, 0, 2, 2, 4, 4]
    with pytest.raises(PlanError, match=r"there is no \.cache in this pipeline"):
        reset(sl.from_items([1]))


def test_a_run_serves_one_drawing_however_often_others_reset_it(tmp_path: Path) -> None:
    pipe = shuffled(tmp_path, 6)
    with pipe.open() as stream:
        items = [next(stream) for _ in range(15)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        reset(pipe)
        items += list(shuffled(tmp_path).open(epoch=1).sync_stream())  # which removes the files of the first drawing
        items += list(stream)
    assert passes(items[:15] + items[27:], 12) == [0] * 6
    assert items[15:27] != items[:12]
    with pipe.open(resume=snapshot) as stream:
        assert list(stream) == items[27:]


@pytest.mark.parametrize("merged", [False, True], ids=["in workers", "after the merge"])
def test_a_rank_resets_what_it_reads_itself_and_nothing_else(merged: bool, tmp_path: Path) -> None:
    parts = sl.from_items(range(40)).shard(4)
    pipe = parts.merge().shuffle(window=20) if merged else parts.shuffle(window=20)
    pipe = pipe.cache(path=tmp_path) if merged else pipe.cache(path=tmp_path).merge()

    def items(rank: int, epoch: int) -> list[int]:
        with pipe.open(rank=rank, world_size=2, epoch=epoch) as stream:
            return list(stream)

    first = [items(rank, 0) for rank in range(2)]
    old = set(tmp_path.glob("*.drawing-0.*"))
    reset(pipe, rank=1, world_size=2)
    second = items(1, 1)
    assert len(old & set(tmp_path.iterdir())) == len(old) / 2  # its own are gone
    assert sorted(second) == sorted(first[1])
    assert second != first[1]
    assert items(1, 2) == second
    assert items(0, 2) == first[0]


def test_a_folder_that_cannot_be_reset_says_so_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    first = list(shuffled(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("streamline.transforms.cache_files.write_parts", full)
        with pytest.raises(ReadError, match=r"can't reset cache: No space left on device; name a folder"):
            reset(shuffled(tmp_path))
    assert list(shuffled(tmp_path)) == first
