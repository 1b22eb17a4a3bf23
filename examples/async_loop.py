"""A training loop inside an event loop: records are fetched concurrently, batched, and used in order."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import streamline as sl


async def fetch(record: int) -> dict[str, Any]:
    """Stand in for a request that takes 20 ms."""
    await asyncio.sleep(0.02)
    return {"id": record, "image": np.full((8, 8), record % 7, np.float32)}


async def main() -> None:
    pipe = (
        sl.from_items(range(1000))
        .shuffle(seed=0)  # the whole index, before it is split
        .shard(4)  # four workers
        .map(fetch, concurrency=32)
        .merge()
        .batch(50)
    )
    print(pipe)
    loop = asyncio.get_running_loop()
    began, seen = loop.time(), 0
    async with pipe.open() as stream:
        async for batch in stream:
            seen += len(batch["id"])
            if seen == 50:
                print("first batch:", batch["image"].shape, "of records", batch["id"][:5].tolist(), "...")
    took = loop.time() - began
    print(f"{seen} records in {took:.1f} s; one after the other they would have taken {seen * 0.02:.0f} s")


if __name__ == "__main__":
    asyncio.run(main())
