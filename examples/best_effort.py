"""One of four workers is slow. A strict merge waits for it; a best-effort one goes on, as far as `max_lead` allows."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import streamline as sl

WORKERS = 4
ITEMS = 160


async def read(item: int) -> tuple[int, int]:
    """Take 1 ms, and 10 ms in worker 2, as a disk or a server does that has a bad day."""
    worker = item % WORKERS
    await asyncio.sleep(0.01 if worker == 2 else 0.001)
    return worker, item


def run(title: str, **options: Any) -> list[tuple[int, int]]:
    pipe = sl.from_items(range(ITEMS)).shard(WORKERS).map(read).merge(**options)
    items: list[tuple[int, int]] = []
    spread, half_s, began = 0, 0.0, perf_counter()
    with pipe.open() as stream:
        for item in stream:
            items.append(item)
            if len(items) <= ITEMS // 2:  # later on, those that have ended count no more
                produced = stream.snapshot().produced
                spread, half_s = max(spread, max(produced) - min(produced)), perf_counter() - began
    order = "".join(str(worker) for worker, _ in items[:40])
    print(f"{title}\n  workers in order of arrival: {order}...")
    print(f"  half of the items after {half_s:.2f} s; skew (items ahead of the slowest): {spread}")
    return items


def main() -> None:
    print("worker 2 is ten times as slow as the others")
    strict = run("strict", kind="strict")
    loose = run("best effort, max_lead=8", kind="best_effort", max_lead=8)
    looser = run("best effort, max_lead=32", kind="best_effort", max_lead=32)
    print("the same items:", sorted(strict) == sorted(loose) == sorted(looser))


if __name__ == "__main__":
    main()
