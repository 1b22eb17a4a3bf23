"""What broke earlier prototypes, where no other test shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio

import streamline as sl


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
