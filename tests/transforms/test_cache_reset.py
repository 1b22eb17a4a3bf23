"""`reset_cache()`: passes that the consumer hasn't begun are drawn anew, exactly so behind a resume, in any host."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.errors import PausedError, PlanError, ReadError
from streamline.pipeline import Pipeline

BACKENDS = [sl.Inline(), sl.Threads(2), sl.Processes(2)]


def passes(items: list[Any], size: int) -> list[int]:
    """Return the number of the first pass that has the same items in the same order, for each pass."""
    found = [items[start : start + size] for start in range(0, len(items), size)]
    return [found.index(one) for one in found]


def shuffled(path: Path | None, times: int | None = 6) -> Pipeline[int]:
    return sl.from_items(range(12)).shard(2).shuffle(window=20).cache(path=path).repeat(times).merge()


def text_of(stream: Any) -> sl.Snapshot:
    return sl.Snapshot.from_json(stream.snapshot().to_json())


@pytest.mark.parametrize("backend", BACKENDS, ids=["inline", "threads", "processes"])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_the_pass_that_was_begun_is_finished_and_those_after_are_drawn_anew(
    disk: bool, backend: Any, tmp_path: Path
) -> None:
    pipe = shuffled(tmp_path / "cache" if disk else None)
    with pipe.open(backend=backend) as stream:
        items = [next(stream) for _ in range(15)]
        stream.reset_cache()
        snapshot = text_of(stream)
        items += [next(stream) for _ in range(25)]  # in the pass behind the next
        stream.reset_cache()
        later = text_of(stream)
        items += list(stream)
        assert stream.stats().items == 72
    assert passes(items, 12) == [0, 0, 2, 2, 4, 4]
    assert all(sorted(items[at : at + 12]) == list(range(12)) for at in range(0, 72, 12))
    with pipe.open(backend=backend, resume=later) as stream:
        assert list(stream) == items[40:]
    with pipe.open(backend=backend, resume=snapshot) as stream:
        again = list(stream)
    assert again[:9] == items[15:24]  # the pass that it was taken in
    if not disk:
        assert again[:33] == items[15:48]  # and up to the second reset, which isn't called here


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_resume_is_exact_at_every_item_around_a_reset(disk: bool, tmp_path: Path) -> None:
    for at, stop in itertools.product((0, 1, 11, 12, 13), range(0, 36, 6 if disk else 3)):
        folder = tmp_path / f"{at}-{stop}"
        pipe = shuffled(folder if disk else None, 4)
        with pipe.open() as stream:
            items = [next(stream) for _ in range(at)]
            stream.reset_cache()
            items += [next(stream) for _ in range(stop)]
            snapshot = text_of(stream)
            rest = list(stream)
        begun = -(-at // 12)
        assert passes(items + rest, 12) == [min(number, begun if number >= begun else 0) for number in range(4)]
        with pipe.open(resume=snapshot) as stream:
            assert list(stream) == rest
        if disk:
            shutil.rmtree(folder)  # another machine
            with pipe.open(resume=snapshot) as stream:
                assert list(stream) == rest


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_what_a_window_reads_again_is_of_the_drawing_that_it_was_of(disk: bool, tmp_path: Path) -> None:
    """The window reaches over passes before the reset and behind it."""
    for at, stop in itertools.product((2, 9, 16), (0, 3, 10, 20)):
        source = sl.from_items(range(5)).map(lambda item, rng: (item, int(rng.integers(10**9))), seed=0)
        kept = source.cache(path=tmp_path / f"{at}-{stop}" if disk else None)
        pipe = kept.repeat(8).shuffle(window=12)
        with pipe.open() as stream:
            items = [next(stream) for _ in range(at)]
            stream.reset_cache()
            items += [next(stream) for _ in range(stop)]
            snapshot = text_of(stream)
            rest = list(stream)
        with pipe.open(resume=snapshot) as stream:
            assert list(stream) == rest
        whole = [*items, *rest]
        assert sorted(item for item, _ in whole) == sorted(list(range(5)) * 8)
        assert len({number for item, number in whole if item == 0}) == 2  # two drawings


async def test_an_async_stream_is_reset_likewise(tmp_path: Path) -> None:
    for path in (None, tmp_path):
        async with shuffled(path).open() as stream:
            items = [await anext(stream) for _ in range(15)]
            await stream.reset_cache()
            items += [item async for item in stream]
        assert passes(items, 12) == [0, 0, 2, 2, 2, 2]


def test_a_debug_stream_is_reset_likewise() -> None:
    stream = shuffled(None).debug()
    items = [next(stream) for _ in range(15)]
    stream.reset_cache()
    assert passes(items + list(stream), 12) == [0, 0, 2, 2, 2, 2]


def test_the_first_pass_of_a_stream_that_gave_nothing_is_drawn_anew(tmp_path: Path) -> None:
    first = list(shuffled(tmp_path, 1))
    with (
        sl.from_items(range(12))
        .shard(2)
        .shuffle(window=20)
        .cache(path=tmp_path)
        .repeat(1)
        .merge()
        .open(epoch=3) as stream
    ):
        stream.reset_cache()
        second = list(stream)
    assert sorted(first) == sorted(second)
    assert first != second
    assert list(shuffled(tmp_path, 1)) == second  # it is what the folder keeps from now on


@pytest.mark.parametrize("backend", BACKENDS, ids=["inline", "threads", "processes"])
def test_a_loader_draws_anew_in_the_epoch_after_a_reset(backend: Any, tmp_path: Path) -> None:
    pipe = sl.from_items(range(12)).shard(2).shuffle(window=20).cache(path=tmp_path).merge()
    with pipe.loader(backend=backend) as loader:
        found = []
        for epoch in range(6):
            if epoch == 2:
                loader.reset_cache()  # the next epoch may have been opened ahead by now
            items = []
            for item in loader:
                items.append(item)
                if (epoch, len(items)) == (3, 5):
                    loader.reset_cache()
            found += items
        assert passes(found, 12) == [0, 0, 2, 2, 4, 4]
        state = loader.state_dict()
    with pipe.loader(backend=backend) as loader:
        loader.load_state_dict(state)
        assert list(loader) == found[-12:]


def test_a_loader_of_steps_goes_on_after_a_reset() -> None:
    with shuffled(None, None).loader(steps_per_epoch=8) as loader:
        items = [item for _ in range(2) for item in loader]
        loader.reset_cache()
        items += [item for _ in range(4) for item in loader]
    assert passes(items, 12) == [0, 0, 2, 2]


def test_a_loader_that_was_loaded_is_reset_before_its_first_item(tmp_path: Path) -> None:
    pipe = shuffled(tmp_path, 3)
    with pipe.loader() as loader:
        items = list(itertools.islice(loader, 15))
        state = loader.state_dict()
    with pipe.loader() as loader:
        loader.load_state_dict(state)
        loader.reset_cache()
        items += list(loader)
    assert passes(items, 12) == [0, 0, 2]


def test_what_was_left_out_is_counted_once_around_a_reset(tmp_path: Path) -> None:
    def picky(item: int) -> int:
        if item % 5 == 1:
            raise ValueError(item)
        return item

    for path in (None, tmp_path):
        pipe = sl.from_items(range(20)).map(picky).cache(path=path).repeat(3)
        with pipe.open(on_error="skip") as stream:
            items = [next(stream) for _ in range(5)]
            stream.reset_cache()
            items += list(stream)
            total = stream.errors.total
        assert len(items) == 48
        assert total == 8  # each drawing leaves out four


def test_a_reset_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(PlanError, match=r"there is no \.cache in this pipeline"), sl.from_items([1]).open() as stream:
        stream.reset_cache()
    with shuffled(None).open() as stream:
        next(stream)
        with stream.paused(), pytest.raises(PausedError):
            stream.reset_cache()
        assert len(list(stream)) == 71
        stream.reset_cache()  # it has ended: there is nothing to let go of


def test_ranks_that_know_their_lengths_end_together_after_a_reset() -> None:
    pipe = sl.from_items(range(13)).shard(2).shuffle(window=20).cache().repeat(3).merge()
    for rank in (0, 1):
        with pipe.open(rank=rank, world_size=2, ends="drop") as stream:
            items = [next(stream) for _ in range(8)]
            stream.reset_cache()
            assert len(items + list(stream)) == 18


@pytest.mark.parametrize("behind", [False, True], ids=["in workers", "behind the merge"])
def test_a_rank_resets_what_it_reads_itself_and_nothing_else(behind: bool, tmp_path: Path) -> None:
    parts = sl.from_items(range(40)).shard(4)
    pipe = parts.merge().shuffle(window=20) if behind else parts.shuffle(window=20)
    pipe = pipe.cache(path=tmp_path) if behind else pipe.cache(path=tmp_path).merge()

    def items(rank: int, epoch: int, *, reset: bool = False) -> list[int]:
        with pipe.open(rank=rank, world_size=2, epoch=epoch) as stream:
            if reset:
                stream.reset_cache()
            return list(stream)

    first = [items(rank, 0) for rank in range(2)]
    old = set(tmp_path.glob("*.drawing-0.*"))
    second = items(1, 1, reset=True)
    assert len(old & set(tmp_path.iterdir())) == len(old) / 2  # its own are gone
    assert sorted(second) == sorted(first[1])
    assert second != first[1]
    assert items(1, 2) == second
    assert items(0, 2) == first[0]


def test_a_stream_that_cannot_be_reset_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    pipe = shuffled(tmp_path)
    with pipe.open() as stream:
        items = [next(stream) for _ in range(15)]
        with monkeypatch.context() as patch:
            patch.setattr("streamline.transforms.cache_files.write_parts", full)
            with pytest.raises(ReadError, match=r"can't reset cache: No space left on device; name a folder"):
                stream.reset_cache()
        items += list(stream)
    assert passes(items, 12) == [0] * 6
