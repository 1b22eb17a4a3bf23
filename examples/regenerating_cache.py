"""A teacher makes activations for a student: a cache of rows that is shuffled, served, dropped and made anew.

The teacher is a small network in NumPy; `examples/teacher_and_student.py` has one in torch. It drifts: what it made
can't be made again, so cycles are kept in a folder until later snapshots are saved. The run is killed in the middle of
a cycle, and goes on with the very rows that it would have got.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import streamline as sl

TOKENS, WIDTH, ROWS, BATCH = 20, 16, 512, 64


class Teacher:
    """Hidden states of one layer, of every token of a text; its weights change with every call."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.weights = self.rng.normal(size=(WIDTH, WIDTH))

    def __call__(self, text: int, *, rng: np.random.Generator) -> dict[str, np.ndarray]:
        positions = np.sort(rng.choice(TOKENS, size=12, replace=False))  # of the seed, text and pass alone
        self.weights += 0.01 * self.rng.normal(size=self.weights.shape)
        hidden = np.tanh(np.sin(text + positions[:, None] * np.arange(1, WIDTH + 1)) @ self.weights)
        return {"hidden": hidden.astype(np.float32), "text": np.full(12, text), "position": positions}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = (
            sl.from_items(range(100))  # texts
            .shard(1, mode="contiguous")  # one shard a rank
            .repeat()  # round and round
            .map(Teacher(), name="teacher", seed=0)
            .regenerate(ROWS, block=BATCH, seed=0, spill=Path(folder, "cycles"))
        )
        with pipe.open() as stream:
            for _ in range(11):  # a cycle of 8 batches, and 3 of the next
                batch = next(stream)
            stream.snapshot().save(Path(folder, "ckpt.json"))
            lost = [next(stream) for _ in range(5)]  # then the machine dies
        with pipe.open(resume=sl.Snapshot.load(Path(folder, "ckpt.json"))) as stream:
            again = [next(stream) for _ in range(5)]
            next(stream)  # of the cycle after it
            stats = {stage.name: stage for stage in stream.stats().stages}
        same = all(np.array_equal(one["hidden"], other["hidden"]) for one, other in zip(lost, again, strict=True))
        print(f"a batch: {batch['hidden'].shape}, of {len(set(batch['text'].tolist()))} texts")
        print(f"the rest of the cycle is the same, though the teacher has moved on: {same}")
        print(f"waited for cycles: {stats['regenerate'].wait_input_s > 0}")


if __name__ == "__main__":
    main()
