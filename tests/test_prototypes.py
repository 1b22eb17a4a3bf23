"""What broke earlier prototypes, where no other test shows it as well."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

import streamline as sl
from tests.kit import Counting


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


async def test_a_resume_inside_a_shuffle_reads_two_windows_at_most() -> None:
    source = Counting(10_000)
    pipe = sl.from_items(source).shuffle(window=500).prefetch(1)
    async with pipe.open() as stream:
        head = [await anext(stream) for _ in range(1_700)]
        snapshot = stream.snapshot()
    source.asked = 0
    async with pipe.open(resume=snapshot) as stream:
        assert await anext(stream) not in head
        assert source.asked <= 2 * 500


@pytest.mark.long
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
    with anyio.fail_after(200):
        async with pipe.open() as stream:
            seen = [await anext(stream)]
            assert read > 10_000 or kind == "best_effort"  # worker 0 dropped 5,000 in a row, and worker 1's queue grew
            seen += [x async for x in stream]
    assert sorted(seen) == [x for x in range(20_000) if odd_or_late(x)]
    with pytest.raises(sl.errors.WorkerStarved, match="shard 0"):
        _ = [x async for x in sl.from_stream(feed, max_ahead=1_000).shard(2).filter(odd_or_late).merge()]
