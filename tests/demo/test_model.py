from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamline.demo.model import ByteModel, scatter


def text_batches(count: int, rows: int = 32, length: int = 256) -> list[NDArray[np.uint8]]:
    """Batches of a text with some structure: a loss can fall on it."""
    text = np.frombuffer(b"for item in items: yield stage(item, state); " * 200, np.uint8)
    rng = np.random.default_rng(1)
    starts = rng.integers(0, len(text) - length, size=(count, rows))
    return [np.stack([text[start : start + length] for start in batch]) for batch in starts]


def test_its_gradient_is_that_of_finite_differences() -> None:
    model = ByteModel(context=3, embedding=4, hidden=5, dtype=np.float64)
    rng = np.random.default_rng(2)
    model.weights[:] = rng.normal(0.0, 0.5, model.weights.shape)
    contexts = rng.integers(0, 256, (20, 3)).astype(np.uint8)
    contexts[:, 1] = contexts[:, 0]  # a byte that stands twice in a context adds up
    targets = rng.integers(0, 256, 20).astype(np.uint8)
    model.loss_and_gradient(contexts, targets)
    gradient = model.gradient.copy()

    touched = np.flatnonzero(gradient)
    around = 1e-6
    for index in rng.choice(touched, 200, replace=False):
        weight = model.weights[index]
        model.weights[index] = weight + around
        above = model.loss_and_gradient(contexts, targets)
        model.weights[index] = weight - around
        below = model.loss_and_gradient(contexts, targets)
        model.weights[index] = weight
        assert gradient[index] == pytest.approx((above - below) / (2 * around), rel=1e-4, abs=1e-8)


def test_it_starts_at_the_uniform_guess_and_its_loss_falls() -> None:
    model = ByteModel()
    losses = [model.step(batch) for batch in text_batches(60)]
    assert losses[0] == pytest.approx(np.log(256), abs=0.05)
    assert losses[-1] < 1.0


def test_equal_seeds_and_batches_give_equal_weights_to_the_bit() -> None:
    models = ByteModel(seed=3), ByteModel(seed=3), ByteModel(seed=4)
    losses = [[model.step(batch) for batch in text_batches(10)] for model in models]
    assert losses[0] == losses[1] != losses[2]
    assert models[0].digest() == models[1].digest() != models[2].digest()


@pytest.mark.parametrize("saved_at", [0, 1, 7])
def test_a_loaded_model_goes_on_as_the_saved_one_would_have(tmp_path: Path, saved_at: int) -> None:
    batches = text_batches(10)
    model = ByteModel()
    for batch in batches[:saved_at]:
        model.step(batch)
    model.save(tmp_path / "model.npz")
    loaded = ByteModel(seed=99)
    loaded.load(tmp_path / "model.npz")
    assert loaded.digest() == model.digest()
    for batch in batches[saved_at:]:
        assert loaded.step(batch) == model.step(batch)
    assert loaded.digest() == model.digest()


def test_the_last_batch_may_be_smaller() -> None:
    model = ByteModel()
    [batch] = text_batches(1)
    assert np.isfinite(model.step(batch[:1]))


def test_every_byte_behind_a_context_is_predicted_once_in_stride_steps() -> None:
    model = ByteModel(context=4, stride=16)
    batch = np.arange(2 * 100, dtype=np.uint8).reshape(2, 100)
    predicted: list[int] = []
    for model.steps in range(16):
        contexts, targets = model.examples(batch)
        assert (contexts[:, -1] + 1 == targets).all()
        predicted += targets.tolist()
    assert sorted(predicted) == sorted(batch[:, 4:].ravel().tolist())


def test_scatter_adds_what_stands_at_one_index() -> None:
    rng = np.random.default_rng(5)
    indices = rng.integers(0, 7, (30, 2)).astype(np.uint8)
    rows = rng.normal(size=(60, 3))
    expected = np.zeros((8, 3))
    np.add.at(expected, indices.ravel(), rows)
    target = np.ones((8, 3))
    scatter(target, indices, rows)
    np.testing.assert_allclose(target, expected)
