"""Programs that train, are killed with SIGKILL in a step, and train on from their last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import streamline as sl

HERE = Path(__file__).parent


def pipe(sized: bool) -> sl.Pipeline[Any]:
    """Return 42 numbers in batches of 4, shuffled; of a length that a trainer can ask for, or of none."""
    numbers = sl.from_items(range(42)).shuffle(seed=1).shard(2)
    return (numbers if sized else numbers.filter(any_number)).merge().batch(4)


ITEMS = 26


def uneven() -> sl.Pipeline[int]:
    """Return numbers, of which rank 0 of 2 has three of the shards, with 16, and rank 1 has two, with 10."""
    return sl.from_items(range(ITEMS)).shuffle(seed=3).shard(5).merge()


def any_number(item: int) -> bool:
    return True


class Log:
    """Writes down what is trained on, a line a batch, and kills the program in step `die`; -1: never."""

    def __init__(self, path: str, die: int) -> None:
        self._path, self._die, self._seen = Path(path), die, 0

    def __call__(self, step: int, batch: Any) -> None:
        if self._seen == self._die:
            os.kill(os.getpid(), signal.SIGKILL)
        self._seen += 1
        with self._path.open("a") as file:
            file.write(json.dumps([step, batch.tolist()]) + "\n")


def trained(path: Path) -> list[tuple[int, list[int]]]:
    """Return what a program has trained on: the trainer's step, and the batch."""
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def train(program: str, log: Path, checkpoints: Path, *options: object, die: int = -1) -> list[tuple[int, list[int]]]:
    """Run a program to its end, or until it kills itself, and return what it trained on."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.trainers.{program}", log, die, checkpoints, *options]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if die < 0 else -signal.SIGKILL), ended.stderr[-3000:]
    return trained(log)


@cache
def unbroken(program: str, *options: object) -> list[tuple[int, list[int]]]:
    """Return what a program trains on that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        return train(program, Path(folder, "log"), Path(folder, "checkpoints"), *options)


def check_kill_and_resume(program: str, tmp_path: Path, *options: object, die: int = 14) -> None:
    """Check that a run that is killed and resumed trains on the batches of one that isn't, from its checkpoint on."""
    whole = unbroken(program, *options)
    assert len(whole) > die + 5
    killed = train(program, tmp_path / "killed", tmp_path / "checkpoints", *options, die=die)
    assert killed == whole[:die]
    resumed = train(program, tmp_path / "resumed", tmp_path / "checkpoints", *options)
    assert len(whole) - die <= len(resumed) < len(whole)
    assert resumed == whole[-len(resumed) :]
