"""One stream feeds two trainers, in two threads: each gets every other batch, and both are resumed where they stood."""

from __future__ import annotations

import json
import threading
from itertools import islice
from typing import Any

import numpy as np

import streamline as sl


def sample(number: int) -> dict[str, Any]:
    """Stand in for what is slow to read, and so is read once for both."""
    return {"id": number, "x": np.full(4, number, np.float32)}


def train(batches: Any, seen: list[int], most: int | None = None) -> None:
    for batch in islice(batches, most):
        seen += batch["id"].tolist()


def both(replicator: sl.StreamReplicator[Any], seen: list[list[int]], most: tuple[int | None, int | None]) -> None:
    """Let two trainers read, each in a thread of its own."""
    replicas = [replicator.replica(number) for number in range(2)]  # held: one that is dropped is a reader that died
    threads = [threading.Thread(target=train, args=(replicas[n], seen[n], most[n])) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    pipe = sl.from_items(range(400)).shuffle(seed=0).shard(4).map(sample).merge().batch(10)
    seen: list[list[int]] = [[], []]
    with sl.StreamReplicator(pipe, 2) as replicator:
        both(replicator, seen, (7, 5))  # they need not be equally far
        saved = json.dumps(replicator.state_dict())
    print("before the stop:", len(seen[0]), "and", len(seen[1]), "samples")

    with sl.StreamReplicator(pipe, 2) as replicator:
        replicator.load_state_dict(json.loads(saved))
        both(replicator, seen, (None, None))
    print("at the end:", len(seen[0]), "and", len(seen[1]), "samples")
    print("each sample went to one of them, once:", sorted(seen[0] + seen[1]) == list(range(400)))


if __name__ == "__main__":
    main()
