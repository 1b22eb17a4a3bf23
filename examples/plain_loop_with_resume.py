"""A plain `for` loop that saves its place every few batches; run it twice, and the second run goes on."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import streamline as sl

EVERY = 5  # batches between two snapshots
STOP_AFTER = 12  # batches: the first run "crashes" there


def write_data(directory: Path) -> None:
    for part in range(4):
        rows = (json.dumps({"id": part * 100 + row, "text": f"row {row} of part {part}"}) for row in range(100))
        (directory / f"part-{part}.jsonl").write_text("\n".join(rows) + "\n")


def train(directory: Path, *, crash: bool) -> list[int]:
    """Return the ids of the records that this run used."""
    pipe = sl.read_jsonl(f"{directory}/part-*.jsonl").shard(4).shuffle(window=32).merge().batch(10)
    resume = sl.Snapshot.load(directory / "ckpt", missing_ok=True)
    print("resuming after what the last run saved" if resume else "starting from the beginning")
    used: list[int] = []
    with pipe.open(resume=resume) as stream:
        for step, batch in enumerate(stream, 1):
            used += batch["id"].tolist()
            if step % EVERY == 0:
                stream.snapshot().save(directory / "ckpt")
            if crash and step == STOP_AFTER:
                break
    print(f"  {len(used)} records, ids {used[:4]} ... {used[-4:]}")
    return used


def main(directory: Path) -> None:
    if not list(directory.glob("part-*.jsonl")):
        write_data(directory)
    first = train(directory, crash=True)
    second = train(directory, crash=False)
    saved = first[: STOP_AFTER // EVERY * EVERY * 10]  # what was used after the last save is used again
    print("every record exactly once:", sorted(saved + second) == list(range(400)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
