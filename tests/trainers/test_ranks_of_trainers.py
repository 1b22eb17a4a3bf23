"""Trainers on two real processes: what their checkpoints hold of each rank's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import streamline as sl
from streamline.training.trainers import OfAllRanks
from tests.trainers.kit import HERE, ITEMS, uneven


def run(program: str, folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.trainers.{program}", str(folder)]
    ended = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_accelerates_checkpoint_has_the_place_of_each_rank(tmp_path: Path) -> None:
    run("accelerate_ranks_run", tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for before, behind, resumed in found:
        assert (len(before), len(behind)) == (3, 7)
        assert resumed == behind
    given = [item for before, behind, _ in found for item in before + behind]
    assert len(set(given)) == 20
    assert set(given) <= set(uneven())


def test_lightnings_checkpoint_has_the_place_of_each_rank(tmp_path: Path) -> None:
    """It was saved behind three steps, of seven; the resumed run goes on into the next epoch."""
    run("lightning_ranks_run", tmp_path)
    for rank in range(2):
        first, resumed = (json.loads((tmp_path / f"{rank}-{steps}.json").read_text()) for steps in (7, 12))
        assert (len(first), len(resumed)) == (7, 9)
        assert resumed[:4] == first[3:]


def loader_of(rank: int, ranks: int) -> sl.Loader[int]:
    return uneven().loader(rank=rank, world_size=ranks, ends="allow")


def test_what_two_ranks_saved_in_four_processes_goes_on_in_one() -> None:
    given, states = [], []
    for rank in (0, 0, 1, 1):
        loader = loader_of(rank, 2)
        batches = iter(loader)
        given += [[next(batches) for _ in range(4)]]
        states.append(loader.state_dict())
        loader.close()
    alone = OfAllRanks(loader_of(0, 1))
    alone.load_state_dict({"processes": states})
    assert sorted([*given[0], *given[2], *alone]) == list(range(ITEMS))
    assert alone.state_dict() == alone.loader.state_dict()
    alone.loader.close()
