"""Training that stops for an evaluation now and then: while it is paused, the pipeline leaves the machine alone."""

from __future__ import annotations

import asyncio
import time

import streamline as sl

EVERY = 10  # steps between two evaluations

fetched = 0


async def fetch(number: int) -> float:
    """Stand in for a request to a store: it takes a while, and uses the network."""
    global fetched
    fetched += 1
    await asyncio.sleep(0.002)
    return number / 100


def evaluate(weight: float) -> float:
    """Stand in for a pass over the validation set, that wants CPU and network for itself."""
    before = fetched
    time.sleep(0.05)
    print(f"  requests of the pipeline meanwhile: {fetched - before}")
    return abs(1 - weight)


def main() -> None:
    pipe = sl.from_items(range(400)).shard(4).map(fetch, concurrency=8).merge().batch(10)
    weight = 0.0
    used = 0
    with pipe.open() as stream:
        for step, batch in enumerate(stream, 1):
            weight += 0.05 * (1 - weight) * float(batch.mean())
            used += len(batch)
            if step % EVERY == 0:
                with stream.paused() as at_work:
                    assert at_work == ()  # calls that were at work have ended
                    snapshot = stream.snapshot()
                    print(f"step {step}, {sum(snapshot.produced)} items merged")
                    evaluate(weight)
    print("each item used:", used == 400)


if __name__ == "__main__":
    main()
