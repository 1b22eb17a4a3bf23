"""Three epochs with validation between them, killed in the middle of the second, and gone on with in another run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import streamline as sl

EPOCHS = 3
SAMPLES = [f"sample {index}" for index in range(40)]

train_pipe = sl.from_items(SAMPLES).shuffle(seed=0).shard(4).shuffle(window=5).merge().batch(8, collate=None)
valid_pipe = sl.from_items(range(100, 112)).shuffle(seed=1).batch(4, collate=None)


def train(checkpoint: Path, *, crash_at: tuple[int, int] | None) -> list[tuple[int, list[str]]]:
    """Return (epoch, batch) of all that was used; a checkpoint is written after each batch."""
    used: list[tuple[int, list[str]]] = []
    loader = train_pipe.loader()
    validation = valid_pipe.loader(fixed_epoch=True)  # the same items in the same order, each time
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
        print(f"going on in epoch {loader.epoch}, after step {loader.step} of {len(loader)}")
    for epoch in range(loader.epoch, EPOCHS):
        for step, batch in enumerate(loader, loader.step):
            used.append((epoch, batch))
            checkpoint.write_text(json.dumps(loader.state_dict()))  # beside the model's, in earnest
            if (epoch, step) == crash_at:
                return used
        print(f"epoch {epoch} is over; validation began with {next(iter(validation))}")
    return used


def main(directory: Path) -> None:
    whole = train(directory / "whole.json", crash_at=None)
    first_batches = [next(batch for epoch, batch in whole if epoch == number) for number in range(EPOCHS)]
    print("epochs are shuffled differently:", len({str(batch) for batch in first_batches}) == EPOCHS)

    before = train(directory / "killed.json", crash_at=(1, 2))
    rest = train(directory / "killed.json", crash_at=None)
    print("interrupted = uninterrupted:", before + rest == whole)

    last = train(directory / "at the end.json", crash_at=(1, 4))  # an epoch's last item: no empty pass
    print("also after an epoch's last batch:", last + train(directory / "at the end.json", crash_at=None) == whole)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
