"""What is in memory of cycles and of cached passes: no more than is said, and nothing behind the end.

Counted item by item, not by what the process takes: bench/cycle_memory.py measures that.
"""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
import streamline.core.driver
from streamline.errors import CacheFull
from streamline.pipeline import Pipeline
from tests.transforms.live import Live

SIZE = 40
READY = 4
"""Items of the channel behind a cycle."""

LIVE = Live()
"""What `make` and `make_room` have made in this process; for functions that go to other processes by their name."""


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LIVE", Live())


def make(number: int) -> Item:
    """Make an item. By then, no more is alive of cycles before the last one than waits for the loop."""
    assert LIVE.before((number // SIZE - 1) * SIZE) <= READY
    return LIVE.note(Item(number), number)


def array(number: int) -> Any:
    return LIVE.note(np.full(8, number), number)


def numbers(n: int) -> Pipeline[int]:
    return sl.from_items(range(n))


# Cycles -------------------------------------------------------------------------------------------------------------


async def drain(stream: Any) -> None:
    async for item in stream:
        del item


async def look_at_each(pipe: Pipeline[Any], bound: int, resume: sl.Snapshot | None = None, stop: int = 10**6) -> Any:
    """Take items, insist on the bound at each, keep a state of each, and return what a user may keep."""
    snapshots = []
    async with pipe.open(resume=resume) as stream:
        async for item in stream:
            assert LIVE.count <= bound
            snapshots.append(stream.snapshot())
            del item
            if len(snapshots) == stop:
                break
    assert LIVE.most <= bound
    gc.collect()
    assert LIVE.count == 0
    return stream, snapshots


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reuse", [1, 3])
@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
async def test_one_cycle_is_alive_or_two_whatever_states_are_kept(overlap: bool, cycles: int, reuse: int) -> None:
    pipe = numbers(6 * SIZE).map(make).regenerate(SIZE, overlap=overlap, reuse=reuse).prefetch(READY)
    bound = cycles * SIZE + READY
    assert bound <= pipe.max_in_flight
    stream, snapshots = await look_at_each(pipe, bound)
    assert stream.count == len(snapshots) == 6 * SIZE * reuse
    assert LIVE.most > (cycles - 1) * SIZE


@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
async def test_a_resume_in_the_middle_of_a_cycle_has_no_more_alive(overlap: bool, cycles: int) -> None:
    pipe = numbers(6 * SIZE).map(make).regenerate(SIZE, overlap=overlap).prefetch(READY)
    bound = cycles * SIZE + READY
    _, snapshots = await look_at_each(pipe, bound, stop=SIZE + SIZE // 2)
    stream, rest = await look_at_each(pipe, bound, resume=snapshots[-1])
    assert stream.count == len(rest) == 6 * SIZE - len(snapshots)


@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
async def test_batches_keep_no_more_alive_than_they_hold(overlap: bool, cycles: int) -> None:
    pipe = numbers(6 * SIZE).map(make).regenerate(SIZE, overlap=overlap).batch(2, collate=None).prefetch(READY // 2)
    await look_at_each(pipe, cycles * SIZE + READY)


@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
async def test_kept_cycles_are_as_few_and_so_are_those_that_a_resume_reads(
    overlap: bool, cycles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = np.empty

    def noted(shape: Any, *args: Any, **more: Any) -> Any:
        made = empty(shape, *args, **more)
        return LIVE.note(made) if shape == [8] else made  # an item, as it is read from a file

    monkeypatch.setattr("streamline.core.item_codec.np.empty", noted)
    pipe = numbers(6 * SIZE).map(array).regenerate(SIZE, overlap=overlap, spill=tmp_path).prefetch(READY)
    bound = cycles * SIZE + READY
    _, snapshots = await look_at_each(pipe, bound, stop=SIZE + SIZE // 2)
    made = LIVE.most
    LIVE.most = 0
    await look_at_each(pipe, bound, resume=snapshots[-1])
    assert made > (cycles - 1) * SIZE
    assert LIVE.most > (cycles - 1) * SIZE


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
async def test_rows_are_in_one_array_or_two_for_all_passes(
    overlap: bool, cycles: int, spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, blocks, empty = Live(), LIVE, np.empty

    def noted(shape: Any, *args: Any, **more: Any) -> Any:
        made = empty(shape, *args, **more)
        return rooms.note(made) if tuple(np.atleast_1d(shape)) == (SIZE, 8) else made

    monkeypatch.setattr("streamline.transforms.regenerate_cycle.np.empty", noted)
    pipe = (
        numbers(18)
        .map(lambda number: blocks.note(np.full((16, 8), number)))
        .regenerate(SIZE, block=10, overlap=overlap, spill=tmp_path if spilled else None)
        .repeat(2)
        .prefetch(READY)
    )
    kept = []
    async with pipe.open() as stream:
        async for _ in stream:
            kept.append(stream.snapshot())
            assert rooms.count <= cycles
            assert blocks.count <= 2  # the one that is being copied, and what is left of it for the next cycle
            if len(kept) == 6:
                break
    assert (rooms.count, blocks.count) == (0, 0)
    async with pipe.open(resume=kept[-1]) as stream:
        async for _ in stream:
            kept.append(stream.snapshot())
            assert rooms.count <= cycles
    assert (rooms.most, blocks.most) <= (cycles, 2)
    assert (rooms.count, blocks.count) == (0, 0)
    assert stream.count > 0


async def test_writing_a_cycle_copies_none_of_it(tmp_path: Path) -> None:
    """Not even where items aren't C-ordered; and forms, of which there may be a million, are few at a time.

    In a plain loop a quick consumer would have more items on their way to it, as many as the clock says.
    """
    size, nbytes = 256, 2**14
    items = sl.from_items(range(3 * size)).map(lambda number: np.full((128, 128), number % 256, np.uint8).T)
    pipe = items.regenerate(size, spill=tmp_path).prefetch(READY)
    async with pipe.open() as stream:
        await anext(stream)  # what is imported and made once
    tracemalloc.start()
    try:
        async with pipe.open() as stream:
            await drain(stream)
        assert stream.count == 3 * size
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size * nbytes < most < 1.25 * size * nbytes, most


@pytest.mark.parametrize("block", [None, 10])
async def test_what_a_generator_fails_with_keeps_no_cycle(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> Any:
        if number == 2 * SIZE - 1:
            raise ValueError("it doesn't work any more")
        return LIVE.note(np.full((1, 8), number))

    rooms, empty = Live(), np.empty

    def noted(shape: Any, *args: Any, **more: Any) -> Any:
        made = empty(shape, *args, **more)
        return rooms.note(made) if tuple(np.atleast_1d(shape)) == (SIZE, 8) else made

    monkeypatch.setattr("streamline.transforms.regenerate_cycle.np.empty", noted)
    pipe = numbers(10**6).map(failing).prefetch(1).regenerate(SIZE, block=block)
    async with pipe.open() as stream:
        with pytest.raises(ValueError, match="any more") as failure:
            await drain(stream)
    gc.collect()
    assert rooms.count == 0
    assert LIVE.count <= 2  # in the frames of the map: what waited to be handed on
    assert (stream.count, failure.type) == (SIZE // (block or 1), ValueError)


# What stands behind -------------------------------------------------------------------------------------------------


@sl.source(state=dict)
async def awaited(*, state: dict[str, Any], shard: int, num_shards: int) -> Any:
    """Give the first number of a cycle when nothing is alive any more of the one before."""
    for number in range(3 * SIZE):
        if number % SIZE == 0:
            await LIVE.none()
        yield number


async def same_async(item: Any) -> Any:
    return item


def same(item: Any) -> Any:
    return item


@sl.stage(state=dict)
async def passed_on(items: Any, *, state: dict[str, Any]) -> Any:
    async for item in items:
        yield item
        del item


def cycles() -> Pipeline[Any]:
    return awaited().map(make).regenerate(SIZE)


BEHIND: dict[str, Callable[[Pipeline[Any]], Pipeline[Any]]] = {
    "nothing": lambda pipe: pipe,
    "map": lambda pipe: pipe.map(same),
    "seeded map": lambda pipe: pipe.map(lambda item, rng: item, seed=0),
    "async map": lambda pipe: pipe.map(same_async, concurrency=4),
    "unordered map": lambda pipe: pipe.map(same_async, concurrency=4, ordered=False),
    "map in threads": lambda pipe: pipe.map(same, concurrency=2, executor="thread"),
    "unordered map in threads": lambda pipe: pipe.map(same, concurrency=2, executor="thread", ordered=False),
    "filter": lambda pipe: pipe.filter(lambda item: item.number % 2),
    "filter of all": lambda pipe: pipe.filter(lambda item: True),
    "flat_map": lambda pipe: pipe.flat_map(lambda item: [item, item]),
    "take": lambda pipe: pipe.take(10**6),
    "skip": lambda pipe: pipe.skip(3),
    "repeat": lambda pipe: pipe.repeat(2),
    "batch": lambda pipe: pipe.batch(4, collate=None),
    "batch in time": lambda pipe: pipe.batch(4, collate=None, max_wait_s=0.01),
    "unbatch": lambda pipe: pipe.batch(4, collate=None).unbatch(),
    "bucket": lambda pipe: pipe.bucket_by_length([5], 4, length=lambda item: 1, collate=None),
    "pack": lambda pipe: pipe.map(lambda item: LIVE.note(np.array([item.number]))).pack(4),
    "custom": lambda pipe: pipe.through(passed_on),
    "prefetch": lambda pipe: pipe.prefetch(READY),
    "zip": lambda pipe: sl.zip(pipe, numbers(10**6)),
    "mix": lambda pipe: sl.mix({"cycles": pipe, "none": numbers(1)}, weights={"cycles": 1, "none": 0}),
    "merge and map": lambda pipe: pipe.merge().map(same),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("behind", BEHIND)
async def test_no_stage_keeps_items_that_it_has_handed_on_while_the_next_cycle_is_drawn(
    behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamline.core.driver, "HANDOVER_S", -1.0)  # else a quick machine makes the next one first
    async with BEHIND[behind](cycles()).open() as stream:
        await drain(stream)
    assert stream.count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [sl.Inline(), sl.Processes(1)], ids=["inline", "processes"])
def test_nor_does_a_plain_loop_or_the_process_of_a_worker(backend: Any) -> None:
    with awaited().map(array).regenerate(SIZE).open(backend=backend) as stream:
        found = []
        for item in stream:
            found.append(int(item[0]))
            del item
    assert sorted(found) == list(range(3 * SIZE))


# Caches -------------------------------------------------------------------------------------------------------------


async def test_a_cache_keeps_no_more_than_its_bound_and_nothing_after_its_failure() -> None:
    pipe = numbers(10**6).map(array).cache(max_bytes=64 * SIZE).prefetch(READY)
    async with pipe.open() as stream:
        with pytest.raises(CacheFull):
            await drain(stream)
    assert SIZE - READY <= LIVE.most <= SIZE + READY
    assert stream.count >= SIZE - READY
    assert LIVE.count <= 2 * READY  # a list in the frames of the failure, which the stream raises again
    del stream
    gc.collect()
    assert LIVE.count == 0


@pytest.mark.parametrize("close", [True, False])
async def test_who_keeps_a_stream_that_has_ended_keeps_no_pass(close: bool) -> None:
    async with numbers(SIZE).map(array).cache().repeat(2 if close else 3).open() as stream:
        for _ in range(2 * SIZE):
            await anext(stream)
        snapshot = stream.snapshot()
        if not close:
            assert [item async for item in stream]
        assert LIVE.count >= SIZE or not close
    gc.collect()
    assert LIVE.count == 0
    assert (stream.count, snapshot.produced) == ((2 if close else 3) * SIZE, [2 * SIZE])


async def test_a_plain_stream_that_is_closed_keeps_nothing() -> None:
    with numbers(10**6).map(array).regenerate(SIZE, overlap=True).open() as stream:
        for _ in range(SIZE + SIZE // 2):
            next(stream)
    gc.collect()
    assert LIVE.count == 0
    assert stream.count == SIZE + SIZE // 2


async def test_a_cache_on_disk_has_one_block_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, empty = 10, np.empty

    def noted(shape: Any, *args: Any, **more: Any) -> Any:
        made = empty(shape, *args, **more)
        return LIVE.note(made) if shape == [8] else made  # an item, as it is read from a file

    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", block)
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_S", math.inf)
    monkeypatch.setattr("streamline.core.item_codec.np.empty", noted)
    pipe = numbers(4 * block).map(array).cache(path=tmp_path).repeat(2).prefetch(READY)
    _, snapshots = await look_at_each(pipe, block + READY)
    LIVE.most = 0
    await look_at_each(pipe, block + READY, resume=snapshots[2 * block - 1])
    assert LIVE.most >= block
    remove_behind(2, tmp_path)
    LIVE.most = 0
    await look_at_each(pipe, block + READY, resume=snapshots[2 * block - 1], stop=block // 2)
    assert LIVE.most >= 1


def remove_behind(blocks: int, folder: Path) -> None:
    """Remove the files behind the first blocks: at a resume behind these, the rest is drawn."""
    for path in sorted(folder.iterdir())[blocks:]:
        path.unlink()
