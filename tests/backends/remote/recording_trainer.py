"""A trainer that writes each item to a file, saves snapshots, and goes on after the last of them when it was killed.

Run as a program: FOLDER KIND BACKEND, and for `Remote` ADDRESS FEWEST MOST LOST_AFTER_S. It ends when there is a file
`stop` in the folder.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

import streamline as sl
from streamline.backends.base import Backend

LENGTH = 10**9
SHARDS = 4
ITEM = np.dtype(np.int64)

Kind = Literal["strict", "best_effort", "live"]


def made(index: int) -> np.ndarray[Any, Any]:
    """Return an array whose elements are all the same: one in three is small."""
    time.sleep(0.0005)
    return np.full(12_000 if index % 3 else 3, index)


def whole(index: int, item: np.ndarray[Any, Any]) -> bool:
    """Whether an item arrived as it was made."""
    return item.shape == (12_000 if index % 3 else 3,) and bool((item == index).all())


async def feed() -> AsyncIterator[int]:
    """What can be read once, in this process."""
    for index in itertools.count():
        await asyncio.sleep(0)
        yield index


def pipeline(kind: Kind, fn: Any = made) -> sl.Pipeline[Any]:
    if kind == "live":
        return sl.from_stream(feed).shard(SHARDS).map(fn).merge()
    pipe = sl.from_items(range(LENGTH)).shard(SHARDS)
    if kind == "strict":
        return pipe.shuffle(window=32, seed=1).map(fn).merge()
    return pipe.map(fn).merge("best_effort", max_skips_per_round=2)


def backend(folder: Path, name: str, *options: str) -> Backend:
    if name != "Remote":
        return sl.Inline() if name == "Inline" else sl.Processes(2)
    address, fewest, most, lost_after_s = options[0], int(options[1]), int(options[2]), float(options[3])
    hosts = most if fewest == most else (fewest, most)
    return sl.Remote(hosts, listen=address, key_file=folder / "key", lost_after_s=lost_after_s)


def main(folder: Path, kind: Kind, where: Backend) -> None:
    snapshot = sl.Snapshot.load(folder / "snapshot", missing_ok=True)
    path, stop = folder / "items", folder / "stop"
    path.touch()
    with path.open("r+b") as file, pipeline(kind).open(backend=where, resume=snapshot) as stream:
        file.truncate(0 if snapshot is None else ITEM.itemsize * sum(snapshot.produced))
        file.seek(0, 2)
        for count, item in enumerate(stream):
            index = int(item[0])
            assert whole(index, item), f"{index} has arrived as {item}"
            time.sleep(0.001)  # a step of the training: the trainer leaves the cores to others
            file.write(index.to_bytes(ITEM.itemsize, sys.byteorder))
            if count % 20 == 0:
                file.flush()
                if stop.exists():
                    break
            if count % 200 == 0:
                stream.snapshot().save(folder / "snapshot")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], backend(Path(sys.argv[1]), *sys.argv[3:]))  # type: ignore[arg-type]
