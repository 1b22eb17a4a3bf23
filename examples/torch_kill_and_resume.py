"""Torch: a training program is killed with SIGKILL inside an epoch, started again, and ends as if never killed.

Run it as it is: it starts itself three times, in processes. Needs torch (`pip install 'streamline-data[torch]'`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import streamline as sl


def sample(number: int, *, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a point with noise, and what is to be learned of it: y = 3 x + 1."""
    x = torch.tensor([number / 500 - 1 + rng.normal(0, 0.01)], dtype=torch.float32)
    return x, 3 * x + 1


def train(checkpoint: Path, die_at: int) -> None:
    torch.manual_seed(0)
    pipe = sl.from_items(range(1000)).shuffle(seed=0).shard(4).map(sample, seed=0).merge().batch(20)
    loader, model = pipe.loader(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    parts = {"loader": loader, "model": model, "optimizer": optimizer}
    if checkpoint.exists():
        for name, state in torch.load(checkpoint).items():
            parts[name].load_state_dict(state)
        print(f"going on in epoch {loader.epoch}, after step {loader.step} of {len(loader)}")
    for epoch in range(loader.epoch, 3):
        for step, (x, y) in enumerate(loader, loader.step):
            if epoch * 50 + step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
    print(f"y = {model.weight.item():.9f} x + {model.bias.item():.9f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for title, name, die_at in (("unbroken", "a", -1), ("killed", "b", 77), ("again", "b", -1)):
            command = [sys.executable, __file__, f"{folder}/{name}.pt", str(die_at)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            print(f"{title}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}", end="")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else train(Path(sys.argv[1]), int(sys.argv[2]))
