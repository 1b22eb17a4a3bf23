"""A small byte-level language model in NumPy: enough of a model to watch a loss fall, and exactly repeatable.

Bengio et al., "A Neural Probabilistic Language Model" (2003), over bytes: the embeddings of the last `context` bytes,
side by side, a tanh layer, a softmax over the next byte; trained by Adam (Kingma and Ba, 2015).
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

VOCABULARY = 256
ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


class ByteModel:
    """The model with its optimiser; the same seed and the same batches give the same weights, bit for bit.

    Args:
      seed: of the initial weights.
      context: bytes that the next one is predicted from.
      embedding: numbers a byte becomes.
      hidden: width of the tanh layer.
      learning_rate: Adam's.
      stride: one byte in `stride` of each row is predicted, another one at each step, so that a step costs what a
        small model's should while whole records are read.
      dtype: float32; float64 lets a test compare gradients with finite differences.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        context: int = 12,
        embedding: int = 16,
        hidden: int = 128,
        learning_rate: float = 6e-3,
        stride: int = 16,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.context, self.stride, self.learning_rate = context, stride, learning_rate
        self.steps = 0
        self._shapes = {
            "embedding": (VOCABULARY, embedding),
            "hidden": (context * embedding, hidden),
            "hidden_bias": (hidden,),
            "output": (hidden, VOCABULARY),
            "output_bias": (VOCABULARY,),
        }
        # One vector for all weights: the optimiser, the digest and the file need not know the layers.
        size = sum(math.prod(shape) for shape in self._shapes.values())
        self.weights: Floats = np.zeros(size, dtype)
        self.gradient: Floats = np.zeros(size, dtype)
        self._mean: Floats = np.zeros(size, dtype)
        self._square: Floats = np.zeros(size, dtype)
        self._layers = self._views(self.weights)
        self._slopes = self._views(self.gradient)
        self._draw(np.random.default_rng(seed))

    def step(self, batch: Bytes) -> float:
        """Learn from a batch of shape [rows, length], any number of rows; return its mean loss in nats a byte."""
        loss = self.loss_and_gradient(*self.examples(batch))
        self.steps += 1
        self._adam()
        return loss

    def examples(self, batch: Bytes) -> tuple[Bytes, Bytes]:
        """Return contexts [examples, context] and the bytes that follow them [examples]."""
        length = self.context + 1
        windows = np.lib.stride_tricks.sliding_window_view(batch, length, axis=1)
        # 7 has no factor in common with a stride that is a power of two: `stride` steps visit every offset once.
        chosen = windows[:, self.steps * 7 % self.stride :: self.stride].reshape(-1, length)
        return chosen[:, :-1], chosen[:, -1]

    def loss_and_gradient(self, contexts: Bytes, targets: Bytes) -> float:
        """Return the mean loss and leave its gradient in `gradient`."""
        layer, slope = self._layers, self._slopes
        count = len(targets)
        inputs = layer["embedding"][contexts].reshape(count, -1)
        hidden = np.tanh(inputs @ layer["hidden"] + layer["hidden_bias"])
        logits = hidden @ layer["output"] + layer["output_bias"]
        logits -= logits.max(axis=1, keepdims=True)
        rows = np.arange(count)
        hit = logits[rows, targets].copy()
        odds = np.exp(logits, out=logits)
        total = odds.sum(axis=1, keepdims=True)
        loss = float(np.mean(np.log(total[:, 0]) - hit))

        error = np.divide(odds, total * count, out=odds)
        error[rows, targets] -= 1 / count
        slope["output"][:] = hidden.T @ error
        slope["output_bias"][:] = error.sum(axis=0)
        hidden_error = (error @ layer["output"].T) * (1 - hidden * hidden)
        slope["hidden"][:] = inputs.T @ hidden_error
        slope["hidden_bias"][:] = hidden_error.sum(axis=0)
        scatter(slope["embedding"], contexts, hidden_error @ layer["hidden"].T)
        return loss

    def digest(self) -> str:
        """Return the SHA-256 of all that the next step depends on."""
        state = hashlib.sha256(str(self.steps).encode())
        for part in (self.weights, self._mean, self._square):
            state.update(part.tobytes())
        return state.hexdigest()

    def save(self, path: Path) -> None:
        """Write weights and optimiser to an .npz file."""
        np.savez(path, steps=np.int64(self.steps), weights=self.weights, mean=self._mean, square=self._square)

    def load(self, path: Path) -> None:
        """Read what `save` wrote, into a model of the same shape."""
        with np.load(path, allow_pickle=False) as saved:
            self.steps = int(saved["steps"])
            # In place: the layers are views of this memory.
            self.weights[:], self._mean[:], self._square[:] = saved["weights"], saved["mean"], saved["square"]

    def _adam(self) -> None:
        first, second = ADAM_BETAS
        self._mean += (1 - first) * (self.gradient - self._mean)
        self._square += (1 - second) * (self.gradient * self.gradient - self._square)
        rate = self.learning_rate * math.sqrt(1 - second**self.steps) / (1 - first**self.steps)
        self.weights -= rate * self._mean / (np.sqrt(self._square) + ADAM_EPSILON)

    def _draw(self, rng: np.random.Generator) -> None:
        """Start near the uniform guess: a loss of ln 256 = 5.55."""
        for name, scale in (("embedding", 0.1), ("hidden", 1.0), ("output", 0.1)):
            layer = self._layers[name]
            layer[:] = rng.normal(0.0, scale / math.sqrt(len(layer) if name != "embedding" else 1), layer.shape)

    def _views(self, flat: Floats) -> dict[str, Floats]:
        views: dict[str, Floats] = {}
        start = 0
        for name, shape in self._shapes.items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views


def scatter(target: Floats, indices: Bytes, rows: Floats) -> None:
    """Set `target[i]` to the sum of all rows that stand at index i.

    Column by column with `bincount`, which is several times as fast as `np.add.at`, and adds in float64.
    """
    flat = indices.ravel()
    columns = rows.reshape(len(flat), -1).T
    for column, values in enumerate(columns):
        target[:, column] = np.bincount(flat, weights=values, minlength=len(target))
