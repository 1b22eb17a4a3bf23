"""Torch: a student learns from a teacher's activations, in a cache that is made anew, and is killed inside a cycle.

Its rows are drawn again, so the student ends bit for bit as if never killed. Of a teacher that has moved on they can't
be: see `examples/regenerating_cache.py`."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import streamline as sl

TOKENS, WIDTH, STEPS = 32, 16, 80


class Teacher:  # hidden states of 12 tokens of each text
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.embedding, self.weights = (torch.randn(size, WIDTH, generator=made) for size in (TOKENS, WIDTH))

    def __call__(self, text: int, *, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(torch.tanh((self.embedding[rng.permutation(TOKENS)[:12]] + text / 50) @ self.weights))


def train(checkpoint: Path, die_at: int) -> None:
    torch.manual_seed(0)
    rows = sl.from_items(range(200)).shard(2, mode="contiguous").repeat().map(Teacher(), name="teacher", seed=0)
    loader = rows.regenerate(1024, block=64, reuse=2).transfer("cpu").loader()
    student = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    parts = {"loader": loader, "student": student, "optimizer": optimizer}
    if checkpoint.exists():
        for name, state in torch.load(checkpoint).items():
            parts[name].load_state_dict(state)
        print(f"from step {loader.step}: ", end="")
    for step, hidden in zip(range(loader.step, STEPS), loader, strict=False):
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (student(hidden) - hidden.relu()).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    print(f"loss {loss.item():.9f}, sum of weights {student.weight.sum():.9f}")


if sys.argv[1:]:
    train(Path(sys.argv[1]), int(sys.argv[2]))
else:
    with tempfile.TemporaryDirectory() as folder:
        for title, name, die_at in (("unbroken", "a", -1), ("killed", "b", 57), ("again", "b", -1)):
            command = [sys.executable, __file__, f"{folder}/{name}.pt", str(die_at)]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            print(f"{title}: exit code {ended.returncode}\n{ended.stdout}", end="")
