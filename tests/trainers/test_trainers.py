"""A run that is killed and resumed trains on the very batches of one that isn't, in each trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.kit import check_kill_and_resume


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_a_plain_torch_loop(tmp_path: Path, way: str) -> None:
    check_kill_and_resume("torch_run", tmp_path, way)


def test_accelerate(tmp_path: Path) -> None:
    check_kill_and_resume("accelerate_run", tmp_path)


@pytest.mark.parametrize(("sized", "die"), [(True, 14), (False, 11), (False, 12)], ids=str)
def test_lightning(tmp_path: Path, sized: bool, die: int) -> None:
    check_kill_and_resume("lightning_run", tmp_path, sized, False, die=die)


def test_lightning_with_a_plain_loader_of_no_length_loses_a_batch(tmp_path: Path) -> None:
    """What LightningLoader is for; if this fails, Lightning has changed, and it may go."""
    with pytest.raises(AssertionError):
        check_kill_and_resume("lightning_run", tmp_path, False, True)


@pytest.mark.parametrize(("sized", "accumulated", "die"), [(True, 1, 14), (True, 3, 11), (False, 1, 14)], ids=str)
def test_transformers(tmp_path: Path, sized: bool, accumulated: int, die: int) -> None:
    check_kill_and_resume("transformers_run", tmp_path, sized, accumulated, die=die)
