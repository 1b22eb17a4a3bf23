"""CHECKPOINT DIE: three epochs on a GPU, with a checkpoint every fifth step; SIGKILL in step DIE, -1: never."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl


def sample(number: int, *, rng: np.random.Generator) -> Any:
    """Return 1,024 x 64 numbers, and what is to be learned of them: their sum."""
    x = rng.normal(number / 100, 1, (1024, 64)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def main(path: str, die: int) -> None:
    torch, checkpoint = importlib.import_module("torch"), Path(path)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    samples = sl.from_items(range(80)).shuffle(seed=0).shard(4).map(sample, seed=0)
    loader = samples.merge().batch(8).transfer("cuda").loader(backend=sl.Processes(2))
    model = torch.nn.Linear(64, 1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    parts = {"loader": loader, "model": model, "optimizer": optimizer}
    if checkpoint.exists():
        for name, state in torch.load(checkpoint).items():
            parts[name].load_state_dict(state)
    for epoch in range(loader.epoch, 3):
        for step, (x, y) in enumerate(loader, loader.step):
            if epoch * 10 + step == die:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if step % 5 == 4:
                torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
    print(model.weight.tolist(), model.bias.item())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
