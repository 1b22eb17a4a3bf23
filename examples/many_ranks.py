"""Two ranks of one job, one after the other here: each reads its own shards, together they read everything once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import streamline as sl

RANKS = range(2)  # with torchrun, SLURM or jax.distributed, streamline finds rank and world size by itself

PIPE = sl.from_items([f"sample {index}" for index in range(30)]).shuffle(seed=0).shard(6).merge().batch(4, collate=None)


def train(rank: int, resume: sl.Snapshot | None, batches: int | None) -> tuple[list[str], sl.Snapshot]:
    """Return what one rank used of its next batches (None: all), and where it stands then."""
    used: list[str] = []
    with PIPE.open(rank=rank, world_size=len(RANKS), resume=resume) as stream:
        for number, batch in enumerate(stream, 1):
            used += batch
            if number == batches:
                break
        return used, stream.snapshot()


def main() -> None:
    begun, rest = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rank in RANKS:
            used, snapshot = train(rank, None, batches=2)
            begun.append(used)
            snapshot.save(scratch)  # each rank a file of its own
        print("saved:", *sorted(path.name for path in Path(scratch).iterdir()))
        for rank in RANKS:  # in new processes, say: each takes its own part of the job's snapshot
            used, _ = train(rank, sl.Snapshot.load(scratch), batches=None)
            rest.append(used)
    whole = [one + other for one, other in zip(begun, rest, strict=True)]
    for rank in RANKS:
        print(
            f"rank {rank}: {len(whole[rank])} samples, {len(begun[rank])} before the stop, {len(rest[rank])} after it"
        )
    print("in both:", len(set(whole[0]) & set(whole[1])))
    print("in one of them:", len(set(whole[0]) | set(whole[1])), "of 30")


if __name__ == "__main__":
    main()
