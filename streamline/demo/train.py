"""The trainer: a process that streams, learns, saves, and may be told to kill itself.

Run as `python -m streamline.demo.train URL CHECKPOINTS`. It resumes by itself where CHECKPOINTS has something to
resume from. Each line on stdout is a JSON object: one a step, then one at the end (see `streamline.demo.report`).
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import streamline as sl
from streamline.demo import checkpoint
from streamline.demo.checkpoint import Checkpoint, Delivered
from streamline.demo.feed import pipeline
from streamline.demo.meter import Meter
from streamline.demo.model import ByteModel
from streamline.demo.report import RunEnd, TrainStep, send

Batch = NDArray[np.uint8]


def after(delivered: Delivered, batch: Batch) -> Delivered:
    """Return the account with one more batch; its link covers values, shape, dtype and everything before it."""
    link = hashlib.sha256(f"{delivered.chain} {batch.dtype} {batch.shape}".encode())
    link.update(batch.tobytes())
    return Delivered(delivered.steps + 1, delivered.items + len(batch), link.hexdigest())


def timed(batches: Iterator[Batch], meter: Meter) -> Iterator[Batch]:
    """Pass batches on and count the time that each was waited for."""
    while True:
        with meter.spent("input"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


class Trainer:
    """One run: the model, what was delivered to it, and where the two are saved together."""

    def __init__(self, directory: Path, *, save_every: int, die_at: int | None) -> None:
        self.directory, self.save_every, self.die_at = directory, save_every, die_at
        self.model, self.meter = ByteModel(), Meter()
        self.delivered = Delivered()
        self.saved_bytes = 0

    def resume(self) -> sl.Snapshot | None:
        """Load the last checkpoint, if there is one, and return its snapshot of the stream."""
        saved: Checkpoint | None = checkpoint.load(self.directory)
        if saved is None:
            return None
        self.model.load(saved.model)
        self.delivered = saved.delivered
        return sl.Snapshot.load(saved.snapshot)

    def run(self, stream: Any) -> None:
        """Learn from every batch of the stream, and save every `save_every` of them."""
        for batch in timed(iter(stream), self.meter):
            with self.meter.spent("model"):
                loss = self.model.step(batch)
            self.delivered = after(self.delivered, batch)
            self.meter.add_items(len(batch))
            self.report(loss)
            if self.delivered.steps == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)  # no exit handlers, no finally: as the kernel's OOM killer does it
            if self.delivered.steps % self.save_every == 0:
                with self.meter.spent("saving"):
                    self.save(stream.snapshot())
        whole = self.meter.whole
        send(RunEnd(whole.items_per_s(), whole.limit(), whole.waiting(), self.model.digest(), self.saved_bytes))

    def report(self, loss: float) -> None:
        """Tell the parent about the step just done."""
        now, recent = self.delivered, self.meter.recent
        send(TrainStep(now.steps, now.items, loss, now.chain, recent.items_per_s(), recent.limit(), recent.waiting()))

    def save(self, snapshot: sl.Snapshot) -> None:
        """Save the stream's snapshot together with the model and the digest of the same step."""
        saved = checkpoint.save(self.directory, self.delivered, self.model, snapshot)
        self.saved_bytes = saved.snapshot.stat().st_size


@click.command()
@click.argument("url")
@click.argument("checkpoints", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shards", type=int, required=True, help="Files to read below URL.")
@click.option("--window", type=int, required=True, help="Of the shuffle, in items.")
@click.option("--save-every", type=int, required=True, help="Batches from one checkpoint to the next.")
@click.option("--die-at", type=int, default=None, help="Batch at which to kill this process with SIGKILL.")
def main(url: str, checkpoints: Path, shards: int, window: int, save_every: int, die_at: int | None) -> None:
    """Train on the shards below URL, saving to and resuming from CHECKPOINTS."""
    trainer = Trainer(checkpoints, save_every=save_every, die_at=die_at)
    snapshot = trainer.resume()
    with pipeline(url, shards=shards, window=window).open(resume=snapshot) as stream:
        trainer.run(stream)


if __name__ == "__main__":
    main()
