"""The pipeline that the demo is about."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import streamline as sl

WORKERS = 4
BATCH_SIZE = 32
RECORD_BYTES = 1024


def encode(record: dict[str, str]) -> NDArray[np.uint8]:
    """Return a record's text as exactly `RECORD_BYTES` bytes: a short one repeats, a long one is cut.

    Padding would teach the model that zeros follow zeros, and flatter its loss.
    """
    return np.resize(np.frombuffer(record["text"].encode(), np.uint8), RECORD_BYTES)


def pipeline(base_url: str, *, shards: int, window: int) -> sl.Pipeline[NDArray[np.uint8]]:
    """Return batches [rows, RECORD_BYTES] of the records in `shards` files; the last batch is smaller."""
    return (
        sl.read_jsonl(f"{base_url}/part-{{000..{shards - 1:03d}}}.jsonl.gz")
        .shard(WORKERS)
        .shuffle(window=window, seed=0)
        .map(encode)
        .merge()
        .batch(BATCH_SIZE)
    )
