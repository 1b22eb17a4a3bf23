"""The trainer's own checkpoint: model, stream and digest of one and the same step, or of an earlier one, never mixed.

ckpt/
  step-000175/  model.npz  snapshot.json  progress.json
  latest                                                    the name of the folder to resume from
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from streamline.demo.model import ByteModel

POINTER = "latest"


class Savable(Protocol):
    """What the checkpoint asks of a snapshot."""

    def save(self, path: Path, /) -> Any: ...


@dataclass(frozen=True)
class Delivered:
    """How far a run is: batches, items, and the chained SHA-256 of all of them in order."""

    steps: int = 0
    items: int = 0
    chain: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A folder to resume from."""

    folder: Path
    delivered: Delivered

    @property
    def model(self) -> Path:
        return self.folder / "model.npz"

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshot.json"


def save(directory: Path, delivered: Delivered, model: ByteModel, snapshot: Savable) -> Checkpoint:
    """Write a checkpoint and make it the one to resume from; a kill at any moment leaves the old one or the new one.

    No fsync: the demo's trainer is killed, the machine isn't switched off.
    """
    folder = directory / f"step-{delivered.steps:06d}"
    # A run that was killed before it moved the pointer leaves a folder of this name, perhaps incomplete.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint = Checkpoint(folder, delivered)
    model.save(checkpoint.model)
    snapshot.save(checkpoint.snapshot)
    (folder / "progress.json").write_text(json.dumps(asdict(delivered)))
    pointer = directory / f"{POINTER}.new"
    pointer.write_text(folder.name)
    pointer.replace(directory / POINTER)
    for old in directory.glob("step-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return checkpoint


def load(directory: Path) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None at the start of a run."""
    pointer = directory / POINTER
    if not pointer.exists():
        return None
    folder = directory / pointer.read_text()
    return Checkpoint(folder, Delivered(**json.loads((folder / "progress.json").read_text())))
