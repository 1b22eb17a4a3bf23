"""Three epochs of training with validation after each: one pool of two processes serves both, and starts once."""

from __future__ import annotations

import os

import streamline as sl

EPOCHS = 3
Sample = tuple[int, int]


def work(item: int) -> Sample:
    """Stand for a transform in plain Python, which wants a core of its own; tell which process ran it."""
    return sum(n * n for n in range(20 * item)) % 1000, os.getpid()


train_pipe = sl.from_items(range(200)).shuffle(seed=0).shard(4).map(work).merge().batch(20, collate=None)
valid_pipe = sl.from_items(range(60)).shard(2).map(work).merge().batch(20, collate=None)


def main() -> None:
    served: dict[str, set[int]] = {"training": set(), "validation": set()}
    validated = []
    with sl.Processes(2) as pool:
        # Behind the last batch of an epoch, both loaders have begun to read their next one.
        train = train_pipe.loader(backend=pool)
        valid = valid_pipe.loader(backend=pool, fixed_epoch=True)
        for _ in range(EPOCHS):
            for batch in train:
                served["training"].update(pid for _, pid in batch)
            scores = []
            for batch in valid:
                served["validation"].update(pid for _, pid in batch)
                scores.append(sum(score for score, _ in batch))
            validated.append(scores)
    print("processes, in all epochs:", len(served["training"] | served["validation"]))
    print("training and validation share them:", served["training"] == served["validation"])
    print("validation is the same each time:", validated == [validated[0]] * EPOCHS)


if __name__ == "__main__":
    main()
