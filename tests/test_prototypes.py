"""What broke earlier prototypes: a named test for each sentence that the design marks as such."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl


class Counted:
    """Items 0 to length - 1, which counts how often one was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


async def test_progress_keeps_a_resume_after_a_selective_filter_from_reading_all_again() -> None:
    source = Counted(200_000)
    pipe = sl.from_items(source).filter(lambda x: x in (100_000, 199_999))
    async with pipe.open() as stream:
        assert await anext(stream) == 100_000
        with anyio.move_on_after(0.02):  # the consumer waits, and progress passes
            await anext(stream)
        while source.reads < 190_000:
            with anyio.move_on_after(0.02):
                assert await anext(stream) == 199_999
        snapshot = stream.snapshot()
    source.reads = 0
    async with pipe.open(resume=snapshot) as stream:
        rest = [x async for x in stream]
    assert source.reads <= 60_000
    assert rest in ([], [199_999])


async def test_rewinding_behind_choosing_loses_and_doubles_nothing() -> None:
    async def at_odds(x: int) -> int:
        for _ in range(x * 7 % 5):
            await asyncio.sleep(0)
        return x

    pipe = (
        sl.from_items(range(60))
        .shard(3)
        .map(at_odds, concurrency=4, ordered=False)
        .flat_map(lambda x: [x, -x - 1])
        .merge("best_effort")
        .shuffle(window=7)
    )
    for k in range(0, 120, 13):
        snapshot, seen = None, []
        for _ in range(5):
            async with pipe.open(resume=snapshot) as stream:
                seen += [await anext(stream) for _ in range(k // 5)]
                snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        async with pipe.open(resume=snapshot) as stream:
            seen += [x async for x in stream]
        assert sorted(seen) == list(range(-60, 60))


@pytest.mark.parametrize("error", [StopIteration("mine"), StopAsyncIteration("mine"), asyncio.CancelledError("mine")])
async def test_what_looks_like_an_end_out_of_user_code_is_a_failure(error: BaseException) -> None:
    def fail_at_3(x: int) -> int:
        if x == 3:
            raise error
        return x

    seen = []
    stream = aiter(sl.from_items(range(10)).map(fail_at_3))
    with pytest.raises(sl.errors.StageError, match="fail_at_3") as first:  # noqa: PT012 - the loop is what raises
        async for x in stream:
            seen.append(x)  # noqa: PERF401 - a comprehension would lose them
    assert seen == [0, 1, 2]
    assert first.value.__cause__ is error
    with pytest.raises(sl.errors.StageError) as again:
        await anext(stream)
    assert again.value is first.value


async def test_the_safe_point_of_a_custom_stage_is_its_asking_not_its_yield() -> None:
    @sl.stage(state=dict, snapshot_every=1)
    async def pairs_summed(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
        async for x in items:
            if (held := state.pop("held", None)) is None:
                state["held"] = x
            else:
                yield held + x
                yield -held - x  # in the middle of an input: the dict alone could not tell how far it came

    pipe = sl.from_items(range(20)).through(pairs_summed)
    whole = [x async for x in pipe]
    for k in range(len(whole) + 1):
        async with pipe.open() as stream:
            head = [await anext(stream) for _ in range(k)]
            snapshot = stream.snapshot()
        async with pipe.open(resume=snapshot) as stream:
            assert head + [x async for x in stream] == whole


async def test_a_new_file_that_sorts_first_is_refused_and_states_name_files(tmp_path: Path) -> None:
    for name in "bcde":
        (tmp_path / f"{name}.txt").write_text(f"{name}0\n{name}1\n{name}2\n")
    pipe = sl.read_lines(str(tmp_path / "*.txt")).shard(2)
    async with pipe.open() as stream:
        _ = [await anext(stream) for _ in range(3)]
        snapshot = stream.snapshot()
    assert Path(snapshot.worker_states[0]["read_lines"]["file"]).name == "b.txt"
    (tmp_path / "a.txt").write_text("a0\n")
    with pytest.raises(sl.errors.ResumeError, match=r"new file .*a\.txt"):
        pipe.open(resume=snapshot)


async def test_a_new_file_that_sorts_first_and_is_accepted_moves_no_file_to_another_shard(tmp_path: Path) -> None:
    for name in "bcdefg":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(4)))
    pipe = sl.read_lines(str(tmp_path / "*.txt")).shard(2)
    whole = [x async for x in pipe]
    async with pipe.open() as stream:
        head = [await anext(stream) for _ in range(11)]
        snapshot = stream.snapshot()
    (tmp_path / "a.txt").write_text("a0\n")
    async with pipe.open(resume=snapshot, accept=["read_lines.new_files"]) as stream:
        assert head + [x async for x in stream] == whole
    assert "a0" in [x async for x in pipe]  # the next epoch has it


async def test_a_snapshot_is_taken_in_one_step_without_waiting_for_user_work() -> None:
    async def never_for_9(x: int) -> int:
        if x == 9:
            await anyio.sleep_forever()
        return x

    async with sl.from_items(range(100)).map(never_for_9, concurrency=4).open() as stream:
        assert [await anext(stream) for _ in range(9)] == list(range(9))
        assert stream.snapshot().worker_states == [{"items": 9}]  # a plain call


async def test_unordered_work_goes_on_far_beyond_one_slow_call() -> None:
    async def slow_at_0(x: int) -> int:
        await (anyio.sleep_forever() if x == 0 else asyncio.sleep(0))
        return x

    async with sl.from_items(range(10_000)).map(slow_at_0, concurrency=4, ordered=False).open() as stream:
        seen = [await anext(stream) for _ in range(64 * 4 - 1)]
        assert sorted(seen) == list(range(1, 256))
        with anyio.move_on_after(0.05):
            assert await anext(stream) is None  # the bound: nothing beyond 64 a call
        own = stream.snapshot().worker_states[0]
    assert own["items"] == 0
    assert own["slow_at_0"]["done"] == [[1, 256]]


async def test_a_resume_inside_a_shuffle_reads_two_windows_at_most() -> None:
    source = Counted(10_000)
    pipe = sl.from_items(source).shuffle(window=500).prefetch(1)
    async with pipe.open() as stream:
        head = [await anext(stream) for _ in range(1_700)]
        snapshot = stream.snapshot()
    source.reads = 0
    async with pipe.open(resume=snapshot) as stream:
        assert await anext(stream) not in head
        assert source.reads <= 2 * 500


async def test_a_loop_over_ready_items_lets_other_tasks_have_turns() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    items_at_turn: Counter[int] = Counter()
    async with sl.from_items(range(50_000)).open() as stream:
        counting = asyncio.create_task(count_turns())
        async for _ in stream:
            items_at_turn[turns] += 1
        counting.cancel()
    assert items_at_turn.total() == 50_000
    assert max(items_at_turn.values()) <= 2048  # what a channel holds at the most


async def test_user_code_never_runs_in_the_consumers_task_whose_timeout_kills_nothing() -> None:
    tasks = set()
    release = asyncio.Event()

    @sl.stage(stateless=True)
    async def waits_at_5(items: AsyncIterator[int]) -> AsyncIterator[int]:
        async for x in items:
            tasks.add(asyncio.current_task())
            if x == 5:
                await release.wait()
            yield x

    seen: list[int] = []
    async with sl.from_items(range(10)).merge().through(waits_at_5).open() as stream:
        while len(seen) < 10:
            try:
                async with asyncio.timeout(0.01):
                    seen.append(await anext(stream))
            except TimeoutError:
                release.set()
    assert seen == list(range(10))
    assert asyncio.current_task() not in tasks


async def test_a_list_that_waits_stays_open_so_no_item_waits_for_it_to_fill() -> None:
    burst, more = 10, asyncio.Event()

    async def burst_then_silence() -> AsyncIterator[int]:
        for x in range(burst):
            yield x
        await more.wait()

    stream = aiter(sl.from_iterable(burst_then_silence).map(lambda x: x).prefetch(100))
    async with asyncio.timeout(5):
        assert [await anext(stream) for _ in range(burst)] == list(range(burst))
    more.set()
    assert [x async for x in stream] == []


async def test_the_first_item_behind_a_slow_sync_map_does_not_wait_for_a_whole_list() -> None:
    calls = 0

    def busy(x: int) -> int:
        nonlocal calls
        calls += 1
        until = time.perf_counter() + 0.0002
        while time.perf_counter() < until:
            pass
        return x

    async with sl.from_items(range(10_000)).map(busy).open() as stream:
        await anext(stream)
        assert calls < 64  # 1 ms is 5 calls; the rest is for a machine that is busy elsewhere


async def test_the_consumers_own_exception_comes_out_as_itself_and_not_in_a_group() -> None:
    class MineError(Exception):
        pass

    with pytest.raises(MineError):  # noqa: PT012 - the loop is what raises
        async with sl.from_items(range(1000)).shard(3).open() as stream:
            async for x in stream:
                if x == 5:
                    raise MineError
    with pytest.raises(TimeoutError):  # noqa: PT012
        async with asyncio.timeout(0.01), sl.from_items(range(10)).open() as stream:
            async for _ in stream:
                await anyio.sleep_forever()


async def test_a_state_once_handed_out_never_changes() -> None:
    pipe = sl.from_items(range(1000)).shard(2).map(lambda x: x).merge("best_effort").shuffle(window=16).batch(4)
    async with pipe.open() as stream:
        taken = []
        for _ in range(20):
            await anext(stream)
            snapshot = stream.snapshot()
            taken.append((snapshot, snapshot.to_json()))
    for snapshot, then in taken:
        assert json.loads(snapshot.to_json()) == json.loads(then)


@pytest.mark.parametrize("kind", ["strict", "best_effort"])
async def test_a_live_reader_waits_at_a_full_queue_only_while_no_worker_starves(kind: Any) -> None:
    read = 0

    async def feed() -> AsyncIterator[int]:
        nonlocal read
        for x in range(20_000):
            read += 1
            yield x

    def odd_or_late(x: int) -> bool:
        return x % 2 == 1 or x > 10_000

    pipe = sl.from_stream(feed).shard(2).filter(odd_or_late).merge(kind)
    async with asyncio.timeout(20), pipe.open() as stream:
        seen = [await anext(stream)]
        assert read > 10_000 or kind == "best_effort"  # worker 0 dropped 5,000 in a row, and worker 1's queue grew
        seen += [x async for x in stream]
    assert sorted(seen) == [x for x in range(20_000) if odd_or_late(x)]
    with pytest.raises(sl.errors.WorkerStarved, match="shard 0"):
        _ = [x async for x in sl.from_stream(feed, max_ahead=1_000).shard(2).filter(odd_or_late).merge()]


async def test_progress_keeps_the_journal_of_a_live_source_from_growing() -> None:
    async def feed() -> AsyncIterator[int]:
        for x in range(100_000):
            yield x

    pipe = sl.from_stream(feed).shard(2).filter(lambda x: x >= 99_998).merge()
    async with pipe.open() as stream:
        assert await anext(stream) == 99_998
        journal = stream.snapshot().journal
    assert journal is not None
    assert sum(len(worker["items"]) for worker in journal["workers"]) <= 1_000  # what was on its way, of 100,000
