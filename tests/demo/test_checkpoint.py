from pathlib import Path

import numpy as np
import pytest

from streamline.demo import checkpoint
from streamline.demo.checkpoint import Delivered
from streamline.demo.model import ByteModel


class FakeSnapshot:
    def __init__(self, text: str) -> None:
        self.text = text

    def save(self, path: Path, /) -> None:
        path.write_text(self.text)


class CrashError(Exception):
    pass


class CrashingSnapshot:
    """Dies between the model's file and the pointer, as a SIGKILL may."""

    def save(self, path: Path, /) -> None:
        path.write_text("half of a snap")
        raise CrashError


@pytest.fixture
def model() -> ByteModel:
    return ByteModel(context=2, embedding=2, hidden=2)


def trained(model: ByteModel) -> str:
    model.step(np.zeros((1, 64), np.uint8))
    return model.digest()


def test_a_run_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "never-made") is None


def test_the_last_checkpoint_is_loaded_and_the_one_before_is_gone(tmp_path: Path, model: ByteModel) -> None:
    checkpoint.save(tmp_path, Delivered(1, 32, "aa"), model, FakeSnapshot("first"))
    digest = trained(model)
    checkpoint.save(tmp_path, Delivered(2, 64, "bb"), model, FakeSnapshot("second"))
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded.delivered == Delivered(2, 64, "bb")
    assert loaded.snapshot.read_text() == "second"
    model.load(loaded.model)
    assert model.digest() == digest
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]


def test_a_crash_while_saving_leaves_the_checkpoint_before(tmp_path: Path, model: ByteModel) -> None:
    digest = model.digest()
    checkpoint.save(tmp_path, Delivered(1, 32, "aa"), model, FakeSnapshot("first"))
    trained(model)
    with pytest.raises(CrashError):
        checkpoint.save(tmp_path, Delivered(2, 64, "bb"), model, CrashingSnapshot())
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert (loaded.delivered.steps, loaded.snapshot.read_text()) == (1, "first")
    model.load(loaded.model)
    assert model.digest() == digest


def test_a_resumed_run_saves_over_what_a_crash_left(tmp_path: Path, model: ByteModel) -> None:
    with pytest.raises(CrashError):
        checkpoint.save(tmp_path, Delivered(2, 64, "bb"), model, CrashingSnapshot())
    assert checkpoint.load(tmp_path) is None
    checkpoint.save(tmp_path, Delivered(2, 64, "bb"), model, FakeSnapshot("whole"))
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded.snapshot.read_text() == "whole"
