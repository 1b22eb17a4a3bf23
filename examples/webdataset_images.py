"""Images in tar archives (WebDataset): decoded, shuffled, batched; stopped in mid-epoch and resumed, bit for bit."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl


def write_archives(directory: Path) -> None:
    """Write three archives of 40 samples: an image as a PGM file ("0007.pgm"), and its label ("0007.cls")."""
    random = np.random.default_rng(0)
    for archive in range(3):
        with tarfile.open(directory / f"train-{archive}.tar", "w") as tar:
            for sample in range(40 * archive, 40 * (archive + 1)):
                pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
                for field, data in [("pgm", b"P5 8 8 255\n" + pixels.tobytes()), ("cls", str(sample % 10).encode())]:
                    member = tarfile.TarInfo(f"{sample:04}.{field}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return an image as float32[height, width] in 0 ... 1, and its label. For JPEGs, this is where PIL would stand."""
    _, width, height, _ = sample["pgm"][:10].split()
    pixels = np.frombuffer(sample["pgm"], np.uint8, offset=11).reshape(int(height), int(width))
    return {"image": pixels.astype(np.float32) / 255, "label": int(sample["cls"])}


with tempfile.TemporaryDirectory() as scratch:
    write_archives(Path(scratch))
    pipe = (
        sl.read_tar(f"{scratch}/train-*.tar")
        .shard(3)  # an archive each; the same from "https://host/train-{0..2}.tar" or "s3://bucket/train-*.tar"
        .shuffle(window=16, seed=0)
        .map(decode)
        .merge()
        .batch(16)
    )
    uninterrupted = list(pipe)
    with pipe.open() as stream:
        batches = [next(stream) for _ in range(3)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    print(pipe.explain(snapshot))
    with pipe.open(resume=snapshot, backend=sl.Processes(2)) as stream:  # decoded in two processes from here on
        batches += stream

    print("a batch:", batches[0]["image"].shape, batches[0]["image"].dtype, batches[0]["label"])
    same = [np.array_equal(one["image"], other["image"]) for one, other in zip(batches, uninterrupted, strict=True)]
    print(f"{len(same)} batches, bit for bit those of the uninterrupted run: {all(same)}")
