"""torch's tensors in the host's memory, and on Apple's GPUs: no pinned memory, no copies in the background."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from streamline.core.tree import replaced
from streamline.transfer.base import Copies, Mover, Target
from streamline.transfer.tensors import as_tensor, is_plain

logger = logging.getLogger("streamline.transfer")


@dataclass(frozen=True)
class TorchMemory(Target):
    """A device with synchronous copies.

    Attributes:
      device: "cpu" or "mps".
    """

    device: str

    def mover(self, depth: int) -> Mover:
        _log_once(self.device)
        return _Moves(self.device)


class _Moves(Mover):
    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._copies = Copies()
        self.tells = self._copies.details

    def move(self, batch: Any) -> Any:
        return replaced(batch, self._moved)

    def _moved(self, leaf: Any, where: str) -> Any:
        if isinstance(leaf, np.ndarray):
            tensor, copied = as_tensor(self._torch, leaf, where), not is_plain(leaf)
        elif isinstance(leaf, self._torch.Tensor):
            tensor, copied = leaf, False
        else:
            return leaf
        there = tensor if tensor.device.type == self._device else tensor.to(self._device)
        if copied or there is not tensor:
            self._copies.copied_bytes += leaf.nbytes
        return there


@cache
def _log_once(device: str) -> None:
    """Log once a process what this device doesn't do."""
    logger.info(
        'transfer("%s"): pinned memory, and copies beside the computation, are for CUDA; here a batch is %s',
        device,
        "made of tensors in place" if device == "cpu" else "copied before it is handed out, up to depth= of them ahead",
    )
