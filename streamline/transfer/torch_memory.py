"""torch's tensors in the host's memory, and on Apple's GPUs: nothing is pinned, nothing is copied beside the work."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from streamline.transfer.base import Mover, Target
from streamline.transfer.nested import replaced
from streamline.transfer.tensors import as_tensor

__all__ = ["TorchMemory"]

logger = logging.getLogger("streamline.transfer")


@dataclass(frozen=True)
class TorchMemory(Target):
    """A device that copies are made to when they are asked for.

    Attributes:
      device: "cpu" or "mps".
    """

    device: str

    def mover(self, depth: int) -> Mover:
        tell(self.device)
        return _Moves(self.device)


class _Moves(Mover):
    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = device

    def move(self, batch: Any) -> Any:
        return replaced(batch, self._moved)

    def _moved(self, leaf: Any, where: str) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = as_tensor(self._torch, leaf, where)
            if self._device == "cpu":
                return leaf
        return leaf.to(self._device) if isinstance(leaf, self._torch.Tensor) else leaf


@cache
def tell(device: str) -> None:
    """Say once a process what isn't done."""
    logger.info(
        'transfer("%s"): pinned memory, and copies beside the computation, are for CUDA; here a batch is %s',
        device,
        "made of tensors in place" if device == "cpu" else "copied before it is handed out, up to depth= of them ahead",
    )
