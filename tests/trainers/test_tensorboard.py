"""The recipe for TensorBoard: what it reads is what the stream has counted."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import streamline as sl


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pipe = sl.from_items(range(40)).shard(2).map(abs, name="decode").merge().batch(4)
    with pipe.open() as stream, SummaryWriter(str(tmp_path)) as writer:
        for step, _ in enumerate(stream):
            for name, value in sl.metrics.scalars(stream.stats()).items():
                writer.add_scalar(name, value, step)
        last = sl.metrics.scalars(stream.stats())
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(last) <= set(events.Tags()["scalars"])
    items = events.Scalars("streamline.consumer.items")
    assert [(event.step, event.value) for event in items] == [(step, step + 1) for step in range(10)]
    assert events.Scalars("streamline.stage.items/decode")[-1].value == 40
